"""Checks of inference servers: whether those of rollout, reward model and teacher fill the devices that they get. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from verl_ext_sharding.errors import PlacementError
from verl_ext_sharding.placement.batches import refusal
from verl_ext_sharding.placement.bundles import Placement
from verl_ext_sharding.placement.devices import count_devices, format_devices
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
            _check_own(role, server, placement, facts)


def _check_placed(role: str, server: ServerFacts, placement: Placement) -> None:
    """Servers on devices of the trainer's."""
    devices = placement.devices_of(role)
    per_node = [len(numbers) for numbers in placement.per_node(devices)]
    pool = placement.pool_of("actor")
    if role == "rollout" and pool is not None and pool.layout == "device_map" and server.ranks_per_replica > 1:
        raise refusal(
            "sharding.roles.actor.layout=device_map",
            "rollout servers of one rank: verl serves rollout in the actor's processes, and there is one, on device "
            f"{devices[0]}",
            _found(server),
            f"{one_rank(role, server)}, or sharding.roles.actor.layout=fsdp",
        )
    where = f"the {count_devices(len(devices))} {format_devices(devices)} of {role} ({per_node} per node)"
    if server.replicas is not None:
        total = sum(server.replicas)
        better = placement.nearest(devices, lambda counts: sum(counts) == total)
        more = f"sharding.roles.{role}.devices={format_devices(better)}, or " if better else ""
        _check_replicas(server, per_node, where, more)
    elif not servers_fit(server, per_node):
        raise _not_filled(role, server, where, ", or ".join(_ways_to_fill(role, server, placement)))
    elif role == "rollout" and server.own_nodes:
        _check_parts(server, per_node, where)


def _ways_to_fill(role: str, server: ServerFacts, placement: Placement) -> Iterator[str]:
    """A smaller server, and other devices."""
    devices = placement.devices_of(role)
    per_node = [len(numbers) for numbers in placement.per_node(devices)]
    fit = rollout_fits if role == "rollout" else servers_fit
    if server.name != "hf":
        yield _smaller(_named(role, server), lambda other: servers_fit(other, per_node))
        better = placement.nearest(devices, lambda counts: fit(server, counts))
    elif _is_spread(role, server, len(devices)):
        better = placement.nearest(devices, lambda counts: len(counts) == 1)
    else:
        yield one_rank(role, server)
        return
    owner = "actor" if role == "rollout" else role  # rollout follows the actor
    if better:
        yield f"sharding.roles.{owner}.devices={format_devices(better)}"


def _is_spread(role: str, server: ServerFacts, num_devices: int) -> bool:
    """Whether a server of ours has all devices of its role, as `sharding.roles.reward.layout=device_map` asks for."""
    return role == "reward" and server.ranks_per_replica == num_devices


def _check_parts(server: ServerFacts, per_node: Sequence[int], where: str) -> None:
    """In separate_async verl cuts the actor's servers into nodes by the key of rollout's own pool (llm_server.py)."""
    assert server.own_nodes
    own, size = server.own_nodes, server.ranks_per_replica
    if parts_fit(server, own[0], per_node):
        return
    block, part = _POOLS["rollout"], min(per_node[0], size)
    smaller = _smaller(_named("rollout", server), lambda other: _own_rollout_fits(other, own, per_node))
    right = (
        f"{part}, or a number that divides it" if server.name != "vllm" else f"{part} or more" if part == size else part
    )
    raise refusal(
        f"{block}.n_gpus_per_node",
        f"{right}: of a server of {size} ranks, {part} lie on each of its nodes, on {where}",
        str(own[0]),
        f"{_larger_pool('rollout', server, own, per_node)}, or {smaller}",
    )


def _check_own(role: str, server: ServerFacts, placement: Placement, facts: JobFacts) -> None:
    """Servers on a pool that verl reserves for them."""
    own, block = server.own_nodes or (), _POOLS[role]
    actor = _actor_per_node(placement) if role == "rollout" and facts.hybrid_rollout else None
    if not own:
        raise _no_devices(role, server, placement, facts)
    where = f"the {count_devices(sum(own))} of {block}.nnodes={len(own)} x {block}.n_gpus_per_node={own[0]}"

    def fits(other: ServerFacts) -> bool:
        return _own_rollout_fits(other, own, actor) if role == "rollout" else servers_fit(other, own)

    if server.replicas is not None:
        more = f"{block}.nnodes=1 {block}.n_gpus_per_node={sum(server.replicas)}, or " if server.replicas else ""
        _check_replicas(server, own, where, more)
    elif not fits(server):
        if server.name != "hf":
            remedy = f"{_smaller(_named(role, server), fits)}, or {_larger_pool(role, server, own, actor)}"
        else:
            remedy = f"{block}.nnodes=1" if _is_spread(role, server, sum(own)) else one_rank(role, server)
        raise _not_filled(role, server, where, remedy)


def _actor_per_node(placement: Placement) -> list[int]:
    """Devices on each node where the actor serves rollout."""
    return [len(numbers) for numbers in placement.per_node(placement.devices_of("rollout"))]


def _larger_pool(role: str, server: ServerFacts, own: Sequence[int], actor: Sequence[int] | None) -> str:
    """Keys of a pool that holds its servers, of as many devices as now where that is enough.

    Args:
        role: Whose pool it is.
        server: Its servers.
        own: Devices on each node of the pool.
        actor: The actor's on each node, where it serves rollout too, and on which the servers are cut alike.
    """
    size, block = server.ranks_per_replica, _POOLS[role]
    on_node = min(actor[0], size) if actor else size
    nodes = -(-max(sum(own), size) // on_node)
    if role != "rollout" and own[0] >= size:  # verl cuts all of such a pool into servers
        on_node, nodes = -(-own[0] // size) * size, len(own)
    elif role != "rollout":
        nodes = max(1, sum(own) // size)
    changed = {"nnodes": (len(own), nodes), "n_gpus_per_node": (own[0] if own else 0, on_node)}
    return _changed({f"{block}.{name}": sizes for name, sizes in changed.items()})


def _check_replicas(server: ServerFacts, per_node: Sequence[int], where: str, more: str) -> None:
    """Several teachers fill their pool in order, and no server of theirs lies on more nodes than it needs.

    From `DistillationConfig.__post_init__` (workers/config/distillation.py) and `_validate_replica_node_alignment`
    (experimental/teacher_loop/teacher_model.py).
    """
    replicas, inference = server.replicas or (), "distillation.teacher_models.<name>.inference"
    subject, first = "distillation.teacher_models.*.num_replicas", 0
    if sum(replicas) != sum(per_node):
        raise refusal(
            subject,
            f"teachers whose num_replicas x ranks of one server add up to {where}",
            f"{sum(replicas)}: servers of {', '.join(map(str, replicas)) or 'no teacher'} ranks",
            f"{more}other distillation.teacher_models.<name>.num_replicas",
        )
    for size, unit in itertools.zip_longest(replicas, server.replica_units, fillvalue=1):
        nodes, part = (first + size - 1) // per_node[0] - first // per_node[0] + 1, min(per_node[0], size)
        if nodes != -(-size // per_node[0]) or size % part:
            aligned = f"parallel sizes under {inference} that make {part} ranks of each server's {size}"
            raise refusal(
                subject,
                f"servers within a node or on whole nodes of {where}",
                f"a server of {size} ranks from device {first} of the pool on, across the border of a node",
                aligned if size % part else "put the teachers with the largest servers first, or change num_replicas",
            )
        if part % unit:
            raise refusal(
                "distillation.teacher_models.*.inference.tensor_model_parallel_size",
                f"sizes that divide {part}: of each vllm server with data parallelism, so many ranks lie on a node of {where}",
                str(unit),
                f"{inference}.tensor_model_parallel_size={size} {inference}.data_parallel_size=1",
            )
        first += size


def servers_fit(server: ServerFacts, per_node: Sequence[int]) -> bool:
    """Whether servers fill the devices, none of them across the border of a node that it does not fill.

    verl cuts a role's ranks into servers in order, and gives each `min(devices per node, size)` ranks on a node
    (`RolloutReplica`, workers/rollout/replica.py).

    Args:
        server: The servers, all alike.
        per_node: Devices on each node.
    """
    size = server.ranks_per_replica
    within_nodes = all(count % size == 0 for count in per_node)
    whole_nodes = len(set(per_node)) == 1 and size % per_node[0] == 0 and sum(per_node) % size == 0
    return (within_nodes or whole_nodes) and _divides_over(server, min(per_node))


def rollout_fits(server: ServerFacts, per_node: Sequence[int]) -> bool:
    """As `servers_fit`, of the actor's devices: servers of several ranks want the same number on each node.

    Args:
        server: The rollout servers.
        per_node: The actor's devices on each node.
    """
    return servers_fit(server, per_node) and (server.ranks_per_replica == 1 or len(set(per_node)) == 1)


def parts_fit(server: ServerFacts, on_node: int, per_node: Sequence[int]) -> bool:
    """Whether a rollout server that is cut into nodes by `rollout.n_gpus_per_node` agrees with the actor's devices.

    Each part must lie on one node. A trainer's rank also counts the vLLM worker that takes its weights by the actor's
    devices per node (`ServerAdapter`, vllm_rollout/vllm_rollout.py), and that worker counts itself in its part: where they
    differ, the first update of the weights waits for ever. SGLang's ranks all go through the first of them.

    Args:
        server: The rollout servers.
        on_node: verl's `actor_rollout_ref.rollout.n_gpus_per_node`.
        per_node: The actor's devices on each node.
    """
    size = server.ranks_per_replica
    part = min(on_node, size)
    if server.name == "vllm":
        return part == min(per_node[0], size)
    return part > 0 and size % part == 0 and all(count % part == 0 for count in per_node)


def _own_rollout_fits(server: ServerFacts, own: Sequence[int], actor: Sequence[int] | None) -> bool:
    """Whether rollout's own pool holds a server: verl makes as many as fit and leaves the rest of the pool alone.

    Args:
        server: The rollout servers.
        own: Devices on each node of the pool.
        actor: The actor's on each node, where it serves rollout too.
    """
    fits = sum(own) >= server.ranks_per_replica and _divides_over(server, own[0])
    return fits and (actor is None or (rollout_fits(server, actor) and parts_fit(server, own[0], actor)))


def _divides_over(server: ServerFacts, on_node: int) -> bool:
    """Whether a server divides into parts of so many devices at most, none of which cuts what lies on one node."""
    part = min(on_node, server.ranks_per_replica)
    return server.ranks_per_replica % part == 0 and part % server.node_unit == 0


def one_rank(role: str, server: ServerFacts) -> str:
    """What to type for servers of one rank.

    Args:
        role: Whose they are.
        server: The servers as they are, of more.
    """
    return _smaller(_named(role, server), lambda other: other.ranks_per_replica == 1)


def _smaller(server: ServerFacts, fits: Callable[[ServerFacts], bool]) -> str:
    """What to type for the largest server that fits, up to the present parallel sizes."""
    key, data_key = f"{server.block}.tensor_model_parallel_size", f"{server.block}.data_parallel_size"
    if server.decoders is not None:
        return _fewer_decoders(key, server, server.decoders, fits)
    tensor, data = server.tensor_parallel_size or server.ranks_per_replica, server.data_parallel_size
    rest = server.ranks_per_replica // tensor
    for tensors, replicas in (
        (range(tensor, 0, -1), [data]),
        ([tensor], range(data, 0, -1)),
        ([1], range(data, 0, -1)),
    ):
        for size, copies in itertools.product(tensors, replicas):
            ranks = size * copies * (rest // data)
            if fits(replace(server, ranks_per_replica=ranks, tensor_parallel_size=size, data_parallel_size=copies)):
                return _changed({key: (tensor, size), data_key: (data, copies)})
    return f"lower its data_parallel_size x pipeline_model_parallel_size (now {rest})"


def _fewer_decoders(
    key: str, server: ServerFacts, decoders: tuple[int, int], fits: Callable[[ServerFacts], bool]
) -> str:
    block, (count, ranks) = f"{server.block}.disaggregation", decoders
    tensor = server.tensor_parallel_size or server.ranks_per_replica - count * ranks
    prefill = server.ranks_per_replica - count * ranks
    for fewer in range(count, 0, -1):
        if fits(replace(server, ranks_per_replica=prefill + fewer * ranks, decoders=(fewer, ranks))):
            return f"{block}.decode_replicas={fewer}"
    for size in range(server.ranks_per_replica, 1, -1):
        if fits(replace(server, ranks_per_replica=size, tensor_parallel_size=1, decoders=(size - 1, 1))):
            sizes = {key: (tensor, 1), f"{block}.decode_tensor_model_parallel_size": (ranks, 1)}
            return _changed({**sizes, f"{block}.decode_replicas": (count, size - 1)})
    plain = replace(server, ranks_per_replica=tensor, tensor_parallel_size=tensor, decoders=None)
    return f"{block}.enabled=False {_smaller(plain, fits)}".rstrip()


def _changed(sizes: dict[str, tuple[int, int]]) -> str:
    """Overrides of the keys whose old and new values differ."""
    return " ".join(f"{name}={new}" for name, (old, new) in sizes.items() if new != old)


def _named(role: str, server: ServerFacts) -> ServerFacts:
    """The server with the block of its keys."""
    return server if server.block else replace(server, block=_SIZES[role])


def _found(server: ServerFacts) -> str:
    return f"{server.ranks_per_replica} ranks for one {server.name} server"


def _not_filled(role: str, server: ServerFacts, where: str, remedy: str) -> PlacementError:
    on_nodes = "each within a node or on whole nodes of equal size"
    if server.decoders is not None:
        on_nodes = "each within a node, since it prefills and decodes apart"
    elif server.name == "hf":
        on_nodes = "each within a node, since one process holds the whole model"
    elif server.node_unit > 1:
        on_nodes += f", with the {server.node_unit} ranks of each of its data-parallel parts on one node"
    return refusal(
        f"{_named(role, server).block}.{_largest_key(server)}",
        f"servers that fill {where}, {on_nodes}",
        _found(server),
        remedy,
    )


def _largest_key(server: ServerFacts) -> str:
    """The key of verl's that makes a server as large as it is."""
    if server.tensor_parallel_size == 1 and server.decoders is not None:
        return "disaggregation.enabled"
    if server.tensor_parallel_size == 1 and server.data_parallel_size > 1:
        return "data_parallel_size"
    return "tensor_model_parallel_size"


def _no_devices(role: str, server: ServerFacts, placement: Placement, facts: JobFacts) -> PlacementError:
    """verl asserts that a pool of its own has devices, once Ray runs (trainer/ppo/v1/trainer_base.py, _separate_async.py)."""
    block, size = _POOLS[role], sum(server.replicas or ()) or server.ranks_per_replica
    ways = [f"{block}.nnodes=1 {block}.n_gpus_per_node={size}"]
    if role == "rollout":
        if facts.hybrid_rollout:
            ways = [_larger_pool(role, server, (), _actor_per_node(placement))]
        ways.append("trainer.v1.trainer_mode=sync")
    elif free := free_devices(server, placement):
        ways.append(f"sharding.roles.{role}.devices={format_devices(free)}")
    if role == "reward" and facts.mode != "separate_async":
        ways.append("reward.reward_model.enable_resource_pool=False")
    return refusal(
        f"{block}.nnodes",
        f"1 or more, and {block}.n_gpus_per_node too: {role} has a pool of its own",
        "0",
        ", or ".join(ways),
    )


def free_devices(server: ServerFacts, placement: Placement) -> tuple[int, ...] | None:
    """The most devices without the actor that servers fill, or None.

    Args:
        server: The servers.
        placement: Where the actor is.
    """
    total = None if server.replicas is None else sum(server.replicas)

    def fits(per_node: Sequence[int]) -> bool:
        return servers_fit(server, per_node) if total is None else sum(per_node) == total

    return placement.most_without("actor", fits)
