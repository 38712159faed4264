"""Checks of inference servers: whether those of rollout, reward model and teacher fill the devices that they get. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from verl_ext_sharding.errors import PlacementError
from verl_ext_sharding.placement.batches import refusal
from verl_ext_sharding.placement.bundles import Placement
from verl_ext_sharding.placement.devices import format_devices
from verl_ext_sharding.placement.job import JobFacts, ServerFacts

_SIZES = {
    "rollout": "actor_rollout_ref.rollout",
    "reward": "reward.reward_model.rollout",
    "teacher": "distillation.teacher_models.teacher_model.inference",
}
"""verl's block with the parallel sizes of each role's servers."""

_POOLS = {"rollout": "actor_rollout_ref.rollout", "reward": "reward.reward_model", "teacher": "distillation"}
"""verl's block with `nnodes` and `n_gpus_per_node` of each role's own pool."""


def check_servers(placement: Placement, facts: JobFacts) -> None:
    """Servers must fill the devices that their role has, those of verl's own pools too, and not straddle nodes unevenly.

    Raises:
        PlacementError: The first role whose servers don't fit.
    """
    for role, server in facts.servers.items():
        devices = placement.devices_of(role)
        if devices and (role != "rollout" or facts.hybrid_rollout):
            _check_placed(role, server, placement)
        if server.own_nodes is not None and (role == "rollout" or not devices):
            _check_own(role, server)


def _check_placed(role: str, server: ServerFacts, placement: Placement) -> None:
    """Servers on devices of the trainer's."""
    devices, key = placement.devices_of(role), _key(role, server)
    per_node = [len(numbers) for numbers in placement.per_node(devices)]
    size = server.ranks_per_replica
    pool = placement.pool_of("actor")
    if role == "rollout" and pool is not None and pool.layout == "device_map" and size > 1:
        raise refusal(
            key,
            "1: verl serves rollout in the actor's processes, and with sharding.roles.actor.layout=device_map there is "
            f"one, on device {devices[0]}",
            str(size),
            f"{key}=1, or sharding.roles.actor.layout=fsdp",
        )
    where = f"the {len(devices)} devices {format_devices(devices)} of {role} ({per_node} per node)"
    if server.replicas is not None:
        total = sum(server.replicas)
        better = placement.nearest(devices, lambda counts: sum(counts) == total)
        more = f"sharding.roles.{role}.devices={format_devices(better)}, or " if better else ""
        _check_replicas(server.replicas, per_node, where, more)
    elif not _fit(server, size, per_node):
        better = placement.nearest(devices, lambda counts: _fit(server, size, counts))
        owner = "actor" if role == "rollout" else role  # rollout follows the actor
        more = f", or sharding.roles.{owner}.devices={format_devices(better)}" if better else ""
        raise _not_filled(key, server, where, f"{_smaller_server(key, server, per_node)}{more}")
    elif role == "rollout" and server.own_nodes:
        _check_parts(server, per_node, where)


def _check_parts(server: ServerFacts, per_node: Sequence[int], where: str) -> None:
    """In separate_async verl cuts the actor's servers into nodes by the key of rollout's own pool (llm_server.py)."""
    assert server.own_nodes
    size, key = server.ranks_per_replica, f"{_POOLS['rollout']}.n_gpus_per_node"
    part = min(server.own_nodes[0], size)
    if size % part == 0 and any(count % part for count in per_node):
        nodes = -(-max(sum(server.own_nodes), size) // per_node[0])
        raise refusal(
            key,
            f"{per_node[0]}, or a number that divides it: a server of {size} ranks spans nodes of {where}",
            str(server.own_nodes[0]),
            f"{key}={per_node[0]} {_POOLS['rollout']}.nnodes={nodes}",
        )


def _check_own(role: str, server: ServerFacts) -> None:
    """Servers on a pool that verl reserves for them."""
    own, size, block, key = server.own_nodes or (), server.ranks_per_replica, _POOLS[role], _key(role, server)
    if not own:
        raise _no_devices(role, sum(server.replicas or ()) or size)
    where = f"the {sum(own)} devices of {block}.nnodes={len(own)} x {block}.n_gpus_per_node={own[0]}"
    if server.replicas is not None:
        more = f"{block}.nnodes=1 {block}.n_gpus_per_node={sum(server.replicas)}, or " if server.replicas else ""
        _check_replicas(server.replicas, own, where, more)
    elif role == "rollout":  # verl makes as many servers as fit and leaves the rest of the pool alone
        part = min(own[0], size)
        if sum(own) < size or size % part:
            fitting = [n for n in range(size, 0, -1) if sum(own) >= n and n % min(own[0], n) == 0]
            raise _not_filled(
                key, server, where, f"{_smaller(key, server, fitting)}, or {block}.n_gpus_per_node={size}"
            )
    elif not servers_fit(size, own):
        remedy = f"{_smaller_server(key, server, own)}, or {block}.n_gpus_per_node={-(-own[0] // size) * size}"
        raise _not_filled(key, server, where, remedy)


def _check_replicas(replicas: Sequence[int], per_node: Sequence[int], where: str, more: str) -> None:
    """Several teachers fill their pool in order, and no server of theirs lies on more nodes than it needs.

    From `DistillationConfig.__post_init__` (workers/config/distillation.py) and `_validate_replica_node_alignment`
    (experimental/teacher_loop/teacher_model.py).
    """
    subject, first = "distillation.teacher_models.*.num_replicas", 0
    if sum(replicas) != sum(per_node):
        raise refusal(
            subject,
            f"teachers whose num_replicas x ranks of one server add up to {where}",
            f"{sum(replicas)}: servers of {', '.join(map(str, replicas)) or 'no teacher'} ranks",
            f"{more}other distillation.teacher_models.<name>.num_replicas",
        )
    for size in replicas:
        nodes = (first + size - 1) // per_node[0] - first // per_node[0] + 1
        if nodes != -(-size // per_node[0]):
            raise refusal(
                subject,
                f"servers within a node or on whole nodes of {where}",
                f"a server of {size} ranks from device {first} of the pool on, across the border of a node",
                "put the teachers with the largest servers first, or change num_replicas",
            )
        first += size


def servers_fit(size: int, per_node: Sequence[int]) -> bool:
    """Whether servers of a size fill the devices, none of them across the border of a node that it does not fill.

    verl cuts a role's ranks into servers in order, and gives each `min(devices per node, size)` ranks on a node
    (`RolloutReplica`, workers/rollout/replica.py).

    Args:
        size: Ranks of one server.
        per_node: Devices on each node.
    """
    within_nodes = all(count % size == 0 for count in per_node)
    whole_nodes = len(set(per_node)) == 1 and size % per_node[0] == 0 and sum(per_node) % size == 0
    return within_nodes or whole_nodes


def _fit(server: ServerFacts, size: int, per_node: Sequence[int]) -> bool:
    """As `servers_fit`; one that is disaggregated lies on one node (`vLLMPDReplica`, `SGLangPDReplica`)."""
    return servers_fit(size, per_node) and (server.decoders is None or size <= min(per_node))


def _smaller_server(key: str, server: ServerFacts, per_node: Sequence[int]) -> str:
    sizes = range(server.ranks_per_replica, 0, -1)
    return _smaller(key, server, [size for size in sizes if _fit(server, size, per_node)])


def _smaller(key: str, server: ServerFacts, fitting: Sequence[int]) -> str:
    """The largest parallel size, up to the present one, by which a server has one of the fitting numbers of ranks."""
    if server.decoders is not None:
        return _fewer_decoders(key, server, fitting)
    tensor, data = server.tensor_parallel_size or server.ranks_per_replica, server.data_parallel_size
    rest = server.ranks_per_replica // tensor
    for tensors, replicas in (
        (range(tensor, 0, -1), [data]),
        ([tensor], range(data, 0, -1)),
        ([1], range(data, 0, -1)),
    ):
        for size, copies in itertools.product(tensors, replicas):
            if size * copies * (rest // data) in fitting:
                changed = {key: (tensor, size), f"{server.block}.data_parallel_size": (data, copies)}
                return " ".join(f"{name}={new}" for name, (old, new) in changed.items() if new != old)
    return f"lower its data_parallel_size x pipeline_model_parallel_size (now {rest})"


def _fewer_decoders(key: str, server: ServerFacts, fitting: Sequence[int]) -> str:
    assert server.decoders is not None
    block, (decoders, ranks) = f"{server.block}.disaggregation", server.decoders
    prefill = server.ranks_per_replica - decoders * ranks
    fewer = next((count for count in range(decoders, 0, -1) if prefill + count * ranks in fitting), None)
    if fewer is not None:
        return f"{block}.decode_replicas={fewer}"
    largest = max(fitting, default=1)
    if largest == 1:
        return f"{block}.enabled=False {key}=1"
    return f"{key}=1 {block}.decode_tensor_model_parallel_size=1 {block}.decode_replicas={largest - 1}"


def _key(role: str, server: ServerFacts) -> str:
    return f"{server.block or _SIZES[role]}.tensor_model_parallel_size"


def _not_filled(key: str, server: ServerFacts, where: str, remedy: str) -> PlacementError:
    return refusal(
        key,
        f"servers that fill {where}, each within a node or on whole nodes of equal size",
        f"{server.ranks_per_replica} ranks for one {server.name} server",
        remedy,
    )


def _no_devices(role: str, size: int) -> PlacementError:
    """verl asserts that a pool of its own has devices, once Ray runs (trainer/ppo/v1/trainer_base.py, _separate_async.py)."""
    block = _POOLS[role]
    other = {
        "rollout": "trainer.v1.trainer_mode=sync",
        "reward": "sharding.roles.reward.devices=[...], or reward.reward_model.enable_resource_pool=False",
        "teacher": "sharding.roles.teacher.devices=[...]",
    }
    return refusal(
        f"{block}.nnodes",
        f"1 or more, and {block}.n_gpus_per_node too: {role} has a pool of its own",
        "0",
        f"{block}.nnodes=1 {block}.n_gpus_per_node={size}, or {other[role]}",
    )
