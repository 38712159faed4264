"""A sample that can't be scored ends the run where verl would go on without it.

A reward model with a pool of its own scores each sample as it is generated, inside verl's agent loop. That catches whatever
fails there: the sample's group is marked as failed and then trained on with what is left of it, or evicted and generated
again, for ever if the server is gone. Our workers remember what failed, and two hooks ask them: after each sampling, and
between two looks into the replay buffer. A colocated reward model is asked by the trainer itself, which its errors reach.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import ray


def apply(trainer: Any) -> None:
    """Adds both hooks to a trainer instance and its replay buffer. Idempotent.

    Args:
        trainer: A `PPOTrainer` whose reward model is discriminative.
    """
    trainer.on_sample_end = types.MethodType(_on_sample_end, trainer)
    if hasattr(type(trainer.replay_buffer), "_wait_for_next_poll"):  # a sampler of the user's may have none
        trainer.replay_buffer._wait_for_next_poll = functools.partial(_wait_for_next_poll, trainer)


def remove(trainer: Any) -> None:
    """Takes both hooks away. Idempotent."""
    vars(trainer).pop("on_sample_end", None)
    vars(trainer.replay_buffer).pop("_wait_for_next_poll", None)


def raise_first(trainer: Any) -> None:
    """Raises what first failed in a reward loop worker since the run began, if anything did.

    Args:
        trainer: A `PPOTrainer`.
    """
    manager = trainer.reward_loop_manager
    if manager.reward_loop_worker_handles is None:
        return
    failures = ray.get([worker.first_failure.remote() for worker in manager.reward_loop_workers])
    for failure in filter(None, failures):
        raise failure


def _on_sample_end(trainer: Any) -> None:
    type(trainer).on_sample_end(trainer)
    raise_first(trainer)


def _wait_for_next_poll(trainer: Any, partition_id: str, last_debug_time: float) -> float:
    raise_first(trainer)
    buffer = trainer.replay_buffer
    waited: float = type(buffer)._wait_for_next_poll(buffer, partition_id, last_debug_time)
    return waited
