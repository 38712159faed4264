"""D2: too few CPUs make verl wait for ever in a placement group (verl#6663). Here the run ends before any wait."""

import re

import pytest

from verl_ext_sharding.config.facts import job_facts
from verl_ext_sharding.errors import PlacementError
from verl_ext_sharding.placement.bundles import place
from verl_ext_sharding.placement.resources import NodeResources, check_cluster, storage_units_that_fit

JOB = ("trainer.n_gpus_per_node=4", "trainer.nnodes=1", "actor_rollout_ref.rollout.name=vllm")


@pytest.fixture(scope="module")
def facts(compose):
    return job_facts(compose(*JOB))


def node(cpus):
    return [NodeResources(name="10.0.0.1", num_devices=4, num_cpus=cpus)]


def refusal(facts, cpus):
    with pytest.raises(PlacementError) as caught:
        check_cluster(place({}, facts), facts, node(cpus))
    return caught.value


def test_eight_cpus_for_four_devices_are_refused_with_twelve_and_eight(facts):
    error = refusal(facts, 8)
    assert "4 devices x 3 worker processes = 12 CPUs" in error.expected
    assert "8 CPUs" in error.found
    assert "pg.ready()" in error.found


def test_both_ways_out_are_offered(facts):
    remedy = refusal(facts, 8).remedy
    assert int(re.search(r"ray_kwargs\.ray_init\.num_cpus=(\d+)", remedy)[1]) >= 12
    assert "sharding.placement.max_colocate_count=" in remedy


def test_both_ways_out_lead_out(facts):
    remedy = refusal(facts, 8).remedy
    cpus = int(re.search(r"num_cpus=(\d+)", remedy)[1])
    assert check_cluster(place({}, facts), facts, node(cpus)) == 3
    count = int(re.search(r"max_colocate_count=(\d+)", remedy)[1])
    placement = place({}, facts, colocate_count=count)
    assert check_cluster(placement, facts, node(8)) == count
    assert placement.managed  # verl's own pools would take three CPUs for each device all the same


@pytest.mark.parametrize("cpus", [12, 16])
def test_twelve_and_sixteen_cpus_pass_and_leave_some_to_transfer_queue(cpus, facts):
    placement = place({}, facts)
    bundle_cpus = check_cluster(placement, facts, node(cpus))
    units = storage_units_that_fit(placement, facts, node(cpus), bundle_cpus)
    assert units >= 1
    assert 4 * bundle_cpus + units + 1 <= cpus
