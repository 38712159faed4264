"""What a job reserves against what Ray's nodes have free, so that nothing waits for ever. Pure.

Takes what Ray reports as plain numbers, so that it runs the same in the driver and in tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from verl_ext_sharding.errors import PlacementError
from verl_ext_sharding.placement.batches import refusal
from verl_ext_sharding.placement.bundles import Placement
from verl_ext_sharding.placement.job import JobFacts

TRANSFER_QUEUE_MIN = 2
"""TransferQueue needs its controller and one storage unit; each holds a CPU."""

_STANDALONE_CPUS = 2
"""CPUs of a bundle of rollout's own pool (`RolloutReplica.init_standalone`, workers/rollout/replica.py)."""

TRAINER = "trainer"
"""Stands for the trainer among the roles whose placement groups are put on nodes."""

_MAX_STEPS, _MAX_GROUPS = 2_000, 400
"""Of the search for a way to put all groups on the nodes. Beyond them nothing is proven, and nothing is refused."""


@dataclass(kw_only=True, frozen=True)
class NodeResources:
    """What Ray says that a node has free.

    Args:
        name: Address of the node.
        num_devices: GPUs.
        num_cpus: CPUs.
        cpus_taken: CPUs that others hold there.
    """

    name: str
    num_devices: int
    num_cpus: float
    cpus_taken: float = 0.0


@dataclass(kw_only=True, frozen=True)
class _Group:
    """A placement group, whose bundles are all on one node: its devices, CPUs of each, and whether it is the trainer's.

    The trainer's groups are each on a node of their own, on the named one where a map has the node's address.
    """

    devices: int
    cpus: float
    trainer: bool = False
    node: str = ""


@dataclass(kw_only=True, frozen=True)
class _Room:
    """What is left of a node."""

    name: str
    devices: int
    cpus: float
    trainer: bool = False

    def holds(self, group: _Group) -> bool:
        if group.trainer and (self.trainer or group.node not in ("", self.name)):
            return False
        return self.devices >= group.devices and self.cpus >= group.devices * group.cpus

    def without(self, group: _Group) -> _Room:
        return replace(
            self,
            devices=self.devices - group.devices,
            cpus=self.cpus - group.devices * group.cpus,
            trainer=self.trainer or group.trainer,
        )


def nodes_of_job(placement: Placement, nodes: Sequence[NodeResources]) -> tuple[str, ...]:
    """Addresses of the nodes that a job takes, in verl's order: those that its maps name, then those with most CPUs.

    Args:
        placement: A placement whose maps name nodes by their addresses.
        nodes: Free resources of each live node.

    Raises:
        PlacementError: A named node is not there, or has too few devices.
    """
    topology = placement.topology
    big_enough = {node.name: node for node in nodes if node.num_devices >= topology.devices_per_node}
    for name in topology.node_names:
        if name not in big_enough:
            raise refusal(
                f"node {name} of sharding.roles.*.devices",
                f"a node of the cluster with {topology.devices_per_node} free devices (trainer.n_gpus_per_node)",
                f"free devices per node: {_free_devices(nodes)}",
                f"name one of these nodes: {', '.join(sorted(big_enough)) or 'none has as many devices'}",
            )
    others = sorted((node for name, node in big_enough.items() if name not in topology.node_names), key=_by_cpus)
    names = [*topology.node_names, *(node.name for node in others)]
    return tuple(sorted(names[: topology.num_nodes]))


def check_cluster(
    placement: Placement,
    facts: JobFacts,
    nodes: Sequence[NodeResources],
    *,
    fixed: bool = False,
    joins_ray: bool = False,
) -> int:
    """Compares what the job reserves with what Ray's nodes have free.

    Args:
        placement: The placement.
        facts: The job.
        nodes: Free resources of each live node.
        fixed: The user wrote `sharding.placement.max_colocate_count`, so that no other number will do.
        joins_ray: Ray ran before the job, which can't say how many CPUs its nodes have.

    Returns:
        CPUs to reserve with each device: `placement.colocate_count`, or fewer where TransferQueue would get none otherwise.

    Raises:
        PlacementError: Too few devices, nodes of unequal size, or too few CPUs.
    """
    _check_devices(placement, nodes)
    wanted, queue = placement.colocate_count, min(facts.transfer_queue_units, TRANSFER_QUEUE_MIN)
    counts = range(wanted, placement.most_processes - 1, -1)
    fitting = [count for count in counts if _fits(placement, facts, nodes, count)]
    if wanted in fitting or (fitting and not fixed and _hold(placement, wanted, nodes)):
        return fitting[0]
    fewer = f", or fewer workers per device: sharding.placement.max_colocate_count={fitting[0]}" if fitting else ""
    if not _hold(placement, wanted, nodes):
        raise _node_lacks_cpus(placement, nodes, queue + facts.reward_cpus, joins_ray, fewer)
    count = wanted if fewer or fixed else counts[-1]
    raise _cluster_lacks_cpus(placement, facts, nodes, count, joins_ray, fewer)


def _fits(placement: Placement, facts: JobFacts, nodes: Sequence[NodeResources], count: int) -> bool:
    """Whether bundles of so many CPUs leave enough to TransferQueue and to the processes that score."""
    others = min(facts.transfer_queue_units, TRANSFER_QUEUE_MIN) + facts.reward_cpus
    if sum(node.num_cpus for node in nodes) < _bundle_cpus(placement, count) + others:
        return False
    return _packs(_groups(placement, count), _beside_scores(nodes, facts.reward_workers))


def _beside_scores(nodes: Sequence[NodeResources], workers: int) -> list[NodeResources]:
    """The nodes without the CPUs of processes that score.

    verl deals the workers that start them out over all nodes with CPUs in turn, so that each node has its part of them.
    """
    part = workers // max(1, sum(node.num_cpus > 0 for node in nodes)) * workers
    return [replace(node, num_cpus=node.num_cpus - part) for node in nodes]


def hosts(
    placement: Placement, nodes: Sequence[NodeResources], bundle_cpus: int, reward_workers: int = 0
) -> dict[str, tuple[str, ...]] | None:
    """Nodes on which all placement groups of the job have room, those of verl's own pools included.

    Args:
        placement: The placement.
        nodes: Free resources of each live node.
        bundle_cpus: CPUs of each bundle.
        reward_workers: `JobFacts.reward_workers`. Their processes start before rollout's own pool, and after all others.

    Returns:
        `{TRAINER, or the role of a pool of verl's own: address of each group's node}`, those of the trainer in verl's order;
        empty addresses where any node will do or nothing is proven; None where there is no room.
    """
    groups = _groups(placement, bundle_cpus)
    if len(groups) == 1:
        return {TRAINER: (groups[0].node,)}
    names = _find(groups, _beside_scores(nodes, reward_workers) if "rollout" in placement.reserved else nodes)
    if names is None:
        return None
    first = placement.topology.num_nodes
    found = {TRAINER: tuple(sorted(names[:first]))}
    for role, sizes in placement.reserved.items():
        found[role] = tuple(names[first : first + len(sizes)])
        first += len(sizes)
    return found


def _hold(placement: Placement, count: int, nodes: Sequence[NodeResources]) -> bool:
    """Whether the trainer's nodes have as many CPUs for each device, so that only TransferQueue or other pools lack some."""
    return _packs([group for group in _groups(placement, count) if group.trainer], nodes)


def storage_units_that_fit(
    placement: Placement, facts: JobFacts, nodes: Sequence[NodeResources], bundle_cpus: int
) -> int:
    """TransferQueue storage units for which CPUs are left beside the bundles, at least one, at most what was asked."""
    spare = int(sum(n.num_cpus for n in nodes)) - _bundle_cpus(placement, bundle_cpus) - facts.reward_cpus - 1
    return max(1, min(facts.transfer_queue_units - 1, spare))


def _groups(placement: Placement, cpus: int | None) -> list[_Group]:
    """The placement groups of a job, those of verl's own pools included.

    Args:
        placement: The placement.
        cpus: CPUs of each bundle; None: leave CPUs out of account.
    """
    topology = placement.topology
    names = topology.node_names if len(topology.node_names) == topology.num_nodes else ("",) * topology.num_nodes
    count = cpus or 0
    groups = [_Group(devices=topology.devices_per_node, cpus=count, trainer=True, node=name) for name in names]
    for role, sizes in placement.reserved.items():
        own = _STANDALONE_CPUS if role == "rollout" and cpus is not None else count
        groups += [_Group(devices=size, cpus=own) for size in sizes]
    return groups


def _bundle_cpus(placement: Placement, count: int) -> int:
    """CPUs that all bundles of the job hold.

    Args:
        placement: The placement.
        count: CPUs of each bundle of the trainer's pools.
    """
    return int(sum(group.devices * group.cpus for group in _groups(placement, count)))


def _packs(groups: Sequence[_Group], nodes: Sequence[NodeResources]) -> bool:
    """Whether there may be a way to put each group on one node. False is proven."""
    return _find(groups, nodes) is not None


def _find(groups: Sequence[_Group], nodes: Sequence[NodeResources]) -> list[str] | None:
    """The node of each group, only of those that a map names where nothing is proven. None, that there is no way, is proven."""
    if sum(group.devices for group in groups) > sum(node.num_devices for node in nodes):
        return None
    unproven = [group.node for group in groups]
    if len(groups) > _MAX_GROUPS:
        return unproven

    def tightest_first(index: int) -> tuple[bool, bool, int, float]:
        group = groups[index]
        return not group.node, not group.trainer, -group.devices, -group.cpus

    order = sorted(range(len(groups)), key=tightest_first)
    rooms = tuple(_Room(name=node.name, devices=node.num_devices, cpus=node.num_cpus) for node in nodes)
    found = _search([groups[index] for index in order], rooms, [_MAX_STEPS])
    if found is None or len(found) < len(groups):
        return None if found is None else unproven
    names = dict(zip(order, found, strict=True))
    return [names[index] for index in range(len(groups))]


def _search(groups: Sequence[_Group], rooms: tuple[_Room, ...], steps: list[int]) -> tuple[str, ...] | None:
    """The node of each group, of the first ones only where the search gives up; None: there is no way."""
    steps[0] -= 1
    if not groups or steps[0] < 0:
        return ()
    first = groups[0]
    if not first.trainer and all(group == first for group in groups):
        return _deal(first, len(groups), rooms)
    rooms = tuple(sorted(rooms, key=lambda room: (room.devices, room.cpus)))  # the tightest first
    tried = set()
    for index, room in enumerate(rooms):
        alike = replace(room, name="")
        if room.holds(first) and alike not in tried:
            tried.add(alike)
            left = (*rooms[:index], room.without(first), *rooms[index + 1 :])
            rest = _search(groups[1:], left, steps)
            if rest is not None:
                return (room.name, *rest)
    return None


def _deal(group: _Group, count: int, rooms: Sequence[_Room]) -> tuple[str, ...] | None:
    """As `_search`, for a number of groups that are all alike."""
    names: list[str] = []
    for room in rooms:
        by_cpus = int(room.cpus // (group.devices * group.cpus)) if group.cpus else room.devices
        names += [room.name] * min(by_cpus, room.devices // group.devices)
    return tuple(names[:count]) if len(names) >= count else None


def _check_devices(placement: Placement, nodes: Sequence[NodeResources]) -> None:
    topology = placement.topology
    big_enough = [n for n in nodes if n.num_devices >= topology.devices_per_node]
    if len(big_enough) < topology.num_nodes:
        raise refusal(
            "devices of the cluster",
            f"{topology.num_nodes} nodes with {topology.devices_per_node} free devices each "
            "(trainer.nnodes x trainer.n_gpus_per_node)",
            f"free devices per node: {_free_devices(nodes)}",
            _proposal([n.num_devices for n in nodes], topology.num_devices),
        )
    if not _packs(_groups(placement, None), nodes):
        own = ", ".join(f"{role} {_sizes(sizes)}" for role, sizes in placement.reserved.items())
        raise refusal(
            "devices of the cluster",
            f"{_sizes((topology.devices_per_node,) * topology.num_nodes)} for the trainer, and for pools of their own: {own}; "
            "each group of devices on one node",
            f"free devices per node: {_free_devices(nodes)}",
            "lower trainer.n_gpus_per_node, or place those roles on the trainer's devices with sharding.roles.<role>.devices",
        )


def _node_lacks_cpus(
    placement: Placement, nodes: Sequence[NodeResources], queue: int, joins_ray: bool, fewer: str
) -> PlacementError:
    """Names the first of the nodes with most CPUs, or of those that the maps name, that can't hold the trainer's bundles."""
    topology, count = placement.topology, placement.colocate_count
    needed = topology.devices_per_node * count
    hosts = [node for node in nodes if node.num_devices >= topology.devices_per_node]
    hosts.sort(key=lambda node: (node.name not in topology.node_names, -node.num_cpus))
    lacking = next(node for node in hosts[: topology.num_nodes] if node.num_cpus < needed)
    enough = (_bundle_cpus(placement, count) if len(nodes) == 1 else needed) + queue
    return refusal(
        f"CPUs of node {lacking.name}",
        f"{topology.devices_per_node} devices x {count} worker processes = {needed} CPUs",
        f"{lacking.num_cpus:g} CPUs free; verl would wait for ever in pg.ready()",
        f"{_with_cpus(enough, lacking, joins_ray)} (at least {needed} free){fewer}",
    )


def _cluster_lacks_cpus(
    placement: Placement, facts: JobFacts, nodes: Sequence[NodeResources], count: int, joins_ray: bool, fewer: str
) -> PlacementError:
    queue = min(facts.transfer_queue_units, TRANSFER_QUEUE_MIN)
    bundles, free = _bundle_cpus(placement, count), sum(node.num_cpus for node in nodes)
    total = bundles + queue + facts.reward_cpus
    elsewhere = ", ".join(f"{role} {_sizes(sizes)}" for role, sizes in placement.reserved.items())
    each = ", ".join(f"{node.name}: {node.num_cpus:g}" for node in nodes)
    if len(nodes) == 1:
        remedy = _with_cpus(total, nodes[0], joins_ray)
    elif free < total:
        remedy = f"start Ray on its nodes with {total - free:g} more CPUs in all (ray start --num-cpus=...)"
    else:
        remedy = "start Ray with more CPUs (ray start --num-cpus=...) on the nodes with these devices"
    scores = ""
    if facts.reward_cpus:
        workers = f"reward.num_workers={facts.reward_workers}"
        scores = f" and {facts.reward_cpus} for reward.reward_manager.name=remote, which starts {workers} x as many"
        less = (replace(facts, reward_workers=workers) for workers in range(facts.reward_workers - 1, 0, -1))
        enough = next((other for other in less if _fits(placement, other, nodes, count)), None)
        fewer += f", or reward.num_workers={enough.reward_workers}" if enough else ""
    return refusal(
        "CPUs of the cluster",
        f"{total} CPUs: {count} for each device's worker processes and {queue} for TransferQueue{scores}"
        + (f", on one node for each group of {elsewhere}" if elsewhere else ""),
        f"{free:g} CPUs free{f' ({each})' if len(nodes) > 1 else ''}; verl would wait for ever",
        f"{remedy}{fewer or ', or fewer devices'}",
    )


def _with_cpus(free: int, node: NodeResources, joins_ray: bool) -> str:
    """What gives a node as many free CPUs. `ray.init` refuses `num_cpus` where it joins a cluster (ray/_private/worker.py)."""
    if joins_ray:
        return f"start Ray on {node.name} with ray start --num-cpus={free + round(node.cpus_taken)}"
    return f"ray_kwargs.ray_init.num_cpus={free}"


def _by_cpus(node: NodeResources) -> float:
    return -node.num_cpus


def _free_devices(nodes: Sequence[NodeResources]) -> str:
    return ", ".join(f"{n.name}: {n.num_devices}" for n in nodes) or "no nodes"


def _sizes(groups: Sequence[int]) -> str:
    """Sizes of groups, as "2 x 4" or "3 + 4"."""
    if len(groups) > 1 and len(set(groups)) == 1:
        return f"{len(groups)} x {groups[0]}"
    return " + ".join(map(str, groups))


def _proposal(sizes: Sequence[int], wanted: int) -> str:
    """The largest even layouts that the nodes allow, none larger than what was asked for, as overrides."""
    sizes = sorted((size for size in sizes if size > 0), reverse=True)
    if not sizes:
        return "start Ray where the GPUs are; on CPUs give it logical ones: ray start --head --num-gpus=<devices>"
    layouts = {(count, min(sizes[count - 1], wanted // count)) for count in range(1, min(len(sizes), wanted) + 1)}
    best = sorted(layouts, key=lambda layout: (-(layout[0] * layout[1]), layout[0]))[:2]
    return " or ".join(f"trainer.nnodes={n} trainer.n_gpus_per_node={d} ({n * d} devices)" for n, d in best)
