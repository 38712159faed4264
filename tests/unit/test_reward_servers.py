"""Reward servers in the trainer: they are read back beside those of rollout, and their end is told with a way out."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")
ray_exceptions = pytest.importorskip("ray.exceptions")

from verl_ext_sharding.errors import RewardServerError  # noqa: E402
from verl_ext_sharding.rollout import reward_metrics  # noqa: E402
from verl_ext_sharding.workers import prompt_failures  # noqa: E402

DIED = ray_exceptions.ActorDiedError()


def config(name="hf"):
    return OmegaConf.create({"reward": {"reward_model": {"model_path": "org/reward-7b", "rollout": {"name": name}}}})


# Read back


def trainer_with(rollout, reward):
    """A trainer with servers of rollout, and of a reward model (None: it has none)."""
    manager = None if reward is None else SimpleNamespace(rollout_replicas=reward)
    return SimpleNamespace(
        llm_server_manager=SimpleNamespace(get_replicas=lambda: rollout),
        reward_loop_manager=SimpleNamespace(reward_model_manager=manager),
    )


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (["c"], [("rollout", "a"), ("rollout", "b"), ("reward", "c")]),
        ([], [("rollout", "a"), ("rollout", "b")]),
        (None, [("rollout", "a"), ("rollout", "b")]),
    ],
)
def test_servers_of_rollout_come_first_and_those_of_a_reward_model_where_there_is_one(reward, expected):
    assert list(prompt_failures.replicas(trainer_with(["a", "b"], reward))) == expected


# A server that died


def test_a_server_that_died_is_named_with_its_model_and_where_to_look():
    error = reward_metrics.server_died(config("vllm"), DIED)
    assert error.subject == "server of the reward model org/reward-7b"
    assert error.found == f"it has ended: {str(DIED).splitlines()[0]}"
    assert "the vllm reward server" in error.remedy
    assert "session_latest/logs" in error.remedy
    assert "reward.reward_model.rollout.max_num_batched_tokens" in error.remedy


class Trainer:
    """A trainer whose colocated reward model fails as it is told."""

    def __init__(self, failure):
        self.config, self.failure = config(), failure

    def _compute_reward_colocate(self, batch, metrics=None):
        raise self.failure


def test_why_ray_ended_a_server_is_told():
    text = "The actor died unexpectedly.\n\tpid: 7\nThe actor is dead because its worker process has died. Exit detail:\n  OOM."
    error = reward_metrics.server_died(config(), RuntimeError(text))
    assert error.found == "it has ended: its worker process has died. Exit detail: OOM."


def test_only_the_first_line_of_what_ray_says_is_repeated():
    error = reward_metrics.server_died(config(), RuntimeError("The actor died.\n\tclass_name: HFRewardServer"))
    assert error.found == "it has ended: The actor died."


def test_the_end_of_a_colocated_server_ends_the_run_with_our_error_and_rays_behind_it():
    trainer = Trainer(DIED)
    reward_metrics.apply(trainer)
    with pytest.raises(RewardServerError) as caught:
        trainer._compute_reward_colocate("batch")
    assert caught.value.__cause__ is trainer.failure
    assert "no rewards" in caught.value.consequence


def test_another_error_of_colocated_scoring_is_raised_as_it_is():
    trainer = Trainer(ValueError("verl's own"))
    reward_metrics.apply(trainer)
    with pytest.raises(ValueError, match="verl's own"):
        trainer._compute_reward_colocate("batch")


def test_without_our_hooks_rays_error_comes_through():
    trainer = Trainer(DIED)
    reward_metrics.apply(trainer)
    reward_metrics.remove(trainer)
    with pytest.raises(ray_exceptions.ActorDiedError):
        trainer._compute_reward_colocate("batch")
