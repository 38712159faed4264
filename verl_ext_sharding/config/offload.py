"""What becomes of each role's offload flags, the user's and verl's own, before anything is built."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_ext_sharding.config.measures import ENGINE_BLOCK, MODEL_BLOCK
from verl_ext_sharding.config.offload_plan import OffloadRequest, resolve_offload
from verl_ext_sharding.config.schema import RoleConfig, ShardingConfig
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.job import JobFacts

_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
_MAX_HEADER_BYTES = 100 << 20
"""Limit of the safetensors format."""


def offload_notes(
    request: ShardingConfig, facts: JobFacts, current: Mapping[str, Any], explicit: Collection[str] = ()
) -> list[str]:
    """One sentence for each offload flag that verl 0.9 drops, or that does something else than its name says.

    Args:
        request: The user's request; what it says of a role counts before verl's keys.
        facts: The job.
        current: verl's resolved values by dotted key, from `translate.values_of`.
        explicit: verl's keys that the user wrote on the command line.

    Raises:
        ConfigError: Flags that break the run together, or that ask for what verl can't do.
    """
    if current.get("trainer.device") == "cpu":
        return []  # parameters are on the host anyway
    notes: list[str] = []
    for role in _roles(facts):
        notes += _notes(role, getattr(request.roles, role), facts, current, explicit)
    return notes


def _roles(facts: JobFacts) -> Iterator[str]:
    for role, engine in facts.engines.items():
        if engine.strategy in ("fsdp", "fsdp2") and not (role == "ref" and facts.ref_in_actor):
            yield role


def _notes(
    role: str, config: RoleConfig, facts: JobFacts, current: Mapping[str, Any], explicit: Collection[str]
) -> tuple[str, ...]:
    engine, offload = ENGINE_BLOCK[role], config.offload
    stored_bytes = parameter_bytes(current.get(f"{MODEL_BLOCK[role]}.path"), current.get(f"{engine}.model_dtype"))
    if role == "ref":
        if offload.params is False:
            raise _always_offloaded(stored_bytes)
        # verl's default for it is false, which says nothing; what the user wrote does
        written = current.get(f"{engine}.param_offload") if f"{engine}.param_offload" in explicit else None
        requested = OffloadRequest(params=written)
    else:
        requested = OffloadRequest(
            params=_either(offload.params, current.get(f"{engine}.param_offload")),
            optimizer=_either(offload.optimizer, current.get(f"{engine}.optimizer_offload")),
            activations=_either(offload.activations, current.get(f"{MODEL_BLOCK[role]}.enable_activation_offload")),
        )
    plan = resolve_offload(
        strategy=facts.engines[role].strategy,
        role=role,
        requested=requested,
        offload_policy=bool(current.get(f"{engine}.offload_policy")),
        reshard_after_forward=bool(current.get(f"{engine}.reshard_after_forward", True)),
        param_bytes=stored_bytes,
    )
    return plan.notes


def _either(asked: Any, verls: Any) -> Any:
    return verls if asked is None else asked


def parameter_bytes(folder: str | None, dtype: str | None) -> int | None:
    """Bytes that a model's parameters take, read from the headers of its safetensors files; None where there are none.

    Args:
        folder: Folder of the model. An id of a hub is none.
        dtype: As verl names it in `model_dtype`; None: verl's default, fp32.
    """
    size = _BYTES.get(str(dtype or "fp32"))
    files = sorted(Path(folder).expanduser().glob("*.safetensors")) if folder else []
    if not files or size is None:
        return None
    try:
        return size * sum(_num_elements(file) for file in files)
    except (OSError, ValueError, struct.error):
        return None  # not for this check to complain about


def _num_elements(file: Path) -> int:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{file} is no safetensors file")
        header = json.loads(stream.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _always_offloaded(stored_bytes: int | None) -> ConfigError:
    size = "" if stored_bytes is None else f", {stored_bytes / 2**30:.2f} GiB over all its ranks"
    return ConfigError(
        "sharding.roles.ref.offload.params",
        expected="true or null: verl 0.9 always keeps the reference's parameters on the host",
        found="false",
        consequence="the run does not start, since they would stay on the host all the same",
        remedy=f"remove sharding.roles.ref.offload.params, and count on host memory for the reference{size}",
    )
