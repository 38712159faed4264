"""verl's own PPO and GRPO on four logical devices, each role where it was asked to be."""

from __future__ import annotations

import pytest

from tests.verl import harness
from tests.verl.conftest import SAVED, STEPS

pytestmark = pytest.mark.verl


def test_with_no_devices_asked_every_role_trains_on_verls_own_pool(colocated):
    harness.assert_trained(colocated, SAVED + STEPS)
    accelerators = {row["accelerator"] for row in colocated.rows if row["role"] == "critic"}
    assert accelerators == {"0", "1"}


def test_roles_run_on_the_devices_asked_for_gaps_included(split):
    split, _ = split
    harness.assert_trained(split, SAVED + STEPS)
    assert split.placement == {"actor": [0, 2], "rollout": [0, 2], "critic": [1], "ref": [3]}
    assert {row["accelerator"] for row in split.rows if row["role"] == "actor"} == {"0", "2"}


def test_roles_may_overlap_without_being_equal(overlapping):
    harness.assert_trained(overlapping, STEPS)
    assert overlapping.placement == {"actor": [0, 1], "rollout": [0, 1], "critic": [1, 2], "ref": [0]}
    pids = {row["role"]: {r["pid"] for r in overlapping.rows if r["role"] == row["role"]} for row in overlapping.rows}
    assert not pids["actor"] & pids["critic"]
    assert not pids["actor"] & pids["ref"]


@pytest.mark.parametrize("step", range(1, SAVED + STEPS + 1))
def test_a_split_job_trains_to_the_same_numbers_as_a_colocated_one(colocated, split, step):
    assert harness.differences(colocated.metrics[step], split[0].metrics[step]) == {}


@pytest.mark.parametrize("step", range(SAVED + 1, SAVED + STEPS + 1))
def test_an_overlapping_job_goes_on_from_a_split_ones_checkpoint_with_the_same_numbers(colocated, overlapping, step):
    assert min(overlapping.metrics) == SAVED + 1
    assert harness.differences(colocated.metrics[step], overlapping.metrics[step]) == {}


def test_rollout_and_actor_agree_on_probabilities_after_every_update(colocated, split, overlapping):
    for job in (colocated, split[0], overlapping):
        for step in job.metrics:
            assert job.metrics[step]["training/rollout_probs_diff_max"] < 1e-5


def test_weights_move_so_that_equal_numbers_mean_something(split):
    split, _ = split
    entropies = [split.metrics[step]["actor/entropy"] for step in range(1, STEPS + 1)]
    assert len(set(entropies)) == STEPS
    assert all(split.metrics[step]["actor/grad_norm"] > 0.1 for step in range(1, STEPS + 1))
    assert split.metrics[STEPS]["actor/reward_kl_penalty"] != 0


def test_the_planned_table_comes_before_the_workers_and_names_who_shares(overlapping):
    planned = overlapping.output.index("Roles and devices (planned)")
    workers = overlapping.output.index('"name": "workers"')
    assert planned < workers
    assert "device [1]: 2 processes (actor, critic)" in overlapping.output


def test_workers_are_subclasses_of_verls_with_engines_for_the_platform(split):
    kinds = {row["role"]: (row["worker"], row["engine"]) for row in split[0].rows}
    assert kinds["critic"] == ("ShardingTrainingWorker", "CpuEngineWithValueHead")
    assert kinds["actor"] == ("ShardingActorRolloutRefWorker", "CpuEngineWithLMHead")


def test_grpo_trains_with_a_reference_of_its_own_and_validates(grpo):
    harness.assert_trained(grpo, STEPS)
    assert grpo.placement == {"actor": [1, 3], "rollout": [1, 3], "ref": [0], "reward": [2]}
    assert any(name.startswith("val-") for name in grpo.metrics[STEPS])
