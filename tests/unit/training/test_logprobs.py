"""Log-probs and entropy over a vocabulary in tiles: values and gradients are those of the plain formula."""

from __future__ import annotations

import pytest
import torch
from logprob_cases import plain, plain_linear, small_tiles

from verl_ext_sharding.training import logprobs, tiles

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
NUM_TOKENS, VOCABULARY, WIDTH = 37, 1000, 24


def assert_equal(found, expected, dtype):
    """To the tolerance of the dtype, relative to the largest entry: gradients of rare tokens are sums of cancelling terms."""
    for one, other in zip(found, expected, strict=True):
        other = other.float()
        error = (one.float() - other).abs().max() / other.abs().max()
        assert error < 2 * TOLERANCE[dtype], f"{error:.2e}"


def linear_case(dtype, *, bias=True, seed=0):
    torch.manual_seed(seed)
    hidden = torch.randn(NUM_TOKENS, WIDTH).to(dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH) * 0.5).to(dtype).requires_grad_()
    biases = torch.randn(VOCABULARY).to(dtype).requires_grad_() if bias else None
    return hidden, weight, biases, torch.randint(0, VOCABULARY, (NUM_TOKENS,))


def grads(outputs, weights, leaves):
    return torch.autograd.grad(sum((out * w).sum() for out, w in zip(outputs, weights, strict=True)), leaves)


WEIGHTS = (torch.linspace(-1, 1, NUM_TOKENS), torch.linspace(2, -1, NUM_TOKENS))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.linspace(0.5, 1.5, NUM_TOKENS)], ids=["1", "0.7", "per-token"])
@pytest.mark.parametrize("chunk_tokens", [16, 16384])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_linear_log_probs_and_entropy_are_those_of_the_plain_formula(dtype, temperature, chunk_tokens, bias):
    hidden, weight, biases, labels = linear_case(dtype, bias=bias)
    leaves = [leaf for leaf in (hidden, weight, biases) if leaf is not None]
    expected = plain_linear(hidden, weight, labels, temperature, biases)
    with small_tiles(NUM_TOKENS * 128):
        found = logprobs.linear_logprobs(hidden, weight, labels, temperature, bias=biases, chunk_tokens=chunk_tokens)
        found_grads = grads(found, WEIGHTS, leaves)
    assert_equal(found, expected, torch.float32)
    assert_equal(found_grads, grads(expected, WEIGHTS, leaves), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropy_from_logits_are_those_of_the_plain_formula(dtype, inplace, temperature):
    torch.manual_seed(0)
    leaf = (torch.randn(4, 9, VOCABULARY) * 3).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (4, 9))
    weights = (torch.linspace(-1, 1, 36).view(4, 9), torch.linspace(2, -1, 36).view(4, 9))
    expected = plain(leaf, labels, temperature)
    expected_grad = grads(expected, weights, [leaf])
    with small_tiles(5 * VOCABULARY):
        found = logprobs.logprobs_and_entropy_from_logits(
            leaf * 1, labels, temperature=temperature, inplace_backward=inplace
        )
        found_grad = grads(found, weights, [leaf])
    assert_equal(found, expected, torch.float32)
    assert_equal(found_grad, expected_grad, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_log_probs_alone_and_entropy_alone_are_those_of_the_plain_formula(dtype):
    torch.manual_seed(0)
    leaf = (torch.randn(NUM_TOKENS, VOCABULARY) * 3).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (NUM_TOKENS,))
    with small_tiles(5 * VOCABULARY):
        alone = (logprobs.logprobs_from_logits(leaf * 1, labels), logprobs.entropy_from_logits(leaf * 1))
        for index in range(2):
            want = grads(plain(leaf, labels)[index : index + 1], WEIGHTS[index : index + 1], [leaf])
            assert_equal(grads(alone[index : index + 1], WEIGHTS[index : index + 1], [leaf]), want, dtype)
    assert_equal(alone, plain(leaf, labels), torch.float32)


def test_the_full_formula_is_the_plain_one():
    logits = torch.randn(3, 5, 11)
    labels = torch.randint(0, 11, (3, 5))
    torch.testing.assert_close(logprobs.plain_logprobs(logits, labels), plain(logits, labels)[0])


def test_scores_in_the_thousands_lose_no_precision():
    hidden, weight, _, labels = linear_case(torch.float32, bias=False)
    with torch.no_grad():
        weight.mul_(500)
    expected = plain_linear(hidden.double(), weight.double(), labels)
    with small_tiles(NUM_TOKENS * 128):
        found = logprobs.linear_logprobs(hidden, weight, labels)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize("label", [-100, 7])
def test_ignored_labels_have_no_log_prob_and_no_gradient_but_an_entropy(label):
    hidden, weight, _, labels = linear_case(torch.float32, bias=False)
    labels[5] = label
    log_probs, entropy = logprobs.linear_logprobs(hidden, weight, labels, ignore_index=label)
    (grad,) = torch.autograd.grad(log_probs.sum(), hidden, retain_graph=True)
    assert log_probs[5] == 0
    assert grad[5].abs().max() == 0
    (entropy_grad,) = torch.autograd.grad(entropy.sum(), hidden)
    assert entropy[5] > 0
    assert entropy_grad[5].abs().max() > 0


@pytest.mark.parametrize("label", [-1, VOCABULARY])
def test_a_label_outside_the_vocabulary_is_an_error(label):
    hidden, weight, _, labels = linear_case(torch.float32)
    labels[5] = label
    with pytest.raises(IndexError, match="vocabulary from 0 to 999"):
        logprobs.linear_logprobs(hidden, weight, labels)
    with pytest.raises(IndexError):
        logprobs.logprobs_from_logits(hidden.detach() @ weight.detach().t(), labels)


def test_entropy_can_come_without_a_gradient_or_not_at_all():
    hidden, weight, _, labels = linear_case(torch.float32)
    _, entropy = logprobs.linear_logprobs(hidden, weight, labels, entropy_grad=False)
    assert not entropy.requires_grad
    assert logprobs.linear_logprobs(hidden, weight, labels, with_entropy=False)[1] is None


def test_only_what_needs_a_gradient_gets_one():
    hidden, weight, _, labels = linear_case(torch.float32)
    logprobs.linear_logprobs(hidden, weight.detach(), labels)[0].sum().backward()
    assert hidden.grad is not None
    logprobs.linear_logprobs(hidden.detach(), weight, labels)[0].sum().backward()
    expected = torch.autograd.grad(plain_linear(hidden, weight, labels)[0].sum(), weight)
    assert_equal([weight.grad], expected, torch.float32)


def test_shapes_follow_the_labels_and_no_tokens_are_no_error():
    hidden, weight, _, labels = linear_case(torch.float32)
    batch = logprobs.linear_logprobs(hidden[:36].view(4, 9, WIDTH), weight, labels[:36].view(4, 9))
    assert batch[0].shape == batch[1].shape == (4, 9)
    log_probs, _ = logprobs.linear_logprobs(hidden[:0], weight, labels[:0])
    log_probs.sum().backward()
    assert weight.grad.abs().max() == 0


def test_autocast_computes_in_its_dtype_and_gradients_keep_the_parameters():
    hidden, weight, _, labels = linear_case(torch.float32, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain_linear(hidden, weight, labels)
        found = logprobs.linear_logprobs(hidden, weight, labels)
    found_grads = grads(found, WEIGHTS, [hidden, weight])
    assert_equal(found, expected, torch.float32)
    assert_equal(found_grads, grads(expected, WEIGHTS, [hidden, weight]), torch.bfloat16)
    assert {grad.dtype for grad in found_grads} == {torch.float32}


def test_a_gradient_in_place_is_in_the_logits_memory_and_never_in_a_leafs():
    leaf = torch.randn(NUM_TOKENS, VOCABULARY, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (NUM_TOKENS,))
    logits = leaf * 1
    seen = []
    logits.register_hook(lambda grad: seen.append(grad.data_ptr()))
    logprobs.logprobs_from_logits(logits[None], labels[None], inplace_backward=True).sum().backward()
    assert seen == [logits.data_ptr()]
    before = leaf.detach().clone()
    logprobs.logprobs_from_logits(leaf[None], labels[None], inplace_backward=True).sum().backward()
    assert torch.equal(leaf.detach(), before)


def test_another_use_of_logits_that_were_overwritten_is_an_error_not_a_wrong_number():
    leaf = torch.randn(NUM_TOKENS, VOCABULARY, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (NUM_TOKENS,))
    logits = leaf * 1
    log_probs = logprobs.logprobs_from_logits(logits, labels, inplace_backward=True)
    loss = (logits**2).sum() * 0.1
    log_probs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_shard_of_the_weight_is_refused():
    hidden, weight, _, labels = linear_case(torch.float32)
    weight.placements = ()
    with pytest.raises(AssertionError, match="a shard"):
        logprobs.linear_logprobs(hidden, weight, labels)


@pytest.fixture
def compilations(monkeypatch):
    """The arithmetic compiled through a backend that counts graphs and runs them as they are."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = tiles.Arithmetic(
        advance=torch.compile(tiles.advance, dynamic=True, backend=counter),
        gradient=torch.compile(tiles.gradient, dynamic=True, backend=counter),
        num_elements=40 * 128,
    )
    monkeypatch.setattr(tiles, "_compiled", lambda: compiled)
    yield counter
    torch._dynamo.reset()


def test_compiled_tiles_give_the_same_numbers(compilations):
    hidden, weight, _, labels = linear_case(torch.float32, bias=False)
    expected = plain_linear(hidden, weight, labels, 0.7)
    found = logprobs.linear_logprobs(hidden, weight, labels, 0.7, compiled=True)
    leaves = [hidden, weight]
    found_grads = grads(found, WEIGHTS, leaves)
    assert compilations.frame_count > 0
    assert_equal(found, expected, torch.float32)
    assert_equal(found_grads, grads(expected, WEIGHTS, leaves), torch.float32)


def test_new_lengths_and_ragged_last_tiles_do_not_compile_anew(compilations):
    hidden, weight, _, labels = linear_case(torch.float32, bias=False)
    for length in (37, 29, 11, 36, 5, 23):
        options = {"compiled": True, "chunk_tokens": 13 if length == 36 else 16384}
        found, _ = logprobs.linear_logprobs(hidden[:length], weight, labels[:length], 0.7, **options)
        found.sum().backward()
    assert compilations.frame_count == 2


def test_new_numbers_of_rows_of_logits_do_not_compile_anew(compilations):
    for rows in (37, 29, 11, 36, 5, 23):
        leaf = torch.randn(rows, 1000, requires_grad=True)
        logprobs.logprobs_from_logits(leaf * 1, torch.zeros(rows, dtype=torch.int64), compiled=True).sum().backward()
    assert compilations.frame_count == 2


def test_no_tile_is_square_or_of_odd_width():
    arithmetic = tiles.Arithmetic(advance=tiles.advance, gradient=tiles.gradient, num_elements=2**26)
    for num_tokens in (1, 5, 100, 8192, 16384, 2**20):
        assert arithmetic.width(num_tokens) != num_tokens
        assert arithmetic.width(num_tokens) % 128 == 0


def test_a_compiler_that_fails_gives_way_to_the_plain_arithmetic(caplog):
    guarded = tiles._Guarded(tiles.gradient)

    def broken(*args):
        raise RuntimeError("no C compiler found")

    guarded.current = broken
    tile, lse = torch.randn(3, 8), torch.zeros(3)
    arguments = (tile, torch.zeros(3, dtype=torch.int64), None, None, lse, tiles.OutputGrads(torch.ones(3), None, None))
    for _ in range(2):
        assert torch.equal(guarded(*arguments), tiles.gradient(*arguments))
    assert sum("no C compiler" in record.message for record in caplog.records) == 1


def test_an_outer_compile_leaves_the_tiles_alone_and_right():
    leaf = torch.randn(NUM_TOKENS, VOCABULARY, requires_grad=True)
    entropy = torch.compile(logprobs.entropy_from_logits, dynamic=True, backend="eager")(leaf)
    torch.testing.assert_close(entropy, plain(leaf, torch.zeros(NUM_TOKENS, dtype=torch.int64))[1])
