"""The request in the keys of `verl.trainer.sft_trainer`, whose one role reads `sharding.roles.actor`.

SFT trains what the actor is in PPO, a language model in the same engine; so it gets the actor's keys, under the names that
they have there. Its processes are started by torchrun or accelerate, which also give each its device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext_sharding.config import cpu
from verl_ext_sharding.config.changes import KeyChange
from verl_ext_sharding.config.dtypes import float16_notes
from verl_ext_sharding.config.engine_flags import check_flags, unread_flags
from verl_ext_sharding.config.measures import ENGINE_BLOCK, handled_keys
from verl_ext_sharding.config.offload import offload_notes
from verl_ext_sharding.config.schema import ShardingConfig
from verl_ext_sharding.config.sft_batches import SAMPLES, TOKENS, batch_notes, check_batches
from verl_ext_sharding.config.translate import refuse_unsupported, role_changes
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.job import EngineFacts, JobFacts

ROLE = "actor"
"""The block of `sharding.roles` that SFT reads."""

_PREFIX = f"sharding.roles.{ROLE}"

_NAMES = {
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": SAMPLES,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": TOKENS,
    "actor_rollout_ref.actor.use_dynamic_bsz": "data.use_dynamic_bsz",
    ENGINE_BLOCK[ROLE]: "engine",
    "actor_rollout_ref.model": "model",
}
"""A key or block of the actor in PPO, and where SFT has it."""

_BLOCKS = {ROLE: _NAMES[ENGINE_BLOCK[ROLE]]}
"""Where SFT has the engine of its one role."""

_BATCH_NAMES = {SAMPLES: "micro_batch_size", TOKENS: "max_tokens"}
"""A key of micro-batches, and its name in a role's block."""

_OF_ROLLOUT = "actor_rollout_ref.rollout."
"""Log-probs of rollouts, which SFT doesn't compute."""

_FSDP = ("fsdp", "fsdp2")
"""Engines that the settings of a role act on."""

_STRATEGIES = {"McoreEngineConfig": "megatron"}
"""verl's name of the engine whose yaml leaves the name to the class."""

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
    facts = _facts(engine, num_ranks)
    changes = [
        _renamed(change) for change in role_changes(ROLE, actor, facts) if not change.key.startswith(_OF_ROLLOUT)
    ]
    refuse_unsupported(request, handled={change.why for change in changes} | set(handled_keys(request)))
    asked_by = {key: f"{_PREFIX}.{name}" for key, name in _BATCH_NAMES.items() if getattr(actor, name) is not None}
    check_batches(engine, {**current, **{change.key: change.new for change in changes}}, num_ranks, asked_by)
    return changes


def notes(
    request: ShardingConfig, current: Mapping[str, Any], num_ranks: int, explicit: Collection[str] = ()
) -> list[str]:
    """One sentence for each key that verl reads otherwise than its name says.

    Args:
        request: The user's request.
        current: verl's resolved values by dotted key, with what the request set.
        num_ranks: Processes of the job, 1 or more.
        explicit: verl's keys that the user wrote on the command line.

    Raises:
        ConfigError: Offload flags that break the run together, or that ask for what verl can't do.
    """
    engine = _engine_of(current)
    said = offload_notes(request, _facts(engine, num_ranks), current, blocks=_BLOCKS)
    if engine in _FSDP:
        said += float16_notes(current, [ROLE], _BLOCKS)
    check_flags(engine, "engine", current, ranks=num_ranks)
    said += unread_flags(engine, "engine", "model", current, explicit)
    return said + batch_notes(engine, current, num_ranks)


def _facts(engine: str, num_ranks: int) -> JobFacts:
    """The job as one of PPO that trains the actor alone."""
    return JobFacts(num_nodes=1, devices_per_node=num_ranks, engines={ROLE: EngineFacts(strategy=engine)})


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
    """verl's name of the engine, or that of its config class where the yaml leaves the name to a class of somebody's own."""
    named = str(current.get("engine._target_")).rpartition(".")[2]
    return str(current.get("engine.strategy") or _STRATEGIES.get(named, named))


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


def _not_fsdp(engine: str) -> ConfigError:
    return ConfigError(
        _PREFIX,
        expected="engine=fsdp for settings of the model",
        found=engine,
        consequence="the run does not start, since the request would be skipped",
        remedy=f"engine=fsdp optim=fsdp, or remove the {_PREFIX} overrides and set {engine}'s own keys",
    )
