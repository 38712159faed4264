"""What selective checkpointing keeps stays what it was, whatever a layer does with it, and goes to the host with the rest."""

from __future__ import annotations

import pytest
import torch
from checkpointing_models import assert_same, batch, hidden_bytes, loss_of, qwen2, step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GptOssConfig, GptOssForCausalLM

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.training.checkpointing import Selective
from verl_ext_sharding.training.host_buffers import BlockingTransfer
from verl_ext_sharding.training.kept_outputs import changed_by
from verl_ext_sharding.training.offload import ActivationOffload
from verl_ext_sharding.training.recompute import Checkpointed, kept_bytes
from verl_ext_sharding.training.saved_bytes import LiveStorages

OFFLOAD = ActivationOffload(min_bytes=0)
WIDTH = 8


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "_opname", "") in ("mm", "addmm", "bmm", "_grouped_mm")
        return func(*args, **(kwargs or {}))


class Layer(nn.Module):
    """Two matrix products; `change` is what it does in place to the first one's output.

    Args:
        change: Gets that output.
    """

    def __init__(self, change) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.change = change

    def forward(self, hidden_states):
        inner = self.up(hidden_states)
        self.change(self, inner)
        return hidden_states + self.down(inner.sin())


CHANGES = {
    "not at all": lambda layer, inner: None,
    "by a method": lambda layer, inner: inner.add_(layer.bias),
    "twice": lambda layer, inner: inner.add_(layer.bias).mul_(2.0),
    "through a view": lambda layer, inner: inner[:2].add_(layer.bias),
    "by assignment": lambda layer, inner: inner.__setitem__(0, layer.bias),
}


def run(layer, hidden):
    layer.zero_grad()
    hidden.grad = None
    layer(hidden).square().sum().backward()
    return [hidden.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("offloaded", [False, True], ids=["on the device", "on the host"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_output_that_a_layer_changes_in_place_is_kept_as_it_was(change, offloaded):
    layer, hidden = Layer(change), torch.randn(4, WIDTH, requires_grad=True)
    with Products() as products:
        expected = run(layer, hidden)
    without = products.count
    Selective().apply(layer, layers=[layer])
    if offloaded:
        OFFLOAD.apply(layer, layers=[layer])
    with Products() as products:
        found = run(layer, hidden)
    assert products.count == without
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("keep", [("attention", "matmul"), ("attention", "narrow_matmul")], ids=str)
def test_gpt_oss_whose_experts_change_their_products_in_place_has_the_gradients_that_it_has_without(experts, keep):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = GptOssConfig(**sizes, **heads, **tokens)
    config._attn_implementation = "eager"
    config._experts_implementation = experts
    model = GptOssForCausalLM(config).train()
    reference = step(model, batch(padded=0), use_cache=False)
    Selective(keep).apply(model)
    found = step(model, batch(padded=0), use_cache=False)
    # not to the bit: threads add up the gradients of gathered experts in any order
    assert_same(reference, found, rtol=1e-5, atol=1e-7)


@torch.library.custom_op("sharding_tests::attention_with_dropout", mutates_args=())
def attention_with_dropout(value: torch.Tensor, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As the fused kernels of CUDA: one operator, which draws its own random numbers. The CPU has none with dropout."""
    mask = (torch.rand_like(value) >= dropout_p).to(value.dtype)
    return value * mask, mask


attention_with_dropout.register_autograd(
    lambda ctx, grad, _: (grad * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


@pytest.mark.parametrize("offloaded", [False, True], ids=["on the device", "on the host"])
def test_dropout_after_a_kept_attention_with_dropout_draws_what_it_drew(offloaded):
    class Dropping(Layer):
        def forward(self, hidden_states):
            attended, _ = attention_with_dropout(self.up(hidden_states), 0.5)
            return hidden_states + self.down(nn.functional.dropout(attended.sin(), 0.5))

    def seeded():
        torch.manual_seed(3)
        return run(layer, hidden)

    layer, hidden = Dropping(None), torch.randn(64, WIDTH, requires_grad=True)
    expected = seeded()
    Selective().apply(layer, layers=[layer])
    if offloaded:
        OFFLOAD.apply(layer, layers=[layer])
    assert all(one is other is None or torch.equal(one, other) for one, other in zip(expected, seeded(), strict=True))


def test_a_copy_is_made_of_what_changes_alone():
    tokens = 64

    def kept_by(name):
        layer, hidden = Layer(CHANGES[name]), torch.randn(tokens, WIDTH, requires_grad=True)
        Selective().apply(layer, layers=[layer])
        with LiveStorages() as made:
            output = layer(hidden)
        del output
        return made.live_bytes().get("cpu", 0)

    one = tokens * WIDTH * 4
    unchanged, changed, twice = kept_by("not at all"), kept_by("by a method"), kept_by("twice")
    assert unchanged <= changed == twice <= unchanged + one


def test_what_changes_after_its_layer_has_run_is_an_error_and_no_wrong_gradient():
    class Both(Layer):
        def forward(self, hidden_states):
            inner = self.up(hidden_states)
            return hidden_states + self.down(inner.sin()), inner

    layer, hidden = Both(None), torch.randn(4, WIDTH, requires_grad=True)
    Selective().apply(layer, layers=[layer])
    output, inner = layer(hidden)
    inner.add_(1.0)
    with pytest.raises(ConfigError, match="gradient_checkpointing=full"):
        output.sum().backward()


def test_a_graph_can_be_run_backward_once_and_says_so():
    layer, hidden = Layer(CHANGES["not at all"]), torch.randn(4, WIDTH, requires_grad=True)
    Selective().apply(layer, layers=[layer])
    loss = layer(hidden).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()


def test_what_is_kept_is_on_the_host_between_forward_and_backward_and_the_device_holds_none_of_it():
    model, inputs = qwen2(), batch(num_tokens=64, padded=0)
    Selective().apply(model)

    def on_device(offloader=None):
        with LiveStorages() as made:
            loss = loss_of(model, inputs, use_cache=False)
        host = 0 if offloader is None else offloader.pool.in_use_bytes  # a CPU storage here as well
        return loss, made.total_bytes() - host, host

    _, kept, _ = on_device()
    loss, left, host = on_device(OFFLOAD.apply(model))
    moved = kept - left
    logits = inputs["input_ids"].numel() * 97 * 4
    assert left < 4 * logits + 4 * hidden_bytes(inputs)
    assert moved > 0.8 * kept - 4 * logits
    assert moved <= host
    loss.backward()


class Never(BlockingTransfer):
    def to_host(self, source, buffer):
        pytest.fail("something was moved")


def test_what_a_budget_measures_is_not_moved():
    layer, hidden = Layer(CHANGES["not at all"]), torch.randn(4, WIDTH, requires_grad=True)
    offloader, found = OFFLOAD.apply(layer, layers=[layer]), []
    offloader.transfer = Never()

    def measured(hidden_states):
        found.append(kept_bytes(Checkpointed(("matmul",)), type(layer).forward.__get__(layer), (hidden_states,), {}))
        return hidden_states

    offloader.run(layer, measured, (hidden,), {})
    assert found[0] >= 2 * hidden.numel() * 4


@pytest.mark.parametrize(
    ("call", "changed"),
    [
        (lambda a, b: torch.add(a, b), []),
        (lambda a, b: a.add_(b), ["a"]),
        (lambda a, b: torch.mm(a, b, out=a), ["a"]),
        (lambda a, b: torch._foreach_add_([a, b], 1.0), ["a", "b"]),
    ],
    ids=["none", "self", "out", "a list"],
)
def test_what_an_operator_writes_to_is_read_from_its_schema(call, changed):
    a, b = torch.ones(2, 2), torch.ones(2, 2)
    names, found = {id(a): "a", id(b): "b"}, []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found.extend(names[id(tensor)] for tensor in changed_by(func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Recorder():
        call(a, b)
    assert found == changed
