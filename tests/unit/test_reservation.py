"""Ray reserves what the job needs, where all of it has room; what it can't, or does otherwise, ends the run and is given back."""

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

from ray.exceptions import GetTimeoutError

from verl_ext_sharding.config.spec import RunSpec
from verl_ext_sharding.errors import ClusterError
from verl_ext_sharding.placement.bundles import place
from verl_ext_sharding.placement.job import ServerFacts
from verl_ext_sharding.placement.resources import NodeResources
from verl_ext_sharding.workers import pools

FREE = (("10.0.0.1", 4), ("10.0.0.2", 2))


class Cluster:
    """A Ray that gives each group what it asks for.

    Args:
        answered: How many questions get an answer: that the groups are ready, then where each node's bundles are.
        ids: Ids of a node's accelerators, in the order of the bundles.
        lost: Ray overlooks which nodes were asked for, and takes one for all.
        free: Address and devices of each node.
    """

    def __init__(self, monkeypatch, answered=9, ids="01", lost=False, free=FREE):
        self.answered, self.ids, self.lost, self.asked, self.removed = answered, ids, lost, [], []
        self.free = [NodeResources(name=name, num_devices=count, num_cpus=64) for name, count in free]
        state = SimpleNamespace(state=SimpleNamespace(available_resources_per_node=lambda: {}))
        monkeypatch.setattr(pools, "ray", SimpleNamespace(get=self.get, _private=state))
        monkeypatch.setattr(pools.cluster, "free_resources", lambda: self.free)
        monkeypatch.setattr(pools, "placement_group", self.group)
        monkeypatch.setattr(pools, "remove_placement_group", lambda group: self.removed.append(group.name))
        monkeypatch.setattr(pools, "sort_placement_group_by_node_ip", list)
        monkeypatch.setattr(pools, "PlacementGroupSchedulingStrategy", lambda group, **kwargs: group)
        monkeypatch.setattr(pools, "where", SimpleNamespace(options=self.where))

    def group(self, bundles, strategy, name):
        pins = [key.removeprefix("node:") for key in bundles[0] if key.startswith("node:")]
        node = "one" if self.lost or not pins else pins[0]
        name = name.rpartition("_")[2]
        self.asked.append((name, len(bundles), pins))
        return SimpleNamespace(name=name, node=node, ready=lambda: "ready", bundle_count=len(bundles), id=name)

    def where(self, scheduling_strategy, **kwargs):
        return SimpleNamespace(remote=lambda accelerator: scheduling_strategy.node)

    def get(self, asked, timeout):
        assert timeout == 7.0
        if self.answered == 0:
            raise GetTimeoutError
        self.answered -= 1
        return [(node, self.ids[index : index + 1] or "GPU-0") for index, node in enumerate(asked)]


def spec(facts, devices=None, **fields):
    return RunSpec(placement=place(devices or {}, facts), bundle_cpus=3, timeout_s=7.0, **fields)


@pytest.fixture
def cluster(monkeypatch):
    """`cluster(answered=1)`: a `Cluster`."""
    return lambda **how: Cluster(monkeypatch, **how)


@pytest.mark.parametrize(
    ("answered", "subject"), [(0, "reserving the job's devices"), (1, "the job's devices"), (2, "the job's devices")]
)
def test_devices_that_do_not_answer_in_time_end_the_run_and_are_given_back(answered, subject, job, cluster):
    ray = cluster(answered=answered)
    with pytest.raises(ClusterError) as caught:
        pools.reserve(spec(job(("actor",), nodes=2, devices=2)))
    assert caught.value.subject == subject
    assert "sharding.placement.timeout_s" in caught.value.remedy
    assert ray.removed == ["trainer0", "trainer1"]


def test_each_group_is_put_where_all_of_them_have_room(job, cluster):
    """The trainer leaves the large node to the teacher."""
    ray = cluster()
    facts = job(("actor",), devices=2, teacher=ServerFacts(name="vllm", own_nodes=(4,)))
    found = pools.reserve(spec(facts, {"actor": [0]}), ["teacher_pool"])
    assert ray.asked == [("trainer0", 2, ["10.0.0.2"]), ("teacher0", 4, ["10.0.0.1"])]
    assert [group.name for group in found.own["teacher_pool"]] == ["teacher0"]
    assert {bundle.promise.node_id for bundle in found.bundles.values()} == {"10.0.0.2"}


def test_a_pool_that_verl_makes_later_is_left_its_room(job, cluster):
    ray = cluster()
    server = ServerFacts(name="vllm", ranks_per_replica=4, own_nodes=(4,))
    facts = job(("actor",), devices=2, mode="separate_async", rollout=server)
    assert pools.reserve(spec(facts, {"actor": [0]})).own == {}
    assert ray.asked == [("trainer0", 2, ["10.0.0.2"])]


def test_one_group_goes_where_ray_wants(job, cluster):
    ray = cluster()
    pools.reserve(spec(job(("actor",), devices=2), {"actor": [0]}))
    assert ray.asked == [("trainer0", 2, [])]


def test_two_nodes_of_the_job_that_are_the_same_one_of_rays_end_the_run(job, cluster):
    ray = cluster(lost=True)
    with pytest.raises(ClusterError) as caught:
        pools.reserve(spec(job(("actor",), nodes=2, devices=2), {"actor": {"node0": [0]}}))
    assert caught.value.subject == "nodes of the job"
    assert "node0 is one, node1 is one" in caught.value.found
    assert ray.removed == ["trainer0", "trainer1"]


def test_room_that_another_job_took_meanwhile_is_waited_for_and_not_beyond_the_time(job, cluster, monkeypatch):
    ray = cluster(free=(("10.0.0.1", 4), ("10.0.0.2", 1)))
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds
        if freed_at is not None and now[0] >= freed_at:
            ray.free = [NodeResources(name=name, num_devices=count, num_cpus=64) for name, count in FREE]

    monkeypatch.setattr(pools, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    run = spec(job(("actor",), nodes=2, devices=2), {"actor": {"node0": [0]}})
    freed_at = None
    with pytest.raises(ClusterError, match="reserving the job's devices"):
        pools.reserve(run)
    assert now[0] == pytest.approx(7.0, abs=1.0)
    assert ray.asked == []
    freed_at = now[0] + 2.0
    pools.reserve(run)
    assert len(ray.asked) == 2


# What inference servers take for granted

ROLLOUT = "actor_rollout_ref.rollout.name"


@pytest.mark.parametrize("backend", ["vllm", "sglang", "trtllm", "hf"])
@pytest.mark.parametrize(
    ("ids", "refused"), [("01", ()), ("10", ("trtllm",)), ("0", ("sglang",))], ids=["in order", "turned", "words"]
)
def test_ids_and_bundles_that_servers_could_not_find_devices_by_end_the_run(backend, ids, refused, job, cluster):
    ray = cluster(ids=ids)
    run = spec(job(("actor",), devices=2), {"actor": [0]}, backends={ROLLOUT: backend, "other.name": "vllm"})
    if backend not in refused:
        pools.reserve(run)
        return
    with pytest.raises(ClusterError) as caught:
        pools.reserve(run)
    assert caught.value.remedy.endswith(f"or {ROLLOUT}=vllm")
    assert ray.removed == ["trainer0"]
