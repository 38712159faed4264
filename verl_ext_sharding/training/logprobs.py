"""Log-probabilities and entropy over a large vocabulary, one tile at a time.

Without flash-attn stock verl walks packed logits row by row in Python (`logprobs_from_logits_v2`). Two replacements:

- `logprobs_from_logits`, `entropy_from_logits`: logits exist already; nothing of their size is allocated beside them, but their
  gradient, which may take their place.
- `linear_logprobs`: from hidden states and the weight of the output head; neither the logits nor their gradient ever exist as a
  whole. Tiles are wide in tokens and narrow in vocabulary: the log-sum-exp is kept up from tile to tile (online softmax,
  Milakov and Gimelshein 2018, arXiv:1805.02867), so that in backward the gradient of a slice of the weight is one matrix product
  over all tokens, rounded once, and only the small gradient of the hidden states is summed over tiles, in float32.

With scores `s = logits / temperature`, `lse = logsumexp(s)`, `p = exp(s - lse)`: log-prob `s[label] - lse`, entropy
`H = -sum(p (s - lse))`, and gradients `ds = g_logprob (onehot - p) - g_entropy p (s - lse + H)`. All of it in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from verl_ext_sharding.training import tiles

IGNORE_INDEX = -100
"""Label whose log-prob is 0 and that has no gradient, as in `torch.nn.functional.cross_entropy`."""

CHUNK_TOKENS = 16384
"""Tokens in a row of tiles. Each further row adds to the weight's gradient, rounded to its dtype once more."""


def plain_logprobs(logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True) -> torch.Tensor:
    """Log-probs by the plain formula, in float32: holds the logits in float32 and, in backward, as much again.

    Args:
        logits: `(..., vocabulary)`.
        labels: `(...)`, int64, in `[0, vocabulary)`.
        inplace_backward: No effect; there to take the place of verl's `logprobs_from_logits`.

    Returns:
        `(...)`, float32.
    """
    return logits.float().log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def logprobs_from_logits(
    logits: torch.Tensor,
    labels: torch.Tensor,
    inplace_backward: bool = True,
    *,
    temperature: float = 1.0,
    ignore_index: int = IGNORE_INDEX,
    compiled: bool | None = None,
) -> torch.Tensor:
    """Log-probs of labels under logits, with the signature of verl's function of this name.

    Args:
        logits: `(..., vocabulary)`, floating point.
        labels: `(...)`, integer, in `[0, vocabulary)` or `ignore_index`.
        inplace_backward: Write the gradient into the logits' memory. A later use of the logits in the same backward is then an
            error of autograd, not a wrong number. Logits that are a leaf are left alone.
        temperature: Divides the logits, above 0.
        ignore_index: Label without log-prob and gradient.
        compiled: Whether to compile the tile's arithmetic; None decides by platform, see `tiles.compiles_on`.

    Returns:
        `(...)`, float32.
    """
    log_probs, _ = _from_logits(
        logits, labels, temperature, ignore_index, with_entropy=False, inplace=inplace_backward, compiled=compiled
    )
    return log_probs


def entropy_from_logits(
    logits: torch.Tensor, chunk_size: int | None = None, *, temperature: float = 1.0, compiled: bool | None = None
) -> torch.Tensor:
    """Entropy of the distributions that logits describe, in nats, with its gradient.

    Args:
        logits: `(..., vocabulary)`, floating point.
        chunk_size: No effect; there to take the place of verl's `entropy_from_logits_with_chunking`.
        temperature: Divides the logits, above 0.
        compiled: See `logprobs_from_logits`.

    Returns:
        `(...)`, float32.
    """
    labels = torch.full(logits.shape[:-1], IGNORE_INDEX, dtype=torch.int64, device=logits.device)
    _, entropy = _from_logits(
        logits, labels, temperature, IGNORE_INDEX, with_entropy=True, inplace=False, compiled=compiled
    )
    assert entropy is not None
    return entropy


def logprobs_and_entropy_from_logits(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = IGNORE_INDEX,
    inplace_backward: bool = False,
    compiled: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both at once: one pass over the logits forward, one backward.

    Args:
        logits: See `logprobs_from_logits`, as for all that follow.
        labels: See there.
        temperature: See there.
        ignore_index: See there; the entropy of such a token counts as of any other.
        inplace_backward: See there.
        compiled: See there.

    Returns:
        Log-probs and entropies, `(...)` each, float32.
    """
    log_probs, entropy = _from_logits(
        logits, labels, temperature, ignore_index, with_entropy=True, inplace=inplace_backward, compiled=compiled
    )
    assert entropy is not None
    return log_probs, entropy


@torch.compiler.disable
def _from_logits(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    ignore_index: int,
    *,
    with_entropy: bool,
    inplace: bool,
    compiled: bool | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    assert logits.shape[:-1] == labels.shape, f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} differ"
    flat = logits.reshape(-1, logits.shape[-1])
    places = _checked_labels(labels, flat.shape[-1], ignore_index)
    scale = _inverse_temperature(temperature, labels)
    owner = logits if logits._base is None else logits._base
    inplace = inplace and not owner.is_leaf
    log_probs, entropy = _LogitsStatistics.apply(flat, places, scale, with_entropy, inplace, compiled)
    return log_probs.view(labels.shape), entropy.view(labels.shape) if with_entropy else None


@torch.compiler.disable
def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    *,
    bias: torch.Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    with_entropy: bool = True,
    entropy_grad: bool = True,
    ignore_index: int = IGNORE_INDEX,
    compiled: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of labels, and entropy, from hidden states and the weight of the output head.

    Args:
        hidden: `(..., width)`, floating point; under autocast computed in autocast's dtype, as a linear layer would.
        weight: `(vocabulary, width)`, whole (not a shard).
        labels: `(...)`, integer, in `[0, vocabulary)` or `ignore_index`.
        temperature: Divides the logits, above 0: a number, or a tensor that expands to `(...)`. No gradient.
        bias: `(vocabulary,)`, or None.
        chunk_tokens: Tokens in a row of tiles, at least 1; a tile takes as much vocabulary as fits `tiles.num_elements`.
        with_entropy: Whether to return the entropy too.
        entropy_grad: Whether the entropy has a gradient.
        ignore_index: Label without log-prob and gradient; its entropy counts as any other.
        compiled: Whether to compile the tile's arithmetic; None decides by platform, see `tiles.compiles_on`.

    Returns:
        Log-probs and entropy (or None), `(...)` each, float32.
    """
    assert hidden.shape[:-1] == labels.shape, f"hidden {tuple(hidden.shape)} and labels {tuple(labels.shape)} differ"
    assert not hasattr(weight, "placements"), "the weight is a shard: call the head as a module, so that it is gathered"
    assert chunk_tokens >= 1, f"chunk_tokens must be at least 1: {chunk_tokens}"
    device_type = hidden.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden.dtype
    places = _checked_labels(labels, weight.shape[0], ignore_index)
    scale = _inverse_temperature(temperature, labels)
    flat = hidden.reshape(-1, hidden.shape[-1])
    options = (dtype, chunk_tokens, with_entropy, entropy_grad, compiled)
    log_probs, entropy = _LinearStatistics.apply(flat, weight, bias, places, scale, *options)
    return log_probs.view(labels.shape), entropy.view(labels.shape) if with_entropy else None


def _checked_labels(labels: torch.Tensor, vocabulary: int, ignore_index: int) -> torch.Tensor:
    """Labels in one row, ignored ones as -1. One out of range is an error, as it is for `gather`."""
    flat = labels.reshape(-1).to(torch.int64)
    ignored = flat == ignore_index
    in_range = (ignored | ((flat >= 0) & (flat < vocabulary))).all()
    if flat.device.type == "cpu":
        if not in_range:
            raise IndexError(
                f"labels reach from {int(flat.min())} to {int(flat.max())}, the vocabulary from 0 to {vocabulary - 1}"
            )
    else:
        torch._assert_async(in_range)
    return flat.masked_fill(ignored, -1)


def _inverse_temperature(temperature: float | torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
    """Factor of each token's scores, `(tokens, 1)`, float32, or None for 1."""
    if isinstance(temperature, torch.Tensor):
        return temperature.detach().to(labels.device, torch.float32).expand(labels.shape).reshape(-1, 1).reciprocal()
    assert temperature > 0, f"temperature must be above 0: {temperature}"
    if temperature == 1.0:
        return None
    return torch.full((labels.numel(), 1), 1.0 / temperature, dtype=torch.float32, device=labels.device)


def _columns(total: int, size: int) -> Iterator[slice]:
    """Slices of `size`, the last one shorter."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _row_spans(total: int, size: int) -> Iterator[slice]:
    """Slices of at most `size`, as even as can be: a last row alone would be compiled for itself."""
    count = -(-total // size)
    for index in range(count):
        yield slice(index * total // count, (index + 1) * total // count)


class _LogitsStatistics(torch.autograd.Function):
    """Log-probs and entropy of rows of logits; the gradient is worked out row tile by row tile."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        places: torch.Tensor,
        scale: torch.Tensor | None,
        with_entropy: bool,
        inplace: bool,
        compiled: bool | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        arithmetic = tiles.arithmetic(logits.device, compiled)
        size = max(1, arithmetic.num_elements // logits.shape[-1])
        state = tiles.Running.start(logits.shape[0], logits.device)
        for rows in _row_spans(logits.shape[0], size):
            seen = arithmetic.advance(
                state.rows(rows),
                tiles.part(logits, rows),
                tiles.part(places, rows),
                tiles.part(scale, rows),
                None,
                with_entropy,
            )
            state.write(rows, seen)
        log_probs, lse, entropy = state.finish(places, with_entropy)
        ctx.save_for_backward(logits, places, scale, lse, entropy)
        ctx.options = (inplace, compiled)
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        logits, places, scale, lse, entropy = ctx.saved_tensors
        inplace, compiled = ctx.options
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 6
        arithmetic = tiles.arithmetic(logits.device, compiled)
        grads = tiles.OutputGrads.of(grad_log_probs, grad_entropy, places, entropy)
        size = max(1, arithmetic.num_elements // logits.shape[-1])
        grad = logits if inplace else torch.empty_like(logits)
        for rows in _row_spans(logits.shape[0], size):
            grad[rows] = arithmetic.gradient(
                tiles.part(logits, rows),
                tiles.part(places, rows),
                tiles.part(scale, rows),
                None,
                tiles.part(lse, rows),
                grads.rows(rows),
            )
        return grad.detach(), None, None, None, None, None


class _LinearStatistics(torch.autograd.Function):
    """Log-probs and entropy from hidden states and the head's weight; logits are made again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        places: torch.Tensor,
        scale: torch.Tensor | None,
        dtype: torch.dtype,
        chunk_tokens: int,
        with_entropy: bool,
        entropy_grad: bool,
        compiled: bool | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        arithmetic = tiles.arithmetic(hidden.device, compiled)
        state = tiles.Running.start(hidden.shape[0], hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _row_spans(hidden.shape[0], chunk_tokens):
                seen = state.rows(rows)
                rows_hidden = hidden[rows].to(dtype)
                for columns in _columns(weight.shape[0], arithmetic.width(rows_hidden.shape[0])):
                    tile = rows_hidden @ weight[columns].to(dtype).t()
                    seen = arithmetic.advance(
                        seen,
                        tile,
                        places[rows] - columns.start,
                        tiles.part(scale, rows),
                        tiles.part(bias, columns),
                        with_entropy,
                    )
                state.write(rows, seen)
        log_probs, lse, entropy = state.finish(places, with_entropy)
        ctx.save_for_backward(hidden, weight, bias, places, scale, lse, entropy if entropy_grad else None)
        ctx.options = (dtype, chunk_tokens, compiled)
        ctx.set_materialize_grads(False)
        if entropy is not None and not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, places, scale, lse, entropy = ctx.saved_tensors
        dtype, chunk_tokens, compiled = ctx.options
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 10
        arithmetic = tiles.arithmetic(hidden.device, compiled)
        grads = tiles.OutputGrads.of(grad_log_probs, grad_entropy, places, entropy)
        total = tiles.LinearGrads.start(hidden, weight, bias, ctx.needs_input_grad)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _row_spans(hidden.shape[0], chunk_tokens):
                rows_hidden, rows_grads, rows_lse = hidden[rows].to(dtype), grads.rows(rows), tiles.part(lse, rows)
                row_sum = total.start_rows(rows_hidden)
                for columns in _columns(weight.shape[0], arithmetic.width(rows_hidden.shape[0])):
                    columns_weight = weight[columns].to(dtype)
                    tile = rows_hidden @ columns_weight.t()
                    tile = arithmetic.gradient(
                        tile,
                        places[rows] - columns.start,
                        tiles.part(scale, rows),
                        tiles.part(bias, columns),
                        rows_lse,
                        rows_grads,
                    )
                    total.add_columns(columns, tile, rows_hidden, first=rows.start == 0)
                    row_sum = total.add_rows(row_sum, tile, columns_weight)
                total.write_rows(rows, row_sum)
        return total.hidden, total.weight, total.finished_bias(), *(None,) * 7
