"""Log-probs out of a packed model that FSDP2 has sharded the way verl does: the head by itself, or tied and in the root."""

from __future__ import annotations

import pytest
import torch
from attention_cases import CONFIGS, packed_inputs, sequences
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests import ranks
from verl_ext_sharding.training import attention, lm_head

NUM_RANKS = 2


def build(tied):
    attention.register()
    torch.manual_seed(0)
    config = CONFIGS["qwen2"]()
    config.tie_word_embeddings = tied
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa_packed")
    lm_head.apply(model)
    return model


def loss_and_output(model, rank):
    inputs = packed_inputs(sequences(seed=1 + rank))
    labels = torch.roll(inputs["input_ids"], shifts=-1, dims=1)
    output = model(**inputs, temperature=0.7, return_dict=True, shift_labels=labels)
    return output.log_probs.mean() + 0.01 * output.entropy.mean(), output


def full_grads(model):
    return {
        name: parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        for name, parameter in model.named_parameters()
    }


def check(rank, tied):
    whole = build(tied)
    outputs = []
    for one in range(NUM_RANKS):
        loss, output = loss_and_output(whole, one)
        (loss / NUM_RANKS).backward()
        outputs.append(output)

    sharded = build(tied)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    options = {"mesh": mesh, "reshard_after_forward": True, "mp_policy": MixedPrecisionPolicy(torch.float32)}
    parts = list(sharded.model.layers) + ([] if tied else [sharded.model.embed_tokens, sharded.lm_head])
    for module in (*parts, sharded):
        fully_shard(module, **options)
    assert isinstance(sharded.lm_head.weight, DTensor)
    loss, output = loss_and_output(sharded, rank)
    loss.backward()
    torch.testing.assert_close(output.log_probs, outputs[rank].log_probs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output.entropy, outputs[rank].entropy, rtol=1e-6, atol=1e-6)
    found = full_grads(sharded)
    for name, grad in full_grads(whole).items():
        torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tied", [False, True], ids=["head sharded by itself", "head tied, in the root"])
def test_a_sharded_model_returns_the_log_probs_and_gradients_of_the_whole_one(tied):
    ranks.run(check, tied, num_ranks=NUM_RANKS)
