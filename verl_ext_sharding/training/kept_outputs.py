"""Selective checkpointing's two passes: outputs kept in the forward pass stand in for operators that run again.

As torch's `create_selective_checkpoint_contexts`, with three differences. A layer may change a kept output in place, as the experts
of GPT-OSS add their biases: what is kept is then a copy from before, where torch stops in the backward pass. An attention that is
kept does not draw its dropout again, and what is dropped after it is dropped again all the same. And whoever runs around the layer
may hold what is kept: torch has it beside autograd, where activation offload would not see it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.training.saved_bytes import is_plain

Keeps = Callable[[Any, tuple[Any, ...]], bool]
"""Called with an operator and its positional arguments: whether its output is kept. The same answer in both passes."""

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]

_hooks: ContextVar[tuple[Pack, Unpack] | None] = ContextVar("kept_outputs_hooks", default=None)


@contextmanager
def held_by(hooks: tuple[Pack, Unpack] | None) -> Iterator[None]:
    """Says who holds what layers keep that run inside the block.

    Args:
        hooks: As those of `torch.autograd.graph.saved_tensors_hooks`; None: the tensors are held as they are.
    """
    token = _hooks.set(hooks)
    try:
        yield
    finally:
        _hooks.reset(token)


def contexts(keeps: Keeps) -> tuple[ForwardPass, Recomputation]:
    """The contexts of one checkpointed call, as `context_fn` of `torch.utils.checkpoint.checkpoint` returns them.

    Args:
        keeps: Which outputs are kept.
    """
    forward = ForwardPass(keeps)
    return forward, Recomputation(keeps, forward.kept)


class _Held:
    """One kept tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # The output itself will own the graph that holds this. Below autograd, a view counts changes of its base with this.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._hold(tensor.detach())
        self._packed: Any = None
        self._unpack: Unpack | None = None

    def _hold(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._version = tensor._version

    def copy(self) -> None:
        """Holds a copy, since the tensor is about to change."""
        assert self._tensor is not None
        self._hold(self._tensor.clone())

    def pack(self, pack: Pack, unpack: Unpack) -> None:
        """Gives the tensor to others, who give it back, or don't take it and return a tensor."""
        assert self._tensor is not None
        packed = pack(self._tensor)
        if not isinstance(packed, torch.Tensor):
            self._packed, self._unpack, self._tensor = packed, unpack, None

    def take(self) -> torch.Tensor:
        """The tensor as the operator returned it."""
        if self._unpack is not None:
            return self._unpack(self._packed)
        assert self._tensor is not None
        if self._tensor._version != self._version:
            raise ConfigError(
                "sharding.roles.<role>.gradient_checkpointing=selective",
                expected="outputs that stay as a layer computed them",
                found="one that was changed in place after the layer had run, or by an operator that does not say so",
                consequence="gradients would be wrong, and the run stops",
                remedy="sharding.roles.<role>.gradient_checkpointing=full",
            )
        return self._tensor


@dataclass(frozen=True)
class _RandomState:
    """Where a random generator stands after an operator that drew from it.

    Args:
        device: Whose generator.
        state: As `get_rng_state` returns it.
    """

    device: torch.device
    state: torch.Tensor

    @classmethod
    def after(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> _RandomState | None:
        """The state after an operator that has just run, or None for one without dropout."""
        position = _dropout_position(func)
        if position is None or not (args[position] if position < len(args) else kwargs.get(_DROPOUT)):
            return None
        device = next(value.device for value in tree_leaves(output) if isinstance(value, torch.Tensor))
        on_host = device.type == "cpu"
        return cls(device, torch.get_rng_state() if on_host else torch.get_device_module(device).get_rng_state(device))

    def restore(self) -> None:
        """Lets the generator go on from here."""
        if self.device.type == "cpu":
            torch.set_rng_state(self.state)
        else:
            torch.get_device_module(self.device).set_rng_state(self.state, self.device)


_DROPOUT = "dropout_p"
"""What the attention operators of torch and of flash-attn call the share that they drop."""


@cache
def _dropout_position(func: Any) -> int | None:
    schema = getattr(func, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return names.index(_DROPOUT) if _DROPOUT in names else None


class _Pass(TorchDispatchMode):
    supports_higher_order_operators = True  # flex attention is one

    def __init__(self, keeps: Keeps) -> None:
        super().__init__()
        self.keeps = keeps

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What a layer has compiled itself stays one operator."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        changed = list(changed_by(func, args, kwargs))
        if changed or not self.keeps(func, args):  # what an operator writes is its result, too
            self.before_change(changed)
            return func(*args, **kwargs)
        return self.run(func, args, kwargs)

    def before_change(self, tensors: list[torch.Tensor]) -> None:
        """Called before an operator runs that is not kept, with what it will write to."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator that is kept."""
        raise NotImplementedError


class ForwardPass(_Pass):
    """Keeps outputs, and where the random numbers stood after them.

    Args:
        keeps: Which.
    """

    def __init__(self, keeps: Keeps) -> None:
        super().__init__(keeps)
        self.kept: dict[Any, list[Any]] = defaultdict(list)
        self._by_storage: dict[int, list[_Held]] = defaultdict(list)

    def before_change(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            for held in self._by_storage.pop(tensor.untyped_storage()._cdata, ()):
                held.copy()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = func(*args, **kwargs)
        self.kept[func].append((tree_map(self._held, output), _RandomState.after(func, args, kwargs, output)))
        return output

    def _held(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        held = _Held(value)
        if is_plain(value):
            self._by_storage[value.untyped_storage()._cdata].append(held)
        return held

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        self._by_storage.clear()
        hooks = _hooks.get()
        if hooks is None or kind is not None:
            return
        for held in tree_leaves(dict(self.kept)):
            if isinstance(held, _Held):
                held.pack(*hooks)


class Recomputation(_Pass):
    """Returns what was kept, each output once, and runs all other operators.

    Args:
        keeps: As in the forward pass.
        kept: What that has kept, by operator and in its order.
    """

    def __init__(self, keeps: Keeps, kept: dict[Any, list[Any]]) -> None:
        super().__init__(keeps)
        self.kept = kept
        self._taken: dict[Any, int] = defaultdict(int)

    def __enter__(self) -> Recomputation:
        self._taken.clear()
        super().__enter__()
        return self

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = self._taken[func]
        self._taken[func] += 1
        outputs = self.kept.get(func, [])
        if number >= len(outputs):
            raise RuntimeError(
                f"selective checkpointing: {func} runs more often in the backward pass than in the forward pass"
            )
        output, outputs[number] = outputs[number], None
        if output is None:
            raise RuntimeError("selective checkpointing: a graph can be run backward once")
        output, random_state = output
        if random_state is not None:
            random_state.restore()
        return tree_map(lambda value: value.take() if isinstance(value, _Held) else value, output)


def changed_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operator writes to.

    Args:
        func: The operator; one of a higher order writes to none.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (tensor for tensor in tree_leaves(value) if is_plain(tensor))
