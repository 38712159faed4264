"""Weights with adapters merged are those that PEFT would leave, and the model is bit for bit as before."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

import torch
import torch.distributed as dist
from merged_on_ranks import ADAPTERS, Q_PROJ, Sharded, adapted, check_merged
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from tests import ranks
from verl_ext_sharding.engines import merged_weights as module_of_merged
from verl_ext_sharding.engines.device_map import DeviceMapEngineMixin
from verl_ext_sharding.engines.merged_weights import merge_obstacle, merged_weights
from verl_ext_sharding.errors import ConfigError


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.filterwarnings("ignore")
def test_the_weights_are_those_that_peft_leaves_and_the_model_is_as_before(options, tied):
    model = adapted(tied, **options)
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    addresses = {name: tensor.data_ptr() for name, (tensor, _) in before.items()}
    assert tied or merge_obstacle(model) is None
    found: dict[str, torch.Tensor] = {}
    for name, tensor in merged_weights(model):
        assert name not in found
        found[name] = tensor.clone()
    after = model.state_dict(keep_vars=True)
    assert after.keys() == before.keys()
    for name, (tensor, value) in before.items():
        assert after[name] is tensor
        assert tensor.data_ptr() == addresses[name]
        assert torch.equal(tensor, value)
    assert not any(getattr(module, "merged", False) for module in model.modules())
    expected = model.merge_and_unload().state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_model_that_is_left_half_way_is_as_before():
    model = adapted(**ADAPTERS["DoRA"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = merged_weights(model)
    while "q_proj" not in next(weights)[0]:
        pass
    weights.close()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.filterwarnings("ignore")
def test_adapters_that_no_weight_can_hold_are_named():
    assert "no bias" in merge_obstacle(adapted(target_modules=["o_proj"], lora_bias=True))
    prompts = get_peft_model(
        adapted(**Q_PROJ).merge_and_unload(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    assert "PROMPT_TUNING" in merge_obstacle(prompts)


TIED = {"ensure_weight_tying": True}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        Q_PROJ,
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["lm_head"]},
        {"target_modules": ["embed_tokens", "lm_head"], **TIED},
        {**Q_PROJ, "modules_to_save": ["embed_tokens"]},
        {**Q_PROJ, "modules_to_save": ["lm_head"]},
        {**Q_PROJ, "modules_to_save": ["embed_tokens", "lm_head"]},
        {**Q_PROJ, "modules_to_save": ["embed_tokens"], **TIED},
        {**Q_PROJ, "trainable_token_indices": [3, 4]},
        {**Q_PROJ, "trainable_token_indices": {"lm_head": [3]}},
    ],
    ids=str,
)
def test_tied_weights_are_merged_where_embedding_and_head_compute_with_one_and_refused_elsewhere(options):
    model, ids = adapted(tied=True, **options).eval(), torch.arange(20)[None]
    rollout = adapted(tied=True, **Q_PROJ).unload().eval()
    expected = model(input_ids=ids).logits
    sent = {name: tensor.clone() for name, tensor in merged_weights(model) if name != "lm_head.weight"}
    rollout.load_state_dict(sent, strict=False)
    agrees = torch.allclose(rollout(input_ids=ids).logits, expected, atol=1e-5)
    assert (merge_obstacle(model) is None) == agrees
    assert agrees or "ensure_weight_tying" in merge_obstacle(model)


# In the engine


def engine(model, merge=True, kind=DeviceMapEngineMixin):
    made = object.__new__(type("Engine", (kind,) if issubclass(kind, FSDPEngine) else (kind, FSDPEngine), {}))
    made.role, made.module = "actor", model
    made.model_config = SimpleNamespace(lora={"merge": merge}, hf_config=SimpleNamespace(model_type="qwen3_moe"))
    return made


def test_the_engine_sends_copies_that_the_model_does_not_change_any_more(monkeypatch):
    monkeypatch.setattr(module_of_merged, "get_device_id", lambda: torch.device("cpu"))
    model = adapted(**ADAPTERS["LoRA"])  # which PEFT merges in place
    expected = copy.deepcopy(model).merge_and_unload().state_dict()
    sent = dict(engine(model)._merged())  # all at once, as a bucket holds several
    assert sent.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(sent[name], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("role", "merge", "refused"), [("actor", True, True), ("actor", False, False), ("ref", True, False)]
)
@pytest.mark.parametrize("kind", [DeviceMapEngineMixin, Sharded])
def test_adapters_that_cannot_be_merged_stop_the_run_before_it_trains_if_they_are_to_be(
    kind, role, merge, refused, monkeypatch
):
    model = adapted(target_modules=["o_proj"], lora_bias=True)
    monkeypatch.setattr(FSDPEngine, "_build_lora_module", lambda self, module: module)
    made = engine(model, merge, kind)
    made.role = role
    if not refused:
        assert made._build_lora_module(model) is model
        return
    with pytest.raises(ConfigError) as caught:
        made._build_lora_module(model)
    assert "no bias" in caught.value.found
    assert "lora.merge=False" in caught.value.remedy


# Fused experts, and sharded models


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 8, 6))
        self.down_proj = nn.Parameter(torch.randn(2, 6, 4))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(6, 6, bias=False)
        self.mlp = nn.Module()
        self.mlp.experts = Experts()


class Sighted(nn.Module):
    """Layers that FSDP2 shards one by one, and a merger between tower and layers, which its root holds."""

    def __init__(self):
        super().__init__()
        self.merger = nn.Linear(6, 6, bias=False)
        self.layers = nn.ModuleList([Layer(), Layer()])


def sighted():
    torch.manual_seed(0)
    return get_peft_model(Sighted(), LoraConfig(r=2, target_modules=["q_proj", "merger"], init_lora_weights=False))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A process group of one rank."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def sharded(alone, monkeypatch):
    """An engine with the model sharded on the host, which sends from there."""
    monkeypatch.setattr(module_of_merged, "get_device_id", lambda: torch.device("cpu"))
    made = object.__new__(Sharded)
    made.model_config = engine(None).model_config
    made.module, made._is_offload_param = sighted(), False
    for layer in made.module.base_model.model.layers:
        fully_shard(layer)
    fully_shard(made.module)
    return made


def per_expert(state):
    """Names and tensors as checkpoints have them: one tensor an expert."""
    found = {}
    for name, tensor in state.items():
        base, fused, part = name.partition(".experts.")
        if not fused:
            found[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            parts = zip(("gate", "up"), expert.chunk(2), strict=True) if part == "gate_up_proj" else [("down", expert)]
            for kind, values in parts:
                found[f"{base}.experts.{number}.{kind}_proj.weight"] = values
    return found


@pytest.mark.parametrize("layout", ["fsdp2", "device_map"])
def test_merged_experts_and_layers_of_the_root_come_as_a_loader_takes_them(layout, sharded, monkeypatch):
    expected = per_expert(sighted().merge_and_unload().state_dict())
    if layout == "fsdp2":
        sent = sharded._merged_lora_per_tensor_param()
    else:
        monkeypatch.setattr(module_of_merged, "get_device_id", lambda: torch.device("cpu"))
        sent, _ = engine(sighted()).get_per_tensor_param()
    found = dict(sent)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].float(), tensor, rtol=1e-2, atol=1e-2)  # verl sends bfloat16


@pytest.mark.parametrize("count", [0, 1, 3, None], ids=lambda count: "all" if count is None else str(count))
def test_a_sharded_model_is_bit_for_bit_as_before_however_much_of_it_was_sent(count, sharded):
    before = {name: tensor.full_tensor().clone() for name, tensor in sharded.module.state_dict().items()}
    sent = sharded._merged_lora_per_tensor_param()
    for _ in range(count) if count is not None else iter(lambda: next(sent, None), None):
        if count is not None:
            next(sent)
    sent.close()
    for name, tensor in sharded.module.state_dict().items():
        assert torch.equal(tensor.full_tensor(), before[name]), name
    assert not any(getattr(module, "merged", False) for module in sharded.module.modules())


@pytest.mark.parametrize("wrapping", ["fsdp1", "fsdp1_orig_params", "fsdp2"])
def test_what_ranks_send_of_a_sharded_model_is_what_peft_leaves(wrapping):
    ranks.run(check_merged, wrapping)
