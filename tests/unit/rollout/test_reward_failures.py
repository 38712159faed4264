"""A sample that can't be scored ends the run, also where verl's agent loop catches its error."""

from types import SimpleNamespace

import pytest

from verl_ext_sharding.errors import RewardInputError
from verl_ext_sharding.rollout import reward_failures

FAILURE = RewardInputError("a sample", expected="a short one", found="a long one", consequence="-", remedy="-")


class Buffer:
    polls = 0

    def _wait_for_next_poll(self, partition_id, last_debug_time):
        self.polls += 1
        return last_debug_time + 1


class Trainer:
    """verl's trainer between two samplings, and its two reward loop workers."""

    def __init__(self, *, own_pool=True, failure=None):
        self.ended, self.replay_buffer = 0, Buffer()
        workers = [SimpleNamespace(first_failure=SimpleNamespace(remote=lambda f=f: f)) for f in (None, failure)]
        handles = workers if own_pool else None
        self.reward_loop_manager = SimpleNamespace(reward_loop_workers=workers, reward_loop_worker_handles=handles)

    def on_sample_end(self):
        self.ended += 1


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.setattr(reward_failures.ray, "get", list)


def hooked(**state):
    trainer = Trainer(**state)
    reward_failures.apply(trainer)
    return trainer


def test_a_failure_ends_the_run_once_the_sample_of_a_step_is_drawn():
    trainer = hooked(failure=FAILURE)
    with pytest.raises(RewardInputError, match="a long one"):
        trainer.on_sample_end()
    assert trainer.ended == 1


def test_a_failure_ends_a_run_that_waits_for_samples_which_never_come():
    trainer = hooked(failure=FAILURE)
    with pytest.raises(RewardInputError, match="a long one"):
        trainer.replay_buffer._wait_for_next_poll("train", 0.0)


@pytest.mark.parametrize("state", [{}, {"own_pool": False, "failure": FAILURE}], ids=["fine", "colocated"])
def test_the_trainer_goes_on_where_nothing_failed_or_its_own_call_raises(state):
    trainer = hooked(**state)
    trainer.on_sample_end()
    assert trainer.replay_buffer._wait_for_next_poll("train", 5.0) == 6.0
    assert (trainer.ended, trainer.replay_buffer.polls) == (1, 1)


def test_after_removal_trainer_and_buffer_are_their_classes_again():
    trainer = hooked(failure=FAILURE)
    reward_failures.apply(trainer)
    reward_failures.remove(trainer)
    reward_failures.remove(trainer)
    trainer.on_sample_end()
    assert vars(trainer.replay_buffer) == {}
