"""Log-probs out of a model's own forward, as verl's engine asks for them."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from attention_cases import CONFIGS, packed_inputs, padded_inputs, sequences, tiny_model
from logprob_cases import plain
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    MarianConfig,
    MarianForCausalLM,
    MistralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.training import lm_head
from verl_ext_sharding.training.lm_head import resolve_logits


def engine_inputs(samples, temperature=0.7):
    """What verl's engine passes with remove-padding and fused kernels."""
    inputs = packed_inputs(samples)
    labels = torch.roll(inputs["input_ids"], shifts=-1, dims=1)
    return {**inputs, "temperature": temperature, "return_dict": True, "shift_labels": labels}


def loss_of(log_probs, entropy):
    weights = torch.linspace(-1, 1, log_probs.numel()).view(log_probs.shape)
    return (log_probs * weights).sum() + 0.01 * entropy.sum()


def expected(model, samples, temperature=0.7):
    """Log-probs and entropy by the plain formula, and the gradients of `loss_of`."""
    inputs = packed_inputs(samples)
    labels = torch.roll(inputs["input_ids"], shifts=-1, dims=1)
    log_probs, entropy = plain(model(**inputs).logits, labels, temperature)
    loss_of(log_probs, entropy).backward()
    return log_probs, entropy, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(model, output, want):
    log_probs, entropy, grads = want
    torch.testing.assert_close(output.log_probs, log_probs, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(output.entropy, entropy, rtol=1e-6, atol=1e-5)
    model.zero_grad()
    loss_of(output.log_probs, output.entropy).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-5 * float(grad.abs().max() + 1e-3))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_returns_the_log_probs_entropy_and_gradients_of_its_logits(name):
    model, samples = tiny_model(name, "eager"), sequences()
    want = expected(model, samples)
    lm_head.apply(model)
    output = model(**engine_inputs(samples))
    assert output.logits is None
    assert_same(model, output, want)


def test_tied_embeddings_get_both_shares_of_their_gradient():
    torch.manual_seed(0)
    config = CONFIGS["qwen2"]()
    config.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    want = expected(model, sequences())
    lm_head.apply(model)
    assert_same(model, model(**engine_inputs(sequences())), want)


@pytest.mark.parametrize(
    "options",
    [{}, {"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}],
    ids=["adapters in layers", "adapter on the head", "head trained whole"],
)
def test_adapters_inside_and_on_the_head_are_in_the_log_probs(options):
    base = tiny_model("qwen2", "eager")
    lm_head.apply(base)
    options = {"target_modules": ["q_proj", "v_proj"], **options}
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            nn.init.normal_(parameter, std=0.1)
    want = expected(model, sequences())
    assert_same(model, model(**engine_inputs(sequences())), want)


def test_padded_batches_shift_their_own_labels():
    model, samples = tiny_model("qwen2", "eager"), sequences()
    inputs = padded_inputs(samples)
    want, _ = plain(model(**inputs).logits, torch.roll(inputs["input_ids"], shifts=-1, dims=-1), 0.7)
    lm_head.apply(model)
    found = model(**inputs, temperature=0.7, return_dict=True).log_probs
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-5)


def test_a_call_without_temperature_is_the_models_own_forward():
    model, samples = tiny_model("qwen2", "eager"), sequences()
    inputs = packed_inputs(samples)
    expected_logits = model(**inputs, logits_to_keep=3).logits
    expected_loss = model(**inputs, labels=inputs["input_ids"]).loss
    lm_head.apply(model)
    assert torch.equal(model(**inputs, logits_to_keep=3).logits, expected_logits)
    assert torch.equal(model(**inputs, labels=inputs["input_ids"]).loss, expected_loss)
    prompt = samples[0][None]
    assert model.eval().generate(prompt, max_new_tokens=2, pad_token_id=0).shape == (1, len(samples[0]) + 2)


def test_what_inspects_the_forward_still_finds_the_models_parameters():
    model = tiny_model("qwen2", "eager")
    before = set(inspect.signature(model.forward).parameters)
    lm_head.apply(model)
    assert before <= set(inspect.signature(model.forward).parameters)


def test_the_model_is_the_original_again_after_remove():
    model = tiny_model("qwen2", "eager")
    before = [dict(model.__dict__), dict(model.lm_head.__dict__)]
    lm_head.apply(model)
    lm_head.apply(model)
    lm_head.remove(model)
    lm_head.remove(model)
    assert [dict(model.__dict__), dict(model.lm_head.__dict__)] == before


def test_a_copy_of_a_model_uses_its_own_weights():
    model = tiny_model("qwen2", "eager")
    lm_head.apply(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert twin(**engine_inputs(sequences())).entropy.std() > 0


SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL),
        MistralConfig(**SMALL, num_key_value_heads=2),
        Qwen3Config(**SMALL, num_key_value_heads=2),
        Qwen3MoeConfig(**SMALL, num_key_value_heads=2, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16),
    ],
    ids=lambda config: config.model_type,
)
def test_a_model_whose_head_alone_makes_the_logits_can_be_fused(config):
    assert lm_head.fused_obstacle(AutoModelForCausalLM.from_config(config)) is None


@pytest.mark.parametrize(
    "config",
    [Gemma2Config(**SMALL, head_dim=16), CohereConfig(**SMALL), GraniteConfig(**SMALL)],
    ids=lambda config: config.model_type,
)
def test_a_model_that_caps_or_scales_its_logits_is_refused(config):
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="does more to its logits"):
        lm_head.apply(model)


def llama4():
    heads = {"head_dim": 16, "num_key_value_heads": 2, "num_local_experts": 2}
    return Llama4ForCausalLM(Llama4TextConfig(**SMALL, **heads, intermediate_size_mlp=32, pad_token_id=0))


def marian():
    sizes = {"d_model": 32, "vocab_size": 64, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
    tokens = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1, "forced_eos_token_id": 1}
    return MarianForCausalLM(MarianConfig(**sizes, **tokens, decoder_vocab_size=64, is_decoder=True, dropout=0.0))


@pytest.mark.parametrize("build", [llama4, marian], ids=["under another name", "a part of it"])
def test_a_model_whose_base_is_not_where_its_class_says_returns_its_log_probs(build):
    torch.manual_seed(0)
    model = build().train()
    inputs = {"input_ids": torch.randint(3, 60, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.int64)}
    log_probs, entropy = plain(model(**inputs).logits, torch.roll(inputs["input_ids"], shifts=-1, dims=-1), 0.7)
    loss_of(log_probs, entropy).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    lm_head.apply(model)
    output = model(**inputs, temperature=0.7, return_dict=True)
    assert_same(model, output, (log_probs, entropy, grads))


class Masks(nn.Module):
    def forward(self, hidden_states, labels=None):
        logits = self.lm_head(hidden_states)
        logits[:, :, 3] = -1.0
        return {"logits": logits}


class Returns(nn.Module):
    def forward(self, hidden_states, labels=None):
        logits = self.lm_head(hidden_states)
        return CausalLMOutputWithPast(logits=logits, loss=logits.logsumexp(-1))


class OfLabels(nn.Module):
    def forward(self, hidden_states, labels=None):
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None:
            loss = logits.logsumexp(-1)[labels]
        return CausalLMOutputWithPast(logits=logits, loss=loss)


@pytest.mark.parametrize(("model_class", "alone"), [(Masks, False), (Returns, False), (OfLabels, True)])
def test_a_forward_that_looks_into_its_logits_without_labels_needs_them(model_class, alone):
    assert lm_head._logits_come_from(model_class.forward, "lm_head") is alone


def test_a_head_that_runs_beside_a_request_makes_logits():
    model = tiny_model("qwen2", "eager")
    lm_head.apply(model)
    model(**engine_inputs(sequences()))
    assert isinstance(model.lm_head(torch.ones(1, model.config.hidden_size)), torch.Tensor)


def test_a_head_that_is_no_plain_linear_layer_or_was_wrapped_is_refused():
    model = tiny_model("qwen2", "eager")
    model.lm_head.forward = model.lm_head.forward
    assert "replaced" in lm_head.fused_obstacle(model)
    model.lm_head = nn.Sequential(nn.Linear(64, 97))
    assert "not a plain linear layer" in lm_head.fused_obstacle(model)


@pytest.mark.parametrize(
    ("requested", "obstacle", "needs_logits", "name"),
    [
        ("auto", None, None, "fused"),
        ("auto", "it caps its logits", None, "chunked"),
        ("auto", None, "actor.calculate_sum_pi_squared", "chunked"),
        ("fused", None, None, "fused"),
        ("chunked", None, None, "chunked"),
        ("full", "it caps its logits", "distillation", "full"),
    ],
)
def test_the_choice_of_logits_follows_the_request_and_the_facts(requested, obstacle, needs_logits, name):
    choice = resolve_logits(requested, obstacle=obstacle, needs_logits=needs_logits, role="actor")
    assert choice.name == name
    assert (obstacle or needs_logits or "") in choice.reason or requested == name


@pytest.mark.parametrize(
    ("requested", "obstacle", "needs_logits", "remedy"),
    [
        ("fused", "it caps its logits", None, "ref.logits=chunked"),
        ("fused", None, "distillation", "ref.logits=chunked"),
        ("chunk", None, None, "ref.logits=chunked"),
    ],
)
def test_logits_that_cannot_be_had_as_asked_are_an_error_that_names_what_can(requested, obstacle, needs_logits, remedy):
    with pytest.raises(ConfigError) as caught:
        resolve_logits(requested, obstacle=obstacle, needs_logits=needs_logits, role="ref")
    assert remedy in caught.value.remedy
