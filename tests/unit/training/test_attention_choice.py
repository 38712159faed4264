"""Which attention a role gets, and why: decided from facts alone."""

from __future__ import annotations

import pytest
import torch
from attention_cases import reference_kernel, tiny_model
from test_attention_varlen import kernel_2_10
from transformers import (
    AutoModelForTokenClassification,
    DeepseekV3Config,
    DogeConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GlmMoeDsaConfig,
    GPT2Config,
    GptOssConfig,
    InternVLConfig,
    LlamaConfig,
    LlavaConfig,
    Mistral3Config,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5TextConfig,
    Qwen3VLConfig,
    RwkvConfig,
)

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.training import attention
from verl_ext_sharding.training.attention import AttentionChoice, ModelSupport, model_support, resolve_attention
from verl_ext_sharding.training.varlen import VarlenKernel

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
    choice = resolve("auto")
    assert choice.name == "fa2_packed"
    assert choice.reason.startswith("flash-attn is installed")


@pytest.mark.parametrize(
    "support",
    [
        ModelSupport(why_not={"sdpa_packed": "it is for text models"}),
        ModelSupport(why_not_packed={"sdpa": "no positions"}),
    ],
)
def test_flash_attn_of_a_model_whose_masks_say_nothing_of_packing_is_transformers_own(support):
    assert resolve("flash_attention_2", model_supports=support).name == "flash_attention_2"


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
    assert resolve(requested).name in (
        requested,
        {"sdpa": "sdpa_packed", "flash_attention_2": "fa2_packed"}.get(requested),
    )


@pytest.mark.parametrize(
    ("requested", "changes", "found", "remedy"),
    [
        ("varlen", {"device_capability": (7, 5)}, "compute capability 7.5 is before Ampere", "=sdpa"),
        ("flash_attention_2", {"device_capability": (7, 5)}, "before Ampere", "=sdpa"),
        ("varlen", {"dtype": torch.float32}, "not float32", "=sdpa"),
        ("flash_attention_2", {"flash_attn_importable": False}, "can't be imported", "=varlen"),
        ("varlen", {"torch_version": "2.8.0"}, "torch 2.8.0 is older than 2.10", "=flash_attention_2"),
        ("eager", {"ulysses_size": 2}, "the tokens of one rank alone", "=flash_attention_2"),
        ("varlen", {"ulysses_size": 2, "use_remove_padding": False}, "rows must be packed", "=flash_attention_2"),
        (
            "sdpa",
            {"ulysses_size": 2, "model_supports": ModelSupport(why_not={"sdpa_packed": "it is for text models"})},
            "in groups of sequences: it is for text models",
            "=flash_attention_2",
        ),
        ("sdpa", {"model_supports": ModelSupport(why_not_packed={"sdpa": "they mix"})}, "they mix", "=flash"),
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
    support = ModelSupport(why_not_packed=dict.fromkeys(attention.REQUESTS, "they mix"))
    with pytest.raises(ConfigError) as caught:
        resolve("auto", model_supports=support, role="critic")
    assert caught.value.remedy == "use_remove_padding=False"


def test_flash_attn_is_no_remedy_for_a_model_that_cannot_run_it():
    support = ModelSupport(why_not=dict.fromkeys(("flash_attention_2", "varlen", "sdpa"), "the hub's in its place"))
    with pytest.raises(ConfigError) as caught:
        resolve("auto", model_supports=support, ulysses_size=2, flash_attn_importable=False)
    assert caught.value.remedy == "ulysses_sequence_parallel_size=1"


PACKED_NEVER = ModelSupport(
    why_not={"sdpa": "its sinks", "varlen": "its sinks", "flash_attention_2": "the hub's in its place"},
    why_not_packed={"eager": "they mix"},
)
ONLY_FLASH_PACKS = ModelSupport(
    why_not={"varlen": "too wide"}, why_not_packed={"sdpa": "they mix", "eager": "they mix"}
)


@pytest.mark.parametrize(
    ("requested", "facts", "remedy"),
    [
        (
            "sdpa",
            {"model_supports": PACKED_NEVER},
            "actor_rollout_ref.model.use_remove_padding=False sharding.roles.actor.attn_implementation=auto",
        ),
        ("auto", {"model_supports": PACKED_NEVER}, "actor_rollout_ref.model.use_remove_padding=False"),
        (
            "auto",
            {"model_supports": PACKED_NEVER, "ulysses_size": 2},
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1 actor_rollout_ref.model.use_remove_padding=False",
        ),
        (
            "auto",
            {"model_supports": ONLY_FLASH_PACKS, "flash_attn_importable": False},
            "install flash-attn, or actor_rollout_ref.model.use_remove_padding=False",
        ),
        (
            "auto",
            {"model_supports": ONLY_FLASH_PACKS, "flash_attn_importable": False, "device_capability": (7, 0)},
            "actor_rollout_ref.model.use_remove_padding=False",
        ),
        (
            "sdpa",
            {"model_supports": ONLY_FLASH_PACKS, "flash_attn_importable": False},
            "install flash-attn sharding.roles.actor.attn_implementation=auto, or"
            " actor_rollout_ref.model.use_remove_padding=False",
        ),
    ],
)
def test_what_is_offered_where_nothing_can_run_is_enough(requested, facts, remedy):
    keys = {
        "ulysses_key": "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
        "padding_key": "actor_rollout_ref.model.use_remove_padding",
    }
    with pytest.raises(ConfigError) as caught:
        resolve(requested, **facts, **keys)
    assert caught.value.remedy == remedy


def test_what_only_packed_sequences_rule_out_is_taken_without_remove_padding():
    support = ModelSupport(why_not_packed=dict.fromkeys(attention.REQUESTS, "they mix"))
    assert resolve("auto", model_supports=support, use_remove_padding=False).name == "fa2_packed"


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "varlen"), (torch.float32, "sdpa_packed")])
def test_auto_with_ulysses_and_no_flash_attn_takes_what_exchanges_heads(dtype, name):
    assert resolve("auto", ulysses_size=2, flash_attn_importable=False, dtype=dtype).name == name


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("flash_attention_2", Qwen2Config()),
        ("kernels-community/flash-attn2", Qwen2Config()),
        ("varlen", Qwen2Config()),
        ("fa2_packed", Qwen2Config()),
        ("sdpa", Qwen2_5_VLConfig()),  # verl calls flash-attn whatever is set
    ],
)
def test_an_attention_that_sees_whole_rows_passes(name, config):
    attention.check_whole_rows(name, config, ulysses_size=2, role="actor")


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_an_attention_by_verls_key_that_sees_a_slice_of_each_row_is_refused(name):
    attention.check_whole_rows(name, Qwen2Config(), ulysses_size=1, role="critic")
    with pytest.raises(ConfigError) as caught:
        attention.check_whole_rows(name, Qwen2Config(), ulysses_size=2, role="critic")
    assert caught.value.remedy.startswith("sharding.roles.critic.attn_implementation=auto")


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        (Qwen2Config(), set()),
        (LlamaConfig(), set()),
        (LlamaConfig(attention_dropout=0.1), {"varlen"}),
        (LlamaConfig(head_dim=512), {"flash_attention_2", "varlen"}),
        (DeepseekV3Config(qk_nope_head_dim=256), {"flash_attention_2", "varlen"}),
        (Gemma4TextConfig(head_dim=128, global_head_dim=512), {"flash_attention_2", "varlen"}),
        (Gemma2Config(), {"sdpa", "varlen"}),
        (GptOssConfig(), {"flash_attention_2", "sdpa", "varlen"}),
        (FalconConfig(), {"sdpa_packed", "varlen"}),
        (FalconConfig(alibi=True), {"flash_attention_2", "sdpa", "sdpa_packed", "varlen"}),
        (GlmMoeDsaConfig(), {"flash_attention_2", "sdpa", "sdpa_packed", "varlen"}),
        (GPT2Config(), {"varlen"}),
        (GPT2Config(attn_pdrop=0.0), set()),
        (PretrainedConfig(), {"sdpa_packed", "varlen"}),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_models_config_and_source_say_what_it_cannot_run(config, refused):
    assert set(model_support(config).why_not) == refused


@pytest.mark.parametrize("auto_class", ["AutoModelForCausalLM", "AutoModelForTokenClassification"])
def test_a_model_class_of_the_checkpoints_own_is_not_read_in_transformers(auto_class):
    config = Qwen2Config(auto_map={auto_class: "modeling_mine.Mine"})
    assert model_support(config) == model_support(Qwen2Config())
    support = model_support(config, trust_remote_code=True)
    assert {"sdpa", "eager"} <= set(support.why_not_packed)
    assert "varlen" in support.why_not
    config = Qwen2Config(auto_map={"AutoTokenizer": ["tokens_mine.Mine", None]})
    assert model_support(config, trust_remote_code=True) == model_support(Qwen2Config())


def test_a_kernel_that_the_model_would_not_run_is_no_choice():
    assert "kernels-community/" in model_support(GptOssConfig()).why_not["flash_attention_2"]
    assert resolve("auto", model_supports=model_support(GptOssConfig()), use_remove_padding=False).name == "eager"


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (Gemma3TextConfig(sliding_window=512), 512),
        (Qwen2Config(), None),
        (Gemma3TextConfig(layer_types=["full_attention"] * 26), None),
    ],
)
def test_a_sliding_window_rules_out_a_kernel_that_has_none(config, window):
    without, with_windows = (VarlenKernel.of(function) for function in (kernel_2_10, reference_kernel))
    assert "varlen" not in model_support(config, kernel=with_windows).why_not
    why = model_support(config, kernel=without).why_not.get("varlen")
    assert (why is None) if window is None else (f"{window} tokens" in why)


@pytest.mark.parametrize(
    "config",
    [Qwen3VLConfig(), InternVLConfig(), Mistral3Config(text_config={"model_type": "mistral"}), LlavaConfig()],
    ids=lambda config: config.model_type,
)
def test_a_model_of_images_and_text_is_judged_by_its_language_model(config):
    support = model_support(config)
    assert set(support.why_not) == {"varlen", "sdpa_packed"}
    assert "for text models" in support.why_not["varlen"]
    assert not support.why_not_packed


def test_sizes_and_options_of_a_language_model_within_another_count():
    text = {"model_type": "gemma2", "attn_logit_softcapping": 50.0}
    assert "caps them" in model_support(LlavaConfig(text_config=text)).why_not["sdpa"]


def test_a_model_in_which_verl_calls_flash_attn_itself_gets_nothing_else_for_packed_sequences():
    support = model_support(Qwen2_5_VLConfig())
    assert resolve("auto", model_supports=support).name == "flash_attention_2"
    with pytest.raises(ConfigError, match="verl calls flash-attn in the layers of qwen2_5_vl"):
        resolve("sdpa", model_supports=support)


def test_layers_that_read_their_mask_rule_out_boundaries_in_its_place():
    assert "needs a square one" in model_support(DogeConfig()).why_not["sdpa_packed"]


def test_a_model_that_carries_a_state_and_names_no_layers_mixes_packed_sequences():
    assert "carries a state" in model_support(RwkvConfig()).why_not_packed["eager"]


def test_linear_attention_is_refused_but_where_verl_gives_it_the_boundaries():
    assert "linear_attention" in model_support(Qwen3_5TextConfig()).why_not_packed["flash_attention_2"]
    assert not model_support(Qwen3_5Config()).why_not_packed


def test_a_choice_in_a_config_reaches_a_critic_that_is_loaded_from_it(tmp_path):
    tiny_model("qwen2", "eager").save_pretrained(tmp_path)
    config = Qwen2Config.from_pretrained(tmp_path, num_labels=1)
    attention.set_attention(config, AttentionChoice(name="varlen", reason="test"))
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path, config=config)
    assert {layer.self_attn.config._attn_implementation for layer in critic.model.layers} == {"varlen"}
