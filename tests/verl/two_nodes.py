"""Runs inside a process that is connected to the simulated cluster; see test_two_nodes.py."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import ray

from verl_ext_sharding import cluster, envs
from verl_ext_sharding.config.schema import CommunicationConfig
from verl_ext_sharding.config.spec import RunSpec
from verl_ext_sharding.errors import ShardingError
from verl_ext_sharding.patch_points import worker_group
from verl_ext_sharding.patching import apply
from verl_ext_sharding.placement import resources
from verl_ext_sharding.placement.bundles import Placement, Promise, place
from verl_ext_sharding.placement.job import EngineFacts, JobFacts, ServerFacts


def run(job: dict[str, Any], num_nodes: int) -> dict[str, Any]:
    """Places the roles of a job on the cluster and says where their workers are."""
    if "check" in job:
        return _check(job["check"]) | _apart()
    facts = _facts(num_nodes, 2)
    placement = place(job, facts)
    for spec in worker_group.SPECS:
        apply(spec)
    run_spec = RunSpec(placement=placement, bundle_cpus=3, timeout_s=60)
    workers, manager = _start(run_spec)
    answers = {role: ray.get([w.where.remote() for w in group.workers]) for role, group in workers.items()}
    nodes = [bundle.promise.node_id for bundle in manager.reserved.values()][::2]
    result = {"workers": answers, "nodes": nodes, **_parity(run_spec)}
    _free(workers, manager)
    uneven = place({"actor": {"node0": [0, 1], "node1": [1]}, "critic": [0], "ref": [0]}, facts)
    workers, manager = _start(RunSpec(placement=uneven, bundle_cpus=3, timeout_s=60))
    result["uneven"] = ray.get([w.where.remote() for w in workers["actor"].workers])
    result["served"] = _served(manager)
    result |= _not_reserved(placement)
    _free(workers, manager)
    result["addressed"] = _addressed()
    result["free_after"] = _settled_gpus()
    return result


def _facts(num_nodes: int, devices: int) -> JobFacts:
    engines = {role: EngineFacts(strategy="fsdp2") for role in ("actor", "ref", "critic")}
    return JobFacts(num_nodes=num_nodes, devices_per_node=devices, engines=engines)


def _start(spec: RunSpec) -> tuple[dict[str, Any], Any]:
    from verl_ext_sharding.workers.pools import BundlePoolManager

    manager = BundlePoolManager(spec, {}, finalize=lambda: None)
    manager.create_resource_pool()
    pools = spec.placement.pools
    return {pool.roles[0]: _group(manager.resource_pool_dict[pool.name]) for pool in pools}, manager


def _group(pool: Any) -> Any:
    from verl.single_controller.base import Worker
    from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup

    class Probe(Worker):
        def where(self) -> dict[str, Any]:
            promise = Promise.from_json(os.environ[envs.BUNDLE])
            context = ray.get_runtime_context()
            return {
                "node_id": context.get_node_id(),
                "accelerator_id": context.get_accelerator_ids()["GPU"][0],
                "device": promise.device,
                "rank": os.environ["RANK"],
                "world_size": os.environ["WORLD_SIZE"],
                "local_world_size": os.environ["RAY_LOCAL_WORLD_SIZE"],
            }

    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=RayClassWithInitArgs(ray.remote(Probe)))


def _served(manager: Any) -> list[list[dict[str, Any]]]:
    """Splits a pool on devices 1 and 3 into one sub-pool for each server, as verl does for reward model and teacher."""
    from verl.single_controller.ray.base import split_resource_pool

    from verl_ext_sharding.placement.bundles import Pool
    from verl_ext_sharding.workers.pools import BundlePool, _views

    placement = manager.spec.placement
    pool = Pool(name="reward_pool", roles=("reward",), devices=(1, 3))
    served = BundlePool(pool, _views(pool, placement, manager.reserved), 3)
    groups = [_group(sub_pool) for sub_pool in split_resource_pool(served, split_size=1)]
    answers = [ray.get([worker.where.remote() for worker in group.workers]) for group in groups]
    for group in groups:
        for worker in group.workers:
            ray.kill(worker)
    return answers


def _free(workers: dict[str, Any], manager: Any) -> None:
    for group in workers.values():
        for worker in group.workers:
            ray.kill(worker)
    for group in {bundle.group.id: bundle.group for bundle in manager.reserved.values()}.values():
        ray.util.remove_placement_group(group)


def _parity(spec: RunSpec) -> dict[str, Any]:
    env_vars = {envs.SPEC: spec.to_json()}
    try:
        cluster.inspect_nodes(spec, env_vars, CommunicationConfig(), {})
        found = {"parity": "equal"}
    except ShardingError as error:
        found = {"parity": str(error)}
    stock = cluster.ledger.parity
    cluster.ledger.parity = lambda: {**stock(), "release:verl": "0.0.0"}
    try:
        cluster.inspect_nodes(spec, env_vars, CommunicationConfig(), {})
        found["other_code"] = "not noticed"
    except ShardingError as error:
        found["other_code"] = str(error)
    finally:
        cluster.ledger.parity = stock
    return found


def _not_reserved(placement: Placement) -> dict[str, str]:
    """The devices are taken already, so a second reservation can't be made."""
    from verl_ext_sharding.workers.pools import reserve

    try:
        reserve(RunSpec(placement=placement, bundle_cpus=3, timeout_s=3))
    except ShardingError as error:
        return {"not_reserved": str(error)}
    return {"not_reserved": "reserved twice"}


def _addressed() -> dict[str, dict[str, Any]]:
    """By address of each node: a job of one node whose map names it, and where Ray reserved its devices."""
    from verl_ext_sharding.workers.pools import reserve

    found = {}
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    for name in addresses.values():
        _settled_gpus()
        facts = _facts(1, 2)
        names = resources.nodes_of_job(place({"critic": {name: [1]}}, facts), cluster.free_resources())
        placement = place({"critic": {name: [1]}}, facts, node_names=names)
        bundles = reserve(RunSpec(placement=placement, bundle_cpus=3, timeout_s=60)).bundles
        found[name] = {"names": names, "reserved": [addresses[b.promise.node_id] for b in bundles.values()]}
        for group in {bundle.group.id: bundle.group for bundle in bundles.values()}.values():
            ray.util.remove_placement_group(group)
    return found


def _apart() -> dict[str, Any]:
    """Where Ray reserves two nodes of one device, and a trainer beside a teacher that only the larger node has room for."""
    from verl_ext_sharding.workers.pools import reserve

    two = place({"actor": {"node0": [0]}, "critic": {"node1": [0]}}, _facts(2, 1))
    beside = place({"critic": [0]}, replace(_facts(1, 2), teacher=ServerFacts(name="vllm", own_nodes=(4,))))
    found = {}
    for name, placement in (("two", two), ("beside", beside)):
        _settled_gpus(6)
        reservation = reserve(RunSpec(placement=placement, bundle_cpus=3, timeout_s=60), ["teacher_pool"])
        nodes = [bundle.promise.node_id for bundle in reservation.bundles.values()]
        found[name] = [len(set(nodes)), {pool: len(groups) for pool, groups in reservation.own.items()}]
        groups = {bundle.group.id: bundle.group for bundle in reservation.bundles.values()}
        for group in [*groups.values(), *(group for groups in reservation.own.values() for group in groups)]:
            ray.util.remove_placement_group(group)
    return {"apart": found}


def _settled_gpus(total: int = 4) -> float:
    import time

    for _ in range(60):
        free = sum(node.num_devices for node in cluster.free_resources())
        if free == total:
            break
        time.sleep(0.5)
    return free


def _check(check: dict[str, int]) -> dict[str, Any]:
    facts = _facts(check["nodes"], check["devices"])
    try:
        resources.check_cluster(place({}, facts), facts, cluster.free_resources())
    except ShardingError as error:
        print(error)
    return {}
