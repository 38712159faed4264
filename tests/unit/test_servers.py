"""Inference servers fill the devices that they get, on the trainer's devices and on pools of their own."""

import itertools
from dataclasses import replace

import pytest
from remedies import number_after

from verl_ext_sharding.errors import PlacementError
from verl_ext_sharding.placement import servers
from verl_ext_sharding.placement.bundles import place
from verl_ext_sharding.placement.checks import check_job
from verl_ext_sharding.placement.job import ServerFacts

OWN_BLOCK = "actor_rollout_ref.rollout"
TP = f"{OWN_BLOCK}.tensor_model_parallel_size"


def job_refusal(devices, facts):
    with pytest.raises(PlacementError) as caught:
        check_job(place(devices, facts), facts)
    assert "does not start" in caught.value.consequence
    return caught.value


def parts_on_one_node(size, per_node):
    """Whether verl would give each part of each server ranks of one node (workers/rollout/replica.py)."""
    node_of_rank = [node for node, count in enumerate(per_node) for _ in range(count)]
    if len(node_of_rank) % size:
        return False
    part = min(per_node[0], size)
    if size % part:
        return False
    parts = [node_of_rank[i : i + part] for i in range(0, len(node_of_rank), part)]
    return all(len(set(ranks)) == 1 for ranks in parts)


def test_rollout_servers_are_accepted_only_where_verl_can_lay_them_out(job):
    for num_nodes, per_node, size in itertools.product((1, 2, 3), (1, 2, 3, 4), range(1, 13)):
        facts = job(("actor",), nodes=num_nodes, devices=4, rollout=ServerFacts(name="vllm", ranks_per_replica=size))
        devices = {f"node{node}": list(range(per_node)) for node in range(num_nodes)}
        try:
            servers.check_servers(place({"actor": devices}, facts), facts)
            accepted = True
        except PlacementError:
            accepted = False
        assert accepted == parts_on_one_node(size, [per_node] * num_nodes), (num_nodes, per_node, size)


@pytest.mark.parametrize("rest", [1, 2])
def test_the_tensor_parallel_size_that_is_offered_fits_and_is_smaller(rest, job):
    offered = 0
    for num_devices, tensor in itertools.product(range(1, 9), repeat=2):
        server = ServerFacts(name="vllm", ranks_per_replica=tensor * rest, tensor_parallel_size=tensor)
        facts = job(("actor",), devices=8, rollout=server)
        placement = place({"actor": list(range(num_devices))}, facts)
        try:
            servers.check_servers(placement, facts)
        except PlacementError as error:
            if TP not in error.remedy:
                assert num_devices % rest
                continue
            smaller = number_after(TP, error.remedy)
            assert smaller < tensor
            fitting = replace(server, ranks_per_replica=smaller * rest, tensor_parallel_size=smaller)
            servers.check_servers(placement, replace(facts, rollout=fitting))
            offered += 1
    assert offered


def test_a_rollout_server_that_does_not_divide_the_actors_devices_is_refused(job):
    facts = job(("actor",), rollout=ServerFacts(name="vllm", ranks_per_replica=2))
    error = job_refusal({"actor": [0, 1, 3]}, facts)
    assert error.subject == TP
    assert "3 devices [0,1,3] of rollout" in error.expected
    assert error.found == "2 ranks for one vllm server"
    assert error.remedy == f"{TP}=1, or sharding.roles.actor.devices=[0,1,2,3]"


def test_no_more_devices_are_offered_for_servers_than_the_job_has(job):
    facts = job(("actor",), reward=ServerFacts(name="vllm", ranks_per_replica=3), devices=4)
    error = job_refusal({"actor": [0], "reward": "all"}, facts)
    assert error.remedy.endswith("sharding.roles.reward.devices=[0,1,2]")


def test_where_other_parallel_sizes_are_too_large_they_are_named(job):
    server = ServerFacts(name="vllm", ranks_per_replica=4, tensor_parallel_size=1)
    error = job_refusal({"actor": [0, 1, 2]}, job(("actor",), rollout=server))
    assert "data_parallel_size x pipeline_model_parallel_size (now 4)" in error.remedy


@pytest.mark.parametrize(
    ("role", "key"),
    [
        ("reward", "reward.reward_model.rollout.tensor_model_parallel_size"),
        ("teacher", "distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size"),
    ],
)
def test_servers_of_other_roles_are_checked_on_their_own_devices(role, key, job):
    facts = job(("actor",), **{role: ServerFacts(name="vllm", ranks_per_replica=2)})
    error = job_refusal({"actor": [0], role: [1, 2, 3]}, facts)
    assert error.subject == key
    assert f"of {role}" in error.expected


def test_a_server_across_nodes_with_a_rest_on_one_of_them_is_refused(job):
    facts = job(("actor",), nodes=2, devices=4, reward=ServerFacts(name="vllm", ranks_per_replica=2))
    error = job_refusal({"actor": [0], "reward": {"node0": [0], "node1": [0, 1, 2]}}, facts)
    assert "[1, 3] per node" in error.expected


def test_uneven_nodes_are_refused_for_a_rollout_of_several_ranks(job):
    facts = job(("actor",), nodes=2, devices=4, rollout=ServerFacts(name="vllm", ranks_per_replica=2))
    error = job_refusal({"actor": {"node0": [0, 1, 2], "node1": [0]}}, facts)
    assert error.subject == "sharding.roles.actor.devices"
    assert error.found == "[3, 1] devices per node"
    assert f"{TP}=1" in error.remedy


def test_uneven_nodes_are_fine_for_servers_of_one_rank(job):
    facts = job(("actor",), nodes=2, devices=4)
    check_job(place({"actor": {"node0": [0, 1, 2], "node1": [0]}}, facts), facts)


def test_without_a_hybrid_rollout_the_actors_devices_serve_nothing(job):
    server = ServerFacts(name="vllm", ranks_per_replica=4, own_nodes=(4,))
    facts = job(("actor",), mode="separate_async", hybrid_rollout=False, rollout=server)
    check_job(place({"actor": [0, 1, 2]}, facts), facts)


def test_a_server_that_prefills_apart_lies_on_one_node(job):
    server = ServerFacts(name="vllm", ranks_per_replica=8, decoders=(3, 2), tensor_parallel_size=2, block="rollout")
    facts = job(("actor",), nodes=2, devices=4, rollout=server)
    assert "rollout.disaggregation.decode_replicas=1" in job_refusal({}, facts).remedy
    check_job(
        place({}, replace(facts, rollout=replace(server, decoders=None))),
        replace(facts, rollout=replace(server, decoders=None)),
    )


def async_job(job, name, own, **fields):
    """A job of separate_async whose actor serves rollout too, by servers of four ranks."""
    server = ServerFacts(name=name, ranks_per_replica=4, own_nodes=(own,) * (8 // own), **fields)
    return job(("actor",), nodes=2, devices=4, mode="separate_async", rollout=server)


@pytest.mark.parametrize(
    ("name", "own", "accepted"),
    [
        ("vllm", 4, False),
        ("vllm", 2, True),
        (
            "vllm",
            1,
            False,
        ),  # a trainer's ranks 0 and 1 would send weights to workers 0 and 1 of a node, and each has worker 0
        ("sglang", 4, False),
        ("sglang", 1, True),
    ],
)
def test_in_separate_async_the_actors_servers_span_nodes_by_the_key_of_rollouts_own_pool(name, own, accepted, job):
    facts = async_job(job, name, own)
    if accepted:
        check_job(place({"actor": "2-5"}, facts), facts)
    else:
        error = job_refusal({"actor": "2-5"}, facts)
        assert error.found == str(own)
        smaller = 2 if own == 4 else 1
        assert error.remedy == f"{OWN['rollout']}.nnodes=4 {OWN['rollout']}.n_gpus_per_node=2, or {TP}={smaller}"


@pytest.mark.parametrize(("own", "accepted"), [(1, False), (2, False), (4, True), (8, True)])
def test_weights_find_the_workers_of_a_server_within_a_node_of_the_actors(own, accepted, job):
    facts = async_job(job, "vllm", own)
    if accepted:
        check_job(place({}, facts), facts)
    else:
        error = job_refusal({}, facts)
        assert error.expected.startswith("4 or more: of a server of 4 ranks, 4 lie on each of its nodes")
        assert error.remedy.startswith(f"{OWN['rollout']}.nnodes=2 {OWN['rollout']}.n_gpus_per_node=4")


def parts_of_vllm(tensor, data, **fields):
    return ServerFacts(
        name="vllm", ranks_per_replica=tensor * data, tensor_parallel_size=tensor, data_parallel_size=data, **fields
    )


@pytest.mark.parametrize(
    ("per_node", "tensor", "data", "smaller"),
    [((2,) * 4, 4, 2, 2), ((3,) * 2, 2, 3, 1), ((4,) * 2, 4, 2, None), ((2,) * 4, 2, 4, None), ((2,) * 4, 8, 1, None)],
)
@pytest.mark.parametrize("where", ["rollout", "reward", "teacher", "reward's own", "teacher's own"])
def test_a_data_parallel_part_of_vllm_lies_on_one_node(where, per_node, tensor, data, smaller, job):
    role, _, own = where.partition("'s ")
    server = parts_of_vllm(tensor, data, own_nodes=per_node if own else None)
    facts = job(("actor",), nodes=4, devices=4, **{role: server})
    placed = {f"node{node}": list(range(count)) for node, count in enumerate(per_node)}
    devices = {} if own else {"actor" if role == "rollout" else role: placed}
    if smaller is None:
        servers.check_servers(place(devices, facts), facts)
    else:
        with pytest.raises(PlacementError) as caught:
            servers.check_servers(place(devices, facts), facts)
        assert f"the {tensor} ranks of each of its data-parallel parts on one node" in caught.value.expected
        assert number_after(caught.value.subject, caught.value.remedy) == smaller
    sglang = replace(server, name="sglang")
    facts = replace(facts, **{role: sglang})
    servers.check_servers(place(devices, facts), facts)


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_server_that_prefills_apart_lies_on_one_node_of_rollouts_own_pool_too(name, hybrid, job):
    def facts(own):
        server = ServerFacts(
            name=name, ranks_per_replica=4, decoders=(1, 2), tensor_parallel_size=2, block=OWN["rollout"], own_nodes=own
        )
        return job(("actor",), devices=8, mode="separate_async", hybrid_rollout=hybrid, rollout=server)

    error = job_refusal({}, facts((2, 2)))
    assert f"{OWN['rollout']}.nnodes=1 {OWN['rollout']}.n_gpus_per_node=4" in error.remedy
    check_job(place({}, facts((4,))), facts((4,)))


@pytest.mark.parametrize(
    ("sizes", "remedy"),
    [
        ({"data_parallel_size": 2}, f"{OWN_BLOCK}.data_parallel_size=1"),
        ({"decoders": (1, 1)}, f"{OWN_BLOCK}.disaggregation.enabled=False"),
        ({"tensor_parallel_size": 2}, f"{TP}=1"),
    ],
)
@pytest.mark.parametrize("spread", [True, False])
def test_what_makes_a_server_larger_than_one_rank_is_what_the_remedy_changes(spread, sizes, remedy, job):
    server = ServerFacts(**{"name": "sglang", "ranks_per_replica": 2, "tensor_parallel_size": 1, **sizes})
    facts = job(("actor",), nodes=2, devices=4, rollout=server)
    devices, layouts = ({"actor": [0, 1]}, {"actor": "device_map"}) if spread else ({"actor": "0-5"}, {})
    with pytest.raises(PlacementError) as caught:
        check_job(place(devices, facts, layouts=layouts), facts)
    assert remedy in caught.value.remedy.split(", or ")
    assert spread == (caught.value.found == "2 ranks for one sglang server")


@pytest.mark.parametrize(
    ("devices", "size", "remedy"),
    [
        ([3], 2, "tensor_model_parallel_size=1"),
        ([0, 1, 2], 2, "tensor_model_parallel_size=1"),
        ({"node0": [0, 1], "node1": [0]}, 3, "sharding.roles.reward.devices=[0,1]"),  # by its layout
        ({"node0": [0], "node1": [0]}, 2, "sharding.roles.reward.devices=[0]"),
    ],
)
def test_a_server_of_ours_is_one_process_and_offered_nothing_else(devices, size, remedy, job):
    server = ServerFacts(name="hf", ranks_per_replica=size)
    error = job_refusal({"reward": devices}, job(("actor",), nodes=2, reward=server))
    assert "one process holds the whole model" in error.expected
    assert error.remedy.removeprefix("reward.reward_model.rollout.") == remedy
    if size == 2:
        error = job_refusal({"actor": devices}, job(("actor",), nodes=2, rollout=server))
        assert error.remedy == f"{TP}=1"


def test_a_pool_of_its_own_over_two_nodes_is_none_for_a_server_of_ours(job):
    server = ServerFacts(name="hf", ranks_per_replica=4, own_nodes=(2, 2))
    assert job_refusal({}, job(("actor",), reward=server)).remedy == "reward.reward_model.nnodes=1"


# Pools that verl reserves by itself

OWN = {
    "rollout": "actor_rollout_ref.rollout",
    "reward": "reward.reward_model",
    "teacher": "distillation",
}


def own_job(job, role, server):
    """A job whose role has a pool of its own."""
    if role == "rollout":
        return job(("actor",), mode="separate_async", hybrid_rollout=False, rollout=server)
    return job(("actor",), **{role: server})


@pytest.mark.parametrize("role", OWN)
def test_a_pool_of_its_own_must_hold_one_server(role, job):
    server = ServerFacts(name="vllm", ranks_per_replica=2, own_nodes=(1,))
    error = job_refusal({}, own_job(job, role, server))
    assert error.subject.endswith(".tensor_model_parallel_size")
    assert f"the 1 device of {OWN[role]}.nnodes=1 x {OWN[role]}.n_gpus_per_node=1" in error.expected
    assert error.remedy == f"{error.subject}=1, or {OWN[role]}.n_gpus_per_node=2"


@pytest.mark.parametrize("role", OWN)
def test_a_pool_of_its_own_must_have_devices(role, job):
    error = job_refusal({}, own_job(job, role, ServerFacts(name="vllm", ranks_per_replica=2, own_nodes=())))
    assert error.subject == f"{OWN[role]}.nnodes"
    assert f"{OWN[role]}.nnodes=1 {OWN[role]}.n_gpus_per_node=2" in error.remedy
    assert "sharding.roles" not in error.remedy  # the actor has all devices


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
@pytest.mark.parametrize("role", ["reward", "teacher"])
def test_devices_without_the_actor_are_offered_in_place_of_a_pool_without_any(role, mode, job):
    server = ServerFacts(name="vllm", ranks_per_replica=2, own_nodes=())
    rollout = ServerFacts(name="vllm", own_nodes=(1,) if mode == "separate_async" else None)
    error = job_refusal({"actor": [0]}, job(("actor",), mode=mode, rollout=rollout, **{role: server}))
    assert f"sharding.roles.{role}.devices=[1,2]" in error.remedy
    assert ("enable_resource_pool=False" in error.remedy) == (role == "reward" and mode == "sync")


def test_a_pool_for_servers_over_two_nodes_is_offered_as_the_actors_are_cut(job):
    facts = async_job(job, "vllm", 8)
    facts = replace(facts, rollout=replace(facts.rollout, own_nodes=()))
    assert job_refusal({"actor": "2-5"}, facts).remedy.startswith(f"{OWN_BLOCK}.nnodes=2 {OWN_BLOCK}.n_gpus_per_node=2")


@pytest.mark.parametrize("role", ["reward", "teacher"])
def test_devices_that_are_named_stand_in_for_a_pool_without_any(role, job):
    facts = own_job(job, role, ServerFacts(name="vllm", ranks_per_replica=2, own_nodes=()))
    check_job(place({role: [1, 2]}, facts), facts)


@pytest.mark.parametrize("role", OWN)
def test_what_is_offered_for_a_pool_of_its_own_is_accepted(role, job):
    offered = 0
    for count, devices, size in itertools.product((1, 2, 3), (1, 2, 3, 4), range(1, 13)):
        server = ServerFacts(name="vllm", ranks_per_replica=size, own_nodes=(devices,) * count)
        facts = own_job(job, role, server)
        try:
            servers.check_servers(place({}, facts), facts)
        except PlacementError as error:
            smaller = number_after(error.subject, error.remedy)
            larger = number_after(f"{OWN[role]}.n_gpus_per_node", error.remedy)
            for change in ({"ranks_per_replica": smaller}, {"own_nodes": (larger,) * count}):
                better = own_job(job, role, replace(server, **change))
                servers.check_servers(place({}, better), better)
            offered += 1
    assert offered


@pytest.mark.parametrize("role", ["reward", "teacher"])
def test_servers_must_fill_a_pool_that_verl_cuts_into_them(role, job):
    server = ServerFacts(name="vllm", ranks_per_replica=3, own_nodes=(4,))
    error = job_refusal({}, own_job(job, role, server))
    assert error.found == "3 ranks for one vllm server"


def test_rollout_may_leave_a_part_of_its_pool_alone(job):
    server = ServerFacts(name="vllm", ranks_per_replica=3, own_nodes=(8,))
    facts = own_job(job, "rollout", server)
    placement = place({}, facts)
    check_job(placement, facts)
    assert placement.reserved == {"rollout": (3, 3)}


def test_a_server_of_two_nodes_reserves_a_group_on_each(job):
    server = ServerFacts(name="vllm", ranks_per_replica=8, own_nodes=(4, 4, 4, 4))
    assert place({}, own_job(job, "rollout", server)).reserved == {"rollout": (4, 4, 4, 4)}
    assert place({}, own_job(job, "reward", server)).reserved == {"reward": (4, 4, 4, 4)}


# Several teachers

REPLICAS = "distillation.teacher_models.*.num_replicas"


def teachers(*sizes, own=None):
    return ServerFacts(name="vllm", ranks_per_replica=sizes[0] if sizes else 1, replicas=sizes, own_nodes=own)


@pytest.mark.parametrize(("sizes", "devices"), [((2, 1), (3,)), ((1, 1, 2), (4,)), ((4, 2, 2), (4, 4)), ((8,), (4, 4))])
def test_teachers_of_different_sizes_fill_their_pool_in_order(sizes, devices, job):
    facts = job(("actor",), teacher=teachers(*sizes, own=devices))
    check_job(place({}, facts), facts)


def test_teachers_that_need_more_or_fewer_devices_than_their_pool_has_are_refused(job):
    error = job_refusal({}, job(("actor",), teacher=teachers(2, 1, own=(4,))))
    assert error.subject == REPLICAS
    assert error.found == "3: servers of 2, 1 ranks"
    assert "distillation.nnodes=1 distillation.n_gpus_per_node=3" in error.remedy
    error = job_refusal({"actor": [0], "teacher": [1, 2]}, job(("actor",), teacher=teachers(2, 1, own=())))
    assert "sharding.roles.teacher.devices=[0,1,2]" in error.remedy


def test_teachers_without_any_server_are_refused(job):
    assert "servers of no teacher ranks" in job_refusal({}, job(("actor",), teacher=teachers(own=(4,)))).found


def test_a_teacher_that_straddles_two_nodes_is_refused(job):
    error = job_refusal({}, job(("actor",), teacher=teachers(3, 4, 1, own=(4, 4))))
    assert error.subject == REPLICAS
    assert error.found == "a server of 4 ranks from device 3 of the pool on, across the border of a node"


def test_a_teacher_whose_server_is_not_cut_into_whole_nodes_is_refused(job):
    error = job_refusal({}, job(("actor",), teacher=teachers(6, 2, own=(4, 4))))
    assert error.found == "a server of 6 ranks from device 0 of the pool on, across the border of a node"


@pytest.mark.parametrize(("units", "refused"), [((4,), True), ((2,), False), ((1,), False)])
def test_a_data_parallel_part_of_one_of_several_teachers_lies_on_one_node(units, refused, job):
    facts = job(("actor",), teacher=replace(teachers(8, own=(2,) * 4), replica_units=units))
    if refused:
        error = job_refusal({}, facts)
        assert error.found == "4"
        assert "tensor_model_parallel_size=8 " in error.remedy
    else:
        check_job(place({}, facts), facts)
