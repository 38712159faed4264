"""What becomes of each role's offload flags, the user's and verl's own, before anything is built."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from verl_ext_sharding.config.dtypes import item_bytes, stored_dtype
from verl_ext_sharding.config.measures import ENGINE_BLOCK, MODEL_BLOCK
from verl_ext_sharding.config.model_size import num_parameters
from verl_ext_sharding.config.offload_plan import OffloadFlags, reference_notes, size_on_host, trained_notes
from verl_ext_sharding.config.schema import RoleConfig, ShardingConfig
from verl_ext_sharding.config.translate import is_spread
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.job import JobFacts


def offload_notes(
    request: ShardingConfig,
    facts: JobFacts,
    current: Mapping[str, Any],
    explicit: Collection[str] = (),
    blocks: Mapping[str, str] = ENGINE_BLOCK,
) -> list[str]:
    """One sentence for each offload flag that verl 0.9 drops, or that does something else than its name says.

    Args:
        request: The user's request; what it says of a role counts before verl's keys.
        facts: The job.
        current: verl's resolved values by dotted key, from `translate.values_of`.
        explicit: verl's keys that the user wrote on the command line.
        blocks: Where the config has the engine of each role that trains.

    Raises:
        ConfigError: Flags that break the run together, or that ask for what verl can't do.
    """
    if current.get("trainer.device") == "cpu":
        return []  # parameters are on the host anyway
    notes: list[str] = []
    for role in _roles(request, facts):
        asked = getattr(request.roles, role)
        if role == "ref":
            notes += _reference(asked, facts.engines[role].strategy, current, explicit)
        else:
            notes += trained_notes(role, facts.engines[role].strategy, _flags(blocks[role], asked, current), blocks)
    return notes


def _roles(request: ShardingConfig, facts: JobFacts) -> Iterator[str]:
    """Roles that verl's FSDP engines shard; layers spread over the devices of one process have an engine of ours."""
    for role, engine in facts.engines.items():
        ours = is_spread(role, request) or (role == "ref" and facts.ref_in_actor)
        if engine.strategy not in ("fsdp", "fsdp2") or ours:
            continue
        yield role


def _flags(engine: str, asked: RoleConfig, current: Mapping[str, Any]) -> OffloadFlags:
    offload = asked.offload
    return OffloadFlags(
        params=_either(offload.params, current.get(f"{engine}.param_offload")),
        optimizer=_either(offload.optimizer, current.get(f"{engine}.optimizer_offload")),
        offload_policy=bool(current.get(f"{engine}.offload_policy")),
        reshard_after_forward=bool(current.get(f"{engine}.reshard_after_forward", True)),
    )


def _reference(asked: RoleConfig, strategy: str, current: Mapping[str, Any], explicit: Collection[str]) -> list[str]:
    key = f"{ENGINE_BLOCK['ref']}.param_offload"
    flags = _flags(ENGINE_BLOCK["ref"], asked, current)
    if asked.offload.params is None and key not in explicit:
        flags = replace(flags, params=None)  # verl's default for it is false, which says nothing
    host_bytes = None
    if flags.params is False:  # else no sentence needs them
        host_bytes = stored_bytes("ref", current)
    if asked.offload.params is False:
        raise _always_offloaded(host_bytes)
    return reference_notes(strategy, flags, host_bytes)


def _either(asked: Any, verls: Any) -> Any:
    return verls if asked is None else asked


def stored_bytes(role: str, current: Mapping[str, Any]) -> int | None:
    """Bytes that a role's parameters take in the dtype that verl stores them in; None where no file here says how many.

    Args:
        role: "actor", "ref" or "critic".
        current: verl's resolved values by dotted key.
    """
    size = item_bytes(stored_dtype(role, current.get(f"{ENGINE_BLOCK[role]}.model_dtype")))
    count = num_parameters(current.get(f"{MODEL_BLOCK[role]}.path"))
    return None if size is None or count is None else size * count


def _always_offloaded(host_bytes: int | None) -> ConfigError:
    return ConfigError(
        "sharding.roles.ref.offload.params",
        expected="true or null: verl 0.9 always keeps the reference's parameters on the host",
        found="false",
        consequence="the run does not start, since they would stay on the host all the same",
        remedy="remove sharding.roles.ref.offload.params, and count on host memory for the reference"
        f"{size_on_host(host_bytes)}",
    )
