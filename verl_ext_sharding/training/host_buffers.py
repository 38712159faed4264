"""Host memory for offloaded tensors, and the copies to it and back.

Buffers are flat bytes, pooled and reused: pinning memory costs more than copying into it. The pool never holds more than
the largest amount that was in use at one time, whatever lengths come one after the other.
"""

from __future__ import annotations

import abc
import threading
from typing import Any

import torch

MIN_BUFFER_BYTES = 4096


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage behind a tensor as one flat uint8 tensor on the same device, without a copy."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


class HostPool:
    """Reusable flat host buffers.

    Sizes are rounded up to a power of two, as torch's allocator of pinned memory does anyway, so that batches of
    slightly other lengths reuse each other's buffers.

    Args:
        pin: Whether buffers are page-locked, which copies that run beside the computation need.
    """

    def __init__(self, pin: bool) -> None:
        self.pin = pin
        self.closed = False
        self._free: dict[int, list[torch.Tensor]] = {}
        self._in_use_bytes = 0
        self._free_bytes = 0
        # buffers come back from the autograd threads, and from the garbage collector while this thread holds the lock
        self._lock = threading.RLock()

    @property
    def in_use_bytes(self) -> int:
        """Bytes of the buffers that hold a tensor now."""
        return self._in_use_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all buffers, those that wait for the next tensor included."""
        return self._in_use_bytes + self._free_bytes

    def acquire(self, num_bytes: int) -> torch.Tensor:
        """A flat uint8 buffer of at least this size."""
        size = max(MIN_BUFFER_BYTES, 1 << (num_bytes - 1).bit_length())
        with self._lock:
            self._in_use_bytes += size
            waiting = self._free.get(size)
            if waiting:
                self._free_bytes -= size
                return waiting.pop()
            dropped = self._drop(size)
        if dropped:
            self._return_to_system()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pin)

    def release(self, buffer: torch.Tensor) -> None:
        """Takes a buffer back."""
        size = buffer.numel()
        with self._lock:
            self._in_use_bytes -= size
            if not self.closed:
                self._free_bytes += size
                self._free.setdefault(size, []).append(buffer)

    def close(self) -> None:
        """Frees what waits; buffers still in use are freed when they come back."""
        with self._lock:
            self.closed = True
            self._drop(self._free_bytes)
        self._return_to_system()

    def _drop(self, num_bytes: int) -> bool:
        """Frees waiting buffers of other sizes, largest first, until as much is gone as is about to be added."""
        dropped = 0
        for size in sorted(self._free, reverse=True):
            while self._free[size] and dropped < num_bytes:
                self._free[size].pop()
                dropped += size
        self._free_bytes -= dropped
        return dropped > 0

    def _return_to_system(self) -> None:
        empty = getattr(torch._C, "_host_emptyCache", None)
        if self.pin and empty is not None:
            empty()


class Transfer(abc.ABC):
    """Copies between a compute device and host buffers."""

    pin: bool

    @abc.abstractmethod
    def to_host(self, source: torch.Tensor, buffer: torch.Tensor) -> Any:
        """Starts a copy of flat bytes to the host; returns what `wait` needs, or None if it is already done."""

    @abc.abstractmethod
    def to_device(self, buffer: torch.Tensor, num_bytes: int, device: torch.device) -> tuple[torch.Tensor, Any]:
        """Starts a copy back; returns the flat bytes on the device and what `wait` needs before they are used."""

    @abc.abstractmethod
    def wait(self, event: Any, device: torch.device) -> None:
        """Makes what the device computes from now on wait for a copy."""


class BlockingTransfer(Transfer):
    """Copies at once. For layers that run on the CPU, where the host copy is a second one beside the compute device."""

    pin = False

    def to_host(self, source: torch.Tensor, buffer: torch.Tensor) -> Any:
        buffer[: source.numel()].copy_(source)
        return None

    def to_device(self, buffer: torch.Tensor, num_bytes: int, device: torch.device) -> tuple[torch.Tensor, Any]:
        return buffer[:num_bytes].to(device, copy=True), None

    def wait(self, event: Any, device: torch.device) -> None:
        return None


class StreamTransfer(Transfer):
    """Copies in a stream of its own for each device, beside the computation.

    One stream for both directions: copies to the host happen in the forward pass and copies back in the backward pass,
    and a buffer that is reused is then never read and written at the same time.

    Args:
        device_type: `"cuda"`, or another type whose torch module has streams and events.
    """

    pin = True

    def __init__(self, device_type: str) -> None:
        self._module = torch.get_device_module(device_type)
        self._streams: dict[torch.device, Any] = {}

    def to_host(self, source: torch.Tensor, buffer: torch.Tensor) -> Any:
        stream = self._stream(source.device)
        stream.wait_stream(self._module.current_stream(source.device))
        with self._module.stream(stream):
            buffer[: source.numel()].copy_(source, non_blocking=True)
            return stream.record_event()

    def to_device(self, buffer: torch.Tensor, num_bytes: int, device: torch.device) -> tuple[torch.Tensor, Any]:
        stream = self._stream(device)
        target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        stream.wait_stream(self._module.current_stream(device))  # the memory may still be in use there
        with self._module.stream(stream):
            target.copy_(buffer[:num_bytes], non_blocking=True)
            event = stream.record_event()
        target.record_stream(stream)  # a copy that nobody waits for must end before the memory is used again
        return target, event

    def wait(self, event: Any, device: torch.device) -> None:
        if event is not None:
            self._module.current_stream(device).wait_event(event)

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = self._module.Stream(device=device)
        return self._streams[device]


def transfer_for(device_type: str) -> Transfer:
    """The way to copy for layers that run on a device type."""
    return BlockingTransfer() if device_type == "cpu" else StreamTransfer(device_type)
