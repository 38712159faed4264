"""The placement as a table: rows and notes, no rendering."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from verl_ext_sharding.placement.batches import batches_suit
from verl_ext_sharding.placement.bundles import Placement, Pool
from verl_ext_sharding.placement.devices import count_devices, format_devices
from verl_ext_sharding.placement.job import JobFacts

_DETACHED = {"ActorRolloutRefWorker": "DetachActorWorker"}
"""What separate_async puts in the place of a worker class (trainer/ppo/v1/trainer_separate_async.py)."""


@dataclass(kw_only=True, frozen=True)
class RoleRow:
    """One role.

    Args:
        role: Its name.
        worker_class: verl's worker class, or the server's.
        engine: Training engine or inference backend.
        devices: Device numbers; empty for a pool that verl reserves elsewhere.
        ranks: How its processes divide the devices.
        nodes: Indices of the nodes.
        shares: Other roles on at least one of its devices, with those devices.
    """

    role: str
    worker_class: str
    engine: str
    devices: tuple[int, ...]
    ranks: str
    nodes: tuple[int, ...]
    shares: str


@dataclass(kw_only=True, frozen=True)
class PlacementTable:
    """Rows in the order of the pools, and what the user should know about them."""

    rows: tuple[RoleRow, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def placement_table(placement: Placement, facts: JobFacts) -> PlacementTable:
    """Builds the table of a placement."""
    rows = [_row(role, pool, placement, facts) for pool in placement.pools for role in pool.roles]
    actor = placement.pool_of("actor")
    if actor is not None and facts.hybrid_rollout:
        rows.insert(1, _row("rollout", actor, placement, facts))
    for role, groups in placement.reserved.items():
        rows.append(_reserved_row(role, groups, facts))
    return PlacementTable(rows=tuple(rows), notes=tuple(_notes(placement, facts)))


def _row(role: str, pool: Pool, placement: Placement, facts: JobFacts) -> RoleRow:
    devices = placement.devices_of(role)
    return RoleRow(
        role=role,
        worker_class=_worker_class(role, facts),
        engine=_engine(role, facts) if pool.layout == "fsdp" or role == "rollout" else pool.layout,
        devices=devices,
        ranks=_ranks(role, pool.num_processes, facts) + _spread(role, pool),
        nodes=tuple(dict.fromkeys(placement.topology.node_of(device) for device in devices)),
        shares=_shares(role, devices, placement, facts),
    )


def _reserved_row(role: str, groups: tuple[int, ...], facts: JobFacts) -> RoleRow:
    count, on_each = sum(groups), f" ({len(groups)} x {groups[0]})" if len(groups) > 1 else ""
    return RoleRow(
        role=role,
        worker_class=_worker_class(role, facts),
        engine=_engine(role, facts),
        devices=(),
        ranks=_ranks(role, count, facts),
        nodes=(),
        shares=f"none: verl reserves {count_devices(count)} of its own{on_each}",
    )


def _worker_class(role: str, facts: JobFacts) -> str:
    if role in facts.engines:
        worker = facts.engines[role].worker_class
        return _DETACHED.get(worker, worker) if facts.mode == "separate_async" else worker
    if role == "rollout":
        return "rollout server"
    server = facts.servers.get(role)
    ours = role == "reward" and server is not None and server.name == "hf"
    return "HFRewardServer" if ours else "CheckpointEngineWorker"


def _engine(role: str, facts: JobFacts) -> str:
    if role in facts.engines:
        return facts.engines[role].strategy
    server = facts.servers.get(role)
    return server.name if server else "n/a"


def _ranks(role: str, count: int, facts: JobFacts) -> str:
    if role in facts.engines:
        parallel = facts.engines[role].model_parallel_size
        return f"{count // parallel} dp" + (f" x {parallel} mp" if parallel > 1 else "")
    server = facts.servers[role]
    size = server.ranks_per_replica
    sizes = (size,) * (count // size) if server.replicas is None else server.replicas
    return ", ".join(
        f"{number} server{'s' if number != 1 else ''} x {size}"
        for size, number in (Counter(sizes) or {size: 0}).items()
    )


def _spread(role: str, pool: Pool) -> str:
    """How many devices one process has, where that is not one."""
    count = len(pool.devices)
    return f", layers over {count}" if pool.layout == "device_map" and role != "rollout" and count > 1 else ""


def _shares(role: str, devices: tuple[int, ...], placement: Placement, facts: JobFacts) -> str:
    others: dict[str, list[int]] = {}
    for pool in placement.pools:
        names = [*pool.roles, *(["rollout"] if "actor" in pool.roles and facts.hybrid_rollout else [])]
        for name in names:
            common = sorted(set(placement.devices_of(name)) & set(devices))
            if common and name != role:
                others[name] = common
    if not others:
        return "none"
    return ", ".join(
        name if len(common) == len(devices) else f"{name} {format_devices(common)}" for name, common in others.items()
    )


def _notes(placement: Placement, facts: JobFacts) -> Iterator[str]:
    topology = placement.topology
    rollout = placement.devices_of("rollout")
    if facts.hybrid_rollout and len(rollout) < topology.num_devices:
        yield (
            f"rollout uses {len(rollout)} of {topology.num_devices} devices {format_devices(rollout)}: "
            "it generates where the actor trains"
        )
    idle = [device for device in range(topology.num_devices) if device not in placement.used]
    if idle and placement.managed:
        yield f"no role uses device{'s' if len(idle) > 1 else ''} {format_devices(idle)}"
    yield from _own_pools(placement, facts)
    yield from _addresses(placement)
    yield from _reference(placement, facts)
    yield from _processes_per_device(placement)


def _own_pools(placement: Placement, facts: JobFacts) -> Iterator[str]:
    for role, groups in placement.reserved.items():
        left = facts.servers[role].own_devices - sum(groups)
        if left > 0:
            size = facts.servers[role].ranks_per_replica
            yield f"verl leaves {left} of the {left + sum(groups)} devices of {role}'s pool alone: a server takes {size}"


def _addresses(placement: Placement) -> Iterator[str]:
    names = placement.topology.node_names
    if not names:
        return
    numbers = ", ".join(f"{name} is node{index}" for index, name in enumerate(names))
    if len(names) < placement.topology.num_nodes:
        yield f"{numbers} here; which number a node has is known once Ray runs and says its other nodes' addresses"
    else:
        yield f"{numbers}: in the order of their addresses"


def _reference(placement: Placement, facts: JobFacts) -> Iterator[str]:
    pool = placement.pool_of("ref")
    if pool is None or "actor" not in pool.roles:
        return
    # verl's FSDP engines offload what never trains, whatever param_offload says; others have their own keys for it
    offloaded = facts.engines["ref"].strategy in ("fsdp", "fsdp2") and pool.layout == "fsdp"
    where = ": its weights stay in host memory and come to the device for each batch" if offloaded else ""
    free = placement.most_without("actor", partial(_reference_fits, placement, facts))
    way = f"; sharding.roles.ref.devices={format_devices(free)} moves it away" if free else ""
    yield f"ref shares the actor's processes (verl's default){where}{way}"


def _reference_fits(placement: Placement, facts: JobFacts, per_node: Sequence[int]) -> bool:
    experts = facts.engines["ref"].expert_ranks
    return sum(per_node) % experts == 0 and batches_suit("ref", placement, facts, per_node)


def _processes_per_device(placement: Placement) -> Iterator[str]:
    groups: dict[tuple[str, ...], list[int]] = {}
    for device in placement.used:
        pools = tuple("+".join(pool.roles) for pool in placement.pools if device in pool.devices)
        if len(pools) > 1:
            groups.setdefault(pools, []).append(device)
    for pools, devices in groups.items():
        yield (
            f"device{'s' if len(devices) > 1 else ''} {format_devices(devices)}: {len(pools)} processes ({', '.join(pools)}), "
            "with the memory of all of them"
        )
