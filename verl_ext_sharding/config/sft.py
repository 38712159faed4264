"""The request in the keys of `verl.trainer.sft_trainer`, whose one role reads `sharding.roles.actor`.

SFT trains what the actor is in PPO, a language model in the same engine; so it gets the actor's keys, under the names that
they have there. Its processes are started by torchrun or accelerate, which also give each its device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext_sharding.config import cpu
from verl_ext_sharding.config.changes import KeyChange
from verl_ext_sharding.config.measures import handled_keys
from verl_ext_sharding.config.schema import ActorConfig, ShardingConfig
from verl_ext_sharding.config.translate import refuse_unsupported, role_changes
from verl_ext_sharding.config.values import whole_number
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.job import EngineFacts, JobFacts

ROLE = "actor"
"""The block of `sharding.roles` that SFT reads."""

_PREFIX = f"sharding.roles.{ROLE}"

_NAMES = {
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "data.micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "data.max_token_len_per_gpu",
    "actor_rollout_ref.actor.use_dynamic_bsz": "data.use_dynamic_bsz",
    "actor_rollout_ref.actor.fsdp_config": "engine",
    "actor_rollout_ref.model": "model",
}
"""A key or block of the actor in PPO, and where SFT has it."""

_OF_ROLLOUT = "actor_rollout_ref.rollout."
"""Log-probs of rollouts, which SFT doesn't compute."""

_FSDP = ("fsdp", "fsdp2")
"""Engines that the settings of a role act on."""

_ULYSSES = "engine.ulysses_sequence_parallel_size"

_BATCH, _LENGTH = "data.train_batch_size", "data.max_length"

_SAMPLES, _TOKENS = "data.micro_batch_size_per_gpu", "data.max_token_len_per_gpu"

_ATTENTION = "model.override_config.attn_implementation"

_ON_CPU: dict[str, Any] = {
    "engine.strategy": "fsdp2",
    "engine.use_torch_compile": False,
    "engine.mixed_precision": cpu.FP32,
    "model.use_remove_padding": False,
    _ATTENTION: "sdpa",
    "data.num_workers": 0,
}
"""verl's defaults that can't run on a CPU, or that start processes which a small machine can't hold."""

_UNSET = ("engine.mixed_precision", _ATTENTION)
"""Keys whose default is null or absent: a value in the config is somebody's choice."""


def is_sft(config: DictConfig) -> bool:
    """Whether a composed config is that of `verl.trainer.sft_trainer`."""
    return "actor_rollout_ref" not in config and {"model", "engine", "optim", "data"} <= set(map(str, config))


def translate(request: ShardingConfig, current: Mapping[str, Any], num_ranks: int) -> list[KeyChange]:
    """verl's own keys for everything in the request that verl has a key for.

    Args:
        request: The user's request.
        current: verl's resolved values by dotted key, from `translate.values_of`.
        num_ranks: Processes of the job, 1 or more.

    Raises:
        ConfigError: A key of the request has no effect in SFT, or contradicts the data; nothing is skipped silently.
    """
    _refuse_placement(request)
    _refuse_other_roles(request)
    engine = _engine_of(current)
    actor = request.roles.actor
    if engine not in _FSDP and actor != type(actor)():
        raise _not_fsdp(engine)
    job = JobFacts(num_nodes=1, devices_per_node=num_ranks, engines={ROLE: EngineFacts(strategy=engine)})
    changes = [_renamed(change) for change in role_changes(ROLE, actor, job) if not change.key.startswith(_OF_ROLLOUT)]
    refuse_unsupported(request, handled={change.why for change in changes} | set(handled_keys(request)))
    if engine in _FSDP:
        _check_batches(actor, {**current, **{change.key: change.new for change in changes}}, num_ranks)
    return changes


def cpu_changes(config: DictConfig, explicit: Mapping[str, str]) -> Iterator[KeyChange]:
    """Values that stand in for verl's defaults on a CPU; what the user wrote wins.

    Args:
        config: verl's composed config.
        explicit: `{key: value}` that the user wrote.

    Raises:
        ConfigError: The config asks for something that a CPU can't do.
    """
    engine = engine_name(config)
    if engine not in _FSDP or explicit.get("engine.strategy", "fsdp2") != "fsdp2":
        raise cpu.not_on_cpu("engine.strategy", "fsdp2", engine, "engine=fsdp engine.strategy=fsdp2")
    cpu.check_attention(config, _ATTENTION)
    for key, value in _ON_CPU.items():
        if key not in _UNSET or OmegaConf.select(config, key, default=None) is None:
            yield KeyChange(key=key, new=value, why="trainer.device=cpu", default=True)


def engine_name(config: DictConfig) -> str:
    """verl's name of the engine in a composed config."""
    return _engine_of({f"engine.{name}": value for name, value in config.engine.items()})


def _engine_of(current: Mapping[str, Any]) -> str:
    """verl's name of the engine, or that of its config class where the yaml leaves the name to the class."""
    return str(current.get("engine.strategy") or str(current.get("engine._target_")).rpartition(".")[2])


def _renamed(change: KeyChange) -> KeyChange:
    for ppo, sft in _NAMES.items():
        if change.key == ppo or change.key.startswith(f"{ppo}."):
            return replace(change, key=sft + change.key.removeprefix(ppo))
    raise AssertionError(f"{change.key} has no name in SFT")


def _refuse_placement(request: ShardingConfig) -> None:
    devices = request.roles.actor.devices
    if devices is not None:
        raise ConfigError(
            f"{_PREFIX}.devices",
            expected="null in SFT: torchrun or accelerate launch starts one process on each device that it can see",
            found=str(devices),
            consequence="the run does not start",
            remedy=f"remove {_PREFIX}.devices, and choose devices with CUDA_VISIBLE_DEVICES before torchrun",
        )
    if request.roles.actor.layout == "device_map":
        raise ConfigError(
            f"{_PREFIX}.layout",
            expected="fsdp in SFT, whose launcher starts one process for each device",
            found="device_map, for which one process must see all devices of the model",
            consequence="the run does not start",
            remedy=f"remove {_PREFIX}.layout; {_PREFIX}.offload.params=true needs less of each device",
        )
    for key, value in request.changed().items():
        if key.startswith("sharding.placement."):
            raise ConfigError(
                key,
                expected="unset in SFT, which reserves nothing on Ray",
                found=str(value),
                consequence="the run does not start",
                remedy=f"remove {key}",
            )


def _refuse_other_roles(request: ShardingConfig) -> None:
    for key, value in request.changed().items():
        role, _, name = key.removeprefix("sharding.roles.").partition(".")
        if role == ROLE or not key.startswith("sharding.roles."):
            continue
        same = f", or write {_PREFIX}.{name}" if hasattr(request.roles.actor, name.partition(".")[0]) else ""
        raise ConfigError(
            key,
            expected=f"settings of {_PREFIX}: SFT has one role, the model that it trains, which reads that block",
            found=f"{value} for the role {role}",
            consequence="the run does not start, since the request would be skipped",
            remedy=f"remove {key}{same}",
        )


def _check_batches(actor: ActorConfig, values: Mapping[str, Any], num_ranks: int) -> None:
    """Refuses batches that verl asserts on once its processes train, whichever key they were asked for by.

    Args:
        actor: The user's request.
        values: verl's resolved values by dotted key, the request's changes included.
        num_ranks: Processes of the job.
    """
    sequence_parallel = whole_number(_ULYSSES, values.get(_ULYSSES, 1), instead=1)
    if num_ranks % sequence_parallel:
        raise _uneven(sequence_parallel, num_ranks)
    parallel = num_ranks // sequence_parallel
    batch = whole_number(_BATCH, values.get(_BATCH), instead=256)
    if batch < parallel:
        raise _too_small(batch, parallel)
    if values.get("data.use_dynamic_bsz"):
        key = _TOKENS if actor.max_tokens is None else f"{_PREFIX}.max_tokens"
        _check_max_tokens(key, whole_number(_TOKENS, values.get(_TOKENS), instead=8192), sequence_parallel, values)
    else:
        key = _SAMPLES if actor.micro_batch_size is None else f"{_PREFIX}.micro_batch_size"
        _check_micro_batch(key, whole_number(_SAMPLES, values.get(_SAMPLES), instead=1), batch, parallel)


def _uneven(sequence_parallel: int, num_ranks: int) -> ConfigError:
    return ConfigError(
        _ULYSSES,
        expected=f"a divisor of the {num_ranks} processes of the job",
        found=str(sequence_parallel),
        consequence="the run does not start",
        remedy=f"{_ULYSSES}={math.gcd(sequence_parallel, num_ranks)}",
    )


def _too_small(batch: int, parallel: int) -> ConfigError:
    return ConfigError(
        _BATCH,
        expected=f"{parallel} or more, a sample for each data-parallel rank",
        found=str(batch),
        consequence="the run does not start",
        remedy=f"{_BATCH}={parallel}",
    )


def _check_micro_batch(key: str, samples: int, batch: int, parallel: int) -> None:
    """verl takes `train_batch_size // data-parallel size` samples per rank, and asserts on the micro-batch in step 1."""
    per_rank = batch // parallel
    if per_rank % samples == 0:
        return
    fitting = max(size for size in range(1, min(samples, per_rank) + 1) if per_rank % size == 0)
    raise ConfigError(
        key,
        expected=f"a divisor of {per_rank}: {_BATCH}={batch} over {parallel} data-parallel ranks",
        found=str(samples),
        consequence="the run does not start",
        remedy=f"{key}={fitting}",
    )


def _check_max_tokens(key: str, tokens: int, parallel: int, values: Mapping[str, Any]) -> None:
    """With token budgets verl asserts in the first step that draws a sequence above tokens x sequence-parallel size."""
    longest = whole_number(_LENGTH, values.get(_LENGTH), instead=1024)
    if tokens * parallel >= longest:
        return
    enough = -(-longest // parallel)
    raise ConfigError(
        key,
        expected=f"at least {enough}, so that a micro-batch holds the longest sequence ({_LENGTH}={longest})",
        found=str(tokens) + (f" x {_ULYSSES}={parallel}" if parallel > 1 else ""),
        consequence="the run does not start",
        remedy=f"{key}={enough}, or {_LENGTH}={tokens * parallel}",
    )


def _not_fsdp(engine: str) -> ConfigError:
    return ConfigError(
        _PREFIX,
        expected="engine=fsdp for settings of the model",
        found=engine,
        consequence="the run does not start, since the request would be skipped",
        remedy=f"engine=fsdp optim=fsdp, or remove the {_PREFIX} overrides and set {engine}'s own keys",
    )
