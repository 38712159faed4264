import math
import subprocess
import sys

import pytest

from verl_ext_sharding.config.reward import RewardServerSettings, handled_reward_keys, reward_server_settings
from verl_ext_sharding.config.schema import ShardingConfig
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.rollout.checks import check_reward
from verl_ext_sharding.rollout.reward_requests import (
    Labels,
    RewardRequestError,
    activated,
    check_ids,
    parse_request,
    response,
)
from verl_ext_sharding.rollout.reward_settings import reward_serving

ROLLOUT = {
    "name": "hf",
    "tensor_model_parallel_size": 1,
    "data_parallel_size": 1,
    "dtype": "bfloat16",
    "max_num_seqs": 1024,
    "max_num_batched_tokens": 8192,
    "max_model_len": None,
    "prompt_length": 2048,
    "response_length": 2048,
    "load_format": "auto",
    "free_cache_engine": True,
    "quantization": None,
    "mtp": None,
    "engine_kwargs": {},
    "disaggregation": {"enabled": False},
}


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a b", ("a b",)),
        (["a", "b"], ("a", "b")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
    ids=str,
)
def test_an_input_is_a_text_or_token_ids_or_a_list_of_either(given, inputs):
    assert parse_request({"model": "m", "input": given}, "m").inputs == inputs


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (["a"], 400, "JSON object"),
        ({}, 400, "input must be"),
        ({"input": []}, 400, "input must be"),
        ({"input": [[1], "a"]}, 400, "input must be"),
        ({"input": [1.5]}, 400, "input must be"),
        ({"input": [True]}, 400, "input must be"),
        ({"input": "a", "truncate_prompt_tokens": 5}, 400, "truncate_prompt_tokens"),
        ({"input": "a", "use_activation": "no"}, 400, "use_activation"),
        ({"input": "a", "model": "other"}, 404, "'other'"),
    ],
    ids=str,
)
def test_what_is_malformed_is_refused_in_words(body, status, words):
    with pytest.raises(RewardRequestError, match=words) as error:
        parse_request(body, "m")
    assert error.value.status == status


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "at least one"),
        ([1] * 9, "9 tokens and the reward model takes at most 8"),
        ([1, 50, 2], r"token id 50 at position 1 .* 50 rows"),
        ([-100], "token id -100"),
    ],
)
def test_ids_that_the_model_cannot_take_are_named(ids, words):
    check_ids([0, 49], max_model_len=8, embedding_rows=50)
    check_ids([1] * 9, max_model_len=None, embedding_rows=50)
    with pytest.raises(RewardRequestError, match=words):
        check_ids(ids, max_model_len=8, embedding_rows=50)


@pytest.mark.parametrize(
    ("logits", "problem_type", "probabilities"),
    [
        ([0.0], None, [0.5]),
        ([-1000.0], None, [0.0]),
        ([math.log(3)], "single_label_classification", [0.75]),
        ([0.0, math.log(3)], None, [0.25, 0.75]),
        ([1000.0, 1000.0], None, [0.5, 0.5]),
        ([0.0, math.log(3)], "multi_label_classification", [0.5, 0.75]),
        ([4.0], "regression", [4.0]),
    ],
)
def test_probabilities_are_vllms(logits, problem_type, probabilities):
    assert activated(logits, problem_type) == pytest.approx(probabilities)


def test_the_answer_has_the_shape_of_vllms():
    request = parse_request({"input": ["a", "b"], "use_activation": False}, "m")
    answer = response(request, [[1.0, 2.0], [3.0, 0.5]], num_tokens=7, model="m", labels=Labels(names=("bad", "good")))
    assert answer["data"] == [
        {"index": 0, "label": "good", "probs": [1.0, 2.0], "num_classes": 2},
        {"index": 1, "label": "bad", "probs": [3.0, 0.5], "num_classes": 2},
    ]
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["model"] == "m"


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_an_error_of_the_server(score):
    request = parse_request({"input": "a"}, "m")
    with pytest.raises(RewardRequestError, match="not finite") as error:
        response(request, [[score]], num_tokens=1, model="m", labels=Labels(names=("LABEL_0",)))
    assert error.value.status == 500


# Settings


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"execution_device": "cuda"}, "sharding.roles.reward.execution_device=cuda:0"),
        ({"execution_device": "npu"}, "sharding.roles.reward.execution_device=npu:0"),
        ({"execution_device": "0"}, "sharding.roles.reward.execution_device=cuda:0"),
        ({"device_map": "everywhere"}, "sharding.roles.reward.device_map=auto"),
        ({"attn_implementation": "varlen"}, "sharding.roles.reward.attn_implementation=auto"),
        (
            {"device_map": "auto", "offload_params": True},
            "remove sharding.roles.reward.offload.params or sharding.roles.reward.layout",
        ),
        (
            {"device_map": {"": 0}, "execution_device": "cpu"},
            "remove sharding.roles.reward.execution_device or sharding.roles.reward.layout",
        ),
    ],
    ids=str,
)
def test_settings_that_cannot_be_met_are_answered_with_the_override(fields, remedy):
    with pytest.raises(ConfigError) as error:
        RewardServerSettings(**fields)
    assert error.value.remedy == remedy


def test_settings_travel_as_a_dict():
    settings = RewardServerSettings(device_map={"model": 0, "score": "cpu"}, attn_implementation="sdpa", own_pool=True)
    assert RewardServerSettings.from_dict(settings.to_dict()) == settings


def _request(**reward):
    return ShardingConfig.parse({"roles": {"reward": reward}})


def test_the_request_becomes_settings():
    asked = reward_server_settings(
        _request(execution_device="cuda:0", offload={"params": True}, attn_implementation="eager"), own_pool=True
    )
    assert asked == RewardServerSettings(
        execution_device="cuda:0", offload_params=True, attn_implementation="eager", own_pool=True
    )


def test_a_device_map_counts_with_its_layout_alone():
    plain, spread = _request(device_map="balanced"), _request(device_map="balanced", layout="device_map")
    assert reward_server_settings(plain, own_pool=False).device_map is None
    assert reward_server_settings(spread, own_pool=False).device_map == "balanced"
    assert "sharding.roles.reward.device_map" not in set(handled_reward_keys(plain))
    assert {"sharding.roles.reward.device_map", "sharding.roles.reward.layout"} <= set(handled_reward_keys(spread))


@pytest.mark.parametrize(
    ("change", "asked", "remedy"),
    [
        ({"tensor_model_parallel_size": 2}, {}, "reward.reward_model.rollout.tensor_model_parallel_size=1"),
        (
            {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            {"device_map": "auto"},
            "reward.reward_model.rollout.pipeline_model_parallel_size=1",
        ),
        ({"dtype": "int8"}, {}, "reward.reward_model.rollout.dtype=bfloat16"),
        ({"load_format": "dummy"}, {}, "reward.reward_model.rollout.load_format=auto"),
        ({"max_num_seqs": 0}, {}, "reward.reward_model.rollout.max_num_seqs=256"),
        ({"max_model_len": 0}, {}, "reward.reward_model.rollout.max_model_len=256"),
        (
            {"dtype": "fp32"},
            {"attn_implementation": "flash_attention_2"},
            "reward.reward_model.rollout.dtype=bfloat16",
        ),
        ({}, {"execution_device": "cuda:1"}, "sharding.roles.reward.execution_device=cuda:0"),
        (
            {"engine_kwargs": {"vllm": {"task": "classify"}}},
            {},
            "~reward.reward_model.rollout.engine_kwargs.vllm.task",
        ),
    ],
    ids=str,
)
def test_what_this_backend_cannot_serve_is_answered_with_the_override(change, asked, remedy):
    errors = check_reward({**ROLLOUT, **change}, RewardServerSettings(**asked))
    assert [error.remedy for error in errors] == [remedy]


@pytest.mark.parametrize("place", [2, "cuda", "disk"])
def test_a_place_that_the_server_has_not_is_refused(place):
    rollout = {**ROLLOUT, "tensor_model_parallel_size": 2}
    asked = RewardServerSettings(device_map={"model": 0, "score": place})
    assert [error.subject for error in check_reward(rollout, asked)] == ["sharding.roles.reward.device_map"]


def test_verls_defaults_and_a_map_over_two_devices_are_fine():
    assert check_reward(ROLLOUT, RewardServerSettings()) == []
    two = {**ROLLOUT, "tensor_model_parallel_size": 2}
    assert check_reward(two, RewardServerSettings(device_map={"model": 0, "score": 1})) == []


def _serving(rollout=None, asked=None, standalone=False):
    return reward_serving(
        {**ROLLOUT, **(rollout or {})},
        {"path": "some/model"},
        RewardServerSettings(**(asked or {})),
        device="cpu",
        standalone=standalone,
        replica_rank=1,
        servers_per_node=2,
    )


def test_serving_is_verls_config():
    serving = _serving({"max_num_seqs": 5, "max_model_len": 77, "full_determinism": True, "dtype": "float32"})
    assert (serving.path, serving.max_num_seqs, serving.max_model_len, serving.dtype) == (
        "some/model",
        5,
        77,
        "float32",
    )
    assert serving.full_determinism


@pytest.mark.parametrize(
    ("rollout", "asked", "standalone", "sleeps"),
    [
        ({}, {}, False, True),
        ({"free_cache_engine": False}, {}, False, False),
        ({}, {"own_pool": True}, False, False),  # verl scores during rollout then, and wakes nobody
        ({}, {}, True, False),
    ],
)
def test_only_a_server_that_shares_its_devices_sleeps(rollout, asked, standalone, sleeps):
    assert _serving(rollout, asked, standalone).sleeps is sleeps


@pytest.mark.parametrize(
    ("engine", "asked", "expected"),
    [
        ({}, {}, None),
        ({}, {"attn_implementation": "auto"}, None),
        ({"attn_implementation": "eager"}, {}, "eager"),
        ({"attn_implementation": "eager"}, {"attn_implementation": "sdpa"}, "sdpa"),
    ],
    ids=str,
)
def test_attention_is_left_to_transformers_unless_asked_for(engine, asked, expected):
    assert _serving({"engine_kwargs": {"hf": engine}}, asked).attn_implementation == expected


def test_neither_requests_nor_settings_nor_an_idle_server_import_torch_or_verl():
    code = (
        "import sys; from verl_ext_sharding.rollout.reward_settings import RewardServing;"
        "from verl_ext_sharding.rollout.reward_server import HFRewardServer; HFRewardServer(RewardServing(path='m'));"
        "print(sorted({'torch', 'verl', 'transformers', 'omegaconf'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_field_of_vllms_that_asks_for_nothing_is_taken():
    assert parse_request({"input": "a", "truncate_prompt_tokens": None}, "m") == parse_request({"input": "a"}, "m")
