"""Ray pools from a placement: one placement group per node, one bundle per device, a role = a list of bundles.

verl's own pools know contiguous ranges only. `BundleView` is a node's placement group seen through a list of bundles; the
patch points on `RayWorkerGroup` resolve it when a worker is created, so that all of verl's code that slices pools
(reward and teacher servers too) works on any subset of devices.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from verl.plugin.platform import get_platform
from verl.single_controller.ray import RayResourcePool, ResourcePoolManager
from verl.single_controller.ray.base import sort_placement_group_by_node_ip

from verl_ext_sharding import cluster
from verl_ext_sharding.config.spec import RunSpec
from verl_ext_sharding.errors import ClusterError, PlacementError
from verl_ext_sharding.placement import resources
from verl_ext_sharding.placement.bundles import Placement, Pool, Promise
from verl_ext_sharding.workers.probe import where

logger = logging.getLogger(__name__)

_PIN = 0.001
"""Share of a node's `node:<address>` that a bundle takes."""

_TRAINER_POOL = f"{resources.TRAINER}_pool"

_ASK_AGAIN_S = 0.5
"""Time between two questions for what Ray has free."""


@dataclass(kw_only=True, frozen=True)
class Bundle:
    """A bundle of a node's placement group and the accelerator that Ray gave it."""

    group: PlacementGroup
    index: int
    promise: Promise


@dataclass(kw_only=True, frozen=True)
class Reservation:
    """What Ray reserved for a job.

    Args:
        bundles: `{device number: bundle}` of the trainer's devices.
        own: `{verl's name of the pool: placement groups}` of pools of verl's own.
    """

    bundles: dict[int, Bundle]
    own: dict[str, list[PlacementGroup]]


class BundleView(PlacementGroup):
    """A placement group seen through some of its bundles: index i here is bundle `bundles[i].index` there."""

    def __init__(self, bundles: Sequence[Bundle]) -> None:
        group = bundles[0].group
        assert all(bundle.group.id == group.id for bundle in bundles), "bundles of one node only"
        super().__init__(group.id, group.bundle_cache)
        self.group = group
        self.bundles = tuple(bundles)

    @property
    def bundle_count(self) -> int:
        return len(self.bundles)


class BundlePool(RayResourcePool):
    """A pool on given bundles, for one group of worker processes.

    Args:
        pool: The placed pool.
        views: One view for each node where counts are even, else one for each device (verl takes the ranks per node
            from the first node).
        colocate_count: CPUs of a bundle.
    """

    def __init__(self, pool: Pool, views: Sequence[BundleView], colocate_count: int) -> None:
        super().__init__(
            process_on_nodes=[view.bundle_count for view in views],
            use_gpu=True,
            name_prefix=pool.name,
            max_colocate_count=colocate_count,
        )
        self.pool = pool
        self.pgs = list(views)

    def get_placement_groups(self, strategy: str = "STRICT_PACK", name: Any = None, device_name: str = "cuda") -> list:
        return self.pgs


class BundlePoolManager(ResourcePoolManager):
    """Reserves the job's devices and hands each role its `BundlePool`.

    Args:
        spec: The run's decisions.
        mapping: `{verl role: pool name}`, as verl's trainer keeps it.
        finalize: Called once the pools exist and every trainer class has said its worker classes.
    """

    def __init__(self, spec: RunSpec, mapping: dict[Any, str], finalize: Any) -> None:
        placement = spec.placement
        super().__init__(
            resource_pool_spec={
                p.name: [len(n) for n in placement.per_node(p.process_devices)] for p in placement.pools
            },
            mapping=mapping,
            max_colocate_count=spec.bundle_cpus,
        )
        self.spec = spec
        self._finalize = finalize
        self.reserved: dict[int, Bundle] = {}
        self._stock_pools: dict[str, list[int]] = {}

    def add_stock_pool(self, name: str, processes_on_nodes: list[int]) -> None:
        """Keeps a pool of verl's own, apart from the job's devices."""
        self._stock_pools[name] = processes_on_nodes

    def create_resource_pool(self) -> None:
        """Reserves one bundle for each device and builds the pools.

        Raises:
            ClusterError: Ray could not reserve the devices in time, or as the run needs them.
        """
        reservation = reserve(self.spec, self._stock_pools)
        bundles = self.reserved = reservation.bundles
        placement = self.spec.placement
        for pool in placement.pools:
            views = _views(pool, placement, bundles)
            self.resource_pool_dict[pool.name] = BundlePool(pool, views, self.spec.bundle_cpus)
        for name, processes_on_nodes in self._stock_pools.items():
            pool = self.resource_pool_dict[name] = RayResourcePool(
                process_on_nodes=processes_on_nodes,
                use_gpu=True,
                max_colocate_count=self.max_colocate_count,
                name_prefix=name,
            )
            pool.pgs = reservation.own.get(name)
        self._finalize()

    def get_n_gpus(self) -> int:
        """Devices that hold a role, those of verl's own pools included: what verl divides throughput by."""
        return len(self.spec.placement.used) + sum(map(sum, self._stock_pools.values()))


def reserve(spec: RunSpec, own: Collection[str] = ()) -> Reservation:
    """Reserves the devices of the job and finds out which accelerator each bundle got.

    Of several groups each is put where all have room: left to itself, Ray may give two nodes of the trainer one machine, or
    take the only node that a later group fits, for which verl waits for ever. Pools that verl makes later, such as rollout's,
    are left the room that they need.

    Ray picks the accelerator of a bundle. Device numbers follow the accelerators' ids, not the order of the bundles, so that
    device 0 is a node's first reserved accelerator whatever Ray did.

    Args:
        spec: The run's decisions.
        own: verl's names of the pools of its own that are reserved too.

    Raises:
        ClusterError: Ray could not reserve the devices within `spec.timeout_s`, or start a process on each of a node's, or
            these are not as the job needs them.
    """
    topology = spec.placement.topology
    accelerator = get_platform().ray_resource_name()
    bundle: dict[str, float] = {"CPU": spec.bundle_cpus, accelerator: 1}
    groups = _groups(spec, bundle, own)
    every = [group for those in groups.values() for group in those]
    try:
        ray.get([group.ready() for group in every], timeout=spec.timeout_s)
    except GetTimeoutError:
        _remove(every)
        raise _not_reserved(spec, bundle) from None
    groups = {role: sort_placement_group_by_node_ip(those) for role, those in groups.items()}
    trainer = groups.pop(_TRAINER_POOL)
    try:
        found = [_accelerators(group, accelerator, spec.timeout_s) for group in trainer]
    except GetTimeoutError:
        _remove(every)
        raise _no_answer(spec) from None
    bundles: dict[int, Bundle] = {}
    for node, group in enumerate(trainer):
        for local, (index, promise) in enumerate(found[node]):
            device = node * topology.devices_per_node + local
            bundles[device] = Bundle(
                group=group,
                index=index,
                promise=Promise(device=device, node_id=promise[0], accelerator_id=promise[1]),
            )
    logger.info("devices: %s", {d: (b.promise.node_id[:8], b.promise.accelerator_id) for d, b in bundles.items()})
    try:
        _check_nodes(spec, bundles)
        _check_backends(spec, bundles)
    except ClusterError:
        _remove(every)
        raise
    return Reservation(bundles=bundles, own=groups)


def _groups(spec: RunSpec, bundle: dict[str, float], own: Collection[str]) -> dict[str, list[PlacementGroup]]:
    """The placement groups of the trainer and of pools of verl's own, which may not be ready yet, by name of the pool.

    `node:<address>` is a resource that Ray gives each node, and that the bundles of a group take a little of.
    """
    topology = spec.placement.topology
    sizes = {resources.TRAINER: (topology.devices_per_node,) * topology.num_nodes, **spec.placement.reserved}
    name = f"verl_sharding_{uuid4().hex[:8]}"  # Ray wants it unique, and several jobs may share a cluster
    groups: dict[str, list[PlacementGroup]] = {}
    for role, hosts in _hosts(spec, bundle).items():
        pool = f"{role}_pool"  # as verl names it (`_init_resource_pool_mgr`, trainer/ppo/v1/trainer_base.py)
        if pool in (_TRAINER_POOL, *own):
            groups[pool] = [
                placement_group(
                    [bundle | ({f"node:{host}": _PIN} if host else {})] * size,
                    strategy="STRICT_PACK",
                    name=f"{name}_{role}{node}",
                )
                for node, (size, host) in enumerate(zip(sizes[role], hosts, strict=True))
            ]
    return groups


def _hosts(spec: RunSpec, bundle: dict[str, float]) -> dict[str, tuple[str, ...]]:
    """Where each group goes, see `resources.hosts`. Ray says a little late that devices were given back, and is asked again."""
    deadline = time.monotonic() + spec.timeout_s
    while True:
        nodes = cluster.free_resources()
        found = resources.hosts(spec.placement, nodes, spec.bundle_cpus, spec.reward_workers)
        if found is not None:
            return found
        if time.monotonic() > deadline:
            raise _not_reserved(spec, bundle)
        time.sleep(_ASK_AGAIN_S)


def _remove(groups: Sequence[PlacementGroup]) -> None:
    for group in groups:
        remove_placement_group(group)


def _accelerators(group: PlacementGroup, accelerator: str, timeout_s: float) -> list[tuple[int, tuple[str, str]]]:
    """`[(bundle index, (node id, accelerator id))]` in the order of the accelerators' ids."""
    probe = get_platform().ray_resource_options(0.01)
    answers = ray.get(
        [
            where.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index), **probe
            ).remote(accelerator)
            for index in range(group.bundle_count)
        ],
        timeout=timeout_s,
    )
    return sorted(enumerate(answers), key=lambda item: _natural(item[1][1]))


def _natural(accelerator_id: str) -> tuple[int, int, str]:
    return (0, int(accelerator_id), "") if accelerator_id.isdigit() else (1, 0, accelerator_id)


def _check_nodes(spec: RunSpec, bundles: dict[int, Bundle]) -> None:
    """Each node of the trainer must be one of Ray's: addresses do not tell two of one machine apart."""
    topology = spec.placement.topology
    nodes = {node: bundles[node * topology.devices_per_node].promise.node_id for node in range(topology.num_nodes)}
    if len(set(nodes.values())) == topology.num_nodes:
        return
    found = ", ".join(f"node{node} is {node_id[:8]}" for node, node_id in nodes.items())
    raise ClusterError(
        "nodes of the job",
        expected=f"trainer.nnodes={topology.num_nodes} different nodes of Ray, each of an address of its own",
        found=f"Ray gave some of them the same one: {found}",
        consequence="the run stops, since roles would not be on the nodes where they were placed",
        remedy="start Ray once on each machine (`ray status` shows its nodes), or name the nodes by their addresses: "
        "sharding.roles.<role>.devices={<address>: [...], ...}",
    )


def _check_backends(spec: RunSpec, bundles: dict[int, Bundle]) -> None:
    """What some inference servers take for granted of the devices' ids and of the order of the bundles."""
    topology = spec.placement.topology
    words = sorted({b.promise.accelerator_id for b in bundles.values() if not b.promise.accelerator_id.isdigit()})
    if words and "sglang" in spec.backends.values():
        raise ClusterError(
            "ids of the job's devices",
            expected="numbers, as SGLang's servers read them (async_sglang_server.py)",
            found=", ".join(words),
            consequence="the run stops before models load, after which the servers could not start",
            remedy=f"start Ray with numbers in CUDA_VISIBLE_DEVICES, or without it; or {_another(spec, 'sglang')}",
        )
    moved = [device for device, bundle in bundles.items() if bundle.index != topology.local(device)]
    if moved and "trtllm" in spec.backends.values():
        raise ClusterError(
            "order of the job's devices",
            expected="bundles in the order of the devices' ids, by which TensorRT-LLM's servers find their devices",
            found=f"device {moved[0]} in bundle {bundles[moved[0]].index} of its node",
            consequence="the run stops, since servers would be on other devices than planned",
            remedy=f"start the run again, or {_another(spec, 'trtllm')}",
        )


def _another(spec: RunSpec, backend: str) -> str:
    return " ".join(f"{key}=vllm" for key, name in spec.backends.items() if name == backend)


def _views(pool: Pool, placement: Placement, bundles: dict[int, Bundle]) -> list[BundleView]:
    if pool.layout == "device_map":
        return [BundleView([_with_all_devices(pool, bundles)])]
    if not placement.is_even(pool.devices):
        return [BundleView([bundles[device]]) for device in pool.devices]
    by_node: dict[int, list[Bundle]] = {}
    for device in pool.devices:
        by_node.setdefault(placement.topology.node_of(device), []).append(bundles[device])
    return [BundleView(by_node[node]) for node in sorted(by_node)]


def _with_all_devices(pool: Pool, bundles: dict[int, Bundle]) -> Bundle:
    """The first device's bundle, for a process that sees the others too.

    The job has reserved those bundles as well, so no other job gets their devices, and roles with one device for each
    process can share them; a bundle of several devices could not be shared so.
    """
    first = bundles[pool.devices[0]]
    if len(pool.devices) == 1:
        return first
    if get_platform().device_name not in ("cuda", "cpu"):
        raise PlacementError(
            f"sharding.roles.{pool.roles[0]}.layout=device_map",
            expected="GPUs: other accelerators are counted before a process can be shown more than one",
            found=f"{len(pool.devices)} devices of type {get_platform().device_name}",
            consequence="the run stops before the model loads",
            remedy=f"sharding.roles.{pool.roles[0]}.layout=fsdp",
        )
    promise = replace(
        first.promise,
        devices=pool.devices,
        visible=tuple(bundles[device].promise.accelerator_id for device in pool.devices),
        visible_variable=get_platform().visible_devices_envvar(),
    )
    return replace(first, promise=promise)


def _not_reserved(spec: RunSpec, bundle: dict[str, float]) -> ClusterError:
    topology = spec.placement.topology
    nodes = {
        node_id[:8]: {name: amount for name, amount in resources.items() if name in bundle}
        for node_id, resources in ray._private.state.available_resources_per_node().items()
    }
    return ClusterError(
        "reserving the job's devices",
        expected=f"{topology.num_nodes} nodes with {topology.devices_per_node} bundles of {bundle}"
        + "".join(
            f", and {' + '.join(map(str, sizes))} of them for {role}" for role, sizes in spec.placement.reserved.items()
        ),
        found=f"after {spec.timeout_s:g} s Ray has free: {nodes}",
        consequence="the run stops instead of waiting for ever",
        remedy="free the devices (`ray status` shows who holds them), or wait longer with sharding.placement.timeout_s",
    )


def _no_answer(spec: RunSpec) -> ClusterError:
    return ClusterError(
        "the job's devices",
        expected=f"a process on each device of a node that says which one it is, within {spec.timeout_s:g} s",
        found="no answer from at least one",
        consequence="the run stops instead of waiting for ever",
        remedy="look at the raylet logs (session_latest/logs) for processes that don't start; where they start slowly, "
        f"sharding.placement.timeout_s={2 * spec.timeout_s:g}",
    )
