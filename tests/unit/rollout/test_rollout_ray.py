"""The server as a Ray actor, weights through Ray's object store. No verl is imported, here or in the actor."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
import ray
import torch
from tiny_models import prompt, save
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl_ext_sharding.rollout.endpoint import RayEndpoint
from verl_ext_sharding.rollout.requests import RolloutError
from verl_ext_sharding.rollout.server import HFServer
from verl_ext_sharding.rollout.settings import ModelSpec, ServerSettings
from verl_ext_sharding.rollout.transport import send_weights

SAMPLED = {"temperature": 1.0, "logprobs": True, "seed": 1}
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def cluster():
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
        log_to_driver=False,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model():
    """48 MiB of weights, so that they show in the size of a process."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=16384,
        hidden_size=384,
        intermediate_size=384,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture
def server(cluster, model, tmp_path):
    path = save(model, tmp_path, known_ids=16384)
    settings = ServerSettings(model=ModelSpec(path=path, dtype="float32"), response_length=8)
    actor = ray.remote(HFServer).options(num_cpus=0, max_concurrency=100).remote(settings)
    ray.get(actor.start.remote())
    yield actor
    ray.kill(actor)


def _update(server, model, step):
    weights = model.state_dict().items()
    asyncio.run(send_weights(weights, RayEndpoint(server, step), bucket_bytes=5 << 20, device=torch.device("cpu")))


def test_a_server_is_filled_put_to_sleep_and_filled_again(server, model):
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    before = ray.get(server.resident_bytes.remote())
    _update(server, model, 1)
    first = ray.get([server.generate.remote(prompt(5, n), SAMPLED, str(n)) for n in range(4)])
    awake = ray.get(server.resident_bytes.remote())
    ray.get(server.sleep.remote())
    asleep = ray.get(server.resident_bytes.remote())
    with pytest.raises(RolloutError, match="freed by sleep"):
        ray.get(server.generate.remote(prompt(5), SAMPLED, "early"))
    ray.get(server.wake_up.remote())
    _update(server, model, 2)
    second = ray.get([server.generate.remote(prompt(5, n), SAMPLED, str(n)) for n in range(4)])

    assert before["weight_bytes"] == asleep["weight_bytes"] == 0
    assert awake["weight_bytes"] == weight_bytes
    assert awake["resident_bytes"] - asleep["resident_bytes"] > 0.8 * weight_bytes
    assert [output.token_ids for output in first] == [output.token_ids for output in second]
    assert {output.extra_fields["global_steps"] for output in first} == {1}
    assert {output.extra_fields["global_steps"] for output in second} == {2}


def test_the_servers_process_imports_no_verl(server):
    modules = ray.get(server.__ray_call__.remote(_loaded_modules))
    assert "verl_ext_sharding.rollout.server" in modules
    assert "verl" not in modules


def _loaded_modules(_):
    return list(sys.modules)
