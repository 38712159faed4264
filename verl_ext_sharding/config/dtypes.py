"""Dtypes that a card can't compute in, and float16 where nothing keeps its gradients from vanishing. Pure.

bfloat16 needs compute capability 8.0 (Ampere): CUDA C++ Programming Guide, "Arithmetic Instructions" and "Supported
datatypes of tensor cores".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_ext_sharding.config.measures import ENGINE_BLOCK
from verl_ext_sharding.errors import ConfigError

if TYPE_CHECKING:
    from verl_ext_sharding.config.schema import ShardingConfig

Capability = tuple[int, int]
"""Compute capability of a CUDA device, such as (7, 5)."""

BFLOAT16_FROM: Capability = (8, 0)

_SPELLINGS = {"bf16": "bfloat16", "half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32"}
_ITEM_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
"""In the spellings that verl reads (utils/torch_dtypes.py)."""

_ROLLOUT = "actor_rollout_ref.rollout"


def full_dtype(value: Any) -> Any:
    """The full name of a dtype that verl reads in a shorter spelling (utils/torch_dtypes.py); any other value as it is."""
    return _SPELLINGS.get(value, value) if isinstance(value, str) else value


def stored_dtype(role: str, asked: Any) -> str:
    """The dtype in which verl's FSDP engine stores a role's weights, as the user spells it.

    Args:
        role: "actor", "ref" or "critic".
        asked: `model_dtype` of the role; None: verl's own choice (workers/engine/fsdp/transformer_impl.py, _build_module).
    """
    return str(asked) if asked is not None else "bf16" if role == "ref" else "fp32"


def compute_dtype(mixed_precision: Any) -> str:
    """The dtype in which verl's FSDP engine computes, as torch spells it.

    Args:
        mixed_precision: The engine's block of that name, or None (workers/engine/fsdp/transformer_impl.py).
    """
    dtype = str((mixed_precision or {}).get("param_dtype", "bf16"))
    return str(full_dtype(dtype))


def item_bytes(dtype: str) -> int | None:
    """Bytes of one weight; None for a dtype that no weights are trained in.

    Args:
        dtype: As verl's `model_dtype`.
    """
    return _ITEM_BYTES.get(dtype)


@dataclass(kw_only=True, frozen=True)
class DtypeUse:
    """A dtype that a role computes in or keeps its weights in.

    Args:
        role: "actor", "rollout", "ref", "critic", ...
        key: The override that says so.
        dtype: In any spelling of torch, verl or vLLM.
    """

    role: str
    key: str
    dtype: str


def dtype_uses(request: ShardingConfig, current: Mapping[str, Any], *, hf_rollout: bool) -> list[DtypeUse]:
    """The dtypes that the run must be able to compute in.

    Args:
        request: The user's request: `dtype` and `compute_dtype` of each role.
        current: verl's resolved values by dotted key.
        hf_rollout: The rollout is ours, whose dtype is verl's key with the default bfloat16. vLLM and SGLang check their
            own.
    """
    if current.get("trainer.device") == "cpu":
        return []
    uses = [
        DtypeUse(role=role, key=f"sharding.roles.{role}.{name}", dtype=getattr(getattr(request.roles, role), name))
        for role in (*ENGINE_BLOCK, "reward", "teacher")
        for name in ("dtype", "compute_dtype")
        if getattr(getattr(request.roles, role), name, None) is not None
    ]
    if hf_rollout:
        dtype = str(current.get(f"{_ROLLOUT}.dtype") or "bfloat16")
        uses.append(DtypeUse(role="rollout", key=f"{_ROLLOUT}.dtype", dtype=dtype))
    return uses


def dtype_finding(
    role: str, dtype: str, capability: Capability | None, *, key: str | None = None, place: str = "its device"
) -> ConfigError | None:
    """What is wrong with a role's dtype on a device; None: nothing, or nothing that is known.

    Args:
        role: The role.
        dtype: In any spelling of torch, verl or vLLM.
        capability: Compute capability of its device; None: unknown, or no CUDA device.
        key: The override to change; None: `sharding.roles.<role>.compute_dtype`.
        place: The device, in words.
    """
    if capability is None or capability >= BFLOAT16_FROM or full_dtype(dtype) != "bfloat16":
        return None
    key = key or f"sharding.roles.{role}.compute_dtype"
    # weights that are trained in float16 lose small updates; stored weights of such a card are float32
    better = "float32" if key.endswith(f"{role}.dtype") and role in ("actor", "critic") else "float16"
    other = "float16" if better == "float32" else "float32"
    return ConfigError(
        key,
        expected=f"float16 or float32 for {role}: bfloat16 needs compute capability 8.0 (Ampere) or later",
        found=f"{dtype} on {place}, of compute capability {capability[0]}.{capability[1]}",
        consequence="the run stops before any model loads",
        remedy=f"{key}={better} (or {other}), or devices for {role} that can",
    )


def check_dtypes(
    uses: Sequence[DtypeUse],
    devices_of: Callable[[str], Sequence[int]],
    capabilities: Mapping[int, Capability | None],
    names: Mapping[int, str] | None = None,
) -> None:
    """Compares every use with the devices of its role.

    Args:
        uses: From `dtype_uses`.
        devices_of: The device numbers of a role.
        capabilities: Compute capability by device number; what is missing or None is unknown.
        names: Names of the nodes of devices, for the message.

    Raises:
        ConfigError: The first dtype that a device can't compute in.
    """
    for use in uses:
        for device in devices_of(use.role):
            node = (names or {}).get(device)
            place = f"device {device}" + (f" (node {node})" if node else "")
            finding = dtype_finding(use.role, use.dtype, capabilities.get(device), key=use.key, place=place)
            if finding is not None:
                raise finding


def device_capabilities(
    nodes: Sequence[Sequence[Capability]], *, num_nodes: int, devices_per_node: int
) -> dict[int, Capability | None]:
    """The capability of each device of the job, as far as it is certain before Ray reserves devices.

    Args:
        nodes: Of each node that says what GPUs it has, in verl's order, their capabilities.
        num_nodes: Nodes of the job. Where the cluster has more, it is not known which ones Ray takes.
        devices_per_node: Devices of the job on each. Where a node has more, it is not known which ones are Ray's.
    """
    found: dict[int, Capability | None] = {}
    everywhere = {capability for node in nodes for capability in node}
    for device in range(num_nodes * devices_per_node):
        index, local = divmod(device, devices_per_node)
        gpus = nodes[index] if len(nodes) == num_nodes else ()
        if len(everywhere) == 1 and len(nodes) >= num_nodes:
            found[device] = next(iter(everywhere))
        elif len(set(gpus)) == 1:
            found[device] = gpus[0]
        else:
            found[device] = gpus[local] if len(gpus) == devices_per_node else None
    return found


def float16_notes(
    current: Mapping[str, Any], roles: Sequence[str], blocks: Mapping[str, str] = ENGINE_BLOCK
) -> list[str]:
    """One sentence for each trained role whose float16 is not what it seems.

    verl scales the loss of its FSDP engines (`ShardedGradScaler`) if `mixed_precision.param_dtype` is float16, and only
    then (workers/engine/fsdp/transformer_impl.py, _build_fsdp_module).

    Args:
        current: verl's resolved values by dotted key, with what the request set.
        roles: Roles of the job that have an FSDP engine.
        blocks: Where the config has the engine of each role that trains.
    """
    notes = []
    for role in roles:
        if role not in ("actor", "critic"):
            continue
        block = blocks[role]
        stored = str(current.get(f"{block}.model_dtype") or "fp32")
        computed = str(current.get(f"{block}.mixed_precision.param_dtype") or "bf16")
        if full_dtype(stored) != "float16":
            continue
        scaled = full_dtype(computed) == "float16"
        why = "Adam's states are float16 too, where its eps of 1e-8 is 0"
        if not scaled:
            why = f"verl scales the loss only for float16 computation, and here it is {computed}; {why}"
        notes.append(
            f"{role} trains weights stored in float16: {why}; write sharding.roles.{role}.dtype=float32 "
            f"sharding.roles.{role}.compute_dtype=float16"
        )
    return notes
