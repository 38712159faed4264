"""The plain formula, and what counts memory while something runs."""

from __future__ import annotations

import contextlib
import weakref

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from verl_ext_sharding.training import tiles


def plain(logits, labels, temperature=1.0, ignore_index=-100):
    """Log-probs and entropy in float32, everything held."""
    log_probs = (logits.float() / temperature).log_softmax(-1)
    ignored = labels == ignore_index
    picked = log_probs.gather(-1, labels.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
    return picked.masked_fill(ignored, 0.0), -(log_probs.exp() * log_probs).sum(-1)


def plain_linear(hidden, weight, labels, temperature=1.0, bias=None):
    """The same from hidden states; a tensor of temperatures has one for each token."""
    logits = F.linear(hidden, weight).float()
    if bias is not None:
        logits = logits + bias.float()
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.unsqueeze(-1)
    return plain(logits, labels, temperature)


@contextlib.contextmanager
def small_tiles(num_elements):
    """Tiles of few elements, so that small shapes take many."""
    before = tiles._EAGER
    tiles._EAGER = tiles.Arithmetic(advance=tiles.advance, gradient=tiles.gradient, num_elements=num_elements)
    try:
        yield
    finally:
        tiles._EAGER = before


class LiveBytes(TorchDispatchMode):
    """Highest sum of bytes of storages that came to life inside and are alive at once."""

    def __init__(self):
        super().__init__()
        self.alive = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        inputs = {
            value.untyped_storage()._cdata
            for value in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(value, torch.Tensor)
        }
        for value in torch.utils._pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                key = storage._cdata
                if key not in inputs and key not in self.alive:
                    self.alive[key] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, key, None)
        self.peak_bytes = max(self.peak_bytes, sum(self.alive.values()))
        return result


@contextlib.contextmanager
def saved_bytes():
    """Bytes of distinct storages that autograd keeps for backward, as a list with one number once the block ends."""
    storages, total = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage._cdata] = (storage, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total
    total.append(sum(nbytes for _, nbytes in storages.values()))
