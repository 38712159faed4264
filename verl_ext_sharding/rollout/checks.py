"""What `rollout.name=hf` can't do, found in the config before anything is loaded. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_ext_sharding.config.reward import KEY as REWARD_KEY
from verl_ext_sharding.config.reward import RewardServerSettings
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement import layer_keys
from verl_ext_sharding.rollout.settings import ATTENTION, DTYPES

_NOW = "the run stops before any model loads"

_PARALLEL = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "expert_parallel_size",
)

_OFF: tuple[tuple[str, str], ...] = (
    ("disaggregation.enabled", "prefill and decode run in one server"),
    ("layered_summon", "it sends LoRA adapters, and this backend takes merged weights"),
    ("quantization", "weights are kept in rollout.dtype"),
    ("qat.enable", "weights are kept in rollout.dtype"),
    ("mtp.enable_rollout", "there is no speculative decoding"),
    ("enable_rollout_routing_replay", "expert routing is not recorded"),
    ("prometheus.enable", "the server has no endpoint for metrics"),
)

_POSITIVE = ("max_num_seqs", "max_num_batched_tokens", "response_length", "prompt_length")


def check_rollout(
    rollout: Mapping[str, Any], model: Mapping[str, Any], *, where: str = "actor_rollout_ref"
) -> list[ConfigError]:
    """Lists everything in the config that this backend can't honour. Keys that are absent are not judged.

    Args:
        rollout: The rollout's config as nested mappings, resolved (`actor_rollout_ref.rollout`).
        model: The model's (`actor_rollout_ref.model`).
        where: Config node that holds both, for the messages.

    Returns:
        One error for each problem; empty when there is none.
    """
    key = f"{where}.rollout"
    errors = _check_parallel(rollout, key, _PARALLEL)
    errors += _check_off(rollout, key)
    errors += _check_positive(rollout, key, _POSITIVE)
    errors += _check_choices(rollout, key)
    errors += _check_lengths(rollout, key)
    errors += _check_engine_kwargs(rollout, key)
    errors += _check_transport(rollout, key)
    errors += _check_lora(model, where)
    return errors


def check_reward(
    rollout: Mapping[str, Any], asked: RewardServerSettings, *, where: str = "reward.reward_model"
) -> list[ConfigError]:
    """Lists everything in a reward model's config that this backend can't honour. Keys that are absent are not judged.

    Args:
        rollout: `reward.reward_model.rollout` as nested mappings, resolved.
        asked: What the run's request says of the reward servers.
        where: Config node of the reward model, for the messages.

    Returns:
        One error for each problem; empty when there is none.
    """
    key = f"{where}.rollout"
    num_devices = rollout.get("tensor_model_parallel_size") or 1
    parallel = [name for name in _PARALLEL if name != "tensor_model_parallel_size" or asked.device_map is None]
    errors = _check_parallel(rollout, key, parallel)
    errors += _check_off(rollout, key)
    errors += _check_positive(rollout, key, ("max_num_seqs", "max_num_batched_tokens", "max_model_len"))
    errors += _check_choices(rollout, key)
    errors += _check_engine_kwargs(rollout, key)
    if rollout.get("load_format") == "dummy":
        expected = "a format that reads the checkpoint: nobody sends weights to a reward model"
        errors.append(_error(f"{key}.load_format", expected, "dummy", f"{key}.load_format=auto"))
    if asked.attn_implementation == "flash_attention_2" and DTYPES.get(str(rollout.get("dtype"))) == "float32":
        remedy = f"{key}.dtype=bfloat16"
        errors.append(_error(f"{key}.dtype", "bfloat16 or float16 with flash_attention_2", rollout["dtype"], remedy))
    if asked.device_map is not None:
        try:
            layer_keys.parse(asked.device_map, role="reward", num_devices=num_devices)
        except ConfigError as error:
            errors.append(error)
    if asked.execution_index is not None and asked.execution_index >= num_devices:
        subject = f"{REWARD_KEY}.execution_device"
        expected = f"a device of the server's own process, which has {num_devices}: numbers start at 0 there"
        kind = str(asked.execution_device).partition(":")[0]
        errors.append(_error(subject, expected, asked.execution_device, f"{subject}={kind}:0"))
    return errors


def check_teachers(distillation: Mapping[str, Any]) -> list[ConfigError]:
    """Refuses backends that verl can't ask for the log-probs of whole prompts: this one, and TensorRT-LLM (`TRTLLMReplica`).

    Args:
        distillation: verl's `distillation` as nested mappings, resolved.

    Returns:
        One error for each teacher that asks for it.
    """
    if not distillation.get("enabled"):
        return []
    errors = []
    teachers = distillation.get("teacher_models") or {}
    several = [name for name in teachers if name != "teacher_model"]  # the default name counts only alone
    for name in several or teachers:
        found = _at(teachers, f"{name}.inference.name")
        if found in ("hf", "trtllm"):
            key = f"distillation.teacher_models.{name}.inference.name"
            expected = "a server that gives the log-probs of prompts (vllm, sglang)"
            errors.append(ConfigError(key, expected=expected, found=found, consequence=_NOW, remedy=f"{key}=vllm"))
    return errors


def _check_parallel(rollout: Mapping[str, Any], key: str, names: Sequence[str]) -> list[ConfigError]:
    return [
        _error(f"{key}.{name}", "1: one server holds the whole model", rollout.get(name), f"{key}.{name}=1")
        for name in names
        if (rollout.get(name) or 1) > 1
    ]


def _check_off(rollout: Mapping[str, Any], key: str) -> list[ConfigError]:
    errors = []
    for name, why in _OFF:
        found = _at(rollout, name)
        if found:
            off = "null" if name == "quantization" else "False"
            errors.append(_error(f"{key}.{name}", f"off: {why}", found, f"{key}.{name}={off}"))
    return errors


def _check_positive(rollout: Mapping[str, Any], key: str, names: Sequence[str]) -> list[ConfigError]:
    return [
        _error(f"{key}.{name}", "a number >= 1", rollout[name], f"{key}.{name}=256")
        for name in names
        if rollout.get(name) is not None and rollout[name] < 1
    ]


def _check_choices(rollout: Mapping[str, Any], key: str) -> list[ConfigError]:
    choices = {"dtype": tuple(DTYPES), "logprobs_mode": ("processed_logprobs", "raw_logprobs")}
    errors = [
        _error(f"{key}.{name}", ", ".join(known), rollout[name], f"{key}.{name}={known[0]}")
        for name, known in choices.items()
        if rollout.get(name) is not None and rollout[name] not in known
    ]
    share = rollout.get("gpu_memory_utilization")
    if share is not None and not 0 < share <= 1:
        errors.append(
            _error(f"{key}.gpu_memory_utilization", "a share in (0, 1]", share, f"{key}.gpu_memory_utilization=0.5")
        )
    return errors


def _check_lengths(rollout: Mapping[str, Any], key: str) -> list[ConfigError]:
    prompt, limit = rollout.get("prompt_length"), rollout.get("max_model_len")
    if prompt is None or limit is None or limit > prompt:
        return []
    wanted = prompt + (rollout.get("response_length") or 1)
    expected = f"more than prompt_length ({prompt}), so that one token can follow the longest prompt"
    return [_error(f"{key}.max_model_len", expected, limit, f"{key}.max_model_len={wanted}")]


def _check_engine_kwargs(rollout: Mapping[str, Any], key: str) -> list[ConfigError]:
    """Arguments for another engine would be ignored without a word; ours are few."""
    errors = []
    for engine, arguments in (rollout.get("engine_kwargs") or {}).items():
        for name, value in (arguments or {}).items():
            subject, drop = f"{key}.engine_kwargs.{engine}.{name}", f"~{key}.engine_kwargs.{engine}.{name}"
            if value is None:
                continue
            if engine != "hf" or name != "attn_implementation":
                errors.append(_error(subject, "engine_kwargs.hf.attn_implementation, or none", value, drop))
            elif value not in ATTENTION:
                errors.append(_error(subject, " or ".join(ATTENTION), value, f"{subject}={ATTENTION[0]}"))
    return errors


def _check_transport(rollout: Mapping[str, Any], key: str) -> list[ConfigError]:
    errors = []
    backend = _at(rollout, "checkpoint_engine.backend")
    name = f"{key}.checkpoint_engine.backend"
    if backend == "delta_sharded":
        errors.append(_error(name, "a backend that sends whole tensors", backend, f"{name}=nccl"))
    size = _at(rollout, "checkpoint_engine.update_weights_bucket_megabytes")
    if size is not None and size < 1:
        name = f"{key}.checkpoint_engine.update_weights_bucket_megabytes"
        errors.append(_error(name, "a number of MiB >= 1", size, f"{name}=512"))
    return errors


def _check_lora(model: Mapping[str, Any], where: str) -> list[ConfigError]:
    """LoRA reaches this backend merged into the base weights, or not at all."""
    rank = (model.get("lora_rank") or 0) or (_at(model, "lora.rank") or 0)
    adapts = rank > 0 or model.get("lora_adapter_path") is not None
    if not adapts or _at(model, "lora.merge"):
        return []
    found = f"rank {rank}, not merged" if rank else f"{model.get('lora_adapter_path')}, not merged"
    remedy = f"{where}.model.lora.merge=True"
    return [_error(f"{where}.model.lora", "adapters merged into the weights that are sent", found, remedy)]


def _at(node: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or None where a part of it is missing."""
    value: Any = node
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _error(subject: str, expected: str, found: object, remedy: str) -> ConfigError:
    return ConfigError(
        f"{subject} with rollout.name=hf", expected=expected, found=str(found), consequence=_NOW, remedy=remedy
    )
