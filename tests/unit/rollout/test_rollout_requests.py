import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.rollout.requests import (
    SamplingDefaults,
    check_prompt,
    parse_sampling_params,
    prompt_digest,
    stable_seed,
)

DEFAULTS = SamplingDefaults(
    temperature=0.8,
    top_p=0.95,
    top_k=20,
    repetition_penalty=1.1,
    prompt_length=16,
    response_length=32,
    max_model_len=64,
    vocab_size=100,
    eos_token_ids=frozenset({2}),
)


def _parse(num_prompt_tokens=10, **values):
    return parse_sampling_params(values, num_prompt_tokens=num_prompt_tokens, defaults=DEFAULTS)


def test_what_a_request_leaves_open_comes_from_the_rollout_config():
    params = _parse()
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.8, 0.95, 20, 1.1)
    assert params.stop_token_ids == {2}
    assert not params.logprobs


def test_verls_own_dictionary_is_read_and_left_alone():
    values = {"temperature": 0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "max_tokens": 5}
    before = dict(values)
    params = parse_sampling_params(values, num_prompt_tokens=3, defaults=DEFAULTS)
    assert values == before
    assert (params.greedy, params.top_k, params.logprobs, params.max_tokens) == (True, 0, True, 5)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "values", "expected"),
    [
        (10, {}, 32),  # response_length
        (20, {}, 28),  # prompt_length + response_length - prompt
        (60, {}, 1),  # never below one
        (10, {"max_tokens": 7}, 7),
        (10, {"max_new_tokens": 9}, 9),
        (50, {"max_tokens": 99}, 14),  # max_model_len - prompt
        (10, {"max_tokens": 0}, 1),
    ],
)
def test_the_response_budget_is_verls(num_prompt_tokens, values, expected):
    assert _parse(num_prompt_tokens, **values).max_tokens == expected


def test_ignore_eos_keeps_the_requests_own_stop_tokens():
    assert _parse(ignore_eos=True, stop_token_ids=[5, 6]).stop_token_ids == {5, 6}
    assert _parse(stop_token_ids=[5, 6]).stop_token_ids == {2, 5, 6}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("n", 2),
        ("stop", [""]),
        ("stop", [5]),
    ],
)
def test_a_value_out_of_range_names_its_key(key, value):
    with pytest.raises(ConfigError, match=key):
        _parse(**{key: value})


def test_an_unknown_key_is_refused_with_the_nearest_known_one():
    with pytest.raises(ConfigError, match="write 'temperature'"):
        _parse(temprature=0.5)


@pytest.mark.parametrize(("key", "value"), [("prompt_logprobs", 0), ("min_tokens", 4), ("presence_penalty", 0.5)])
def test_what_only_vllm_does_is_refused_without_the_name_of_something_else(key, value):
    with pytest.raises(ConfigError) as caught:
        _parse(**{key: value})
    assert caught.value.remedy == f"drop '{key}', or use actor_rollout_ref.rollout.name=vllm"


@pytest.mark.parametrize(
    "values",
    [
        {"detokenize": False, "stop": None, "include_stop_str_in_output": True},
        {"stop": [], "min_tokens": 0, "best_of": 1, "bad_words": []},
        {"presence_penalty": 0.0, "frequency_penalty": 0, "length_penalty": 1.0},
    ],
    ids=["text", "nothing", "penalties"],
)
def test_keys_that_only_shape_text_or_ask_for_nothing_are_accepted(values):
    assert _parse(**values) == _parse()


@pytest.mark.parametrize(("stop", "texts"), [("END", ("END",)), (["a", "b"], ("a", "b"))])
def test_a_stop_string_may_come_alone_or_in_a_list(stop, texts):
    assert _parse(stop=stop).stop == texts


@pytest.mark.parametrize("prompt", [[], [1, 100], [1, -1], [1] * 64], ids=["empty", "too high", "negative", "long"])
def test_a_prompt_that_the_model_cannot_take_is_refused(prompt):
    with pytest.raises(ConfigError, match="prompt of a rollout request"):
        check_prompt(prompt, DEFAULTS)


@pytest.mark.parametrize(
    "kind",
    [
        list,
        tuple,
        np.array,
        torch.tensor,
        lambda ids: BatchEncoding({"input_ids": ids, "attention_mask": [1, 1, 1]}),
        lambda ids: {"input_ids": torch.tensor([ids])},
        lambda ids: [ids],
    ],
    ids=["list", "tuple", "array", "tensor", "encoding", "batch_of_one", "list_of_one"],
)
def test_a_prompt_may_be_any_kind_that_verls_other_servers_take(kind):
    assert check_prompt(kind([1, 2, 3]), DEFAULTS) == (1, 2, 3)


def test_a_seed_depends_on_its_parts_alone_and_not_on_the_process():
    code = "from verl_ext_sharding.rollout.requests import *; print(stable_seed(1, 'a', True), prompt_digest((1, 2)))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert printed == [str(stable_seed(1, "a", True)), prompt_digest([1, 2])]


def test_seeds_of_different_parts_differ_however_the_parts_are_cut():
    parts = [(1, 23), (12, 3), ("1", 2, 3), (123,), (1, 2, 3, "")]
    assert len({stable_seed(*part) for part in parts}) == len(parts)
    assert all(0 <= stable_seed(*part) < 2**63 for part in parts)
