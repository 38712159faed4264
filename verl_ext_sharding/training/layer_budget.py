"""Chooses how each layer of a forward pass runs, so that what all of them keep stays within a budget.

A *stack* is the layers of one class: a model with a vision tower has two, and each sees tokens of its own.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from verl_ext_sharding.training.layers import Forward, hidden_states, module_tensors
from verl_ext_sharding.training.recompute import Recompute, Variant, kept_bytes

logger = logging.getLogger(__name__)


class _Stack:
    """The layers of one class, and what forward passes so far have had there.

    Args:
        kinds: Kind of each layer by its index, in forward order.
    """

    def __init__(self, kinds: dict[int, Hashable]) -> None:
        self.kinds = kinds
        self.ran: set[int] = set()
        self.followers: set[_Stack] = set()
        self.num_elements = 0  # the most of any pass, as is the length
        self.length = 0

    def counts(self, start: int = 0) -> Counter[Hashable]:
        """How many layers of each kind run from an index on: of those that have run so far, before that of all."""
        return Counter(self.kinds[index] for index in self.ran or self.kinds if index >= start)

    def record(self, index: int, hidden: torch.Tensor) -> None:
        """Takes note of a call with gradients."""
        self.ran.add(index)
        self.num_elements = max(self.num_elements, hidden.numel())
        self.length = max(self.length, hidden.shape[-2])


class _Run:
    """One run of a stack within a forward pass.

    Args:
        stack: Which.
        start: Index of its first layer that keeps anything; those after it do, too.
    """

    def __init__(self, stack: _Stack, start: int) -> None:
        self.all = stack.counts(start)
        self.ahead = self.all.copy()
        self.used_bytes = 0.0
        self.last_index = start - 1


class _Pass:
    """One forward pass, over as soon as its backward pass begins, or its graph, which alone holds this, is dropped.

    The order of layers doesn't tell: a tower may be called before the layers that it stands behind, or not at all.
    """

    def __init__(self) -> None:
        self.over = False
        self.used_bytes = 0.0
        self.runs: dict[_Stack, _Run] = {}

    def enter(self, stack: _Stack, index: int) -> _Run:
        """The run that a layer is part of, and that goes on with it."""
        run = self.runs.get(stack)
        if run is None:
            for earlier in self.runs:
                earlier.followers.add(stack)
        if run is None or index <= run.last_index:  # a tower can run for images and again for videos
            run = self.runs[stack] = _Run(stack, index)
        run.last_index = index
        run.ahead -= Counter((stack.kinds[index],))
        return run

    def watch(self, output: Any) -> None:
        """Learns of the backward pass from a layer's output."""
        tensors = (value for value in tree_leaves(output) if isinstance(value, torch.Tensor) and value.requires_grad)
        for tensor in tensors:
            tensor.register_hook(self._end)
            return

    def _end(self, _: torch.Tensor) -> None:
        self.over = True


class BudgetedRecompute(Recompute):
    """Gives each layer of each forward pass the variant that keeps the sum under a budget.

    The layers of a short micro-batch all keep everything; those of a long one keep as little as it takes. What a
    variant keeps is measured once for each new longest sequence, by running the layer and dropping the result, and
    scaled by the number of elements for shorter ones (never too low, since the bytes of a token don't fall with length).

    A share holds for each stack alone. Bytes hold for all: a stack leaves room for those that have come after it in earlier
    passes, as much as they have had at most; in the first pass, for all others, as if they had its tokens.

    Args:
        layers: The layers, in forward order.
        ladder: Variants from the one that keeps most to the one that keeps least.
        kept_bytes: Budget of all layers together, for one forward pass.
        share: Budget as a share (0..1) of what the first variant keeps; one of the two is given.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        ladder: Sequence[Variant],
        *,
        kept_bytes: int | None = None,
        share: float | None = None,
    ) -> None:
        super().__init__(layers, ())
        self.ladder = list(ladder)
        self.kept_bytes = kept_bytes
        self.share = share
        kinds: dict[type, dict[int, Hashable]] = {}
        for index, layer in enumerate(layers):
            kinds.setdefault(type(layer), {})[index] = _layer_kind(layer)
        self._stacks = [_Stack(members) for members in kinds.values()]
        self._stack_of = {index: stack for stack in self._stacks for index in stack.kinds}
        self._per_element: dict[tuple[Hashable, int], dict[int, float]] = {}
        self._pass: weakref.ref[_Pass] | None = None
        self._first_pass = True
        self._warned = False

    def run_with_grad(self, index: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = hidden_states(args, kwargs)
        if hidden is None or hidden.dim() < 2:
            return self.ladder[-1](forward, args, kwargs)
        if not _needs_grad(self.layers[index], args, kwargs):  # a frozen tower keeps nothing
            return self.ladder[0](forward, args, kwargs)
        current = self._current_pass()
        output = self._choose(current, index, forward, args, kwargs, hidden)(forward, args, kwargs)
        current.watch(output)
        return output

    def _choose(
        self,
        current: _Pass,
        index: int,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hidden: torch.Tensor,
    ) -> Variant:
        stack = self._stack_of[index]
        own_kind = stack.kinds[index]
        run = current.enter(stack, index)
        stack.record(index, hidden)

        def size(rung: int, kind: Hashable) -> float:
            per_element = self._lookup(kind, rung, hidden.shape[-2])
            if per_element is None:  # a kind of layer that has not run at this length yet is taken to be like this one
                per_element = self._measured(own_kind, rung, forward, args, kwargs, hidden)
            return per_element * hidden.numel()

        def total(rung: int, kinds: Counter[Hashable]) -> float:
            return sum(count * size(rung, kind) for kind, count in kinds.items())

        def elsewhere(rung: int) -> float:
            if self.share is not None:
                return 0.0
            unknown = (other for other in self._stacks if self._first_pass and other not in current.runs)
            guessed = sum(total(rung, other.counts()) for other in unknown)
            return current.used_bytes - run.used_bytes + self._to_come(current, stack, rung) + guessed

        limit = self.kept_bytes if self.kept_bytes is not None else (self.share or 0.0) * total(0, run.all)
        rungs = range(len(self.ladder))
        chosen = next((rung for rung in rungs if total(rung, run.all) + elsewhere(rung) <= limit), None)
        if chosen is None:
            chosen = rungs[-1]
            self._warn(limit, total(chosen, run.all) + elsewhere(chosen))
        if chosen > 0:
            # one rung up where it fits: the rungs lie on a convex line of time against memory, so neighbours mix best
            rest = total(chosen, run.ahead) + elsewhere(chosen)
            if run.used_bytes + size(chosen - 1, own_kind) + rest <= limit:
                chosen -= 1
        num_bytes = size(chosen, own_kind)
        run.used_bytes += num_bytes
        current.used_bytes += num_bytes
        return self.ladder[chosen]

    def _current_pass(self) -> _Pass:
        current = self._pass() if self._pass is not None else None
        if current is None or current.over:
            self._first_pass = self._pass is None
            current = _Pass()
            self._pass = weakref.ref(current)
        return current

    def _to_come(self, current: _Pass, stack: _Stack, rung: int) -> float:
        """Bytes of other stacks' layers that are still to run, at the most that they have had so far."""
        ahead = {other: run.ahead for other, run in current.runs.items() if other is not stack}
        ahead |= {other: other.counts() for other in stack.followers if other not in current.runs}
        return sum(
            count * other.num_elements * self._expected(kind, rung, other.length)
            for other, kinds in ahead.items()
            for kind, count in kinds.items()
        )

    def _expected(self, kind: Hashable, rung: int, length: int) -> float:
        """What a kind of layer keeps of each element; of a variant that was never measured, what one that keeps more does."""
        found = (self._lookup(kind, tried, length) for tried in range(rung, -1, -1))
        return next((per_element for per_element in found if per_element is not None), 0.0)

    def _lookup(self, kind: Hashable, rung: int, length: int) -> float | None:
        points = self._per_element.get((kind, rung), {})
        longer = [known for known in points if known >= length]
        return points[min(longer)] if longer else None

    def _measured(
        self,
        kind: Hashable,
        rung: int,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hidden: torch.Tensor,
    ) -> float:
        length = hidden.shape[-2]
        known = self._lookup(kind, rung, length)
        if known is None:
            known = kept_bytes(self.ladder[rung], forward, args, kwargs) / hidden.numel()
            self._per_element.setdefault((kind, rung), {})[length] = known
        return known

    def _warn(self, limit: float, least: float) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("activation budget of %.0f bytes can't be met: the layers keep %.0f at least", limit, least)


def _layer_kind(layer: nn.Module) -> Hashable:
    return type(layer).__name__, tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())


def _needs_grad(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tensors = (value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor))
    return any(tensor.requires_grad for tensor in chain(tensors, module_tensors(layer)))
