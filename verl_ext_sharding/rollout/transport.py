"""Carries weights from the training process to the server in buckets: CUDA IPC on one GPU, or through host memory."""

from __future__ import annotations

import logging
import secrets
import warnings
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import reduce_tensor

from verl_ext_sharding.rollout.weights import Piece, WeightLoader

logger = logging.getLogger(__name__)

_ALIGNMENT_BYTES = 16
_PROOF_BYTES = 16
_DEVICE_ARGUMENT = 6
"""Position of the device index in what `reduce_tensor` gives for a CUDA tensor."""


class Endpoint(Protocol):
    """The server's side of an update, as the sender sees it. Each method returns something to await."""

    def begin(self, handle: Any | None, proof: bytes) -> Awaitable[bool]:
        """Starts an update; returns whether the CUDA IPC handle opens the sender's memory."""
        ...

    def load(self, pieces: list[Piece], host_bucket: torch.Tensor | None) -> Awaitable[None]:
        """Loads one bucket: the given one, or the shared GPU memory. A host bucket may be reused on return."""
        ...

    def finish(self) -> Awaitable[None]:
        """Ends the update and checks that it was complete."""
        ...

    def cancel(self) -> Awaitable[None]:
        """Ends an update that failed on the sender's side."""
        ...


async def send_weights(
    weights: AsyncIterator[tuple[str, torch.Tensor]] | Iterable[tuple[str, torch.Tensor]],
    endpoint: Endpoint,
    *,
    bucket_bytes: int,
    device: torch.device,
) -> None:
    """Sends every tensor; tensors larger than a bucket are split.

    The iterator is drained even after an error, since verl's runs collectives that other ranks wait in.

    Args:
        weights: Names and whole tensors.
        endpoint: Where they go.
        bucket_bytes: Size of a bucket, at least 16.
        device: The trainer's device: on "cuda" a bucket lies in GPU memory that the server maps, if it can.

    Raises:
        Exception: Whatever failed first, here or at the server.
    """
    iterator = _as_async(weights)
    try:
        bucket = await _open(endpoint, bucket_bytes, device)
        async for name, weight in iterator:
            await bucket.add(name, weight)
        await bucket.flush()
        await bucket.settle()
        await endpoint.finish()
    except BaseException:
        async for _ in iterator:
            pass
        try:
            await endpoint.cancel()
        except Exception:  # a server that has ended can't be told, and what came first says why
            logger.warning("the rollout server could not be told that the update failed", exc_info=True)
        raise


async def _open(endpoint: Endpoint, bucket_bytes: int, device: torch.device) -> _Bucket:
    """Makes the bucket and starts the update: in GPU memory if the server can map it, else in host memory."""
    size = max(bucket_bytes // _ALIGNMENT_BYTES, 1) * _ALIGNMENT_BYTES
    if device.type == "cuda":
        proof = secrets.token_bytes(_PROOF_BYTES)
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        buffer[:_PROOF_BYTES] = torch.tensor(list(proof), dtype=torch.uint8)
        torch.cuda.synchronize(device)
        if await endpoint.begin(reduce_tensor(buffer), proof):
            return _Bucket(endpoint, buffer, mapped=True)
        logger.warning("CUDA IPC to the rollout server failed; weights go through host memory, which is slower")
    else:
        await endpoint.begin(None, b"")
    return _Bucket(endpoint, torch.empty(size, dtype=torch.uint8), mapped=False)


class _Bucket:
    """The buffer that is being filled, and what lies in it."""

    def __init__(self, endpoint: Endpoint, buffer: torch.Tensor, *, mapped: bool) -> None:
        self._endpoint, self._buffer, self._mapped = endpoint, buffer, mapped
        self._pieces: list[Piece] = []
        self._used = 0
        self._loading: Awaitable[None] | None = None

    async def add(self, name: str, weight: torch.Tensor) -> None:
        """Puts a tensor in, flushing as often as it takes."""
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        flat = whole.detach().reshape(-1)
        item_bytes, start = flat.element_size(), 0
        while start < flat.numel():
            count = min((self._buffer.numel() - self._used) // item_bytes, flat.numel() - start)
            if count == 0:
                await self.flush()
                continue
            end = self._used + count * item_bytes
            self._buffer[self._used : end].view(flat.dtype).copy_(flat[start : start + count])
            self._pieces.append(
                Piece(
                    name=name,
                    shape=tuple(whole.shape),
                    dtype=str(flat.dtype).removeprefix("torch."),
                    start=start,
                    count=count,
                    offset_bytes=self._used,
                )
            )
            start += count
            self._used = min(-(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES, self._buffer.numel())

    async def flush(self) -> None:
        """Hands the bucket over. Through host memory the server copies it while the next one is filled."""
        await self.settle()
        pieces, used = self._pieces, self._used
        self._pieces, self._used = [], 0
        if self._mapped:
            torch.cuda.synchronize(self._buffer.device)
            await self._endpoint.load(pieces, None)
        else:
            self._loading = self._endpoint.load(pieces, self._buffer[:used])

    async def settle(self) -> None:
        """Waits until the server has what was handed over."""
        loading, self._loading = self._loading, None
        if loading is not None:
            await loading


class WeightReceiver:
    """The server's side: maps the sender's bucket, if it can, and loads what it holds.

    Args:
        loader: What to load into.
        device: The model's device.
        handle: What `reduce_tensor` gave the sender for its bucket, or None.
        proof: The bytes at the start of the bucket: they tell that it is the sender's memory, not another device's.
    """

    def __init__(self, loader: WeightLoader, device: torch.device, handle: Any | None, proof: bytes) -> None:
        self._loader = loader
        self._device = device
        self._bucket = _mapped(handle, device, proof) if handle is not None and device.type == "cuda" else None

    @property
    def shares_memory(self) -> bool:
        """Whether the sender's bucket is mapped here."""
        return self._bucket is not None

    def load(self, pieces: list[Piece], host_bucket: Any | None) -> None:
        """Loads one bucket.

        Args:
            pieces: What it holds.
            host_bucket: One-dimensional uint8 array in host memory, read-only or not; None is the mapped bucket.
        """
        if host_bucket is None:
            assert self._bucket is not None, "a bucket of shared memory came, but none is mapped"
            self._loader.load(pieces, self._bucket)
            torch.cuda.synchronize(self._device)  # the sender fills the bucket anew as soon as this returns
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")  # Ray's objects are; they are only read
            bucket = torch.as_tensor(host_bucket)
        self._loader.load(pieces, bucket)

    def close(self) -> None:
        """Unmaps the sender's bucket, so that its memory can be freed there."""
        if self._bucket is not None:
            self._bucket = None
            torch.cuda.synchronize(self._device)
            torch.cuda.ipc_collect()


def _mapped(handle: Any, device: torch.device, proof: bytes) -> torch.Tensor | None:
    """The sender's bucket, or None when this process can't map it."""
    rebuild, arguments = handle
    mine = list(arguments)
    mine[_DEVICE_ARGUMENT] = device.index or 0  # the same GPU may have another number in this process
    try:
        bucket = rebuild(*mine)
        if bytes(bucket[:_PROOF_BYTES].tolist()) == proof:
            return bucket
        logger.warning("CUDA IPC mapped memory that is not the trainer's bucket")
    except (RuntimeError, ValueError, TypeError) as error:
        logger.warning("CUDA IPC with the trainer failed: %s", error)
    return None


async def _as_async(
    weights: AsyncIterator[tuple[str, torch.Tensor]] | Iterable[tuple[str, torch.Tensor]],
) -> AsyncIterator[tuple[str, torch.Tensor]]:
    if isinstance(weights, AsyncIterator):
        async for item in weights:
            yield item
    else:
        for item in weights:
            yield item
