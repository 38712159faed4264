"""How torch's kernel is called: three signatures, layouts, dtypes, and what is refused. The kernel itself is a stand-in."""

from __future__ import annotations

import pytest
import torch
from attention_cases import reference_kernel
from torch import nn

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.training.packing import PackedMask
from verl_ext_sharding.training.varlen import VarlenKernel, torch_kernel, varlen_attention

MASK = PackedMask(torch.tensor([0, 3, 10], dtype=torch.int32), 7, None, None)
CPU = {"dtypes": frozenset({torch.float32}), "device_type": "cpu"}


def states(heads=4, key_heads=4, head_dim=8, value_dim=None, tokens=10):
    torch.manual_seed(0)
    query = torch.randn(1, heads, tokens, head_dim)
    key = torch.randn(1, key_heads, tokens, head_dim)
    return query, key, torch.randn(1, key_heads, tokens, value_dim or head_dim)


def kernel_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    assert is_causal
    lengths = (cu_seq_q, cu_seq_k, max_q, max_k)
    return reference_kernel(query, key, value, *lengths, window_size=(-1, 0), enable_gqa=True)


def kernel_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    lengths = (cu_seq_q, cu_seq_k, max_q, max_k)
    return reference_kernel(query, key, value, *lengths, scale=scale, window_size=window_size, enable_gqa=True)


def attend(kernel, query, key, value, mask=MASK, **options):
    return varlen_attention(nn.Module(), query, key, value, mask, kernel=VarlenKernel.of(kernel, **CPU), **options)[0]


def expected(query, key, value, *, scaling=None, window=None):
    """Sequence by sequence with torch's own attention."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    outputs = []
    for start, end in ((0, 3), (3, 10)):
        part = [tensor[:, :, start:end] for tensor in (query, key, value)]
        allowed = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        if window is not None:
            allowed = allowed.triu(1 - window)
        outputs.append(nn.functional.scaled_dot_product_attention(*part, attn_mask=allowed, scale=scaling))
    return torch.cat(outputs, 2).transpose(1, 2)


@pytest.mark.parametrize("kernel", [kernel_2_10, kernel_2_11, reference_kernel], ids=["2.10", "2.11", "2.13"])
@pytest.mark.parametrize("scaling", [None, 0.7])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_each_torchs_signature_gives_causal_attention_within_sequences(kernel, scaling, key_heads):
    query, key, value = states(key_heads=key_heads)
    found = attend(kernel, query, key, value, scaling=scaling)
    torch.testing.assert_close(found, expected(query, key, value, scaling=scaling))


@pytest.mark.parametrize("kernel", [kernel_2_11, reference_kernel], ids=["2.11", "2.13"])
def test_a_sliding_window_counts_the_token_itself(kernel):
    query, key, value = states()
    want = expected(query, key, value, window=3)
    torch.testing.assert_close(attend(kernel, query, key, value, sliding_window=3), want)
    torch.testing.assert_close(attend(kernel, query, key, value, MASK._replace(window=3)), want)


def test_a_window_that_torch_2_10_has_not_is_refused_unless_no_sequence_reaches_it():
    query, key, value = states()
    with pytest.raises(ConfigError, match="sliding window of 3"):
        attend(kernel_2_10, query, key, value, sliding_window=3)
    torch.testing.assert_close(attend(kernel_2_10, query, key, value, sliding_window=7), expected(query, key, value))


def test_a_head_width_that_is_no_multiple_of_eight_is_padded_without_a_change_of_scale():
    query, key, value = states(head_dim=6, value_dim=5)
    for kernel in (kernel_2_10, reference_kernel):
        found = attend(kernel, query, key, value)
        torch.testing.assert_close(found, expected(query, key, value))


def test_padding_tokens_come_out_as_zero_and_real_ones_as_without_padding():
    query, key, value = states(tokens=12)
    places = torch.tensor([0, 1, 2, 4, 5, 6, 7, 8, 9, 10])
    found = attend(reference_kernel, query, key, value, MASK._replace(places=places))
    kept = [tensor[:, :, places] for tensor in (query, key, value)]
    torch.testing.assert_close(found[:, places], expected(*kept))
    assert found[:, [3, 11]].abs().max() == 0


def test_boundaries_of_the_caller_take_the_place_of_the_masks():
    query, key, value = states()
    found = attend(reference_kernel, query, key, value, None, cu_seq_lens_q=MASK.cu_seqlens, max_length_q=7)
    torch.testing.assert_close(found, expected(query, key, value))


def test_gradients_reach_query_key_and_value():
    leaves = [tensor.requires_grad_() for tensor in states(key_heads=2)]
    want = torch.autograd.grad(expected(*leaves).square().sum(), leaves)
    found = torch.autograd.grad(attend(reference_kernel, *leaves).square().sum(), leaves)
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other)


def test_float32_states_run_in_the_dtype_of_autocast_or_of_the_weights():
    seen = []

    def kernel(query, key, value, *lengths, **keywords):
        seen.append({query.dtype, key.dtype, value.dtype})
        return query

    half = VarlenKernel.of(kernel, device_type="cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        varlen_attention(nn.Module(), *states(), MASK, kernel=half)
    varlen_attention(nn.Linear(2, 2, dtype=torch.float16), *states(), MASK, kernel=half)
    assert seen == [{torch.bfloat16}, {torch.float16}]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "not causal"),
        ({"softcap": 50.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "sinks"),
        ({"mask": None}, "own mask, or none"),
        ({"mask": torch.ones(1, 1, 10, 10, dtype=torch.bool)}, "own mask, or none"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_kernel_cannot_do_is_an_error_that_names_it(options, found):
    with pytest.raises(ConfigError, match=found):
        attend(reference_kernel, *states(), **options)


def test_float32_without_autocast_is_refused():
    kernel = VarlenKernel.of(reference_kernel, device_type="cpu")
    with pytest.raises(ConfigError, match="float32"):
        varlen_attention(nn.Linear(2, 2), *states(), MASK, kernel=kernel)


def test_tensors_on_a_device_without_the_kernel_are_refused():
    kernel = VarlenKernel.of(reference_kernel)
    with pytest.raises(ConfigError, match="tensors on cpu"):
        varlen_attention(nn.Module(), *states(), MASK, kernel=kernel)


def test_a_torch_without_the_kernel_is_refused():
    with pytest.raises(ConfigError, match="no torch"):
        varlen_attention(nn.Module(), *states(), MASK, kernel=None)


def test_the_installed_torchs_kernel_has_a_signature_that_is_understood():
    kernel = torch_kernel()
    assert kernel is not None
    assert kernel.has_window or kernel.has_causal
