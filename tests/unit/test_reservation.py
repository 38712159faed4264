"""Devices that Ray reserves but that don't answer end the run, and are given back."""

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

from ray.exceptions import GetTimeoutError

from verl_ext_sharding.config.spec import RunSpec
from verl_ext_sharding.errors import ClusterError
from verl_ext_sharding.placement.bundles import place
from verl_ext_sharding.workers import pools


@pytest.mark.parametrize(
    ("answered", "subject"), [(0, "reserving the job's devices"), (1, "the job's devices"), (2, "the job's devices")]
)
def test_devices_that_do_not_answer_in_time_end_the_run_and_are_given_back(answered, subject, job, monkeypatch):
    """`answered`: how many questions get an answer: that each node's group is reserved, then where its bundles are."""
    left = [answered]
    removed = []

    def get(asked, timeout):
        assert timeout == 7.0
        if left[0] == 0:
            raise GetTimeoutError
        left[0] -= 1
        return [("node", "0") for _ in asked]

    groups = iter(SimpleNamespace(name=f"group {n}", ready=lambda: "ready", bundle_count=2) for n in range(2))
    options = SimpleNamespace(remote=lambda accelerator: "question")
    state = SimpleNamespace(state=SimpleNamespace(available_resources_per_node=lambda: {}))
    monkeypatch.setattr(pools, "ray", SimpleNamespace(get=get, _private=state))
    monkeypatch.setattr(pools, "placement_group", lambda *args, **kwargs: next(groups))
    monkeypatch.setattr(pools, "remove_placement_group", lambda group: removed.append(group.name))
    monkeypatch.setattr(pools, "sort_placement_group_by_node_ip", list)
    monkeypatch.setattr(pools, "PlacementGroupSchedulingStrategy", lambda *args, **kwargs: None)
    monkeypatch.setattr(pools, "where", SimpleNamespace(options=lambda **kwargs: options))
    spec = RunSpec(placement=place({}, job(("actor",), nodes=2, devices=2)), bundle_cpus=3, timeout_s=7.0)
    with pytest.raises(ClusterError) as caught:
        pools.reserve(spec)
    assert caught.value.subject == subject
    assert "sharding.placement.timeout_s" in caught.value.remedy
    assert removed == ["group 0", "group 1"]
