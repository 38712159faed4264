"""Keeps activations on the host between the forward and the backward pass, layer by layer, beside the computation.

What is moved: every tensor that autograd saves inside a layer and that is large enough, plain, on the compute device
and not a parameter. With checkpointing that is the layer's input, since what a checkpoint drops is never saved, and what
selective checkpointing keeps; without it, all activations. Each storage is copied once however often it is saved.

In the forward pass a layer's copies run while the next layer computes, and its memory is free when that one ends. In
the backward pass the copies of layer i-1 come back while layer i computes. So at most two layers' worth is on the
device. Host buffers are pooled; they go with `remove`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from verl_ext_sharding.training import kept_outputs
from verl_ext_sharding.training.checkpointing import Applied, Full, applied
from verl_ext_sharding.training.checkpointing import remove as remove_checkpointing
from verl_ext_sharding.training.host_buffers import HostPool, Transfer, flat_bytes, transfer_for
from verl_ext_sharding.training.layers import (
    Forward,
    Slot,
    compute_device_type,
    decoder_layers,
    inner_fsdp_units,
    install,
    installed,
    module_tensors,
    uninstall,
)
from verl_ext_sharding.training.saved_bytes import is_plain, storage_keys

logger = logging.getLogger(__name__)

_CAST = "ToCopyBackward0"
_VIEWS = ("TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0")
"""Nodes of autograd."""


class _Group:
    """What one call of one layer moved to the host."""

    def __init__(self, previous: _Group | None) -> None:
        self.records: weakref.WeakSet[_Record] = weakref.WeakSet()
        self._previous = None if previous is None else weakref.ref(previous)
        self.entered = False

    @property
    def previous(self) -> _Group | None:
        return None if self._previous is None else self._previous()


class _Record:
    """One storage on the host."""

    def __init__(self, engine: ActivationOffloader, group: _Group, tensor: torch.Tensor) -> None:
        source = flat_bytes(tensor)
        self.engine = engine
        self.group = group
        self.device = source.device
        self.num_bytes = source.numel()
        # the weak reference also keeps the storage's identity from being given to another one
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.buffer = engine.pool.acquire(self.num_bytes)
        self.copied = engine.transfer.to_host(source, self.buffer)
        self.source: torch.Tensor | None = None if self.copied is None else source
        self.on_device: torch.Tensor | None = None
        self.arrival: Any = None
        self.shared = False

    def fetch(self) -> torch.Tensor:
        """The bytes on the device; starts the copy back unless they are there."""
        if self.on_device is None:
            if self.source is not None:
                self.on_device = self.source
            else:
                self.on_device, self.arrival = self.engine.transfer.to_device(self.buffer, self.num_bytes, self.device)
        return self.on_device

    def leave_device(self) -> None:
        """Frees the device memory of the forward pass once the copy to the host is done."""
        if self.source is not None:
            self.engine.transfer.wait(self.copied, self.device)
            self.source = None

    def __del__(self) -> None:
        buffer = self.__dict__.get("buffer")
        if buffer is not None:
            self.engine.pool.release(buffer)


@dataclass(frozen=True)
class _Saved:
    """What autograd holds instead of a tensor."""

    record: _Record
    group: _Group
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class ActivationOffloader:
    """Moves the saved tensors of a model's layers; one for each application.

    Args:
        transfer: How bytes are copied.
        device_type: The compute device; tensors elsewhere are left alone.
        min_bytes: Smaller tensors stay.
    """

    def __init__(self, transfer: Transfer, device_type: str, min_bytes: int) -> None:
        self.transfer = transfer
        self.device_type = device_type
        self.min_bytes = min_bytes
        self.pool = HostPool(pin=transfer.pin)
        self._records: dict[tuple[int, int], weakref.ref[_Record]] = {}
        self._last: _Group | None = None
        self._parameters: set[int] = set()
        self._late_parameters: nn.Module | None = None
        self._frozen_casts: set[tuple[torch.dtype, tuple[int, ...]]] = set()

    def run(self, layer: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a layer's forward; what it saves goes to the host."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        self._note_parameters(layer)
        before = self._last
        group = _Group(before)
        self._last = group
        saved = torch.autograd.graph.saved_tensors_hooks(lambda tensor: self._pack(group, tensor), self._unpack)
        with saved, kept_outputs.held_by((lambda tensor: self._pack_kept(group, tensor), self._unpack)):
            output = forward(*args, **kwargs)
        if before is not None:
            for record in list(before.records):
                record.leave_device()
        return output

    def close(self) -> None:
        self._records.clear()
        self._last = None
        self.pool.close()

    def _note_parameters(self, layer: nn.Module) -> None:
        # looked up at each call: FSDP gathers parameters into other storages each time
        tensors = [tensor for tensor in module_tensors(layer) if is_plain(tensor)]
        self._parameters = storage_keys(tensors)
        self._late_parameters = layer if inner_fsdp_units(layer) else None
        self._frozen_casts = set()
        if torch.is_autocast_enabled(self.device_type):
            dtype = torch.get_autocast_dtype(self.device_type)
            frozen = [tensor for tensor in tensors if not tensor.requires_grad and tensor.dtype != dtype]
            shapes = [tuple(tensor.shape) for tensor in frozen if tensor.dim() > 1]
            self._frozen_casts = {(dtype, shape) for shape in shapes} | {(dtype, shape[::-1]) for shape in shapes}

    def _pack(self, group: _Group, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        if not self._moves(tensor) or self._is_cast_weight(tensor):
            return tensor.detach()  # the tensor itself may own the node that saves it: a cycle that is never freed
        return self._moved(group, tensor)

    def _pack_kept(self, group: _Group, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        return self._moved(group, tensor) if self._moves(tensor) else tensor

    def _moved(self, group: _Group, tensor: torch.Tensor) -> _Saved:
        offset = tensor.storage_offset()
        if 2 * tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes():
            # a small view of something large, which this would keep: move the view alone
            tensor, offset = tensor.detach().clone(memory_format=torch.contiguous_format), 0
        record = self._record(group, tensor)
        return _Saved(record, group, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def _moves(self, tensor: torch.Tensor) -> bool:
        if not is_plain(tensor) or tensor.device.type != self.device_type:
            return False
        if tensor.numel() * tensor.element_size() < max(1, self.min_bytes):
            return False
        storage = tensor.untyped_storage()
        if (
            storage.nbytes() == 0 or tensor.is_conj() or tensor.is_neg()
        ):  # nothing there, or more than bytes and strides
            return False
        return storage._cdata not in self._parameters and not self._is_late_parameter(storage._cdata)

    def _is_late_parameter(self, key: int) -> bool:
        """Whether a storage holds parameters that were gathered inside the layer: FSDP frees it while a copy would run."""
        layer = self._late_parameters
        return layer is not None and key in storage_keys(module_tensors(layer))

    def _is_cast_weight(self, tensor: torch.Tensor) -> bool:
        """Whether it is a low-precision copy of a weight that autocast has made, or a view of one.

        Activations may have the shape of a weight. Autograd knows what the copy of a trained one is made of; that of a frozen
        one has no gradient, as hardly any activation of a model in training.
        """
        node = tensor.grad_fn
        while node is not None and node.name() in _VIEWS:
            node = node.next_functions[0][0]
        if node is None:
            return not tensor.requires_grad and (tensor.dtype, tuple(tensor.shape)) in self._frozen_casts
        source = node.next_functions[0][0] if node.name() == _CAST else None
        weight = getattr(source, "variable", None)
        return weight is not None and bool(storage_keys([weight]) & self._parameters)

    def _record(self, group: _Group, tensor: torch.Tensor) -> _Record:
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version)
        known = self._records.get(key)
        record = None if known is None else known()
        if record is None or record.storage.expired():
            record = _Record(self, group, tensor)
            self._records[key] = weakref.ref(record, lambda _: self._records.pop(key, None))
            group.records.add(record)
        elif record.group is not group:
            record.shared = True
        return record

    def _unpack(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        record = saved.record
        self._enter(saved.group)
        flat = record.fetch()
        self.transfer.wait(record.arrival, record.device)
        whole = flat.numel() // saved.dtype.itemsize * saved.dtype.itemsize
        return flat[:whole].view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)

    def _enter(self, group: _Group) -> None:
        """The backward pass has come to a layer: the one before it is fetched, the one after it is done."""
        if group is self._last and group.entered:
            return
        if self._last is not None and self._last is not group and self._last.entered:
            for record in list(self._last.records):
                if not record.shared:
                    record.leave_device()
                    record.on_device = record.arrival = None
        group.entered = True
        self._last = group
        if group.previous is not None:
            for record in list(group.previous.records):
                record.fetch()


class _OffloadStage:
    """The stage in front of one layer's forward."""

    def __init__(self, policy: ActivationOffload, offloader: ActivationOffloader, layer: nn.Module) -> None:
        self.policy = policy
        self.offloader = offloader
        self.layer = layer
        self.checkpointing: Applied | None = None

    def __call__(self, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        return self.offloader.run(self.layer, forward, args, kwargs)


@dataclass(frozen=True, kw_only=True)
class ActivationOffload:
    """Keeps the activations of decoder layers on the host between forward and backward.

    Works with every checkpointing policy, in any order of `apply`. Where transformers' own checkpointing is on and no
    policy is applied, `full` is applied in its place, since offload inside of a checkpoint would move what the checkpoint
    is about to drop.

    Args:
        min_bytes: Smaller tensors stay on the device. Default 1 MiB: below it a copy costs more than it frees.
    """

    min_bytes: int = 1 << 20

    def apply(
        self, model: nn.Module, *, layers: Sequence[nn.Module] | None = None, device_type: str | None = None
    ) -> ActivationOffloader:
        """Starts to move what the layers save. Twice is once.

        Args:
            model: The model, before or after LoRA and FSDP wrapping.
            layers: The layers to act on, in forward order; default: found, see `layers.decoder_layers`.
            device_type: What the layers will run on; default: the accelerator if there is one, else the CPU (then the
                host copy is a second one in the same memory: for tests).

        Raises:
            ConfigError: The model has no layers that can be found.
        """
        found = decoder_layers(model, layers)
        current = list(installed(model, Slot.OFFLOAD))
        if current and [layer for layer, _ in current] == found and current[0][1].policy == self:  # type: ignore[attr-defined]
            return current[0][1].offloader  # type: ignore[attr-defined]
        self.remove(model)
        device_type = compute_device_type(found, device_type)
        offloader = ActivationOffloader(transfer_for(device_type), device_type, self.min_bytes)
        stages = [_OffloadStage(self, offloader, layer) for layer in found]
        if applied(model) is None and any(
            getattr(module, "gradient_checkpointing", False) for module in model.modules()
        ):
            stages[0].checkpointing = Full().apply(model, layers=layers)
        for layer, stage in zip(found, stages, strict=True):
            install(layer, Slot.OFFLOAD, stage)
        logger.info("activation offload on %d layers: tensors from %d bytes on", len(found), self.min_bytes)
        return offloader

    def remove(self, model: nn.Module) -> None:
        """Gives the layers their own forward back and frees the host buffers. Without an offload, does nothing."""
        for layer, stage in list(installed(model, Slot.OFFLOAD)):
            uninstall(layer, Slot.OFFLOAD)
            stage.offloader.close()  # type: ignore[attr-defined]
            ours = stage.checkpointing  # type: ignore[attr-defined]
            if ours is not None and applied(model) is ours:
                remove_checkpointing(model)
