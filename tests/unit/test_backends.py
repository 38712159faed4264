"""Inference servers that look for their devices themselves are accepted only where they find those of the plan."""

import itertools
import os
from types import SimpleNamespace

import pytest

from verl_ext_sharding.config.changes import parse_overrides
from verl_ext_sharding.errors import PlacementError
from verl_ext_sharding.placement.backends import check_backends
from verl_ext_sharding.placement.bundles import Promise, place
from verl_ext_sharding.placement.job import ServerFacts

ACTOR, ROLLOUT = "sharding.roles.actor", "actor_rollout_ref.rollout"


def accepted(placement, facts):
    try:
        check_backends(placement, facts)
    except PlacementError:
        return False
    return True


def found_by_trtllm(placement, role):
    """Devices on which verl's TensorRT-LLM starts servers of one rank, where bundles are in the order of the devices."""
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup
    from verl.single_controller.ray.base import split_resource_pool
    from verl.workers.rollout.replica import RolloutMode
    from verl.workers.rollout.trtllm_rollout.trtllm_async_server import TRTLLMReplica

    from verl_ext_sharding.workers.pools import Bundle, BundlePool, _views

    topology = placement.topology
    groups = [
        PlacementGroup(PlacementGroupID.from_random(), [{"GPU": 1}] * topology.devices_per_node)
        for _ in range(topology.num_nodes)
    ]
    bundles = {
        device: Bundle(
            group=groups[topology.node_of(device)],
            index=topology.local(device),
            promise=Promise(device=device, node_id="", accelerator_id=""),
        )
        for device in range(topology.num_devices)
    }
    pool = placement.pool_of(role)
    made = BundlePool(pool, _views(pool, placement, bundles), 3)
    served = split_resource_pool(made, 1) if role == "reward" else [made] * made.world_size
    devices = []
    for rank, own in enumerate(served):
        replica = object.__new__(TRTLLMReplica)
        vars(replica).update(resource_pool=own, rollout_mode=RolloutMode.HYBRID, world_size=1, replica_rank=rank)
        ((group,), ((index,),)) = replica.get_pgs_and_bundle_indices()
        node = [one.id for one in groups].index(group.id)
        devices.append(node * topology.devices_per_node + int(index))
    return devices


@pytest.mark.parametrize("role", ["actor", "reward"])
def test_tensorrt_llm_is_accepted_if_and_only_if_it_starts_on_the_devices_of_the_role(role, job):
    pytest.importorskip("verl")
    server = ServerFacts(name="trtllm", block=ROLLOUT)
    facts = job(("actor",), nodes=2, devices=3, **{"rollout" if role == "actor" else role: server})
    seen = set()
    for size in range(1, 7):
        for devices in itertools.combinations(range(6), size):
            placement = place({role: list(devices)}, facts)
            right = found_by_trtllm(placement, role) == list(devices)
            assert accepted(placement, facts) == right, devices
            seen.add(right)
    assert seen == {True, False}


def test_servers_on_a_pool_that_verl_makes_are_verls_own_matter(job):
    own = ServerFacts(name="trtllm", own_nodes=(2,))
    facts = job(("actor",), mode="separate_async", hybrid_rollout=False, rollout=own, reward=own)
    assert accepted(place({"actor": [2, 3]}, facts), facts)


@pytest.mark.parametrize("devices", [[0, 1], [2, 3], [3, 2], [1, 3, 2], [3, 0, 1], [3]], ids=str)
@pytest.mark.parametrize("layout", ["fsdp", "device_map"])
def test_sglang_is_accepted_if_and_only_if_the_smallest_id_is_that_of_the_first_device(devices, layout, job):
    facts = job(("actor",), rollout=ServerFacts(name="sglang", block=ROLLOUT))
    placement = place({"actor": devices}, facts, layouts={"actor": layout})
    assert accepted(placement, facts) == (placement.devices_of("rollout")[0] == min(devices))


# Through the plan

TRTLLM = (f"{ROLLOUT}.name=trtllm", "trainer.n_gpus_per_node=4", f"{ROLLOUT}.tensor_model_parallel_size=1")
SGLANG = (f"{ROLLOUT}.name=sglang", f"{ACTOR}.layout=device_map", *TRTLLM[1:])
REWARD = (
    "reward.reward_model.enable=True",
    "reward.reward_model.model_path=/models/reward",
    "reward.reward_model.rollout.name=trtllm",
    "reward.reward_model.rollout.tensor_model_parallel_size=1",
    *SGLANG[:1],
    *TRTLLM[1:],
)


@pytest.fixture
def planned(compose):
    from verl_ext_sharding import driver

    def run(*overrides):
        lines = ["actor_rollout_ref.actor.use_dynamic_bsz=True", *overrides]
        config = compose(*lines)
        return driver.prepare(config, explicit=parse_overrides(lines))

    return run


@pytest.mark.parametrize(
    ("overrides", "choices"),
    [
        ((*TRTLLM, f"{ACTOR}.devices=[2,3]", "sharding.roles.critic.devices=[0,1]"), 3),
        ((*TRTLLM, f"{ACTOR}.devices=[1,0]", f"{ACTOR}.layout=device_map"), 3),
        ((*TRTLLM, "trainer.nnodes=2", f"{ACTOR}.devices=[1,6]"), 3),
        ((*TRTLLM, "trainer.nnodes=2", f"{ACTOR}.devices=[0,1,2,4]"), 2),
        ((*REWARD, "sharding.roles.reward.devices=[2,3]"), 3),
        ((*SGLANG, f"{ACTOR}.devices=[3,2]"), 2),
    ],
    ids=str,
)
def test_each_thing_to_type_is_planned(overrides, choices, planned, refused):
    offered = refused(*overrides).remedy.split(", or ")
    assert len(offered) == choices
    for line in offered:
        planned(*overrides, line.partition(" ")[0])


def test_a_teacher_of_tensorrt_llm_is_refused_on_any_devices(planned, refused):
    model = "distillation.teacher_models.teacher_model"
    lines = [
        "distillation.enabled=True",
        "distillation.nnodes=1",
        "distillation.n_gpus_per_node=2",
        *SGLANG[:1],
        *TRTLLM[1:],
    ]
    lines += [f"{model}.inference.tensor_model_parallel_size=2", f"{model}.model_path=/models/teacher"]
    for where in ((), ("sharding.roles.teacher.devices=[2,3]",)):
        error = refused(*lines, *where, f"{model}.inference.name=trtllm")
        planned(*lines, *where, error.remedy)


# What the run's processes are told

NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


@pytest.fixture
def told(compose, monkeypatch):
    """`told(*overrides)`: environment and spec of the processes of a run on one node of four devices."""
    from verl_ext_sharding import cluster, driver, envs, task_runner
    from verl_ext_sharding.config.spec import RunSpec
    from verl_ext_sharding.placement.resources import NodeResources

    def environment(*overrides):
        config = compose("actor_rollout_ref.actor.use_dynamic_bsz=True", *overrides)
        node = NodeResources(name="10.0.0.1", num_devices=4, num_cpus=64)
        monkeypatch.setattr(cluster, "free_resources", lambda: [node])
        monkeypatch.setattr(cluster, "inspect_nodes", lambda *args: [])
        found = {}
        runner = SimpleNamespace(options=lambda runtime_env: found.update(runtime_env) or SimpleNamespace(remote=list))
        task_runner.TaskRunnerGate(runner, driver.prepare(config), config).remote()
        return found["env_vars"], RunSpec.from_json(found["env_vars"][envs.SPEC])

    return environment


@pytest.mark.parametrize(
    ("overrides", "shown_own"),
    [
        ((*SGLANG[:1], *TRTLLM[1:], f"{ACTOR}.devices=[2,3]"), True),
        (
            (
                *REWARD[:2],
                f"{REWARD[2].partition('=')[0]}=sglang",
                REWARD[3],
                f"{ROLLOUT}.name=vllm",
                *TRTLLM[1:],
                f"{ACTOR}.devices=[2,3]",
            ),
            True,
        ),
        ((*SGLANG[:1], *TRTLLM[1:]), False),
        ((f"{ROLLOUT}.name=vllm", *TRTLLM[1:], f"{ACTOR}.devices=[2,3]"), False),
    ],
    ids=["sglang", "reward", "verl's own devices", "vllm"],
)
def test_ray_shows_each_process_its_own_devices_where_sglang_would_count_all(overrides, shown_own, told):
    environment, _ = told(*overrides)
    assert environment.get(NOSET) == ("" if shown_own else None)


def test_what_verl_asks_of_these_variables_an_empty_one_answers_as_none(monkeypatch):
    ray_utils = pytest.importorskip("verl.utils.ray_utils")
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

    from verl_ext_sharding import envs

    assert not ray_utils.ray_noset_visible_devices(dict.fromkeys(envs.SHOW_ALL, ""))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv(NOSET, "")
    NvidiaGPUAcceleratorManager.set_current_process_visible_accelerator_ids(["1"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_the_spec_names_the_backend_of_each_group_of_servers(told):
    _, spec = told(*REWARD, f"{ACTOR}.devices=[2,3]")
    assert spec.backends == {f"{ROLLOUT}.name": "sglang", "reward.reward_model.rollout.name": "trtllm"}
