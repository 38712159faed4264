"""What verl could not run as asked is refused before anything starts, and what the error says to type works."""

import re

import pytest
from remedies import number_after

from verl_ext_sharding.errors import PlacementError
from verl_ext_sharding.placement.bundles import place
from verl_ext_sharding.placement.checks import check_job, check_layout
from verl_ext_sharding.placement.job import EngineFacts, MicroBatch, ServerFacts

TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"


def refusal(check, *arguments):
    with pytest.raises(PlacementError) as caught:
        check(*arguments)
    assert "does not start" in caught.value.consequence
    return caught.value


def job_refusal(devices, facts):
    return refusal(check_job, place(devices, facts), facts)


# Model parallelism


@pytest.mark.parametrize("role", ["actor", "ref", "critic"])
def test_devices_that_model_parallelism_does_not_divide_are_refused_with_how_many_would_do(role, job):
    engines = {role: EngineFacts(strategy="megatron", model_parallel_size=2, mini_batch_size=8)}
    error = job_refusal({role: [0, 1, 3]}, job(engines=engines, devices=4))
    assert error.subject == f"devices of {role}"
    assert "a multiple of 2" in error.expected
    assert "megatron" in error.expected
    assert "3 devices [0,1,3]" in error.found
    assert f"sharding.roles.{role}.devices=[0,1,2,3]" in error.remedy
    assert f"{role}.megatron.tensor_model_parallel_size" in error.remedy


def test_no_more_devices_are_offered_than_the_job_has(job):
    engine = EngineFacts(strategy="fsdp2", model_parallel_size=3, sequence_parallel_keys=("sp",), mini_batch_size=24)
    error = job_refusal({}, job(("actor",), engines={"actor": engine}, devices=8))
    assert error.remedy == 'sharding.roles.actor.devices="0-5", or sp=2'


def test_the_devices_that_are_offered_suit_the_rollout_servers_of_the_actor_too(job):
    engine = EngineFacts(strategy="fsdp2", model_parallel_size=3, sequence_parallel_keys=("sp",), mini_batch_size=24)
    facts = job(
        ("actor",), engines={"actor": engine}, devices=12, rollout=ServerFacts(name="vllm", ranks_per_replica=4)
    )
    error = job_refusal({"actor": list(range(8))}, facts)
    assert error.remedy == 'sharding.roles.actor.devices="0-11", or sp=2'


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_devices_and_the_sizes_that_are_offered_work(num_nodes, size, job):
    def facts(size):
        engine = EngineFacts(
            strategy="fsdp2", model_parallel_size=size, sequence_parallel_keys=("sp",), mini_batch_size=24
        )
        return job(("actor",), engines={"actor": engine}, nodes=num_nodes, devices=4)

    offered = 0
    for count in range(1, num_nodes * 4 + 1):
        if count % size == 0:
            continue
        error = job_refusal({"actor": list(range(count))}, facts(size))
        devices = re.search(r"devices=(\[[\d,]+\]|\"\d+-\d+\")", error.remedy)[1].strip('"')
        check_layout(place({"actor": devices}, facts(size)), facts(size))
        smaller = facts(number_after("sp", error.remedy))
        check_layout(place({"actor": list(range(count))}, smaller), smaller)
        offered += 1
    assert offered


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
    keys = (f"{key}.ulysses_sequence_parallel_size",)
    engine = EngineFacts(strategy="fsdp", model_parallel_size=2, sequence_parallel_keys=keys, mini_batch_size=24)
    engines = {role: engine}
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
    assert error.subject == "sharding.roles.actor.layout=device_map"
    assert "there is one, on device 2" in error.expected
    assert error.found == "2 ranks for one vllm server"
    assert error.remedy == f"{TP}=1, or sharding.roles.actor.layout=fsdp"
    check_job(place({"actor": [2, 3]}, facts), facts)


def test_a_rollout_server_of_two_ranks_goes_with_a_critic_that_is_spread(job):
    facts = job(rollout=ServerFacts(name="vllm", ranks_per_replica=2))
    spread_job({"actor": [0, 1], "critic": [2, 3]}, facts, "critic")


def test_a_rollout_server_of_one_rank_fits_a_spread_actor(job):
    facts = job(("actor",))
    spread_job({"actor": [0, 1]}, facts, "actor")


def test_rollout_on_devices_of_its_own_may_have_any_size_beside_a_spread_actor(job):
    server = ServerFacts(name="vllm", ranks_per_replica=2, own_nodes=(2,))
    facts = job(("actor",), mode="separate_async", hybrid_rollout=False, rollout=server)
    spread_job({"actor": [0, 1]}, facts, "actor")
