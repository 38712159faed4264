"""Runs that many tests look at, each made once per session."""

from __future__ import annotations

import pytest

from tests.verl import harness

STEPS = 3


def placed(**roles: list[int]) -> list[str]:
    return [f"sharding.roles.{role}.devices={devices}".replace(" ", "") for role, devices in roles.items()]


@pytest.fixture(scope="session")
def colocated(tmp_path_factory):
    """Every role on every device: verl's own pool, with the plugin on."""
    return harness.run_trainer(tmp_path_factory.mktemp("colocated"), harness.base_overrides(STEPS))


@pytest.fixture(scope="session")
def split(tmp_path_factory):
    """Actor on a list with a gap, critic and reference apart."""
    lines = harness.base_overrides(STEPS) + placed(actor=[0, 2], critic=[1], ref=[3])
    return harness.run_trainer(tmp_path_factory.mktemp("split"), lines)


@pytest.fixture(scope="session")
def overlapping(tmp_path_factory):
    """Lists that overlap without being equal: three processes share devices."""
    lines = harness.base_overrides(STEPS) + placed(actor=[0, 1], critic=[1, 2], ref=[0, 3])
    return harness.run_trainer(tmp_path_factory.mktemp("overlapping"), lines)


@pytest.fixture(scope="session")
def grpo_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("grpo")


def grpo_overrides(folder) -> list[str]:
    lines = [line for line in harness.base_overrides(STEPS) if "adv_estimator" not in line]
    return [
        *lines,
        *placed(actor=[1, 3], ref=[0]),
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=False",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.rollout.n=2",
        "sharding.roles.rollout.batch_size=4",
        "trainer.test_freq=3",
        "trainer.save_freq=2",
        f"trainer.default_local_dir={folder}/checkpoints",
    ]


@pytest.fixture(scope="session")
def grpo(grpo_folder):
    """GRPO with validation, a checkpoint at step 2, a limit on requests, and a variable that the user exported."""
    return harness.run_trainer(grpo_folder / "first", grpo_overrides(grpo_folder), env={"NCCL_IB_DISABLE": "0"})


@pytest.fixture(scope="session")
def grpo_resumed(grpo, grpo_folder):
    """The same run, continued from its checkpoint of step 2."""
    lines = [*grpo_overrides(grpo_folder), f"trainer.resume_from_path={grpo_folder}/checkpoints/global_step_2"]
    lines = [line for line in lines if not line.startswith("trainer.resume_mode")] + ["trainer.resume_mode=resume_path"]
    return harness.run_trainer(grpo_folder / "resumed", lines)
