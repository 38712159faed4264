"""How much a reward model takes: numbers against what transformers' own models really run."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModel

from verl_ext_sharding.config.reward_limits import (
    embedding_rows,
    is_discriminative,
    model_limit,
    propose_reward_max_model_len,
    read_hf_config,
    reward_length_finding,
    reward_limit,
)
from verl_ext_sharding.errors import ConfigError

ROBERTA = {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1, "vocab_size": 50265}
LLAMA = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32000}
_TINY = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pad_token_id": 1,
    "max_position_embeddings": 20,
}
FAMILIES = {
    "roberta": (_TINY, 18),
    "xlm-roberta": (_TINY, 18),
    "xlm-roberta-xl": (_TINY, 18),
    "roberta-prelayernorm": (_TINY, 18),
    "camembert": (_TINY, 18),
    "data2vec-text": (_TINY, 18),
    "mpnet": ({**_TINY, "pad_token_id": 3}, 18),
    "ibert": (_TINY, 18),
    "xmod": ({**_TINY, "languages": ["en_XX"], "default_language": "en_XX"}, 18),
    "bert": (_TINY, 20),
    "electra": ({**_TINY, "embedding_size": 16}, 20),
    "opt": ({**_TINY, "ffn_dim": 16, "word_embed_proj_dim": 16}, 20),
    "distilbert": (
        {"vocab_size": 40, "dim": 16, "hidden_dim": 16, "n_layers": 1, "n_heads": 2} | {"max_position_embeddings": 20},
        20,
    ),
    "gpt2": ({"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 20}, 20),
}


def tiny(model_type):
    settings, _ = FAMILIES[model_type]
    torch.manual_seed(0)
    return AutoModel.from_config(AutoConfig.for_model(model_type, **settings), attn_implementation="eager").eval()


def run(model, num_tokens):
    with torch.no_grad():
        model(input_ids=torch.full((1, num_tokens), 5), attention_mask=torch.ones(1, num_tokens, dtype=torch.long))


# The model's own limit


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_limit_is_the_longest_input_that_the_model_runs(model_type):
    model = tiny(model_type)
    limit = model_limit(model.config.to_dict()).tokens
    assert limit == FAMILIES[model_type][1]
    run(model, limit)
    with pytest.raises((IndexError, RuntimeError)):
        run(model, limit + 1)


def test_a_robertas_512_and_a_llamas_4096_are_both_right():
    assert (model_limit(ROBERTA).tokens, model_limit(LLAMA).tokens) == (512, 4096)


def test_the_offset_follows_the_padding_index():
    assert model_limit({**ROBERTA, "pad_token_id": 0}).tokens == 513


def test_the_source_tells_how_the_number_was_found():
    assert model_limit(ROBERTA).source == "max_position_embeddings 514 less the 2 that come before the first position"


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "t5", "n_positions": 512},
        {
            "model_type": "deberta-v2",
            "max_position_embeddings": 512,
            "relative_attention": True,
            "position_biased_input": False,
        },
        {"model_type": "bloom", "seq_length": 2048},
        {"model_type": "falcon", "alibi": True, "max_position_embeddings": 2048},
        {"model_type": "mpt", "max_seq_len": 2048, "attn_config": {"alibi": True}},
        {"model_type": "custom", "position_embedding_type": "alibi", "max_position_embeddings": 512},
        {"model_type": "mamba"},
    ],
    ids=lambda config: config["model_type"],
)
def test_relative_positions_and_alibi_have_no_limit(config):
    assert model_limit(config).tokens is None


def test_a_deberta_that_adds_positions_to_its_input_has_its_table():
    config = {"model_type": "deberta-v2", "max_position_embeddings": 512, "relative_attention": True}
    assert model_limit(config).tokens == 512


@pytest.mark.parametrize(
    ("scaling", "tokens"),
    [
        ({"rope_type": "linear", "factor": 2.0}, 8192),
        ({"type": "dynamic", "factor": 4.0}, 16384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}, 4096),
        ({"rope_type": "default", "rope_theta": 10000.0}, 4096),
        ({"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}, 4096),
        ({"full_attention": {"rope_type": "default"}}, 4096),
        (None, 4096),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_stretches_the_length_as_transformers_documents_it(key, scaling, tokens):
    assert model_limit({**LLAMA, key: scaling}).tokens == tokens


def test_a_model_of_several_parts_has_its_language_models_length():
    nested = {"model_type": "qwen2_vl", "text_config": LLAMA, "vision_config": {}}
    assert (model_limit(nested).tokens, embedding_rows(nested)) == (4096, 32000)


def test_a_config_that_names_no_length_has_none():
    assert model_limit({"model_type": "strange"}).tokens is None


# Model, server, tokenizer and user together


@pytest.mark.parametrize(
    ("config", "engine", "given", "tokens"),
    [
        (LLAMA, "vllm", {}, 4096),
        (LLAMA, "vllm", {"max_model_len": 1000}, 1000),
        (LLAMA, "sglang", {}, 4095),
        (LLAMA, "hf", {}, 4096),
        (ROBERTA, "vllm", {}, 512),
        (ROBERTA, "vllm", {"max_model_len": 514}, 512),
        (ROBERTA, "hf", {"max_model_len": 300}, 300),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}, "vllm", {}, 4096),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}, "hf", {}, 8192),
        (LLAMA, "hf", {"tokenizer_max_length": 2048}, 4096),
        ({"model_type": "t5"}, "hf", {"tokenizer_max_length": 512}, 512),
        ({"model_type": "t5"}, "hf", {"tokenizer_max_length": 1e30}, None),
        (LLAMA, "hf", {"max_input_tokens": 4096}, 4096),
        (LLAMA, "hf", {"max_input_tokens": 100}, 100),
        ({"model_type": "t5"}, "hf", {"max_input_tokens": 9000}, 9000),
    ],
)
def test_the_smallest_of_what_model_and_server_take_holds(config, engine, given, tokens):
    assert reward_limit(config, engine=engine, **given).tokens == tokens


def test_more_than_the_model_takes_can_not_be_asked_for():
    with pytest.raises(ConfigError, match="at most 512"):
        reward_limit(ROBERTA, engine="hf", max_input_tokens=513)


def test_verl_is_given_the_right_length_where_it_would_take_the_whole_table():
    change = propose_reward_max_model_len(ROBERTA, "vllm", None)
    assert (change.key, change.new, change.default) == ("reward.reward_model.rollout.max_model_len", 512, True)


@pytest.mark.parametrize(
    ("config", "engine", "current"), [(LLAMA, "vllm", None), (ROBERTA, "hf", None), (ROBERTA, "vllm", 400)]
)
def test_nothing_is_proposed_where_verl_is_right(config, engine, current):
    assert propose_reward_max_model_len(config, engine, current) is None


# Before launch


def finding(limit, prompt=256, response=256, policy="truncate"):
    return reward_length_finding(
        limit, max_prompt_length=prompt, max_response_length=response, policy=policy, template_tokens=10
    )


@pytest.mark.parametrize("part", ["256", "522 tokens", "512", "data.max_response_length=246"])
def test_lengths_that_can_exceed_the_limit_are_told_with_the_fix(part):
    assert part in finding(model_limit(ROBERTA))


def test_the_fix_that_is_told_really_fits():
    assert finding(model_limit(ROBERTA), response=246) is None


@pytest.mark.parametrize(("policy", "then"), [("truncate", "lose"), ("error", "ends the run"), ("off", "as it is")])
def test_what_happens_to_a_longer_sample_is_told(policy, then):
    assert then in finding(model_limit(ROBERTA), policy=policy)


def test_no_override_is_offered_where_the_prompt_alone_is_too_long():
    assert "longer context" in finding(model_limit(ROBERTA), prompt=600)


def test_without_a_limit_nothing_can_exceed_it():
    assert finding(model_limit({"model_type": "t5"}), prompt=10**6) is None


@pytest.mark.parametrize(
    ("values", "asked"),
    [
        ({"reward.reward_model.enable": True}, True),
        ({"reward.reward_model.enable": False}, False),
        ({"reward.reward_model.enable": True, "reward.custom_reward_function.path": "score.py"}, False),
        ({}, False),
    ],
)
def test_verl_asks_a_reward_model_only_without_a_function_of_the_users(values, asked):
    assert is_discriminative(values) is asked


def test_a_models_config_is_read_from_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(ROBERTA))
    assert read_hf_config(str(tmp_path)) == ROBERTA


def test_a_model_that_is_no_folder_here_has_no_config_yet():
    assert read_hf_config("org/model") is None
