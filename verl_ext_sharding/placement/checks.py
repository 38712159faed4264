"""Checks of a placement before anything is started: batch sizes, rollout shards, nodes, CPUs. Pure.

Each check raises a `PlacementError` that ends in what to type. The cluster checks take what Ray reports as plain numbers,
so that they run the same in the driver, in `verl-sharding plan` and in tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from verl_ext_sharding.errors import PlacementError
from verl_ext_sharding.placement.bundles import Placement
from verl_ext_sharding.placement.devices import format_devices
from verl_ext_sharding.placement.job import JobFacts

TRANSFER_QUEUE_MIN = 2
"""TransferQueue needs its controller and one storage unit; each holds a CPU."""


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
        if devices and len(devices) % engine.model_parallel_size:
            raise _error(
                f"devices of {role}",
                f"a multiple of {engine.model_parallel_size}, the ranks that one sample of {engine.strategy} takes",
                f"{len(devices)} devices {format_devices(devices)}",
                f"give {role} {_round_up(len(devices), engine.model_parallel_size)} devices, or lower its model-parallel size",
            )
    actor = placement.devices_of("actor")
    replica = facts.rollout.ranks_per_replica
    if not placement.is_even(actor) and replica > 1 and facts.hybrid_rollout:
        counts = [len(numbers) for numbers in placement.per_node(actor)]
        raise _error(
            "sharding.roles.actor.devices",
            f"the same number on each node, since a rollout server spans {replica} ranks",
            f"{counts} devices per node",
            "use as many devices on each node, or actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        )


def check_batches(placement: Placement, facts: JobFacts) -> None:
    """Samples of a step must divide by each role's data-parallel size.

    verl checks the actor only; for the others `KVBatchMeta.chunk` makes uneven chunks without a word and an assert
    fires minutes later (trainer/ppo/v1/trainer_base.py, workers/engine_workers.py).
    """
    prompts = facts.train_batch_size // max(1, facts.parameter_sync_step)
    samples = prompts * facts.rollout_n
    for role, engine in facts.engines.items():
        devices = placement.devices_of(role)
        if not devices:
            continue
        ranks = len(devices) // engine.model_parallel_size
        where = f"{role} has {ranks} data-parallel ranks on devices {format_devices(devices)}"
        if samples % ranks:
            better = _round_up(prompts, ranks // math.gcd(ranks, facts.rollout_n)) * max(1, facts.parameter_sync_step)
            raise _error(
                "data.train_batch_size",
                f"a number of samples that divides by {ranks}: {where}",
                f"{prompts} prompts x {facts.rollout_n} responses = {samples} samples in one update",
                f"data.train_batch_size={better}, or another number of devices for {role}",
            )
        mini = engine.mini_batch_size
        if mini is not None and (mini * facts.rollout_n) % ranks:
            key = "critic.ppo_mini_batch_size" if role == "critic" else "actor_rollout_ref.actor.ppo_mini_batch_size"
            better = _round_up(mini, ranks // math.gcd(ranks, facts.rollout_n))
            raise _error(
                key,
                f"a number of samples that divides by {ranks}: {where}",
                f"{mini} prompts x {facts.rollout_n} responses = {mini * facts.rollout_n} samples",
                f"{key}={better}, or another number of devices for {role}",
            )


def check_servers(placement: Placement, facts: JobFacts) -> None:
    """One server's ranks must divide the devices that its role has, and not straddle nodes unevenly."""
    keys = {
        "rollout": "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "reward": "reward.reward_model.rollout.tensor_model_parallel_size",
        "teacher": "distillation.teacher_models.<name>.inference.tensor_model_parallel_size",
    }
    servers = {
        "rollout": facts.rollout if facts.hybrid_rollout else None,
        "reward": facts.reward,
        "teacher": facts.teacher,
    }
    for role, server in servers.items():
        devices = placement.devices_of(role)
        if server is None or not devices:
            continue
        per_node = [len(numbers) for numbers in placement.per_node(devices)]
        size = server.ranks_per_replica
        divides = len(devices) % size == 0
        aligned = all(count % size == 0 or size % count == 0 for count in per_node)
        if not divides or not aligned:
            fits = max(s for s in range(1, min(per_node) + 1) if all(count % s == 0 for count in per_node))
            raise _error(
                keys[role],
                f"a size that divides the {len(devices)} devices {format_devices(devices)} of {role} ({per_node} per node)",
                f"{size} ranks for one {server.name} server",
                f"{keys[role]}={min(fits, size)}, or give {role} {_round_up(len(devices), size)} devices",
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
    needed = per_node * placement.colocate_count
    for node in hosts:
        if node.num_cpus < needed:
            fits = max(1, int(node.num_cpus // per_node))
            raise _error(
                f"CPUs of node {node.name}",
                f"{per_node} devices x {placement.colocate_count} worker processes = {needed} CPUs",
                f"{node.num_cpus:g} CPUs free; verl would wait for ever in pg.ready()",
                f"ray_kwargs.ray_init.num_cpus={max(needed, needed + TRANSFER_QUEUE_MIN)} (at least {needed}), or fewer "
                f"workers per device: sharding.placement.max_colocate_count={fits}",
            )
    spare = sum(n.num_cpus for n in nodes) - needed * placement.topology.num_nodes
    if spare >= min(facts.transfer_queue_units, TRANSFER_QUEUE_MIN):
        return placement.colocate_count
    return max(1, placement.colocate_count - 1)


def storage_units_that_fit(
    placement: Placement, facts: JobFacts, nodes: Sequence[NodeResources], bundle_cpus: int
) -> int:
    """TransferQueue storage units for which CPUs are left beside the bundles, at least one, at most what was asked."""
    total = sum(n.num_cpus for n in nodes)
    spare = int(total) - placement.topology.num_devices * bundle_cpus - 1
    return max(1, min(facts.transfer_queue_units - 1, spare))


def _check_devices(placement: Placement, nodes: Sequence[NodeResources]) -> None:
    topology = placement.topology
    big_enough = [n for n in nodes if n.num_devices >= topology.devices_per_node]
    elsewhere = sum(placement.reserved.values())
    total = sum(n.num_devices for n in nodes)
    found = ", ".join(f"{n.name}: {n.num_devices}" for n in nodes) or "no nodes"
    if len(big_enough) < topology.num_nodes:
        raise _error(
            "devices of the cluster",
            f"{topology.num_nodes} nodes with {topology.devices_per_node} free devices each "
            "(trainer.nnodes x trainer.n_gpus_per_node)",
            f"free devices per node: {found}",
            _proposal([n.num_devices for n in nodes], topology.num_devices),
        )
    if total < topology.num_devices + elsewhere:
        own = ", ".join(f"{role} {count}" for role, count in placement.reserved.items())
        raise _error(
            "devices of the cluster",
            f"{topology.num_devices} for the trainer and {elsewhere} for pools of their own ({own})",
            f"{total} free ({found})",
            "lower trainer.n_gpus_per_node, or place those roles on the trainer's devices with sharding.roles.<role>.devices",
        )


def _proposal(sizes: Sequence[int], wanted: int) -> str:
    """The largest even layouts that the nodes allow, as overrides."""
    sizes = sorted((s for s in sizes if s > 0), reverse=True)
    if not sizes:
        return "start Ray where the GPUs are, or set trainer.device=cpu for logical devices"
    layouts = {(count, sizes[count - 1]) for count in range(1, len(sizes) + 1)}
    best = sorted(layouts, key=lambda layout: (-(layout[0] * layout[1]), layout[0]))[:2]
    return " or ".join(f"trainer.nnodes={n} trainer.n_gpus_per_node={d} ({n * d} devices)" for n, d in best)


def _round_up(number: int, multiple: int) -> int:
    return max(multiple, math.ceil(number / multiple) * multiple)


def _error(subject: str, expected: str, found: str, remedy: str) -> PlacementError:
    return PlacementError(subject, expected=expected, found=found, consequence="the run does not start", remedy=remedy)
