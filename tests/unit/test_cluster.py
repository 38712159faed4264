"""What the driver asks of the nodes of a cluster, with answers as nodes would give them."""

import types

import pytest

from verl_ext_sharding.communication.hygiene import IB_DISABLE, P2P_DISABLE, decide
from verl_ext_sharding.config.schema import CommunicationConfig
from verl_ext_sharding.config.spec import RunSpec
from verl_ext_sharding.errors import ClusterError, ConfigError, PatchError, PlacementError
from verl_ext_sharding.model_plans import AttentionUse
from verl_ext_sharding.patching import ledger
from verl_ext_sharding.placement.bundles import place
from verl_ext_sharding.placement.job import ServerFacts
from verl_ext_sharding.placement.resources import NodeResources
from verl_ext_sharding.workers.probe import Packages

ray = pytest.importorskip("ray")


@pytest.fixture
def settings_of(monkeypatch, tmp_path, job):
    """`settings_of({"node": (resources, [rdma devices])}, config, **facts)`: what the nodes agree on.

    `taken={"node": resources}`: what is left of a node that other jobs use. `attention`: what the roles' models run, on nodes of H200s
    without flash-attn.
    """
    from verl_ext_sharding import cluster

    def settings(machines, config=None, taken=None, attention=(), raises=None, timeout_s=120.0, **facts):
        placement = place({}, job(("actor",), **facts))
        run = RunSpec(placement=placement, bundle_cpus=3, timeout_s=timeout_s)
        folders = {}
        for name, (_, devices) in machines.items():
            folders[name] = tmp_path / name / "infiniband"
            folders[name].parent.mkdir()
            for device in devices:
                (folders[name] / device).mkdir(parents=True)

        ids = {name: name.encode().hex().ljust(56, "0") for name in machines}  # as long as Ray's

        class Answer:
            def options(self, *, scheduling_strategy, runtime_env):
                self.node = next(name for name in machines if ids[name] == scheduling_strategy.node_id)
                return self

            def remote(self, communication, exports):
                found = []
                if communication is not None:
                    found = decide(communication, exports, sys_class_infiniband=folders[self.node])
                packages = Packages(torch="2.11.0", flash_attn=False, kernels=False)
                code = {**ledger.parity(), "spec": run.digest()}
                cards = [(9, 0)] * int(machines[self.node][0].get("GPU", 0))
                return cluster.NodeAnswer(code=code, settings=found, cards=cards, packages=packages)

        alive = [
            {"NodeID": ids[name], "NodeManagerAddress": name, "Resources": resources}
            for name, (resources, _) in machines.items()
        ]
        monkeypatch.setattr(cluster, "_alive", lambda: alive)
        free = {node["NodeID"]: (taken or {}).get(node["NodeManagerAddress"], node["Resources"]) for node in alive}
        monkeypatch.setattr(cluster, "_available", lambda: free)
        monkeypatch.setattr(cluster, "_answer", Answer())

        def get(answers, timeout):
            if raises is not None:
                raise raises
            return answers

        monkeypatch.setattr(cluster, "ray", types.SimpleNamespace(get=get, exceptions=ray.exceptions))
        found = cluster.inspect_nodes(run, {}, config or CommunicationConfig(), {}, attention=attention)
        return {setting.name: setting.value for setting in found}

    return settings


GPUS = {"CPU": 64.0, "GPU": 4.0}
HEAD = {"CPU": 16.0}


@pytest.mark.parametrize("accelerator", ["GPU", "NPU"])
def test_a_head_without_devices_does_not_switch_infiniband_off(accelerator, settings_of):
    worker = {"CPU": 64.0, accelerator: 4.0}
    found = settings_of({"head": (HEAD, []), "a": (worker, ["mlx5_0"]), "b": (worker, ["mlx5_0"])}, nodes=2)
    assert (found[IB_DISABLE], found[P2P_DISABLE]) == (None, None)


def test_infiniband_may_be_asked_for_where_only_the_head_has_none(settings_of):
    asked = CommunicationConfig(infiniband=True)
    found = settings_of({"head": (HEAD, []), "a": (GPUS, ["mlx5_0"])}, asked)
    assert found[IB_DISABLE] == "0"
    with pytest.raises(ConfigError, match="InfiniBand or RoCE"):
        settings_of({"c": (GPUS, ["mlx5_0"]), "d": (GPUS, [])}, asked, nodes=2)


def test_a_node_with_devices_and_no_infiniband_still_switches_it_off(settings_of):
    assert settings_of({"a": (GPUS, ["mlx5_0"]), "b": (GPUS, [])}, nodes=2)[IB_DISABLE] == "1"


def test_a_node_with_fewer_devices_than_any_group_of_the_job_takes_no_part(settings_of):
    small = {"CPU": 8.0, "GPU": 1.0}
    assert settings_of({"a": (GPUS, ["mlx5_0"]), "desk": (small, [])})[IB_DISABLE] is None
    teacher = ServerFacts(name="vllm", own_nodes=(1,))
    assert settings_of({"c": (GPUS, ["mlx5_0"]), "d": (small, [])}, teacher=teacher)[IB_DISABLE] == "1"


def test_a_node_whose_devices_another_job_holds_takes_no_part(settings_of):
    machines = {"a": (GPUS, ["mlx5_0"]), "full": (GPUS, [])}
    assert settings_of(machines, taken={"full": {"CPU": 60.0}})[IB_DISABLE] is None


def test_a_client_of_ray_asks_a_process_of_the_cluster(monkeypatch):
    from verl_ext_sharding import cluster

    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: True)
    monkeypatch.setattr(cluster, "_ask_available", types.SimpleNamespace(remote=lambda: "question"))
    monkeypatch.setattr(ray, "get", lambda asked, timeout: {asked: {"GPU": 1.0}})
    assert cluster._available() == {"question": {"GPU": 1.0}}


def test_attention_that_no_node_can_run_stops_the_job_before_its_workers(settings_of):
    nodes = {"head": (HEAD, []), "a": (GPUS, [])}
    use = AttentionUse(role="actor", requested="flash_attention_2", measured=False, packed=True, dtype="bfloat16")
    with pytest.raises(ConfigError, match="neither flash-attn nor Hugging Face's kernels is installed"):
        settings_of(nodes, attention=[use])


PATCH = PatchError("verl", expected="0.9", found="1.0", consequence="the run stops", remedy="pip install 'verl<1'")


def test_an_error_of_ours_on_a_node_arrives_as_it_is(settings_of):
    with pytest.raises(PatchError) as caught:
        settings_of({"a": (GPUS, [])}, raises=ray.exceptions.RayTaskError("f", "", PATCH, proctitle="p", ip="::1"))
    assert caught.value is PATCH


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (ray.exceptions.RuntimeEnvSetupError("no such folder"), "Failed to set up runtime environment. no such folder"),
        (ray.exceptions.WorkerCrashedError(), "The worker died unexpectedly"),
    ],
)
def test_a_process_that_ends_instead_of_answering_is_told_with_rays_reason(error, found, settings_of):
    with pytest.raises(ClusterError) as caught:
        settings_of({"a": (GPUS, [])}, raises=error)
    assert caught.value.found.startswith(found)


@pytest.mark.parametrize(("asked", "waited"), [(10.0, 120), (600.0, 600)])
def test_slow_nodes_get_the_time_that_the_run_gives_ray(asked, waited, settings_of):
    with pytest.raises(ClusterError, match=f"within {waited} s") as caught:
        settings_of({"a": (GPUS, [])}, raises=ray.exceptions.GetTimeoutError(), timeout_s=asked)
    assert f"sharding.placement.timeout_s={2 * waited}" in caught.value.remedy


# Through the driver

JOB = (
    "trainer.n_gpus_per_node=4",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "critic.ppo_micro_batch_size_per_gpu=1",
    "data.max_prompt_length=512",
    "data.max_response_length=512",
)


def no_run(*args, **kwargs):
    pytest.fail("the run started")


@pytest.fixture
def gate(compose, monkeypatch):
    """`gate(nodes, *overrides)`: the error with which a job is stopped on these nodes, and the plan at that time."""
    from verl_ext_sharding import cluster, driver, task_runner

    def stopped(nodes, *overrides, joins_ray=False):
        config = compose(*JOB, *overrides)
        monkeypatch.setattr(cluster, "free_resources", lambda: nodes)
        gate = task_runner.TaskRunnerGate(no_run, driver.prepare(config), config, joins_ray=joins_ray)
        with pytest.raises(PlacementError) as caught:
            gate.options(name="runner").remote()
        return caught.value, gate

    return stopped


@pytest.mark.parametrize(("joins_ray", "remedy"), [(True, "ray start --num-cpus=14"), (False, "ray_init.num_cpus=14")])
def test_the_driver_knows_whether_ray_ran_before_it(joins_ray, remedy, gate):
    error, _ = gate([NodeResources(name="a", num_devices=4, num_cpus=8)], joins_ray=joins_ray)
    assert remedy in error.remedy


def test_the_driver_does_not_lower_a_count_that_the_user_wrote(gate):
    error, _ = gate([NodeResources(name="a", num_devices=4, num_cpus=12)], "sharding.placement.max_colocate_count=3")
    assert error.expected.startswith("14 CPUs: 3 for each device's worker processes")


def test_the_driver_numbers_named_nodes_as_ray_reports_them(gate, monkeypatch):
    from verl_ext_sharding import task_runner

    shown = []
    monkeypatch.setattr(task_runner.render, "show_placement", shown.append)
    nodes = [
        NodeResources(name=name, num_devices=4, num_cpus=cpus) for name, cpus in (("10.0.0.1", 64), ("10.0.0.9", 8))
    ]
    error, gate = gate(nodes, "trainer.nnodes=2", "sharding.roles.critic.devices={10.0.0.9:[0,1,2,3]}")
    assert error.subject == "CPUs of node 10.0.0.9"
    assert [row.devices for row in shown[0].rows if row.role == "critic"] == [(4, 5, 6, 7)]


def test_a_key_that_contradicts_an_export_stops_the_job_before_ray_starts(compose, monkeypatch):
    from verl_ext_sharding import task_runner

    monkeypatch.setenv(IB_DISABLE, "0")
    config = compose(*JOB, "sharding.communication.infiniband=False")
    with pytest.raises(ConfigError, match="NCCL_IB_DISABLE=0 exported"):
        task_runner.launch(no_run, config, no_run)
