"""Checks of batch, mini-batch and micro-batch sizes against each role's data-parallel size. Pure.

What verl does with a batch, in `trainer.use_v1` (trainer/ppo/v1/trainer_base.py, the same in 0.9.0 and 0.9.1):

| where                              | what must hold, counted in samples = prompts x rollout.n                               |
|------------------------------------|----------------------------------------------------------------------------------------|
| `validate_config`                  | fixed batches only: batch % actor processes, batch >= mini-batch                       |
| `_balance_batch`                   | nothing: pads a batch to a multiple of the actor's ranks and of both mini-batches      |
| `KVBatchMeta.chunk`                | padded batch % ranks, else uneven chunks without a word                                |
| `train_mini_batch`                 | mini-batch % ranks                                                                     |
| `prepare_micro_batches`            | fixed batches only: one rank's part of padded batch or mini-batch % micro-batch        |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from verl_ext_sharding.errors import PlacementError
from verl_ext_sharding.placement.bundles import Placement
from verl_ext_sharding.placement.devices import format_devices
from verl_ext_sharding.placement.job import JobFacts, MicroBatch

_BATCH = "data.train_batch_size"
_MINI = {"actor": "actor_rollout_ref.actor.ppo_mini_batch_size", "critic": "critic.ppo_mini_batch_size"}


def check_batches(placement: Placement, facts: JobFacts) -> None:
    """Samples must divide by each role's data-parallel size wherever verl doesn't pad them.

    verl checks the actor only; for the others an assert fires minutes later.

    Raises:
        PlacementError: Names the first size that verl could not run with, and the sizes that repair them all.
    """
    job = _Batches.of(placement, facts)
    problem = next(job.problems(), None)
    if problem is None:
        return
    subject, expected, found, role = problem
    raise refusal(
        subject, expected, found, " ".join(job.overrides(job.repaired())) + _other_devices(role, job, placement)
    )


def _other_devices(role: str, job: _Batches, placement: Placement) -> str:
    """Devices of a role that the sizes suit as they are; the actor's must suit its rollout servers too, which is seen later."""
    if job.ranks.get(role, 1) == 1:
        return ""
    better = None if role == "actor" else placement.nearest(placement.devices_of(role), partial(_suited, role, job))
    return (
        f", or sharding.roles.{role}.devices={format_devices(better)}" if better else f", or other devices for {role}"
    )


def batches_suit(role: str, placement: Placement, facts: JobFacts, per_node: Sequence[int]) -> bool:
    """Whether a role could run on so many devices with the sizes as they are.

    Args:
        role: One that trains or evaluates.
        placement: Where it and the others run now.
        facts: The job.
        per_node: Devices on each node.
    """
    return _suited(role, _Batches.of(placement, facts), per_node)


def _suited(role: str, job: _Batches, per_node: Sequence[int]) -> bool:
    ranks, rest = divmod(sum(per_node), job.facts.engines[role].model_parallel_size)
    return not rest and next(replace(job, ranks={**job.ranks, role: ranks}).problems(), None) is None


@dataclass(kw_only=True, frozen=True)
class _Batches:
    """Sizes of a job's batches, and what they are split over.

    Args:
        facts: The job; its own sizes don't count here.
        where: What to say of each role's ranks.
        ranks: Data-parallel ranks of each role that trains or evaluates.
        launch_unit: What the samples of a step must divide by for `validate_config`; 1: nothing is asked.
        batch: Prompts of a step.
        minis: Prompts of an optimizer step, by role that trains.
        micros: Fixed micro-batches by role.
    """

    facts: JobFacts
    where: Mapping[str, str]
    ranks: Mapping[str, int]
    launch_unit: int
    batch: int
    minis: Mapping[str, int]
    micros: Mapping[str, tuple[MicroBatch, ...]]

    @classmethod
    def of(cls, placement: Placement, facts: JobFacts) -> _Batches:
        """The sizes as the user has them."""
        ranks = {role: placement.processes_of(role) // e.model_parallel_size for role, e in facts.engines.items()}
        ranks = {role: count for role, count in ranks.items() if count}
        devices = {role: format_devices(placement.devices_of(role)) for role in ranks}
        return cls(
            facts=facts,
            where={role: f"{role} has {n} data-parallel ranks on devices {devices[role]}" for role, n in ranks.items()},
            ranks=ranks,
            launch_unit=_launch_unit(placement, facts),
            batch=facts.train_batch_size,
            minis={role: mini for role in ranks if (mini := facts.engines[role].mini_batch_size) is not None},
            micros={role: facts.engines[role].micro_batches for role in ranks},
        )

    @property
    def prompts(self) -> int:
        """Prompts of one update."""
        return max(1, self.batch // self.facts.parameter_sync_step)

    def padded(self) -> list[int]:
        """Samples of one update after verl's padding, without the actor's mini-batches while only the critic is trained."""
        n = self.facts.rollout_n
        critic = [mini * n for role, mini in self.minis.items() if role != "actor"]
        both = [mini * n for mini in self.minis.values()]
        stages = [both, critic] if self.facts.critic_warmup > 1 else [both]
        return [round_up(self.prompts * n, math.lcm(self.ranks.get("actor", 1), *stage)) for stage in stages]

    def problems(self) -> Iterator[tuple[str, str, str, str]]:
        """What verl can't run with, as subject, expectation, finding and role."""
        yield from self._mini_problems()
        yield from self._batch_problems()
        for role, micro, samples in self._micro_samples():
            if wrong := [count for count in samples if count % micro.samples]:
                expected = (
                    f"a size that divides the {wrong[0]} samples that each of the {self.ranks[role]} ranks of {role} gets "
                    f"from one {'update' if micro.of_step else 'mini-batch'}"
                )
                yield micro.key, expected, str(micro.samples), ""

    def _mini_problems(self) -> Iterator[tuple[str, str, str, str]]:
        n = self.facts.rollout_n
        for role, mini in self.minis.items():
            if mini * n % self.ranks[role]:
                expected = f"a number of samples that divides by {self.ranks[role]}: {self.where[role]}"
                yield _MINI[role], expected, f"{mini} prompts x {n} responses = {mini * n} samples", role

    def _batch_problems(self) -> Iterator[tuple[str, str, str, str]]:
        n, steps = self.facts.rollout_n, self.facts.parameter_sync_step
        if self.batch % steps:
            yield _BATCH, f"a multiple of the {steps} updates of one step", str(self.batch), ""
        for role, mini in self.minis.items():
            if self.batch < mini and not self.facts.engines[role].dynamic_batches:
                yield _BATCH, f"at least one mini-batch, {_MINI[role]}={mini}", str(self.batch), ""
        if self.batch * n % self.launch_unit:
            expected = f"a number of samples that divides by {self.launch_unit}, since actor.use_dynamic_bsz is off"
            found = f"{self.batch} prompts x {n} responses = {self.batch * n} samples"
            yield _BATCH, f"{expected}: {self.where['actor']}", found, "actor"
        for role, ranks in self.ranks.items():
            if role not in self.minis and (uneven := [samples for samples in self.padded() if samples % ranks]):
                found = f"{self.prompts} prompts x {n} responses = {self.prompts * n} samples in one update"
                found += f", padded by verl to {uneven[0]}" if uneven[0] != self.prompts * n else ""
                yield _BATCH, f"a number of samples that divides by {ranks}: {self.where[role]}", found, role

    def _micro_samples(self) -> Iterator[tuple[str, MicroBatch, list[int]]]:
        """Each role's micro-batches, with the samples of one rank that they must divide."""
        for role, micros in self.micros.items():
            step = [samples // self.ranks[role] for samples in self.padded()]
            mini = [self.minis[role] * self.facts.rollout_n // self.ranks[role]] if role in self.minis else step
            yield from ((role, micro, step if micro.of_step else mini) for micro in micros)

    def repaired(self) -> _Batches:
        """Sizes that verl runs with: of those near the present ones, the ones with the smallest batch."""
        wrong = [*self._mini_problems(), *self._batch_problems()]
        if not wrong and not (self.is_padded and self._counts_micros):
            sizes = [self]
        elif self.facts.mode == "separate_async":
            sizes = [self._sized(together=True)]
        else:
            sizes = [self._sized(together=False), self._sized(together=True)]
        best = min(sizes, key=lambda job: (job.batch, sum(job.minis.values())))
        return replace(best, micros=best._fitting_micros())

    def _sized(self, *, together: bool) -> _Batches:
        """Mini-batches that each role's ranks divide, equal ones still equal, and a batch that verl takes.

        Args:
            together: Whether mini-batches also divide by all that only the batch must divide by, which saves a larger batch.
        """
        minis = {}
        for role, mini in self.minis.items():
            alike = [self.ranks[other] for other, size in self.minis.items() if size == mini]
            unit = self._prompts_unit(*(self._batch_units if together else alike))
            minis[role] = round_up(min(mini, self.batch) if self._is_fixed(role) else mini, unit)
        return replace(self, minis=minis)._with_batch(may_be_padded=any(self.prompts % m for m in self.minis.values()))

    def _with_batch(self, *, may_be_padded: bool) -> _Batches:
        """The next batch that verl takes beside the mini-batches.

        Args:
            may_be_padded: Whether the user's was no number of whole mini-batches either.
        """
        steps = self.facts.parameter_sync_step
        if self.facts.mode == "separate_async":  # one update is one mini-batch (trainer_separate_async.py)
            return replace(self, batch=self.minis.get("actor", self.prompts) * steps)
        may_be_padded = may_be_padded and not self._counts_micros
        least = max([-(-self.batch // steps), *(mini for role, mini in self.minis.items() if self._is_fixed(role))])
        for batch in (self.batch, round_up(least, self._prompts_unit(*self._batch_units)) * steps):
            job = replace(self, batch=batch)
            if next(job._batch_problems(), None) is None and (may_be_padded or not job.is_padded):
                return job
        samples = [mini * self.facts.rollout_n for mini in self.minis.values()]
        return replace(self, batch=round_up(least, self._prompts_unit(*self._batch_units, *samples)) * steps)

    def _is_fixed(self, role: str) -> bool:
        return not self.facts.engines[role].dynamic_batches

    @property
    def _batch_units(self) -> list[int]:
        """What the samples of a batch must divide by."""
        return [*self.ranks.values(), 1 if self._counts_micros else self.launch_unit]

    @property
    def is_padded(self) -> bool:
        """Whether verl adds samples to an update."""
        return self.padded()[0] != self.prompts * self.facts.rollout_n

    @property
    def _counts_micros(self) -> bool:
        """Whether the actor's micro-batch is part of `launch_unit`: then a batch of whole mini-batches is sure to pass."""
        return self.launch_unit > 1 and self.facts.engines["actor"].strategy == "megatron"

    def _prompts_unit(self, *samples: int) -> int:
        """The prompts whose samples divide by each of some numbers."""
        unit = math.lcm(*samples)
        return unit // math.gcd(unit, self.facts.rollout_n)

    def _fitting_micros(self) -> dict[str, tuple[MicroBatch, ...]]:
        """The largest micro-batches, up to the present ones, that divide; those of one override stay equal."""
        counts: dict[str, list[int]] = {}
        for _, micro, samples in self._micro_samples():
            counts.setdefault(_override(micro), []).extend(samples)

        def fitting(micro: MicroBatch) -> MicroBatch:
            common = math.gcd(*counts[_override(micro)])
            return replace(micro, samples=next(s for s in range(micro.samples, 0, -1) if common % s == 0))

        return {role: tuple(fitting(micro) for micro in micros) for role, micros in self.micros.items()}

    def overrides(self, wanted: _Batches) -> list[str]:
        """What to type for other sizes. The critic's mini-batch follows the actor's unless it is typed too."""
        lines = [f"{_BATCH}={wanted.batch}"] if wanted.batch != self.batch else []
        follows = wanted.minis.get("actor") != self.minis.get("actor")
        lines += [f"{_MINI[role]}={m}" for role, m in wanted.minis.items() if follows or m != self.minis[role]]
        for role, micros in self.micros.items():
            pairs = zip(micros, wanted.micros[role], strict=True)
            lines += [f"{_override(new)}={new.samples}" for old, new in pairs if new.samples != old.samples]
        return list(dict.fromkeys(lines))


def _override(micro: MicroBatch) -> str:
    return micro.override or micro.key


def _launch_unit(placement: Placement, facts: JobFacts) -> int:
    """What `validate_config` divides by: the actor's processes, for Megatron its ranks x micro-batch (utils/config.py)."""
    engine, processes = facts.engines["actor"], placement.processes_of("actor")
    if engine.dynamic_batches:
        return 1
    if engine.strategy != "megatron":
        return processes
    micro = next((micro.samples for micro in engine.micro_batches if not micro.of_step), 1)
    return max(1, processes // engine.model_parallel_size * micro)


def round_up(number: int, multiple: int) -> int:
    """The next multiple, at least one of them."""
    return max(multiple, math.ceil(number / multiple) * multiple)


def refusal(subject: str, expected: str, found: str, remedy: str) -> PlacementError:
    """A placement that verl could not run."""
    return PlacementError(subject, expected=expected, found=found, consequence="the run does not start", remedy=remedy)
