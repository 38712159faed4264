"""Finds a model's decoder layers, and stands in front of a layer's forward in a way that can be undone.

Policies of this package (recomputation, compilation, offload) act on the layer's *inner* forward: they set the instance
attribute `forward` and leave the module in place. So module classes, `state_dict` keys, LoRA names and FSDP's wrapping
by class name stay what they were, and the hooks of `nn.Module.__call__` stay outside. That is the order that FSDP
needs: its pre-forward hook gathers the parameters, then our stages run the layer, then its post-forward hook frees
them; in the backward pass, the pre-backward hook of the layer's output gathers them before anything is recomputed.
"""

from __future__ import annotations

import enum
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from verl_ext_sharding.errors import ConfigError

logger = logging.getLogger(__name__)

Forward = Callable[..., Any]
Stage = Callable[..., Any]
"""Called as `stage(forward, *args, **kwargs)`; returns what the layer returns."""

_STACK = "_sharding_forward"


class Slot(enum.IntEnum):
    """Where a stage stands, from the outside inwards, whatever the order of `apply`.

    Offload is outside of recomputation: what a checkpoint saves (its inputs) is then what goes to the host. The other
    way round, offload would take the tensors that the checkpoint means to drop.
    """

    OFFLOAD = 0
    RECOMPUTE = 1


class LayerForward:
    """A layer's instance attribute `forward` while any stage is installed.

    Args:
        layer: The layer in front of which it stands.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.previous: object = layer.__dict__.get("forward")
        self.inner: Forward = layer.forward
        self.stages: dict[Slot, Stage] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.inner
        for slot in sorted(self.stages, reverse=True):
            call = partial(self.stages[slot], call)
        return call(*args, **kwargs)


def install(layer: nn.Module, slot: Slot, stage: Stage) -> None:
    """Puts a stage in front of a layer's forward; replaces the one in that slot."""
    stack = layer.__dict__.get(_STACK)
    if stack is None:
        stack = LayerForward(layer)
        layer.__dict__[_STACK] = stack
        layer.__dict__["forward"] = stack
    stack.stages[slot] = stage


def uninstall(layer: nn.Module, slot: Slot) -> None:
    """Takes a stage away; with the last one, the layer's `forward` is the original again. Without one, does nothing."""
    stack = layer.__dict__.get(_STACK)
    if stack is None:
        return
    stack.stages.pop(slot, None)
    if stack.stages:
        return
    if layer.__dict__.get("forward") is not stack:
        logger.warning(
            "forward of %s was wrapped again after us and stays wrapped, without effect", type(layer).__name__
        )
        return
    del layer.__dict__[_STACK]
    if stack.previous is None:
        del layer.__dict__["forward"]
    else:
        layer.__dict__["forward"] = stack.previous


def installed(model: nn.Module, slot: Slot) -> Iterator[tuple[nn.Module, Stage]]:
    """The layers of a model, through every wrapper, that have a stage in the slot."""
    for module in model.modules():
        stack = module.__dict__.get(_STACK)
        if stack is not None and slot in stack.stages:
            yield module, stack.stages[slot]


def decoder_layers(model: nn.Module, layers: Sequence[nn.Module] | None = None) -> list[nn.Module]:
    """The repeated layers of a model, in forward order, through PEFT, FSDP1, FSDP2 and value-head wrappers.

    Looked for, first hit wins: instances of transformers' `GradientCheckpointingLayer`; modules whose class a
    `_no_split_modules` of the model names; the children of the longest `ModuleList` of one class. Only outermost
    matches count.

    Args:
        model: The model, wrapped or not.
        layers: Taken as they are when given.

    Raises:
        ConfigError: No layer was found, or `layers` is empty.
    """
    if layers is not None:
        found = list(layers)
    else:
        found = _gradient_checkpointing_layers(model) or _no_split_layers(model) or _longest_module_list(model)
    if not found:
        names = sorted(_no_split_names(model))
        raise ConfigError(
            f"decoder layers of {type(model).__name__}",
            expected="transformers GradientCheckpointingLayer instances, modules named by _no_split_modules"
            f" ({', '.join(names) or 'none named'}), or a ModuleList of layers of one class",
            found="none of these" if layers is None else "layers=[]",
            consequence="nothing can be recomputed or offloaded layer by layer",
            remedy="pass layers=[...], or set sharding.roles.<role>.gradient_checkpointing=null for this model",
        )
    return found


def input_embedding(module: nn.Module) -> nn.Module | None:
    """What reads the token ids, as a model of transformers tells it; None where it has none or can't tell."""
    try:
        embedding = module.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return embedding if isinstance(embedding, nn.Module) else None


def compute_device_type(layers: Sequence[nn.Module], device_type: str | None = None) -> str:
    """The device type that layers will run on.

    verl builds models on the CPU or on meta and moves them later, so where the parameters are says little: the
    accelerator counts where there is one.
    """
    if device_type is not None:
        return device_type
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        return accelerator.type
    parameter = next((p for layer in layers for p in layer.parameters()), None)
    return "cpu" if parameter is None or parameter.device.type == "meta" else parameter.device.type


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The layer's main input: first positional argument, or `hidden_states` by name."""
    value = args[0] if args else kwargs.get("hidden_states")
    return value if isinstance(value, torch.Tensor) else None


def module_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers of a module, and the plain tensors that FSDP1 puts in the place of its parameters."""
    for child in module.modules():
        yield from (value for value in child._parameters.values() if value is not None)
        yield from (value for value in child._buffers.values() if value is not None)
        if "_is_fsdp_managed_module" in child.__dict__:
            yield from (value for value in child.__dict__.values() if isinstance(value, torch.Tensor))


def inner_fsdp_units(layer: nn.Module) -> list[nn.Module]:
    """Parts of a layer whose parameters FSDP gathers and frees by themselves, while the layer runs.

    verl wraps adapters so with FSDP1, and with both FSDPs what `wrap_policy` names inside of a layer.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where nothing has imported it, nothing is wrapped
    kinds = tuple(getattr(fsdp, name) for name in ("FullyShardedDataParallel", "FSDPModule") if hasattr(fsdp, name))
    return [child for child in layer.modules() if child is not layer and isinstance(child, kinds)]


def _outermost(model: nn.Module, matches: Callable[[nn.Module], bool]) -> list[nn.Module]:
    found: list[nn.Module] = []
    seen: set[int] = set()

    def walk(module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        if module is not model and matches(module):
            found.append(module)
            return
        for child in module.children():
            walk(child)

    walk(model)
    return found


def _gradient_checkpointing_layers(model: nn.Module) -> list[nn.Module]:
    try:
        from transformers.modeling_layers import GradientCheckpointingLayer
    except ImportError:  # transformers before 4.53, or not installed
        return []
    return _outermost(model, lambda module: isinstance(module, GradientCheckpointingLayer))


def _no_split_names(model: nn.Module) -> set[str]:
    return {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}


def _no_split_layers(model: nn.Module) -> list[nn.Module]:
    names = _no_split_names(model)
    # FSDP2 puts its own class in front of the layer's: look at all bases
    return _outermost(model, lambda module: any(base.__name__ in names for base in type(module).__mro__))


def _longest_module_list(model: nn.Module) -> list[nn.Module]:
    lists = [
        # FSDP1 wraps a layer in a module of its own; our stages belong inside of it
        [getattr(child, "_fsdp_wrapped_module", child) for child in module]
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
    ]
    uniform = [children for children in lists if len(children) > 1 and len({type(child) for child in children}) == 1]
    return max(uniform, key=len, default=[])
