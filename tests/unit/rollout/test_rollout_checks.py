import subprocess
import sys

import pytest

from verl_ext_sharding import driver
from verl_ext_sharding.config.changes import apply_changes, parse_overrides
from verl_ext_sharding.rollout.checks import check_rollout, check_teachers
from verl_ext_sharding.rollout.settings import server_settings

FINE = {
    "name": "hf",
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "data_parallel_size": 1,
    "expert_parallel_size": 1,
    "dtype": "float32",
    "logprobs_mode": "processed_logprobs",
    "gpu_memory_utilization": 0.5,
    "prompt_length": 128,
    "response_length": 64,
    "max_model_len": None,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "load_format": "dummy",
    "quantization": None,
    "engine_kwargs": {"vllm": {}, "sglang": {"attention_backend": None}, "trtllm": {}},
    "checkpoint_engine": {"backend": "naive", "update_weights_bucket_megabytes": 2048},
    "mtp": {"enable": False, "enable_rollout": False},
    "disaggregation": {"enabled": False},
    "prometheus": {"enable": False},
}
MODEL = {"path": "some/model", "lora_rank": 0, "lora": {"rank": 0, "merge": False}, "lora_adapter_path": None}


def test_verls_defaults_with_one_server_a_device_are_fine():
    assert check_rollout(FINE, MODEL) == []


def test_absent_keys_are_not_judged():
    assert check_rollout({}, {}) == []


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"tensor_model_parallel_size": 2}, "actor_rollout_ref.rollout.tensor_model_parallel_size=1"),
        ({"pipeline_model_parallel_size": 2}, "actor_rollout_ref.rollout.pipeline_model_parallel_size=1"),
        ({"data_parallel_size": 4}, "actor_rollout_ref.rollout.data_parallel_size=1"),
        ({"disaggregation": {"enabled": True}}, "actor_rollout_ref.rollout.disaggregation.enabled=False"),
        ({"layered_summon": True}, "actor_rollout_ref.rollout.layered_summon=False"),
        ({"quantization": "fp8"}, "actor_rollout_ref.rollout.quantization=null"),
        ({"mtp": {"enable_rollout": True}}, "actor_rollout_ref.rollout.mtp.enable_rollout=False"),
        ({"prometheus": {"enable": True}}, "actor_rollout_ref.rollout.prometheus.enable=False"),
        ({"enable_rollout_routing_replay": True}, "actor_rollout_ref.rollout.enable_rollout_routing_replay=False"),
        ({"dtype": "fp8"}, "actor_rollout_ref.rollout.dtype=bfloat16"),
        ({"logprobs_mode": "raw_logits"}, "actor_rollout_ref.rollout.logprobs_mode=processed_logprobs"),
        ({"gpu_memory_utilization": 1.5}, "actor_rollout_ref.rollout.gpu_memory_utilization=0.5"),
        ({"max_num_seqs": 0}, "actor_rollout_ref.rollout.max_num_seqs=256"),
        ({"max_model_len": 128}, "actor_rollout_ref.rollout.max_model_len=192"),
        (
            {"engine_kwargs": {"vllm": {"enforce_eager": True}}},
            "~actor_rollout_ref.rollout.engine_kwargs.vllm.enforce_eager",
        ),
        (
            {"engine_kwargs": {"hf": {"attn_implementation": "flash_attention_2"}}},
            "actor_rollout_ref.rollout.engine_kwargs.hf.attn_implementation=sdpa",
        ),
        (
            {"checkpoint_engine": {"backend": "delta_sharded"}},
            "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
        ),
        (
            {"checkpoint_engine": {"update_weights_bucket_megabytes": 0}},
            "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=512",
        ),
    ],
    ids=str,
)
def test_what_this_backend_cannot_do_is_answered_with_the_override(change, remedy):
    errors = check_rollout({**FINE, **change}, MODEL)
    assert [error.remedy for error in errors] == [remedy]


@pytest.mark.parametrize(
    "lora", [{"lora_rank": 8}, {"lora": {"rank": 8}}, {"lora_adapter_path": "some/adapter"}], ids=str
)
def test_lora_must_be_merged(lora):
    errors = check_rollout(FINE, {**MODEL, **lora})
    assert [error.remedy for error in errors] == ["actor_rollout_ref.model.lora.merge=True"]
    assert check_rollout(FINE, {**MODEL, **lora, "lora": {"rank": 8, "merge": True}}) == []


def test_a_message_names_the_node_that_it_is_about():
    errors = check_rollout({**FINE, "data_parallel_size": 2}, MODEL, where="distillation.teacher")
    assert errors[0].remedy == "distillation.teacher.rollout.data_parallel_size=1"


def test_every_problem_is_listed_at_once():
    assert len(check_rollout({**FINE, "data_parallel_size": 2, "dtype": "int8"}, {**MODEL, "lora_rank": 4})) == 3


def _settings(rollout=None, model=None, mode="hybrid"):
    return server_settings(
        {**FINE, **(rollout or {})},
        {**MODEL, **(model or {})},
        mode=mode,
        device="cpu",
        replica_rank=3,
        servers_per_node=2,
    )


def test_settings_are_verls_values():
    settings = _settings({"seed": 9, "temperature": 0.3, "max_num_seqs": 5})
    assert (settings.seed, settings.temperature, settings.max_num_seqs, settings.replica_rank) == (9, 0.3, 5, 3)
    assert (settings.prompt_length, settings.response_length, settings.max_model_len) == (128, 64, None)
    assert settings.model.dtype == "float32"


@pytest.mark.parametrize(
    ("mode", "load_format", "loads"),
    [
        ("hybrid", "dummy", False),
        ("hybrid", "auto", False),  # slept at once, then filled by update_weights
        ("standalone", "dummy", False),
        ("standalone", "safetensors", True),
        ("colocated", "auto", True),
    ],
)
def test_weights_are_read_where_no_update_brings_them(mode, load_format, loads):
    assert _settings({"load_format": load_format}, mode=mode).model.load_weights is loads


@pytest.mark.parametrize(
    ("override", "engine", "expected"),
    [
        ({}, {}, None),
        ({"attn_implementation": "flash_attention_2"}, {}, None),
        ({"attn_implementation": "eager"}, {}, "eager"),
        ({"attn_implementation": "eager"}, {"attn_implementation": "sdpa"}, "sdpa"),
    ],
    ids=str,
)
def test_attention_follows_the_actors_where_this_backend_has_it(override, engine, expected):
    settings = _settings({"engine_kwargs": {"hf": engine}}, {"override_config": override})
    assert settings.model.attn_implementation == expected


def test_the_room_imports_neither_torch_nor_ray_nor_verl():
    code = (
        "import sys, verl_ext_sharding.rollout, verl_ext_sharding.rollout.checks, verl_ext_sharding.rollout.requests;"
        "print(sorted({'torch', 'ray', 'verl', 'transformers', 'omegaconf'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def _teachers(**engines):
    models = {name: {"inference": {"name": engine}} for name, engine in engines.items()}
    return {"enabled": True, "teacher_models": models}


@pytest.mark.parametrize(
    ("distillation", "remedies"),
    [
        (_teachers(teacher_model="hf"), ["distillation.teacher_models.teacher_model.inference.name=vllm"]),
        (_teachers(math="vllm", code="hf"), ["distillation.teacher_models.code.inference.name=vllm"]),
        (_teachers(math="trtllm", code="sglang"), ["distillation.teacher_models.math.inference.name=vllm"]),
        (_teachers(teacher_model="hf", math="vllm"), []),  # verl drops the default name beside others
        (_teachers(teacher_model="vllm"), []),
        ({**_teachers(teacher_model="hf"), "enabled": False}, []),
        ({}, []),
    ],
)
def test_a_teacher_must_give_log_probs_of_prompts(distillation, remedies):
    assert [error.remedy for error in check_teachers(distillation)] == remedies


@pytest.mark.parametrize(
    "lora", [("model.lora_rank=8",), ("model.lora.rank=8",), ("model.lora_adapter_path=/adapter",)]
)
def test_lora_is_merged_for_this_rollout_unless_the_user_says_otherwise(lora, compose):
    key = "actor_rollout_ref.model.lora.merge"
    asked = ["actor_rollout_ref.rollout.name=hf", *(f"actor_rollout_ref.{line}" for line in lora)]

    def changes(*overrides):
        config = compose(*overrides)
        applied = apply_changes(config, driver.rollout_changes(config), parse_overrides(overrides))
        return {change.key: change.new for change in applied}

    assert changes(*asked)[key] is True
    for others in (asked[:1], [*asked, f"{key}=False"], [*asked[1:], "actor_rollout_ref.rollout.name=vllm"]):
        assert key not in changes(*others)
