"""Mixed precision without FSDP: weights are stored in one dtype and read in another while a model computes.

What FSDP's mixed-precision policy does for its shards, for a model that isn't sharded: a module that reads its `weight`
while computation is under way gets a cast copy, and the gradient comes back to the stored parameter in its own dtype.
The cast is a step of the module's forward, so that recomputation in a backward pass casts again and nothing cast lives
longer than a layer where activations are recomputed. Names, `state_dict` and `parameters()` are those of the model.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)

_DTYPE = "_sharding_compute_dtype"
_NAMES = "_sharding_cast_names"

_computing = False
"""Whether cast values are read. One switch for the process: autograd runs recomputation on threads of its own."""


def apply(model: nn.Module, dtype: torch.dtype) -> None:
    """Lets each module that owns floating-point parameters read them in `dtype` while it computes. Idempotent.

    Args:
        model: Any model that isn't wrapped by FSDP.
        dtype: Floating-point dtype of the computation. Modules that store all of theirs in it stay as they are.
    """
    remove(model)
    for module in model.modules():
        names = tuple(n for n, p in module._parameters.items() if p is not None and _is_cast(p, dtype))
        if names:
            module.__dict__[_DTYPE] = dtype
            module.__class__ = _casting_class(type(module), names)  # type: ignore[arg-type]


def remove(model: nn.Module) -> None:
    """Gives each module its class back. Without a compute dtype, does nothing."""
    for module in model.modules():
        if module.__dict__.pop(_DTYPE, None) is not None:
            module.__class__ = type(module).__bases__[0]


@contextmanager
def computing() -> Iterator[None]:
    """While this is open, modules of `apply` read their parameters in the compute dtype; else as they are stored.

    Open it around forward and backward, not around what reads or changes weights (optimizers, checkpoints, merging of
    adapters).
    """
    global _computing
    previous, _computing = _computing, True
    try:
        yield
    finally:
        _computing = previous


def _is_cast(parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    return parameter.is_floating_point() and parameter.dtype != dtype


@functools.cache
def _casting_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass whose attributes `names` are the module's parameters, cast while computing.

    A property of the class is found before `nn.Module.__getattr__`, and assignment still goes to `nn.Module.__setattr__`.
    """
    properties = {name: property(functools.partial(_read, name=name)) for name in names}
    members = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), {**members, **properties, _NAMES: names, "__reduce_ex__": _reduce})


def _reduce(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    """Copies and pickles make the class anew: by its name only the module's own is found."""
    base: Any = type(module).__bases__[0]
    _, _, *state = base.__reduce_ex__(module, protocol)
    return _new, (base, getattr(type(module), _NAMES)), *state


def _new(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    casting: Any = _casting_class(base, names)  # type: ignore[arg-type]
    module: nn.Module = casting.__new__(casting)
    return module


def _read(module: nn.Module, name: str) -> torch.Tensor | None:
    parameter = module._parameters[name]
    if parameter is None or not _computing:
        return parameter
    dtype: torch.dtype = module.__dict__[_DTYPE]
    return parameter.to(dtype)
