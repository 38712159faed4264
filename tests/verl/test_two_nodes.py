"""Placement on a simulated cluster of two nodes: per-node maps, uneven nodes, too few CPUs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.verl

_SCRIPT = """
import json, os, sys
os.environ["VERL_PLATFORM"] = "cpu"
import ray
from ray.cluster_utils import Cluster

sizes = json.loads(sys.argv[1])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 12, "num_gpus": sizes[0], "include_dashboard": False})
for index, size in enumerate(sizes[1:]):
    cluster.add_node(num_cpus=12, num_gpus=size, node_ip_address=f"127.0.0.{index + 2}")
ray.init(address=cluster.address, log_to_driver=False)
cluster.wait_for_nodes()
try:
    result = __import__("tests.verl.two_nodes", fromlist=["run"]).run(json.loads(sys.argv[2]), len(sizes))
    print("RESULT " + json.dumps(result))
finally:
    ray.shutdown()
    cluster.shutdown()
"""


def _on_cluster(sizes: str, job: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", _SCRIPT, sizes, job], capture_output=True, text=True, timeout=300, cwd=_root()
    )


def _root() -> str:
    from pathlib import Path

    return str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def two_even_nodes():
    done = _on_cluster("[2, 2]", '{"actor": {"node0": [1], "node1": [0]}, "critic": {"node1": [0, 1]}, "ref": [0]}')
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def test_a_map_per_node_puts_each_rank_on_the_node_and_device_it_names(two_even_nodes):
    actor, critic, ref = (two_even_nodes["workers"][role] for role in ("actor", "critic", "ref"))
    first, second = two_even_nodes["nodes"]
    assert [(w["node_id"], w["device"], w["accelerator_id"]) for w in actor] == [(first, 1, "1"), (second, 2, "0")]
    assert [(w["node_id"], w["device"], w["accelerator_id"]) for w in critic] == [(second, 2, "0"), (second, 3, "1")]
    assert [(w["node_id"], w["device"], w["accelerator_id"]) for w in ref] == [(first, 0, "0")]


def test_ranks_and_world_sizes_are_those_of_the_role(two_even_nodes):
    assert [w["rank"] for w in two_even_nodes["workers"]["actor"]] == ["0", "1"]
    assert {w["world_size"] for w in two_even_nodes["workers"]["actor"]} == {"2"}
    assert {w["local_world_size"] for w in two_even_nodes["workers"]["critic"]} == {"2"}


def test_a_role_with_unequal_devices_per_node_gets_each_of_them(two_even_nodes):
    uneven = two_even_nodes["uneven"]
    assert [w["device"] for w in uneven] == [0, 1, 3]
    assert [w["rank"] for w in uneven] == ["0", "1", "2"]


def test_servers_get_their_share_of_a_pool_with_gaps(two_even_nodes):
    first, second = two_even_nodes["nodes"]
    placed = [[(w["node_id"], w["device"]) for w in server] for server in two_even_nodes["served"]]
    assert placed == [[(first, 1)], [(second, 3)]]


def test_a_node_that_a_map_names_by_its_address_is_the_one_that_ray_reserves(two_even_nodes):
    found = two_even_nodes["addressed"]
    assert len(found) == 2
    for address, job in found.items():
        assert job == {"names": [address], "reserved": [address, address]}


def test_each_node_answers_with_the_drivers_code_and_spec(two_even_nodes):
    assert two_even_nodes["parity"] == "equal"


def test_a_node_with_other_code_is_named_before_anything_starts(two_even_nodes):
    assert "driver" in two_even_nodes["other_code"]
    assert "release:verl" in two_even_nodes["other_code"]


def test_a_reservation_that_ray_can_not_make_ends_in_an_error_and_leaves_nothing_reserved(two_even_nodes):
    assert "after 3 s Ray has free" in two_even_nodes["not_reserved"]
    assert two_even_nodes["free_after"] == 4


@pytest.fixture(scope="module")
def four_and_two_devices():
    done = _on_cluster("[4, 2]", '{"check": {"nodes": 2, "devices": 3}}')
    assert "RESULT " in done.stdout, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def test_four_and_two_devices_are_refused_with_layouts_that_fit(four_and_two_devices):
    assert "free devices per node" in four_and_two_devices
    assert "trainer.nnodes=2 trainer.n_gpus_per_node=2" in four_and_two_devices
    assert "trainer.nnodes=1 trainer.n_gpus_per_node=4" in four_and_two_devices


def test_nodes_of_the_trainer_are_different_ones_and_leave_the_large_one_to_a_pool_of_its_own(four_and_two_devices):
    apart = json.loads(four_and_two_devices.rpartition("RESULT ")[2])["apart"]
    assert apart == {"two": [2, {}], "beside": [1, {"teacher_pool": 1}]}
