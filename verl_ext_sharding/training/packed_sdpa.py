"""`sdpa_packed`: torch's scaled-dot-product attention over packed sequences, kept apart, on every device and in every dtype.

Stock transformers does not mix the samples of verl's packed rows under "sdpa" (5.5 to 5.17: it finds the restarts of
`position_ids` and masks across them, seen to 1e-6 in fp32), but it does so with a boolean square of all tokens times all tokens
and without the fused causal kernels. Here the sequences go through the same function in groups of like length, padded on
the right, where a causal mask already hides the padding: no mask, no square. Padded batches, caches and masks of a model's own
take transformers' path unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from verl_ext_sharding.training.packing import GroupedMask, SequenceGroup, unsupported

NAME = "sdpa_packed"
"""Name of the implementation in transformers."""


def packed_sdpa_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: GroupedMask | torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with the signature that `transformers.AttentionInterface` calls.

    Args:
        module: The attention layer.
        query: `(batch, heads, tokens, head_dim)`.
        key: `(batch, key/value heads, tokens, head_dim)`.
        value: As `key`.
        attention_mask: What `packing.grouped_mask` built; anything but a `GroupedMask` takes transformers' path.
        dropout: Share of attention weights dropped.
        scaling: Factor of the scores, default `head_dim ** -0.5`.
        sliding_window: Tokens that a token sees, itself included, or None; beside the mask's own window the smaller counts.
        is_causal: As transformers passes it.
        **kwargs: Passed on.

    Returns:
        `(batch, tokens, heads, head_dim)` and None for the weights.

    Raises:
        ConfigError: Score capping or sinks, which this attention would silently leave out.
    """
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise unsupported("sdpa", f"a model that asks for {name}")
    if not isinstance(attention_mask, GroupedMask):
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output, None
    output = _grouped_attention(
        query, key, value, attention_mask, window=sliding_window, dropout=dropout, scaling=scaling
    )
    return output, None


@torch.compiler.disable
def _grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: GroupedMask,
    *,
    window: int | None,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """One call for each group. Not compiled: the groups differ in each batch and would be compiled anew."""
    if mask.exchange is not None:
        query, key, value = mask.exchange.to_heads(query, key, value)
    mask = mask.on(query.device)
    window = min((size for size in (mask.window, window) if size is not None), default=None)
    batch_size, num_heads, num_tokens, _ = query.shape
    flat = [states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)]
    outputs = []
    for group in mask.groups:
        grouped = [states[group.places].transpose(1, 2) for states in flat]
        attended = _attend(grouped[0], grouped[1], grouped[2], group, window=window, dropout=dropout, scaling=scaling)
        attended = attended.transpose(1, 2).flatten(0, 1)
        outputs.append(attended if group.valid is None else attended.index_select(0, group.valid))
    output = torch.cat(outputs).index_select(0, mask.restore).view(batch_size, num_tokens, num_heads, -1)
    return output if mask.exchange is None else mask.exchange.to_tokens(output)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: SequenceGroup,
    *,
    window: int | None,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """Causal attention of `(sequences, heads, tokens, head_dim)`, within the window if there is one."""
    longest = group.places.shape[1]
    band = None
    if window is not None and window < longest:
        band = torch.ones(longest, longest, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    num_groups = query.shape[1] // key.shape[1]
    shares_heads = num_groups > 1 and band is None and _takes_grouped_heads(query)
    if num_groups > 1 and not shares_heads:
        key, value = repeat_kv(key, num_groups), repeat_kv(value, num_groups)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=band,
        dropout_p=dropout,
        is_causal=band is None,
        scale=scaling,
        enable_gqa=shares_heads,
    )


def _takes_grouped_heads(query: torch.Tensor) -> bool:
    """Whether a fused kernel takes fewer key/value heads here.

    On CUDA only the flash kernel does; in float32, or before compute capability 8.0, torch would fall back to plain matrix
    products that hold every score.
    """
    if query.device.type != "cuda":
        return True
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    return dtype in (torch.float16, torch.bfloat16) and torch.cuda.get_device_capability(query.device) >= (8, 0)
