"""torch's packed kernel, packed sdpa and the compiled log-prob tiles on a real device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "unit" / "training"))

from attention_cases import CONFIGS, LENGTHS, packed_inputs, padded_inputs, sequences, tiny_model, token_logprobs
from logprob_cases import plain_linear

from verl_ext_sharding.training import attention, logprobs, packed_flash, tiles
from verl_ext_sharding.training.varlen import torch_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: runs torch's own kernels"),
]

GIB = 1024**3
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _registered():
    attention.register()
    if attention.flash_attn_importable():
        packed_flash.prepare()
    torch.backends.cuda.matmul.allow_tf32 = False


def on_device(inputs):
    return {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}


def run(name, implementation, inputs, samples, dtype):
    model = tiny_model(name, implementation, dtype).cuda()
    log_probs = token_logprobs(model(**on_device(inputs)).logits, [sample.cuda() for sample in samples])
    log_probs.mean().backward()
    return log_probs.detach(), {key: value.grad.float() for key, value in model.named_parameters()}


needs_flash_attn = pytest.mark.skipif(not attention.flash_attn_importable(), reason="flash-attn is not installed")
needs_kernel = pytest.mark.skipif(torch_kernel() is None, reason="torch before 2.10 has no packed kernel")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        pytest.param("varlen", torch.bfloat16, marks=needs_kernel),
        pytest.param("fa2_packed", torch.bfloat16, marks=needs_flash_attn),
        ("sdpa_packed", torch.bfloat16),
        ("sdpa_packed", torch.float32),
    ],
)
def test_packed_equals_padded_eager_in_values_and_gradients(name, implementation, dtype):
    if name == "qwen2-sliding" and implementation == "varlen" and not torch_kernel().has_window:
        pytest.skip("this torch's kernel has no sliding window")
    samples = sequences()
    expected, expected_grads = run(name, "eager", padded_inputs(samples), samples, dtype)
    found, found_grads = run(name, implementation, packed_inputs(samples), samples, dtype)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for key, grad in expected_grads.items():
        scale = grad.abs().max().clamp(min=1e-6)
        assert ((found_grads[key] - grad).abs().max() / scale) < 3 * TOLERANCE[dtype], key


@needs_kernel
def test_padded_batches_through_varlen_equal_eager():
    samples = sequences()
    inputs = on_device(padded_inputs(samples))
    real = inputs["attention_mask"].bool()
    expected = tiny_model("qwen2", "eager", torch.bfloat16).cuda()(**inputs).logits[real]
    found = tiny_model("qwen2", "varlen", torch.bfloat16).cuda()(**inputs).logits[real]
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("implementation", [pytest.param("varlen", marks=needs_kernel), "sdpa_packed"])
def test_changing_one_packed_sample_changes_no_other_samples_log_probs(implementation):
    samples = sequences()
    changed = [sequences(seed=2)[i] if i == 3 else sample for i, sample in enumerate(samples)]
    model = tiny_model("qwen2", implementation, torch.bfloat16).cuda()
    with torch.no_grad():
        logits = [model(**on_device(packed_inputs(batch))).logits[0] for batch in (samples, changed)]
    start = sum(LENGTHS[:3])
    own = torch.zeros(sum(LENGTHS), dtype=torch.bool, device="cuda")
    own[start : start + LENGTHS[3]] = True
    assert torch.equal(logits[0][~own], logits[1][~own])
    assert not torch.equal(logits[0][own], logits[1][own])


@needs_kernel
def test_layers_compile_whole_with_the_real_kernel_and_not_anew_for_other_lengths():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model = tiny_model("qwen2", "varlen", torch.bfloat16).cuda()
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True)
    graphs = []
    for lengths in ((7, 1, 150, 12), (9, 30), (100, 2, 3, 4, 5, 6), (50,)):
        samples = sequences(lengths)
        output = model(**on_device(packed_inputs(samples))).logits
        output.float().sum().backward()
        expected = tiny_model("qwen2", "eager", torch.bfloat16).cuda()(**on_device(packed_inputs(samples))).logits
        torch.testing.assert_close(output, expected, rtol=3e-2, atol=3e-2)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1:] == [graphs[1]] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_log_probs_are_those_of_the_plain_formula(dtype):
    torch.manual_seed(0)
    hidden = torch.randn(501, 64, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(30_001, 64, device="cuda") * 0.3).to(dtype).requires_grad_()
    labels = torch.randint(0, 30_001, (501,), device="cuda")
    expected = plain_linear(hidden, weight, labels, 0.7)
    found = logprobs.linear_logprobs(hidden, weight, labels, 0.7)
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() / other.abs().max() < 2e-6
    grads = [torch.autograd.grad(out[0].sum() + out[1].sum(), [hidden, weight]) for out in (found, expected)]
    for one, other in zip(*grads, strict=True):
        assert (one.float() - other.float()).abs().max() / other.float().abs().max() < 2 * tolerance
    for arithmetic in (tiles._compiled().advance, tiles._compiled().gradient):
        assert arithmetic.current is not arithmetic.plain, "the compiler failed and the plain arithmetic ran"


def test_log_probs_of_8192_tokens_over_a_real_vocabulary_peak_below_one_and_a_half_gib():
    hidden = torch.randn(8192, 1536, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(151_936, 1536, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 151_936, (8192,), device="cuda")
    for _ in range(2):
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        log_probs, entropy = logprobs.linear_logprobs(hidden, weight, labels, 0.7)
        (log_probs.sum() + entropy.sum()).backward()
    assert torch.cuda.max_memory_allocated() - before < 1.5 * GIB


def test_gradients_in_place_of_logits_peak_below_half_their_size():
    leaf = torch.randn(4096, 151_936, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    logits = leaf * 1
    labels = torch.randint(0, 151_936, (4096,), device="cuda")
    log_probs = logprobs.logprobs_from_logits(logits, labels)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(log_probs.sum(), logits)
    assert torch.cuda.max_memory_allocated() - before < logits.nbytes / 2
