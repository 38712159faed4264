"""Packed batches through whole models: equal to padded eager, and no sample sees another. On CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from attention_cases import (
    CONFIGS,
    LENGTHS,
    packed_inputs,
    padded_inputs,
    reference_kernel,
    sequences,
    tiny_model,
    token_logprobs,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.training import attention, packing, varlen

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
STAND_IN = varlen.VarlenKernel.of(
    reference_kernel, dtypes=frozenset({torch.float32, torch.bfloat16}), device_type="cpu"
)


@pytest.fixture(autouse=True)
def _registered():
    """`varlen` itself, and `varlen_cpu`: the same function with a kernel that runs here."""
    attention.register()
    AttentionInterface.register("varlen_cpu", partial(varlen.varlen_attention, kernel=STAND_IN))
    AttentionMaskInterface.register("varlen_cpu", packing.packed_mask)
    yield
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop("varlen_cpu")


def run(name, implementation, inputs, samples, dtype=torch.float32):
    """Log-probs and the gradients of their mean."""
    model = tiny_model(name, implementation, dtype)
    log_probs = token_logprobs(model(**inputs).logits, samples)
    log_probs.mean().backward()
    return log_probs.detach(), {key: value.grad.float() for key, value in model.named_parameters()}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("implementation", ["sdpa_packed", "varlen_cpu"])
def test_packed_equals_padded_eager_in_values_and_gradients(implementation, name, dtype):
    samples = sequences()
    expected, expected_grads = run(name, "eager", padded_inputs(samples), samples, dtype)
    found, found_grads = run(name, implementation, packed_inputs(samples), samples, dtype)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for key, grad in expected_grads.items():
        scale = grad.abs().max().clamp(min=1e-6)
        assert ((found_grads[key] - grad).abs().max() / scale) < 2 * TOLERANCE[dtype], key


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("implementation", ["sdpa_packed", "varlen_cpu"])
def test_padded_batches_equal_padded_eager(implementation, left):
    samples = sequences()
    inputs = padded_inputs(samples, left=left)
    real = inputs["attention_mask"].bool()
    expected = tiny_model("qwen2-sliding", "eager")(**inputs).logits[real]
    found = tiny_model("qwen2-sliding", implementation)(**inputs).logits[real]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("implementation", ["sdpa_packed", "varlen_cpu"])
def test_changing_one_packed_sample_changes_no_other_samples_log_probs(implementation, name):
    samples = sequences()
    changed = [sequences(seed=2)[i] if i == 3 else sample for i, sample in enumerate(samples)]
    model = tiny_model(name, implementation)
    with torch.no_grad():
        before = token_logprobs(model(**packed_inputs(samples)).logits, samples)
        after = token_logprobs(model(**packed_inputs(changed)).logits, changed)
    own = torch.zeros(len(before), dtype=torch.bool)
    first = sum(length - 1 for length in LENGTHS[:3])
    own[first : first + LENGTHS[3] - 1] = True
    assert torch.equal(before[~own], after[~own])
    assert not torch.equal(before[own], after[own])


def test_one_sequence_in_a_row_is_not_taken_for_packed():
    samples = sequences((30,))
    expected = tiny_model("qwen2", "sdpa")(**packed_inputs(samples)).logits
    assert torch.equal(tiny_model("qwen2", "sdpa_packed")(**packed_inputs(samples)).logits, expected)


@pytest.mark.parametrize("implementation", ["sdpa_packed", "varlen_cpu"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradients_are_the_same_when_layers_are_recomputed(implementation, use_reentrant):
    samples = sequences()
    _, expected = run("qwen2-sliding", implementation, packed_inputs(samples), samples)
    model = tiny_model("qwen2-sliding", implementation)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    first = token_logprobs(model(**packed_inputs(samples)).logits, samples).mean()
    other = sequences((40, 3))
    model(**packed_inputs(other))
    first.backward()
    for key, value in model.named_parameters():
        torch.testing.assert_close(value.grad, expected[key], rtol=1e-5, atol=1e-6)


class _LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_packed_sdpa_never_holds_a_square_of_all_tokens():
    samples = sequences((60,) * 20)
    with _LargestTensor() as stock:
        tiny_model("qwen2", "sdpa")(**packed_inputs(samples))
    with _LargestTensor() as ours:
        tiny_model("qwen2", "sdpa_packed")(**packed_inputs(samples))
    assert stock.elements >= (60 * 20) ** 2
    assert ours.elements < (60 * 20) ** 2 / 4


def test_sequences_of_like_length_share_a_group_and_others_do_not():
    bounds = [0, 1000, 1900, 2000, 6000, 6010]
    mask = packing.group_sequences(bounds, window=None, device="cpu")
    assert [tuple(group.places.shape) for group in mask.groups] == [(1, 4000), (2, 1000), (2, 100)]
    tokens = torch.cat(
        [g.places.reshape(-1) if g.valid is None else g.places.reshape(-1)[g.valid] for g in mask.groups]
    )
    assert torch.equal(tokens[mask.restore], torch.arange(6010))


def test_groups_follow_their_layer_to_its_device_once():
    mask = packing.group_sequences([0, 300, 310, 500], window=5, device="cpu")
    assert mask.on(torch.device("cpu")) is mask
    there = mask.on(torch.device("meta"))
    indices = [there.restore, *(index for group in there.groups for index in group if index is not None)]
    assert {index.device.type for index in indices} == {"meta"}
    assert there.window == 5
    assert mask.on(torch.device("meta")) is there


def test_a_bidirectional_mask_is_refused_by_varlen_and_left_to_transformers_by_sdpa():
    def everywhere(batch, head, query, key):
        return query >= 0

    arguments = {"batch_size": 1, "q_length": 8, "kv_length": 8, "mask_function": everywhere}
    with pytest.raises(ConfigError, match="sees later ones"):
        packing.packed_mask(**arguments)
    assert packing.grouped_mask(**arguments, allow_is_causal_skip=False).all()


def test_generation_with_a_cache_is_refused_by_varlen():
    with pytest.raises(ConfigError, match="cache"):
        packing.packed_mask(batch_size=1, q_length=1, kv_length=8, q_offset=7)


def test_generation_with_packed_sdpa_equals_eager():
    prompt = sequences((9,))[0][None]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = tiny_model("qwen2", "eager").eval().generate(prompt, **options)
    assert torch.equal(tiny_model("qwen2", "sdpa_packed").eval().generate(prompt, **options), expected)
