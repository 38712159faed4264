"""Checks of a placement before anything is started: batch sizes, rollout shards, nodes, CPUs. Pure.

Each check raises a `PlacementError` that ends in what to type. The cluster checks take what Ray reports as plain numbers,
so that they run the same in the driver, in `verl-sharding plan` and in tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_ext_sharding.placement.batches import check_batches, refusal, round_up
from verl_ext_sharding.placement.bundles import Placement
from verl_ext_sharding.placement.devices import format_devices
from verl_ext_sharding.placement.job import EngineFacts, JobFacts, ServerFacts

TRANSFER_QUEUE_MIN = 2
"""TransferQueue needs its controller and one storage unit; each holds a CPU."""

_STANDALONE_CPUS = 2
"""CPUs of a bundle of rollout's own pool (`RolloutReplica.init_standalone`, workers/rollout/replica.py)."""


@dataclass(kw_only=True, frozen=True)
class NodeResources:
    """What Ray says that a node has free.

    Args:
        name: Address of the node.
        num_devices: GPUs.
        num_cpus: CPUs.
    """

    name: str
    num_devices: int
    num_cpus: float


def check_job(placement: Placement, facts: JobFacts) -> None:
    """Runs every check that needs no cluster.

    Raises:
        PlacementError: The first thing that verl could not run as asked.
    """
    check_layout(placement, facts)
    check_batches(placement, facts)
    check_servers(placement, facts)


def check_layout(placement: Placement, facts: JobFacts) -> None:
    """Model parallelism must divide the role's devices, and nodes must be filled evenly where verl assumes it."""
    for role, engine in facts.engines.items():
        devices = placement.devices_of(role)
        _check_one_process(role, engine, placement)
        if devices and placement.processes_of(role) % engine.model_parallel_size:
            raise refusal(
                f"devices of {role}",
                f"a multiple of {engine.model_parallel_size}, the ranks that one sample of {engine.strategy} takes",
                f"{len(devices)} devices {format_devices(devices)}",
                f"give {role} {round_up(len(devices), engine.model_parallel_size)} devices, or lower its model-parallel size",
            )
    actor = placement.devices_of("actor")
    replica = facts.rollout.ranks_per_replica
    if not placement.is_even(actor) and replica > 1 and facts.hybrid_rollout:
        counts = [len(numbers) for numbers in placement.per_node(actor)]
        raise refusal(
            "sharding.roles.actor.devices",
            f"the same number on each node, since a rollout server spans {replica} ranks",
            f"{counts} devices per node",
            "use as many devices on each node, or actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        )


def _check_one_process(role: str, engine: EngineFacts, placement: Placement) -> None:
    """A model spread by layers over the devices of one process is verl's FSDP engine with one rank."""
    pool = placement.pool_of(role)
    if pool is None or pool.layout != "device_map":
        return
    subject = f"sharding.roles.{role}.layout=device_map"
    if not engine.strategy.startswith("fsdp"):
        raise refusal(subject, "strategy fsdp or fsdp2", engine.strategy, f"sharding.roles.{role}.layout=fsdp")
    if engine.model_parallel_size > 1:
        key = "critic.fsdp" if role == "critic" else f"actor_rollout_ref.{role}.fsdp_config"
        raise refusal(
            subject,
            "one rank: a process holds the whole model, and nothing is left to share its sequences with",
            f"ulysses_sequence_parallel_size={engine.model_parallel_size}",
            f"{key}.ulysses_sequence_parallel_size=1, or sharding.roles.{role}.layout=fsdp",
        )


def check_servers(placement: Placement, facts: JobFacts) -> None:
    """One server's ranks must divide the devices that its role has, and not straddle nodes unevenly."""
    keys = {
        "rollout": "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "reward": "reward.reward_model.rollout.tensor_model_parallel_size",
        "teacher": "distillation.teacher_models.<name>.inference.tensor_model_parallel_size",
    }
    for role, server in facts.servers.items():
        devices = placement.devices_of(role)
        if not devices or (role == "rollout" and not facts.hybrid_rollout):
            continue
        per_node = [len(numbers) for numbers in placement.per_node(devices)]
        size = server.ranks_per_replica
        pool = placement.pool_of("actor")
        if role == "rollout" and pool is not None and pool.layout == "device_map" and size > 1:
            raise refusal(
                keys[role],
                "1: verl serves rollout in the actor's processes, and with sharding.roles.actor.layout=device_map there is "
                f"one, on device {devices[0]}",
                str(size),
                f"{keys[role]}=1, or sharding.roles.actor.layout=fsdp",
            )
        if not _servers_fit(size, per_node):
            raise refusal(
                keys[role],
                f"servers that fill the {len(devices)} devices {format_devices(devices)} of {role} ({per_node} per node), "
                "each within a node or on whole nodes of equal size",
                f"{size} ranks for one {server.name} server",
                f"{_smaller_server(keys[role], server, per_node)}, or give {role} {round_up(len(devices), size)} devices",
            )


def _servers_fit(size: int, per_node: Sequence[int]) -> bool:
    """Whether servers of a size fill the devices, none of them across the border of a node that it does not fill.

    verl cuts a role's ranks into servers in order, and gives each `min(devices per node, size)` ranks on a node
    (`RolloutReplica`, workers/rollout/replica.py).
    """
    within_nodes = all(count % size == 0 for count in per_node)
    whole_nodes = len(set(per_node)) == 1 and size % per_node[0] == 0 and sum(per_node) % size == 0
    return within_nodes or whole_nodes


def _smaller_server(key: str, server: ServerFacts, per_node: Sequence[int]) -> str:
    """The largest tensor-parallel size, up to the present one, by which the servers fit."""
    tensor = server.tensor_parallel_size or server.ranks_per_replica
    rest = server.ranks_per_replica // tensor
    fitting = [size for size in range(tensor, 0, -1) if _servers_fit(size * rest, per_node)]
    return (
        f"{key}={fitting[0]}"
        if fitting
        else f"lower its data_parallel_size x pipeline_model_parallel_size (now {rest})"
    )


def check_cluster(placement: Placement, facts: JobFacts, nodes: Sequence[NodeResources]) -> int:
    """Compares what the job reserves with what Ray's nodes have free, so that nothing waits for ever.

    Args:
        placement: The placement.
        facts: The job.
        nodes: Free resources of each live node.

    Returns:
        CPUs to reserve with each device: `placement.colocate_count`, or fewer where TransferQueue would get none otherwise.

    Raises:
        PlacementError: Too few devices, nodes of unequal size, or too few CPUs.
    """
    _check_devices(placement, nodes)
    per_node = placement.topology.devices_per_node
    hosts = sorted((n for n in nodes if n.num_devices >= per_node), key=lambda n: -n.num_cpus)
    hosts = hosts[: placement.topology.num_nodes]
    wanted = placement.colocate_count
    queue = min(facts.transfer_queue_units, TRANSFER_QUEUE_MIN)
    enough = [
        count
        for count in range(wanted, placement.most_processes - 1, -1)
        if all(node.num_cpus >= per_node * count for node in hosts)
        and sum(n.num_cpus for n in nodes) >= _bundle_cpus(placement, count) + queue
    ]
    fewer = f", or fewer workers per device: sharding.placement.max_colocate_count={enough[0]}" if enough else ""
    needed = per_node * wanted
    for node in hosts:
        if node.num_cpus < needed:
            raise refusal(
                f"CPUs of node {node.name}",
                f"{per_node} devices x {wanted} worker processes = {needed} CPUs",
                f"{node.num_cpus:g} CPUs free; verl would wait for ever in pg.ready()",
                f"ray_kwargs.ray_init.num_cpus={needed + queue} (at least {needed}){fewer}",
            )
    if not enough:
        total = _bundle_cpus(placement, placement.most_processes) + queue
        raise refusal(
            "CPUs of the cluster",
            f"{total} CPUs: {placement.most_processes} for each device's worker processes and {queue} for TransferQueue",
            f"{sum(n.num_cpus for n in nodes):g} CPUs free; verl would wait for ever",
            f"ray_kwargs.ray_init.num_cpus={total}, or fewer devices",
        )
    return enough[0]


def _bundle_cpus(placement: Placement, count: int) -> int:
    """CPUs that all bundles of the job hold, those of pools that verl reserves by itself included.

    Args:
        placement: The placement.
        count: CPUs of each bundle.
    """
    own = sum(
        devices * (_STANDALONE_CPUS if role == "rollout" else count) for role, devices in placement.reserved.items()
    )
    return placement.topology.num_devices * count + own


def storage_units_that_fit(
    placement: Placement, facts: JobFacts, nodes: Sequence[NodeResources], bundle_cpus: int
) -> int:
    """TransferQueue storage units for which CPUs are left beside the bundles, at least one, at most what was asked."""
    spare = int(sum(n.num_cpus for n in nodes)) - _bundle_cpus(placement, bundle_cpus) - 1
    return max(1, min(facts.transfer_queue_units - 1, spare))


def _check_devices(placement: Placement, nodes: Sequence[NodeResources]) -> None:
    topology = placement.topology
    big_enough = [n for n in nodes if n.num_devices >= topology.devices_per_node]
    elsewhere = sum(placement.reserved.values())
    total = sum(n.num_devices for n in nodes)
    found = ", ".join(f"{n.name}: {n.num_devices}" for n in nodes) or "no nodes"
    if len(big_enough) < topology.num_nodes:
        raise refusal(
            "devices of the cluster",
            f"{topology.num_nodes} nodes with {topology.devices_per_node} free devices each "
            "(trainer.nnodes x trainer.n_gpus_per_node)",
            f"free devices per node: {found}",
            _proposal([n.num_devices for n in nodes], topology.num_devices),
        )
    if total < topology.num_devices + elsewhere:
        own = ", ".join(f"{role} {count}" for role, count in placement.reserved.items())
        raise refusal(
            "devices of the cluster",
            f"{topology.num_devices} for the trainer and {elsewhere} for pools of their own ({own})",
            f"{total} free ({found})",
            "lower trainer.n_gpus_per_node, or place those roles on the trainer's devices with sharding.roles.<role>.devices",
        )


def _proposal(sizes: Sequence[int], wanted: int) -> str:
    """The largest even layouts that the nodes allow, none larger than what was asked for, as overrides."""
    sizes = sorted((size for size in sizes if size > 0), reverse=True)
    if not sizes:
        return "start Ray where the GPUs are; on CPUs give it logical ones: ray start --head --num-gpus=<devices>"
    layouts = {(count, min(sizes[count - 1], wanted // count)) for count in range(1, min(len(sizes), wanted) + 1)}
    best = sorted(layouts, key=lambda layout: (-(layout[0] * layout[1]), layout[0]))[:2]
    return " or ".join(f"trainer.nnodes={n} trainer.n_gpus_per_node={d} ({n * d} devices)" for n, d in best)
