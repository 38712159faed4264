"""Which device lists the roles of a job can take: roles that it has, a reference and a rollout where verl puts them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verl_ext_sharding.errors import PlacementError
from verl_ext_sharding.placement.devices import addresses, count_devices, format_devices, split_optional
from verl_ext_sharding.placement.job import JobFacts


def present(facts: JobFacts) -> dict[str, bool]:
    """Whether the job has each of the roles that not every job has, by role."""
    return {
        "critic": "critic" in facts.engines,
        "ref": "ref" in facts.engines,
        "reward": facts.reward is not None,
        "teacher": facts.teacher is not None,
    }


def asked(devices: Mapping[str, Any], facts: JobFacts) -> Iterator[tuple[str, Any, bool]]:
    """The lists that are set: role, list without its mark, and whether it counts. An optional one of an absent role does not.

    Args:
        devices: `{role: device list as written, or None}`.
        facts: The job.
    """
    absent = {role for role, exists in present(facts).items() if not exists}
    if facts.ref_in_actor:
        absent.add("ref")
    for role, spec in devices.items():
        plain, optional = split_optional(spec)
        if plain is not None:
            yield role, plain, not (optional and role in absent)


def named_nodes(devices: Mapping[str, Any], facts: JobFacts) -> tuple[str, ...]:
    """The addresses by which the maps of all roles name nodes, in verl's order.

    Args:
        devices: `{role: device list as written, or None}`.
        facts: The job.

    Raises:
        PlacementError: There are more than the job has nodes.
    """
    named = addresses(devices.values())
    if len(named) > facts.num_nodes:
        role = next(role for role, spec in devices.items() if named[-1] in addresses([spec]))
        raise PlacementError(
            f"sharding.roles.{role}.devices",
            expected=f"addresses of the job's nodes: trainer.nnodes={facts.num_nodes}",
            found=f"{len(named)} addresses over all roles: {', '.join(named)}",
            consequence="the run does not start",
            remedy=f"trainer.nnodes={len(named)}, or name fewer nodes",
        )
    return named


def check_exist(parsed: Mapping[str, tuple[int, ...]], facts: JobFacts) -> None:
    """Devices are given to roles that the job has.

    Args:
        parsed: `{role: device numbers}` of the lists that count.
        facts: The job.

    Raises:
        PlacementError: Names the first role that the job has not, and what switches it on.
    """
    how = {
        "critic": "algorithm.adv_estimator=gae or critic.enable=True",
        "ref": "actor_rollout_ref.actor.use_kl_loss=True or algorithm.use_kl_in_reward=True",
        "reward": "reward.reward_model.enable=True",
        "teacher": "distillation.enabled=True",
    }
    for role, exists in present(facts).items():
        if role in parsed and not exists:
            raise PlacementError(
                f"sharding.roles.{role}.devices",
                expected=f"a job that has a {role}",
                found=f"devices {format_devices(parsed[role])} for a {role} that this job does not use",
                consequence="the run does not start",
                remedy=f"sharding.roles.{role}.devices=null, or switch the {role} on with {how[role]}",
            )


def check_reference(parsed: Mapping[str, tuple[int, ...]], actor: tuple[int, ...], facts: JobFacts) -> None:
    """With LoRA the reference is where the actor is.

    Raises:
        PlacementError: Its list is another one.
    """
    if "ref" in parsed and facts.ref_in_actor and set(parsed["ref"]) != set(actor):
        raise PlacementError(
            "sharding.roles.ref.devices",
            expected=f"the actor's devices {format_devices(actor)}: with LoRA the reference is the actor without its adapter",
            found=format_devices(parsed["ref"]),
            consequence="the run does not start",
            remedy="sharding.roles.ref.devices=null",
        )


def check_rollout(parsed: Mapping[str, tuple[int, ...]], actor: tuple[int, ...], facts: JobFacts) -> None:
    """Rollout generates where the actor trains, or on devices that verl reserves for it.

    Raises:
        PlacementError: Its list is another one.
    """
    follows = facts.hybrid_rollout and not facts.rollout.own_devices
    if "rollout" not in parsed or (follows and set(parsed["rollout"]) == set(actor)):
        return
    if facts.mode == "separate_async":
        reason = (
            f"null: in separate_async verl reserves {count_devices(facts.rollout.own_devices)} of its own for rollout "
            "(actor_rollout_ref.rollout.nnodes x n_gpus_per_node), and Ray picks them"
        )
        remedy = "sharding.roles.rollout.devices=null"
    else:
        reason = f"the actor's devices {format_devices(actor)}: in {facts.mode} mode verl serves rollout where the actor trains"
        remedy = (
            f"sharding.roles.rollout.devices=null, or sharding.roles.actor.devices={format_devices(parsed['rollout'])}, "
            "or a pool of its own beside the trainer's devices: sharding.roles.rollout.devices=null "
            "trainer.v1.trainer_mode=separate_async actor_rollout_ref.rollout.nnodes=1 "
            f"actor_rollout_ref.rollout.n_gpus_per_node={len(parsed['rollout'])} "
            "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"
        )
    raise PlacementError(
        "sharding.roles.rollout.devices",
        expected=reason,
        found=format_devices(parsed["rollout"]),
        consequence="the run does not start",
        remedy=remedy,
    )
