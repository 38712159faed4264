"""Which attention a role gets, and why: decided from facts alone."""

from __future__ import annotations

import pytest
import torch
from attention_cases import tiny_model
from transformers import (
    AttentionInterface,
    AutoModelForTokenClassification,
    FalconConfig,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen2VLConfig,
)
from transformers.masking_utils import AttentionMaskInterface

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.training import attention
from verl_ext_sharding.training.attention import AttentionChoice, ModelSupport, model_support, resolve_attention

HOPPER = {
    "use_remove_padding": True,
    "device_capability": (9, 0),
    "flash_attn_importable": True,
    "torch_version": "2.11.0+cu130",
    "model_supports": ModelSupport(),
    "dtype": torch.bfloat16,
}


def resolve(requested, **changes):
    return resolve_attention(requested, **{**HOPPER, **changes})


def test_auto_takes_flash_attn_where_it_imports():
    assert resolve("auto").name == "flash_attention_2"


def test_auto_takes_torchs_kernel_where_flash_attn_is_missing_and_says_so():
    choice = resolve("auto", flash_attn_importable=False)
    assert choice.name == "varlen"
    assert "flash-attn can't be imported" in choice.reason


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device_capability": None}, "needs a CUDA device"),
        ({"device_capability": (7, 5)}, "before Ampere"),
        ({"dtype": torch.float32}, "not float32"),
        ({"torch_version": "2.9.1"}, "older than 2.10"),
        ({"model_supports": ModelSupport(why_not={"varlen": "its heads are too wide"})}, "too wide"),
    ],
)
def test_auto_falls_back_to_sdpa_with_packed_sequences_kept_apart_and_says_why(changes, why):
    choice = resolve("auto", **{"flash_attn_importable": False, **changes})
    assert choice.name == "sdpa_packed"
    assert why in choice.reason


def test_sdpa_without_remove_padding_is_transformers_own():
    assert resolve("sdpa", use_remove_padding=False).name == "sdpa"


def test_sdpa_of_a_model_that_groups_cannot_serve_is_transformers_own():
    choice = resolve("sdpa", model_supports=ModelSupport(why_not={"sdpa_packed": "it is for text models"}))
    assert choice.name == "sdpa"
    assert "square mask" in choice.reason


@pytest.mark.parametrize("requested", ["flash_attention_2", "varlen", "sdpa", "eager"])
def test_what_was_asked_for_and_can_run_is_taken(requested):
    assert resolve(requested).name in (requested, requested + "_packed")


@pytest.mark.parametrize(
    ("requested", "changes", "found", "remedy"),
    [
        ("varlen", {"device_capability": (7, 5)}, "compute capability 7.5 is before Ampere", "=sdpa"),
        ("flash_attention_2", {"device_capability": (7, 5)}, "before Ampere", "=sdpa"),
        ("varlen", {"dtype": torch.float32}, "not float32", "=sdpa"),
        ("flash_attention_2", {"flash_attn_importable": False}, "can't be imported", "=varlen"),
        ("varlen", {"torch_version": "2.8.0"}, "torch 2.8.0 is older than 2.10", "=flash_attention_2"),
        ("varlen", {"ulysses_size": 2}, "ulysses_sequence_parallel_size=2", "=flash_attention_2"),
        ("sdpa", {"ulysses_size": 2}, "ulysses_sequence_parallel_size=2", "=flash_attention_2"),
        ("sdpa", {"model_supports": ModelSupport(why_not={"packed": "no position_ids"})}, "no position_ids", "=flash"),
        ("flash", {}, "flash", "attn_implementation="),
    ],
)
def test_what_cannot_run_is_an_error_that_names_what_can(requested, changes, found, remedy):
    with pytest.raises(ConfigError) as caught:
        resolve(requested, **changes)
    assert found in caught.value.found
    assert remedy in caught.value.remedy


def test_an_error_speaks_only_of_what_was_asked_for():
    with pytest.raises(ConfigError) as caught:
        resolve("varlen", dtype=torch.float32, flash_attn_importable=False)
    assert "flash-attn" not in caught.value.found


def test_auto_without_anything_that_keeps_samples_apart_is_an_error_that_ends_in_an_override():
    support = ModelSupport(why_not={"packed": "no position_ids", "flash_attention_2": "none"})
    with pytest.raises(ConfigError, match=r"critic\.model\.use_remove_padding=False"):
        resolve("auto", model_supports=support, role="critic")


def test_auto_with_ulysses_and_no_flash_attn_is_an_error():
    with pytest.raises(ConfigError, match="install flash-attn"):
        resolve("auto", ulysses_size=2, flash_attn_importable=False)


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        (Qwen2Config(), set()),
        (LlamaConfig(), set()),
        (LlamaConfig(attention_dropout=0.1), {"varlen"}),
        (LlamaConfig(head_dim=512), {"varlen"}),
        (Gemma2Config(), {"sdpa", "varlen"}),
        (GptOssConfig(), {"sdpa", "varlen"}),
        (FalconConfig(), {"packed"}),
        (Qwen2VLConfig(), {"varlen", "sdpa_packed", "packed"}),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_models_config_and_source_say_what_it_cannot_run(config, refused):
    assert refused <= set(model_support(config).why_not)
    if not refused:
        assert not model_support(config).why_not


def test_a_choice_on_a_model_can_be_taken_back():
    model = tiny_model("qwen2", "eager")
    before = dict(model.__dict__)
    for _ in range(2):
        attention.apply(model, AttentionChoice(name="sdpa_packed", reason="test"))
    assert model.config._attn_implementation == "sdpa_packed"
    for _ in range(2):
        attention.remove(model)
    assert model.config._attn_implementation == "eager"
    assert model.__dict__ == before


def test_a_choice_in_a_config_reaches_a_critic_that_is_loaded_from_it(tmp_path):
    tiny_model("qwen2", "eager").save_pretrained(tmp_path)
    config = Qwen2Config.from_pretrained(tmp_path, num_labels=1)
    attention.set_attention(config, AttentionChoice(name="varlen", reason="test"))
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path, config=config)
    assert {layer.self_attn.config._attn_implementation for layer in critic.model.layers} == {"varlen"}


def test_names_can_be_taken_out_of_transformers_again():
    attention.unregister()
    before = [dict(interface._global_mapping) for interface in (AttentionInterface, AttentionMaskInterface)]
    attention.register()
    attention.register()
    assert "varlen" in AttentionInterface._global_mapping
    attention.unregister()
    attention.unregister()
    assert [dict(interface._global_mapping) for interface in (AttentionInterface, AttentionMaskInterface)] == before
