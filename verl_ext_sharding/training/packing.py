"""How packed batches reach an attention kernel: masks that say where each sequence starts instead of a square of booleans.

verl's remove-padding feeds a model one row of sequences laid end to end, with `position_ids` that restart at 0. transformers
(5.5 and later) sees the restarts while it builds its masks and hands a mask *function* to the mask builder of the attention
implementation; its own builder for "sdpa" and "eager" turns that into a square of `tokens x tokens`, which keeps the samples
apart but grows with the square of the batch. The builders here ask the same function one question for each token, whether it may
look at the token before it, and return the boundaries. They travel to every layer as the `attention_mask`, so that they are worked
out once in a forward, survive gradient checkpointing and sharding wrappers, and need no cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.training.sequence_parallel import HeadExchange, current_row

MaskFunction = Callable[..., torch.Tensor]

_GROUP_FILL = 0.75
"""A sequence joins a group when it fills at least this share of the group's longest: at most a third more work than needed."""

_GROUP_SHORT_TOKENS = 128
"""Sequences up to this length share one group whatever their lengths: the kernel launch costs more than the padding."""


_COMPUTES = {
    "varlen": (
        "causal attention of a training pass in float16 or bfloat16 on CUDA, without dropout, capped scores or sinks"
        " (torch 2.10 or later)"
    ),
    "sdpa": "plain softmax attention",
    "flash_attention_2": "causal attention within packed sequences in float16 or bfloat16 on CUDA, without sinks",
}
_INSTEAD = {"varlen": "sdpa", "sdpa": "eager", "flash_attention_2": "sdpa"}


def unsupported(implementation: str, found: str, *, instead: str | None = None) -> ConfigError:
    """The error of a forward pass that asks an implementation for more than it computes.

    Args:
        implementation: As in `sharding.roles.<role>.attn_implementation`: "flash_attention_2", "varlen" or "sdpa".
        found: What it was asked for.
        instead: The implementation that computes it; None: the next that computes more.
    """
    return ConfigError(
        f"attn_implementation={implementation}",
        expected=_COMPUTES[implementation],
        found=found,
        consequence="the forward pass stops: the kernel would compute another model",
        remedy=f"sharding.roles.<role>.attn_implementation={instead or _INSTEAD[implementation]}",
    )


class PackedMask(NamedTuple):
    """Where the sequences of a flattened batch start; what a variable-length kernel needs.

    Args:
        cu_seqlens: Start of each sequence and the total, `(sequences + 1,)`, int32, over the non-padding tokens.
        max_length: Tokens of the longest sequence, on the host.
        window: Tokens that a token sees, itself included, or None for all before it.
        places: Where the non-padding tokens are in the flattened batch, `(tokens,)`, int64, or None when there is no padding.
        exchange: The ranks that have the other tokens of the row, or None when all are here; boundaries are of the whole row.
    """

    cu_seqlens: torch.Tensor
    max_length: int
    window: int | None
    places: torch.Tensor | None
    exchange: HeadExchange | None = None


class SequenceGroup(NamedTuple):
    """Sequences of like length that go through one call of a padded kernel.

    Args:
        places: Place in the flattened batch of each token, `(sequences, longest)`, int64; past its end a sequence repeats its
            last token, which no earlier token of a causal mask can see.
        valid: Places of the real tokens in the flattened group, int64, or None when all are.
    """

    places: torch.Tensor
    valid: torch.Tensor | None

    def to(self, device: torch.device) -> SequenceGroup:
        """The same group with its indices on another device."""
        valid = None if self.valid is None else self.valid.to(device)
        return SequenceGroup(self.places.to(device), valid)


class GroupedMask:
    """The sequences of a flattened batch in groups of like length; what a padded kernel needs.

    Neither a tuple nor a dataclass: the compiler would look inside of those and compile a layer anew for each number of groups.
    What moves the inputs of layers between devices does not look inside either, so the indices follow by `on`.

    Args:
        groups: The groups; together they hold each token once.
        restore: For each token of the flattened batch its place in the groups' outputs laid end to end, int64.
        window: Tokens that a token sees, itself included, or None for all before it.
        exchange: The ranks that have the other tokens of the row, or None; the groups are of the whole row.
    """

    __slots__ = ("_copies", "exchange", "groups", "restore", "window")

    def __init__(
        self,
        groups: tuple[SequenceGroup, ...],
        restore: torch.Tensor,
        window: int | None,
        exchange: HeadExchange | None = None,
    ) -> None:
        self.groups = groups
        self.restore = restore
        self.window = window
        self.exchange = exchange
        self._copies: dict[torch.device, GroupedMask] = {restore.device: self}

    def on(self, device: torch.device) -> GroupedMask:
        """The mask for layers on a device; copied there once.

        Args:
            device: The device, with its number.
        """
        if device not in self._copies:
            groups = tuple(group.to(device) for group in self.groups)
            self._copies[device] = GroupedMask(groups, self.restore.to(device), self.window, self.exchange)
        return self._copies[device]


class _Segments(NamedTuple):
    """Boundaries of a batch, and whether the mask is another than that of causal attention within them."""

    cu_seqlens: torch.Tensor
    places: torch.Tensor | None
    differs: torch.Tensor
    exchange: HeadExchange | None


def _segments(
    mask_function: MaskFunction, attention_mask: torch.Tensor | None, shape: tuple[int, int], device: torch.device | str
) -> _Segments:
    """Finds the boundaries in a batch of `shape` (rows, tokens), padding left out; in the whole row where this is a slice."""
    num_rows, num_tokens = shape
    if attention_mask is None:
        kept, places = None, torch.arange(num_rows * num_tokens, device=device)
    else:
        kept = places = attention_mask[:, :num_tokens].reshape(-1).nonzero().squeeze(-1)
    row = torch.div(places, num_tokens, rounding_mode="floor")
    column = places - row * num_tokens
    head = torch.zeros_like(row[1:])
    same_row = row[1:] == row[:-1]
    sees_previous = same_row & mask_function(row[1:], head, column[1:], column[:-1])
    differs = (same_row & mask_function(row[1:], head, column[:-1], column[1:])).any()  # a token sees the one after it
    num_kept, exchange = places.numel(), None
    if (whole := current_row()) is not None:
        continues = whole.continues()
        differs = differs | (sees_previous != continues[whole.start : whole.start + num_tokens - 1]).any()
        sees_previous, num_kept, exchange = continues, whole.position_ids.numel(), whole.exchange
    starts = (~sees_previous).nonzero().squeeze(-1) + 1
    cu_seqlens = torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), num_kept)]).to(torch.int32)
    return _Segments(cu_seqlens, kept, differs, exchange)


@torch.compiler.disable
def packed_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    implementation: str = "varlen",
    **_: Any,
) -> PackedMask:
    """Mask builder for variable-length kernels, with the signature that `transformers.AttentionMaskInterface` calls.

    Args:
        batch_size: Rows of the batch.
        q_length: Tokens of a row that ask.
        kv_length: Tokens of a row that are looked at; must equal `q_length`.
        q_offset: Tokens before the row that are in a cache; must be 0.
        kv_offset: Likewise for keys; must be 0.
        mask_function: transformers' mask of a (batch, head, query, key) index.
        attention_mask: 2-D mask, True for real tokens, or None when there is no padding.
        local_size: Sliding window or chunk in tokens, or None.
        use_vmap: Whether the model overlays a mask of its own, which boundaries can't express.
        device: Device of the result.
        implementation: Whose mask it is, for errors.

    Returns:
        The boundaries; reading them back costs one wait for the device in each forward.

    Raises:
        ConfigError: The mask is not causal attention within sequences, or a key/value cache is in use.
    """
    if use_vmap or q_length != kv_length or q_offset or kv_offset:
        raise unsupported(implementation, "a mask of the model's own" if use_vmap else "a pass with a key/value cache")
    segments = _segments(mask_function, attention_mask, (batch_size, q_length), device)
    longest = segments.cu_seqlens.diff().max()
    max_length, differs = torch.stack([longest, segments.differs.to(longest.dtype)]).tolist()
    if differs:
        raise unsupported(implementation, "a mask in which a token sees later ones, or others than its sequence has")
    return PackedMask(segments.cu_seqlens, max_length, local_size, segments.places, segments.exchange)


@torch.compiler.disable
def grouped_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> GroupedMask | torch.Tensor | None:
    """Mask builder for padded kernels: groups for a packed batch, transformers' own mask for everything else.

    Args:
        batch_size: See `packed_mask`, as for all that follow.
        q_length: See there.
        kv_length: See there; here it may differ.
        q_offset: See there; here it may be set.
        kv_offset: See there; here it may be set.
        mask_function: See there.
        attention_mask: See there; a padded batch takes transformers' own path.
        local_size: See there.
        use_vmap: See there; such a mask takes transformers' own path.
        device: See there.
        **kwargs: Passed on to transformers' builder.

    Returns:
        A `GroupedMask` when several sequences share a row, else what `transformers.masking_utils.sdpa_mask` returns.

    Raises:
        ConfigError: A mask of the model's own, with sequence parallelism.
    """
    if attention_mask is None and not use_vmap and q_length == kv_length and not q_offset and not kv_offset:
        segments = _segments(mask_function, None, (batch_size, q_length), device)
        differs, *bounds = torch.cat([segments.differs.view(1).int(), segments.cu_seqlens]).tolist()
        if not differs and (segments.exchange is not None or len(bounds) - 1 > batch_size):
            return group_sequences(bounds, window=local_size, device=device, exchange=segments.exchange)
    if current_row() is not None:
        raise unsupported("sdpa", "a mask of the model's own, with sequence parallelism", instead="flash_attention_2")
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        use_vmap=use_vmap,
        device=device,
        **kwargs,
    )


def group_sequences(
    bounds: Sequence[int], *, window: int | None, device: torch.device | str, exchange: HeadExchange | None = None
) -> GroupedMask:
    """Puts sequences of like length together, longest first.

    Args:
        bounds: Start of each sequence in the flattened batch, and the total.
        window: Tokens that a token sees, itself included, or None.
        device: Device of the indices.
        exchange: See `GroupedMask`.
    """
    spans = sorted(itertools.pairwise(bounds), key=lambda span: (span[0] - span[1], span[0]))
    members: list[list[tuple[int, int]]] = []
    for start, end in spans:
        longest = members[-1][0][1] - members[-1][0][0] if members else 0
        if members and (longest <= _GROUP_SHORT_TOKENS or end - start >= _GROUP_FILL * longest):
            members[-1].append((start, end))
        else:
            members.append([(start, end)])
    groups = tuple(_group(spans_of_group, device) for spans_of_group in members)
    tokens = [
        group.places.reshape(-1) if group.valid is None else group.places.reshape(-1)[group.valid] for group in groups
    ]
    order = torch.cat(tokens)
    restore = torch.empty_like(order)
    restore[order] = torch.arange(order.numel(), device=order.device)
    return GroupedMask(groups, restore, window, exchange)


def _group(spans: Sequence[tuple[int, int]], device: torch.device | str) -> SequenceGroup:
    starts = torch.tensor([start for start, _ in spans], device=device)
    lengths = torch.tensor([end - start for start, end in spans], device=device)
    longest = spans[0][1] - spans[0][0]
    offsets = torch.arange(longest, device=device)
    places = starts[:, None] + torch.minimum(offsets, lengths[:, None] - 1)
    if all(end - start == longest for start, end in spans):
        return SequenceGroup(places, None)
    return SequenceGroup(places, (offsets < lengths[:, None]).reshape(-1).nonzero().squeeze(-1))
