"""verl's own PPO with the layers of actor and critic over several devices of one process each."""

from __future__ import annotations

import pytest

from tests.verl import harness
from tests.verl.conftest import SAVED, STEPS, placed, resume_from

pytestmark = pytest.mark.verl


LAST = SAVED + STEPS


def resumed(folder, name: str, source: tuple, *, spread: bool) -> harness.Job:
    """From a checkpoint of the other layout to the last step; the step before that is saved."""
    checkpoints, step = source
    layout = "device_map" if spread else "fsdp"
    lines = [
        *harness.base_overrides(LAST),
        *placed(actor=[0, 2], critic=[1, 3], ref=[3]),
        *(f"sharding.roles.{role}.layout={layout}" for role in ("actor", "critic")),
        f"trainer.save_freq={LAST - 1}",
        f"trainer.default_local_dir={folder}/checkpoints-{name}",
        *resume_from(checkpoints, step),
    ]
    return harness.run_trainer(folder / name, lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("spread")


@pytest.fixture(scope="module")
def spread(split, folder):
    """Goes on from what shards over two ranks saved."""
    return resumed(folder, "spread", (split[1], SAVED), spread=True)


@pytest.fixture(scope="module")
def sharded_after_spread(spread, folder):
    return resumed(folder, "sharded", (folder / "checkpoints-spread", LAST - 1), spread=False)


def test_one_process_of_each_role_has_all_of_its_devices(spread):
    harness.assert_trained(spread, STEPS)
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


@pytest.mark.parametrize("step", range(SAVED + 1, LAST + 1))
def test_a_spread_job_goes_on_from_a_checkpoint_of_shards_with_the_same_numbers(colocated, spread, step):
    assert min(spread.metrics) == SAVED + 1
    assert harness.differences(colocated.metrics[step], spread.metrics[step]) == {}


def test_rollout_follows_the_spread_actor(spread):
    for metrics in spread.metrics.values():
        assert metrics["training/rollout_probs_diff_max"] < 1e-5


def test_a_checkpoint_of_spread_layers_resumes_sharded_over_ranks(colocated, sharded_after_spread):
    harness.assert_trained(sharded_after_spread, 1)
    assert sharded_after_spread.placement["actor"] == [0, 2]
    assert harness.differences(colocated.metrics[LAST], sharded_after_spread.metrics[LAST]) == {}
