"""verl's FSDP engines with the memory measures of the run's spec: attention, log-probs, checkpointing, offload.

Registered beside verl's own for the same device with a vendor, which `EngineRegistry` looks up first; verl's entries stay
as they are. A role without measures runs verl's engine, method for method.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from verl.plugin.platform import get_platform
from verl.utils.torch_dtypes import PrecisionType

from verl_ext_sharding.config import spec
from verl_ext_sharding.config.measures import RoleMeasures
from verl_ext_sharding.training import attention, checkpointing, lm_head
from verl_ext_sharding.training.offload import ActivationOffload
from verl_ext_sharding.training.optimizer_offload import OptimizerStateOffload
from verl_ext_sharding.training.policy_config import parse_policy

logger = logging.getLogger(__name__)


class MeasuredEngineMixin:
    """Added in front of one of verl's FSDP engines.

    The order is the one that `training.checkpointing` asks for: attention before the model is built, log-probs before
    LoRA, checkpointing and activation offload after LoRA and before FSDP, optimizer states once there is an optimizer.
    """

    model_config: Any
    engine_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        run = spec.current()
        self.role = _role(self.model_config, self.engine_config)
        self.measures = run.measures.get(self.role, RoleMeasures()) if run is not None else RoleMeasures()

    def _build_module(self) -> torch.nn.Module:
        if self.measures.attention is not None:
            attention.set_attention(self.model_config.hf_config, self._attention())
        logits = self._logits_before_build()
        module: torch.nn.Module = super()._build_module()  # type: ignore[misc]
        if logits is not None:
            self._apply_logits(module, logits)
        return module

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        if self.measures.checkpointing is not None:
            policy = parse_policy(self.measures.checkpointing)
            assert policy is not None
            policy.apply(module, device_type=get_platform().device_name)
            applied = checkpointing.applied(module)
            logger.info("gradient checkpointing of %s: %s", self.role, applied)
        if self.measures.offload_activations:
            ActivationOffload().apply(module, device_type=get_platform().device_name)
        return super()._build_fsdp_module(module)  # type: ignore[misc]

    def _build_optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = super()._build_optimizer(module)  # type: ignore[misc]
        if self.measures.optimizer_per_step:
            OptimizerStateOffload().apply(optimizer)
        return optimizer

    def _attention(self) -> attention.AttentionChoice:
        config = self.model_config.hf_config
        return attention.resolve_attention(
            self.measures.attention or "auto",
            use_remove_padding=bool(self.model_config.use_remove_padding),
            device_capability=_capability(),
            flash_attn_importable=attention.flash_attn_importable(),
            torch_version=torch.__version__,
            model_supports=attention.model_support(config),
            dtype=self._compute_dtype(),
            ulysses_size=int(self.engine_config.ulysses_sequence_parallel_size),
            role=self.role,
        )

    def _compute_dtype(self) -> torch.dtype:
        precision = self.engine_config.mixed_precision or {}
        dtype: torch.dtype = PrecisionType.to_dtype(precision.get("param_dtype", "bf16"))
        return dtype

    def _logits_before_build(self) -> str | None:
        """What to do about log-probs; verl's monkey patch of the model looks at `use_fused_kernels` while it builds."""
        if self.measures.logits in (None, "full"):
            return None
        self._set_fused(False)
        return self.measures.logits

    def _apply_logits(self, module: torch.nn.Module, requested: str) -> None:
        choice = lm_head.resolve_logits(
            requested, obstacle=lm_head.fused_obstacle(module), needs_logits=self._needs_logits(), role=self.role
        )
        logger.info("log-probs of %s: %s (%s)", self.role, choice.name, choice.reason)
        if choice.name == "fused":
            lm_head.apply(module, compiled=bool(self.engine_config.use_torch_compile))
            self._set_fused(True)

    def _needs_logits(self) -> str | None:
        return "calculate_sum_pi_squared" if getattr(self.engine_config, "calculate_sum_pi_squared", False) else None

    def _set_fused(self, value: bool) -> None:
        for config in (self.model_config, self.engine_config):
            object.__setattr__(config, "use_fused_kernels", value)  # verl's configs are frozen


def _role(model_config: Any, engine_config: Any) -> str:
    if model_config.model_type == "value_model":
        return "critic"
    return "ref" if engine_config.forward_only else "actor"


def _capability() -> tuple[int, int] | None:
    major, minor = get_platform().get_device_capability()
    return None if major is None or minor is None else (major, minor)
