"""From device lists per role to Ray bundles: one placement group per node, one bundle per device, a role = bundles.

Roles with the same list share worker processes, as they do in verl; lists that overlap or differ give separate processes,
which share a bundle where they meet. Pure: nothing here talks to Ray.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from verl_ext_sharding.errors import PlacementError
from verl_ext_sharding.placement.devices import Topology, format_devices, parse_devices
from verl_ext_sharding.placement.job import SERVED_ROLES, TRAINED_ROLES, JobFacts
from verl_ext_sharding.placement.roles import asked, check_exist, check_reference, check_rollout, named_nodes

Layout = Literal["fsdp", "device_map"]

DEFAULT_COLOCATE_COUNT = 3
"""verl's `ResourcePoolManager.max_colocate_count`: CPUs of a bundle, and so the worker processes that fit on a device."""


@dataclass(kw_only=True, frozen=True)
class Pool:
    """Worker processes that one or more roles share.

    Args:
        name: Its name.
        roles: The roles.
        devices: Device numbers of the job: ascending, with "device_map" as the user wrote them.
        layout: "fsdp": one process on each device. "device_map": one process that has all of them.
    """

    name: str
    roles: tuple[str, ...]
    devices: tuple[int, ...]
    layout: Layout = "fsdp"

    @property
    def num_processes(self) -> int:
        """Worker processes, and so ranks of each of its roles."""
        return 1 if self.layout == "device_map" else len(self.devices)

    @property
    def process_devices(self) -> tuple[int, ...]:
        """The device whose bundle each process sits in."""
        return self.devices[: self.num_processes]


@dataclass(kw_only=True, frozen=True)
class Placement:
    """Which role runs on which devices.

    Args:
        topology: The devices of the job.
        pools: Groups of worker processes, trained roles first.
        managed: False when neither devices nor another count of CPUs is asked for: verl then makes its own pool.
        colocate_count: CPUs of each bundle; a worker takes `1 / colocate_count` of the device in Ray's books.
        reserved: `{role: devices of each placement group}` of pools that verl itself reserves elsewhere in the cluster.
    """

    topology: Topology
    pools: tuple[Pool, ...]
    managed: bool
    colocate_count: int = DEFAULT_COLOCATE_COUNT
    reserved: Mapping[str, tuple[int, ...]]

    def pool_of(self, role: str) -> Pool | None:
        """The pool that a role runs in, or None when the job has no such role."""
        return next((pool for pool in self.pools if role in pool.roles), None)

    def devices_of(self, role: str) -> tuple[int, ...]:
        """Device numbers of a role, empty when the job has no such role.

        Rollout generates where the actor's processes are: with `layout=device_map` on the first of the actor's devices.
        """
        pool = self.pool_of("actor" if role == "rollout" else role)
        if pool is None:
            return ()
        return pool.process_devices if role == "rollout" else pool.devices

    def processes_of(self, role: str) -> int:
        """Worker processes of a role, 0 when the job has no such role."""
        pool = self.pool_of("actor" if role == "rollout" else role)
        return pool.num_processes if pool else 0

    @property
    def roles(self) -> tuple[str, ...]:
        """All placed roles, in the order of the pools."""
        return tuple(role for pool in self.pools for role in pool.roles)

    @property
    def used(self) -> tuple[int, ...]:
        """Devices that hold at least one role."""
        return tuple(sorted({device for pool in self.pools for device in pool.devices}))

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Devices of each placement group of the job; all of a group are on one node."""
        own = (size for sizes in self.reserved.values() for size in sizes)
        return (*[self.topology.devices_per_node] * self.topology.num_nodes, *own)

    @property
    def most_processes(self) -> int:
        """The most worker processes that meet on one device."""
        return _most_shared(self.pools)[1]

    def per_node(self, devices: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The devices of each node that has any, as the node's own numbers, in node order."""
        local = [
            tuple(self.topology.local(d) for d in devices if self.topology.node_of(d) == node)
            for node in range(self.topology.num_nodes)
        ]
        return [numbers for numbers in local if numbers]

    def is_even(self, devices: tuple[int, ...]) -> bool:
        """Whether each node that takes part has the same number of them."""
        return len({len(numbers) for numbers in self.per_node(devices)}) == 1

    def nearest(self, devices: tuple[int, ...], fits: Callable[[Sequence[int]], bool]) -> tuple[int, ...] | None:
        """The devices of the job that fit, as near as possible to given ones in number; of two as near, the larger.

        Args:
            devices: The present ones; kept as far as they go.
            fits: Whether numbers of devices per node do.
        """
        others = (device for device in range(self.topology.num_devices) if device not in devices)
        return self._nearest([*devices, *others], len(devices), fits)

    def most_without(self, role: str, fits: Callable[[Sequence[int]], bool]) -> tuple[int, ...] | None:
        """The most devices of the job that fit and that a role has none of.

        Args:
            role: The role.
            fits: Whether numbers of devices per node do.
        """
        taken = self.devices_of(role)
        free = [device for device in range(self.topology.num_devices) if device not in taken]
        return self._nearest(free, len(free), fits)

    def _nearest(
        self, order: Sequence[int], wanted: int, fits: Callable[[Sequence[int]], bool]
    ) -> tuple[int, ...] | None:
        for count in sorted(range(1, len(order) + 1), key=lambda count: (abs(count - wanted), -count)):
            even = [device for device in order if self.topology.local(device) < count // self.topology.num_nodes]
            for chosen in (order[:count], even):
                candidate = tuple(sorted(chosen))
                if len(candidate) == count and fits([len(numbers) for numbers in self.per_node(candidate)]):
                    return candidate
        return None

    def to_json(self) -> str:
        """JSON for Ray's runtime environment."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Placement:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        topology = fields.pop("topology")
        pools = fields.pop("pools")
        reserved = {role: tuple(groups) for role, groups in fields.pop("reserved").items()}
        return cls(
            reserved=reserved,
            topology=Topology(**topology | {"node_names": tuple(topology["node_names"])}),
            pools=tuple(Pool(**p | {"roles": tuple(p["roles"]), "devices": tuple(p["devices"])}) for p in pools),
            **fields,
        )


@dataclass(kw_only=True, frozen=True)
class Promise:
    """The device that a worker was promised; the worker compares it with what it got.

    Args:
        device: Device number of the job.
        node_id: Ray's id of the node.
        accelerator_id: Id of the accelerator on that node, as Ray spells it.
        devices: All devices of the process, the first of them `device`; empty for that one alone.
        visible: Ids of these accelerators, in the same order.
        visible_variable: Environment variable that names them, such as `CUDA_VISIBLE_DEVICES`.
    """

    device: int
    node_id: str
    accelerator_id: str
    devices: tuple[int, ...] = ()
    visible: tuple[str, ...] = ()
    visible_variable: str = ""

    def to_json(self) -> str:
        """JSON for the worker's environment."""
        return json.dumps(asdict(self), sort_keys=True)

    def verify(self, subject: str, *, node_id: str, accelerator_id: str) -> None:
        """Compares the place that a worker got with this one.

        Args:
            subject: Whose place it is, for the message.
            node_id: Ray's id of the node where it is.
            accelerator_id: Id of the accelerator that it has there.

        Raises:
            PlacementError: They differ.
        """
        if (node_id, accelerator_id) == (self.node_id, self.accelerator_id):
            return
        raise PlacementError(
            subject,
            expected=f"accelerator {self.accelerator_id} of node {self.node_id[:8]}",
            found=f"accelerator {accelerator_id} of node {node_id[:8]}",
            consequence="the run stops before a model loads there",
            remedy="check that nothing sets CUDA_VISIBLE_DEVICES per process, and that no other job uses these devices",
        )

    @classmethod
    def from_json(cls, text: str) -> Promise:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        return cls(**fields | {"devices": tuple(fields["devices"]), "visible": tuple(fields["visible"])})


def place(
    devices: Mapping[str, Any],
    facts: JobFacts,
    *,
    layouts: Mapping[str, Layout] | None = None,
    colocate_count: int | None = None,
    node_names: tuple[str, ...] = (),
) -> Placement:
    """Places each role of the job on its devices.

    A role without a list keeps verl's default: the reference goes with the actor, all others on every device of the job.

    Args:
        devices: `{role: device list as written, or None}`.
        facts: The job.
        layouts: `{role: layout}` of trained roles whose layout is not "fsdp".
        colocate_count: `sharding.placement.max_colocate_count`.
        node_names: Addresses of the job's nodes in verl's order, once Ray runs. Before, a map's own addresses count in
            that order, from node 0 on.

    Raises:
        PlacementError: A list is unreadable, names a device that doesn't exist, or belongs to a role that the job has not,
            or the devices of one process lie on several nodes.
    """
    topology = Topology(
        num_nodes=facts.num_nodes,
        devices_per_node=facts.devices_per_node,
        node_names=node_names or named_nodes(devices, facts),
    )
    layouts = dict(layouts or {})
    parsed = {}
    for role, spec, counts in asked(devices, facts):
        numbers = parse_devices(spec, topology, key=f"sharding.roles.{role}.devices")  # a wrong one is wrong in any job
        if counts:
            parsed[role] = _ordered(role, numbers, layouts)
    check_exist(parsed, facts)
    everything = tuple(range(topology.num_devices))
    actor = parsed.get("actor", everything)
    check_reference(parsed, actor, facts)
    check_rollout(parsed, actor, facts)

    chosen: dict[str, tuple[int, ...]] = {"actor": actor}
    if "ref" in facts.engines and not facts.ref_in_actor:
        chosen["ref"] = parsed.get("ref", actor)
    if "critic" in facts.engines:
        chosen["critic"] = parsed.get("critic", everything)
    if "ref" in chosen and chosen["ref"] == actor and "ref" not in parsed:
        layouts.setdefault("ref", layouts.get("actor", "fsdp"))  # verl evaluates it in the actor's process
    pools = _group(chosen, layouts)
    for pool in pools:
        _check_one_node(pool, topology)
    for role in SERVED_ROLES:
        if role in parsed or (role == "reward" and facts.reward is not None and facts.reward.own_nodes is None):
            pools.append(Pool(name=f"{role}_pool", roles=(role,), devices=parsed.get(role, everything)))
    count = _colocate_count(pools, colocate_count)
    return Placement(
        topology=topology,
        pools=tuple(pools),
        managed=bool(parsed) or count != DEFAULT_COLOCATE_COUNT or any(pool.layout != "fsdp" for pool in pools),
        colocate_count=count,
        reserved=_reserved(parsed, facts),
    )


def _ordered(role: str, numbers: tuple[int, ...], layouts: Mapping[str, Layout]) -> tuple[int, ...]:
    """Ranks are numbered as devices are; the places of a device map are the list's as it is written."""
    return numbers if layouts.get(role) == "device_map" else tuple(sorted(numbers))


def _group(chosen: Mapping[str, tuple[int, ...]], layouts: Mapping[str, Layout]) -> list[Pool]:
    """Roles with the same devices and layout share a pool, named after its roles."""
    alike: dict[tuple[tuple[int, ...], Layout], list[str]] = {}
    for role in TRAINED_ROLES:
        if role in chosen:
            alike.setdefault((chosen[role], layouts.get(role, "fsdp")), []).append(role)
    return [
        Pool(name="_".join(roles) + "_pool", roles=tuple(roles), devices=devices, layout=layout)
        for (devices, layout), roles in alike.items()
    ]


def _check_one_node(pool: Pool, topology: Topology) -> None:
    nodes = sorted({topology.node_of(device) for device in pool.devices})
    if pool.layout != "device_map" or len(nodes) == 1:
        return
    role = pool.roles[0]
    first = [device for device in pool.devices if topology.node_of(device) == nodes[0]]
    raise PlacementError(
        f"sharding.roles.{role}.layout=device_map",
        expected="devices of one node, since one process holds the whole model",
        found=f"devices {format_devices(pool.devices)} on {len(nodes)} nodes",
        consequence="the run does not start",
        remedy=f"sharding.roles.{role}.devices={format_devices(first)}, or sharding.roles.{role}.layout=fsdp",
    )


def _most_shared(pools: Sequence[Pool]) -> tuple[int, int]:
    """The device that most pools share, and how many do."""
    sharing = Counter(device for pool in pools for device in pool.devices)
    return max(sharing.items(), key=lambda item: item[1])


def _colocate_count(pools: list[Pool], asked: int | None) -> int:
    device, most = _most_shared(pools)
    if asked is not None and asked < most:
        raise PlacementError(
            "sharding.placement.max_colocate_count",
            expected=f"at least {most}: device {device} is shared by the processes of {most} groups of roles",
            found=str(asked),
            consequence="the run does not start",
            remedy=f"sharding.placement.max_colocate_count={most}",
        )
    return asked or max(DEFAULT_COLOCATE_COUNT, most)


def _reserved(parsed: Mapping[str, Any], facts: JobFacts) -> dict[str, tuple[int, ...]]:
    """Placement groups of verl's own pools: one for each node of a pool, and for rollout one for each node of a server.

    From `RolloutReplica.init_standalone` (workers/rollout/replica.py); what is left of rollout's devices stays free.
    """
    groups = {}
    for role, server in facts.servers.items():
        own = server.own_nodes
        if not own or role in parsed:
            continue
        size = server.ranks_per_replica
        part = min(own[0], size)
        groups[role] = own if role != "rollout" else (part,) * (sum(own) // size * (size // part))
    return groups
