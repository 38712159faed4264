"""Packed rows whose tokens lie on several ranks (DeepSpeed-Ulysses, arXiv:2309.14509), for our attention implementations.

Each rank of the group has the same number of consecutive tokens of one packed row. Attention needs all of them: the ranks exchange
so that each has all tokens of its share of the heads, and back. verl does that inside of transformers' flash attention alone;
any other implementation would attend to the slice and say nothing.

Queries, keys and values go in one exchange. It is a functional collective, which the compiler traces, so that compiled layers
stay in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.distributed._functional_collectives as collectives

MIN_TORCH = "2.5"
"""First torch whose functional exchange has a gradient."""


class HeadExchange(NamedTuple):
    """The ranks that exchange.

    Args:
        group: Name of their process group, by which a compiled graph finds it.
        size: Number of ranks. It divides the query heads, and divides the key/value heads or is a multiple of them.
    """

    group: str
    size: int

    def to_heads(self, *states: torch.Tensor) -> list[torch.Tensor]:
        """All tokens of a share of the heads.

        Args:
            *states: Queries, keys and values, each `(1, its heads, tokens of a rank, its head_dim)`. Fewer heads than ranks
                are repeated, so that each rank has the one that its queries share.

        Returns:
            Each as `(1, its heads / size or 1, all tokens, its head_dim)`.
        """
        parts = [self._by_rank(part.transpose(1, 2)) for part in states]
        if len({part.shape[-1] for part in parts}) == 1:
            received = self._exchange(torch.cat(parts, dim=3)).split([part.shape[3] for part in parts], dim=3)
        else:
            received = tuple(map(self._exchange, parts))
        return [part.transpose(0, 1).flatten(1, 2).transpose(1, 2) for part in received]

    def to_tokens(self, output: torch.Tensor) -> torch.Tensor:
        """The way back for the output of attention.

        Args:
            output: `(1, all tokens, heads / size, head_dim)`.

        Returns:
            `(1, tokens of a rank, heads, head_dim)`.
        """
        sliced = output.unflatten(1, (self.size, -1)).transpose(0, 1)
        return self._exchange(sliced).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _by_rank(self, states: torch.Tensor) -> torch.Tensor:
        """What goes to which rank: `(1, tokens, heads, head_dim)` as `(size, 1, tokens, heads / size, head_dim)`."""
        if states.shape[2] < self.size:
            states = states.repeat_interleave(self.size // states.shape[2], dim=2)
        return states.unflatten(2, (self.size, -1)).permute(2, 0, 1, 3, 4)

    def _exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """Sends each rank its part, and returns what each rank sent, in the order of ranks."""
        return collectives.all_to_all_single_autograd(parts.contiguous(), None, None, self.group)


class Row(NamedTuple):
    """A packed row of which this rank has a slice.

    Args:
        exchange: The ranks that have the others.
        position_ids: Of the whole row, `(tokens,)`, integers that restart where a sequence does.
        start: Place of this rank's first token in the row.
    """

    exchange: HeadExchange
    position_ids: torch.Tensor
    start: int

    @classmethod
    def gather(cls, position_ids: torch.Tensor, group: torch.distributed.ProcessGroup) -> Row:
        """Puts a row together. A collective call of all ranks of the group.

        Args:
            position_ids: Of this rank's slice, `(1, tokens)`, as many on each rank.
            group: The ranks.
        """
        local = position_ids.reshape(-1).contiguous()
        size, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
        whole = local.new_empty(local.numel() * size)
        torch.distributed.all_gather_into_tensor(whole, local, group=group)
        return cls(HeadExchange(group.group_name, size), whole, rank * local.numel())

    def continues(self) -> torch.Tensor:
        """Whether each token but the row's first belongs to the sequence of the token before it, `(tokens - 1,)`, bool."""
        return self.position_ids.diff() == 1


_ROW: ContextVar[Row | None] = ContextVar("sequence_parallel_row", default=None)


@contextmanager
def forward_pass() -> Iterator[None]:
    """A forward pass; a row that is announced inside is that of this pass alone."""
    token = _ROW.set(None)
    try:
        yield
    finally:
        _ROW.reset(token)


def announce(row: Row) -> None:
    """Says of which row this rank has a slice, before the model of the pass runs and builds its masks."""
    _ROW.set(row)


def current_row() -> Row | None:
    """The row of the pass that is under way, or None where this rank has all its tokens."""
    return _ROW.get()
