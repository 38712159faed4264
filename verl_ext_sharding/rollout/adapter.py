"""The training worker's end of the rollout: tells its server to wake, sleep and take weights."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
import torch
from torch.distributed.device_mesh import DeviceMesh
from verl.utils.device import get_device_id, get_device_name
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.rollout.checks import check_rollout
from verl_ext_sharding.rollout.endpoint import RayEndpoint
from verl_ext_sharding.rollout.transport import send_weights

SERVER_NAME = "hf_server_{rank}_0"
"""Ray name of a policy replica's server, after verl's `<backend>_server_<replica>_<node>`."""


class ServerAdapter(BaseRollout):
    """verl's `BaseRollout` for `rollout.name=hf`: each training rank owns one replica.

    Args:
        config: verl's rollout config.
        model_config: verl's model config.
        device_mesh: Unused; verl passes it to every backend.
        replica_rank: Which replica, or -1 for the one of this process's rank.

    Raises:
        ConfigError: When the config asks for what this backend can't do.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_config: HFModelConfig,
        device_mesh: DeviceMesh,
        replica_rank: int = -1,
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        for error in check_rollout(self.config, self.model_config):
            raise error
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True
        self._server: ray.actor.ActorHandle | None = None

    async def resume(self, tags: list[str]) -> None:
        """Brings back the server's memory for "weights" or "kv_cache"."""
        if self.config.free_cache_engine:
            await self._handle().wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Frees the server's weights and KV cache."""
        if self.config.free_cache_engine:
            await self._handle().sleep.remote()

    async def update_weights(
        self,
        weights: AsyncIterator[tuple[str, torch.Tensor]] | Iterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = True,
        **kwargs: Any,
    ) -> None:
        """Sends a complete set of weights to the server.

        Args:
            weights: Names and whole tensors; drained even when the update fails, since it runs collectives.
            global_steps: Version of the weights.
            wire_format: "named_tensors".
            peft_config: Set by verl when `weights` are LoRA adapters, which this backend refuses.
            base_sync_done: Only means something for adapters.
            **kwargs: What other backends need.

        Raises:
            ConfigError: For another wire format, or adapters that are not merged.
            WeightSyncError: When the names or shapes don't fit the server's model.
        """
        _require(wire_format == "named_tensors", "checkpoint_engine.backend", "whole tensors", wire_format, _BACKEND)
        _require(peft_config is None, "model.lora", "adapters merged into the weights", "adapters", _MERGE)
        device = (
            torch.device(get_device_name(), get_device_id()) if get_device_name() == "cuda" else torch.device("cpu")
        )
        server = self._handle()
        await send_weights(
            weights,
            RayEndpoint(server, global_steps),
            bucket_bytes=self.config.checkpoint_engine.update_weights_bucket_megabytes << 20,
            device=device,
        )
        if device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        await server.clear_kv_cache.remote()

    def _handle(self) -> ray.actor.ActorHandle:
        """The server's actor, found at first use: it starts after the training worker."""
        if self._server is None:
            self._server = ray.get_actor(SERVER_NAME.format(rank=self.replica_rank))
        return self._server


_BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"
_MERGE = "actor_rollout_ref.model.lora.merge=True"


def _require(holds: bool, subject: str, expected: str, found: str, remedy: str) -> None:
    if not holds:
        raise ConfigError(
            f"{subject} with rollout.name=hf",
            expected=expected,
            found=found,
            consequence="the weight update fails",
            remedy=remedy,
        )
