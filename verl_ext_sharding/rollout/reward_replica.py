"""verl's replica of a reward model with `rollout.name=hf`: the server is the worker that holds the device."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from verl.single_controller.ray import RayClassWithInitArgs
from verl.utils.device import get_device_name, get_resource_name, get_visible_devices_keyword
from verl.workers.rollout.replica import RolloutMode

from verl_ext_sharding.config import spec
from verl_ext_sharding.config.reward import RewardServerSettings
from verl_ext_sharding.errors import ConfigError, PlacementError
from verl_ext_sharding.placement.bundles import Promise
from verl_ext_sharding.rollout.checks import check_reward
from verl_ext_sharding.rollout.replica import HFReplica, plain
from verl_ext_sharding.rollout.reward_server import HFRewardServer
from verl_ext_sharding.rollout.reward_settings import WHERE, reward_serving
from verl_ext_sharding.workers.probe import read_back


class HFRewardReplica(HFReplica):
    """One reward server of one process.

    verl's other backends put a worker of verl's on each device and a server beside it. Here the server itself is the worker
    on the replica's first bundle, so Ray gives it the device, and there is one process fewer. With several devices (a
    `device_map`) the workers on the others only hold their bundles.
    """

    def problems(self, rollout: dict[str, Any], model: dict[str, Any]) -> list[ConfigError]:
        """See `HFReplica`."""
        return check_reward(rollout, asked_of_run())

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        """The class of verl's workers for this replica."""
        rollout, model = plain(self.config), plain(self.model_config)
        serving = reward_serving(
            rollout,
            model,
            asked_of_run(),
            device=get_device_name(),
            standalone=self.rollout_mode is RolloutMode.STANDALONE,
            replica_rank=self.replica_rank,
            servers_per_node=self.gpus_per_node // self.world_size,
        )
        return RayClassWithInitArgs(cls=ray.remote(HFRewardServer), serving=serving)

    async def launch_servers(self) -> None:
        """Starts the server and waits until it answers."""
        assert len(self.workers) == self.world_size, f"{self.world_size} workers expected, not {len(self.workers)}"
        places = await asyncio.gather(
            *[worker.__ray_call__.remote(read_back, get_resource_name()) for worker in self.workers]
        )
        _require_places(places)
        devices = ",".join(place["accelerator_id"] for place in places if place["accelerator_id"] != "none")
        server = self.workers[0]
        self.servers.append(server)
        self._server_handle = server
        self._server_address = await server.start.remote(devices or None, get_visible_devices_keyword())


def asked_of_run() -> RewardServerSettings:
    """What this run's request says of the reward servers; the defaults where it says nothing."""
    run = spec.current()
    return (run.reward if run is not None else None) or RewardServerSettings()


def _require_places(places: list[dict[str, Any]]) -> None:
    """Compares where the workers of one server are with what it needs and what was promised.

    Args:
        places: One answer of `probe.read_back` for each worker.

    Raises:
        PlacementError: They are on several nodes, or elsewhere than promised.
    """
    nodes = sorted({place["node"] for place in places})
    if len({place["node_id"] for place in places}) > 1:
        raise PlacementError(
            f"{WHERE}.rollout.tensor_model_parallel_size={len(places)}",
            expected="devices of one node: one process serves the reward model",
            found=f"devices on {', '.join(nodes)}",
            consequence="the run stops before the reward model loads",
            remedy=f"{WHERE}.rollout.tensor_model_parallel_size=1, or sharding.roles.reward.devices of one node",
        )
    for place in places:
        promise = Promise.from_json(place["promise"]) if place["promise"] else None
        if promise is not None:
            subject = f"reward server on device {promise.device}"
            promise.verify(subject, node_id=place["node_id"], accelerator_id=place["accelerator_id"])
