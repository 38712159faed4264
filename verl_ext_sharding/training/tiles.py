"""The arithmetic of `logprobs`: what happens inside one tile of logits, compiled where the platform has it."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)

_COMPILED_ELEMENTS = 2**26
"""Elements of a tile when its arithmetic is compiled: the tile and its gradient are all that is held, 256 MiB in half precision."""

_EAGER_ELEMENTS = 2**24
"""Elements of a tile otherwise: about five float32 copies of it are held, 320 MiB."""

_WIDTH_MULTIPLE = 128
_LOWEST = torch.finfo(torch.float32).min


def part(tensor: torch.Tensor | None, span: slice) -> torch.Tensor | None:
    """A slice that the compiler takes for a tensor of its own: guards on views and their bases would compile once more for each."""
    return None if tensor is None else tensor[span].detach()


class Running(NamedTuple):
    """What is known of each token's distribution after some of its vocabulary, `(tokens,)` float32 each.

    Args:
        peak: Highest score.
        total: Sum of `exp(score - peak)`.
        weighted: Sum of `exp(score - peak) * (score - peak)`.
        picked: Score of the label, 0 until it was met.
    """

    peak: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor
    picked: torch.Tensor

    @classmethod
    def start(cls, num_tokens: int, device: torch.device) -> Running:
        """Nothing seen yet. The peak is the lowest finite number: from minus infinity `peak - peak` would be no number."""
        total, weighted, picked = (torch.zeros(num_tokens, dtype=torch.float32, device=device) for _ in range(3))
        return cls(torch.full_like(total, _LOWEST), total, weighted, picked)

    def rows(self, rows: slice) -> Running:
        """The state of some tokens."""
        return Running(*(tensor[rows].detach() for tensor in self))

    def write(self, rows: slice, part: Running) -> None:
        """Stores the state of some tokens."""
        for whole, tensor in zip(self, part, strict=True):
            whole[rows] = tensor

    def finish(
        self, places: torch.Tensor, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Log-probs, log-sum-exp and entropy once all vocabulary was seen; `places` below 0 are ignored labels."""
        log_total = self.total.log()
        lse = self.peak + log_total
        log_probs = torch.where(places >= 0, self.picked - lse, torch.zeros_like(lse))
        return log_probs, lse, log_total - self.weighted / self.total if with_entropy else None


class OutputGrads(NamedTuple):
    """Gradients of log-probs and entropies, `(tokens,)` float32, and the entropies; None where there is none."""

    log_probs: torch.Tensor | None
    entropy_grad: torch.Tensor | None
    entropy: torch.Tensor | None

    @classmethod
    def of(
        cls,
        grad_log_probs: torch.Tensor | None,
        grad_entropy: torch.Tensor | None,
        places: torch.Tensor,
        entropy: torch.Tensor | None,
    ) -> OutputGrads:
        """Drops what is not needed and clears ignored labels."""
        if grad_log_probs is not None:
            grad_log_probs = grad_log_probs.float().masked_fill(places < 0, 0.0)
        if grad_entropy is None:
            return cls(grad_log_probs, None, None)
        return cls(grad_log_probs, grad_entropy.float(), entropy)

    def rows(self, rows: slice) -> OutputGrads:
        """Those of some tokens."""
        return OutputGrads(*(part(tensor, rows) for tensor in self))


@dataclass(kw_only=True)
class LinearGrads:
    """Gradients of a linear head while they are summed up; None for what needs none."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    bias_dtype: torch.dtype | None = field(default=None)

    @classmethod
    def start(
        cls, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, needed: tuple[bool, ...]
    ) -> LinearGrads:
        """Allocates what is needed; the weight's gradient is written before it is read, unless there are no tokens."""
        allocate = torch.empty if hidden.shape[0] else torch.zeros
        return cls(
            hidden=torch.empty_like(hidden) if needed[0] else None,
            weight=allocate(weight.shape, dtype=weight.dtype, device=weight.device) if needed[1] else None,
            bias=torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needed[2] else None,
            bias_dtype=None if bias is None else bias.dtype,
        )

    def start_rows(self, rows_hidden: torch.Tensor) -> torch.Tensor | None:
        """Sum for the gradient of some tokens' hidden states, in float32."""
        return None if self.hidden is None else torch.zeros_like(rows_hidden, dtype=torch.float32)

    @staticmethod
    def add_rows(row_sum: torch.Tensor | None, tile: torch.Tensor, columns_weight: torch.Tensor) -> torch.Tensor | None:
        """Adds a tile's share to the gradient of the hidden states."""
        if row_sum is None:
            return None
        return (
            row_sum.addmm_(tile, columns_weight) if row_sum.dtype == tile.dtype else row_sum.add_(tile @ columns_weight)
        )

    def write_rows(self, rows: slice, row_sum: torch.Tensor | None) -> None:
        """Stores the finished gradient of some tokens' hidden states."""
        if self.hidden is not None and row_sum is not None:
            self.hidden[rows] = row_sum

    def add_columns(self, columns: slice, tile: torch.Tensor, rows_hidden: torch.Tensor, *, first: bool) -> None:
        """Adds a tile's share to the gradient of a slice of the weight, or stores it when it is the first."""
        if self.bias is not None:
            self.bias[columns] += tile.sum(0, dtype=torch.float32)
        if self.weight is None:
            return
        target = self.weight[columns]
        if target.dtype != tile.dtype:
            share = tile.t() @ rows_hidden
            target.copy_(share) if first else target.add_(share)
        elif first:
            torch.mm(tile.t(), rows_hidden, out=target)
        else:
            target.addmm_(tile.t(), rows_hidden)

    def finished_bias(self) -> torch.Tensor | None:
        """The bias's gradient in the bias's dtype."""
        return None if self.bias is None else self.bias.to(self.bias_dtype)


def _scores(tile: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    scores = tile.float()
    if bias is not None:
        scores = scores + bias.float()
    return scores if scale is None else scores * scale


def advance(
    state: Running,
    tile: torch.Tensor,
    places: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    with_entropy: bool,
) -> Running:
    """Takes a tile of logits into the state.

    Args:
        state: What was known before.
        tile: Logits, `(tokens, columns)`.
        places: Column of each token's label, int64; outside the tile when it is not in it.
        scale: Factor of the logits, `(tokens, 1)` float32, or None for 1.
        bias: Added before the factor, `(columns,)`, or None.
        with_entropy: Whether `weighted` is kept up.
    """
    scores = _scores(tile, scale, bias)
    peak = torch.maximum(state.peak, scores.amax(-1))
    shifted = scores - peak[:, None]
    weights = shifted.exp()
    drop = state.peak - peak
    shrink = drop.exp()
    total = shrink * state.total + weights.sum(-1)
    weighted = state.weighted
    if with_entropy:
        weighted = shrink * (weighted + state.total * drop) + (weights * shifted).sum(-1)
    hit = (places >= 0) & (places < tile.shape[1])
    found = scores.gather(1, places.clamp(0, tile.shape[1] - 1)[:, None])[:, 0]
    return Running(peak, total, weighted, torch.where(hit, found, state.picked))


def gradient(
    tile: torch.Tensor,
    places: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    lse: torch.Tensor,
    grads: OutputGrads,
) -> torch.Tensor:
    """Gradient of a tile of logits, in its dtype.

    Args:
        tile: Logits, `(tokens, columns)`.
        places: See `advance`.
        scale: See `advance`.
        bias: See `advance`.
        lse: Log-sum-exp of each token's scores over the whole vocabulary, `(tokens,)` float32.
        grads: Gradients of the outputs.
    """
    log_probs = _scores(tile, scale, bias) - lse[:, None]
    probs = log_probs.exp()
    factor = torch.zeros_like(lse)[:, None] if grads.log_probs is None else -grads.log_probs[:, None]
    if grads.entropy_grad is not None and grads.entropy is not None:
        factor = factor - (log_probs + grads.entropy[:, None]) * grads.entropy_grad[:, None]
    result = probs * factor
    if grads.log_probs is not None:
        columns = torch.arange(tile.shape[1], device=tile.device)
        result = result + torch.where(columns == places[:, None], grads.log_probs[:, None], 0.0)
    if scale is not None:
        result = result * scale
    return result.to(tile.dtype)


@dataclass(kw_only=True, frozen=True)
class Arithmetic:
    """`advance` and `gradient` as they run on a device, and the size of tile that suits them."""

    advance: Callable[..., Running]
    gradient: Callable[..., torch.Tensor]
    num_elements: int

    def width(self, num_tokens: int) -> int:
        """Vocabulary entries of a tile that is `num_tokens` high. Never square: the compiler would take both sizes for one."""
        width = max(_WIDTH_MULTIPLE, self.num_elements // num_tokens // _WIDTH_MULTIPLE * _WIDTH_MULTIPLE)
        return width + _WIDTH_MULTIPLE if width == num_tokens else width


_EAGER = Arithmetic(advance=advance, gradient=gradient, num_elements=_EAGER_ELEMENTS)


def arithmetic(device: torch.device, compiled: bool | None) -> Arithmetic:
    """The arithmetic for a device.

    Args:
        device: Where the tiles are.
        compiled: Whether to compile; None compiles where `compiles_on` says so.
    """
    return _compiled() if (compiles_on(device) if compiled is None else compiled) else _EAGER


@functools.lru_cache(maxsize=8)
def compiles_on(device: torch.device) -> bool:
    """Whether torch.compile makes GPU kernels here: CUDA, Triton installed, compute capability 7.0 or later."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return bool(torch.cuda.get_device_capability(device) >= (7, 0))


@functools.lru_cache(maxsize=1)
def _compiled() -> Arithmetic:
    """Compiled once for all lengths: every size is a symbol, so that a new batch does not compile anew."""
    return Arithmetic(advance=_Guarded(advance), gradient=_Guarded(gradient), num_elements=_COMPILED_ELEMENTS)


class _Guarded:
    """A compiled function that gives way to the plain one for good when the compiler fails."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.plain = function
        self.current: Callable[..., Any] = torch.compile(function, dynamic=True)

    def __call__(self, *args: Any) -> Any:
        if self.current is self.plain:
            return self.plain(*args)
        try:
            return self.current(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            logger.warning("%s of log-prob tiles runs uncompiled, more slowly: %s", self.plain.__name__, error)
            self.current = self.plain
            return self.plain(*args)
