"""Alignment on one device: nothing is copied, nothing is rebuilt, nothing of the model is replaced.

Where a second device is needed without its values, `meta` is it; models over several devices: test_alignment_layers.py.
"""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections import UserDict
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from checkpointing_models import assert_same, batch, decoder, qwen2, step
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BatchEncoding, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.training import alignment
from verl_ext_sharding.training.checkpointing import Full
from verl_ext_sharding.versions import in_range

CPU, META = torch.device("cpu"), torch.device("meta")


class Pair(NamedTuple):
    tensor: torch.Tensor
    length: int


@dataclass(frozen=True)
class Frozen:
    tensor: torch.Tensor
    note: str
    computed: int = field(init=False, default=3)


@dataclass
class Slotted:
    __slots__ = ("tensor", "unset")
    tensor: torch.Tensor


class MyList(list):
    """A list with something of its own."""


def my_list(*items):
    made = MyList(items)
    made.note = "kept"
    return made


def values():
    """A value of each kind, with one tensor in it, and how to read that tensor."""
    tensor = torch.arange(4.0)
    return {
        "tensor": (tensor, lambda v: v),
        "tuple": ((1, tensor), lambda v: v[1]),
        "list": ([tensor, None], lambda v: v[0]),
        "list subclass": (my_list(tensor), lambda v: v[0]),
        "dict": ({"a": tensor, "b": "text"}, lambda v: v["a"]),
        "named tuple": (Pair(tensor, 4), lambda v: v.tensor),
        "sorted": (torch.return_types.sort((tensor, tensor)), lambda v: v.values),
        "frozen dataclass": (Frozen(tensor, "text"), lambda v: v.tensor),
        "dataclass with slots": (Slotted(tensor), lambda v: v.tensor),
        "user dict": (UserDict(a=tensor), lambda v: v["a"]),
        "batch encoding": (BatchEncoding({"input_ids": tensor}), lambda v: v["input_ids"]),
        "model output": (CausalLMOutputWithPast(logits=tensor), lambda v: v.logits),
        "nested": ({"a": [(Pair(tensor, 4), Frozen([tensor], "text"))]}, lambda v: v["a"][0][1].tensor[0]),
    }


KINDS = list(values())


class Copies(TorchDispatchMode):
    """Counts copies from device to device."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


class Recorder(nn.Module):
    """Without weights: keeps what its forward is given, and returns it."""

    def __init__(self, fails=False):
        super().__init__()
        self.fails = fails

    def forward(self, *args, **kwargs):
        self.given = weakref.ref(args[0]) if self.fails else (args, kwargs)
        if self.fails:
            raise ValueError("of the model")
        return args[0] if args else kwargs


def hooks(model):
    return sum(len(one._forward_pre_hooks) + len(one._forward_hooks) for one in model.modules())


# What is moved


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_in_its_place_stays_the_same_object(kind):
    value, _ = values()[kind]
    assert alignment.moved(value, CPU) is value


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_in_any_container_is_moved_and_the_original_is_left_alone(kind):
    value, read = values()[kind]
    result = alignment.moved(value, META)
    assert type(result) is type(value)
    assert read(result).device == META
    assert read(value).device == CPU


def test_a_rebuilt_container_keeps_everything_else_of_the_original():
    frozen, _ = values()["frozen dataclass"]
    moved = alignment.moved(frozen, META)
    assert (moved.note, moved.computed) == ("text", 3)
    assert alignment.moved(my_list(torch.ones(1)), META).note == "kept"
    output = alignment.moved(CausalLMOutputWithPast(loss=torch.ones(()), logits=torch.ones(2)), META)
    assert output["logits"] is output.logits
    assert list(output) == ["loss", "logits"]


def test_parts_in_their_place_stay_the_same_objects_beside_moved_ones():
    stays, moves = [torch.ones(2, device=META)], torch.ones(2)
    result = alignment.moved({"a": stays, "b": moves}, META)
    assert result["a"] is stays
    assert result["b"].device == META


def test_a_kv_cache_is_left_alone():
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    assert alignment.moved({"past_key_values": cache}, META)["past_key_values"] is cache
    assert cache.layers[0].keys.device == CPU


def test_nested_tensors_are_moved_whole():
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert alignment.moved((jagged,), CPU)[0] is jagged
    moved = alignment.moved((jagged,), META)[0]
    assert (moved.device, moved.is_nested, moved.layout) == (META, True, torch.jagged)


def test_copies_wait_only_on_their_way_to_the_host():
    asked = []

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda:1")

        def to(self, device, non_blocking=False):
            asked.append((device.type, non_blocking))
            return self

    tensor = torch.ones(2).as_subclass(Elsewhere)
    alignment.moved(tensor, CPU)
    alignment.moved(tensor, META)
    assert asked == [("cpu", False), ("meta", True)]


# A model on one device


def test_a_model_on_one_device_is_hooked_at_its_root_alone():
    model = qwen2(2)
    made = alignment.apply(model)
    assert made == alignment.Alignment(CPU, None, ("",))
    assert hooks(model) == 2


def test_nothing_is_copied_and_results_are_the_same_where_everything_is_in_place():
    model = qwen2(2)
    with Copies() as stock:
        reference = step(model, batch(), use_cache=False)
    alignment.apply(model, output_device="cpu")
    with Copies() as aligned:
        result = step(model, batch(), use_cache=False)
    assert_same(reference, result)
    assert aligned.number == stock.number


def test_inputs_and_outputs_in_their_place_pass_as_the_same_objects():
    model, value = Recorder(), {"a": [torch.ones(2)]}
    alignment.apply(model, input_device="cpu", output_device="cpu:0")
    assert model(value, key=value) is value
    args, kwargs = model.given
    assert args[0] is value
    assert kwargs["key"] is value


def test_inputs_go_to_the_input_device_and_outputs_to_the_output_device():
    model = Recorder()
    made = alignment.apply(model, input_device="meta", output_device="meta")
    assert (made.input_device, made.output_device) == (META, META)
    output = model(inputs={"a": (torch.ones(2),)})
    assert model.given[1]["inputs"]["a"][0].device == META
    assert output["inputs"]["a"][0].device == META


def test_a_declared_input_device_counts_more_than_where_weights_and_buffers_lie():
    class Offloaded(Recorder):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("frequencies", torch.ones(2), persistent=False)

    model = Offloaded()
    buffer = model.frequencies
    assert alignment.apply(model, input_device=META).boundaries == ("",)
    assert model(torch.ones(2)).device == META
    assert model.frequencies is buffer


# One copy for all who are given the same tensor


def test_a_tensor_given_twice_is_copied_once_unless_it_needs_a_gradient():
    model, tensor, trained = Recorder(), torch.ones(2), torch.ones(2, requires_grad=True)
    alignment.apply(model, input_device="meta")
    with Copies() as copies:
        model(tensor, [tensor], trained, same=tensor, also=trained)
    args, kwargs = model.given
    assert args[0] is args[1][0] is kwargs["same"]
    assert args[2] is not kwargs["also"]
    assert copies.number == 3


def test_the_next_forward_copies_anew():
    model, tensor = Recorder(), torch.ones(2)
    alignment.apply(model, input_device="meta")
    model(tensor)
    first = model.given[0][0]
    model(tensor)
    assert model.given[0][0] is not first


def test_a_tensor_that_was_written_to_is_copied_again():
    copies, tensor = alignment._SharedCopies(), torch.ones(2)
    copies.open()
    first = copies(tensor, META)
    assert copies(tensor, META) is first
    tensor.add_(1)
    assert copies(tensor, META) is not first


def test_a_copy_goes_with_its_original():
    copies, tensor = alignment._SharedCopies(), torch.ones(2)
    copies.open()
    made = weakref.ref(copies(tensor, META))
    assert made() is not None
    del tensor
    assert made() is None


def test_inference_tensors_are_copied_each_time():
    copies = alignment._SharedCopies()
    copies.open()
    with torch.inference_mode():
        tensor = torch.ones(2)
        assert copies(tensor, META) is not copies(tensor, META)
    assert copies(tensor, META) is not copies(tensor, META)
    outside = torch.ones(2)
    with torch.inference_mode():
        copies(outside, META)
    assert not copies(outside, META).is_inference()


@pytest.mark.parametrize("fails", [True, False])
def test_no_copy_is_kept_after_the_forward_even_after_an_exception(fails):
    model, tensor = Recorder(fails=fails), torch.ones(2)
    alignment.apply(model, input_device="meta")
    if fails:
        with pytest.raises(ValueError, match="of the model"):
            model(tensor)
    else:
        model(tensor)
        model.given = weakref.ref(model.given[0][0])
    gc.collect()
    assert model.given() is None


# Applied and removed


def test_applied_again_it_does_nothing_and_with_other_arguments_it_is_applied_anew():
    model = qwen2(2)
    first = alignment.apply(model)
    keys = list(model._forward_pre_hooks)
    assert alignment.apply(model) is first
    assert list(model._forward_pre_hooks) == keys
    other = alignment.apply(model, output_device="cpu")
    assert alignment.applied(model) is other
    assert other.output_device == CPU
    assert hooks(model) == 2


def test_after_removal_the_model_is_as_before_and_hooks_of_others_are_left():
    model = qwen2(2)
    before = [dict(module.__dict__) for module in model.modules()]
    other = model.register_forward_pre_hook(lambda module, args: None)
    alignment.apply(model)
    alignment.remove(model)
    alignment.remove(model)
    assert alignment.applied(model) is None
    assert list(model._forward_pre_hooks) == [other.id]
    other.remove()
    assert hooks(model) == 0
    assert not model._forward_pre_hooks_with_kwargs
    assert not model._forward_hooks_always_called
    for module, attributes in zip(model.modules(), before, strict=True):
        assert module.__dict__.keys() == attributes.keys()


def test_names_and_signatures_and_forwards_are_the_models_own():
    model = qwen2(2)
    signature, names = inspect.signature(model.forward), list(model.state_dict())
    alignment.apply(model)
    assert inspect.signature(model.forward) == signature
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert type(model).__call__ is nn.Module.__call__
    assert list(model.state_dict()) == names


def test_an_alignment_is_found_and_removed_through_a_wrapper():
    model = qwen2(2)
    inner = alignment.apply(model)
    wrapper = nn.ModuleDict({"module": model})
    assert alignment.applied(wrapper) is inner
    alignment.remove(wrapper)
    assert hooks(model) == 0


def test_copied_and_pickled_models_carry_alignments_of_their_own():
    model = Recorder()
    alignment.apply(model, input_device="meta")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        alignment.remove(twin)
        assert twin(torch.ones(2)).device == CPU
    assert model(torch.ones(2)).device == META


# What it is used with


@pytest.mark.parametrize("how", ["by transformers", "by us"])
def test_checkpointing_gives_the_same_gradients(how):
    model = qwen2(2)
    reference = step(model, batch(), use_cache=False)
    for layer in decoder(model):  # as on several devices
        alignment.apply(layer)
    alignment.apply(model.model)
    if how == "by us":
        Full().apply(model)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same(reference, step(model, batch(), use_cache=False))


@pytest.mark.parametrize("how", ["module", "forward", "model"])
def test_hooked_layers_compile_into_as_few_graphs_as_plain_ones(how):
    model, counter, frames = qwen2(4), CompileCounter(), []
    for layer in decoder(model):
        alignment.apply(layer)
    alignment.apply(model.model)
    reference = step(model, batch(), use_cache=False)
    torch._dynamo.reset()
    counters.clear()
    if how == "model":
        model.compile(backend=counter)
    for layer in decoder(model) if how != "model" else ():
        if how == "module":
            layer.compile(backend=counter)
        else:
            layer.forward = torch.compile(layer.forward, backend=counter)
    for _ in range(3):
        assert_same(reference, step(model, batch(), use_cache=False), atol=1e-6)
        frames.append(counter.frame_count)
    assert frames == [1, 1, 1]
    assert sum(counters["graph_break"].values()) == 0


@pytest.mark.parametrize("kind", ["tensor", "tuple", "list", "dict", "named tuple", "frozen dataclass", "model output"])
def test_a_compiled_graph_holds_the_copies(kind):
    class Doubled(nn.Module):
        def forward(self, *, value):
            return read(value) * 2

    if kind in ("frozen dataclass", "model output") and not in_range(torch.__version__, ">=2.13"):
        pytest.skip("older compilers do not trace copy.copy, and cut the graph there")
    value, read = values()[kind]
    model = Doubled()
    alignment.apply(model, input_device="meta")
    torch._dynamo.reset()
    model.compile(backend="eager", fullgraph=True)
    assert model(value=value).device == META


def test_a_compiled_layer_copies_in_its_graph_while_the_root_runs_uncompiled():
    copies, tensor = alignment._SharedCopies(), torch.ones(2)
    copies.open()
    assert torch.compile(copies, backend="eager", fullgraph=True)(tensor, META).device == META
    assert copies._made is not None
    assert len(copies._made) == 0


def test_lora_is_aligned_at_its_root():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(qwen2(2), lora)
    reference = step(model, batch(), use_cache=False)
    assert alignment.apply(model).boundaries == ("",)
    assert_same(reference, step(model, batch(), use_cache=False))


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.usefixtures("one_rank")
def test_an_fsdp2_model_is_aligned_at_its_root(offload):
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    results = []
    for aligned in (False, True):
        model = qwen2(2)
        for layer in decoder(model):
            fully_shard(layer, **options)
        fully_shard(model, **options)
        if aligned:
            made = alignment.apply(model, input_device="cpu" if offload else None)
            assert made == alignment.Alignment(CPU, None, ("",))
        loss, grads = step(model, batch(), use_cache=False)
        results.append((loss, {name: grad.full_tensor() for name, grad in grads.items()}))
    assert_same(*results)


# What is refused


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.rotary_emb.inv_freq"])
def test_weights_and_buffers_without_values_are_refused_by_name(name):
    model = qwen2(2)
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    tensors = module._parameters if attribute in module._parameters else module._buffers
    tensors[attribute] = copy.deepcopy(tensors[attribute]).to("meta")
    with pytest.raises(ConfigError) as error:
        alignment.apply(model)
    assert name in str(error.value)
    assert alignment.applied(model) is None
    assert hooks(model) == 0


def test_a_model_without_weights_needs_a_device():
    with pytest.raises(ConfigError, match="input_device"):
        alignment.apply(Recorder())
