"""The typed form of the user's `sharding` block: frozen dataclasses, checked as they are built.

Nothing here needs a device, torch or verl. `null` in the user's config is `None` here and always means
"leave verl's setting alone".
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, Union

from verl_ext_sharding.config.arguments import as_argument
from verl_ext_sharding.config.checkpointing_policy import read_policy
from verl_ext_sharding.config.offers import instead, is_block, is_off, names_of, options_of
from verl_ext_sharding.errors import ConfigError, did_you_mean

PLUGIN_NAME = "sharding"
"""Value of `trainer.plugin` that switches the plugin on."""

Dtype = Literal["float32", "bfloat16", "float16"]
PolicyName = Literal["auto", "full", "every_n", "selective", "budget"]
DeviceSpec = Union[int, str, list[Any], Mapping[str, Any], None]  # noqa: UP007  (evaluated at run time on 3.10)


@dataclass(kw_only=True, frozen=True)
class CheckpointingConfig:
    """How a role trades recomputation for activation memory. None: the policy's own default.

    Args:
        policy: `full` recomputes each layer, `every_n` one layer in `every`, `selective` keeps the outputs of matmuls
            and attention, `budget` keeps what fits `budget`, `auto` the best time for its memory.
        every: For `every_n`: 1 or more.
        keep: For `selective`: of "attention", "matmul" and "narrow_matmul", one or a list.
        budget: For `budget`: a share of the activation memory (0 to 1) or bytes as text ("4GiB").
        compile: For `budget`: whether layers may be compiled.
        use_reentrant: Only false or null: reentrant checkpointing breaks activation offload and frozen inputs.
    """

    policy: PolicyName | None = None
    every: int | None = None
    keep: list[Any] | str | None = None
    budget: float | str | None = None
    compile: bool | None = None
    use_reentrant: bool | None = None

    def __post_init__(self) -> None:
        read_policy(dataclasses.asdict(self), key="")

    def given(self) -> dict[str, Any]:
        """The keys that were set."""
        keys = dataclasses.asdict(self)
        return {name: value for name, value in keys.items() if value is not None and name != "use_reentrant"}


@dataclass(kw_only=True, frozen=True)
class OffloadConfig:
    """What of a role lives in host memory while it is not used; optimizer `step`: states are there but for the step."""

    params: bool | None = None
    optimizer: bool | Literal["step"] | None = None
    activations: bool | None = None


@dataclass(kw_only=True, frozen=True)
class RoleConfig:
    """Settings of one model of the job. See the comments in `group/sharding/base.yaml`."""

    devices: DeviceSpec = None
    layout: Literal["fsdp", "device_map"] | None = None
    device_map: str | Mapping[str, Any] = "auto"
    dtype: Dtype | None = None
    compute_dtype: Dtype | None = None
    attn_implementation: Literal["auto", "flash_attention_2", "varlen", "sdpa", "eager"] | None = None
    gradient_checkpointing: bool | PolicyName | CheckpointingConfig | None = None
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    micro_batch_size: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("micro_batch_size", "1"), ("max_tokens", "null")):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise _bad(name, "1 or more, or null", value, f"{name}={least}")
        if self.gradient_checkpointing == "budget":
            remedy = "gradient_checkpointing={policy:budget,budget:0.5}"
            raise _bad("gradient_checkpointing", "a budget beside this policy", "budget alone", remedy)


@dataclass(kw_only=True, frozen=True)
class ActorConfig(RoleConfig):
    """The actor; `logits` says how log-probs over the vocabulary are computed."""

    logits: Literal["auto", "fused", "chunked", "full"] | None = None


@dataclass(kw_only=True, frozen=True)
class RefConfig(ActorConfig):
    """The reference policy."""


@dataclass(kw_only=True, frozen=True)
class RolloutConfig:
    """Limits of the generation servers. `devices` follows the actor, see `placement.checks`."""

    devices: DeviceSpec = None
    batch_size: int | None = None
    max_new_tokens: int | None = None
    gpu_memory_utilization: float | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise _bad(name, "1 or more", value, f"{name}=64")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share < 1:
            raise _bad("gpu_memory_utilization", "a share between 0 and 1", share, "gpu_memory_utilization=0.5")


@dataclass(kw_only=True, frozen=True)
class RewardConfig(RoleConfig):
    """The reward model."""

    max_input_tokens: int | Literal["auto"] = "auto"
    execution_device: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.max_input_tokens, int) and self.max_input_tokens < 1:
            raise _bad("max_input_tokens", "auto, or 1 or more", self.max_input_tokens, "max_input_tokens=auto")


@dataclass(kw_only=True, frozen=True)
class RolesConfig:
    """One block for each model of the job."""

    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    critic: RoleConfig = field(default_factory=RoleConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    teacher: RoleConfig = field(default_factory=RoleConfig)


@dataclass(kw_only=True, frozen=True)
class PlacementConfig:
    """How devices become Ray bundles.

    Args:
        max_colocate_count: CPUs reserved with each device, and so the most worker processes that can share one.
            None: verl's own 3, or more where more roles share a device.
        timeout_s: How long to wait for Ray to reserve the devices before the run ends with what Ray has.
    """

    max_colocate_count: int | None = None
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.max_colocate_count is not None and self.max_colocate_count < 1:
            raise _bad("max_colocate_count", "1 or more", self.max_colocate_count, "max_colocate_count=3")
        if not 0 < self.timeout_s < math.inf:
            raise _bad("timeout_s", "more than 0 seconds", self.timeout_s, "timeout_s=120")


@dataclass(kw_only=True, frozen=True)
class MemoryConfig:
    """What the planner may count on: GiB per GPU and per host (None: read from the devices), share kept free."""

    gpu_gib: float | None = None
    host_gib: float | None = None
    headroom: float = 0.08

    def __post_init__(self) -> None:
        for name in ("gpu_gib", "host_gib"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise _bad(name, "more than 0 GiB", value, f"{name}=24")
        if not 0 <= self.headroom < 1:
            raise _bad("headroom", "a share from 0 to below 1", self.headroom, "headroom=0.08")


@dataclass(kw_only=True, frozen=True)
class GuardsConfig:
    """What is checked while the job runs."""

    align_inputs: bool = True
    token_ids: Literal["error", "mask", "off"] = "error"
    reward_length: Literal["truncate", "error", "off"] = "truncate"


@dataclass(kw_only=True, frozen=True)
class CommunicationConfig:
    """Environment of collective communication; `auto` looks at the hardware."""

    infiniband: bool | Literal["auto"] = "auto"
    p2p: bool | Literal["auto"] = "auto"
    async_error_handling: bool = True


@dataclass(kw_only=True, frozen=True)
class MonitorConfig:
    """Live view and report: sampling interval in seconds, folder of the HTML report."""

    interval_s: float = 1.0
    report: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.interval_s < math.inf:
            raise _bad("interval_s", "more than 0 seconds", self.interval_s, "interval_s=1")


@dataclass(kw_only=True, frozen=True)
class ShardingConfig:
    """The whole `sharding` block."""

    fit: Literal["off", "report", "apply"] = "apply"
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)

    @classmethod
    def parse(cls, block: Mapping[str, Any] | None) -> ShardingConfig:
        """Builds the typed request from the plain `sharding` mapping.

        Args:
            block: Nested dicts and lists, as `OmegaConf.to_container` gives them; None: nothing is asked for.

        Raises:
            ConfigError: A key is unknown or a value has the wrong type or range; the message names the right one.
        """
        return cls() if block is None else _build(cls, block, "sharding")

    def changed(self) -> dict[str, Any]:
        """`{dotted key: value}` of everything that differs from the defaults."""
        return dict(_differences(self, type(self)(), "sharding"))


T = TypeVar("T")


def _build(cls: type[T], block: Any, path: str) -> T:
    if not isinstance(block, Mapping):
        raise _bad(path, "a block of keys", block, f"{path}.<key>=<value>")
    hints = typing.get_type_hints(cls)
    names = names_of(cls)
    values: dict[str, Any] = {}
    for name, value in block.items():
        if name not in names:
            raise unknown_key(path, str(name), names)
        if cls is CheckpointingConfig and name == "policy" and is_off(value):
            raise _bad(f"{path}.policy", "a policy, or false in place of the block", value, f"{path}=false")
        values[str(name)] = _convert(hints[str(name)], value, f"{path}.{name}")
    try:
        return cls(**values)
    except ConfigError as error:
        if error.subject.startswith("sharding"):
            raise
        key = error.subject.rpartition(".")[2]
        remedy = as_argument(f"{path}.{error.remedy}")
        raise _bad(f"{path}.{key}", error.expected, error.found, remedy) from None


def _convert(hint: Any, value: Any, path: str) -> Any:
    """Checks one value against a type hint; nested dataclasses are built, everything else is returned as it is."""
    options = options_of(hint)
    if value is False and "off" in options:
        value = "off"  # YAML 1.1 reads a bare `off` as false
    if value is None and is_block(options[0]):
        return options[0]()  # null leaves verl alone, a whole block as well as a key
    for option in options:
        if is_block(option) and isinstance(value, Mapping):
            return _build(option, value, path)
        if _matches(option, value):
            return float(value) if option is float else value
    expected = " or ".join(dict.fromkeys(map(_spell, options)))
    if OffloadConfig in options and value is True and path.split(".")[2] in ("actor", "critic"):
        remedy = as_argument(f"{path}={{params:true,optimizer:true}}")
    else:
        remedy = as_argument(f"{path}{instead(options, value)}")
    raise _bad(path, expected, value, remedy)


def _matches(option: Any, value: Any) -> bool:
    if option is type(None):
        return value is None
    option = typing.get_origin(option) or option
    if option is Mapping:
        return isinstance(value, Mapping)
    if option is bool:
        return isinstance(value, bool)
    if option is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if option is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(option, type):
        return isinstance(value, option)
    return type(value) is type(option) and value == option


def _spell(option: Any) -> str:
    if option is type(None):
        return "null"
    option = typing.get_origin(option) or option
    names = {
        bool: "true/false",
        int: "a whole number",
        float: "a number",
        str: "text",
        list: "a list",
        Mapping: "a map",
    }
    if option in names:
        return names[option]
    if dataclasses.is_dataclass(option):
        return "{" + ", ".join(f.name for f in dataclasses.fields(option)) + "}"
    return str(option)


def _differences(value: Any, default: Any, path: str) -> Iterator[tuple[str, Any]]:
    for f in dataclasses.fields(value):
        here, there = getattr(value, f.name), getattr(default, f.name)
        if dataclasses.is_dataclass(there) and dataclasses.is_dataclass(here):
            yield from _differences(here, there, f"{path}.{f.name}")
        elif here != there:
            yield f"{path}.{f.name}", here


_ALIASES = {
    "policy": "actor",
    "actor_rollout": "actor",
    "actor_rollout_ref": "actor",
    "reference": "ref",
    "reference_policy": "ref",
    "value": "critic",
    "value_model": "critic",
    "reward_model": "reward",
    "reward_model_worker": "reward",
    "gpus": "devices",
    "gpu": "devices",
    "param_offload": "params",
    "params_offload": "params",
    "offload_params": "params",
    "offload_param": "params",
    "optimizer_offload": "optimizer",
    "offload_optimizer": "optimizer",
    "activation_offload": "activations",
    "offload_activation": "activations",
    "offload_activations": "activations",
}
"""What others call a role or a key, and its name here."""


def unknown_key(path: str, name: str, known: list[str]) -> ConfigError:
    """The error for a key that doesn't exist, with the key that was probably meant."""
    prefix = f"{path}." if path else ""
    alias = _ALIASES.get(name.lower())
    meant = alias if alias in known else _in_block(path, alias or name) or did_you_mean(name, known)
    return ConfigError(
        f"{prefix}{name}: no such key",
        expected=f"one of {', '.join(known)}",
        found=name,
        consequence="the run does not start",
        remedy=f"did you mean {prefix}{meant}?" if meant else f"remove {prefix}{name}",
    )


def takes_list(key: str) -> bool | None:
    """Whether a key of `sharding` takes a list; None: there is no such key."""
    first, *parts = key.split(".")
    options: list[Any] = [ShardingConfig] if first == PLUGIN_NAME else []
    for part in parts:
        hints = next((typing.get_type_hints(option) for option in options if is_block(option)), {})
        options = options_of(hints[part]) if part in hints else []
    return any(typing.get_origin(option) is list for option in options) if options else None


def _in_block(path: str, name: str) -> str | None:
    """A key that was written without its block: `critic` for `roles.critic`, `params` for `offload.params`."""
    here: Any = ShardingConfig if path.partition(".")[0] == "sharding" else None
    for part in path.split(".")[1:]:
        here = _blocks(here).get(part) if here else None
    blocks = {"": here} if here else {}
    while blocks:  # the nearest first
        blocks = {f"{above}{own}.": block for above, cls in blocks.items() for own, block in _blocks(cls).items()}
        found = next((f"{above}{name}" for above, cls in blocks.items() if name in names_of(cls)), None)
        if found is not None:
            return found
    return None


def _blocks(cls: Any) -> dict[str, Any]:
    """The keys of a block that are blocks themselves."""
    options = {name: options_of(hint) for name, hint in typing.get_type_hints(cls).items()}
    return {name: block for name, choices in options.items() for block in choices if is_block(block)}


def _bad(path: str, expected: str, found: Any, remedy: str) -> ConfigError:
    found = "null" if found is None else str(found)
    return ConfigError(path, expected=expected, found=found, consequence="the run does not start", remedy=remedy)
