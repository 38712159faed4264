"""The reward server's model on CUDA devices: numerics, and memory that sleep and offload free."""

import pytest
import tiny_reward_models as tiny
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from verl_ext_sharding.config.reward import RewardServerSettings
from verl_ext_sharding.rollout.reward_model import load
from verl_ext_sharding.rollout.reward_settings import RewardServing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIXED = tiny.sequences(3, 17, 9, 1, 30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """65 MiB of weights in four layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
        pad_token_id=tiny.PAD,
        num_labels=1,
    )
    return tiny.save(LlamaForSequenceClassification(config), tmp_path_factory.mktemp("reward"))


def _load(path, *, num_devices=1, dtype="float32", **asked):
    settings = RewardServerSettings(**asked)
    return load(RewardServing(path=path, dtype=dtype, device="cuda", num_devices=num_devices, asked=settings))


@pytest.fixture(scope="module")
def expected(folder):
    return torch.tensor(load(RewardServing(path=folder, dtype="float32")).score(MIXED))


def test_sleep_frees_the_weights_and_wake_up_brings_the_same_back(folder):
    model = _load(folder)
    before, scores = torch.cuda.memory_allocated(), model.score(MIXED)
    weight_bytes = model.weight_bytes
    for _ in range(2):
        model.sleep()
        assert model.weight_bytes == 0
        assert before - torch.cuda.memory_allocated() >= weight_bytes
        model.wake_up()
        assert model.score(MIXED) == scores


def test_scores_equal_those_of_the_cpu(folder, expected):
    torch.testing.assert_close(torch.tensor(_load(folder).score(MIXED)), expected, atol=1e-4, rtol=1e-4)


def test_a_bfloat16_model_is_batched_with_padding(folder):
    assert _load(folder, dtype="bfloat16").pads


def test_layers_that_visit_from_the_host_never_are_there_together(folder, expected):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = _load(folder, offload_params=True, execution_device="cuda:0")
    torch.cuda.reset_peak_memory_stats()
    scores = torch.tensor(model.score(MIXED))
    full_bytes = sum(parameter.numel() * 4 for parameter in model._model.parameters())
    assert torch.cuda.max_memory_allocated() - before < full_bytes / 2
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    "device_map",
    ["auto", {"model.embed_tokens": 0, "layers 0-1": 0, "layers 2-3": 1, "model.norm": 1, "score": 1}],
    ids=["auto", "written"],
)
def test_layers_on_two_devices_score_the_same_and_sleep_frees_both(device_map, folder, expected):
    model = _load(folder, num_devices=2, device_map=device_map)
    used = [torch.cuda.memory_allocated(device) for device in range(2)]
    torch.testing.assert_close(torch.tensor(model.score(MIXED)), expected, atol=1e-4, rtol=1e-4)
    model.sleep()
    assert all(torch.cuda.memory_allocated(device) < used[device] / 2 for device in range(2))
    model.wake_up()
    torch.testing.assert_close(torch.tensor(model.score(MIXED)), expected, atol=1e-4, rtol=1e-4)
