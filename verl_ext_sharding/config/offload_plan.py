"""Resolves a role's offload flags against what verl 0.9 does with them, before anything is built. Pure, no torch.

Where verl drops a flag silently, the plan says so in its notes; where a combination breaks the run, it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl_ext_sharding.config.measures import ENGINE_BLOCK
from verl_ext_sharding.errors import ConfigError

TRAINED = ("actor", "critic")
FORWARD_ONLY = ("ref",)
STRATEGIES = ("fsdp", "fsdp2")


@dataclass(frozen=True, kw_only=True)
class OffloadRequest:
    """What a role's `sharding.roles.<role>.offload` or verl's own keys ask for; None: not set.

    Args:
        params: Parameters on the host between phases.
        optimizer: Optimizer states on the host between phases; `"step"`: on the device for the step alone.
        activations: Activations on the host between forward and backward.
    """

    params: bool | None = None
    optimizer: bool | Literal["step"] | None = None
    activations: bool | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in (None, True, False, "step"):
            raise ConfigError(
                "sharding.roles.<role>.offload.optimizer",
                expected="true, false or step",
                found=repr(self.optimizer),
                consequence="it is unclear where optimizer states should be, so nothing is started",
                remedy="sharding.roles.<role>.offload.optimizer=step",
            )


@dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """What holds for one role.

    Args:
        params: verl's `param_offload`: parameters and gradients leave the device between phases.
        optimizer: verl's `optimizer_offload`: optimizer states leave the device between phases.
        optimizer_per_step: Ours: optimizer states come to the device for the step alone.
        activations: Ours: activations leave the device between forward and backward.
        offload_policy: FSDP2's CPUOffloadPolicy: parameters, gradients and states live on the host.
        optimizer_device: Where the optimizer steps; None for a role without one.
        host_bytes: Host bytes that the parameters take on all ranks together, None if unknown or none.
        notes: One sentence for each flag that does something else than its name says.
    """

    params: bool
    optimizer: bool
    optimizer_per_step: bool
    activations: bool
    offload_policy: bool
    optimizer_device: Literal["device", "host"] | None
    host_bytes: int | None
    notes: tuple[str, ...] = ()


def resolve_offload(
    *,
    strategy: str,
    role: str,
    requested: OffloadRequest,
    offload_policy: bool = False,
    reshard_after_forward: bool = True,
    param_bytes: int | None = None,
) -> OffloadPlan:
    """What verl and we make of a role's offload flags.

    Args:
        strategy: `fsdp` (FSDP1) or `fsdp2`.
        role: `actor`, `critic` or `ref`.
        requested: The flags.
        offload_policy: verl's `fsdp_config.offload_policy`.
        reshard_after_forward: verl's `fsdp_config.reshard_after_forward`.
        param_bytes: Bytes of the role's parameters as stored, all ranks together; None if unknown.

    Raises:
        ConfigError: An unknown role or strategy, a flag that means nothing for the role, or a combination that breaks:
            CPUOffloadPolicy with `reshard_after_forward=False` (verl#4974).
    """
    prefix = _check_names(strategy, role)
    if role in FORWARD_ONLY:
        return _forward_only(prefix, strategy, role, requested, offload_policy, reshard_after_forward, param_bytes)
    notes: list[str] = []
    params, optimizer = bool(requested.params), requested.optimizer or False
    if offload_policy and strategy == "fsdp":
        notes.append(
            f"{prefix}.offload_policy has no effect on FSDP1, whose CPU offload breaks gradient accumulation; for the"
            f" same saving write {prefix}.param_offload=True {prefix}.optimizer_offload=True, or"
            f" {prefix.rpartition('.')[0]}.strategy=fsdp2"
        )
        offload_policy = False
    if offload_policy:
        _check_reshard(prefix, reshard_after_forward)
        dropped = [name for name, on in (("param_offload", params), ("optimizer_offload", optimizer)) if on]
        if dropped:
            notes.append(
                f"{prefix}.offload_policy wins on FSDP2: verl keeps it alone and drops {' and '.join(dropped)} (verl#5995)"
            )
        notes.append("with offload_policy the optimizer steps on the CPU, slower than on the device")
        params, optimizer = False, False
    return OffloadPlan(
        params=params,
        optimizer=optimizer is True,
        optimizer_per_step=optimizer == "step",
        activations=bool(requested.activations),
        offload_policy=offload_policy,
        optimizer_device="host" if offload_policy else "device",
        host_bytes=param_bytes if params or offload_policy else None,
        notes=tuple(notes),
    )


def _forward_only(
    prefix: str,
    strategy: str,
    role: str,
    requested: OffloadRequest,
    offload_policy: bool,
    reshard_after_forward: bool,
    param_bytes: int | None,
) -> OffloadPlan:
    for name, value in (("optimizer", requested.optimizer), ("activations", requested.activations)):
        if value:
            raise ConfigError(
                f"sharding.roles.{role}.offload.{name}",
                expected="not set",
                found=repr(value),
                consequence=f"{role} has no backward pass and no optimizer, so it would do nothing",
                remedy=f"sharding.roles.{role}.offload.{name}=null",
            )
    if strategy == "fsdp2":
        _check_reshard(prefix, reshard_after_forward)
    notes = []
    if requested.params is False:
        size = "their bytes as stored" if param_bytes is None else f"{param_bytes / 2**30:.2f} GiB"
        notes.append(
            f"{prefix}.param_offload=False has no effect: verl 0.9 always keeps {role}'s parameters on the host, which"
            f" takes {size} there over all ranks"
        )
    if offload_policy and strategy == "fsdp":
        notes.append(f"{prefix}.offload_policy has no effect on FSDP1; {role} is offloaded there without it")
    return OffloadPlan(
        params=True,
        optimizer=False,
        optimizer_per_step=False,
        activations=False,
        offload_policy=strategy == "fsdp2",
        optimizer_device=None,
        host_bytes=param_bytes,
        notes=tuple(notes),
    )


def _check_names(strategy: str, role: str) -> str:
    for subject, value, known in (("strategy", strategy, STRATEGIES), ("role", role, TRAINED + FORWARD_ONLY)):
        if value not in known:
            raise ConfigError(
                f"sharding.roles.{role}.offload",
                expected=f"{subject} {' or '.join(known)}",
                found=repr(value),
                consequence="there is no FSDP engine whose tensors could be offloaded",
                remedy=f"sharding.roles.{role}.offload={{params: null, optimizer: null, activations: null}}",
            )
    return ENGINE_BLOCK[role]


def _check_reshard(prefix: str, reshard_after_forward: bool) -> None:
    if reshard_after_forward:
        return
    raise ConfigError(
        f"{prefix}.reshard_after_forward",
        expected="True, since FSDP2's CPUOffloadPolicy is on",
        found="False",
        consequence="gathered parameters stay on the device while their shards live on the host, and the next phase fails"
        " on the device mismatch (verl#4974)",
        remedy=f"{prefix}.reshard_after_forward=True, or {prefix}.offload_policy=False {prefix}.param_offload=True",
    )
