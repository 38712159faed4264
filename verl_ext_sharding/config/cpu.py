"""What `trainer.device=cpu` needs of verl's config: values that stand in for defaults, and clear errors for the rest."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext_sharding.config.changes import KeyChange
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.bundles import Placement
from verl_ext_sharding.placement.job import JobFacts

_WHY = "trainer.device=cpu"

_DEFAULTS: dict[str, Any] = {
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.ref.strategy": "fsdp2",
    "critic.strategy": "fsdp2",
    "actor_rollout_ref.rollout.name": "hf",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.model.use_remove_padding": False,
    "critic.model.use_remove_padding": False,
    "actor_rollout_ref.actor.use_torch_compile": False,
    "actor_rollout_ref.ref.use_torch_compile": False,
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
    "actor_rollout_ref.ref.fsdp_config.use_torch_compile": False,
    "critic.fsdp.use_torch_compile": False,
    "actor_rollout_ref.rollout.agent.num_workers": 1,
    "reward.num_workers": 1,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "data.dataloader_num_workers": 0,
}
"""verl's defaults that can't run on a CPU, or that start tens of processes which a small machine can't hold."""

_ONLY_CHOICE = (
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.ref.strategy",
    "critic.strategy",
    "actor_rollout_ref.rollout.name",
)
"""Of these, the keys for which there is no other value on a CPU."""

FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
"""verl's `mixed_precision` of an engine that computes in float32."""

ATTENTION = ("sdpa", "eager")
"""What a CPU has kernels for."""

_PRECISION = ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")


def is_cpu(config: DictConfig) -> bool:
    """Whether the run asks for the CPU."""
    return _device(config) == "cpu"


def check_device(config: DictConfig) -> None:
    """Refuses the CPU by a name that verl does not know, before verl puts the accelerator's in its place.

    Raises:
        ConfigError: `trainer.device` is such a name.
    """
    device = _device(config)
    if device != "cpu" and device.strip().lower().partition(":")[0] == "cpu":
        raise ConfigError(
            "trainer.device",
            expected="cpu, without a number",
            found=device,
            consequence="the run does not start, since verl would take it for an accelerator",
            remedy="trainer.device=cpu",
        )


def _device(config: DictConfig) -> str:
    return str(OmegaConf.select(config, "trainer.device", default="cuda"))


def changes(config: DictConfig, facts: JobFacts, placement: Placement) -> Iterator[KeyChange]:
    """Values that stand in for verl's defaults on a CPU; what the user wrote wins.

    Args:
        config: verl's composed config.
        facts: The job.
        placement: Where its roles run.
    """
    for key, value in _DEFAULTS.items():
        yield KeyChange(key=key, new=value, why=_WHY, default=True)
    for block in _PRECISION:
        if OmegaConf.select(config, f"{block}.mixed_precision", default=None) is None:
            yield KeyChange(key=f"{block}.mixed_precision", new=dict(FP32), why=_WHY, default=True)
    yield KeyChange(key="actor_rollout_ref.rollout.dtype", new="float32", why=_WHY, default=True)
    for model in ("actor_rollout_ref.model", "critic.model"):
        key = f"{model}.override_config.attn_implementation"
        if OmegaConf.select(config, key, default=None) is None:
            yield KeyChange(key=key, new="sdpa", why=_WHY, default=True)
    yield from _ray(config, facts, placement)


def _ray(config: DictConfig, facts: JobFacts, placement: Placement) -> Iterator[KeyChange]:
    """Logical devices, and CPUs for their bundles, where verl will start a Ray of one node itself."""
    if placement.topology.num_nodes > 1 or "RAY_OVERRIDE_RESOURCES" in os.environ or finds_ray(config):
        return
    needed = placement.topology.num_devices * placement.colocate_count + facts.transfer_queue_units + 4
    needed += facts.reward_cpus
    yield KeyChange(key="ray_kwargs.ray_init.num_gpus", new=placement.topology.num_devices, why=_WHY, default=True)
    if OmegaConf.select(config, "ray_kwargs.ray_init.num_cpus", default=None) is None:
        num_cpus = math.ceil(max(needed, os.cpu_count() or 1))
        yield KeyChange(key="ray_kwargs.ray_init.num_cpus", new=num_cpus, why=_WHY, default=True)


def finds_ray(config: DictConfig) -> bool:
    """Whether `ray.init` would join a cluster that is there already, and so refuse to be told its resources.

    Args:
        config: verl's composed config, whose `ray_kwargs.ray_init.address` wins over `RAY_ADDRESS`.
    """
    import ray

    address = OmegaConf.select(config, "ray_kwargs.ray_init.address", default=None)
    if ray.is_initialized() or "://" in (address or os.environ.get("RAY_ADDRESS", "")):
        return True
    try:
        return ray._private.services.canonicalize_bootstrap_address(address) is not None
    except ConnectionError:  # "auto", and there is none: `ray.init` says so
        return True


def check(config: DictConfig, explicit: Mapping[str, str]) -> None:
    """Refuses what the user wrote and a CPU can't do.

    Raises:
        ConfigError: Names the key and what to write.
    """
    for key in _ONLY_CHOICE:
        written, value = explicit.get(key), _DEFAULTS[key]
        if written is not None and written != value:
            raise not_on_cpu(key, value, written, f"{key}={value}")
    for model in ("actor_rollout_ref.model", "critic.model"):
        check_attention(config, f"{model}.override_config.attn_implementation")


def check_attention(config: DictConfig, key: str) -> None:
    """Refuses attention that a CPU has no kernel for.

    Args:
        config: verl's composed config.
        key: Where it has a model's attention; null: none is asked for.

    Raises:
        ConfigError: It asks for another than `ATTENTION`.
    """
    attention = OmegaConf.select(config, key, default=None)
    if attention is not None and attention not in ATTENTION:
        raise not_on_cpu(key, " or ".join(ATTENTION), str(attention), f"+{key}={ATTENTION[0]}")


def not_on_cpu(key: str, expected: str, found: str, remedy: str) -> ConfigError:
    """The error for a value that a CPU can't run with."""
    return ConfigError(
        key,
        expected=f"{expected} on trainer.device=cpu",
        found=found,
        consequence="the run does not start",
        remedy=f"{remedy}, or remove trainer.device=cpu",
    )
