"""verl's replica for `rollout.name=hf`: one server on the node and device of its worker."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.device import get_device_name, get_resource_name, get_visible_devices_keyword
from verl.workers.config import RolloutConfig
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.rollout.checks import check_rollout
from verl_ext_sharding.rollout.server import HFServer
from verl_ext_sharding.rollout.settings import server_settings


class HFReplica(RolloutReplica):
    """One rollout server of one process.

    Args:
        replica_rank: Rank of this replica.
        config: verl's rollout config.
        model_config: verl's model config, or the node that it is made from.
        gpus_per_node: Devices of a node.
        is_reward_model: Whether it serves a reward model; it is then a `HFRewardReplica`.
        is_teacher_model: Whether it serves a teacher.
        name_suffix: Keeps the Ray names of several teachers apart.

    Raises:
        ConfigError: When the config asks for what this backend can't do.
    """

    def __new__(
        cls,
        replica_rank: int,
        config: RolloutConfig,
        model_config: DictConfig,
        gpus_per_node: int = 8,
        is_reward_model: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> HFReplica:
        """verl knows one class for a backend; a reward model's replica has a server of its own kind."""
        if not is_reward_model or cls is not HFReplica:
            return super().__new__(cls)
        from verl_ext_sharding.rollout.reward_replica import HFRewardReplica

        return super().__new__(HFRewardReplica)

    def __init__(
        self,
        replica_rank: int,
        config: RolloutConfig,
        model_config: DictConfig,
        gpus_per_node: int = 8,
        is_reward_model: bool = False,
        is_teacher_model: bool = False,
        name_suffix: str = "",
    ) -> None:
        for error in self.problems(plain(config), plain(model_config)):
            raise error
        super().__init__(
            replica_rank, config, model_config, gpus_per_node, is_reward_model, is_teacher_model, name_suffix
        )

    def problems(self, rollout: dict[str, Any], model: dict[str, Any]) -> list[ConfigError]:
        """What the config asks for and this backend can't do.

        Args:
            rollout: The rollout's config as nested mappings.
            model: The model's.
        """
        return check_rollout(rollout, model)

    async def launch_servers(self) -> None:
        """Starts the server and waits until its model is built."""
        assert len(self.workers) == 1, f"a replica of rollout.name=hf has 1 worker, not {len(self.workers)}"
        _require_weights(self.rollout_mode, self.config.load_format)
        node_id, accelerator_ids, device = await self.workers[0].__ray_call__.remote(locate)
        settings = server_settings(
            plain(self.config),
            plain(self.model_config),
            mode=self.rollout_mode.value,
            device=device,
            replica_rank=self.replica_rank,
            servers_per_node=self.gpus_per_node,
        )
        name = self._server_name()
        server = (
            ray.remote(HFServer)
            .options(
                name=name,
                num_cpus=0,
                max_concurrency=self.max_concurrency,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
                runtime_env={"env_vars": _env_vars(settings.full_determinism)},
            )
            .remote(settings, ",".join(accelerator_ids) or None, get_visible_devices_keyword())
        )
        self.servers.append(server)
        await server.start.remote()
        self._server_handle = server
        self._server_address = name  # no HTTP: verl needs a key that is unique among replicas

    async def sleep(self) -> None:
        """Waits for requests in flight, then puts the server to sleep."""
        await self.servers[0].wait_for_requests_to_drain.remote()
        await super().sleep()

    async def release_kv_cache(self) -> None:
        """Waits for requests in flight, then frees the KV cache."""
        await self.servers[0].wait_for_requests_to_drain.remote()
        await super().release_kv_cache()

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Ends all requests with what they have, and closes the gate.

        Args:
            reject_request: Answer later requests with "aborted" instead of holding them.

        Returns:
            `aborted_count`, `request_ids`, and both by server in `server_results`.
        """
        results = await asyncio.gather(
            *[server.abort_all_requests.remote(reject_request=reject_request) for server in self.servers]
        )
        request_ids = [request_id for result in results for request_id in result["request_ids"]]
        return {"aborted_count": len(request_ids), "request_ids": request_ids, "server_results": results}

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        """Ends one request with what it has."""
        return await self.servers[0].abort_request.remote(request_id)

    def _server_name(self) -> str:
        """verl's name: `ServerAdapter` finds a policy's server by it."""
        kind = "teacher_" if self.is_teacher_model else ""
        return f"hf_server_{kind}{self.replica_rank}_0{self.name_suffix}"


def locate(worker: Any) -> tuple[str, list[str], str]:
    """Where a worker runs: its node, its accelerator ids (none without logical devices), and its device type.

    Runs in the worker, whose process has the device; the controller's may have none.

    Args:
        worker: The actor instance; unused.
    """
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids().get(get_resource_name(), []), get_device_name()


def _require_weights(mode: RolloutMode, load_format: str) -> None:
    """A colocated server gets no update, so it must read its weights.

    Raises:
        ConfigError: When it was told not to.
    """
    if mode is RolloutMode.COLOCATED and load_format == "dummy":
        raise ConfigError(
            "rollout.load_format of a colocated server (a teacher model)",
            expected="a format that reads the checkpoint: nobody sends weights to it",
            found=load_format,
            consequence="the server does not start",
            remedy="load_format=auto for that model's rollout",
        )


def _env_vars(full_determinism: bool) -> dict[str, str]:
    """Keeps Ray's hands off the device variable, which the server sets itself, as verl does for its own backends."""
    platform = get_platform()
    variables = {**dict.fromkeys(platform.ray_noset_envvars(), "1"), **platform.rollout_env_vars()}
    return {**variables, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if full_determinism else variables


def plain(config: Any) -> Any:
    """A config as nested dicts, interpolations resolved; verl's dataclasses are mappings that may hold either kind."""
    if OmegaConf.is_config(config):
        return OmegaConf.to_container(config, resolve=True)
    if isinstance(config, Mapping):
        return {key: plain(value) for key, value in config.items()}
    return config
