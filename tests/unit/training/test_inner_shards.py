"""Two gloo ranks: layers of which FSDP gathers parts by themselves, as verl wraps adapters with FSDP1."""

from __future__ import annotations

import functools

import pytest

peft = pytest.importorskip("peft")

import torch  # noqa: E402
import torch._inductor.compile_fx  # noqa: E402
from checkpointing_models import assert_same, decoder, loss_of, packed, qwen2  # noqa: E402
from test_checkpointing_fsdp import full  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo.backends.debugging import aot_eager_decomp_partition  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402
from torch.distributed.fsdp.wrap import (  # noqa: E402
    _or_policy,
    lambda_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from tests import ranks  # noqa: E402
from verl_ext_sharding.training.checkpointing import Budget, applied, recompiles  # noqa: E402
from verl_ext_sharding.training.layers import inner_fsdp_units  # noqa: E402
from verl_ext_sharding.training.offload import ActivationOffload  # noqa: E402
from verl_ext_sharding.training.saved_bytes import LiveStorages, SavedTensors  # noqa: E402

WITH_ADAPTERS = ("fsdp2", "fsdp1", "fsdp1_orig_params")


def adapted(num_layers=2):
    model = qwen2(num_layers)
    model.enable_input_require_grads()
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model


def is_adapter(module):
    weight = getattr(module, "weight", None)
    return not list(module.children()) and weight is not None and weight.requires_grad


def wrap(model, wrapping):
    """As verl wraps a model with adapters: with FSDP1 each of them alone (`get_fsdp_wrap_policy`)."""
    layers = decoder(model)
    if wrapping == "fsdp2":
        for layer in layers:
            fully_shard(layer)
        return fully_shard(model)
    policies = [
        functools.partial(lambda_auto_wrap_policy, lambda_fn=is_adapter),
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(layers[0])}),
    ]
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=functools.partial(_or_policy, policies=policies),
        device_id=torch.device("cpu"),
        use_orig_params=wrapping == "fsdp1_orig_params",
    )


def run(model, policy, wrapping, rank, *, lengths=(32,), offload=False):
    """Loss and gradients, bytes saved in the last forward pass by length, and what is applied, on this rank's own data."""
    if policy is not None:
        policy.apply(model)
    offloader = ActivationOffload(min_bytes=0).apply(model, device_type="cpu") if offload else None
    layer = decoder(model)[0]
    model = wrap(model, wrapping)
    assert bool(inner_fsdp_units(layer)) is (wrapping != "fsdp2")
    losses, saved_bytes = [], []
    for length in lengths:
        for micro in range(2):
            with SavedTensors(exclude=model.parameters()) as saved:
                loss = loss_of(model, packed(length, seed=10 * rank + micro), use_cache=False)
            kept = saved.total_bytes()
            loss.backward()
            losses.append(loss.detach())
        saved_bytes.append(kept)
    grads = {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    if offloader is not None:
        saved_bytes = [offloader.pool.total_bytes]
    return (torch.stack(losses), grads), saved_bytes, model


def offload_is_exact_and_leaves_adapters(rank):
    host_bytes = set()
    for wrapping in WITH_ADAPTERS:
        reference, _, _ = run(adapted(), None, wrapping, rank)
        result, pool_bytes, _ = run(adapted(), None, wrapping, rank, offload=True)
        assert_same(reference, result)
        host_bytes.update(pool_bytes)
    assert len(host_bytes) == 1, host_bytes  # FSDP2 gathers adapters with their layers: there they are known beforehand


def a_compiled_budget_holds(rank):
    torch._inductor.compile_fx.compile_fx = aot_eager_decomp_partition  # all of the compiler but the C++
    for wrapping in ("fsdp1", "fsdp1_orig_params"):
        reference, everything, _ = run(adapted(), None, wrapping, rank, lengths=(32, 48))
        policy = Budget(share=0.2, compile=True)
        result, kept, model = run(adapted(), policy, wrapping, rank, lengths=(32, 48))
        assert_same(reference, result)
        growth, everything_growth = (one[1] - one[0] for one in (kept, everything))
        assert growth < 0.3 * everything_growth, (wrapping, kept, everything)
        assert "FSDP1" in applied(model).reason
        assert recompiles(model) == 0


def test_activation_offload_moves_the_same_bytes_however_adapters_are_wrapped_and_keeps_the_numbers():
    ranks.run(offload_is_exact_and_leaves_adapters)


def test_a_compiled_budget_holds_where_fsdp1_wraps_adapters_and_says_why_it_runs_eagerly():
    ranks.run(a_compiled_budget_holds)


def test_bytes_that_were_gathered_and_freed_are_not_counted_as_kept():
    shard = torch.ones(8, requires_grad=True)
    with LiveStorages() as made, SavedTensors() as saved:
        weight = shard * 1
        output = weight * weight
    before = made.total_bytes(), saved.total_bytes()
    weight.untyped_storage().resize_(0)  # as FSDP does after the forward pass of a unit
    assert before == (64, 32)
    assert (made.total_bytes(), saved.total_bytes()) == (32, 0)
    assert output.numel() == 8
