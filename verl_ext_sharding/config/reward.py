"""How a reward model is served with `reward.reward_model.rollout.name=hf`, beyond what verl has keys for.

Built in the driver from the typed request, carried in the run's spec, read where the reward servers start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from verl_ext_sharding.errors import ConfigError, did_you_mean

if TYPE_CHECKING:  # every worker reads this module when verl is imported, and the schema takes longest of all of ours
    from verl_ext_sharding.config.schema import ShardingConfig

KEY = "sharding.roles.reward"

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""accelerate's own ways to spread layers."""

ATTENTION = ("auto", "flash_attention_2", "sdpa", "eager")
"""What serves padded batches; `varlen` is for the packed ones of training."""

_NUMBERED = re.compile(r"cpu|[a-z]+:\d+")


@dataclass(kw_only=True, frozen=True)
class RewardServerSettings:
    """What the user asked of the reward servers.

    Args:
        attn_implementation: One of `ATTENTION`; None and "auto" leave it to transformers (sdpa where the model has it).
        device_map: One of `DEVICE_MAPS`, or a map as `placement.layer_keys.parse_places` takes it. None: the whole model
            on one device.
        offload_params: Weights stay in host memory and visit the device layer by layer.
        execution_device: Where it computes: "cpu", or a numbered device of the server's process such as "cuda:0". None:
            the process's first device.
        own_pool: verl's `reward.reward_model.enable_resource_pool`. It then scores during rollout and never wakes the
            servers first, so that they must not sleep.

    Raises:
        ConfigError: A device has no number, a name is unknown, or two settings exclude each other.
    """

    attn_implementation: str | None = None
    device_map: str | Mapping[str, Any] | None = None
    offload_params: bool = False
    execution_device: str | None = None
    own_pool: bool = False

    def __post_init__(self) -> None:
        if self.attn_implementation is not None and self.attn_implementation not in ATTENTION:
            raise _bad("attn_implementation", " | ".join(ATTENTION), self.attn_implementation, "auto")
        if isinstance(self.device_map, str) and self.device_map not in DEVICE_MAPS:
            close = did_you_mean(self.device_map, DEVICE_MAPS) or "auto"
            raise _bad("device_map", " | ".join(DEVICE_MAPS) + " | {module: device}", self.device_map, close)
        device = self.execution_device
        if device is not None and not _NUMBERED.fullmatch(device):
            raise _bad("execution_device", "cpu, or a device with its number such as cuda:0", device, _numbered(device))
        others = {"offload.params": self.offload_params, "execution_device": device is not None}
        for name, given in others.items():
            if self.device_map is not None and given:
                raise ConfigError(
                    f"{KEY}.layout=device_map",
                    expected=f"no {name}: the map says where each layer lives and computes",
                    found=f"both, {name} as well",
                    consequence="the run does not start",
                    remedy=f"remove {KEY}.{name} or {KEY}.layout",
                )

    @property
    def execution_index(self) -> int | None:
        """Number of the accelerator that `execution_device` names, or None."""
        _, numbered, number = (self.execution_device or "").rpartition(":")
        return int(number) if numbered else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> RewardServerSettings:
        """The inverse of `to_dict`."""
        return cls(**fields)


def reward_server_settings(request: ShardingConfig, *, own_pool: bool) -> RewardServerSettings:
    """What the request says of the reward servers.

    Args:
        request: The user's typed request.
        own_pool: verl's `reward.reward_model.enable_resource_pool`, after translation.

    Raises:
        ConfigError: See `RewardServerSettings`.
    """
    reward = request.roles.reward
    return RewardServerSettings(
        attn_implementation=reward.attn_implementation,
        device_map=reward.device_map if reward.layout == "device_map" else None,
        offload_params=bool(reward.offload.params),
        execution_device=reward.execution_device,
        own_pool=own_pool,
    )


def handled_reward_keys(request: ShardingConfig) -> Iterator[str]:
    """Keys of the request that `reward_server_settings` reads."""
    yield from (f"{KEY}.{name}" for name in ("attn_implementation", "offload.params", "execution_device"))
    if request.roles.reward.layout == "device_map":  # fsdp is no way to serve a model
        yield from (f"{KEY}.layout", f"{KEY}.device_map")


def _numbered(device: str) -> str:
    return f"{device}:0" if re.fullmatch(r"[a-z]+", device) else "cuda:0"


def _bad(name: str, expected: str, found: str, right: str) -> ConfigError:
    return ConfigError(
        f"{KEY}.{name}",
        expected=expected,
        found=found,
        consequence="the run does not start",
        remedy=f"{KEY}.{name}={right}",
    )
