"""The table of a placement: one row for each role, and notes on what the layout costs."""

import json
import re

import pytest

from verl_ext_sharding.placement.batches import check_batches
from verl_ext_sharding.placement.bundles import place
from verl_ext_sharding.placement.job import EngineFacts, ServerFacts
from verl_ext_sharding.placement.table import placement_table


def rows(devices, facts, *spread):
    return {row.role: row for row in shown(devices, facts, *spread).rows}


def notes(devices, facts, *spread):
    return shown(devices, facts, *spread).notes


def shown(devices, facts, *spread):
    """The table of a job; layers of the roles `spread` lie on the devices of one process."""
    return placement_table(place(devices, facts, layouts=dict.fromkeys(spread, "device_map")), facts)


def test_each_role_has_a_row_and_rollout_comes_after_the_actor(job):
    assert list(rows({"actor": [0, 1], "critic": [2], "ref": [3]}, job())) == ["actor", "rollout", "ref", "critic"]


def test_a_row_says_class_engine_devices_ranks_and_nodes(job):
    engines = {
        "actor": EngineFacts(strategy="fsdp2", worker_class="ActorRolloutRefWorker"),
        "critic": EngineFacts(strategy="megatron", model_parallel_size=2, worker_class="TrainingWorker"),
    }
    server = ServerFacts(name="vllm", ranks_per_replica=2)
    found = rows({"actor": [0, 1], "critic": "2-5"}, job(("actor",), nodes=2, engines=engines, rollout=server))
    actor, rollout, critic = found["actor"], found["rollout"], found["critic"]
    assert (actor.worker_class, actor.engine, actor.devices, actor.ranks, actor.nodes) == (
        "ActorRolloutRefWorker",
        "fsdp2",
        (0, 1),
        "2 dp",
        (0,),
    )
    assert (rollout.engine, rollout.devices, rollout.ranks) == ("vllm", (0, 1), "1 server x 2")
    assert (critic.engine, critic.ranks, critic.nodes) == ("megatron", "2 dp x 2 mp", (0, 1))


@pytest.mark.parametrize(("devices", "ranks"), [([0], "1 server x 1"), ([0, 1, 2], "3 servers x 1")])
def test_servers_are_counted(devices, ranks, job):
    assert rows({"actor": devices}, job(("actor",)))["rollout"].ranks == ranks


def test_roles_that_meet_on_a_device_name_each_other(job):
    found = rows({"actor": [0, 1], "critic": [1, 2], "ref": [3]}, job())
    assert found["actor"].shares == "rollout, critic [1]"
    assert found["critic"].shares == "actor [1], rollout [1]"
    assert found["ref"].shares == "none"


def test_roles_that_share_all_devices_are_named_without_them(job):
    assert rows({}, job())["critic"].shares == "actor, ref, rollout"


def test_a_separate_rollout_is_no_row_of_the_actors_devices(job):
    server = ServerFacts(name="vllm", ranks_per_replica=2, own_nodes=(4,))
    facts = job(("actor",), mode="separate_async", hybrid_rollout=False, rollout=server)
    row = rows({"actor": [0, 1]}, facts)["rollout"]
    assert row.devices == ()
    assert row.ranks == "2 servers x 2"
    assert row.shares == "none: verl reserves 4 devices of its own (2 x 2)"


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_the_workers_of_separate_async_are_its_own(mode, job):
    engines = {
        "actor": EngineFacts(strategy="fsdp2", worker_class="ActorRolloutRefWorker"),
        "ref": EngineFacts(strategy="fsdp2", worker_class="ActorRolloutRefWorker"),
        "critic": EngineFacts(strategy="fsdp2", worker_class="TrainingWorker"),
    }
    found = rows({"ref": [1]}, job(engines=engines, mode=mode))
    expected = "DetachActorWorker" if mode == "separate_async" else "ActorRolloutRefWorker"
    assert (found["actor"].worker_class, found["ref"].worker_class) == (expected, expected)
    assert found["critic"].worker_class == "TrainingWorker"


def test_devices_that_rollouts_servers_leave_of_their_pool_are_noted(job):
    server = ServerFacts(name="vllm", ranks_per_replica=3, own_nodes=(8,))
    facts = job(("actor",), mode="separate_async", hybrid_rollout=False, rollout=server)
    assert rows({}, facts)["rollout"].ranks == "2 servers x 3"
    assert "verl leaves 2 of the 8 devices of rollout's pool alone: a server takes 3" in notes({}, facts)


def test_servers_of_several_teachers_are_counted_by_size(job):
    teacher = ServerFacts(name="vllm", ranks_per_replica=2, replicas=(2, 1, 1), own_nodes=(4,))
    facts = job(("actor",), teacher=teacher)
    assert rows({}, facts)["teacher"].ranks == "1 server x 2, 2 servers x 1"
    assert rows({"teacher": "all"}, facts)["teacher"].ranks == "1 server x 2, 2 servers x 1"


def test_rows_of_reward_and_teacher_name_their_servers(job):
    facts = job(("actor",), reward=ServerFacts(name="sglang"), teacher=ServerFacts(name="vllm", ranks_per_replica=2))
    found = rows({"actor": [0], "reward": [1], "teacher": [2, 3]}, facts)
    assert (found["reward"].engine, found["reward"].ranks) == ("sglang", "1 server x 1")
    assert (found["reward"].worker_class, found["rollout"].worker_class) == ("CheckpointEngineWorker", "rollout server")
    assert (found["teacher"].engine, found["teacher"].ranks) == ("vllm", "1 server x 2")


# Layers of one process


def test_a_spread_role_has_one_rank_and_its_layout_as_engine(job):
    found = rows({"actor": [0, 1], "critic": [2, 3]}, job(), "critic")
    critic, actor = found["critic"], found["actor"]
    assert (critic.engine, critic.devices, critic.ranks) == ("device_map", (2, 3), "1 dp, layers over 2")
    assert (actor.engine, actor.devices, actor.ranks) == ("fsdp2", (0, 1), "2 dp")


def test_a_spread_role_keeps_its_worker_class(job):
    engines = {"critic": EngineFacts(strategy="fsdp2", worker_class="TrainingWorker")}
    assert rows({"critic": [2, 3]}, job(engines=engines), "critic")["critic"].worker_class == "TrainingWorker"


def test_layers_over_one_device_are_not_called_spread(job):
    critic = rows({"critic": [2]}, job(), "critic")["critic"]
    assert (critic.engine, critic.ranks) == ("device_map", "1 dp")


def test_rollout_of_a_spread_actor_is_one_server_on_its_first_device(job):
    rollout = rows({"actor": [1, 2], "critic": [0], "ref": [2]}, job(), "actor")["rollout"]
    assert (rollout.engine, rollout.devices, rollout.ranks, rollout.shares) == ("vllm", (1,), "1 server x 1", "actor")


def test_a_role_on_the_other_devices_of_a_spread_actor_shares_with_it_and_not_with_rollout(job):
    found = rows({"actor": [0, 1], "critic": [1]}, job(), "actor")
    assert found["critic"].shares == "actor, ref"
    assert found["actor"].shares == "ref, rollout [0], critic [1]"


# Notes


def test_a_rollout_on_the_first_device_of_a_spread_actor_is_noted(job):
    assert "rollout uses 1 of 2 devices [0]" in "\n".join(notes({}, job(devices=2), "actor", "critic"))


def test_devices_that_a_spread_role_has_are_not_idle(job):
    assert not any("no role uses" in note for note in notes({"actor": [0, 1], "critic": [2, 3]}, job(), "critic"))


def test_a_spread_and_a_sharded_role_on_the_same_devices_are_two_processes(job):
    text = "\n".join(notes({}, job(devices=2), "critic"))
    assert "devices [0,1]: 2 processes (actor+ref, critic), with the memory of all of them" in text


def test_a_rollout_on_a_part_of_the_devices_is_noted_with_the_numbers(job):
    assert "rollout uses 2 of 4 devices [0,1]" in "\n".join(notes({"actor": [0, 1]}, job()))


def test_a_rollout_on_all_devices_is_not_noted(job):
    assert "rollout uses" not in "\n".join(notes({"critic": [1]}, job()))


@pytest.mark.parametrize(
    ("devices", "note"),
    [
        ({"actor": [0], "critic": [1]}, "no role uses devices [2,3]"),
        ({"actor": [0, 1, 2], "critic": [0]}, "no role uses device [3]"),
    ],
)
def test_idle_devices_are_noted(devices, note, job):
    assert note in notes(devices, job())


def test_no_device_is_idle_where_verl_places_the_roles(job):
    assert not any("no role uses" in note for note in notes({}, job()))


def test_a_reference_in_the_actors_processes_is_noted_with_how_to_move_it(job):
    text = "\n".join(notes({"actor": [0], "critic": [1]}, job()))
    assert "ref shares the actor's processes" in text
    assert "sharding.roles.ref.devices=[1,2,3] moves it away" in text


@pytest.mark.parametrize(("devices", "batch"), [({"actor": [0], "critic": [1]}, 16), ({"actor": [2, 3]}, 24)])
def test_the_devices_that_a_reference_could_move_to_divide_its_samples(devices, batch, job):
    mini = EngineFacts(strategy="fsdp2", mini_batch_size=batch)
    facts = job(engines={"actor": mini, "critic": mini}, train_batch_size=batch)
    (note,) = [note for note in notes(devices, facts) if "ref shares" in note]
    offered = re.search(r"devices=(\[[\d,]+\])", note)[1]
    check_batches(place({**devices, "ref": offered}, facts), facts)


def test_nowhere_to_move_is_named_where_the_actor_has_all_devices(job):
    (note,) = [note for note in notes({}, job()) if "ref shares" in note]
    assert "sharding.roles" not in note


@pytest.mark.parametrize("strategy", ["megatron", "veomni", "torchtitan", "automodel"])
def test_only_of_an_fsdp_engine_it_is_said_that_a_reference_stays_in_host_memory(strategy, job):
    def text(name):
        return "\n".join(notes({}, job(engines={role: EngineFacts(strategy=name) for role in ("actor", "ref")})))

    for name in ("fsdp", "fsdp2"):
        assert "its weights stay in host memory" in text(name)
    assert "ref shares the actor's processes" in text(strategy)
    assert "host memory" not in text(strategy)


def test_a_reference_that_is_spread_with_the_actor_does_not_stay_in_host_memory(job):
    text = "\n".join(notes({"actor": [0, 1]}, job(), "actor"))
    assert "ref shares the actor's processes" in text
    assert "host memory" not in text


def test_nodes_that_maps_name_by_address_are_noted_with_their_numbers(job):
    facts = job(nodes=2)
    all_named = {"actor": {"10.0.0.9": [0]}, "critic": {"10.0.0.2": [0]}}
    assert "10.0.0.2 is node0, 10.0.0.9 is node1: in the order of their addresses" in notes(all_named, facts)
    (note,) = [note for note in notes({"critic": {"10.0.0.9": [0]}}, facts) if "10.0.0.9" in note]
    assert "once Ray runs" in note


def test_a_reference_elsewhere_is_not_noted(job):
    assert "ref shares" not in "\n".join(notes({"ref": [3]}, job()))


def test_devices_with_several_processes_are_noted_in_groups(job):
    text = "\n".join(notes({"actor": [0, 1], "critic": [1, 2], "ref": [1, 3]}, job()))
    assert "device [1]: 3 processes (actor, ref, critic)" in text
    assert "device [0]" not in text


def test_devices_that_hold_the_same_processes_are_noted_together(job):
    text = "\n".join(notes({"actor": [0, 1], "critic": [1, 0, 2], "ref": [3]}, job()))
    assert "devices [0,1]: 2 processes (actor, critic)" in text


def test_one_process_for_several_roles_is_not_several_processes(job):
    assert not any("memory of all of them" in note for note in notes({}, job()))


def test_the_table_is_plain_data_for_programs(job):
    facts = job()
    data = json.loads(json.dumps(placement_table(place({"actor": [0]}, facts), facts).as_dict()))
    assert set(data) == {"rows", "notes"}
    assert set(data["rows"][0]) == {"role", "worker_class", "engine", "devices", "ranks", "nodes", "shares"}
