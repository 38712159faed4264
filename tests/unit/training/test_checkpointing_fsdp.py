"""Two gloo ranks: policies applied before FSDP1 and FSDP2 wrapping change neither loss nor gradients."""

from __future__ import annotations

import functools

import torch
import torch._inductor.compile_fx
from checkpointing_models import assert_same, decoder, loss_of, packed, qwen2
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from tests import ranks
from verl_ext_sharding.training.checkpointing import Budget, EveryN, Full, Off, Selective, applied, recompiles, remove
from verl_ext_sharding.training.layers import decoder_layers
from verl_ext_sharding.training.offload import ActivationOffload
from verl_ext_sharding.training.saved_bytes import SavedTensors

NUM_LAYERS = 3
WRAPPINGS = ("fsdp2", "fsdp1", "fsdp1_orig_params")


def wrap(model, wrapping):
    layer_class = type(decoder(model)[0])
    if wrapping == "fsdp2":
        for layer in decoder(model):
            fully_shard(layer)
        return fully_shard(model)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={layer_class}),
        device_id=torch.device("cpu"),
        use_orig_params=wrapping == "fsdp1_orig_params",
    )


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def run(policy, wrapping, rank, lengths=(32,), offload=False, num_layers=NUM_LAYERS, wrap_first=False):
    """Loss, gradients and saved bytes of two accumulated micro-batches for each length, on this rank's own data."""
    model = qwen2(num_layers)
    names = [name for name, _ in model.named_parameters()]
    if wrap_first:
        model = wrap(model, wrapping)
    if policy is not None:
        policy.apply(model)
    offloader = ActivationOffload(min_bytes=0).apply(model) if offload else None
    if not wrap_first:
        model = wrap(model, wrapping)
    assert len(decoder_layers(model)) == num_layers
    if wrapping == "fsdp2":
        assert [name for name, _ in model.named_parameters()] == names
    losses, saved_bytes = [], []
    for n in lengths:
        for micro in range(2):
            with SavedTensors(exclude=model.parameters()) as saved:
                loss = loss_of(model, packed(n, seed=10 * rank + micro), use_cache=False)
            saved_bytes.append(saved.total_bytes())
            loss.backward()
            losses.append(loss.detach())
    grads = {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    state = applied(model)
    counted = recompiles(model)
    if offloader is not None:
        saved_bytes = [offloader.pool.total_bytes]
    remove(model)
    assert applied(model) is None
    return (torch.stack(losses), grads), saved_bytes, state, counted


def eager_policies_are_exact(rank):
    for wrapping in WRAPPINGS:
        reference, everything, _, _ = run(None, wrapping, rank)
        for policy in (Off(), Full(), EveryN(2), Selective(), Budget(share=0.3)):
            result, kept, _, _ = run(policy, wrapping, rank)
            assert_same(reference, result)
            if policy == Full():
                assert all(one < 0.5 * other for one, other in zip(kept, everything, strict=True))
        assert_same(reference, run(Full(), wrapping, rank, wrap_first=True)[0])


def offload_is_exact(rank):
    host_bytes = {}
    for wrapping in WRAPPINGS:
        reference, _, _, _ = run(None, wrapping, rank)
        for policy in (None, Full(), Selective()):
            result, pool_bytes, _, _ = run(policy, wrapping, rank, offload=True)
            assert_same(reference, result)
            host_bytes.setdefault(policy, set()).update(pool_bytes)
    # activations alone: the same for every wrapping, whatever tensors stand for the gathered parameters
    assert all(len(sizes) == 1 for sizes in host_bytes.values()), host_bytes


def compiled_budget_is_the_same(rank):
    torch._inductor.compile_fx.compile_fx = aot_eager_decomp_partition  # all of the compiler but the C++
    for wrapping in ("fsdp2", "fsdp1"):
        lengths = (32, 48)
        reference, everything, _, _ = run(None, wrapping, rank, lengths, num_layers=2)
        result, kept, state, counted = run(Budget(share=0.1, compile=True), wrapping, rank, lengths, num_layers=2)
        assert state.reason is None, state.reason
        assert_same(reference, result, rtol=1e-4, atol=1e-6)
        # gathered parameters are saved too and are the same for both: compare what each further token adds
        growth, everything_growth = (one[2] - one[0] for one in (kept, everything))
        assert growth < 0.3 * everything_growth, (wrapping, kept, everything)
        assert counted == 0, (wrapping, counted)


def test_eager_policies_keep_loss_and_gradients_bit_identical_under_fsdp():
    ranks.run(eager_policies_are_exact)


def test_activation_offload_keeps_loss_and_gradients_bit_identical_under_fsdp():
    ranks.run(offload_is_exact)


def test_a_compiled_budget_holds_under_fsdp1_and_fsdp2_without_recompilation():
    ranks.run(compiled_budget_is_the_same)
