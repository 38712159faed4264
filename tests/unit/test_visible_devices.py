"""A process that spreads a model sees all devices of its role, in the role's order; every other one sees its own."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from verl_ext_sharding import envs, loading
from verl_ext_sharding.config.spec import RunSpec
from verl_ext_sharding.errors import PlacementError
from verl_ext_sharding.placement.bundles import Pool, Promise, place

VISIBLE = "CUDA_VISIBLE_DEVICES"
NODE = "a1b2c3d4e5f6"


def promise(*visible, device=4, accelerator_id="2"):
    return Promise(
        device=device,
        node_id=NODE,
        accelerator_id=accelerator_id,
        visible=visible,
        visible_variable=VISIBLE if visible else "",
    )


@pytest.fixture
def promised(monkeypatch):
    """Gives this process a promise, and what Ray showed it: the device of its bundle."""

    def given(one, shown="2"):
        monkeypatch.setenv(envs.BUNDLE, one.to_json())
        monkeypatch.setenv(VISIBLE, shown)

    return given


# In the worker: what it sees


@pytest.mark.parametrize("visible", [("2", "0"), ("0", "2"), ("2",), ("GPU-5f1c", "GPU-77aa")])
def test_a_process_sees_the_devices_of_its_promise_in_their_order(visible, promised):
    promised(promise(*visible))
    loading.show_devices()
    assert os.environ[VISIBLE] == ",".join(visible)


def test_showing_devices_twice_is_showing_them_once(promised):
    promised(promise("2", "0"))
    loading.show_devices()
    loading.show_devices()
    assert os.environ[VISIBLE] == "2,0"


def test_a_process_with_one_device_sees_what_ray_showed_it(promised):
    promised(promise(), shown="2")
    loading.show_devices()
    assert os.environ[VISIBLE] == "2"


@pytest.mark.parametrize("text", [None, ""])
def test_a_process_without_a_promise_sees_what_it_saw(text, monkeypatch):
    monkeypatch.delenv(envs.BUNDLE, raising=False)
    if text is not None:
        monkeypatch.setenv(envs.BUNDLE, text)
    monkeypatch.setenv(VISIBLE, "7")
    loading.show_devices()
    assert os.environ[VISIBLE] == "7"


def test_devices_are_shown_by_the_variable_of_the_platform(promised, monkeypatch):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "2")
    promised(
        Promise(
            device=4,
            node_id=NODE,
            accelerator_id="2",
            visible=("2", "3"),
            visible_variable="ASCEND_RT_VISIBLE_DEVICES",
        )
    )
    loading.show_devices()
    assert (os.environ["ASCEND_RT_VISIBLE_DEVICES"], os.environ[VISIBLE]) == ("2,3", "2")


@pytest.mark.parametrize(("before", "after"), [("2", "2,0"), (None, None)])
def test_the_variable_of_rocm_follows_where_it_is_set(before, after, promised, monkeypatch):
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("HIP_VISIBLE_DEVICES", before)
    promised(promise("2", "0"))
    loading.show_devices()
    assert os.environ.get("HIP_VISIBLE_DEVICES") == after


@pytest.mark.parametrize(("visible", "kept"), [(("2", "0"), False), ((), True)], ids=["several", "one"])
def test_verl_picks_no_device_by_its_id_among_those_that_are_shown(visible, kept, promised, monkeypatch):
    names = [f"RAY_EXPERIMENTAL_NOSET_{kind}_VISIBLE_DEVICES" for kind in ("CUDA", "HIP")]
    for name in names:
        monkeypatch.setenv(name, "1")
    promised(promise(*visible))
    loading.show_devices()
    assert [name in os.environ for name in names] == [kept, kept]


_LOADED = f"""
import json, os, sys
before = os.environ["{VISIBLE}"]
import verl_ext_sharding.plugin
print("answer", json.dumps([before, os.environ["{VISIBLE}"]]))
"""


def test_a_worker_of_a_run_sees_its_devices_once_the_plugin_is_loaded(job):
    run = RunSpec(placement=place({"critic": [2, 0]}, job(), layouts={"critic": "device_map"}), bundle_cpus=3)
    env = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    env |= {envs.SPEC: run.to_json(), envs.BUNDLE: promise("2", "0").to_json(), VISIBLE: "2", envs.VERL_PLATFORM: "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _LOADED], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.rpartition("answer")[2]) == ["2", "2,0"]


# In the worker: what is checked before a model loads


@pytest.fixture
def verify(monkeypatch):
    """Checks this process's device as a worker whose bundle Ray put on accelerator 2."""
    from verl_ext_sharding.workers import role_worker

    monkeypatch.setattr(role_worker, "node_and_accelerator", lambda accelerator: (NODE, "2"))
    return role_worker.verify_device


def test_a_worker_that_sees_what_it_was_promised_goes_on(verify, promised):
    promised(promise("2", "0"))
    loading.show_devices()
    verify()


def test_a_worker_with_one_device_is_not_asked_what_it_sees(verify, promised):
    promised(promise(), shown="anything")
    verify()


def test_a_worker_without_a_promise_is_asked_nothing(verify, monkeypatch):
    monkeypatch.delenv(envs.BUNDLE, raising=False)
    verify()


@pytest.mark.parametrize("shown", ["2", "0,2", "2,0,1", ""])
def test_a_worker_that_sees_other_devices_stops_before_the_model_loads(shown, verify, promised):
    promised(promise("2", "0"), shown=shown)
    with pytest.raises(PlacementError) as caught:
        verify()
    assert caught.value.subject == "devices of the process on device 4 of the job"
    assert caught.value.expected == f"{VISIBLE}=2,0"
    assert caught.value.found == (shown or "unset")
    assert caught.value.consequence == "the run stops before the model loads"


@pytest.mark.parametrize(("node", "accelerator_id"), [(NODE, "3"), ("ffff0000", "2")])
def test_another_device_or_node_is_found_before_visible_devices_are_looked_at(
    node, accelerator_id, verify, promised, monkeypatch
):
    from verl_ext_sharding.workers import role_worker

    monkeypatch.setattr(role_worker, "node_and_accelerator", lambda accelerator: (node, accelerator_id))
    promised(promise("2", "0"), shown="nonsense")
    with pytest.raises(PlacementError) as caught:
        verify()
    assert caught.value.subject == "device 4 of the job"
    assert caught.value.expected == "accelerator 2 of node a1b2c3d4"
    assert caught.value.found == f"accelerator {accelerator_id} of node {node[:8]}"


# In the trainer: what each worker is promised


@pytest.fixture(scope="module")
def reserved():
    """Bundles of two nodes with two devices each, as Ray numbers their accelerators."""
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    from verl_ext_sharding.workers.pools import Bundle

    groups = [PlacementGroup(PlacementGroupID.from_random(), [{"GPU": 1}] * 2) for _ in range(2)]
    return {
        device: Bundle(
            group=groups[device // 2],
            index=1 - device % 2,
            promise=Promise(device=device, node_id=f"node{device // 2}", accelerator_id=f"{7 - device}"),
        )
        for device in range(4)
    }


@pytest.fixture
def views(reserved, job):
    """What a pool on given devices sees of the placement groups."""
    from verl_ext_sharding.workers.pools import _views

    def seen(*devices, layout="fsdp"):
        pool = Pool(name="critic_pool", roles=("critic",), devices=devices, layout=layout)
        return _views(pool, place({}, job(nodes=2, devices=2)), reserved)

    return seen


def test_a_spread_role_has_one_bundle_and_is_promised_all_its_devices_in_order(views, reserved):
    (view,) = views(3, 2, layout="device_map")
    (bundle,) = view.bundles
    assert (bundle.group, bundle.index) == (reserved[3].group, reserved[3].index)
    assert (bundle.promise.device, bundle.promise.node_id, bundle.promise.accelerator_id) == (3, "node1", "4")
    assert bundle.promise.visible == ("4", "5")
    assert bundle.promise.visible_variable == VISIBLE


def test_a_spread_role_with_one_device_is_promised_that_one(views):
    (view,) = views(1, layout="device_map")
    assert view.bundles[0].promise.accelerator_id == "6"
    assert view.bundles[0].promise.visible == ()


def test_accelerators_that_can_not_be_shown_later_are_refused_for_a_spread_role_and_no_other(views, monkeypatch):
    from verl_ext_sharding.workers import pools

    monkeypatch.setattr(pools, "get_platform", lambda: SimpleNamespace(device_name="npu"))
    with pytest.raises(PlacementError) as caught:
        views(0, 1, layout="device_map")
    assert caught.value.subject == "sharding.roles.critic.layout=device_map"
    assert caught.value.found == "2 devices of type npu"
    assert caught.value.remedy == "sharding.roles.critic.layout=fsdp"
    assert [len(view.bundles) for view in (*views(0, 1), *views(1, layout="device_map"))] == [2, 1]


def test_the_promises_of_the_reserved_bundles_stay_those_of_one_device(views, reserved):
    views(0, 1, layout="device_map")
    assert {bundle.promise.visible for bundle in reserved.values()} == {()}


@pytest.mark.parametrize("devices", [(0, 1, 2, 3), (0, 1), (0, 1, 2)])
def test_each_process_of_a_sharded_role_is_promised_its_own_device_alone(devices, views):
    bundles = [bundle for view in views(*devices) for bundle in view.bundles]
    assert [bundle.promise.device for bundle in bundles] == list(devices)
    assert {bundle.promise.visible for bundle in bundles} == {()}


def test_the_pool_of_a_spread_role_starts_one_process(views, job):
    from verl_ext_sharding.workers.pools import BundlePool

    pool = Pool(name="critic_pool", roles=("critic",), devices=(2, 3), layout="device_map")
    made = BundlePool(pool, views(2, 3, layout="device_map"), 3)
    assert (made.world_size, made.store) == (1, [1])


def test_the_manager_counts_the_processes_of_each_pool_and_all_devices(job):
    from verl_ext_sharding.workers.pools import BundlePoolManager

    placement = place(
        {"actor": [0, 1], "critic": [2, 3], "ref": [0, 1, 2, 3]},
        job(nodes=2, devices=2),
        layouts={"critic": "device_map"},
    )
    manager = BundlePoolManager(RunSpec(placement=placement, bundle_cpus=3), {}, finalize=None)
    assert manager.resource_pool_spec == {"actor_pool": [2], "ref_pool": [2, 2], "critic_pool": [1]}
    assert manager.get_n_gpus() == 4


@pytest.mark.parametrize("own", [{}, {"teacher_pool": [2, 2]}, {"teacher_pool": [4], "reward_pool": [1]}], ids=str)
def test_devices_of_verls_own_pools_count_as_verl_counts_them(own, job):
    from verl.single_controller.ray import ResourcePoolManager

    from verl_ext_sharding.workers import trainer
    from verl_ext_sharding.workers.pools import BundlePoolManager

    stock = ResourcePoolManager(resource_pool_spec={"global_pool": [2, 2], **own}, mapping={})
    for devices, fewer in [({"critic": [0]}, 0), ({"actor": [0, 1], "critic": [1, 3]}, 1)]:
        placement = place(devices, job(("actor", "critic"), nodes=2, devices=2))
        mapping = {name: name for name in (*(pool.name for pool in placement.pools), *own)}
        manager = BundlePoolManager(RunSpec(placement=placement, bundle_cpus=3), mapping, finalize=None)
        trainer._keep_own_pools(manager, stock)
        assert manager.get_n_gpus() == stock.get_n_gpus() - fewer
