"""Rollout limits in the user's words: which keys of verl they set, and which contradictions are refused."""

import pytest

from verl_ext_sharding.config.rollout_limits import CURRENT_KEYS, propose_max_model_len, translate_limits
from verl_ext_sharding.config.schema import RolloutConfig
from verl_ext_sharding.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
MINE = "sharding.roles.rollout"

DEFAULTS = {
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{ROLLOUT}.prompt_length": 512,
    f"{ROLLOUT}.response_length": 512,
    f"{ROLLOUT}.max_num_seqs": 256,
    f"{ROLLOUT}.max_model_len": None,
    f"{ROLLOUT}.max_num_batched_tokens": 8192,
    f"{ROLLOUT}.enable_chunked_prefill": True,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{ROLLOUT}.name": "vllm",
}
"""verl 0.9.1's defaults."""


def current(**changed):
    short = {key.rpartition(".")[2]: key for key in DEFAULTS}
    return {**DEFAULTS, **{short[name]: value for name, value in changed.items()}}


def translate(context_length=None, explicit=(), values=DEFAULTS, **limits):
    changes = translate_limits(RolloutConfig(**limits), values, context_length, explicit)
    return {change.key: (change.old, change.new) for change in changes}


@pytest.mark.parametrize(
    ("limits", "changed"),
    [
        ({"batch_size": 4}, {f"{ROLLOUT}.max_num_seqs": (256, 4)}),
        (
            {"max_new_tokens": 128},
            {"data.max_response_length": (512, 128), f"{ROLLOUT}.response_length": (512, 128)},
        ),
        ({"gpu_memory_utilization": 0.3}, {f"{ROLLOUT}.gpu_memory_utilization": (0.5, 0.3)}),
        (
            {"batch_size": 8, "max_new_tokens": 64, "gpu_memory_utilization": 0.4},
            {
                f"{ROLLOUT}.max_num_seqs": (256, 8),
                "data.max_response_length": (512, 64),
                f"{ROLLOUT}.response_length": (512, 64),
                f"{ROLLOUT}.gpu_memory_utilization": (0.5, 0.4),
            },
        ),
        ({}, {}),
        ({"batch_size": 256}, {}),
    ],
)
def test_each_limit_sets_verls_keys(limits, changed):
    assert translate(**limits) == changed


def test_each_change_names_the_users_key():
    limits = RolloutConfig(batch_size=4, max_new_tokens=8, gpu_memory_utilization=0.2)
    whys = {change.key: change.why for change in translate_limits(limits, DEFAULTS, None)}
    assert whys == {
        f"{ROLLOUT}.max_num_seqs": f"{MINE}.batch_size",
        "data.max_response_length": f"{MINE}.max_new_tokens",
        f"{ROLLOUT}.response_length": f"{MINE}.max_new_tokens",
        f"{ROLLOUT}.gpu_memory_utilization": f"{MINE}.gpu_memory_utilization",
    }


def test_only_declared_keys_are_read():
    values = {key: DEFAULTS[key] for key in CURRENT_KEYS}
    assert translate(131072, values=values, batch_size=4, max_new_tokens=8)


def test_the_users_config_is_not_changed_in_place():
    values = dict(DEFAULTS)
    translate(131072, values=values, batch_size=4, max_new_tokens=8)
    assert values == DEFAULTS


# max_model_len


@pytest.mark.parametrize(
    ("context_length", "values", "proposed"),
    [
        (131072, DEFAULTS, 1024),
        (131072, current(name="sglang"), 1025),
        (1025, DEFAULTS, 1024),
        (1024, DEFAULTS, None),
        (1025, current(name="sglang"), None),
        (None, DEFAULTS, None),
        (131072, current(max_model_len=4096), None),
    ],
)
def test_an_unset_max_model_len_becomes_prompt_and_response_where_the_context_is_longer(
    context_length, values, proposed
):
    change = propose_max_model_len(values, context_length)
    assert (change.new if change else None) == proposed


def test_the_proposal_gives_way_to_the_users_value():
    assert propose_max_model_len(DEFAULTS, 131072).default


def test_a_limit_brings_the_proposal_along_with_the_new_response_length():
    assert translate(131072, max_new_tokens=256)[f"{ROLLOUT}.max_model_len"] == (None, 768)


def test_without_a_limit_max_model_len_is_left_alone():
    assert translate(131072) == {}


# Contradictions


def refusal(**arguments):
    with pytest.raises(ConfigError) as caught:
        translate(**arguments)
    return caught.value


def test_a_response_longer_than_the_context_is_refused_with_the_one_that_fits():
    error = refusal(context_length=2048, max_new_tokens=2048)
    assert "512 + response 2048 = 2560" in error.found
    assert "2048" in error.expected
    assert error.remedy == f"{MINE}.max_new_tokens=1536"


def test_the_remedy_is_verls_key_where_the_user_wrote_verls_key():
    error = refusal(context_length=2048, batch_size=4, values=current(max_response_length=4096, response_length=4096))
    assert error.remedy == "data.max_response_length=1536"


def test_a_prompt_as_long_as_the_context_is_refused_with_a_shorter_prompt():
    error = refusal(context_length=2048, max_new_tokens=512, values=current(max_prompt_length=2048, prompt_length=2048))
    assert error.remedy.startswith("data.max_prompt_length=1536")


def test_prompt_and_response_beyond_max_model_len_are_refused_with_both_ways_out():
    error = refusal(max_new_tokens=1024, values=current(max_model_len=1024))
    assert "1536 tokens" in error.found
    assert f"{ROLLOUT}.max_model_len=1536" in error.remedy
    assert f"{MINE}.max_new_tokens=512" in error.remedy


def test_prompt_and_response_that_just_fit_are_accepted():
    assert translate(1024, max_new_tokens=512, values=current(max_model_len=1024)) == {}


def test_a_max_model_len_beyond_the_context_is_refused():
    error = refusal(context_length=2048, batch_size=4, values=current(max_model_len=4096))
    assert error.subject == f"{ROLLOUT}.max_model_len"
    assert error.remedy == f"{ROLLOUT}.max_model_len=1024"


def test_fewer_tokens_a_step_than_requests_are_refused():
    error = refusal(batch_size=512, values=current(max_num_batched_tokens=256))
    assert "512 requests" in error.expected
    assert error.remedy == f"{ROLLOUT}.max_num_batched_tokens=512, or {MINE}.batch_size=256"


def test_one_token_a_step_for_each_request_is_enough():
    assert translate(batch_size=128, values=current(max_num_batched_tokens=128)) == {
        f"{ROLLOUT}.max_num_seqs": (256, 128)
    }


@pytest.mark.parametrize(
    ("max_model_len", "context_length", "needed"), [(None, None, 1024), (None, 131072, 1024), (2048, 131072, 2048)]
)
def test_a_step_that_cannot_hold_the_longest_sequence_is_refused_without_chunked_prefill(
    max_model_len, context_length, needed
):
    values = current(enable_chunked_prefill=False, max_num_batched_tokens=1000, max_model_len=max_model_len)
    error = refusal(batch_size=4, context_length=context_length, values=values)
    assert str(needed) in error.expected
    assert f"{ROLLOUT}.max_num_batched_tokens={needed}" in error.remedy


def test_chunked_prefill_splits_long_prompts():
    assert translate(batch_size=4, values=current(max_num_batched_tokens=1000)) == {f"{ROLLOUT}.max_num_seqs": (256, 4)}


@pytest.mark.parametrize("name", ["hf", "sglang"])
def test_what_only_vllm_refuses_is_left_to_other_servers(name):
    values = current(name=name, max_num_batched_tokens=2)
    assert translate(batch_size=4, values=values) == {f"{ROLLOUT}.max_num_seqs": (256, 4)}


@pytest.mark.parametrize(
    "limits",
    [{"batch_size": 0}, {"max_new_tokens": 0}, {"gpu_memory_utilization": 0.0}, {"gpu_memory_utilization": 1.0}],
)
def test_a_limit_out_of_range_is_refused(limits):
    with pytest.raises(ConfigError, match=next(iter(limits))):
        translate(**limits)


# What the user wrote for verl's own key


@pytest.mark.parametrize(
    ("limits", "key", "written"),
    [
        ({"batch_size": 4}, f"{ROLLOUT}.max_num_seqs", 64),
        ({"max_new_tokens": 128}, "data.max_response_length", 256),
        ({"max_new_tokens": 128}, f"{ROLLOUT}.response_length", 256),
        ({"gpu_memory_utilization": 0.3}, f"{ROLLOUT}.gpu_memory_utilization", 0.8),
    ],
)
def test_another_value_for_verls_own_key_is_refused_and_both_are_named(limits, key, written):
    error = refusal(explicit={key}, values={**DEFAULTS, key: written}, **limits)
    ((name, wanted),) = limits.items()
    assert f"{MINE}.{name}={wanted}" in error.found
    assert f"{key}={written}" in error.found
    assert error.remedy == f"remove {key}={written}, or write {MINE}.{name}={written}"


def test_the_same_value_for_verls_own_key_is_no_contradiction():
    values = current(max_num_seqs=4)
    assert translate(batch_size=4, explicit={f"{ROLLOUT}.max_num_seqs"}, values=values) == {}
