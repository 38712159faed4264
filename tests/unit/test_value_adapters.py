"""A critic with LoRA: adapters in the layers, and a head that is trained whole and saved under its own name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

import torch
from merged_on_ranks import adapted
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Qwen2Config, Qwen2ForTokenClassification, Qwen2Model
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from verl_ext_sharding.engines.value_adapters import ValueAdaptersMixin
from verl_ext_sharding.errors import ConfigError

IDS = torch.arange(12)[None]


class Engine(ValueAdaptersMixin, FSDPEngine):
    pass


def critic(kind=Qwen2ForTokenClassification, dtype=torch.float32):
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return kind(Qwen2Config(**sizes, **heads, num_labels=1)).to(dtype).eval()


def built(module, role="critic", **model):
    engine = object.__new__(Engine)
    engine.role = role
    given = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_adapter_path": None}
    others = dict.fromkeys(("target_parameters", "exclude_modules", "use_shm"))
    engine.model_config = SimpleNamespace(**{**given, **others, **model})
    return engine._build_lora_module(module).eval()


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_the_head_and_adapters_of_all_layers_are_trained_and_values_are_those_of_before():
    expected = critic()(IDS).logits
    model = built(critic())
    assert torch.equal(model(input_ids=IDS).logits, expected)
    names = trained(model)
    head = {name for name in names if "lora_" not in name}
    assert head == {"base_model.model.score.weight", "base_model.model.score.bias"}
    assert len(names - head) == 2 * 2 * 7
    assert not any("score" in name for name in names - head)
    model(input_ids=IDS).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_adapters_are_saved_so_that_peft_loads_them_into_the_model_with_its_head(tmp_path):
    model = built(critic())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    model.save_pretrained(tmp_path)
    base = critic()
    base.score.load_state_dict(model.get_base_model().score.state_dict())
    assert torch.equal(PeftModel.from_pretrained(base, tmp_path)(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_adapters_and_head_have_the_dtype_of_the_weights():
    assert {parameter.dtype for parameter in built(critic(dtype=torch.bfloat16)).parameters()} == {torch.bfloat16}


def test_adapters_of_a_policy_are_loaded_and_the_head_is_trained(tmp_path):
    policy = adapted(target_modules=["q_proj"])
    policy.save_pretrained(tmp_path)
    model = built(critic(), lora_adapter_path=str(tmp_path))
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.default.weight"
    assert torch.equal(model.state_dict()[name], policy.state_dict()[name])
    assert {one for one in trained(model) if "lora_" not in one} == {
        "base_model.model.score.weight",
        "base_model.model.score.bias",
    }


def test_adapters_with_a_head_of_their_own_bring_it(tmp_path):
    theirs = get_peft_model(critic(), LoraConfig(task_type="TOKEN_CLS", target_modules=["q_proj"])).eval()
    with torch.no_grad():
        theirs.get_base_model().score.modules_to_save["default"].weight.add_(1)
    theirs.save_pretrained(tmp_path)
    model = built(critic(), lora_adapter_path=str(tmp_path))
    assert torch.equal(model(input_ids=IDS).logits, theirs(input_ids=IDS).logits)
    assert any("score.modules_to_save" in name for name in trained(model))
    assert not any("score.original_module" in name for name in trained(model))


def test_a_model_without_a_head_to_train_is_refused():
    with pytest.raises(ConfigError) as caught:
        built(critic(Qwen2Model))
    assert caught.value.found == "Qwen2Model"
    assert caught.value.remedy == "critic.model.lora_rank=0"


def test_a_policy_gets_its_adapters_from_verl(monkeypatch):
    monkeypatch.setattr(FSDPEngine, "_build_lora_module", lambda self, module: module)
    module = critic()
    assert built(module, role="actor") is module
