"""What verl could not run as asked is refused before anything starts, and what the error says to type works."""

import itertools
import re
from dataclasses import replace

import pytest

from verl_ext_sharding.errors import PlacementError
from verl_ext_sharding.placement import checks
from verl_ext_sharding.placement.bundles import place
from verl_ext_sharding.placement.checks import NodeResources, check_cluster, check_job, storage_units_that_fit
from verl_ext_sharding.placement.job import EngineFacts, MicroBatch, ServerFacts

TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"


def refusal(check, *arguments):
    with pytest.raises(PlacementError) as caught:
        check(*arguments)
    assert "does not start" in caught.value.consequence
    return caught.value


def job_refusal(devices, facts):
    return refusal(check_job, place(devices, facts), facts)


def number_after(key, text):
    """The number that a remedy gives to a key."""
    return int(re.search(rf"{re.escape(key)}=(\d+)", text)[1])


def nodes(*resources):
    return [NodeResources(name=f"10.0.0.{i}", num_devices=d, num_cpus=c) for i, (d, c) in enumerate(resources)]


# Model parallelism


@pytest.mark.parametrize("role", ["actor", "ref", "critic"])
def test_devices_that_model_parallelism_does_not_divide_are_refused_with_how_many_would_do(role, job):
    engines = {role: EngineFacts(strategy="megatron", model_parallel_size=2, mini_batch_size=8)}
    error = job_refusal({role: [0, 1, 3]}, job(engines=engines, devices=4))
    assert error.subject == f"devices of {role}"
    assert "a multiple of 2" in error.expected
    assert "megatron" in error.expected
    assert "3 devices [0,1,3]" in error.found
    assert f"give {role} 4 devices" in error.remedy


def test_devices_that_model_parallelism_divides_are_accepted(job):
    engines = {"critic": EngineFacts(strategy="fsdp2", model_parallel_size=2, mini_batch_size=8)}
    facts = job(engines=engines)
    check_job(place({"critic": [0, 1, 2, 3]}, facts), facts)


# Layers of one process


def spread_job(devices, facts, *roles):
    """Checks a job whose roles' layers are spread."""
    check_job(place(devices, facts, layouts=dict.fromkeys(roles, "device_map")), facts)


def spread_refusal(devices, facts, *roles):
    return refusal(check_job, place(devices, facts, layouts=dict.fromkeys(roles, "device_map")), facts)


@pytest.mark.parametrize("role", ["actor", "ref", "critic"])
def test_layers_over_three_devices_are_one_data_parallel_rank(role, job):
    devices = {"actor": [0], "ref": [0], "critic": [0]} | {role: [0, 1, 2]}
    engines = {name: EngineFacts(strategy="fsdp2", mini_batch_size=4) for name in ("actor", "critic")}
    facts = job(engines=engines, train_batch_size=8)
    assert "divides by 3" in job_refusal(devices, facts).expected
    spread_job(devices, facts, role)


def test_a_rank_that_has_all_samples_is_checked_against_its_micro_batch(job):
    micro = MicroBatch(key="k", samples=4, of_step=False)
    engines = {"critic": EngineFacts(strategy="fsdp2", mini_batch_size=6, micro_batches=(micro,))}
    facts = job(engines=engines)
    error = spread_refusal({"actor": [0], "critic": [1, 2]}, facts, "critic")
    assert "the 6 samples that each of the 1 ranks of critic gets" in error.expected
    assert error.remedy == "k=3"


@pytest.mark.parametrize(
    ("role", "key"),
    [
        ("actor", "actor_rollout_ref.actor.fsdp_config"),
        ("ref", "actor_rollout_ref.ref.fsdp_config"),
        ("critic", "critic.fsdp"),
    ],
)
def test_a_spread_model_shares_its_sequences_with_no_other_rank(role, key, job):
    engines = {role: EngineFacts(strategy="fsdp", model_parallel_size=2, mini_batch_size=24)}
    error = spread_refusal({role: [0, 1]}, job(engines=engines), role)
    assert error.subject == f"sharding.roles.{role}.layout=device_map"
    assert "one rank" in error.expected
    assert error.found == "ulysses_sequence_parallel_size=2"
    remedy = f"{key}.ulysses_sequence_parallel_size=1, or sharding.roles.{role}.layout=fsdp"
    assert error.remedy == remedy


@pytest.mark.parametrize("strategy", ["megatron", "torchtitan", "veomni"])
def test_a_strategy_without_fsdp_spreads_no_layers(strategy, job):
    facts = job(engines={"critic": EngineFacts(strategy=strategy, mini_batch_size=24)})
    error = spread_refusal({"critic": [0, 1]}, facts, "critic")
    assert error.subject == "sharding.roles.critic.layout=device_map"
    assert error.expected == "strategy fsdp or fsdp2"
    assert error.found == strategy
    assert error.remedy == "sharding.roles.critic.layout=fsdp"


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_both_strategies_of_fsdp_spread_layers(strategy, job):
    facts = job(engines={"critic": EngineFacts(strategy=strategy, mini_batch_size=24)})
    spread_job({"critic": [0, 1]}, facts, "critic")


def test_other_roles_keep_their_strategy_and_their_sequence_parallel_ranks(job):
    engines = {
        "actor": EngineFacts(strategy="megatron", model_parallel_size=2, mini_batch_size=24),
        "ref": EngineFacts(strategy="fsdp2", model_parallel_size=2),
    }
    spread_job({"actor": [0, 1], "ref": [2, 3], "critic": [0, 1]}, job(engines=engines), "critic")


def test_a_rollout_server_of_two_ranks_does_not_fit_the_one_process_of_a_spread_actor(job):
    facts = job(("actor",), rollout=ServerFacts(name="vllm", ranks_per_replica=2))
    error = spread_refusal({"actor": [2, 3]}, facts, "actor")
    assert error.subject == TP
    assert "there is one, on device 2" in error.expected
    assert error.found == "2"
    assert error.remedy == f"{TP}=1, or sharding.roles.actor.layout=fsdp"
    check_job(place({"actor": [2, 3]}, facts), facts)


def test_a_rollout_server_of_two_ranks_goes_with_a_critic_that_is_spread(job):
    facts = job(rollout=ServerFacts(name="vllm", ranks_per_replica=2))
    spread_job({"actor": [0, 1], "critic": [2, 3]}, facts, "critic")


def test_a_rollout_server_of_one_rank_fits_a_spread_actor(job):
    facts = job(("actor",))
    spread_job({"actor": [0, 1]}, facts, "actor")


def test_rollout_on_devices_of_its_own_may_have_any_size_beside_a_spread_actor(job):
    server = ServerFacts(name="vllm", ranks_per_replica=2, own_devices=2)
    facts = job(("actor",), mode="separate_async", hybrid_rollout=False, rollout=server)
    spread_job({"actor": [0, 1]}, facts, "actor")


# Batches


def test_samples_that_do_not_divide_by_a_roles_ranks_are_refused_with_the_numbers(job):
    facts = job(train_batch_size=8)
    error = job_refusal({"actor": [0, 1], "critic": [1, 2, 3], "ref": [0]}, facts)
    assert error.subject == "data.train_batch_size"
    assert "critic has 3 data-parallel ranks on devices [1,2,3]" in error.expected
    assert "8 prompts x 1 responses = 8 samples" in error.found
    assert "data.train_batch_size=12" in error.remedy
    assert "devices for critic" in error.remedy


@pytest.mark.parametrize("role", ["actor", "ref", "critic"])
def test_each_role_is_checked_against_its_own_ranks(role, job):
    others = {"actor": [0], "ref": [0], "critic": [0]}
    error = job_refusal(others | {role: [0, 1, 2]}, job(train_batch_size=8))
    assert f"{role} has 3 data-parallel ranks" in error.expected


def test_ranks_are_counted_without_the_model_parallel_ones(job):
    engines = {"critic": EngineFacts(strategy="fsdp2", model_parallel_size=3, mini_batch_size=8)}
    facts = job(engines=engines, train_batch_size=8)
    check_job(place({"actor": [0], "ref": [0], "critic": [1, 2, 3]}, facts), facts)


def test_responses_count_as_samples(job):
    facts = job(train_batch_size=4, rollout_n=3)
    check_job(place({"actor": [0], "ref": [0], "critic": [1, 2, 3]}, facts), facts)


def test_the_updates_of_one_step_share_its_prompts(job):
    facts = job(train_batch_size=24, parameter_sync_step=3, mode="separate_async")
    error = job_refusal({"actor": [0], "ref": [0], "critic": [1, 2, 3]}, facts)
    assert "8 prompts x 1 responses" in error.found
    assert number_after("data.train_batch_size", error.remedy) == 27


def test_a_mini_batch_is_checked_on_its_own_and_named_by_its_key(job):
    engines = {role: EngineFacts(strategy="fsdp2", mini_batch_size=8) for role in ("actor", "critic")}
    facts = job(engines=engines, train_batch_size=24)
    error = job_refusal({"actor": [0], "ref": [0], "critic": [1, 2, 3]}, facts)
    assert error.subject == "critic.ppo_mini_batch_size"
    assert "8 prompts x 1 responses = 8 samples" in error.found
    assert "critic.ppo_mini_batch_size=9" in error.remedy
    error = job_refusal({"actor": [1, 2, 3], "ref": [0], "critic": [0]}, facts)
    assert error.subject == "actor_rollout_ref.actor.ppo_mini_batch_size"
    assert "actor_rollout_ref.actor.ppo_mini_batch_size=9" in error.remedy


def test_what_the_errors_say_to_type_leads_to_a_job_that_runs(job):
    sizes = [range(count) for count in (1, 2, 3, 4)]
    for actor, ref, critic in itertools.product(sizes, repeat=3):
        for batch, rollout_n, mini in ((1, 1, 1), (7, 1, 3), (8, 3, 5), (10, 4, 4)):
            devices = {"actor": list(actor), "ref": list(ref), "critic": list(critic)}
            minis = {"actor": mini, "ref": None, "critic": mini}
            for _ in range(4):  # one for the batch and one for each mini-batch, and then it must pass
                engines = {role: EngineFacts(strategy="fsdp2", mini_batch_size=minis[role]) for role in minis}
                facts = job(engines=engines, train_batch_size=batch, rollout_n=rollout_n)
                try:
                    check_job(place(devices, facts), facts)
                    break
                except PlacementError as error:
                    value = number_after(error.subject, error.remedy)
                    if error.subject == "data.train_batch_size":
                        ranks = [len(devices[role]) for role in devices]
                        fits = (n for n in itertools.count(batch) if all(n * rollout_n % count == 0 for count in ranks))
                        assert value == next(fits)
                        batch = value
                    else:
                        role = "critic" if error.subject.startswith("critic") else "actor"
                        assert value > minis[role]
                        minis[role] = value
            else:
                pytest.fail(f"no way out for {devices} from {batch} prompts")


@pytest.mark.parametrize(("of_step", "what", "samples"), [(True, "update", 12), (False, "mini-batch", 4)])
def test_a_micro_batch_that_does_not_divide_what_a_rank_gets_is_refused(of_step, what, samples, job):
    micro = MicroBatch(key="actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", samples=5, of_step=of_step)
    engines = {"actor": EngineFacts(strategy="fsdp2", mini_batch_size=8, micro_batches=(micro,))}
    error = job_refusal({"actor": [0, 1], "ref": [0], "critic": [0]}, job(engines=engines))
    assert error.subject == micro.key
    assert f"{samples} samples" in error.expected
    assert what in error.expected
    assert error.found == "5"
    assert error.remedy == f"{micro.key}=4"


def test_a_micro_batch_is_a_number_of_samples_and_not_of_prompts(job):
    for of_step in (True, False):
        micro = MicroBatch(key="k", samples=6, of_step=of_step)
        engines = {"actor": EngineFacts(strategy="fsdp2", mini_batch_size=8, micro_batches=(micro,))}
        facts = job(engines=engines, train_batch_size=8, rollout_n=3)
        check_job(place({"actor": [0, 1], "ref": [0], "critic": [0]}, facts), facts)


def test_a_micro_batch_that_divides_is_accepted(job):
    for samples in (1, 2, 4):
        micro = MicroBatch(key="k", samples=samples, of_step=False)
        facts = job(engines={"actor": EngineFacts(strategy="fsdp2", mini_batch_size=8, micro_batches=(micro,))})
        check_job(place({"actor": [0, 1], "ref": [0], "critic": [0]}, facts), facts)


def test_with_lora_the_reference_has_no_ranks_to_check(job):
    facts = job(ref_in_actor=True, train_batch_size=8)
    check_job(place({"actor": [0], "critic": [1]}, facts), facts)


# Servers


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
            checks.check_servers(place({"actor": devices}, facts), facts)
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
            checks.check_servers(placement, facts)
        except PlacementError as error:
            if TP not in error.remedy:
                assert num_devices % rest
                continue
            smaller = number_after(TP, error.remedy)
            assert smaller < tensor
            fitting = replace(server, ranks_per_replica=smaller * rest, tensor_parallel_size=smaller)
            checks.check_servers(placement, replace(facts, rollout=fitting))
            offered += 1
    assert offered


def test_a_rollout_server_that_does_not_divide_the_actors_devices_is_refused(job):
    facts = job(("actor",), rollout=ServerFacts(name="vllm", ranks_per_replica=2))
    error = job_refusal({"actor": [0, 1, 3]}, facts)
    assert error.subject == TP
    assert "3 devices [0,1,3] of rollout" in error.expected
    assert error.found == "2 ranks for one vllm server"
    assert error.remedy == f"{TP}=1, or give rollout 4 devices"


def test_where_other_parallel_sizes_are_too_large_they_are_named(job):
    server = ServerFacts(name="vllm", ranks_per_replica=4, tensor_parallel_size=1)
    error = job_refusal({"actor": [0, 1, 2]}, job(("actor",), rollout=server))
    assert "data_parallel_size x pipeline_model_parallel_size (now 4)" in error.remedy


@pytest.mark.parametrize(
    ("role", "key"),
    [
        ("reward", "reward.reward_model.rollout.tensor_model_parallel_size"),
        ("teacher", "distillation.teacher_models.<name>.inference.tensor_model_parallel_size"),
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
    server = ServerFacts(name="vllm", ranks_per_replica=4, own_devices=4)
    facts = job(("actor",), mode="separate_async", hybrid_rollout=False, rollout=server)
    check_job(place({"actor": [0, 1, 2]}, facts), facts)


# The cluster: devices


def cluster_refusal(facts, found, devices=None, **arguments):
    return refusal(check_cluster, place(devices or {}, facts, **arguments), facts, found)


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
    facts = job(devices=4, mode="separate_async", rollout=ServerFacts(name="vllm", own_devices=2))
    error = cluster_refusal(facts, nodes((4, 64), (1, 64)))
    assert "4 for the trainer and 2 for pools of their own (rollout 2)" in error.expected
    assert "5 free" in error.found
    check_cluster(place({}, facts), facts, nodes((4, 64), (2, 64)))


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
    facts = job(devices=4, mode="separate_async", rollout=ServerFacts(name="vllm", own_devices=2))
    assert check_cluster(place({}, facts), facts, nodes((8, 18))) == 3
    assert check_cluster(place({}, facts), facts, nodes((8, 17))) == 2


@pytest.mark.parametrize(("free", "units"), [(15, 2), (21, 8), (100, 8), (12, 1)])
def test_storage_units_are_what_is_asked_for_or_what_fits_and_at_least_one(free, units, job):
    facts = job(devices=4)
    assert storage_units_that_fit(place({}, facts), facts, nodes((4, free)), 3) == units


def test_one_cpu_is_enough_for_a_queue_that_keeps_no_units(job):
    facts = job(devices=4, transfer_queue_units=1)
    assert check_cluster(place({}, facts), facts, nodes((4, 13))) == 3
