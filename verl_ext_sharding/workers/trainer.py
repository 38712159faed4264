"""What the trainer does differently: role -> pool, role -> worker class, and devices read back from the workers."""

from __future__ import annotations

import functools
import os
import types
from dataclasses import asdict
from typing import Any

import ray
from verl.plugin.platform import get_platform
from verl.trainer.ppo.utils import Role
from verl.workers.engine_workers import ActorRolloutRefWorker

from verl_ext_sharding.cli import render
from verl_ext_sharding.config.spec import RunSpec
from verl_ext_sharding.monitor import events
from verl_ext_sharding.patch_points import reward_loop_workers
from verl_ext_sharding.placement.bundles import Promise
from verl_ext_sharding.placement.device_map import LayerRow
from verl_ext_sharding.workers import prompt_failures
from verl_ext_sharding.workers.pools import BundlePoolManager
from verl_ext_sharding.workers.probe import communication_of, read_back
from verl_ext_sharding.workers.role_worker import sharding_worker_class

_ACTOR_ROLES = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef)


def place_roles(trainer: Any, spec: RunSpec) -> None:
    """Rewrites the pools and worker classes that verl's trainer has just chosen, and hooks the read-back.

    Args:
        trainer: A `PPOTrainer` whose `_init_resource_pool_mgr` has run.
        spec: The run's decisions.
    """
    events.emit("stage", name="devices")
    trainer.on_init_end = types.MethodType(_on_init_end, trainer)
    prompt_failures.apply(trainer)
    if reward_loop_workers.NEEDED_BY in spec.needed:
        from verl_ext_sharding.rollout import reward_metrics

        reward_metrics.apply(trainer)
    if not spec.placement.managed:
        stock = trainer.resource_pool_manager
        stock.create_resource_pool = functools.partial(_create_then_use_our_workers, trainer, stock)
        return
    if "ref" in spec.placement.roles and spec.placement.pool_of("ref") != spec.placement.pool_of("actor"):
        _separate_reference(trainer)
    names = {
        Role.Critic: "critic",
        Role.RefPolicy: "ref",
        Role.RewardModel: "reward",
        Role.TeacherModel: "teacher",
    } | dict.fromkeys(_ACTOR_ROLES, "actor")
    for role in list(trainer.mapping):
        pool = spec.placement.pool_of(names[role])
        if pool is not None:
            trainer.mapping[role] = pool.name
        elif role == Role.RewardModel and not trainer.config.reward.reward_model.enable:
            del trainer.mapping[role]  # verl maps it to its global pool whether there is a reward model or not
    _size_reward_pool(trainer, spec)
    stock = trainer.resource_pool_manager
    manager = BundlePoolManager(spec, trainer.mapping, finalize=types.MethodType(_use_our_workers, trainer))
    _keep_own_pools(manager, stock)
    trainer.resource_pool_manager = manager


def _separate_reference(trainer: Any) -> None:
    """Takes the reference out of the actor's worker, as verl does itself without hybrid replicas."""
    workers, mapping = trainer.role_worker_mapping, trainer.mapping
    for role in (Role.ActorRolloutRef, Role.ActorRollout):
        if role in workers:
            workers[Role.Actor], mapping[Role.Actor] = workers.pop(role), mapping.pop(role)
    workers.setdefault(Role.RefPolicy, ray.remote(ActorRolloutRefWorker))
    mapping.setdefault(Role.RefPolicy, mapping[Role.Actor])


def _size_reward_pool(trainer: Any, spec: RunSpec) -> None:
    """A reward model on the actor's devices has its own number on each node, by which its servers span nodes.

    verl has just put the trainer's there.
    """
    pool = spec.placement.pool_of("reward")
    if pool is not None:
        per_node = spec.placement.per_node(pool.devices)
        block = trainer.config.reward.reward_model
        block.nnodes, block.n_gpus_per_node = len(per_node), len(per_node[0])


def _keep_own_pools(manager: BundlePoolManager, stock: Any) -> None:
    """Pools of roles that we don't place (a reward model's or teacher's own) stay verl's."""
    for name in set(manager.mapping.values()) - {pool.name for pool in manager.spec.placement.pools}:
        manager.add_stock_pool(name, stock.resource_pool_spec[name])


def _create_then_use_our_workers(trainer: Any, stock: Any) -> None:
    """verl's own pools, our workers."""
    type(stock).create_resource_pool(stock)
    _use_our_workers(trainer)


def _use_our_workers(trainer: Any) -> None:
    """Puts our subclass in place of each worker class, after trainers and recipes have chosen theirs."""
    events.emit("stage", name="workers")
    for role, remote in trainer.role_worker_mapping.items():
        base = getattr(remote, "__ray_actor_class__", remote)
        trainer.role_worker_mapping[role] = ray.remote(sharding_worker_class(base))


def _on_init_end(trainer: Any) -> None:
    """Runs the trainer's own hook, then reads the devices back from the workers."""
    type(trainer).on_init_end(trainer)
    rows = read_back_devices(trainer)
    render.show_read_back(rows)
    events.emit("placement", rows=rows)
    for role, layers in read_back_layers(trainer).items():
        render.show_layers(role, layers, loaded=True)
        events.emit("layers", role=role, rows=[asdict(layer) for layer in layers])
    if events.enabled():
        events.emit("communication", processes=read_back_communication(trainer))
    events.emit("stage", name="training")


def read_back_devices(trainer: Any) -> list[dict[str, Any]]:
    """Asks each worker and rollout server which device it has.

    Returns:
        One row for each role and rank.

    Raises:
        PlacementError: A worker runs elsewhere than it was promised.
    """
    accelerator = get_platform().ray_resource_name()
    rows = []
    for role, group in _groups(trainer).items():
        answers = ray.get([worker.__ray_call__.remote(read_back, accelerator) for worker in group.workers])
        rows += [_row(role, rank, answer) for rank, answer in enumerate(answers)]
    for role, replica in prompt_failures.replicas(trainer):
        answers = ray.get([worker.__ray_call__.remote(read_back, accelerator) for worker in replica.workers])
        pids = ray.get([server.__ray_call__.remote(lambda _: os.getpid()) for server in replica.servers])
        for answer in answers:
            server = {"worker": type(replica).__name__, "engine": replica.config.name, "pid": pids[0]}
            rows.append(_row(role, replica.replica_rank, answer, alone=True) | server)
    return rows


def read_back_layers(trainer: Any) -> dict[str, list[LayerRow]]:
    """Of each role whose layers are spread over the devices of one process: what lies where."""
    accelerator = get_platform().ray_resource_name()
    found: dict[str, list[LayerRow]] = {}
    for group in _groups(trainer).values():
        answer = ray.get(group.workers[0].__ray_call__.remote(read_back, accelerator))
        for layers in answer["layers"].values():
            found |= {role: [LayerRow(**row) for row in rows] for role, rows in layers.items()}
    return found


def read_back_communication(trainer: Any) -> dict[str, dict[str, str | None]]:
    """The communication variables of each kind of process of the job, by its name."""
    actors = {
        f"{role} {rank}": worker
        for role, group in _groups(trainer).items()
        for rank, worker in enumerate(group.workers)
    }
    for replica in trainer.llm_server_manager.get_replicas():
        actors |= {f"rollout server {replica.replica_rank}.{index}": s for index, s in enumerate(replica.servers)}
    answers = ray.get([actor.__ray_call__.remote(communication_of) for actor in actors.values()])
    return {"task runner": communication_of(), **dict(zip(actors, answers, strict=True))}


def _groups(trainer: Any) -> dict[str, Any]:
    """`{role: worker group}` of the roles that train or evaluate."""
    groups = {"actor": trainer.actor_rollout_wg}
    if trainer.use_critic:
        groups["critic"] = trainer.critic_wg
    if trainer.use_reference_policy:
        groups["ref"] = trainer.ref_policy_wg
    return groups


def _row(role: str, rank: int, answer: dict[str, Any], *, alone: bool = False) -> dict[str, Any]:
    """What the table says of one process; `alone`: it uses the first of the devices that it sees."""
    promise = Promise.from_json(answer["promise"]) if answer["promise"] else None
    if promise is not None:
        subject = f"{role} rank {rank} on device {promise.device}"
        promise.verify(subject, node_id=answer["node_id"], accelerator_id=answer["accelerator_id"])
    ours = [part for part in answer["worker_classes"] if role in part.split("_") or part == ""]
    part = ours[0] if ours else next(iter(answer["worker_classes"]))
    devices = (promise.devices or (promise.device,)) if promise is not None else ()
    devices = devices[:1] if alone else devices
    return {
        "role": role,
        "rank": rank,
        "device": promise.device if promise else None,
        "devices": list(devices),
        "node": answer["node"],
        "accelerator": answer["visible_devices"] if len(devices) > 1 else answer["accelerator_id"],
        "visible": answer["visible_devices"],
        "worker": answer["worker_classes"][part],
        "engine": answer["engines"][part],
        "pid": answer["pid"],
    }
