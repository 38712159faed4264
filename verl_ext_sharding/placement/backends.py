"""Inference servers that find their devices by themselves: TensorRT-LLM by bundles, SGLang by sorted ids. Pure."""

from __future__ import annotations

from verl_ext_sharding.errors import PlacementError
from verl_ext_sharding.placement.batches import refusal
from verl_ext_sharding.placement.bundles import Placement
from verl_ext_sharding.placement.devices import format_devices
from verl_ext_sharding.placement.job import JobFacts


def check_backends(placement: Placement, facts: JobFacts) -> None:
    """Servers of rollout and reward model on devices of the trainer's must be able to find them.

    Raises:
        PlacementError: The first role whose servers would start on other devices than it has.
    """
    served = {role: server for role, server in facts.servers.items() if role != "rollout" or facts.hybrid_rollout}
    for role in ("rollout", "reward"):
        server = served.get(role)
        if server is not None and server.name == "trtllm" and not _holds_first(placement, placement.devices_of(role)):
            raise _other_bundles(role, f"{server.block}.name", placement)
    pool = placement.pool_of("actor")
    spread = pool is not None and pool.layout == "device_map" and pool.devices[0] > min(pool.devices)
    if pool is not None and spread and "rollout" in served and facts.rollout.name == "sglang":
        raise _sorted_ids(f"{facts.rollout.block}.name", pool.devices)


def _holds_first(placement: Placement, devices: tuple[int, ...]) -> bool:
    """Whether devices are the first ones of each of their nodes, the same number on each.

    verl gives TensorRT-LLM the placement groups and bundles from 0 on (`get_pgs_and_bundle_indices`,
    workers/rollout/trtllm_rollout/trtllm_async_server.py), and it starts its ranks there itself. What else a group stands
    for, such as some of its bundles, is lost on the way.
    """
    return not devices or (
        placement.is_even(devices)
        and all(numbers == tuple(range(len(numbers))) for numbers in placement.per_node(devices))
    )


def _other_bundles(role: str, key: str, placement: Placement) -> PlacementError:
    owner = "actor" if role == "rollout" else role  # rollout follows the actor
    pool = placement.pool_of(owner)
    assert pool is not None
    devices = f"sharding.roles.{owner}.devices"
    first = ""
    if placement.is_even(pool.devices):
        nodes = sorted({device - placement.topology.local(device) for device in pool.devices})
        count = len(pool.devices) // len(nodes)
        first = f", or {devices}={format_devices([node + local for node in nodes for local in range(count)])}"
    return refusal(
        f"{key} with {devices}",
        "vllm or sglang on these devices: TensorRT-LLM's servers start on the first ones of a node, and on no others",
        f"trtllm on {format_devices(pool.devices)}",
        f"{key}=vllm{first}, or {devices}=null",
    )


def _sorted_ids(key: str, devices: tuple[int, ...]) -> PlacementError:
    """verl sorts the ids that the actor's process sees (sglang_rollout/async_sglang_server.py)."""
    ascending = f"sharding.roles.actor.devices={format_devices(sorted(devices))}"
    return refusal(
        "sharding.roles.actor.devices with layout=device_map",
        "a list that starts with its smallest number: SGLang's server starts there, and rollout is planned on the first one",
        f"{format_devices(devices)} with {key}=sglang",
        f"{ascending} (places of a device_map follow this order), or {key}=vllm",
    )
