"""verl's FSDP engines on CUDA with our measures, registered for NVIDIA; other vendors keep verl's own."""

from __future__ import annotations

from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from verl_ext_sharding.engines.measured import MeasuredEngineMixin


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")
class MeasuredEngineWithLMHead(MeasuredEngineMixin, FSDPEngineWithLMHead):
    """Actor and reference."""


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")
class MeasuredEngineWithValueHead(MeasuredEngineMixin, FSDPEngineWithValueHead):
    """Critic."""
