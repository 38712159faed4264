"""Brings inputs to the device of the weights that they meet, in models whose layers lie on several devices.

Instead of "Expected all tensors to be on the same device": the root's inputs go to the input embedding, what enters a layer
goes to that layer, and the root's outputs go to one declared device. torch's forward hooks do it, at boundaries only. No
`forward` is replaced (accelerate's `dispatch_model` does), so that signatures, compilation and later patches of `forward`
see the model's own. A model on one device has hooks at its root alone.

Which modules are boundaries, and where their outputs go, `training.boundaries` decides.

Buffers that are not saved with the model (rotary frequencies) follow the module that they serve, since moving them once is
cheaper than moving activations to them in each step.

A tensor that many layers are given (cos, sin, masks) is copied to a device once in each forward of the root. What layers
write into such inputs in place stays in the copy. KV caches hold tensors of the layers' own devices and pass as they are,
and so does what a model says that layers share and move themselves (`_skip_keys_device_placement`: keys and values that
Gemma's later layers read).
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from verl_ext_sharding.training.boundaries import Boundary, Layout

logger = logging.getLogger(__name__)

_STATE = "_sharding_alignment"


@dataclass(frozen=True)
class Alignment:
    """What is aligned in a model.

    Args:
        input_device: Where the root's inputs go.
        output_device: Where the root's outputs go; None leaves them where the model puts them.
        boundaries: Qualified names of the hooked modules, in the order of the model; "" is the root.
    """

    input_device: torch.device
    output_device: torch.device | None
    boundaries: tuple[str, ...]


@dataclass(frozen=True)
class _MovedBuffer:
    module: nn.Module
    name: str
    original: torch.Tensor
    moved: torch.Tensor


@dataclass(frozen=True)
class _Applied:
    """What `remove` takes away."""

    alignment: Alignment
    boundaries: list[Boundary]
    handles: list[RemovableHandle] = field(default_factory=list)
    buffers: list[_MovedBuffer] = field(default_factory=list)


def apply(
    model: nn.Module,
    *,
    input_device: torch.device | str | None = None,
    output_device: torch.device | str | None = None,
) -> Alignment:
    """Aligns the inputs of a model with its weights. Applied again with nothing changed, does nothing.

    Apply once the weights are in their places, LoRA's included, and again after any of them moved.

    Args:
        model: Its weights are on their devices: plain, LoRA, FSDP.
        input_device: For a model that computes on one device wherever its weights lie in between (FSDP2 with
            `CPUOffloadPolicy`, weights that are offloaded between steps): that device; its root alone is hooked then.
            None reads the devices of the weights.
        output_device: Where the root's outputs go; None leaves them where the model puts them.

    Raises:
        ConfigError: A weight or buffer is on `meta`, a module's own weights are on several devices, or there are no weights.
    """
    inputs, outputs = _exact(input_device), _exact(output_device)
    layout = Layout(model) if inputs is None else None
    boundaries = layout.boundaries(outputs) if layout is not None else [Boundary("", model, inputs, outputs)]
    current: _Applied | None = model.__dict__.get(_STATE)
    if current is not None and current.boundaries == boundaries and (layout is None or not layout.stray_buffers()):
        return current.alignment
    remove(model)
    state = _Applied(Alignment(boundaries[0].device, outputs, tuple(one.name for one in boundaries)), boundaries)
    if layout is not None:
        state.buffers.extend(_move(module, name, device) for module, name, device in layout.stray_buffers())
    _register(state, _unmoved(model))
    model.__dict__[_STATE] = state
    logger.info(
        "inputs of %s move to %s, outputs to %s; %d modules on %s are given theirs where they are",
        type(model).__name__,
        state.alignment.input_device,
        outputs or "no other device",
        len(boundaries) - 1,
        ", ".join(dict.fromkeys(str(one.device) for one in boundaries)),
    )
    return state.alignment


def remove(model: nn.Module) -> None:
    """Takes the hooks away and puts buffers back. Without an alignment, does nothing.

    Args:
        model: The model of `apply`, or one that wraps it.
    """
    for module in list(model.modules()):
        state: _Applied | None = module.__dict__.pop(_STATE, None)
        if state is None:
            continue
        for handle in state.handles:
            handle.remove()
        for buffer in state.buffers:
            if buffer.module._buffers.get(buffer.name) is buffer.moved:
                buffer.module._buffers[buffer.name] = buffer.original


def applied(model: nn.Module) -> Alignment | None:
    """The alignment of a model, or of the model in a wrapper; None without one."""
    states = (module.__dict__.get(_STATE) for module in model.modules())
    return next((state.alignment for state in states if state is not None), None)


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # to the host it must wait: nothing tells a reader there that the copy is still under way
    return tensor.to(device, non_blocking=device.type != "cpu")


def moved(value: Any, device: torch.device) -> Any:
    """A value with its tensors on a device; the same object, all the way down, where nothing is to move.

    Args:
        value: A tensor, or tensors in tuples, named tuples, lists, dicts and their subclasses (`ModelOutput`),
            `UserDict`s (`BatchEncoding`) and dataclasses, in each other. Anything else is returned as it is.
        device: The device, with its number.
    """
    return _moved(value, device, _copy)[0]


def _moved(
    value: Any, device: torch.device, to: Callable[[torch.Tensor, torch.device], torch.Tensor]
) -> tuple[Any, bool]:
    """As `moved`, and whether anything was: the compiler can't trace whether two tuples are one object."""
    if isinstance(value, torch.Tensor):
        return (value, False) if value.device == device else (to(value, device), True)
    items: Any
    # older compilers trace neither `tuple | list` nor whether None is a dataclass
    if value is None:
        return value, False
    if isinstance(value, (tuple, list)):
        items = dict(enumerate(value))
    elif isinstance(value, (dict, UserDict)):
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if hasattr(value, one.name)}
    else:
        return value, False
    results = {key: _moved(item, device, to) for key, item in items.items()}
    changed = {key: item for key, (item, is_new) in results.items() if is_new}
    if not changed:
        return value, False
    if isinstance(value, tuple):
        parts = [item for item, _ in results.values()]
        return (value._make(parts) if hasattr(value, "_make") else type(value)(parts)), True
    return _with_items(value, changed), True


def _with_items(value: Any, changed: dict[Any, Any]) -> Any:
    # a shallow copy keeps what a constructor would ask for or compute anew
    result = value.copy() if type(value) in (dict, list) else copy.copy(value)
    for key, item in changed.items():
        if isinstance(value, (dict, UserDict, list)):
            result[key] = item
        else:
            object.__setattr__(result, key, item)  # of frozen dataclasses too
    return result


def _exact(device: torch.device | str | None) -> torch.device | None:
    """The device as tensors say it: "cuda" with its number, the host without."""
    if device is None:
        return None
    exact: torch.device = torch.device(device)
    if exact.type == "cpu":
        return torch.device("cpu")
    if exact.index is None and exact.type != "meta":
        return torch.device(exact.type, torch.get_device_module(exact).current_device())
    return exact


def _move(module: nn.Module, name: str, device: torch.device) -> _MovedBuffer:
    original = module._buffers[name]
    assert original is not None
    module._buffers[name] = original.to(device)
    return _MovedBuffer(module, name, original, module._buffers[name])


# The hooks


class _SharedCopies:
    """Copies of tensors that several modules are given, during one forward of the root.

    A copy goes with its original, so that none outlives the layer it was made for. Recomputation in the backward pass is
    outside of any forward of the root and copies for each layer.
    """

    def __init__(self) -> None:
        self._made: WeakTensorKeyDictionary | None = None

    def open(self) -> None:
        if not torch.compiler.is_compiling():
            self._made = WeakTensorKeyDictionary()

    def close(self) -> None:
        if not torch.compiler.is_compiling():
            self._made = None

    def __call__(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The tensor on the device."""
        if torch.compiler.is_compiling():
            return _copy(tensor, device)
        made = self._made
        # an inference tensor doesn't count what is written to it
        if made is None or tensor.requires_grad or tensor.is_inference() or torch.is_inference_mode_enabled():
            return _copy(tensor, device)
        copies = made.setdefault(tensor, {})
        version, result = copies.get(device, (None, None))
        if result is None or version != tensor._version:
            result = _copy(tensor, device)
            copies[device] = (tensor._version, result)
        return result


def _unmoved(model: nn.Module) -> frozenset[str]:
    """Keyword arguments that layers read and write, and whose tensors they move themselves, as transformers' models tell."""
    named = (getattr(module, "_skip_keys_device_placement", None) or () for module in model.modules())
    return frozenset(name for names in named for name in ([names] if isinstance(names, str) else names))


class _Inputs:
    """Forward pre-hook of a boundary."""

    def __init__(self, device: torch.device, copies: _SharedCopies, unmoved: frozenset[str]) -> None:
        self.device = device
        self.copies = copies
        self.unmoved = unmoved

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        new_args, args_moved = _moved(args, self.device, self.copies)
        to_move = {name: value for name, value in kwargs.items() if name not in self.unmoved}
        new_kwargs, kwargs_moved = _moved(to_move, self.device, self.copies)
        return (new_args, {**kwargs, **new_kwargs}) if args_moved or kwargs_moved else None


class _Outputs:
    """Forward hook of a boundary."""

    def __init__(self, device: torch.device | None, copies: _SharedCopies) -> None:
        self.device = device
        self.copies = copies

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output if self.device is None else _moved(output, self.device, self.copies)[0]


class _RootInputs(_Inputs):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self.copies.open()
        return super().__call__(module, args, kwargs)


class _RootOutputs(_Outputs):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        try:
            return super().__call__(module, args, output)
        finally:
            self.copies.close()


def _register(state: _Applied, unmoved: frozenset[str]) -> None:
    copies = _SharedCopies()
    for boundary in state.boundaries:
        root = boundary is state.boundaries[0]
        inputs = (_RootInputs if root else _Inputs)(boundary.device, copies, frozenset() if root else unmoved)
        state.handles.append(boundary.module.register_forward_pre_hook(inputs, with_kwargs=True))
        if root:  # runs after an exception too, with None for the output
            outputs = _RootOutputs(boundary.output, copies)
            state.handles.append(boundary.module.register_forward_hook(outputs, always_call=True))
        elif boundary.output is not None:
            state.handles.append(boundary.module.register_forward_hook(_Outputs(boundary.output, copies)))
