"""verl's own PPO with the layers of actor and critic over several devices of one process each."""

from __future__ import annotations

import pytest

from tests.verl import harness
from tests.verl.conftest import SAVED, STEPS, placed, resume_from

pytestmark = pytest.mark.verl


def overrides(folder, steps: int, *, spread: bool) -> list[str]:
    layouts = [f"sharding.roles.{role}.layout={'device_map' if spread else 'fsdp'}" for role in ("actor", "critic")]
    where = placed(actor=[0, 2], critic=[1, 3], ref=[3])
    return [
        *harness.base_overrides(steps),
        *where,
        *layouts,
        "trainer.save_freq=1",
        f"trainer.default_local_dir={folder}/checkpoints-{'spread' if spread else 'sharded'}",
    ]


def resumed(folder, name: str, step: int, *, spread: bool) -> harness.Job:
    """One more step from a checkpoint of the other layout: first of the spread run's, then of what came of it."""
    other = folder / f"checkpoints-{'sharded' if spread else 'spread'}"
    lines = [*overrides(folder, step + 1, spread=spread), *resume_from(other, step)]
    return harness.run_trainer(folder / name, lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("spread")


@pytest.fixture(scope="module")
def spread(folder):
    return harness.run_trainer(folder / "first", overrides(folder, STEPS + 1, spread=True))


@pytest.fixture(scope="module")
def sharded_after_spread(spread, folder):
    return resumed(folder, "sharded", SAVED, spread=False)


@pytest.fixture(scope="module")
def spread_after_sharded(sharded_after_spread, folder):
    return resumed(folder, "again", SAVED + 1, spread=True)


def test_one_process_of_each_role_has_all_of_its_devices(spread):
    harness.assert_trained(spread, STEPS + 1)
    assert spread.placement == {"actor": [0], "rollout": [0], "critic": [1], "ref": [3]}
    engines = {row["role"]: row["engine"] for row in spread.rows}
    assert engines["actor"] == "CpuDeviceMapEngineWithLMHead"
    assert engines["critic"] == "CpuDeviceMapEngineWithValueHead"
    assert engines["ref"] == "CpuEngineWithLMHead"
    devices = {row["role"]: row["devices"] for row in spread.rows}
    assert devices == {"actor": [0, 2], "rollout": [0], "critic": [1, 3], "ref": [3]}
    visible = {row["role"]: row["visible"] for row in spread.rows}
    assert (visible["actor"], visible["critic"], visible["ref"]) == ("0,2", "1,3", "3")


def test_the_tables_say_which_device_holds_which_layers(spread):
    layers = {event["role"]: event["rows"] for event in spread.events if event["event"] == "layers"}
    assert {row["device"] for row in layers["actor"]} == {0, 2}
    assert {row["device"] for row in layers["critic"]} == {1, 3}
    assert all(row["num_bytes"] > 0 for row in layers["actor"] if "layers" in row["modules"])
    assert "Layers of actor (planned)" in spread.output
    assert "Layers of critic (as loaded)" in spread.output


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_spread_job_trains_to_the_same_numbers_as_a_sharded_one(colocated, spread, step):
    assert harness.differences(colocated.metrics[step], spread.metrics[step]) == {}


def test_rollout_follows_the_spread_actor(spread):
    for step in range(1, STEPS + 2):
        assert spread.metrics[step]["training/rollout_probs_diff_max"] < 1e-5


def test_a_checkpoint_of_spread_layers_resumes_sharded_over_ranks(spread, sharded_after_spread):
    harness.assert_trained(sharded_after_spread, 1)
    assert sharded_after_spread.placement["actor"] == [0, 2]
    found = harness.differences(spread.metrics[SAVED + 1], sharded_after_spread.metrics[SAVED + 1])
    assert found == {}


def test_a_checkpoint_of_shards_resumes_with_the_layers_spread(spread, spread_after_sharded):
    harness.assert_trained(spread_after_sharded, 1)
    assert spread_after_sharded.placement["actor"] == [0]
    found = harness.differences(spread.metrics[SAVED + 2], spread_after_sharded.metrics[SAVED + 2])
    assert found == {}
