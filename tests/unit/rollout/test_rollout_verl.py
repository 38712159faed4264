"""The backend as verl uses it: registries, replica, adapter and agent loop, on a logical device of a local Ray."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
from tiny_models import moe, prompt, qwen2, recomputed_log_probs, row, save

from verl_ext_sharding import rollout
from verl_ext_sharding.errors import ConfigError

pytestmark = pytest.mark.verl

ROOT = Path(__file__).parents[3]
SAMPLED = {"temperature": 0.9, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "seed": 4}


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

    ray.init(
        num_cpus=2,
        num_gpus=1,
        include_dashboard=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": variables},
        log_to_driver=False,
    )
    yield
    ray.shutdown()
    patch.undo()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save(qwen2(seed=1), tmp_path_factory.mktemp("model"), eos=0)


def _rollout_config(**options):
    from verl.workers.config import RolloutConfig

    values = {
        "name": "hf",
        "tensor_model_parallel_size": 1,
        "dtype": "float32",
        "prompt_length": 32,
        "response_length": 16,
        "n_gpus_per_node": 1,
        **options,
    }
    return RolloutConfig(**values)


class Trainer:
    """A training process as `engine_workers.py` sees it: it owns a model and the adapter of its replica."""

    def __init__(self, checkpoint):
        import verl_ext_sharding.platforms.cpu  # noqa: F401

        os.environ["RANK"] = "0"
        self._checkpoint = checkpoint
        self._adapter = None

    async def update(self, seed, step, **options):
        from verl.workers.config import HFModelConfig
        from verl.workers.rollout.base import get_rollout_class

        rollout.register()
        if self._adapter is None:
            model_config = HFModelConfig(path=self._checkpoint, override_config={"attn_implementation": "sdpa"})
            self._adapter = get_rollout_class("hf", "async")(
                config=_rollout_config(), model_config=model_config, device_mesh=None
            )
        weights = qwen2(seed=seed).state_dict().items()
        await self._adapter.resume(tags=["weights"])
        await self._adapter.update_weights(weights, peft_config=None, base_sync_done=True, global_steps=step)
        await self._adapter.resume(tags=["kv_cache"])


async def _replica(checkpoint):
    from omegaconf import OmegaConf
    from verl.workers.rollout.replica import get_rollout_replica_class

    trainer = ray.remote(Trainer).options(num_gpus=1, num_cpus=0).remote(checkpoint)
    model = OmegaConf.create(
        {"_target_": "verl.workers.config.HFModelConfig", "path": checkpoint, "override_config": {}}
    )
    replica = get_rollout_replica_class("hf")(0, _rollout_config(), model, gpus_per_node=1)
    await replica.init_hybrid(SimpleNamespace(workers=[trainer]))
    return trainer, replica


@pytest.fixture
def registered():
    rollout.register()
    yield
    rollout.unregister()


def test_a_step_of_verl_wakes_fills_generates_and_sleeps(cluster, registered, checkpoint):
    async def scenario():
        trainer, replica = await _replica(checkpoint)
        await replica.sleep()
        for step, seed in enumerate((2, 3)):
            await trainer.update.remote(seed, step)
            outputs = await asyncio.gather(
                *[replica.server_handle.generate.remote(prompt(4 + n), SAMPLED, str(n)) for n in range(4)]
            )
            for n, output in enumerate(outputs):
                done = row(prompt(4 + n))
                done.token_ids = output.token_ids
                expected = recomputed_log_probs(qwen2(seed=seed), done, temperature=0.9)
                torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-5, rtol=0)
                assert output.extra_fields["global_steps"] == step
            await replica.abort_all_requests()
            await replica.sleep()
            await replica.resume_generation()
        return ray.get(replica.server_handle.resident_bytes.remote()), replica.server_address

    resident, address = asyncio.run(scenario())
    assert resident["weight_bytes"] == 0
    assert address == "hf_server_0_0"


def test_registering_twice_and_taking_it_back_leaves_verls_registries_as_they_were():
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    before = dict(_ROLLOUT_REGISTRY), dict(RolloutReplicaRegistry._registry)
    rollout.register()
    rollout.register()
    from verl_ext_sharding.rollout.replica import HFReplica

    assert RolloutReplicaRegistry.get("hf") is HFReplica
    rollout.unregister()
    rollout.unregister()
    assert (dict(_ROLLOUT_REGISTRY), dict(RolloutReplicaRegistry._registry)) == before


def test_a_name_that_another_package_holds_is_not_taken_over():
    from verl.workers.rollout import base

    base._ROLLOUT_REGISTRY["hf", "async"] = "another.package.Adapter"
    try:
        with pytest.raises(ConfigError, match=r"another\.package"):
            rollout.register()
        rollout.unregister()
        assert base._ROLLOUT_REGISTRY["hf", "async"] == "another.package.Adapter"
    finally:
        del base._ROLLOUT_REGISTRY["hf", "async"]


def test_a_config_that_cannot_be_served_fails_when_the_replica_is_made(cluster, registered, checkpoint):
    from verl.workers.rollout.replica import get_rollout_replica_class

    with pytest.raises(ConfigError, match="tensor_model_parallel_size=1"):
        get_rollout_replica_class("hf")(0, _rollout_config(tensor_model_parallel_size=2), {"path": checkpoint})


def _adapter(checkpoint, **model):
    from verl.workers.config import HFModelConfig

    from verl_ext_sharding.rollout.adapter import ServerAdapter

    config = HFModelConfig(path=checkpoint, override_config={"attn_implementation": "sdpa"}, **model)
    return ServerAdapter(_rollout_config(), config, device_mesh=None, replica_rank=5)


def test_lora_adapters_that_are_not_merged_are_refused_where_the_adapter_is_made(cluster, checkpoint):
    with pytest.raises(ConfigError, match=r"lora\.merge=True"):
        _adapter(checkpoint, lora_rank=8)
    assert _adapter(checkpoint, lora_rank=8, lora={"merge": True}).replica_rank == 5


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ({"peft_config": {"r": 8}}, r"lora\.merge=True"),
        ({"wire_format": "delta_flush"}, "checkpoint_engine.backend=nccl"),
    ],
    ids=str,
)
def test_an_update_of_anything_but_whole_tensors_is_refused(cluster, checkpoint, argument, remedy):
    with pytest.raises(ConfigError, match=remedy):
        asyncio.run(_adapter(checkpoint).update_weights(iter(()), **argument))


def test_experts_arrive_as_verl_takes_them_apart():
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    from verl_ext_sharding.rollout.weights import WeightLoader

    loader = WeightLoader(moe())
    names = {name for name, _ in unfuse_moe_params(moe().state_dict().items())}
    assert any(".experts.0.gate_proj" in name for name in names)
    assert names <= set(loader._targets)


def _agent_worker():
    from omegaconf import OmegaConf

    from verl_ext_sharding.rollout.agent_loop import SeededAgentLoopWorker

    worker = object.__new__(SeededAgentLoopWorker)
    worker.config = OmegaConf.create({"data": {}, "actor_rollout_ref": {"rollout": {"seed": 42}}})
    worker.llm_client = worker.tokenizer = worker.processor = worker.hf_model_type = worker.dataset_cls = None
    worker.tools = []

    async def keep(output, validate, **kwargs):
        return output

    worker._agent_loop_postprocess = keep
    return worker


class EchoLoop:
    """An agent loop that answers with the sampling parameters that it got."""

    def __init__(self, **kwargs):
        pass

    async def run(self, sampling_params, **kwargs):
        return sampling_params


def test_each_repeat_of_each_sample_gets_its_own_seed_in_a_copy_of_the_parameters():
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    _agent_loop_registry["echo"] = {"_target_": f"{__name__}.EchoLoop"}
    shared = {"temperature": 1.0}

    def seed(step=1, index=0, session=0, validate=False):
        trajectory = {"step": step, "sample_index": index, "rollout_n": 0, "validate": validate}
        run = _agent_worker()._run_agent_loop(
            shared, trajectory, agent_name="echo", trace=False, session_id=session, uid="random"
        )
        return asyncio.run(run)["seed"]

    seeds = [seed(), seed(step=2), seed(index=1), seed(session=1), seed(validate=True)]
    assert len(set(seeds)) == 5
    assert seed() == seeds[0]
    assert shared == {"temperature": 1.0}
    del _agent_loop_registry["echo"]


def test_the_manager_starts_seeded_workers():
    from omegaconf import OmegaConf
    from verl.utils.import_utils import load_class_from_fqn

    manager_class = load_class_from_fqn(rollout.SEEDED_AGENT_LOOP, "AgentLoopManager")
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {}, "model": {}}})
    manager = manager_class(config, llm_client=None)
    worker_class = manager.agent_loop_workers_class.__ray_actor_class__
    assert worker_class.__name__ == "SeededAgentLoopWorker"
    assert ray.cloudpickle.loads(ray.cloudpickle.dumps(worker_class))._run_agent_loop.__qualname__.startswith("Seeded")
