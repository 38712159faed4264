"""Packed attention inside compiled layers: none is compiled anew for batches of other lengths or of more groups."""

from __future__ import annotations

import itertools
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
from torch._dynamo.testing import CompileCounter
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.training import attention, packed_flash, packing, sequence_parallel, varlen
from verl_ext_sharding.training.sequence_parallel import HeadExchange


@torch.library.custom_op("verl_ext_sharding_tests::attention", mutates_args=())
def opaque_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_length: int,
    scale: float,
    left: int,
) -> torch.Tensor:
    """The stand-in behind an operator, which is how torch's own kernel shows itself to the compiler."""
    lengths = (cu_seqlens, cu_seqlens, max_length, max_length)
    return reference_kernel(query, key, value, *lengths, scale=scale, window_size=(left, 0), enable_gqa=True)


@opaque_attention.register_fake
def _(query, key, value, cu_seqlens, max_length, scale, left):
    return torch.empty_like(query)


def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    return opaque_attention(query, key, value, cu_seq_q, max_q, scale, window_size[0])


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
    install_flash_attn(monkeypatch, kernel)
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
    with torch.no_grad():
        for lengths in ((7, 1, 150, 12), (9, 30), (100, 2, 3, 4, 5, 6), (50, 8)):
            samples = sequences(lengths)
            found, expected = (token_logprobs(m(**inputs_of(samples)).logits, samples) for m in (model, reference))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert graphs.frame_count == 2 * kinds_of_layer


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
