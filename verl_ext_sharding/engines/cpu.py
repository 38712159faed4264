"""verl's FSDP2 engines on the CPU: gloo, no pinned memory. Registered for device `cpu`, both models, no other change."""

from __future__ import annotations

import copy
from typing import Any

import torch
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from verl_ext_sharding.engines.device_map import DeviceMapEngineMixin
from verl_ext_sharding.engines.guarded import GuardedEngineMixin
from verl_ext_sharding.engines.measured import MeasuredEngineMixin
from verl_ext_sharding.errors import ConfigError


class CpuEngineMixin:
    """What differs on a CPU: parameters are on the host anyway, so forward-only roles need no CPU offload.

    verl gives forward-only roles `CPUOffloadPolicy(pin_memory=True)` (workers/engine/fsdp/transformer_impl.py), and
    pinning needs an accelerator.
    """

    engine_config: Any

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        if self.engine_config.strategy != "fsdp2":
            raise _not_fsdp2(self.engine_config.strategy)
        asked = self.engine_config
        self.engine_config = copy.copy(asked)
        for name in ("forward_only", "offload_policy"):
            object.__setattr__(self.engine_config, name, False)  # verl's configs are frozen
        try:
            return super()._build_fsdp_module(module)  # type: ignore[misc]
        finally:
            self.engine_config = asked


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device=["cpu"])
class CpuEngineWithLMHead(GuardedEngineMixin, MeasuredEngineMixin, CpuEngineMixin, FSDPEngineWithLMHead):
    """Actor and reference on a CPU."""


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device=["cpu"])
class CpuEngineWithValueHead(GuardedEngineMixin, MeasuredEngineMixin, CpuEngineMixin, FSDPEngineWithValueHead):
    """Critic on a CPU."""


@EngineRegistry.register(model_type="language_model", backend="device_map", device=["cpu"])
class CpuDeviceMapEngineWithLMHead(DeviceMapEngineMixin, CpuEngineWithLMHead):
    """Actor and reference on a CPU, layers spread over logical devices."""


@EngineRegistry.register(model_type="value_model", backend="device_map", device=["cpu"])
class CpuDeviceMapEngineWithValueHead(DeviceMapEngineMixin, CpuEngineWithValueHead):
    """Critic on a CPU, layers spread over logical devices."""


CpuEngineWithLMHead.spread_class = CpuDeviceMapEngineWithLMHead
CpuEngineWithValueHead.spread_class = CpuDeviceMapEngineWithValueHead


def _not_fsdp2(strategy: str) -> ConfigError:
    return ConfigError(
        "strategy on trainer.device=cpu",
        expected="fsdp2",
        found=f"{strategy}, which needs an accelerator (sync_module_states)",
        consequence="the run stops before the model loads",
        remedy="actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.ref.strategy=fsdp2 critic.strategy=fsdp2",
    )
