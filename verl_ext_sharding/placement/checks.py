"""Checks of a placement before anything is started: model parallelism, layouts, batches, servers. Pure.

Each check raises a `PlacementError` that ends in what to type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from verl_ext_sharding.placement.batches import check_batches, refusal
from verl_ext_sharding.placement.bundles import Placement
from verl_ext_sharding.placement.devices import count_devices, format_devices
from verl_ext_sharding.placement.job import EXPERT_PARALLEL, MODEL_PARALLEL, EngineFacts, JobFacts
from verl_ext_sharding.placement.servers import check_servers, one_rank, rollout_fits


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
                f"{count_devices(len(devices))} {format_devices(devices)}",
                ", or ".join(_ways_to_divide(role, engine, placement, facts)),
            )
        _check_experts(role, engine, placement, facts)
    actor = placement.devices_of("actor")
    rollout = facts.rollout
    if not placement.is_even(actor) and rollout.ranks_per_replica > 1 and facts.hybrid_rollout:
        counts = [len(numbers) for numbers in placement.per_node(actor)]
        better = (
            None if rollout.name == "hf" else placement.nearest(actor, lambda counts: rollout_fits(rollout, counts))
        )
        raise refusal(
            "sharding.roles.actor.devices",
            f"the same number on each node, since a rollout server spans {rollout.ranks_per_replica} ranks",
            f"{counts} devices per node",
            (f"sharding.roles.actor.devices={format_devices(better)}, or " if better else "")
            + one_rank("rollout", rollout),
        )


def _check_experts(role: str, engine: EngineFacts, placement: Placement, facts: JobFacts) -> None:
    """Megatron, VeOmni and torchtitan cut all ranks into copies of the experts, too."""
    ranks, count = engine.expert_ranks, placement.processes_of(role)
    if not count or count % ranks == 0:
        return
    block = f"{_block(role)}.{engine.strategy}"
    key, rest = f"{block}.{EXPERT_PARALLEL[engine.strategy][0]}", ranks // engine.expert_parallel_size
    fitting = [parts for parts in range(engine.expert_parallel_size, 0, -1) if count % (parts * rest) == 0]
    fewer = f"{key}={fitting[0]}" if fitting else f"{key}=1 {block}.expert_tensor_parallel_size=null"
    better = _dividing(role, math.lcm(engine.model_parallel_size, ranks), placement, facts)
    raise refusal(
        key,
        f"parts of the experts whose copies fill the {count} ranks of {role}",
        f"{engine.expert_parallel_size}, so that one copy takes {ranks} ranks",
        fewer + (f", or sharding.roles.{role}.devices={format_devices(better)}" if better else ""),
    )


def _dividing(role: str, size: int, placement: Placement, facts: JobFacts) -> tuple[int, ...] | None:
    """Devices near the role's own whose number divides by a size, and which the actor's rollout servers fill."""
    serves = role == "actor" and facts.hybrid_rollout

    def fits(per_node: Sequence[int]) -> bool:
        return sum(per_node) % size == 0 and (not serves or rollout_fits(facts.rollout, per_node))

    return placement.nearest(placement.devices_of(role), fits)


def _block(role: str) -> str:
    return "critic" if role == "critic" else f"actor_rollout_ref.{role}"


def _ways_to_divide(role: str, engine: EngineFacts, placement: Placement, facts: JobFacts) -> list[str]:
    """Other devices that the role's model parallelism divides, and a smaller model parallelism."""
    size, devices = engine.model_parallel_size, placement.devices_of(role)
    better = _dividing(role, size, placement, facts)
    smaller = max(n for n in range(1, size) if len(devices) % n == 0)
    names = MODEL_PARALLEL.get(engine.strategy, ())
    if len(names) > 1:
        sizes = " x ".join(f"{_block(role)}.{engine.strategy}.{name}" for name in names)
        lower = f"a product of {smaller} of {sizes} (now {size})"
    else:
        lower = " ".join(f"{key}={smaller}" for key in engine.sequence_parallel_keys)
    return [
        *([f"sharding.roles.{role}.devices={format_devices(better)}"] if better else []),
        *([lower] if lower else []),
    ]


def _check_one_process(role: str, engine: EngineFacts, placement: Placement) -> None:
    """A model spread by layers over the devices of one process is verl's FSDP engine with one rank."""
    pool = placement.pool_of(role)
    if pool is None or pool.layout != "device_map":
        return
    subject = f"sharding.roles.{role}.layout=device_map"
    if not engine.strategy.startswith("fsdp"):
        raise refusal(subject, "strategy fsdp or fsdp2", engine.strategy, f"sharding.roles.{role}.layout=fsdp")
    if engine.model_parallel_size > 1:
        ways = [" ".join(f"{key}=1" for key in engine.sequence_parallel_keys), f"sharding.roles.{role}.layout=fsdp"]
        raise refusal(
            subject,
            "one rank: a process holds the whole model, and nothing is left to share its sequences with",
            f"ulysses_sequence_parallel_size={engine.model_parallel_size}",
            ", or ".join(way for way in ways if way),
        )
