"""The way from a training process to its server's actor."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import ray
import torch

from verl_ext_sharding.rollout.weights import Piece


class RayEndpoint:
    """`transport.Endpoint` over a Ray actor: host buckets travel through the object store, and are not copied there
    again on the server's side.

    Args:
        server: Handle of an `HFServer` actor.
        global_steps: Version of the weights, set when the update is complete.
    """

    def __init__(self, server: ray.actor.ActorHandle, global_steps: int | None = None) -> None:
        self._server = server
        self._global_steps = global_steps

    def begin(self, handle: Any | None, proof: bytes) -> Awaitable[bool]:
        """See `transport.Endpoint`."""
        return self._server.begin_weights_update.remote(handle, proof)

    def load(self, pieces: list[Piece], host_bucket: torch.Tensor | None) -> Awaitable[None]:
        """See `transport.Endpoint`; the put copies the bucket before this returns."""
        bucket = None if host_bucket is None else ray.put(host_bucket.numpy())
        return self._server.load_weights_bucket.remote(pieces, bucket)

    def finish(self) -> Awaitable[None]:
        """See `transport.Endpoint`."""
        return self._server.finish_weights_update.remote(self._global_steps)

    def cancel(self) -> Awaitable[None]:
        """See `transport.Endpoint`."""
        return self._server.cancel_weights_update.remote()
