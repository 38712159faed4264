"""What verl 0.9 does with a role's offload flags, before anything is built. Pure, no torch.

Where verl drops a flag silently, a note says so; where a combination breaks the run, it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from verl_ext_sharding.config.measures import ENGINE_BLOCK
from verl_ext_sharding.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class OffloadFlags:
    """The flags of one role, from `sharding.roles.<role>.offload` or verl's own keys; None: not set.

    Args:
        params: Parameters on the host between phases.
        optimizer: Optimizer states on the host between phases; `"step"`: on the device for the step alone.
        offload_policy: verl's `fsdp_config.offload_policy`: FSDP2's CPUOffloadPolicy.
        reshard_after_forward: verl's `fsdp_config.reshard_after_forward`.
    """

    params: bool | None = None
    optimizer: bool | Literal["step"] | None = None
    offload_policy: bool = False
    reshard_after_forward: bool = True


def trained_notes(role: str, strategy: str, flags: OffloadFlags, blocks: Mapping[str, str] = ENGINE_BLOCK) -> list[str]:
    """One sentence for each flag of a role that trains, where verl does something else than its name says.

    Args:
        role: "actor" or "critic".
        strategy: "fsdp" (FSDP1) or "fsdp2".
        flags: Its flags.
        blocks: Where the config has the engine of each role.

    Raises:
        ConfigError: CPUOffloadPolicy with `reshard_after_forward=False` (verl#4974).
    """
    prefix = blocks[role]
    if not flags.offload_policy:
        return []
    if strategy == "fsdp":
        return [
            f"{prefix}.offload_policy has no effect on FSDP1, whose CPU offload breaks gradient accumulation; for the"
            f" same saving write {prefix}.param_offload=True {prefix}.optimizer_offload=True, or"
            f" {prefix.rpartition('.')[0] or prefix}.strategy=fsdp2"  # SFT has it in the engine's block
        ]
    if not flags.reshard_after_forward:
        raise _not_resharded(prefix, f", or {prefix}.offload_policy=False {prefix}.param_offload=True")
    notes = []
    dropped = [name for name, on in (("param_offload", flags.params), ("optimizer_offload", flags.optimizer)) if on]
    if dropped:
        notes.append(
            f"{prefix}.offload_policy wins on FSDP2: verl keeps it alone and drops {' and '.join(dropped)} (verl#5995)"
        )
    return [*notes, "with offload_policy the optimizer steps on the CPU, slower than on the device"]


def reference_notes(strategy: str, flags: OffloadFlags, host_bytes: int | None) -> list[str]:
    """One sentence for each flag of the reference that does something else than its name says.

    Args:
        strategy: "fsdp" (FSDP1) or "fsdp2".
        flags: Its flags.
        host_bytes: What its parameters take on the host, all ranks together; None: unknown.

    Raises:
        ConfigError: `reshard_after_forward=False` on FSDP2, which always offloads a reference by CPUOffloadPolicy.
    """
    prefix = ENGINE_BLOCK["ref"]
    if strategy == "fsdp2" and not flags.reshard_after_forward:
        raise _not_resharded(prefix, "")
    notes = []
    if flags.params is False:
        notes.append(
            f"{prefix}.param_offload=False has no effect: verl 0.9 always keeps ref's parameters on the host"
            f"{size_on_host(host_bytes)}"
        )
    if flags.offload_policy and strategy == "fsdp":
        notes.append(f"{prefix}.offload_policy has no effect on FSDP1; ref is offloaded there without it")
    return notes


def size_on_host(host_bytes: int | None) -> str:
    """Bytes in words, or nothing where they are unknown."""
    return "" if host_bytes is None else f", {host_bytes / 2**30:.2f} GiB over all its ranks"


def _not_resharded(prefix: str, other: str) -> ConfigError:
    return ConfigError(
        f"{prefix}.reshard_after_forward",
        expected="True, since FSDP2's CPUOffloadPolicy is on",
        found="False",
        consequence="gathered parameters stay on the device while their shards live on the host, and the next phase fails"
        " on the device mismatch (verl#4974)",
        remedy=f"{prefix}.reshard_after_forward=True{other}",
    )
