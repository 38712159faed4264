"""What log-probs hold, in bytes: a version that holds full logits, or their gradient, fails here."""

from __future__ import annotations

import pytest
import torch
from logprob_cases import LiveBytes, plain, plain_linear, saved_bytes, small_tiles

from verl_ext_sharding.training import logprobs

NUM_TOKENS, VOCABULARY, WIDTH = 512, 4096, 32
TILE_ELEMENTS = NUM_TOKENS * 256
LOGITS_BYTES = NUM_TOKENS * VOCABULARY * 4
TILE_BYTES = TILE_ELEMENTS * 4


def linear_case():
    torch.manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, WIDTH, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    return hidden, weight, torch.randint(0, VOCABULARY, (NUM_TOKENS,))


def peak_of(function):
    with LiveBytes() as live:
        log_probs, entropy = function()
        (log_probs.sum() + entropy.sum()).backward()
    return live.peak_bytes


def test_linear_log_probs_peak_below_the_logits_and_the_plain_formula_above():
    hidden, weight, labels = linear_case()
    gradient_bytes = (hidden.numel() + weight.numel()) * 4
    assert peak_of(lambda: plain_linear(hidden, weight, labels)) > 2 * LOGITS_BYTES
    with small_tiles(TILE_ELEMENTS):
        peak = peak_of(lambda: logprobs.linear_logprobs(hidden, weight, labels))
    assert peak < 7 * TILE_BYTES + 3 * gradient_bytes < LOGITS_BYTES


def test_linear_log_probs_save_nothing_of_the_size_of_the_logits():
    hidden, weight, labels = linear_case()
    with saved_bytes() as saved:
        logprobs.linear_logprobs(hidden, weight, labels, 0.7)
    inputs = (hidden.numel() + weight.numel()) * 4
    assert saved[0] <= inputs + 6 * NUM_TOKENS * 8


def logits_case():
    torch.manual_seed(0)
    leaf = torch.randn(NUM_TOKENS, VOCABULARY, requires_grad=True)
    return leaf, torch.randint(0, VOCABULARY, (NUM_TOKENS,))


@pytest.mark.parametrize(("inplace", "copies"), [(True, 0), (False, 1)])
def test_log_probs_from_logits_hold_no_copy_of_them_but_their_gradient(inplace, copies):
    leaf, labels = logits_case()
    logits = leaf * 1
    with small_tiles(TILE_ELEMENTS), LiveBytes() as live:
        logprobs.logprobs_from_logits(logits, labels, inplace_backward=inplace).sum().backward()
    # `leaf * 1` multiplies the gradient once more, and accumulates it into `leaf.grad`.
    assert live.peak_bytes < (copies + 1) * LOGITS_BYTES + 7 * TILE_BYTES
    leaf, labels = logits_case()
    with LiveBytes() as live:
        plain(leaf * 1, labels)[0].sum().backward()
    assert live.peak_bytes > (copies + 1) * LOGITS_BYTES + 7 * TILE_BYTES


def test_log_probs_from_logits_save_the_logits_and_no_copy():
    leaf, labels = logits_case()
    logits = leaf * 1
    with saved_bytes() as saved:
        logprobs.logprobs_from_logits(logits, labels)
        logprobs.entropy_from_logits(logits)
    assert saved[0] <= LOGITS_BYTES + 10 * NUM_TOKENS * 8
