"""Token ids are checked before an embedding reads them: on a GPU a wrong one ends in an assert that names nothing.

| id                                  | `error`                          | `mask`                  |
|-------------------------------------|----------------------------------|-------------------------|
| negative, or at or above `rows`     | `TokenIdError`                   | replaced, counted       |
| the same where the mask is 0        | replaced, counted                | replaced, counted       |
| unmapped: `tokenizer_size` .. `rows`| counted, kept: it has a row      | replaced, counted       |

Models round their embedding up (Qwen2: 151,936 rows or 152,064 for 151,665 tokens), and sampling can draw a row that no
token has. Such an id crashes nothing, so `error` lets it pass and counts it. An unmapped id under a mask of 0 is padding,
and no event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from verl_ext_sharding.errors import TokenIdError

KEY = "sharding.guards.token_ids"

KINDS = ("negative", "out_of_rows", "unmapped")
"""Kinds of ids that are counted."""

_INTEGERS = (torch.int64, torch.int32)
"""What `torch.nn.functional.embedding` takes."""


def num_ids(tokenizer: Any) -> int:
    """Ids up to a tokenizer's last, which are more than its tokens where ids leave gaps."""
    try:
        highest = max(tokenizer.get_vocab().values(), default=-1)
    except (AttributeError, NotImplementedError):  # tokenizers that a checkpoint brings
        highest = -1
    return max(len(tokenizer), highest + 1)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A batch that the role's embedding can read.

    Args:
        role: The model that is about to read it.
        input_ids: The ids; the very object that was checked if nothing had to be replaced.
        counts: Ids of each of `KINDS`.
        replaced: Boolean, laid out as `input_ids`: positions that hold the pad id now, to be left out of attention and loss
            masks. None: none.
        lowest: Smallest id that was found, before replacement. None: not looked at, or an empty batch.
        highest: Largest id.
    """

    role: str
    input_ids: torch.Tensor
    counts: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    replaced: torch.Tensor | None = None
    lowest: int | None = None
    highest: int | None = None

    def describe(self) -> str:
        """The batch in words, for `device_asserts.explain_device_assert`: after an assert the GPU answers nothing."""
        ids = self.input_ids
        if ids.is_nested:
            shape = f"{ids.size(0)} sequences, {ids.values().numel()} tokens"
        else:
            shape = " x ".join(str(size) for size in ids.shape) + " tokens"
        return shape if self.lowest is None else f"{shape}, ids {self.lowest} to {self.highest}"


@dataclass(frozen=True, kw_only=True)
class TokenGuard:
    """Checks the token ids of each batch of one role. A clean batch costs one reduction and is returned as it came.

    Args:
        role: The model that reads the ids, for messages and metrics.
        policy: See the table above; `off` looks at nothing.
        rows: Rows of the role's input embedding, of the whole model if it is sharded.
        tokenizer_size: `len(tokenizer)` of the tokenizer that made the ids. None: unknown, so nothing is unmapped.
        pad_token_id: What a bad id is replaced by, from 0 to `rows` - 1. None: 0.
    """

    role: str
    policy: Literal["error", "mask", "off"]
    rows: int
    tokenizer_size: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        assert self.policy in ("error", "mask", "off"), self.policy
        assert self.rows > 0, self.rows
        if self.policy != "off" and not 0 <= self.replacement < self.rows:
            raise TokenIdError(
                f"pad token of the {self.role}",
                expected=f"an id from 0 to {self.rows - 1}: its embedding has {self.rows} rows",
                found=f"pad_token_id {self.pad_token_id}",
                consequence="the run stops, since every padded batch would crash the embedding",
                remedy="take the tokenizer that belongs to the model, or resize the model's embedding",
            )

    @property
    def replacement(self) -> int:
        """The id that takes the place of a bad one."""
        return 0 if self.pad_token_id is None else self.pad_token_id

    def check(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Checked:
        """Looks at one batch.

        Args:
            input_ids: int64 or int32, on any device: dense [batch, sequence], packed [tokens] or [1, tokens], or a nested
                tensor of layout `torch.jagged`, [batch, ragged].
            attention_mask: Laid out as `input_ids`, 0 where an id is padding. None: every id counts.

        Raises:
            TokenIdError: With `error`: an id that counts has no row. With `error` and `mask`: ids or mask are of a
                kind that no embedding takes.
        """
        if self.policy == "off":
            return Checked(role=self.role, input_ids=input_ids)
        self._check_kind(input_ids, attention_mask)
        ids = _flat(input_ids)
        if ids.numel() == 0:
            return Checked(role=self.role, input_ids=input_ids)
        lowest, highest = torch.stack(torch.aminmax(ids)).tolist()
        known = self.rows if self.tokenizer_size is None else min(self.tokenizer_size, self.rows)
        if lowest >= 0 and highest < known:
            return Checked(role=self.role, input_ids=input_ids, lowest=lowest, highest=highest)
        return self._sort_out(input_ids, ids, attention_mask, known, lowest, highest)

    def _sort_out(
        self,
        input_ids: torch.Tensor,
        ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        known: int,
        lowest: int,
        highest: int,
    ) -> Checked:
        """The slow way, for a batch in which some id is none of the tokenizer's."""
        attended = None if attention_mask is None else _flat(attention_mask).to(ids.device) != 0
        found = {"negative": ids < 0, "out_of_rows": ids >= self.rows, "unmapped": (ids >= known) & (ids < self.rows)}
        if attended is not None:
            found["unmapped"] &= attended
        counts = {kind: int(where.sum()) for kind, where in found.items()}
        without_row = found["negative"] | found["out_of_rows"]
        fatal = without_row if attended is None else without_row & attended
        if self.policy == "error" and fatal.any():
            raise self._no_row(input_ids, ids, fatal)
        bad = without_row | found["unmapped"] if self.policy == "mask" else without_row
        if not bad.any():
            return Checked(role=self.role, input_ids=input_ids, counts=counts, lowest=lowest, highest=highest)
        return Checked(
            role=self.role,
            input_ids=_as(input_ids, ids.masked_fill(bad, self.replacement)),
            counts=counts,
            replaced=_as(input_ids, bad),
            lowest=lowest,
            highest=highest,
        )

    def _check_kind(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
        if input_ids.dtype not in _INTEGERS:
            raise self._error(
                "int64 or int32 ids", f"{input_ids.dtype} ids", "convert the ids before the model is called"
            )
        if input_ids.is_nested and input_ids.layout != torch.jagged:
            raise self._error(
                "nested ids of layout torch.jagged", str(input_ids.layout), "build them with layout=torch.jagged"
            )
        if attention_mask is None:
            return
        same = attention_mask.is_nested == input_ids.is_nested
        if not same or _flat(attention_mask).shape != _flat(input_ids).shape:
            found = f"ids {_shape(input_ids)}, mask {_shape(attention_mask)}"
            raise self._error("an attention mask laid out as the ids", found, "build the mask from the same batch")

    def _no_row(self, input_ids: torch.Tensor, ids: torch.Tensor, fatal: torch.Tensor) -> TokenIdError:
        where = fatal.flatten().nonzero().flatten()
        first = int(where[0])
        others = f", and {len(where) - 1} more" if len(where) > 1 else ""
        known = "" if self.tokenizer_size is None else f", and the tokenizer knows {self.tokenizer_size}"
        return self._error(
            f"ids from 0 to {self.rows - 1}: its embedding has {self.rows} rows{known}",
            f"id {int(ids.flatten()[first])} at {_position(input_ids, first)}{others}",
            "check that the ids were made by the tokenizer that belongs to this model (a label such as -100 is no input); "
            f"{KEY}=mask replaces such ids by {self.replacement} and goes on",
        )

    def _error(self, expected: str, found: str, remedy: str) -> TokenIdError:
        return TokenIdError(
            f"token ids of the {self.role}",
            expected=expected,
            found=found,
            consequence="the run stops here, before a kernel asserts and takes the GPU with it",
            remedy=remedy,
        )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A nested tensor's values; any other tensor itself."""
    return tensor.values() if tensor.is_nested else tensor


def _as(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values laid out as another tensor; nested ones share its offsets, so that both can be used in one operation."""
    if not like.is_nested:
        return values
    return torch.nested.nested_tensor_from_jagged(values, offsets=like.offsets(), lengths=like.lengths())


def _shape(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return f"nested with {tensor.values().numel()} tokens in {tensor.size(0)} sequences"
    return str(list(tensor.shape))


def _position(input_ids: torch.Tensor, index: int) -> str:
    """Where the element of a flat index lies, in the batch's own terms."""
    if input_ids.is_nested:
        sequence = int(torch.searchsorted(input_ids.offsets(), index, right=True)) - 1
        return f"sequence {sequence}, position {index - int(input_ids.offsets()[sequence])}"
    if input_ids.dim() == 2:
        sequence, position = divmod(index, input_ids.size(1))
        return f"sequence {sequence}, position {position}"
    return f"position {index}"
