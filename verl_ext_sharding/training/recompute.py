"""Runs a layer so that it keeps less for the backward pass: which outputs are kept, and what that leaves in bytes.

A *variant* is one way to run one layer call. `Recompute` is what one application of a policy shares between the layers
of a model; it says which variant each call takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from verl_ext_sharding.training import kept_outputs
from verl_ext_sharding.training.layers import Forward, hidden_states, module_tensors
from verl_ext_sharding.training.saved_bytes import LiveStorages, SavedTensors

_CACHE_NAMES = ("past_key_values", "past_key_value", "layer_past")
_MATMUL = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "_scaled_mm": (0, 1), "_grouped_mm": (0, 1)}
"""Where a matrix product has its two factors."""

_CHEAP_CONTRACTION = 256
"""Up to so many terms a matrix product takes no longer than an elementwise operator with the same output: at two operations for
each term and 2 bytes (bf16) for each output it is bound by memory (an H200: 990 TFLOPS, 4.8 TB/s, 200 operations for each byte)."""


@cache
def _kind(op: Any) -> str | None:
    """The class of an operator: a matrix product (its name), attention, or neither."""
    name = getattr(op, "_opname", None) or str(op)
    if name in _MATMUL:
        return name
    name = name.lower()
    return "attention" if ("attention" in name or "attn" in name) and "backward" not in name else None


def _is_cheap(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether a product is wide and of few terms, as an adapter's second factor is, or what adds both to experts' weights.

    The frozen layer's own output is kept beside it, and autograd needs neither: without this, selective checkpointing would
    keep more with adapters than no checkpointing does.
    """
    terms, width = left.shape[-1], right.shape[-1]
    return terms <= _CHEAP_CONTRACTION and 4 * terms <= width


class KeepOutputs:
    """Selective checkpointing's choice: keeps the outputs of some operators, recomputes all others.

    Args:
        keep: Names from `config.checkpointing_policy.KEEPABLE`.
    """

    def __init__(self, keep: frozenset[str]) -> None:
        self.keep = keep

    def __call__(self, op: Any, args: tuple[Any, ...]) -> bool:
        kind = _kind(op)
        if kind is None or kind == "attention":
            return kind in self.keep
        left, right = (args[position] for position in _MATMUL[kind])
        if "matmul" in self.keep:
            return not _is_cheap(left, right)
        return "narrow_matmul" in self.keep and right.shape[-1] <= left.shape[-1]


class Variant:
    """Keeps everything: the layer as it is."""

    compiled = False

    def __call__(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return forward(*args, **kwargs)


class Checkpointed(Variant):
    """Keeps the layer's inputs and, of its inside, the outputs named; recomputes the rest in the backward pass.

    Never reentrant, random state restored for the recomputation (dropout draws the same numbers).

    Args:
        keep: Names from `config.checkpointing_policy.KEEPABLE`; none: the inputs only.
    """

    def __init__(self, keep: Sequence[str] = ()) -> None:
        self.options: dict[str, Any] = {"use_reentrant": False}
        if keep:
            self.options["context_fn"] = partial(kept_outputs.contexts, KeepOutputs(frozenset(keep)))

    def __call__(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # checkpoint saves positional tensors through autograd, where offload sees them, and keyword ones beside it
        names = tuple(name for name, value in kwargs.items() if isinstance(value, torch.Tensor))
        rest = {name: value for name, value in kwargs.items() if name not in names}
        call = partial(_by_name, forward, names, len(args), rest)
        return checkpoint(call, *args, *(kwargs[name] for name in names), **self.options)


def _by_name(forward: Forward, names: tuple[str, ...], num_args: int, rest: dict[str, Any], *values: Any) -> Any:
    return forward(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)), **rest)


def uses_cache(kwargs: dict[str, Any]) -> bool:
    """Whether a layer call reads or writes a key-value cache."""
    return bool(kwargs.get("use_cache")) or any(kwargs.get(name) is not None for name in _CACHE_NAMES)


def without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call without its key-value cache: a layer that runs twice would append to it twice."""
    changed = dict(kwargs)
    if "use_cache" in changed:
        changed["use_cache"] = False
    changed.update((name, None) for name in _CACHE_NAMES if name in changed)
    return changed


class Recompute:
    """What one application of a policy shares between a model's layers. This one gives each layer a fixed variant.

    Args:
        layers: The layers, in forward order.
        variants: One for each layer.
    """

    def __init__(self, layers: Sequence[nn.Module], variants: Sequence[Variant]) -> None:
        self.layers = list(layers)
        self.variants = list(variants)

    def run(self, index: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one layer; with gradients, by its variant."""
        cached = uses_cache(kwargs)
        if cached and self.layers[index].training and torch.is_grad_enabled():
            kwargs, cached = without_cache(kwargs), False
        if cached:
            return forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self.run_without_grad(index, forward, args, kwargs)
        return self.run_with_grad(index, forward, args, kwargs)

    def run_without_grad(self, index: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return forward(*args, **kwargs)

    def run_with_grad(self, index: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.variants[index](forward, args, kwargs)

    def close(self) -> None:
        """Undoes what it changed on the layers beside their forward; called when the policy is removed."""


def kept_bytes(variant: Variant, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes that one layer call adds to what is kept until the backward pass, on the device of its input.

    Runs the layer once and drops the result; random state is as before. Tensors that all layers share (masks, rotary
    embeddings) and parameters don't count, and of input and output one counts: the output is the next layer's input.

    Args:
        variant: How to run it.
        forward: The layer's forward.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        TypeError: No argument is a tensor of hidden states.
    """
    hidden = hidden_states(args, kwargs)
    if hidden is None:
        raise TypeError("a layer whose first input is no tensor can't be measured")
    device = hidden.device
    probe = hidden.detach().requires_grad_(hidden.is_floating_point())
    # a new view of the input, since the first layer's may need no gradient and would be measured too low
    args = tuple(probe if value is hidden else value for value in args)
    kwargs = {name: probe if value is hidden else value for name, value in kwargs.items()}
    devices = [] if device.type == "cpu" else [device.index or 0]
    device_type = "cuda" if device.type == "cpu" else device.type
    shared = [value for value in tree_leaves((args, kwargs)) if value is not probe]
    owner = getattr(forward, "__self__", None)
    weights = module_tensors(owner) if isinstance(owner, nn.Module) else ()
    # a dispatch mode keeps layers from being compiled; and an offload around this would move the probe's tensors, but for
    # saved ones the innermost hooks win
    made = nullcontext() if variant.compiled else LiveStorages()
    with (
        kept_outputs.held_by(None),
        torch.random.fork_rng(devices=devices, device_type=device_type),
        torch.enable_grad(),
        SavedTensors(exclude=[*weights, *shared]) as saved,
        made,
    ):
        output = variant(forward, args, kwargs)
    counted = made if isinstance(made, LiveStorages) else saved
    num_bytes = counted.live_bytes().get(device.type, 0)
    del output
    return num_bytes
