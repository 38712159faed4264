"""Counts the bytes that a forward pass keeps for its backward pass, per device type.

Two counters, because no single one sees everything:

- `SavedTensors` sits in autograd's saved-tensor hooks. It sees what compiled graphs save too, but not what selective
  checkpointing caches beside autograd, nor what an inner hook (checkpointing, offload) took for itself.
- `LiveStorages` sits in the dispatcher and sees every storage that is made and still alive, but not the storages that
  a compiled graph makes inside its kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def is_plain(value: object) -> bool:
    """Whether a value is a tensor with a storage of its own: neither a wrapper subclass (DTensor) nor a fake tensor."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided  # type: ignore[attr-defined]


def storage_keys(tensors: Iterable[object]) -> set[int]:
    """The identities of the storages behind some tensors; valid while these tensors are alive."""
    return {tensor.untyped_storage()._cdata for tensor in tensors if is_plain(tensor)}  # type: ignore[attr-defined]


class _Storages:
    """Storages seen so far, each counted once, without keeping any of them alive."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[StorageWeakRef, str]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._seen[storage._cdata] = (StorageWeakRef(storage), tensor.device.type)

    def __contains__(self, key: int) -> bool:
        entry = self._seen.get(key)
        return entry is not None and not entry[0].expired()

    def live_bytes(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for reference, device_type in self._seen.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:  # FSDP empties the storages of gathered parameters and keeps them
                total[device_type] = total.get(device_type, 0) + storage.nbytes()
        return total


class SavedTensors:
    """Counts the tensors that autograd saves inside the context; each storage once, whole.

    Args:
        exclude: Tensors whose storages don't count, usually the model's parameters: autograd saves them too, and they
            are there anyway.

    Example:
        >>> with SavedTensors(exclude=model.parameters()) as saved:
        ...     loss = model(**batch).loss
        >>> saved.total_bytes()   # what is kept until the backward pass
    """

    def __init__(self, exclude: Iterable[torch.Tensor] = ()) -> None:
        self._exclude = tuple(exclude)
        self._storages = _Storages()
        self._excluded: set[int] = set()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> SavedTensors:
        self._excluded = storage_keys(self._exclude)
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def live_bytes(self) -> dict[str, int]:
        """Bytes of the saved storages that are still alive, by device type (`{"cuda": ..., "cpu": ...}`)."""
        return self._storages.live_bytes()

    def total_bytes(self) -> int:
        """Bytes of the saved storages that are still alive, over all device types."""
        return sum(self.live_bytes().values())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_plain(tensor) and tensor.untyped_storage()._cdata not in self._excluded:
            self._storages.add(tensor)
        return tensor.detach()  # the tensor itself may own the node that saves it: a cycle that is never freed

    @staticmethod
    def _unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class LiveStorages(TorchDispatchMode):
    """Counts the storages that operators make inside the context and that are still alive when asked.

    Example:
        >>> with LiveStorages() as made:
        ...     output = layer(hidden_states)
        >>> made.total_bytes()   # the output and all that is kept for the backward pass
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages = _Storages()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        given: set[int] | None = None
        for value in tree_leaves(output):
            if not is_plain(value):
                continue
            if given is None:
                given = storage_keys(tree_leaves((args, kwargs)))
            if value.untyped_storage()._cdata not in given:
                self._storages.add(value)
        return output

    def live_bytes(self) -> dict[str, int]:
        """Bytes of the storages made inside and still alive, by device type."""
        return self._storages.live_bytes()

    def total_bytes(self) -> int:
        """Bytes of the storages made inside and still alive, over all device types."""
        return sum(self.live_bytes().values())
