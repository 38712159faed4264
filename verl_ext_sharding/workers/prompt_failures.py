"""What no other prompt would do better at ends the run, in each of verl's trainer modes: a dead server, a sample without a score.

verl's agent loop logs the error of a sample and marks its prompt as failed. The synchronous trainer then trains on what is left
of the batch, filled up with padding, and stops only where nothing is left; the asynchronous ones send another prompt instead,
and with a dead server go on so for ever. A hook on the trainer's replay buffer, which looks at the state of all prompts every few
seconds: once one has failed, the workers that score are asked for their first error, and the servers for a sign of life.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from verl_ext_sharding.errors import ClusterError, ShardingError, first_error_of, why_it_ended

_HOOKED = "_sync_metadata_from_transfer_queue"

ANSWER_WITHIN_S = 5.0
"""For all actors together. One that is too busy to answer is no dead one."""


def apply(trainer: Any) -> None:
    """Adds the hook to a trainer's replay buffer. Idempotent; a user's own sampler that is no subclass of verl's stays as it is.

    Args:
        trainer: A `PPOTrainer`.
    """
    if hasattr(type(trainer.replay_buffer), _HOOKED):
        setattr(trainer.replay_buffer, _HOOKED, functools.partial(_sync_then_look, trainer))


def remove(trainer: Any) -> None:
    """Takes the hook away: the buffer's class acts alone again. Idempotent."""
    vars(trainer.replay_buffer).pop(_HOOKED, None)


def replicas(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Servers of rollout and reward model, with their role."""
    for replica in trainer.llm_server_manager.get_replicas():
        yield "rollout", replica
    manager = trainer.reward_loop_manager.reward_model_manager
    for replica in manager.rollout_replicas if manager is not None else ():
        yield "reward", replica


def _sync_then_look(trainer: Any) -> None:
    """As the buffer's own.

    Raises:
        ShardingError: A prompt has failed, since its sample could not be scored, or since a server has ended.
    """
    buffer = trainer.replay_buffer
    getattr(type(buffer), _HOOKED)(buffer)
    if not any(buffer.failure_keys.values()):
        return
    servers = [(role, replica, server) for role, replica in replicas(trainer) for server in replica.servers]
    errors = [worker.__ray_call__.remote(_first_error) for worker in trainer.reward_loop_manager.reward_loop_workers]
    signs = [server.__ray_call__.remote(_dead_engine) for _, _, server in servers]
    asked = [*errors, *signs]
    answered = set(ray.wait(asked, num_returns=len(asked), timeout=ANSWER_WITHIN_S)[0])
    for answer in errors:
        if answer in answered and (error := _answer(answer)) is not None:
            raise error
    for (role, replica, _), answer in zip(servers, signs, strict=True):
        try:
            dead = _answer(answer) if answer in answered else None
        except ActorDiedError as died:
            raise server_died(role, replica, trainer.config, died) from died
        if dead is not None:
            raise server_died(role, replica, trainer.config, RuntimeError(dead))


def _answer(asked: Any) -> Any:
    """What an actor answered; None also where it can't be reached just now, which Ray tries again by itself."""
    try:
        return ray.get(asked)
    except ActorUnavailableError:
        return None


def _first_error(worker: Any) -> ShardingError | None:
    error: ShardingError | None = getattr(worker, "first_error", None)  # verl's own worker keeps none
    return error


def _dead_engine(server: Any) -> str | None:
    """Sent to a server, which answers if it lives. Its engine may be of no more use: vLLM's has processes of its own, which
    may have ended alone, and ours a device that may be lost."""
    engine = getattr(server, "engine", None)
    if getattr(engine, "errored", False) is not True:
        return None
    return f"its engine, with {getattr(engine, 'dead_error', None)!r}"


def server_died(role: str, replica: Any, config: Any, error: Exception) -> ShardingError:
    """What to say when Ray reports that a server is gone.

    Args:
        role: "rollout" or "reward".
        replica: verl's replica whose server it was.
        config: The run's.
        error: Ray's.
    """
    if role == "reward":
        from verl_ext_sharding.rollout import reward_metrics

        return reward_metrics.server_died(config, error)
    return ClusterError(
        f"rollout server {replica.replica_rank}",
        expected="a process that generates",
        found=f"it has ended: {why_it_ended(error)}",
        consequence="the run stops, since what it was to generate fails",
        remedy=f"{first_error_of(f'{replica.config.name} server')}; out of memory: a smaller "
        "actor_rollout_ref.rollout.gpu_memory_utilization",
    )
