"""Memory measures that verl has no key for, per role: read from the request, carried to the workers in the run's spec."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # every worker reads this module when verl is imported, and the schema takes longest of all of ours
    from verl_ext_sharding.config.schema import CheckpointingConfig, RoleConfig, ShardingConfig

ENGINE_ROLES = ("actor", "ref", "critic")

ENGINE_BLOCK = {
    "actor": "actor_rollout_ref.actor.fsdp_config",
    "ref": "actor_rollout_ref.ref.fsdp_config",
    "critic": "critic.fsdp",
}
"""Where verl's config has the FSDP engine of each role."""

MODEL_BLOCK = {"actor": "actor_rollout_ref.model", "ref": "actor_rollout_ref.model", "critic": "critic.model"}
"""Where verl's config has the model of each role."""


ULYSSES_KEY = {
    "actor": "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "ref": "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
    "critic": "critic.fsdp.ulysses_sequence_parallel_size",
}
"""Where verl's config has the Ulysses sequence parallelism of each role's FSDP engine."""


@dataclass(kw_only=True, frozen=True)
class LayerSpread:
    """How one process spreads a role's model over its devices (`layout: device_map`).

    Args:
        device_map: "auto", "balanced", "balanced_low_0", "sequential", or `{module: place}`.
        devices: Device numbers of the job, in the order of the places.
        reserved_bytes: What other roles keep on each of these devices while this one runs; empty: nothing.
        device_bytes: What may be used of a device (`sharding.memory`); None: all that is free.
    """

    device_map: str | dict[str, Any] = "auto"
    devices: tuple[int, ...] = ()
    reserved_bytes: tuple[int, ...] = ()
    device_bytes: int | None = None


@dataclass(kw_only=True, frozen=True)
class RoleMeasures:
    """What our engines do for one role. None and False: nothing.

    Args:
        attention: As asked for ("auto", "varlen", ...); the worker decides what its card can run.
        logits: "auto", "fused", "chunked" or "full".
        checkpointing: `True` for the policy with the best time for its memory, or the keys of `policy_config`.
        offload_activations: Activations live on the host between forward and backward.
        optimizer_per_step: Optimizer states come to the device for the step alone.
        layers: How the layers are spread over the devices of one process, or None for one device for each process.
    """

    attention: str | None = None
    logits: str | None = None
    checkpointing: bool | dict[str, Any] | None = None
    offload_activations: bool = False
    optimizer_per_step: bool = False
    layers: LayerSpread | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> RoleMeasures:
        """The inverse of `to_dict`."""
        layers = fields["layers"]
        if layers is not None:
            numbers = {name: tuple(layers[name]) for name in ("devices", "reserved_bytes")}
            layers = LayerSpread(**layers | numbers)
        return cls(**fields | {"layers": layers})


def measures_of(request: ShardingConfig) -> dict[str, RoleMeasures]:
    """The measures of each role that asks for any."""
    found = {role: _role(getattr(request.roles, role)) for role in ENGINE_ROLES}
    return {role: measures for role, measures in found.items() if measures != RoleMeasures()}


def _role(config: RoleConfig) -> RoleMeasures:
    return RoleMeasures(
        attention=config.attn_implementation,
        logits=getattr(config, "logits", None),
        checkpointing=_checkpointing(config.gradient_checkpointing),
        offload_activations=bool(config.offload.activations),
        optimizer_per_step=config.offload.optimizer == "step",
    )


def _checkpointing(asked: bool | str | CheckpointingConfig | None) -> bool | dict[str, Any] | None:
    if isinstance(asked, str):
        return {"policy": asked}
    if asked is None or isinstance(asked, bool):
        return asked or None
    return asked.given() or True


def handled_keys(request: ShardingConfig) -> Iterator[str]:
    """Keys of the request that became measures."""
    for role, measures in measures_of(request).items():
        prefix = f"sharding.roles.{role}"
        names = {
            "attn_implementation": measures.attention,
            "logits": measures.logits,
            "gradient_checkpointing": measures.checkpointing,
            "offload.activations": measures.offload_activations,
            "offload.optimizer": measures.optimizer_per_step,
        }
        yield from (f"{prefix}.{name}" for name, value in names.items() if value)
    spread = [role for role in ENGINE_ROLES if getattr(request.roles, role).layout == "device_map"]
    for role in spread:
        yield from (f"sharding.roles.{role}.layout", f"sharding.roles.{role}.device_map")
    if spread and request.memory.gpu_gib is not None:
        yield from ("sharding.memory.gpu_gib", "sharding.memory.headroom")
