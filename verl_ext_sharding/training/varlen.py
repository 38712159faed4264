"""`varlen`: torch's own packed attention kernel as a transformers attention implementation.

verl's `use_remove_padding=True` needs an attention that keeps packed sequences apart, and stock verl means flash-attn, which is
published as source only. `torch.nn.attention.varlen.varlen_attn` (torch 2.10 and later; CUDA, compute capability 8.0 and later,
half precision) is the same kind of kernel inside torch. Its signature moved with each release: 2.10 has `is_causal` and neither
scale nor window; 2.11 has `scale` and `window_size`, where `(-1, 0)` means causal, and takes grouped key/value heads as they
are; 2.13 wants `enable_gqa` for them. `VarlenKernel` reads the signature once and hides the difference.

With Ulysses sequence parallelism verl swaps transformers' `_flash_attention_forward` for one that exchanges heads and tokens
between ranks, and nothing else: here `sequence_parallel` does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from verl_ext_sharding.training.packing import PackedMask, unsupported

NAME = "varlen"
"""Name of the implementation in transformers."""

MAX_HEAD_DIM = 256
"""Widest head that the kernel takes, and flash-attn's, from which it comes."""

HALF = frozenset({torch.float16, torch.bfloat16})
"""Types that such kernels compute in."""

_HEAD_DIM_MULTIPLE = 8


class Kernel(Protocol):
    """A kernel for packed sequences, called as `VarlenKernel` is, with options of its own."""

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """Types that it computes in."""

    @property
    def device_type(self) -> str:
        """Device that it runs on."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See `VarlenKernel.__call__`."""


@dataclass(kw_only=True, frozen=True)
class VarlenKernel:
    """A variable-length attention kernel of any supported torch, called in one way.

    Args:
        function: The kernel, called with query, key, value `(tokens, heads, head_dim)`, `cu_seqlens` twice and the longest
            length twice, and the keywords below that it has.
        has_causal: It takes `is_causal`.
        has_window: It takes `window_size`, (left, right) neighbours, -1 for all.
        has_scale: It takes `scale`; without it it divides by the square root of the head's width.
        has_gqa: It takes `enable_gqa` and refuses grouped heads without it.
        dtypes: Types that it computes in.
        device_type: Device that it runs on.
    """

    function: Callable[..., torch.Tensor]
    has_causal: bool
    has_window: bool
    has_scale: bool
    has_gqa: bool
    dtypes: frozenset[torch.dtype] = HALF
    device_type: str = "cuda"

    @classmethod
    def of(cls, function: Callable[..., torch.Tensor], **overrides: Any) -> VarlenKernel:
        """Reads the signature of a kernel.

        Args:
            function: `varlen_attn` of some torch, or a stand-in with the same parameters.
            **overrides: Fields to set otherwise, such as `dtypes` for a stand-in.
        """
        names = inspect.signature(function).parameters
        return cls(
            function=function,
            has_causal="is_causal" in names,
            has_window="window_size" in names,
            has_scale="scale" in names,
            has_gqa="enable_gqa" in names,
            **overrides,
        )

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: PackedMask,
        *,
        scale: float,
    ) -> torch.Tensor:
        """Causal attention within each sequence.

        Args:
            query: `(tokens, heads, head_dim)`, of one of `dtypes`.
            key: `(tokens, key/value heads, head_dim)`.
            value: As `key`.
            mask: The boundaries and the window.
            scale: Factor of the scores.

        Returns:
            `(tokens, heads, head_dim)`.

        Raises:
            ConfigError: A sliding window with a kernel that has none.
        """
        keywords: dict[str, Any] = {}
        if self.has_window:
            keywords["window_size"] = (-1 if mask.window is None else mask.window - 1, 0)
        elif mask.window is not None and mask.window < mask.max_length:
            raise unsupported(NAME, f"a sliding window of {mask.window} tokens, which this torch's kernel has not")
        if self.has_causal:
            keywords["is_causal"] = True
        if self.has_scale:
            keywords["scale"] = scale
        else:
            query = query * (scale * query.shape[-1] ** 0.5)
        if self.has_gqa and query.shape[1] != key.shape[1]:
            keywords["enable_gqa"] = True
        lengths = (mask.cu_seqlens, mask.cu_seqlens, mask.max_length, mask.max_length)
        return self.function(query, key, value, *lengths, **keywords)


def torch_kernel() -> VarlenKernel | None:
    """The kernel of the installed torch, or None before 2.10."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return VarlenKernel.of(varlen_attn)


TORCH_KERNEL = torch_kernel()
"""What `varlen` runs in this process."""


def varlen_attention(
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
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    kernel: VarlenKernel | None = TORCH_KERNEL,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with the signature that `transformers.AttentionInterface` calls.

    Args:
        module: The attention layer.
        query: `(batch, heads, tokens, head_dim)`.
        key: `(batch, key/value heads, tokens, head_dim)`; fewer heads than `query` are shared in groups.
        value: As `key`; its head may be narrower.
        attention_mask: What `packing.packed_mask` built.
        dropout: Must be 0: the kernel has none.
        scaling: Factor of the scores, default `head_dim ** -0.5`.
        sliding_window: Tokens that a token sees, itself included, or None; beside the mask's own window the smaller counts.
        is_causal: Must not be False.
        softcap: Must be None: the kernel has none.
        s_aux: Attention sinks; must be None.
        cu_seq_lens_q: Boundaries known to the caller, `(sequences + 1,)`, int32; they take the place of the mask's, but for a
            row that lies on several ranks.
        max_length_q: Longest sequence for `cu_seq_lens_q`.
        kernel: The kernel to run.

    Returns:
        `(batch, tokens, heads, head_dim)` and None for the weights.

    Raises:
        ConfigError: Something asked for that the kernel can't do.
    """
    if kernel is None:
        raise unsupported(NAME, f"torch {torch.__version__}, which has no torch.nn.attention.varlen")
    refused = {"dropout": dropout != 0.0, "attention that is not causal": is_causal is False}
    refused |= {"capped scores (softcap)": softcap is not None, "attention sinks": s_aux is not None}
    for what, present in refused.items():
        if present:
            raise unsupported(NAME, what, instead="eager" if s_aux is not None else None)
    on_ranks = isinstance(attention_mask, PackedMask) and attention_mask.exchange is not None
    if cu_seq_lens_q is not None and max_length_q is not None and not on_ranks:
        mask = PackedMask(cu_seq_lens_q.to(torch.int32), int(max_length_q), None, None)
    elif isinstance(attention_mask, PackedMask):
        mask = attention_mask
    else:
        raise unsupported(NAME, "a model that brings its own mask, or none")
    output = attend_packed(
        module, query, key, value, mask, kernel, scaling=scaling, sliding_window=sliding_window, name=NAME
    )
    return output, None


def attend_packed(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: PackedMask,
    kernel: Kernel,
    *,
    scaling: float | None,
    sliding_window: int | None,
    name: str,
    **options: Any,
) -> torch.Tensor:
    """Brings the states of a layer to a kernel for packed sequences, and its output back.

    Args:
        module: See `varlen_attention`, as for all that follow.
        query: See there.
        key: See there.
        value: See there.
        mask: The boundaries; where the row lies on several ranks, of the whole row.
        kernel: What attends.
        scaling: See there.
        sliding_window: See there.
        name: Implementation, for errors.
        **options: Passed on to the kernel.

    Returns:
        `(batch, tokens, heads, head_dim)`.
    """
    windows = [window for window in (mask.window, sliding_window) if window is not None]
    mask = mask._replace(window=min(windows) if windows else None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    dtype = _compute_dtype(module, query, kernel, name)
    if mask.exchange is not None:
        query, key, value = mask.exchange.to_heads(query.to(dtype), key.to(dtype), value.to(dtype))
    value_dim = value.shape[-1]
    width = -(-max(query.shape[-1], value_dim) // _HEAD_DIM_MULTIPLE) * _HEAD_DIM_MULTIPLE
    packed = [_pack(states, mask.places, width, dtype) for states in (query, key, value)]
    output = kernel(packed[0], packed[1], packed[2], mask, scale=scale, **options)[..., :value_dim]
    batch_size, num_heads, num_tokens, _head_dim = query.shape
    if mask.places is not None:
        output = output.new_zeros(batch_size * num_tokens, num_heads, value_dim).index_copy(0, mask.places, output)
    output = output.reshape(batch_size, num_tokens, num_heads, value_dim)
    return output if mask.exchange is None else mask.exchange.to_tokens(output)


def _pack(states: torch.Tensor, places: torch.Tensor | None, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Turns `(batch, heads, tokens, head_dim)` into `(tokens, heads, width)` without padding tokens."""
    flat = states.transpose(1, 2).flatten(0, 1).to(dtype)
    if places is not None:
        flat = flat.index_select(0, places)
    return F.pad(flat, (0, width - flat.shape[-1])) if flat.shape[-1] < width else flat


def _compute_dtype(module: torch.nn.Module, query: torch.Tensor, kernel: Kernel, name: str) -> torch.dtype:
    """Type to run the kernel in: the query's, autocast's, or that of the layer's weights (adapters may have widened the query)."""
    if query.device.type != kernel.device_type:
        raise unsupported(name, f"tensors on {query.device.type}; the kernel runs on {kernel.device_type}")
    if query.dtype in kernel.dtypes:
        return query.dtype
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    else:
        dtype = next((p.dtype for p in module.parameters() if p.dtype in kernel.dtypes), query.dtype)
    if dtype not in kernel.dtypes:
        raise unsupported(name, f"a forward pass in {str(dtype).removeprefix('torch.')}")
    return dtype
