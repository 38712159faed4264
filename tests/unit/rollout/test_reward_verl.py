"""The reward server as verl uses it: its manager, pools, router and sleep, on logical devices of a local Ray."""

import os
from pathlib import Path

import httpx
import pytest
import ray
import tiny_reward_models as tiny

from verl_ext_sharding import rollout
from verl_ext_sharding.config.reward import RewardServerSettings
from verl_ext_sharding.errors import ConfigError

pytestmark = pytest.mark.verl

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def cluster():
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    variables = {"PYTHONPATH": path, "VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_PLUGINS": "none"}
    patch = pytest.MonkeyPatch()
    for name in ("VERL_PLATFORM", "VERL_USE_EXTERNAL_PLUGINS"):
        patch.setenv(name, variables[name])
    import verl_ext_sharding.platforms.cpu  # noqa: F401 - registers the platform in this process
    from verl_ext_sharding import driver

    driver.select_cpu()  # whatever this process has asked verl before

    rollout.register()
    ray.init(
        num_cpus=12,
        num_gpus=4,
        include_dashboard=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": variables},
        log_to_driver=False,
    )
    yield
    ray.shutdown()
    rollout.unregister()
    patch.undo()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tiny.llama(), tmp_path_factory.mktemp("reward"))


def _config(folder, num_devices, **options):
    from verl.workers.config import RewardModelConfig, RolloutConfig

    values = {
        "name": "hf",
        "tensor_model_parallel_size": 1,
        "dtype": "float32",
        "load_format": "auto",
        "skip_tokenizer_init": False,
        **options,
    }
    return RewardModelConfig(
        enable=True, n_gpus_per_node=num_devices, nnodes=1, model_path=folder, rollout=RolloutConfig(**values)
    )


def _score(address, folder, ids):
    body = {"model": folder, "input": tiny.text(ids), "use_activation": False}
    return httpx.post(f"http://{address}/classify", json=body, timeout=30)


def test_verls_manager_wakes_scores_and_sleeps_two_colocated_servers(cluster, folder):
    from verl.experimental.reward_loop.reward_model import RewardModelManager
    from verl.single_controller.ray import ResourcePoolManager

    pools = ResourcePoolManager(resource_pool_spec={"global_pool": [2]}, mapping={"reward": "global_pool"})
    pools.create_resource_pool()
    manager = RewardModelManager(_config(folder, 2), pools.get_resource_pool("reward"))
    replicas, rows = manager.rollout_replicas, tiny.sequences(7, 12)
    asleep = [_score(address, folder, rows[0]) for address in manager.server_addresses]
    manager.wake_up()
    awake = [_score(address, folder, rows[0]) for address in manager.server_addresses]
    routed = [_score(manager.get_router_address(), folder, ids) for ids in rows]
    manager.sleep()
    places = ray.get([replica.servers[0].__ray_call__.remote(_place) for replica in replicas])

    assert [answer.status_code for answer in asleep] == [503, 503]
    expected = [tiny.alone(tiny.llama(), [tiny.BOS, *ids])[0] for ids in rows]
    assert [answer.json()["data"][-1]["probs"][-1] for answer in awake] == pytest.approx([expected[0]] * 2, abs=1e-5)
    assert [answer.json()["data"][-1]["probs"][-1] for answer in routed] == pytest.approx(expected, abs=1e-5)
    assert sorted(visible for visible, _ in places) == ["0", "1"]
    assert not any(imports_verl for _, imports_verl in places)
    for replica in replicas:
        ray.kill(replica.servers[0])


def test_one_server_over_two_devices_of_its_own_answers_without_being_woken(cluster, folder, monkeypatch):
    from verl.experimental.reward_loop.reward_model import RewardModelManager

    from verl_ext_sharding.rollout import reward_replica

    asked = RewardServerSettings(device_map={"model": 0, "score": 1})
    monkeypatch.setattr(reward_replica, "asked_of_run", lambda: asked)
    manager = RewardModelManager(_config(folder, 2, tensor_model_parallel_size=2))
    (ids,) = tiny.sequences(7)
    answer = _score(manager.get_router_address(), folder, ids)
    workers = [worker for replica in manager.rollout_replicas for worker in replica.workers]
    places = ray.get([worker.__ray_call__.remote(_place) for worker in workers])

    expected = tiny.alone(tiny.llama(), [tiny.BOS, *ids])
    assert answer.json()["data"][-1]["probs"] == pytest.approx(expected, abs=1e-5)
    server, holder = (visible.split(",") for visible, _ in places)
    assert len(set(server)) == 2
    assert server[1:] == holder
    for worker in workers:
        ray.kill(worker)


def test_a_config_that_cannot_be_served_is_refused_before_anything_starts(folder):
    from verl.workers.rollout.replica import get_rollout_replica_class

    rollout.register()
    config = _config(folder, 2, tensor_model_parallel_size=2)
    with pytest.raises(ConfigError, match=r"reward\.reward_model\.rollout\.tensor_model_parallel_size=1"):
        get_rollout_replica_class("hf")(0, config.rollout, {"path": folder}, gpus_per_node=2, is_reward_model=True)


def test_one_class_serves_policies_and_reward_models(folder):
    from verl.workers.config import RolloutConfig

    from verl_ext_sharding.rollout.replica import HFReplica
    from verl_ext_sharding.rollout.reward_replica import HFRewardReplica

    config = RolloutConfig(name="hf", tensor_model_parallel_size=1, load_format="auto")
    made = [HFReplica(0, config, {"path": folder}, 1, is_reward_model=reward) for reward in (False, True)]
    assert [type(replica) for replica in made] == [HFReplica, HFRewardReplica]


def _place(_):
    import sys

    return os.environ.get("CUDA_VISIBLE_DEVICES"), "verl" in sys.modules
