"""`fa2_packed`: flash-attn over packed sequences, told once in a forward pass where they start.

It calls flash-attn as transformers does under "flash_attention_2", by transformers' own function, with the boundaries that
`packing.packed_mask` found. Under "flash_attention_2" itself each layer works them out of `position_ids` anew, with a wait for the
device, and hands its number on: the compiler breaks its trace at the one, and compiles every layer apart for the other, until its
limit of recompilations is reached. With Ulysses sequence parallelism verl's exchange breaks the trace as well; here
`sequence_parallel` exchanges.

The name holds no "flash": transformers would look for a kernel of that name on the hub.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import modeling_flash_attention_utils

from verl_ext_sharding.training.packing import PackedMask, unsupported
from verl_ext_sharding.training.varlen import HALF, attend_packed

NAME = "fa2_packed"
"""Name of the implementation in transformers."""

TRANSFORMERS = "flash_attention_2"
"""What transformers calls flash-attn, and verl's own choice."""


@dataclass(kw_only=True, frozen=True)
class FlashKernel:
    """flash-attn by way of transformers.

    Args:
        dtypes: Types that it computes in.
        device_type: Device that it runs on.
    """

    dtypes: frozenset[torch.dtype] = HALF
    device_type: str = "cuda"

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: PackedMask,
        *,
        scale: float,
        dropout: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Causal attention within each sequence; shapes as of `varlen.VarlenKernel`."""
        output: torch.Tensor = modeling_flash_attention_utils._flash_attention_forward(
            query[None],
            key[None],
            value[None],
            attention_mask=None,
            query_length=query.shape[0],
            is_causal=True,
            dropout=dropout,
            softmax_scale=scale,
            sliding_window=mask.window,
            softcap=softcap,
            cu_seq_lens_q=mask.cu_seqlens,
            cu_seq_lens_k=mask.cu_seqlens.clone(),  # the compiler takes no tensor twice in a function with its own gradient
            max_length_q=mask.max_length,
            max_length_k=mask.max_length,
            attn_implementation=TRANSFORMERS,
        )
        return output.reshape(query.shape[0], query.shape[1], -1)


def prepare() -> None:
    """Has transformers import flash-attn, which inside of a trace it could not.

    Raises:
        ImportError: It is not installed, or does not load.
    """
    modeling_flash_attention_utils.lazy_import_flash_attention(TRANSFORMERS)


def packed_flash_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: PackedMask | torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    kernel: FlashKernel = FlashKernel(),
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with the signature that `transformers.AttentionInterface` calls.

    Args:
        module: See `varlen.varlen_attention`, as for all but those that follow.
        query: See there.
        key: See there.
        value: See there.
        attention_mask: See there.
        dropout: Share of attention weights dropped.
        scaling: See there.
        sliding_window: See there.
        is_causal: See there.
        softcap: Cap of the scores, or None.
        s_aux: See there.
        kernel: See there.

    Returns:
        `(batch, tokens, heads, head_dim)` and None for the weights.

    Raises:
        ConfigError: Something asked for that the kernel can't do.
    """
    if s_aux is not None:
        raise unsupported(TRANSFORMERS, "attention sinks", instead="eager")
    if is_causal is False:
        raise unsupported(TRANSFORMERS, "attention that is not causal")
    if not isinstance(attention_mask, PackedMask):
        raise unsupported(TRANSFORMERS, "a model that brings its own mask, or none")
    output = attend_packed(
        module,
        query,
        key,
        value,
        attention_mask,
        kernel,
        scaling=scaling,
        sliding_window=sliding_window,
        name=TRANSFORMERS,
        dropout=dropout,
        softcap=softcap,
    )
    return output, None
