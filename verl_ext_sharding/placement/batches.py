"""Checks of batch, mini-batch and micro-batch sizes against each role's data-parallel size. Pure."""

from __future__ import annotations

import math

from verl_ext_sharding.errors import PlacementError
from verl_ext_sharding.placement.bundles import Placement
from verl_ext_sharding.placement.devices import format_devices
from verl_ext_sharding.placement.job import EngineFacts, JobFacts


def check_batches(placement: Placement, facts: JobFacts) -> None:
    """Samples of a step must divide by each role's data-parallel size.

    verl checks the actor only; for the others `KVBatchMeta.chunk` makes uneven chunks without a word and an assert
    fires minutes later (trainer/ppo/v1/trainer_base.py, workers/engine_workers.py).
    """
    prompts = facts.train_batch_size // max(1, facts.parameter_sync_step)
    samples = prompts * facts.rollout_n
    ranks_of = _data_parallel_ranks(placement, facts)
    unit = math.lcm(*(ranks // math.gcd(ranks, facts.rollout_n) for ranks in ranks_of.values()))
    for role, ranks in ranks_of.items():
        where = f"{role} has {ranks} data-parallel ranks on devices {format_devices(placement.devices_of(role))}"
        if samples % ranks:
            better = round_up(prompts, unit) * max(1, facts.parameter_sync_step)
            raise refusal(
                "data.train_batch_size",
                f"a number of samples that divides by {ranks}: {where}",
                f"{prompts} prompts x {facts.rollout_n} responses = {samples} samples in one update",
                f"data.train_batch_size={better}, or another number of devices for {role}",
            )
        mini = facts.engines[role].mini_batch_size
        if mini is not None and (mini * facts.rollout_n) % ranks:
            key = "critic.ppo_mini_batch_size" if role == "critic" else "actor_rollout_ref.actor.ppo_mini_batch_size"
            better = round_up(mini, ranks // math.gcd(ranks, facts.rollout_n))
            raise refusal(
                key,
                f"a number of samples that divides by {ranks}: {where}",
                f"{mini} prompts x {facts.rollout_n} responses = {mini * facts.rollout_n} samples",
                f"{key}={better}, or another number of devices for {role}",
            )
        _check_micro_batches(role, facts.engines[role], samples // ranks, ranks, facts)


def _check_micro_batches(role: str, engine: EngineFacts, samples_per_rank: int, ranks: int, facts: JobFacts) -> None:
    """One rank's samples must divide by the micro-batch (workers/engine/utils.py, prepare_micro_batches)."""
    mini = engine.mini_batch_size
    mini_per_rank = samples_per_rank if mini is None else mini * facts.rollout_n // ranks
    for micro in engine.micro_batches:
        samples = samples_per_rank if micro.of_step else mini_per_rank
        if samples % micro.samples:
            fits = max(size for size in range(1, min(samples, micro.samples) + 1) if samples % size == 0)
            raise refusal(
                micro.key,
                f"a size that divides the {samples} samples that each of the {ranks} ranks of {role} gets from one "
                f"{'update' if micro.of_step else 'mini-batch'}",
                str(micro.samples),
                f"{micro.key}={fits}",
            )


def _data_parallel_ranks(placement: Placement, facts: JobFacts) -> dict[str, int]:
    """Data-parallel ranks of each role that trains or evaluates."""
    sizes = {role: placement.processes_of(role) // engine.model_parallel_size for role, engine in facts.engines.items()}
    return {role: size for role, size in sizes.items() if size}


def round_up(number: int, multiple: int) -> int:
    """The next multiple, at least one of them."""
    return max(multiple, math.ceil(number / multiple) * multiple)


def refusal(subject: str, expected: str, found: str, remedy: str) -> PlacementError:
    """A placement that verl could not run."""
    return PlacementError(subject, expected=expected, found=found, consequence="the run does not start", remedy=remedy)
