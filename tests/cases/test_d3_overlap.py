"""D3: two roles on overlapping GPU lists (verl#3125) are accepted, and the plan says who shares what."""

import json

import pytest

from verl_ext_sharding.cli import main
from verl_ext_sharding.errors import PlacementError
from verl_ext_sharding.placement.bundles import place
from verl_ext_sharding.placement.resources import NodeResources, check_cluster

EIGHT_GPUS = ("trainer.n_gpus_per_node=8", "actor_rollout_ref.rollout.name=vllm")
OVERLAP = ("sharding.roles.actor.devices=0-5", "sharding.roles.critic.devices=2-7")
BATCHES = (  # six ranks divide neither 1024 prompts nor mini-batches of 256
    "data.train_batch_size=768",
    "actor_rollout_ref.actor.ppo_mini_batch_size=192",
    "critic.ppo_mini_batch_size=192",
)


@pytest.fixture
def plan(capsys):
    def run(*overrides):
        assert main.main(["plan", "--placement", "--json", *EIGHT_GPUS, *overrides]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def row(plan, role):
    return next(row for row in plan["rows"] if row["role"] == role)


def test_overlapping_lists_are_accepted_as_written(plan):
    found = plan(*OVERLAP, *BATCHES)
    assert row(found, "actor")["devices"] == [0, 1, 2, 3, 4, 5]
    assert row(found, "critic")["devices"] == [2, 3, 4, 5, 6, 7]


def test_the_plan_says_that_the_middle_gpus_hold_both_with_the_memory_of_both(plan):
    found = plan(*OVERLAP, *BATCHES)
    assert "critic [2,3,4,5]" in row(found, "actor")["shares"]
    assert "actor [2,3,4,5]" in row(found, "critic")["shares"]
    (note,) = [note for note in found["notes"] if "processes (" in note]
    assert "[2,3,4,5]: 2 processes (actor, critic)" in note
    assert "memory of all of them" in note


def test_bundles_are_shared_where_the_lists_meet(job):
    facts = job(("actor", "critic"), devices=8)
    placement = place({"actor": "0-5", "critic": "2-7"}, facts)
    assert placement.most_processes == 2
    assert placement.used == tuple(range(8))
    node = [NodeResources(name="10.0.0.1", num_devices=8, num_cpus=8 * 2 + 2)]
    assert check_cluster(place({"actor": "0-5", "critic": "2-7"}, facts, colocate_count=2), facts, node) == 2


def test_disjoint_halves_say_that_rollout_uses_half_of_the_gpus(plan):
    found = plan("sharding.roles.actor.devices=0-3", "sharding.roles.critic.devices=4-7")
    assert any("rollout uses 4 of 8 devices [0,1,2,3]" in note for note in found["notes"])
    assert row(found, "actor")["shares"] == "rollout"
    assert row(found, "critic")["shares"] == "none"
    assert not any("processes (" in note for note in found["notes"])


def test_nodes_of_four_and_two_gpus_are_refused_with_layouts_that_fit(job):
    facts = job(("actor", "critic"), nodes=2, devices=4)
    nodes = [NodeResources(name=f"10.0.0.{i}", num_devices=d, num_cpus=64) for i, d in enumerate((4, 2))]
    with pytest.raises(PlacementError) as caught:
        check_cluster(place({}, facts), facts, nodes)
    assert "10.0.0.0: 4, 10.0.0.1: 2" in caught.value.found
    assert caught.value.remedy == (
        "trainer.nnodes=1 trainer.n_gpus_per_node=4 (4 devices) or trainer.nnodes=2 trainer.n_gpus_per_node=2 (4 devices)"
    )
