"""A job that Ray's nodes can't hold is refused instead of waited for, and what the error says to type works."""

import itertools
import re

import pytest
from remedies import number_after

from verl_ext_sharding.errors import PlacementError
from verl_ext_sharding.placement.bundles import place
from verl_ext_sharding.placement.job import ServerFacts
from verl_ext_sharding.placement.resources import (
    TRAINER,
    NodeResources,
    check_cluster,
    hosts,
    nodes_of_job,
    storage_units_that_fit,
)


def nodes(*resources):
    return [NodeResources(name=f"10.0.0.{i}", num_devices=d, num_cpus=c) for i, (d, c) in enumerate(resources)]


def refused(placement, facts, found, **how):
    with pytest.raises(PlacementError) as caught:
        check_cluster(placement, facts, found, **how)
    assert "does not start" in caught.value.consequence
    return caught.value


# The cluster: devices


def cluster_refusal(facts, found, devices=None, **arguments):
    return refused(place(devices or {}, facts, **arguments), facts, found)


def test_too_few_devices_are_refused_with_what_is_there_and_what_would_fit(job):
    error = cluster_refusal(job(devices=8), nodes((4, 64)))
    assert error.subject == "devices of the cluster"
    assert "1 nodes with 8 free devices each" in error.expected
    assert "10.0.0.0: 4" in error.found
    assert error.remedy == "trainer.nnodes=1 trainer.n_gpus_per_node=4 (4 devices)"


@pytest.mark.parametrize(
    ("asked", "sizes", "proposed"),
    [
        ((2, 4), (4, 2), ["trainer.nnodes=1 trainer.n_gpus_per_node=4", "trainer.nnodes=2 trainer.n_gpus_per_node=2"]),
        ((2, 3), (4, 2), ["trainer.nnodes=1 trainer.n_gpus_per_node=4", "trainer.nnodes=2 trainer.n_gpus_per_node=2"]),
        ((2, 3), (8, 2), ["trainer.nnodes=1 trainer.n_gpus_per_node=6"]),
        ((2, 8), (8, 7), ["trainer.nnodes=2 trainer.n_gpus_per_node=7 (14 devices)"]),
        ((3, 1), (2, 2), ["trainer.nnodes=2 trainer.n_gpus_per_node=1"]),
    ],
)
def test_uneven_nodes_are_refused_with_the_largest_even_layouts(asked, sizes, proposed, job):
    facts = job(nodes=asked[0], devices=asked[1])
    error = cluster_refusal(facts, nodes(*((size, 64) for size in sizes)))
    for layout in proposed:
        assert layout in error.remedy


def test_every_proposed_layout_fits_and_is_no_larger_than_asked_for(job):
    for sizes in itertools.combinations_with_replacement(range(5), 3):
        found = nodes(*((size, 64) for size in sizes))
        for num_nodes, per_node in itertools.product((1, 2, 3, 4), (1, 2, 3, 5)):
            facts = job(nodes=num_nodes, devices=per_node)
            try:
                check_cluster(place({}, facts), facts, found)
            except PlacementError as error:
                layouts = re.findall(r"nnodes=(\d+) trainer.n_gpus_per_node=(\d+)", error.remedy)
                assert layouts or not any(sizes)
                for n, d in layouts:
                    smaller = job(nodes=int(n), devices=int(d))
                    assert int(n) * int(d) <= num_nodes * per_node
                    check_cluster(place({}, smaller), smaller, found)


@pytest.mark.parametrize("found", [[], nodes((0, 64))], ids=["no nodes", "no devices"])
def test_a_cluster_without_devices_is_refused_with_logical_ones_as_a_way_out(found, job):
    assert "ray start --head --num-gpus=" in cluster_refusal(job(), found).remedy


def test_pools_that_verl_reserves_by_itself_need_devices_too(job):
    facts = job(devices=4, mode="separate_async", rollout=ServerFacts(name="vllm", own_nodes=(2,)))
    error = cluster_refusal(facts, nodes((4, 64), (1, 64)))
    assert "4 for the trainer, and for pools of their own: rollout 2 x 1" in error.expected
    assert "10.0.0.0: 4, 10.0.0.1: 1" in error.found
    check_cluster(place({}, facts), facts, nodes((4, 64), (2, 64)))


def test_a_pool_whose_devices_lie_on_several_nodes_is_refused(job):
    """Of 6 + 2 devices the trainer takes 4, and no node has 4 left: verl would wait for ever."""
    facts = job(devices=4, teacher=ServerFacts(name="vllm", ranks_per_replica=4, own_nodes=(4,)))
    error = cluster_refusal(facts, nodes((6, 64), (2, 64)))
    assert error.subject == "devices of the cluster"
    assert (
        "4 for the trainer, and for pools of their own: teacher 4; each group of devices on one node" in error.expected
    )
    assert "10.0.0.0: 6, 10.0.0.1: 2" in error.found
    check_cluster(place({}, facts), facts, nodes((6, 64), (4, 64)))


@pytest.mark.parametrize("role", ["reward", "teacher"])
def test_each_node_of_a_pool_is_a_group_of_its_own(role, job):
    facts = job(devices=4, **{role: ServerFacts(name="vllm", own_nodes=(2, 2))})
    check_cluster(place({}, facts), facts, nodes((6, 64), (2, 64)))
    assert role in cluster_refusal(facts, nodes((5, 64), (3, 64), (1, 64))).expected


def test_the_nodes_of_the_trainer_are_not_one_node(job):
    """Both of its groups on the node of 8 would leave 6 for the pool; then node0 and node1 were the same."""
    facts = job(nodes=2, devices=4, teacher=ServerFacts(name="vllm", own_nodes=(6,)))
    assert "2 x 4 for the trainer" in cluster_refusal(facts, nodes((8, 64), (6, 64))).expected


def test_each_rollout_server_of_its_own_is_on_one_node(job):
    server = ServerFacts(name="vllm", ranks_per_replica=4, own_nodes=(6, 6))
    facts = job(("actor",), devices=2, mode="separate_async", rollout=server)
    assert "rollout 3 x 4" in cluster_refusal(facts, nodes((2, 64), (6, 64), (6, 64))).expected
    check_cluster(place({}, facts), facts, nodes((2, 64), (8, 64), (4, 64)))


def test_pools_are_put_where_they_fit_whatever_the_order_of_the_nodes(job):
    """The trainer must leave the large node to the pool."""
    facts = job(devices=4, teacher=ServerFacts(name="vllm", own_nodes=(6,)))
    for order in itertools.permutations([(6, 64), (4, 64), (1, 64)]):
        check_cluster(place({}, facts), facts, nodes(*order))


def packs(groups, sizes):
    """Whether groups fit on nodes, tried in every way."""
    if not groups:
        return True
    return any(
        packs(groups[1:], [*sizes[:i], size - groups[0], *sizes[i + 1 :]])
        for i, size in enumerate(sizes)
        if size >= groups[0]
    )


def test_pools_are_refused_if_and_only_if_there_is_no_way_to_place_them(job):
    seen = set()
    for sizes in itertools.combinations_with_replacement(range(1, 6), 3):
        for own in [(1,), (2, 2), (3, 2), (4, 1, 1), (2, 3, 2)]:
            facts = job(devices=2, teacher=ServerFacts(name="vllm", own_nodes=own))
            try:
                check_cluster(place({}, facts), facts, nodes(*((size, 64) for size in sizes)))
                accepted = True
            except PlacementError:
                accepted = False
            assert accepted == packs([2, *own], list(sizes)), (sizes, own)
            seen.add(accepted)
    assert seen == {True, False}


def test_a_large_cluster_is_checked_without_trying_every_way(job):
    """There is no way here, and a search that never gave up would take years to prove it: the run is let through."""
    servers = ServerFacts(name="vllm", own_nodes=(5, 4, 3) * 30)
    facts = job(devices=7, teacher=servers)
    sizes = [(size, 256) for size in (6, 7, 8, 9) * 13]
    check_cluster(place({}, facts), facts, nodes(*sizes))
    assert set(itertools.chain(*hosts(place({}, facts), nodes(*sizes), 3).values())) == {""}  # and left to Ray
    thousand = job(devices=1, reward=ServerFacts(name="vllm", own_nodes=(1,) * 2000))
    check_cluster(place({}, thousand), thousand, nodes(*[(8, 256)] * 300))


# The cluster: which node each group goes to


def left(found, placement, there, bundle_cpus):
    """Devices and CPUs that groups leave on each node, rollout's aside; groups of the trainer are on nodes of their own."""
    assert len(set(found[TRAINER])) == placement.topology.num_nodes
    rooms = {node.name: [node.num_devices, node.num_cpus] for node in there}
    sizes = {TRAINER: [placement.topology.devices_per_node] * placement.topology.num_nodes, **placement.reserved}
    for role in set(sizes) - {"rollout"}:
        for size, name in zip(sizes[role], found[role], strict=True):
            rooms[name][0] -= size
            rooms[name][1] -= size * bundle_cpus
    assert all(amount >= 0 for room in rooms.values() for amount in room)
    return rooms


def test_groups_go_where_all_have_room_if_and_only_if_there_is_a_way(job):
    seen = set()
    for own, count in itertools.product([(1,), (2, 2), (3, 2), (4, 1, 1)], (1, 2)):
        facts = job(nodes=count, devices=2, teacher=ServerFacts(name="vllm", own_nodes=own))
        placement = place({"critic": [0]}, facts)
        for sizes in itertools.permutations(range(1, 6), 3):
            there = nodes(*((size, 64) for size in sizes))
            found = hosts(placement, there, 3)
            if found is None:
                with pytest.raises(PlacementError):
                    check_cluster(placement, facts, there)
            else:
                left(found, placement, there, 3)
                check_cluster(placement, facts, there)
            seen.add(found is None)
    assert seen == {True, False}


def test_the_trainer_leaves_rollouts_own_pool_its_room_wherever_ray_puts_it(job):
    server = ServerFacts(name="vllm", ranks_per_replica=4, own_nodes=(4, 4))
    facts = job(("actor",), devices=4, mode="separate_async", rollout=server)
    placement = place({"actor": [0, 1]}, facts)
    for order in itertools.permutations([(8, 64), (4, 64), (3, 64)]):
        rooms = left(hosts(placement, nodes(*order), 3), placement, nodes(*order), 3)
        assert sum(devices // 4 for devices, _ in rooms.values()) == 2


def test_processes_that_score_start_before_rollouts_own_pool_and_after_all_others(job):
    server = ServerFacts(name="vllm", ranks_per_replica=2, own_nodes=(2,))
    facts = job(("actor",), devices=2, mode="separate_async", rollout=server, reward_workers=2)
    there = nodes((4, 12), (2, 7))
    assert hosts(place({}, facts), there, 3, reward_workers=0)[TRAINER] == ("10.0.0.1",)
    assert hosts(place({}, facts), there, 3, reward_workers=2)[TRAINER] == ("10.0.0.0",)
    alone = job(("actor",), devices=2, teacher=ServerFacts(name="vllm", own_nodes=(2,)), reward_workers=2)
    assert hosts(place({}, alone), there, 3, reward_workers=2)[TRAINER] == ("10.0.0.1",)


def test_cpus_decide_too_which_node_a_group_goes_to(job):
    server = ServerFacts(name="vllm", ranks_per_replica=4, own_nodes=(4,))
    facts = job(devices=4, mode="separate_async", rollout=server)
    for cpus, trainer, rollout in [((20, 8), 0, 1), ((8, 20), 1, 0)]:  # a bundle of rollout's own pool has two CPUs
        found = hosts(place({}, facts), nodes(*((4, free) for free in cpus)), 3)
        assert found == {TRAINER: (f"10.0.0.{trainer}",), "rollout": (f"10.0.0.{rollout}",)}


def test_a_group_alone_is_left_to_ray_unless_a_map_names_its_node(job):
    facts = job(devices=4)
    assert hosts(place({"critic": [0]}, facts), nodes((4, 64), (8, 64)), 3) == {TRAINER: ("",)}
    named = place({"critic": {"10.0.0.1": [0]}}, facts, node_names=("10.0.0.1",))
    assert hosts(named, nodes((4, 64), (8, 64)), 3) == {TRAINER: ("10.0.0.1",)}


def test_named_nodes_are_those_of_the_trainer(job):
    facts = job(nodes=2, devices=4, teacher=ServerFacts(name="vllm", own_nodes=(4,)))
    named = place({"critic": {"10.0.0.2": [0]}}, facts, node_names=("10.0.0.0", "10.0.0.2"))
    assert hosts(named, nodes((4, 64), (4, 64), (4, 64)), 3) == {
        TRAINER: ("10.0.0.0", "10.0.0.2"),
        "teacher": ("10.0.0.1",),
    }


# The cluster: CPUs


@pytest.mark.parametrize("free", [14, 16, 64])
def test_enough_cpus_keep_three_for_each_device(free, job):
    facts = job(devices=4)
    assert check_cluster(place({}, facts), facts, nodes((4, free))) == 3


@pytest.mark.parametrize("free", [12, 13])
def test_cpus_for_the_devices_alone_leave_some_to_transfer_queue(free, job):
    facts = job(devices=4)
    placement = place({}, facts)
    cpus = check_cluster(placement, facts, nodes((4, free)))
    assert cpus == 2
    assert storage_units_that_fit(placement, facts, nodes((4, free)), cpus) == free - 4 * 2 - 1


def test_a_bundle_never_has_fewer_cpus_than_processes_on_its_device(job):
    facts = job(devices=4)
    devices = {"actor": [0, 1], "critic": [0, 2], "ref": [0, 3]}
    assert check_cluster(place(devices, facts), facts, nodes((4, 14))) == 3
    error = cluster_refusal(facts, nodes((4, 12)), devices)
    assert error.subject == "CPUs of the cluster"
    assert error.expected == "14 CPUs: 3 for each device's worker processes and 2 for TransferQueue"
    assert error.found.startswith("12 CPUs free")
    assert "ray_kwargs.ray_init.num_cpus=14" in error.remedy


def test_too_few_cpus_are_refused_and_not_waited_for(job):
    error = cluster_refusal(job(devices=4), nodes((4, 8)))
    assert error.subject == "CPUs of node 10.0.0.0"
    assert error.expected == "4 devices x 3 worker processes = 12 CPUs"
    assert error.found.startswith("8 CPUs free")
    assert number_after("ray_kwargs.ray_init.num_cpus", error.remedy) == 14
    assert "at least 12" in error.remedy


def test_a_cluster_that_ran_before_is_given_cpus_where_it_is_started(job):
    """`ray.init` refuses `num_cpus` when it joins."""
    facts = job(nodes=2, devices=4)
    error = refused(place({}, facts), facts, nodes((4, 64), (4, 8)), joins_ray=True)
    assert error.remedy.startswith("start Ray on 10.0.0.1 with ray start --num-cpus=14 (at least 12 free)")
    assert "ray_init" not in error.remedy


def test_cpus_that_others_hold_are_added_to_what_ray_is_started_with(job):
    facts = job(devices=4)
    node = NodeResources(name="a", num_devices=4, num_cpus=8, cpus_taken=24)
    assert "--num-cpus=38 " in refused(place({}, facts), facts, [node], joins_ray=True).remedy


def test_a_joined_cluster_that_lacks_cpus_as_a_whole_is_told_how_many(job):
    facts = job(devices=4)
    devices = {"actor": [0, 1], "critic": [0, 2], "ref": [0, 3]}
    placement = place(devices, facts)
    assert refused(placement, facts, nodes((4, 12)), joins_ray=True).remedy.startswith(
        "start Ray on 10.0.0.0 with ray start --num-cpus=14"
    )
    error = refused(placement, facts, nodes((4, 12), (0, 1)), joins_ray=True)
    assert "with 1 more CPUs in all (ray start --num-cpus=...)" in error.remedy


def test_one_number_is_enough_for_all_that_one_node_must_hold(job):
    facts = job(devices=4, teacher=ServerFacts(name="vllm", own_nodes=(2,)))
    error = cluster_refusal(facts, nodes((6, 8)))
    cpus = number_after("ray_kwargs.ray_init.num_cpus", error.remedy)
    assert check_cluster(place({}, facts), facts, nodes((6, cpus))) == 3


def test_cpus_are_needed_on_the_node_of_each_pool(job):
    facts = job(devices=4, teacher=ServerFacts(name="vllm", own_nodes=(4,)))
    error = cluster_refusal(facts, nodes((4, 64), (4, 3)))
    assert error.subject == "CPUs of the cluster"
    assert "on one node for each group of teacher 4" in error.expected
    assert "10.0.0.0: 64, 10.0.0.1: 3" in error.found


# What the user wrote


@pytest.mark.parametrize("free", [12, 13])
def test_a_count_that_the_user_wrote_is_not_lowered_for_transfer_queue(free, job):
    facts = job(devices=4)
    placement = place({}, facts, colocate_count=3)
    error = refused(placement, facts, nodes((4, free)), fixed=True)
    assert error.subject == "CPUs of the cluster"
    assert error.expected.startswith("14 CPUs: 3 for each device's worker processes")
    assert number_after("ray_kwargs.ray_init.num_cpus", error.remedy) == 14
    count = number_after("sharding.placement.max_colocate_count", error.remedy)
    assert check_cluster(place({}, facts, colocate_count=count), facts, nodes((4, free)), fixed=True) == count == 2


def test_a_count_that_the_user_wrote_is_taken_where_it_fits(job):
    facts = job(devices=4)
    assert check_cluster(place({}, facts, colocate_count=3), facts, nodes((4, 14)), fixed=True) == 3


# Nodes by their addresses


def addressed(job, spec, num_nodes=2):
    return place({"critic": spec}, job(nodes=num_nodes, devices=4))


def test_named_nodes_are_numbered_among_those_that_the_job_takes(job):
    found = nodes((4, 64), (4, 16), (4, 32))
    assert nodes_of_job(addressed(job, {"10.0.0.1": [0]}), found) == ("10.0.0.0", "10.0.0.1")
    assert nodes_of_job(addressed(job, {"10.0.0.2": [0], "10.0.0.1": [0]}), found) == ("10.0.0.1", "10.0.0.2")


def test_a_node_with_too_few_devices_is_no_node_of_the_job(job):
    found = nodes((1, 64), (4, 16), (4, 32))
    assert nodes_of_job(addressed(job, {"10.0.0.1": [0]}), found) == ("10.0.0.1", "10.0.0.2")


@pytest.mark.parametrize("name", ["10.0.0.0", "10.0.0.9"])
def test_a_named_node_that_is_not_there_or_too_small_is_refused_with_those_that_do(name, job):
    with pytest.raises(PlacementError) as caught:
        nodes_of_job(addressed(job, {name: [0]}), nodes((1, 64), (4, 16), (4, 32)))
    assert name in caught.value.subject
    assert caught.value.remedy == "name one of these nodes: 10.0.0.1, 10.0.0.2"


def test_the_cpus_of_named_nodes_count_and_not_those_of_others(job):
    facts = job(nodes=2, devices=4)
    found = nodes((4, 64), (4, 64), (4, 8))
    placement = place({"critic": {"10.0.0.2": [0]}}, facts, node_names=("10.0.0.0", "10.0.0.2"))
    assert refused(placement, facts, found).subject == "CPUs of node 10.0.0.2"
    check_cluster(place({}, facts), facts, found)


@pytest.mark.parametrize("free", range(3, 12))
def test_the_fewer_workers_that_are_offered_really_fit(free, job):
    facts = job(devices=4)
    error = cluster_refusal(facts, nodes((4, free)))
    if "max_colocate_count" in error.remedy:
        count = number_after("sharding.placement.max_colocate_count", error.remedy)
        assert check_cluster(place({}, facts, colocate_count=count), facts, nodes((4, free))) == count
    else:
        assert free < 6


def test_fewer_workers_are_offered_only_where_every_node_can_hold_them(job):
    error = cluster_refusal(job(nodes=2, devices=4), nodes((4, 64), (4, 7)))
    assert number_after("sharding.placement.max_colocate_count", error.remedy) == 1


def test_fewer_workers_are_not_offered_where_roles_need_them(job):
    error = cluster_refusal(job(devices=4), nodes((4, 8)), {"actor": [0], "critic": [0, 1], "ref": [0, 2]})
    assert "max_colocate_count" not in error.remedy


def test_each_node_needs_its_own_cpus(job):
    facts = job(nodes=2, devices=4)
    error = cluster_refusal(facts, nodes((4, 64), (4, 8)))
    assert error.subject == "CPUs of node 10.0.0.1"
    assert check_cluster(place({}, facts), facts, nodes((4, 64), (4, 12))) == 3


def test_nodes_with_enough_cpus_are_preferred(job):
    facts = job(devices=4)
    assert check_cluster(place({}, facts), facts, nodes((4, 2), (4, 64))) == 3


def test_cpus_of_nodes_without_devices_serve_transfer_queue(job):
    facts = job(devices=4)
    placement = place({}, facts)
    assert check_cluster(placement, facts, nodes((4, 12), (0, 8))) == 3
    assert storage_units_that_fit(placement, facts, nodes((4, 12), (0, 8)), 3) == 7


def test_pools_that_verl_reserves_by_itself_need_cpus_too(job):
    facts = job(devices=4, mode="separate_async", rollout=ServerFacts(name="vllm", own_nodes=(2,)))
    assert check_cluster(place({}, facts), facts, nodes((8, 18))) == 3
    assert check_cluster(place({}, facts), facts, nodes((8, 17))) == 2


@pytest.mark.parametrize(("free", "units"), [(15, 2), (21, 8), (100, 8), (12, 1)])
def test_storage_units_are_what_is_asked_for_or_what_fits_and_at_least_one(free, units, job):
    facts = job(devices=4)
    assert storage_units_that_fit(place({}, facts), facts, nodes((4, free)), 3) == units


def test_one_cpu_is_enough_for_a_queue_that_keeps_no_units(job):
    facts = job(devices=4, transfer_queue_units=1)
    assert check_cluster(place({}, facts), facts, nodes((4, 13))) == 3


# Processes that score


def test_processes_that_score_need_cpus_beside_the_bundles(job):
    facts = job(devices=4, reward_workers=4)
    assert check_cluster(place({}, facts), facts, nodes((4, 30))) == 3
    error = cluster_refusal(facts, nodes((4, 18)))
    assert error.expected.startswith("22 CPUs")
    assert "16 for reward.reward_manager.name=remote" in error.expected
    cpus, workers = (number_after(key, error.remedy) for key in ("ray_init.num_cpus", "reward.num_workers"))
    assert check_cluster(place({}, facts), facts, nodes((4, cpus))) == 1
    fewer = job(devices=4, reward_workers=workers)
    assert check_cluster(place({}, fewer), fewer, nodes((4, 18))) == 1


def test_each_node_has_its_part_of_the_processes_that_score(job):
    facts = job(nodes=2, devices=4, reward_workers=4)
    assert check_cluster(place({}, facts), facts, nodes((4, 22), (4, 22))) == 3
    assert check_cluster(place({}, facts), facts, nodes((4, 12), (4, 80))) == 1
    error = refused(place({}, facts, colocate_count=3), facts, nodes((4, 12), (4, 80)), fixed=True)
    assert error.subject == "CPUs of the cluster"
    assert error.remedy.endswith("max_colocate_count=1, or reward.num_workers=1")


def test_storage_units_leave_cpus_to_processes_that_score(job):
    facts = job(devices=4, reward_workers=2)
    assert storage_units_that_fit(place({}, facts), facts, nodes((4, 21)), 3) == 4
