"""From device lists to pools: which roles share processes, and what each process is promised."""

import itertools
import json
from collections import Counter

import pytest

from verl_ext_sharding.errors import PlacementError
from verl_ext_sharding.placement.bundles import DEFAULT_COLOCATE_COUNT, Placement, Pool, Promise, place
from verl_ext_sharding.placement.devices import Topology
from verl_ext_sharding.placement.job import EngineFacts, ServerFacts

ROLES = ("actor", "ref", "critic")
SUBSETS = [subset for size in range(1, 5) for subset in itertools.combinations(range(4), size)]


def refusal(devices, facts, **arguments):
    with pytest.raises(PlacementError) as caught:
        place(devices, facts, **arguments)
    return caught.value


def every_request():
    """Each way to give three roles any of the 15 subsets of 4 devices, or none."""
    for lists in itertools.product([None, *SUBSETS], repeat=3):
        yield {role: list(subset) if subset else None for role, subset in zip(ROLES, lists, strict=True)}


def test_each_role_gets_exactly_the_devices_that_were_asked_for(job):
    facts = job()
    for request in every_request():
        placement = place(request, facts)
        actor = tuple(request["actor"] or range(4))
        assert placement.devices_of("actor") == actor
        assert placement.devices_of("rollout") == actor
        assert placement.devices_of("ref") == tuple(request["ref"] or actor)
        assert placement.devices_of("critic") == tuple(request["critic"] or range(4))


def test_roles_share_processes_if_and_only_if_their_lists_are_equal(job):
    facts = job()
    for request in every_request():
        placement = place(request, facts)
        for one, other in itertools.combinations(ROLES, 2):
            shares = placement.pool_of(one) is placement.pool_of(other)
            assert shares == (placement.devices_of(one) == placement.devices_of(other)), request


def test_a_bundle_has_a_cpu_for_each_process_on_its_device(job):
    facts = job()
    for request in every_request():
        placement = place(request, facts)
        processes = Counter(device for pool in placement.pools for device in pool.devices)
        assert placement.most_processes == max(processes.values())
        assert placement.colocate_count == max(DEFAULT_COLOCATE_COUNT, *processes.values())
        assert placement.used == tuple(sorted(processes))


def test_each_placement_survives_the_way_through_the_environment(job):
    facts = job()
    for request in every_request():
        placement = place(request, facts)
        again = Placement.from_json(placement.to_json())
        assert again == placement
        assert again.to_json() == placement.to_json()


@pytest.mark.parametrize(("nodes", "devices"), [(1, 4), (2, 2), (4, 1), (2, 3)])
def test_devices_are_cut_at_the_borders_of_nodes(nodes, devices, job):
    placement = place({}, job(nodes=nodes, devices=devices))
    everything = range(nodes * devices)
    for size in range(1, len(everything) + 1):
        for subset in itertools.combinations(everything, size):
            expected = [[d - node * devices for d in subset if d // devices == node] for node in range(nodes)]
            expected = [tuple(local) for local in expected if local]
            assert placement.per_node(subset) == expected
            assert placement.is_even(subset) == (len({len(local) for local in expected}) == 1)


def test_without_a_request_everything_stays_in_the_one_pool_of_verl(job):
    placement = place({}, job())
    assert not placement.managed
    assert [(pool.roles, pool.devices) for pool in placement.pools] == [(ROLES, (0, 1, 2, 3))]


@pytest.mark.parametrize("role", ["actor", "rollout", "ref", "critic"])
def test_one_list_is_enough_to_be_managed(role, job):
    assert place({role: "all"}, job()).managed


@pytest.mark.parametrize(("count", "managed"), [(None, False), (3, False), (1, True), (4, True)])
def test_another_count_of_cpus_than_verls_is_enough_to_be_managed(count, managed, job):
    assert place({}, job(), colocate_count=count).managed is managed


def test_a_pool_is_named_after_its_roles(job):
    placement = place({"actor": [0, 1], "ref": [0, 1], "critic": [2]}, job())
    assert [pool.name for pool in placement.pools] == ["actor_ref_pool", "critic_pool"]
    assert placement.roles == ("actor", "ref", "critic")


def test_the_order_in_which_roles_are_written_does_not_matter(job):
    one = place({"critic": [2], "actor": [0]}, job())
    assert one == place({"actor": [0], "critic": [2]}, job())


def test_a_map_and_a_list_of_the_same_devices_are_the_same_list(job):
    placement = place({"actor": {"node0": [1], "node1": [0]}, "critic": [1, 2]}, job(nodes=2, devices=2))
    assert placement.pool_of("actor") is placement.pool_of("critic")


def test_a_role_that_the_job_has_not_has_no_pool(job):
    placement = place({"actor": [0]}, job(("actor",)))
    assert placement.pool_of("critic") is None
    assert placement.devices_of("critic") == ()
    assert placement.roles == ("actor",)


# More processes on one device than verl expects


def test_four_groups_on_one_device_get_four_cpus(job):
    facts = job(reward=ServerFacts(name="vllm"))
    placement = place({"actor": [0], "ref": [0, 1], "critic": [0, 2], "reward": [0, 3]}, facts)
    assert placement.colocate_count == 4


def test_a_colocate_count_that_is_too_small_is_refused_with_the_one_that_is_enough(job):
    error = refusal({"actor": [0, 1], "critic": [1, 2], "ref": [1]}, job(), colocate_count=2)
    assert error.subject == "sharding.placement.max_colocate_count"
    assert "at least 3" in error.expected
    assert "device 1" in error.expected
    assert error.found == "2"
    assert error.remedy == "sharding.placement.max_colocate_count=3"


@pytest.mark.parametrize(("asked", "count"), [(None, 3), (1, 1), (2, 2), (5, 5)])
def test_a_colocate_count_that_is_enough_is_taken(asked, count, job):
    assert place({"actor": [0], "critic": [1], "ref": [0]}, job(), colocate_count=asked).colocate_count == count


# Roles that the job has not


@pytest.mark.parametrize(
    ("role", "switch"),
    [
        ("critic", "algorithm.adv_estimator=gae"),
        ("ref", "actor_rollout_ref.actor.use_kl_loss=True"),
        ("reward", "reward.reward_model.enable=True"),
        ("teacher", "distillation.enabled=True"),
    ],
)
def test_devices_for_a_role_that_the_job_has_not_are_refused_with_how_to_switch_it_on(role, switch, job):
    error = refusal({role: [1, 2]}, job(("actor",)))
    assert error.subject == f"sharding.roles.{role}.devices"
    assert "[1,2]" in error.found
    assert f"sharding.roles.{role}.devices=null" in error.remedy
    assert switch in error.remedy


@pytest.mark.parametrize("role", ["critic", "ref", "reward", "teacher"])
def test_an_optional_list_for_a_role_that_the_job_has_not_does_not_count(role, job):
    placement = place({"actor": "first_half", role: "second_half?"}, job(("actor",)))
    assert placement.roles == ("actor",)
    assert placement.devices_of("actor") == (0, 1)


def test_an_optional_list_counts_where_the_job_has_the_role(job):
    assert place({"critic": "second_half?"}, job()).devices_of("critic") == (2, 3)


@pytest.mark.parametrize("roles", [("actor",), ("actor", "critic")], ids=["absent", "present"])
@pytest.mark.parametrize(
    ("spec", "found"), [("9-12?", "device 9"), ("2-9?", "device 4"), ("secnd_half?", "secnd_half")]
)
def test_an_optional_list_with_a_mistake_is_refused_whether_the_job_has_the_role_or_not(roles, spec, found, job):
    assert found in refusal({"critic": spec}, job(roles)).found


@pytest.mark.parametrize("role", ["critic", "ref", "reward", "teacher"])
def test_an_optional_list_that_does_not_count_makes_no_pools_of_ours(role, job):
    assert not place({role: "second_half?"}, job(("actor",))).managed


def test_with_lora_the_reference_can_only_be_where_the_actor_is(job):
    facts = job(ref_in_actor=True)
    error = refusal({"actor": [0, 1], "ref": [2]}, facts)
    assert error.subject == "sharding.roles.ref.devices"
    assert "LoRA" in error.expected
    assert "[0,1]" in error.expected
    assert error.found == "[2]"
    assert error.remedy == "sharding.roles.ref.devices=null"


@pytest.mark.parametrize("request_", [{"actor": [0, 1], "ref": [0, 1]}, {"ref": "all"}, {}])
def test_with_lora_the_reference_takes_no_processes(request_, job):
    placement = place(request_, job(ref_in_actor=True))
    assert placement.pool_of("ref") is None


def test_with_lora_an_optional_list_of_the_reference_does_not_count(job):
    placement = place({"actor": "first_half", "ref": "second_half?"}, job(ref_in_actor=True))
    assert placement.roles == ("actor", "critic")


# Rollout


def test_rollout_may_state_the_list_of_the_actor(job):
    placement = place({"actor": [0, 2], "rollout": "0,2"}, job())
    assert placement.devices_of("rollout") == (0, 2)


@pytest.mark.parametrize("layouts", [{}, {"actor": "device_map"}], ids=str)
def test_the_order_of_rollouts_list_does_not_matter(layouts, job):
    placement = place({"actor": [2, 0], "rollout": [0, 2]}, job(), layouts=layouts)
    assert placement.processes_of("rollout") == (1 if layouts else 2)


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_a_rollout_away_from_the_actor_is_refused_with_three_ways_out(mode, job):
    error = refusal({"actor": [0, 1], "rollout": [2, 3]}, job(mode=mode))
    assert error.subject == "sharding.roles.rollout.devices"
    assert "[0,1]" in error.expected
    assert mode in error.expected
    assert error.found == "[2,3]"
    for way in ("rollout.devices=null", "actor.devices=[2,3]", "trainer_mode=separate_async"):
        assert way in error.remedy


@pytest.mark.parametrize("hybrid", [True, False])
def test_separate_async_reserves_its_own_rollout_devices_and_takes_no_list(hybrid, job):
    facts = job(mode="separate_async", hybrid_rollout=hybrid, rollout=ServerFacts(name="vllm", own_nodes=(2,)))
    error = refusal({"actor": [0, 1], "rollout": [0, 1]}, facts)
    assert "2 devices of its own" in error.expected
    assert "actor_rollout_ref.rollout.nnodes x n_gpus_per_node" in error.expected
    assert error.remedy == "sharding.roles.rollout.devices=null"


# Pools of servers


def test_pools_that_verl_reserves_by_itself_are_counted_and_not_placed(job):
    facts = job(
        mode="separate_async",
        rollout=ServerFacts(name="vllm", ranks_per_replica=2, own_nodes=(4,)),
        reward=ServerFacts(name="vllm", own_nodes=(2, 2)),
        teacher=ServerFacts(name="vllm", own_nodes=(1,)),
    )
    placement = place({"actor": [0, 1]}, facts)
    assert placement.reserved == {"rollout": (2, 2), "reward": (2, 2), "teacher": (1,)}
    assert placement.group_sizes == (4, 2, 2, 2, 2, 1)
    assert Placement.from_json(placement.to_json()) == placement
    assert placement.pool_of("reward") is None


def test_a_server_role_with_a_list_is_placed_and_no_longer_reserved(job):
    facts = job(reward=ServerFacts(name="vllm", own_nodes=(2,)), teacher=ServerFacts(name="vllm", own_nodes=(1,)))
    placement = place({"reward": [2, 3], "teacher": [3]}, facts)
    assert placement.reserved == {}
    assert placement.devices_of("reward") == (2, 3)
    assert placement.devices_of("teacher") == (3,)


def test_a_colocated_reward_model_stays_on_every_device_like_in_verl(job):
    placement = place({"actor": [0]}, job(reward=ServerFacts(name="vllm")))
    assert placement.devices_of("reward") == (0, 1, 2, 3)


# Layouts: one process for several devices


def spread(*roles):
    return dict.fromkeys(roles, "device_map")


def every_layout():
    """Each way to give three roles either layout."""
    for chosen in itertools.product(("fsdp", "device_map"), repeat=3):
        yield dict(zip(ROLES, chosen, strict=True))


def test_a_role_has_one_process_where_its_layers_are_spread_and_one_for_each_device_else(job):
    facts = job()
    devices = {"actor": [2, 1, 3], "ref": [0, 1], "critic": [3]}
    for layouts in every_layout():
        placement = place(devices, facts, layouts=layouts)
        for role, layout in layouts.items():
            pool, asked = placement.pool_of(role), devices[role]
            assert pool.layout == layout
            assert placement.processes_of(role) == pool.num_processes == (1 if layout == "device_map" else len(asked))
            assert placement.devices_of(role) == pool.devices


def test_the_places_of_a_spread_role_are_its_list_as_written(job):
    placement = place({"critic": [3, 1]}, job(), layouts={"critic": "device_map"})
    assert placement.devices_of("critic") == (3, 1)
    assert placement.pool_of("critic").process_devices == (3,)


def test_ranks_of_a_sharded_role_follow_the_devices_numbers(job):
    assert place({"critic": [3, 1]}, job()).devices_of("critic") == (1, 3)


def test_a_process_sits_on_the_first_device_of_its_role():
    devices = (3, 0, 2)
    one = Pool(name="p", roles=("actor",), devices=devices, layout="device_map")
    each = Pool(name="p", roles=("actor",), devices=devices)
    assert (one.process_devices, each.process_devices) == ((3,), devices)


def test_rollout_generates_on_the_first_of_the_devices_that_the_actor_is_spread_over(job):
    placement = place({"actor": [1, 2], "critic": [0]}, job(), layouts=spread("actor"))
    assert placement.devices_of("actor") == (1, 2)
    assert placement.devices_of("rollout") == (1,)
    assert placement.processes_of("rollout") == 1


@pytest.mark.parametrize("role", ["ref", "critic"])
def test_rollout_keeps_the_actors_devices_whatever_other_roles_are_spread_over(role, job):
    placement = place({"actor": [0, 1], role: [2, 3]}, job(), layouts=spread(role))
    assert placement.devices_of("rollout") == (0, 1)
    assert placement.processes_of("rollout") == 2


def test_a_role_that_the_job_has_not_has_no_process(job):
    assert place({}, job(("actor",))).processes_of("critic") == 0


def test_roles_share_processes_if_and_only_if_devices_and_layout_are_equal(job):
    facts = job()
    lists = [{"actor": [0, 1], "ref": [0, 1], "critic": [0, 1]}, {"actor": [0, 1], "ref": [1, 2], "critic": [0, 1]}]
    for devices, layouts in itertools.product(lists, every_layout()):
        placement = place(devices, facts, layouts=layouts)
        for one, other in itertools.combinations(ROLES, 2):
            alike = (devices[one], layouts[one]) == (devices[other], layouts[other])
            assert (placement.pool_of(one) is placement.pool_of(other)) == alike, (devices, layouts)


@pytest.mark.parametrize("devices", [{}, {"actor": [0, 1]}, {"actor": [0, 1], "critic": [0, 1]}])
def test_a_reference_in_the_actors_process_follows_the_actors_layout(devices, job):
    placement = place(devices, job(), layouts=spread("actor"))
    assert placement.pool_of("ref") is placement.pool_of("actor")
    assert placement.pool_of("ref").layout == "device_map"
    assert placement.pool_of("critic") is not placement.pool_of("actor")


@pytest.mark.parametrize("layouts", [{"actor": "device_map", "ref": "fsdp"}, {"ref": "device_map"}])
def test_a_reference_with_a_layout_of_its_own_keeps_it_and_leaves_the_actors_process(layouts, job):
    placement = place({"actor": [0, 1]}, job(), layouts=layouts)
    assert placement.pool_of("ref").layout == layouts["ref"]
    assert placement.pool_of("ref").devices == placement.pool_of("actor").devices
    assert placement.pool_of("ref") is not placement.pool_of("actor")


def test_a_reference_with_devices_of_its_own_does_not_follow_the_actors_layout(job):
    placement = place({"actor": [0, 1], "ref": [2, 3]}, job(), layouts=spread("actor"))
    assert placement.pool_of("ref").layout == "fsdp"


def test_the_layouts_that_were_given_are_not_changed(job):
    layouts = spread("actor")
    place({"actor": [0, 1]}, job(), layouts=layouts)
    assert layouts == spread("actor")


@pytest.mark.parametrize(("layouts", "managed"), [(None, False), ({"actor": "fsdp"}, False), (spread("critic"), True)])
def test_a_layout_that_verl_has_not_is_enough_to_be_managed(layouts, managed, job):
    assert place({}, job(), layouts=layouts).managed is managed


def test_each_device_of_a_spread_role_counts_as_used_and_as_shared(job):
    placement = place({"actor": [0, 1], "critic": [1, 2], "ref": [1]}, job(), layouts=spread("actor", "critic"))
    assert placement.used == (0, 1, 2)
    assert placement.most_processes == 3


@pytest.mark.parametrize("role", ROLES)
def test_layers_over_several_nodes_are_refused_with_the_devices_of_the_first(role, job):
    others = {name: [0] for name in ROLES if name != role}
    error = refusal(others | {role: [1, 2, 3]}, job(nodes=2, devices=2), layouts=spread(role))
    assert error.subject == f"sharding.roles.{role}.layout=device_map"
    assert "one node" in error.expected
    assert error.found == "devices [1,2,3] on 2 nodes"
    assert "does not start" in error.consequence
    assert error.remedy == f"sharding.roles.{role}.devices=[1], or sharding.roles.{role}.layout=fsdp"


def test_what_the_error_of_several_nodes_says_to_type_works(job):
    facts = job(nodes=2, devices=2)
    assert place({"critic": [1]}, facts, layouts=spread("critic")).devices_of("critic") == (1,)
    assert place({"critic": [1, 2, 3]}, facts, layouts={"critic": "fsdp"}).processes_of("critic") == 3


def test_layers_over_the_devices_of_the_second_node_are_accepted(job):
    placement = place({"critic": [2, 3]}, job(nodes=2, devices=2), layouts=spread("critic"))
    assert placement.pool_of("critic").process_devices == (2,)


def test_each_layout_survives_the_way_through_the_environment(job):
    for layouts in every_layout():
        placement = place({"actor": [0, 1], "critic": [1, 2]}, job(), layouts=layouts)
        again = Placement.from_json(placement.to_json())
        assert again == placement
        assert [pool.process_devices for pool in again.pools] == [pool.process_devices for pool in placement.pools]


# Names of nodes, JSON


def test_node_names_are_read_from_the_topology_and_survive_json(job):
    placement = place({"actor": {"b": [0]}}, job(nodes=2, devices=2), node_names=("a", "b"))
    assert placement.devices_of("actor") == (2,)
    assert Placement.from_json(placement.to_json()).topology.node_names == ("a", "b")


def test_before_ray_runs_the_addresses_of_all_maps_number_the_nodes(job):
    maps = {"actor": {"10.0.0.9": [0]}, "critic": {"10.0.0.10": [1], "10.0.0.9": [0]}}
    placement = place(maps, job(nodes=2, devices=2))
    assert placement.topology.node_names == ("10.0.0.10", "10.0.0.9")  # as verl sorts them
    assert (placement.devices_of("actor"), placement.devices_of("critic")) == ((2,), (1, 2))


def test_fewer_addresses_than_nodes_count_from_node_0_until_ray_says_the_others(job):
    facts, spec = job(nodes=2, devices=2), {"critic": {"10.0.0.9": [1]}}
    assert place(spec, facts).devices_of("critic") == (1,)
    assert place(spec, facts, node_names=("10.0.0.1", "10.0.0.9")).devices_of("critic") == (3,)


def test_more_addresses_than_nodes_are_refused(job):
    error = refusal({"actor": {"10.0.0.1": [0]}, "critic": {"10.0.0.2": [0]}}, job(devices=2))
    assert error.subject == "sharding.roles.critic.devices"
    assert error.found == "2 addresses over all roles: 10.0.0.1, 10.0.0.2"
    assert error.remedy == "trainer.nnodes=2, or name fewer nodes"


def test_without_addresses_no_node_has_a_name(job):
    assert place({"actor": {"node0": [0]}}, job(nodes=2, devices=2)).topology.node_names == ()


def test_the_json_of_a_placement_is_stable_and_plain(job):
    text = place({"actor": [0], "critic": [1]}, job()).to_json()
    assert json.loads(text)["pools"][0] == {
        "name": "actor_ref_pool",
        "roles": ["actor", "ref"],
        "devices": [0],
        "layout": "fsdp",
    }
    assert text == json.dumps(json.loads(text), sort_keys=True)


@pytest.mark.parametrize("accelerator_id", ["0", "GPU-5f1c", ""])
@pytest.mark.parametrize("visible", [(), ("3",), ("2", "GPU-5f1c")])
def test_a_promise_survives_the_way_through_the_environment(accelerator_id, visible):
    variable = "CUDA_VISIBLE_DEVICES" if visible else ""
    promise = Promise(
        device=3,
        devices=(3, 1) if visible else (),
        node_id="0a1b",
        accelerator_id=accelerator_id,
        visible=visible,
        visible_variable=variable,
    )
    again = Promise.from_json(promise.to_json())
    assert again == promise
    assert hash(again) == hash(promise)


def test_a_promise_of_one_device_says_nothing_of_what_else_is_visible():
    promise = Promise(device=3, node_id="0a1b", accelerator_id="1")
    assert (promise.visible, promise.visible_variable) == ((), "")


def test_placements_of_equal_jobs_are_equal():
    topology = Topology(num_nodes=1, devices_per_node=1)
    pools = (Pool(name="actor_pool", roles=("actor",), devices=(0,)),)
    one, other = (Placement(topology=topology, pools=pools, managed=True, reserved={}) for _ in range(2))
    assert one == other


def test_a_bad_list_is_refused_before_missing_roles_are_looked_at(job):
    assert "device 9" in refusal({"critic": [9]}, job(("actor",))).found


def test_a_job_without_devices_is_refused(job):
    assert refusal({}, job(devices=0)).subject == "trainer.n_gpus_per_node"


def test_strategies_do_not_change_where_roles_run(job):
    engines = {"actor": EngineFacts(strategy="megatron", model_parallel_size=2, mini_batch_size=8)}
    assert place({"actor": [1, 3]}, job(engines=engines)).devices_of("actor") == (1, 3)
