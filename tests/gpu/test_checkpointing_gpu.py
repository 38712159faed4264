"""Checkpointing policies and offload on a CUDA device: bytes by the allocator's own count, numbers against none."""

from __future__ import annotations

import gc
import os

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2Model

from verl_ext_sharding.training.checkpointing import (
    Auto,
    Budget,
    EveryN,
    Full,
    Off,
    Selective,
    applied,
    recompiles,
    remove,
)
from verl_ext_sharding.training.compile_layers import compile_obstacle
from verl_ext_sharding.training.offload import ActivationOffload
from verl_ext_sharding.training.optimizer_offload import OptimizerStateOffload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FP32_TOLERANCE = 1e-3
"""Of the largest gradient of each parameter: eager and compiled kernels add up in other orders."""

NUM_LAYERS = 8
HIDDEN = 512
VOCAB = 1000


def build(dtype=torch.float32):
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=HIDDEN,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=1536,
        vocab_size=VOCAB,
    )
    config._attn_implementation = "sdpa"
    return Qwen2Model(config).to("cuda", dtype).train()


def tokens(num_tokens=2048, rows=1, seed=0):
    return torch.randint(0, VOCAB, (rows, num_tokens), generator=torch.Generator().manual_seed(seed)).cuda()


def forward(model, input_ids):
    hidden = model(input_ids, use_cache=False).last_hidden_state.float()
    # not the mean square of the hidden states: the last norm makes it 1 for every input, and the gradients rounding errors
    direction = torch.linspace(-1, 1, hidden.shape[-1], device=hidden.device)
    return (hidden @ direction).square().mean()


def step(model, input_ids):
    model.zero_grad(set_to_none=True)
    loss = forward(model, input_ids)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def kept_bytes(model, input_ids):
    """Device bytes between forward and backward; then runs the backward pass."""
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = forward(model, input_ids)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    return kept


def assert_close(one, other, tolerance):
    torch.testing.assert_close(one[0], other[0], rtol=tolerance, atol=tolerance)
    for name, grad in one[1].items():
        scale = grad.abs().max().item()
        torch.testing.assert_close(grad, other[1][name], rtol=tolerance, atol=tolerance * scale, msg=name)


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def reference(model):
    Off().apply(model)
    result = step(model, tokens())
    kept_bytes(model, tokens())
    everything = kept_bytes(model, tokens())
    remove(model)
    return result, everything


@pytest.mark.parametrize(
    ("policy", "most"),
    [
        (Full(), 0.2),
        (EveryN(2), 0.6),
        (Selective(), 0.85),
        (Selective(("attention",)), 0.3),
        (Budget(share=0.5, compile=False), 0.55),
        (Budget(share=0.2, compile=False), 0.3),
        (Budget(share=0.5), 0.55),
        (Budget(share=0.1), 0.3),
        (Auto(), 0.3),
    ],
    ids=str,
)
def test_policies_keep_the_numbers_and_less_memory(model, reference, policy, most):
    result, everything = reference
    policy.apply(model)
    assert_close(result, step(model, tokens()), FP32_TOLERANCE)
    assert kept_bytes(model, tokens()) < most * everything
    assert applied(model).reason is None or not isinstance(policy, Budget) or policy.compile is False
    remove(model)


def test_layers_are_compiled_here_and_new_lengths_are_not_compiled_anew(model):
    assert compile_obstacle("cuda") is None
    Budget(share=0.1).apply(model)
    step(model, tokens(2048))
    for num_tokens in (1999, 1531, 2047, 777, 2050):
        step(model, tokens(num_tokens))
    assert recompiles(model) == 0
    remove(model)


def test_bf16_gradients_of_compiled_layers_are_those_of_eager_ones():
    model = build(torch.bfloat16)
    result = step(model, tokens())
    Budget(share=0.1).apply(model)
    assert_close(result, step(model, tokens()), 5e-2)


@pytest.mark.parametrize("policy", [Off(), Full(), Selective(), Budget(share=0.3)], ids=str)
def test_activations_are_on_the_host_between_forward_and_backward(model, reference, policy):
    result, everything = reference
    policy.apply(model)
    without = kept_bytes(model, tokens())
    offloader = ActivationOffload(min_bytes=4096).apply(model)
    for seed in range(6):  # lengths that reuse each other's buffers while copies are under way
        step(model, tokens(2048 - 100 * seed, seed=seed))
    for _ in range(3):
        assert_close(result, step(model, tokens()), FP32_TOLERANCE)
    with_offload = kept_bytes(model, tokens())
    assert offloader.pool.in_use_bytes == 0
    if policy == Off():
        assert with_offload < 0.35 * everything  # one layer of eight, and what lies outside of layers
    else:
        assert with_offload < without
    pinned = offloader.pool.total_bytes
    assert pinned > 0
    for seed in range(6):
        step(model, tokens(2048 - 64 * seed, seed=seed))
    assert offloader.pool.total_bytes <= pinned
    ActivationOffload().remove(model)
    remove(model)
    assert offloader.pool.total_bytes == 0


def test_peak_memory_with_offload_stays_below_the_activations_of_all_layers(model, reference):
    _, everything = reference
    ActivationOffload(min_bytes=4096).apply(model)
    step(model, tokens())
    model.zero_grad(set_to_none=True)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    forward(model, tokens()).backward()
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    assert torch.cuda.max_memory_allocated() - before - gradients < 0.6 * everything
    ActivationOffload().remove(model)


def train(model, offload, num_steps=3):
    """Weights after some steps, and the device bytes that were in use before each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    offloader = OptimizerStateOffload().apply(optimizer) if offload else None
    in_use = []
    for seed in range(num_steps):
        step(model, tokens(256, seed=seed))
        torch.cuda.synchronize()
        in_use.append(torch.cuda.memory_allocated())
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], in_use, offloader, optimizer


def test_optimizer_states_are_on_the_device_for_the_step_alone():
    results = []
    for offload in (False, True):
        weights, in_use, offloader, optimizer = train(build(), offload)
        results.append(([weight.cpu() for weight in weights], in_use[-1] - in_use[0]))
        if not offload:
            del weights, optimizer
            gc.collect()
    (plain, with_states), (ours, without) = results
    states = 8 * sum(p.numel() for p in plain)
    assert all(torch.equal(one, other) for one, other in zip(plain, ours, strict=True))
    assert with_states > 0.9 * states
    assert without < 0.1 * states
    assert offloader.host_bytes(optimizer) > 0.9 * states
    assert all(v.is_pinned() for s in optimizer.state.values() for v in s.values() if v.numel() * 4 >= 1024)
    OptimizerStateOffload().remove(optimizer)
    assert all(v.is_cuda for s in optimizer.state.values() for name, v in s.items() if name != "step")


def test_sharded_optimizer_states_go_to_the_host_and_back():
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29541", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl")
    try:
        results = []
        for offload in (False, True):
            model = build()
            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)
            weights, _, offloader, optimizer = train(model, offload)
            results.append([weight.full_tensor() for weight in weights])
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
        state = next(iter(optimizer.state.values()))["exp_avg"]
        assert state.device.type == "cpu"
        assert state.to_local().is_pinned()
        assert offloader.device_bytes(optimizer) == 0
    finally:
        dist.destroy_process_group()


def test_a_compiled_budget_and_offload_hold_under_fsdp2():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29542", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl")
    try:
        results, kept = [], []
        for policy, offload in ((Off(), False), (Budget(share=0.1), False), (Full(), True)):
            model = build()
            policy.apply(model)
            if offload:
                ActivationOffload(min_bytes=4096).apply(model)
            precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for layer in model.layers:
                fully_shard(layer, mp_policy=precision)
            fully_shard(model, mp_policy=precision)
            loss, grads = step(model, tokens())
            results.append((loss, {name: grad.full_tensor() for name, grad in grads.items()}))
            kept_bytes(model, tokens())
            kept.append(kept_bytes(model, tokens()))
            assert applied(model).reason is None
            assert recompiles(model) == 0
        assert_close(results[0], results[1], 5e-2)
        assert_close(results[0], results[2], 1e-2)
        assert kept[1] < 0.6 * kept[0]
        assert kept[2] < 0.6 * kept[0]
    finally:
        dist.destroy_process_group()
