"""Packed attention inside compiled layers: none is compiled anew for batches of other lengths or of more groups."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial

import pytest
import torch
from attention_cases import (
    install_flash_attn,
    packed_inputs,
    padded_inputs,
    reference_kernel,
    sequences,
    tiny_model,
    token_logprobs,
)
from checkpointing_models import CODEGEN, needs_compiler
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.training import attention, attention_flops, packed_flash, packing, sequence_parallel, varlen
from verl_ext_sharding.training.checkpointing import Budget, remove
from verl_ext_sharding.training.sequence_parallel import HeadExchange

RUNS = Counter()


@torch.library.custom_op("verl_ext_sharding_tests::attention", mutates_args=())
def opaque_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen_k: int,
    scale: float,
    window_size_left: int,
) -> torch.Tensor:
    """The stand-in behind an operator, which is how kernels of torch and of flash-attn show themselves to the compiler."""
    RUNS["forward"] += 1
    lengths = (cu_seqlens, cu_seqlens, max_seqlen_k, max_seqlen_k)
    return reference_kernel(
        query, key, value, *lengths, scale=scale, window_size=(window_size_left, 0), enable_gqa=True
    )


@opaque_attention.register_fake
def _(query, key, value, cu_seqlens, max_seqlen_k, scale, window_size_left):
    return torch.empty_like(query)


def _weights(query, key, cu_seqlens, scale, left):
    """Attention weights `(heads, tokens, tokens)` of sequences laid end to end."""
    place = torch.arange(query.shape[0])
    sequence = torch.bucketize(place, cu_seqlens[1:], right=True)
    distance = place[:, None] - place[None]
    hidden = (sequence[:, None] != sequence[None]) | (distance < 0) | (distance > (1 << 30 if left < 0 else left))
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return scores.masked_fill(hidden, float("-inf")).softmax(-1)


@torch.library.custom_op("verl_ext_sharding_tests::attention_backward", mutates_args=())
def opaque_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    window_size_left: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    group = query.shape[1] // key.shape[1]
    weights = _weights(query, key, cu_seqlens, scale, window_size_left)
    keys, values = (states.repeat_interleave(group, dim=1) for states in (key, value))
    of_weights = torch.einsum("qhd,khd->hqk", grad, values) - (grad * output).sum(-1).T[..., None]
    scores = weights * of_weights * scale
    of_keys, of_values = torch.einsum("hqk,qhd->khd", scores, query), torch.einsum("hqk,qhd->khd", weights, grad)
    folded = (states.unflatten(1, (-1, group)).sum(2) for states in (of_keys, of_values))
    grads = (torch.einsum("hqk,khd->qhd", scores, keys), *folded)
    return tuple(torch.empty_like(states).copy_(one) for states, one in zip((query, key, value), grads, strict=True))


@opaque_backward.register_fake
def _(grad, query, key, value, output, cu_seqlens, scale, window_size_left):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class FlashAttention(torch.autograd.Function):
    """As flash-attn wraps its operators; both boundaries are among its inputs."""

    @staticmethod
    def forward(ctx, query, key, value, cu_seqlens_q, cu_seqlens_k, max_length, scale, left):
        output = opaque_attention(query, key, value, cu_seqlens_q, max_length, scale, left)
        ctx.save_for_backward(query, key, value, output, cu_seqlens_k)
        ctx.scale, ctx.left = scale, left
        return output

    @staticmethod
    def backward(ctx, grad):
        query, key, value, output, cu_seqlens = ctx.saved_tensors
        grads = opaque_backward(grad, query, key, value, output, cu_seqlens, ctx.scale, ctx.left)
        return (*grads, None, None, None, None, None)


def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    return opaque_attention(query, key, value, cu_seq_q, max_q, scale, window_size[0])


def flash_kernel(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    return FlashAttention.apply(query, key, value, cu_q, cu_k, max_q, scale, window_size[0])


@pytest.fixture(autouse=True)
def _registered():
    stand_in = varlen.VarlenKernel.of(kernel, dtypes=frozenset({torch.float32}), device_type="cpu")
    AttentionInterface.register("varlen_opaque", partial(varlen.varlen_attention, kernel=stand_in))
    AttentionMaskInterface.register("varlen_opaque", packing.packed_mask)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop("varlen_opaque")


@pytest.mark.parametrize(("name", "kinds_of_layer"), [("qwen2", 1), ("qwen2-sliding", 2), ("gpt-neox", 1)])
def test_layers_compile_whole_and_not_anew_for_other_lengths(name, kinds_of_layer):
    model, reference, graphs = tiny_model(name, "varlen_opaque"), tiny_model(name, "eager"), CompileCounter()
    for layer in model.base_model.layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True, backend=graphs)
    with torch.no_grad():
        for lengths in ((7, 1, 150, 12), (9, 30), (100, 2, 3, 4, 5, 6), (50,)):
            samples = sequences(lengths)
            expected = reference(**packed_inputs(samples)).logits
            torch.testing.assert_close(model(**packed_inputs(samples)).logits, expected, rtol=1e-5, atol=1e-5)
    # For the first batch, then once more with symbols for its sizes.
    assert graphs.frame_count == 2 * kinds_of_layer


@pytest.fixture
def flash_attn(monkeypatch):
    install_flash_attn(monkeypatch, flash_kernel)
    yield
    attention.register()


def test_a_mask_that_boundaries_do_not_express_is_refused_by_the_name_that_was_asked_for(flash_attn):
    for name, asked in ((packed_flash.NAME, "flash_attention_2"), ("varlen", "varlen")):
        with pytest.raises(ConfigError) as caught:
            AttentionMaskInterface()[name](batch_size=1, q_length=4, kv_length=4, use_vmap=True)
        assert caught.value.subject == f"attn_implementation={asked}"


def test_under_transformers_own_flash_attention_the_trace_breaks(flash_attn):
    model = tiny_model("qwen2", "flash_attention_2", torch.bfloat16)
    layer = model.base_model.layers[0]
    layer.forward = torch.compile(layer.forward, fullgraph=True, backend=CompileCounter())
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.Unsupported, match=r"[Dd]ata[- ]dependent"):
        model(**packed_inputs(sequences()))


@pytest.mark.parametrize(("name", "kinds_of_layer"), [("qwen2", 1), ("qwen2-sliding", 2), ("gpt-neox", 1)])
@pytest.mark.parametrize("inputs_of", [packed_inputs, padded_inputs])
def test_layers_with_flash_attn_compile_whole_and_once_for_all_layers(inputs_of, name, kinds_of_layer, flash_attn):
    model, reference, graphs = tiny_model(name, packed_flash.NAME), tiny_model(name, "eager"), CompileCounter()
    for layer in model.base_model.layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True, backend=graphs)
    for lengths in ((7, 1, 150, 12), (9, 30), (100, 2, 3, 4, 5, 6), (50, 8)):
        samples = sequences(lengths)
        found, expected = (_logprobs_and_gradients(m, inputs_of(samples), samples) for m in (model, reference))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert graphs.frame_count == 2 * kinds_of_layer


def _logprobs_and_gradients(model, inputs, samples):
    model.zero_grad()
    logprobs = token_logprobs(model(**inputs).logits, samples)
    (logprobs * torch.linspace(0, 1, len(logprobs))).sum().backward()
    return {"log-probs": logprobs.detach(), **{name: weight.grad for name, weight in model.named_parameters()}}


@needs_compiler
@pytest.mark.parametrize(("lengths", "runs"), [((9, 5, 16), 2), ((512,), 1)])
def test_a_budget_keeps_what_attention_returns_where_sequences_are_long(lengths, runs, flash_attn, monkeypatch):
    operator = torch.ops.verl_ext_sharding_tests.attention
    monkeypatch.setattr(attention_flops, "OPERATORS", (("verl_ext_sharding_tests", "attention"),))
    monkeypatch.setattr(CODEGEN, aot_eager_decomp_partition)
    model = tiny_model("qwen2", packed_flash.NAME)
    Budget(share=0.2, compile=True).apply(model)
    try:
        samples = sequences(lengths)
        RUNS.clear()
        token_logprobs(model(**packed_inputs(samples)).logits, samples).sum().backward()
        assert RUNS["forward"] == runs * len(model.base_model.layers)
        assert operator not in flop_registry
    finally:
        remove(model)


@pytest.mark.parametrize(("window", "keys"), [(-1, 30), (9, 10), (63, 30)])
def test_operations_of_a_kernel_are_those_of_its_window(window, keys):
    names = ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "window_size_left"]
    shapes = ((50, 4, 16), (50, 2, 16), (50, 2, 8), (3,), (3,))
    values = [*(torch.empty(shape, device="meta") for shape in shapes), 30, 30, window]
    expected = 2 * 4 * 50 * keys * (16 + 8)
    assert attention_flops.packed_attention_flops(names, *values) == expected
    assert attention_flops.packed_attention_flops(names[:-1], *values[:-1], window_size_left=window) == expected
    if window < 0:
        assert attention_flops.packed_attention_flops(names[:-1], *values[:-1]) == expected
    lists = [*names[:3], "cu_seq_q", "cu_seq_k", "max_q", "max_k", "window_size"]
    assert attention_flops.packed_attention_flops(lists, *values[:-1], [window, 0]) == expected


def test_a_kernel_that_names_its_longest_length_otherwise_is_an_error_with_its_arguments():
    query = torch.empty(50, 4, 16, device="meta")
    with pytest.raises(TypeError, match="among q, k, v, longest"):
        attention_flops.packed_attention_flops(["q", "k", "v", "longest"], query, query, query, 30)


def test_layers_of_a_row_on_two_ranks_compile_whole():
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model, graphs = tiny_model("qwen2", "varlen_opaque"), CompileCounter()
        for layer in model.base_model.layers:
            layer.forward = torch.compile(layer.forward, fullgraph=True, backend=graphs)
        for lengths in ((7, 1, 150, 12), (10, 30), (50,)):
            inputs = packed_inputs(sequences(lengths))
            whole = torch.cat([inputs["position_ids"][0]] * 2)
            group = torch.distributed.group.WORLD.group_name
            with sequence_parallel.forward_pass():
                sequence_parallel.announce(sequence_parallel.Row(HeadExchange(group, 2), whole, 0))
                assert model(**inputs).logits.shape[1] == sum(lengths)
        assert graphs.frame_count == 2
    finally:
        torch.distributed.destroy_process_group()


def test_packed_sdpa_compiles_nothing_anew_for_other_numbers_of_groups(monkeypatch):
    monkeypatch.setattr(packing, "_GROUP_SHORT_TOKENS", 1)
    attention.register()
    model, reference, graphs = (
        tiny_model("qwen2", "sdpa_packed"),
        tiny_model("qwen2", "eager"),
        CompileCounter(),
    )
    for layer in model.base_model.layers:
        layer.forward = torch.compile(layer.forward, backend=graphs)
    counts, compiled = [], []
    with torch.no_grad():
        for num_groups in range(1, 13):
            lengths = [int(6 * 1.5**index) for index in range(num_groups)]
            counts.append(
                len(packing.group_sequences([0, *itertools.accumulate(lengths)], window=None, device="cpu").groups)
            )
            samples = sequences([*lengths, *lengths[:2]])
            expected = reference(**packed_inputs(samples)).logits
            torch.testing.assert_close(model(**packed_inputs(samples)).logits, expected, rtol=1e-5, atol=1e-5)
            compiled.append(graphs.frame_count)
    assert counts == list(range(1, 13))
    assert compiled[1:] == [compiled[1]] * 11


@pytest.mark.skipif(varlen.TORCH_KERNEL is None, reason="torch before 2.10 has no kernel for packed sequences")
@pytest.mark.parametrize(("window", "keys"), [((-1, 0), 30), ((9, 0), 10)])
def test_the_kernel_of_this_torch_is_counted_while_layers_are_compiled_and_as_before_afterwards(window, keys):
    operator, before = torch.ops.torch_attn._varlen_attn, dict(flop_registry)
    with FakeTensorMode(), attention_flops.counted(), FlopCounterMode(display=False) as counter:
        query, key = (torch.empty(50, heads, 16, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
        boundaries = torch.empty(3, dtype=torch.int32, device="cuda")
        operator(query, key, key, boundaries, boundaries, 30, 30, False, 0.25, list(window))
    assert counter.get_total_flops() == 2 * 4 * 50 * keys * (16 + 16)
    assert flop_registry == before
