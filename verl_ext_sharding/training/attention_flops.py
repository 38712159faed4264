"""Floating-point operations of the packed attention kernels, by which the compiler chooses what to recompute.

Within an activation budget the partitioner keeps what saves the most operations for its bytes. It takes operators of other libraries
into account only if told to (`is_non_builtin_to_include`), and torch has no formula for flash-attn's, nor in 2.11 for its own:
attention would be run again in each backward pass, however long sequences are. At 32k tokens that is half of a layer's forward
pass (1.5B). The formula of later versions takes each sequence for as long as the longest, and knows no window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

OPERATORS = (("torch_attn", "_varlen_attn"), ("flash_attn", "_flash_attn_varlen_forward"))
"""Namespace and name of the kernels behind `varlen` and `fa2_packed`."""

_LONGEST = ("max_k", "max_seqlen_k")
_LEFT = ("window_size", "window_size_left")


@contextmanager
def counted() -> Iterator[None]:
    """Has torch's FLOP counter count those of the operators that exist in this process, while layers are compiled."""
    from torch.utils.flop_counter import flop_registry

    before = dict(flop_registry)
    for namespace, name in OPERATORS:
        operator = getattr(getattr(torch.ops, namespace), name, None)
        if operator is not None:
            arguments = [argument.name for argument in operator.default._schema.arguments]
            flop_registry[operator] = partial(packed_attention_flops, arguments)
    try:
        yield
    finally:
        flop_registry.clear()
        flop_registry.update(before)


def packed_attention_flops(arguments: Sequence[str], *values: Any, out_val: Any = None, **more: Any) -> int:
    """Operations of one forward pass, two for each multiplication: `2 * heads * tokens * keys * (head_dim + value_dim)`.

    As torch's formulas it counts the whole square of a causal mask; the kernel's rate, about half of a matrix product's, makes
    up for it. Each token counts with the longest sequence's keys, or with its window's.

    Args:
        arguments: Names of the operator's arguments, in its order.
        *values: Their values: query, key and value `(tokens, heads, head_dim)` first.
        out_val: What it returns.
        **more: Arguments passed by name.

    Raises:
        TypeError: No argument is the longest sequence's length, by the names that are known.
    """
    named = dict(zip(arguments, values, strict=False)) | more
    tokens, heads, head_dim = values[0].shape
    value_dim = values[2].shape[-1]
    keys = next((named[name] for name in _LONGEST if name in named), None)
    if keys is None:
        raise TypeError(f"no argument is the longest length ({' or '.join(_LONGEST)}) among {', '.join(named)}")
    left = next((named[name] for name in _LEFT if named.get(name) is not None), -1)
    left = left[0] if isinstance(left, (list, tuple)) else left
    keys = keys if left < 0 else min(keys, left + 1)
    return int(2 * heads * tokens * keys * (head_dim + value_dim))
