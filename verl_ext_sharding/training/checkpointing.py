"""Gradient-checkpointing policies: one small frozen class for each, with `apply` and `remove`.

When to apply: after LoRA, before `fully_shard` or FSDP1, and after transformers' own `gradient_checkpointing_enable`,
which `apply` switches off and `remove` switches on again. Why this order: a policy stands in front of a layer's inner
forward (see `layers`). FSDP wrapped around it afterwards gathers the parameters before the layer runs and before
anything of it is recomputed, and the compiler's graph holds no collectives. Applied after FSDP it works too, since
FSDP's hooks stay outside either way.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from verl_ext_sharding.config.checkpointing_policy import KEEPABLE
from verl_ext_sharding.training.compile_layers import (
    CompiledRecompute,
    CompiledVariant,
    compile_obstacle,
    liger_obstacle,
)
from verl_ext_sharding.training.layer_budget import BudgetedRecompute
from verl_ext_sharding.training.layers import Forward, Slot, compute_device_type, decoder_layers, install, installed
from verl_ext_sharding.training.layers import uninstall as uninstall_stage
from verl_ext_sharding.training.recompute import Checkpointed, Recompute, Variant

logger = logging.getLogger(__name__)

AUTO_SHARE = 0.05
"""Share that `auto` gives the compiler. Measured by benchmarks/checkpointing.py on one H200 (1.5B, 8 x 2048 tokens, bf16,
torch 2.11), kept GiB and ms of forward and backward: none 44.5 / 343, `full` 1.6 / 439; shares of 0.7: 21.3 / 256,
0.5: 12.3 / 290, 0.2: 4.6 / 309, 0.05: 2.9 / 313, 0.0: 1.6 / 320."""

BYTE_BUDGET_SHARES = (0.7, 0.05, 0.0)
"""Compiled variants that a byte budget mixes: the two ends of the line of time against memory, and the floor. Mixing
them beats one share for all layers: 12 GiB take 279 ms, where a share of 0.5 takes 290 (see `AUTO_SHARE`)."""


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What a policy did to a model.

    Args:
        policy: The policy that was asked for.
        effect: What runs now, in words.
        num_layers: Number of layers it acts on.
        reason: Why it is not what was asked for, or why `auto` took it; None where there is nothing to say.
    """

    policy: Policy
    effect: str
    num_layers: int
    reason: str | None = None


@dataclass
class _Application:
    """One application of a policy, shared by the stages of all layers."""

    applied: Applied
    recompute: Recompute
    switched_off: list[nn.Module] = field(default_factory=list)


class _LayerStage:
    """The stage in front of one layer's forward."""

    def __init__(self, application: _Application, index: int) -> None:
        self.application = application
        self.index = index

    def __call__(self, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        return self.application.recompute.run(self.index, forward, args, kwargs)


class Policy(abc.ABC):
    """A gradient-checkpointing policy."""

    name: ClassVar[str]

    def apply(
        self,
        model: nn.Module,
        *,
        layers: Sequence[nn.Module] | None = None,
        device_type: str | None = None,
        obstacle: str | None = None,
    ) -> Applied:
        """Makes the layers of a model keep what the policy says. Replaces an earlier policy; twice is once.

        Args:
            model: The model, before or after LoRA and FSDP wrapping.
            layers: The layers to act on, in forward order; default: found, see `layers.decoder_layers`.
            device_type: What the layers will run on; default: the accelerator if there is one, else the CPU.
            obstacle: What the caller knows to keep the layers from being compiled, in words.

        Raises:
            ConfigError: The model has no layers that can be found.
        """
        found = decoder_layers(model, layers)
        current = _application(model)
        if current is not None and current.applied.policy == self and current.recompute.layers == found:
            return current.applied
        remove(model)
        recompute, effect, reason = self._plan(found, compute_device_type(found, device_type), obstacle)
        applied = Applied(policy=self, effect=effect, num_layers=len(found), reason=reason)
        application = _Application(applied, recompute, _switch_off_transformers(model))
        for index, layer in enumerate(found):
            install(layer, Slot.RECOMPUTE, _LayerStage(application, index))
        because = f" ({reason})" if reason else ""
        logger.info("gradient checkpointing %s on %d layers: %s%s", self.name, len(found), effect, because)
        return applied

    def remove(self, model: nn.Module) -> None:
        """Gives the layers their own forward back, and transformers' own checkpointing if it was on."""
        remove(model)

    @abc.abstractmethod
    def _plan(
        self, layers: list[nn.Module], device_type: str, obstacle: str | None
    ) -> tuple[Recompute, str, str | None]:
        """What to run, what that is in words, and why if it is not what was asked for."""


@dataclass(frozen=True)
class Off(Policy):
    """Keeps everything; switches transformers' own checkpointing off."""

    name: ClassVar[str] = "off"

    def _plan(
        self, layers: list[nn.Module], device_type: str, obstacle: str | None
    ) -> tuple[Recompute, str, str | None]:
        return Recompute(layers, [Variant()] * len(layers)), "all activations are kept", None


@dataclass(frozen=True)
class Full(Policy):
    """Keeps each layer's inputs and recomputes the rest."""

    name: ClassVar[str] = "full"

    def _plan(
        self, layers: list[nn.Module], device_type: str, obstacle: str | None
    ) -> tuple[Recompute, str, str | None]:
        return Recompute(layers, [Checkpointed()] * len(layers)), "only the inputs of layers are kept", None


@dataclass(frozen=True)
class EveryN(Policy):
    """Recomputes every n-th layer, from the first on, and keeps all of the others.

    Args:
        every: 1 is the same as `full`; 2 recomputes half of the layers.
    """

    name: ClassVar[str] = "every_n"
    every: int = 2

    def __post_init__(self) -> None:
        assert self.every >= 1, f"every={self.every}"

    def _plan(
        self, layers: list[nn.Module], device_type: str, obstacle: str | None
    ) -> tuple[Recompute, str, str | None]:
        variants = [Variant() if index % self.every else Checkpointed() for index in range(len(layers))]
        count = -(-len(layers) // self.every)
        return Recompute(layers, variants), f"only the inputs of {count} layers are kept, and all of the others", None


@dataclass(frozen=True)
class Selective(Policy):
    """Keeps the outputs of some operators in each layer and recomputes the others.

    Args:
        keep: `attention`, `matmul` (matrix products; not an adapter's second factor, which costs nothing to run again),
            or `narrow_matmul` (those no wider than their input: in a gated MLP all but the two that fill the memory).
            Default: attention and matrix products.
    """

    name: ClassVar[str] = "selective"
    keep: tuple[str, ...] = ("attention", "matmul")

    def __post_init__(self) -> None:
        assert self.keep, "nothing to keep is the policy `full`"
        assert set(self.keep) <= set(KEEPABLE), f"keep={self.keep}"

    def _plan(
        self, layers: list[nn.Module], device_type: str, obstacle: str | None
    ) -> tuple[Recompute, str, str | None]:
        effect = f"outputs of {' and '.join(self.keep)} and the inputs of layers are kept"
        return Recompute(layers, [Checkpointed(self.keep)] * len(layers)), effect, None


@dataclass(frozen=True, kw_only=True)
class Budget(Policy):
    """Keeps what fits a budget, and of that what saves most time.

    On CUDA each layer is compiled and the compiler chooses within the budget, mostly faster than no checkpointing at
    all. Elsewhere, and where compilation fails, so many layers are checkpointed (attention outputs kept where they fit)
    that the same bound holds. Compiled dropout draws other random numbers than eager dropout.

    Args:
        share: Of the bytes that layers keep without checkpointing, 0..1; or
        kept_bytes: Of all layers together, for one forward pass (one micro-batch).
        compile: None compiles on CUDA; True wherever the compiler works; False never.
    """

    name: ClassVar[str] = "budget"
    share: float | None = None
    kept_bytes: int | None = None
    compile: bool | None = None

    def __post_init__(self) -> None:
        assert (self.share is None) != (self.kept_bytes is None), "a share or bytes"
        assert 0.0 <= (self.share or 0.0) <= 1.0, f"share={self.share}"
        assert self.kept_bytes is None or self.kept_bytes > 0, f"kept_bytes={self.kept_bytes}"

    def _plan(
        self, layers: list[nn.Module], device_type: str, obstacle: str | None
    ) -> tuple[Recompute, str, str | None]:
        bound = f"{self.share:.0%}" if self.share is not None else f"{self.kept_bytes / 2**30:.3g} GiB"  # type: ignore[operator]
        ladder: list[Variant] = [Variant(), Checkpointed(("attention",)), Checkpointed()]
        eager = BudgetedRecompute(layers, ladder, kept_bytes=self.kept_bytes, share=self.share)
        obstacle = self._obstacle(layers, device_type, obstacle)
        if obstacle is not None:
            return eager, f"as many layers are checkpointed as keep activations under {bound}", obstacle
        if self.share is not None:
            plan, variants = _compiled_share(layers, self.share)
        else:
            variants = [CompiledVariant(share) for share in BYTE_BUDGET_SHARES]
            plan = BudgetedRecompute(layers, variants, kept_bytes=self.kept_bytes)
        return CompiledRecompute(plan, variants, eager), f"layers are compiled to keep {bound} of activations", None

    def _obstacle(self, layers: list[nn.Module], device_type: str, obstacle: str | None) -> str | None:
        if self.compile is False:
            return "compile: false"
        if self.compile is None and device_type == "cpu":
            return "on the CPU layers are compiled only with compile: true"
        return compile_obstacle(device_type) or liger_obstacle(layers) or obstacle


@dataclass(frozen=True)
class Auto(Policy):
    """The policy with the best time for its memory here: a compiled budget on CUDA, else `full` (with Liger too)."""

    name: ClassVar[str] = "auto"

    def _plan(
        self, layers: list[nn.Module], device_type: str, obstacle: str | None
    ) -> tuple[Recompute, str, str | None]:
        full, effect, _ = Full()._plan(layers, device_type, obstacle)
        obstacle = Budget(share=AUTO_SHARE)._obstacle(layers, device_type, obstacle)
        if obstacle is not None:
            return full, effect, obstacle
        plan, variants = _compiled_share(layers, AUTO_SHARE)
        effect = f"layers are compiled to keep {AUTO_SHARE:.0%} of activations"
        return CompiledRecompute(plan, variants, full), effect, "fastest for its memory on CUDA"


def _compiled_share(layers: list[nn.Module], share: float) -> tuple[Recompute, list[CompiledVariant]]:
    variant = CompiledVariant(share)
    return Recompute(layers, [variant] * len(layers)), [variant]


def remove(model: nn.Module) -> None:
    """Takes away whatever policy is applied to a model; without one, does nothing.

    Args:
        model: The model that `apply` had, or a wrapper around it.
    """
    applications = {}
    for layer, stage in list(installed(model, Slot.RECOMPUTE)):
        uninstall_stage(layer, Slot.RECOMPUTE)
        applications[id(stage.application)] = stage.application  # type: ignore[attr-defined]
    for application in applications.values():
        application.recompute.close()
        for module in application.switched_off:
            module.gradient_checkpointing = True


def applied(model: nn.Module) -> Applied | None:
    """What is applied to a model, or None. What has kept it from being compiled since shows as the reason."""
    current = _application(model)
    if current is None:
        return None
    recompute = current.recompute
    if isinstance(recompute, CompiledRecompute):
        recompute.look_at_shards()
    failure = getattr(recompute, "failure", None)
    if failure is None:
        return current.applied
    return Applied(
        policy=current.applied.policy,
        effect="layers run eagerly within the same memory bound",
        num_layers=current.applied.num_layers,
        reason=failure,
    )


def recompiles(model: nn.Module) -> int:
    """How often layers of a model were compiled anew because no compiled graph fitted the inputs; 0 if not compiled.

    A few in the first steps are normal (padded and packed batches, with and without gradients); a number that grows
    with the steps is not.
    """
    current = _application(model)
    return current.recompute.recompiles if current and isinstance(current.recompute, CompiledRecompute) else 0


def _application(model: nn.Module) -> _Application | None:
    return next((stage.application for _, stage in installed(model, Slot.RECOMPUTE)), None)  # type: ignore[attr-defined]


def _switch_off_transformers(model: nn.Module) -> list[nn.Module]:
    """Switches transformers' own checkpointing off, since a layer would be checkpointed twice; returns where it was on."""
    on = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True]
    for module in on:
        module.gradient_checkpointing = False
    return on
