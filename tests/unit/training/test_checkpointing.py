"""Policies keep the numbers of the model and the bytes that they say; apply and remove leave no trace."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from checkpointing_models import MODELS, assert_same, batch, decoder, gpt_neox, hidden_bytes, llama, qwen2, step
from torch import nn

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.training.checkpointing import (
    Auto,
    Budget,
    EveryN,
    Full,
    Off,
    Selective,
    applied,
    recompiles,
    remove,
)
from verl_ext_sharding.training.layers import decoder_layers
from verl_ext_sharding.training.recompute import KeepOutputs
from verl_ext_sharding.training.saved_bytes import LiveStorages, SavedTensors

EAGER = [
    Off(),
    Full(),
    EveryN(2),
    EveryN(3),
    Selective(),
    Selective(("attention",)),
    Selective(("attention", "narrow_matmul")),
    Budget(share=0.5),
    Budget(share=0.1),
    Budget(kept_bytes=500_000),
    Auto(),
]


def layer_bytes(model: nn.Module, inputs: dict[str, torch.Tensor]) -> int:
    """Bytes that the decoder layers keep after a forward pass: everything alive that the layers made, the last output
    included and the embeddings left out."""
    base = (model.get_base_model() if hasattr(model, "get_base_model") else model).base_model
    hidden = base.embed_tokens(inputs["input_ids"])
    positions = torch.arange(hidden.shape[1])[None]
    rotary = base.rotary_emb(hidden, positions)
    with LiveStorages() as made:
        for layer in base.layers:
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
    return made.total_bytes()


@pytest.fixture(params=sorted(MODELS))
def model_and_reference(request):
    model = MODELS[request.param]()
    return model, step(model, batch(), use_cache=False)


@pytest.mark.parametrize("policy", EAGER, ids=str)
def test_loss_and_gradients_are_bit_identical_under_every_eager_policy(model_and_reference, policy):
    model, reference = model_and_reference
    policy.apply(model, device_type="cpu")
    assert_same(reference, step(model, batch(), use_cache=False))


LORA = [Full(), Selective(), Selective(("matmul",)), Selective(("narrow_matmul",)), Budget(share=0.3)]


@pytest.mark.parametrize("policy", LORA, ids=str)
def test_lora_gradients_are_bit_identical_and_nothing_warns_about_inputs_without_gradients(policy):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(qwen2(), peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    reference = step(model, batch(), use_cache=False)
    assert policy.apply(model).num_layers == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = step(model, batch(), use_cache=False)
    assert result[1]
    assert_same(reference, result)


def test_full_keeps_only_the_inputs_of_layers():
    model, inputs = qwen2(), batch(padded=0)
    Full().apply(model)
    kept = layer_bytes(model, inputs)
    random_state = torch.get_rng_state().numel()
    assert 4 * hidden_bytes(inputs) <= kept <= 4 * (hidden_bytes(inputs) + 2 * random_state)


def test_policies_keep_less_in_the_order_that_their_names_promise():
    model, inputs = qwen2(), batch(padded=0)
    policies = {
        "none": Off(),
        "half": EveryN(2),
        "matmul and attention": Selective(),
        "attention": Selective(("attention",)),
        "full": Full(),
    }
    kept = {}
    for name, policy in policies.items():
        policy.apply(model)
        kept[name] = layer_bytes(model, inputs)
    assert kept["half"] - kept["full"] == pytest.approx((kept["none"] - kept["full"]) / 2, rel=0.01)
    assert kept["full"] < kept["attention"] < kept["matmul and attention"] < kept["none"]


@pytest.mark.parametrize("keep", [("attention", "matmul"), ("matmul",), ("narrow_matmul",)], ids=str)
def test_selective_keeps_with_lora_what_it_keeps_without_and_the_narrow_products_of_adapters(keep):
    peft = pytest.importorskip("peft")
    rank, num_adapters, inputs, plain = 4, 4 * 7, batch(padded=0), qwen2()
    Selective(keep).apply(plain)
    lora = peft.get_peft_model(qwen2(), peft.LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules="all-linear"))
    Selective(keep).apply(lora)
    narrow = inputs["input_ids"].numel() * rank * 4
    assert layer_bytes(lora, inputs) <= layer_bytes(plain, inputs) + num_adapters * narrow


@pytest.mark.parametrize(
    ("name", "shapes", "kept"),
    [
        ("mm", [(8, 1536), (1536, 8960)], True),
        ("mm", [(8, 2048), (2048, 16384)], True),  # Gemma's, eight times as wide
        ("mm", [(8, 512), (512, 32768)], True),  # latent attention's
        ("addmm", [(64,), (8, 64), (64, 128)], True),
        ("_grouped_mm", [(8, 768), (4, 768, 2048)], True),
        ("mm", [(8, 1536), (1536, 32)], True),
        ("mm", [(8, 32), (32, 1536)], False),
        ("mm", [(8, 256), (256, 1024)], False),
        ("addmm", [(1536,), (8, 32), (32, 1536)], False),
        ("baddbmm", [(4, 1536, 768), (4, 1536, 32), (4, 32, 768)], False),  # peft adds both factors to experts' weights
    ],
    ids=str,
)
def test_of_matrix_products_selective_runs_those_of_few_terms_again(name, shapes, kept):
    operands = tuple(torch.empty(shape, device="meta") for shape in shapes)
    packet = getattr(torch.ops.aten, name)
    assert KeepOutputs(frozenset({"matmul"}))(packet.default, operands) == kept


def test_every_n_recomputes_one_layer_in_n_and_the_first_of_them():
    model, inputs = qwen2(7), batch(padded=0)
    kept = {}
    for name, policy in {"none": Off(), "third": EveryN(3), "full": Full()}.items():
        policy.apply(model)
        kept[name] = layer_bytes(model, inputs)
    assert kept["none"] - kept["third"] == pytest.approx((kept["none"] - kept["full"]) * 3 / 7, rel=0.01)


def test_selective_recomputes_elementwise_operators_and_no_matrix_product():
    model, inputs = qwen2(1), batch(padded=0)

    class Counter(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.calls = {}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._opname
            self.calls[name] = self.calls.get(name, 0) + 1
            return func(*args, **(kwargs or {}))

    def calls(policy):
        policy.apply(model)
        with Counter() as counter:
            step(model, inputs, use_cache=False)
        return counter.calls

    none, selective, full = calls(Off()), calls(Selective()), calls(Full())
    products = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu")
    assert [selective.get(name) for name in products] == [none.get(name) for name in products]
    assert sum(full.get(name, 0) for name in products) > sum(none.get(name, 0) for name in products)
    assert selective["rsqrt"] > none["rsqrt"]


@pytest.mark.parametrize("share", [0.15, 0.3, 0.5, 0.7, 0.9])
def test_a_share_is_never_exceeded_and_its_half_is_used(share):
    model, inputs = qwen2(12), batch(padded=0)
    Off().apply(model)
    everything = layer_bytes(model, inputs)
    Budget(share=share, compile=False).apply(model)
    kept = layer_bytes(model, inputs)
    assert share / 2 * everything < kept <= share * everything


def test_a_byte_budget_holds_for_every_length_and_short_batches_keep_everything():
    model = qwen2(8)
    lengths = [24, 96, 48, 160, 12]
    Off().apply(model)
    everything = {n: layer_bytes(model, batch(n, padded=0)) for n in lengths}
    budget = everything[48]
    Budget(kept_bytes=budget).apply(model)
    kept = {n: layer_bytes(model, batch(n, padded=0)) for n in lengths}
    assert all(kept[n] <= budget for n in lengths)
    assert kept[24] == everything[24]
    assert kept[12] == everything[12]
    assert kept[160] > budget / 2


def test_longer_rows_are_measured_anew_though_the_batch_has_no_more_tokens():
    model = llama(8)  # eager attention: bytes grow with the square of the length
    inputs = {n: batch(n, num_rows=rows, padded=0) for n, rows in ((16, 16), (128, 2))}
    Off().apply(model)
    everything = {n: layer_bytes(model, inputs[n]) for n in inputs}
    assert everything[128] > 1.2 * everything[16]
    Budget(kept_bytes=everything[16]).apply(model)
    assert layer_bytes(model, inputs[16]) == everything[16]
    assert layer_bytes(model, inputs[128]) <= everything[16]


def test_a_budget_holds_with_lora_where_the_first_input_needs_no_gradient_and_its_layer_keeps_less():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(qwen2(8), peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["down_proj"]))
    inputs = batch(padded=0)
    Off().apply(model)
    budget = layer_bytes(model, inputs) // 2
    Budget(kept_bytes=budget).apply(model)
    assert budget / 2 < layer_bytes(model, inputs) <= budget


def test_a_budget_below_the_inputs_of_layers_is_said_and_keeps_them_alone(caplog):
    model, inputs = qwen2(), batch(padded=0)
    Full().apply(model)
    least = layer_bytes(model, inputs)
    Budget(kept_bytes=1000).apply(model)
    with caplog.at_level(logging.WARNING):
        assert layer_bytes(model, inputs) == least
        layer_bytes(model, inputs)
    assert [record.message for record in caplog.records if "can't be met" in record.message] != []
    assert len(caplog.records) == 1


def test_measuring_a_budget_does_not_move_the_random_numbers_of_dropout():
    model = gpt_neox(dropout=0.3)
    reference = step(model, batch(), use_cache=False)
    Budget(share=0.4).apply(model)
    assert_same(reference, step(model, batch(), use_cache=False))


def test_the_reason_for_an_eager_budget_is_recorded_and_logged(caplog):
    model = qwen2(2)
    with caplog.at_level(logging.INFO):
        done = Budget(share=0.5).apply(model, device_type="cpu")
    assert "compile: true" in done.reason
    assert any("compile: true" in record.message for record in caplog.records)
    assert recompiles(model) == 0


def test_auto_is_full_where_nothing_is_compiled():
    model, inputs = qwen2(), batch(padded=0)
    Full().apply(model)
    least = layer_bytes(model, inputs)
    done = Auto().apply(model, device_type="cpu")
    assert layer_bytes(model, inputs) == least
    assert done.reason is not None


def test_transformers_own_checkpointing_is_switched_off_and_comes_back():
    model, inputs = qwen2(), batch(padded=0)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    Off().apply(model)
    assert not model.is_gradient_checkpointing
    with SavedTensors(exclude=model.parameters()) as saved:
        logits = model(**inputs, use_cache=False).logits
    everything = saved.total_bytes()
    Off().remove(model)
    assert model.is_gradient_checkpointing
    with SavedTensors(exclude=model.parameters()) as saved:
        logits = model(**inputs, use_cache=False).logits
    assert saved.total_bytes() < everything / 2
    assert logits.requires_grad


def test_apply_and_remove_leave_the_layers_as_they_were():
    model = qwen2()
    layers = decoder(model)

    def patched(*args, **kwargs):
        return type(layers[1]).forward(layers[1], *args, **kwargs)

    layers[1].forward = patched
    before = [dict(layer.__dict__) for layer in layers]
    keys, classes = list(model.state_dict()), [type(module) for module in model.modules()]
    for policy in (Full(), Full(), Budget(share=0.5), EveryN(2)):
        policy.apply(model)
        assert list(model.state_dict()) == keys
        assert [type(module) for module in model.modules()] == classes
    remove(model)
    remove(model)
    for layer, attributes in zip(layers, before, strict=True):
        assert layer.__dict__.keys() == attributes.keys()
        assert all(layer.__dict__[name] is value for name, value in attributes.items())
    assert applied(model) is None


def test_the_same_policy_twice_is_one_application():
    model = qwen2()
    first = Full().apply(model)
    assert Full().apply(model) is first
    assert applied(model) is first
    assert Full().apply(model, layers=decoder(model)[:2]).num_layers == 2


def test_a_forward_wrapped_by_others_after_us_stays_theirs_and_loses_our_effect():
    model, inputs = qwen2(), batch(padded=0)
    Off().apply(model)
    everything = layer_bytes(model, inputs)
    Full().apply(model)
    layer = decoder(model)[0]
    ours = layer.forward

    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    layer.forward = theirs
    remove(model)
    assert layer.forward is theirs
    assert layer_bytes(model, inputs) == everything


def test_hooks_of_a_layer_fire_once_in_the_forward_pass_and_not_in_the_recomputation():
    model = qwen2()
    calls = []
    decoder(model)[1].register_forward_hook(lambda module, args, output: calls.append("after"))
    decoder(model)[1].register_forward_pre_hook(lambda module, args: calls.append("before"))
    Full().apply(model)
    step(model, batch(), use_cache=False)
    assert calls == ["before", "after"]


def test_training_with_the_cache_on_writes_no_cache_and_changes_no_number():
    model = gpt_neox(dropout=0.0)
    reference = step(model, batch(), use_cache=False)
    Full().apply(model)
    assert_same(reference, step(model, batch(), use_cache=True))
    output = model(**batch(), use_cache=True)
    assert output.past_key_values is None or output.past_key_values.get_seq_length() == 0


def test_generation_uses_its_cache_while_a_policy_is_applied():
    model = qwen2().eval()
    inputs = batch(8, num_rows=1, padded=0)
    options = {"max_new_tokens": 5, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    reference = model.generate(**inputs, **options)
    Selective().apply(model)
    result = model.generate(**inputs, **options)
    assert torch.equal(reference.sequences, result.sequences)
    assert result.past_key_values.get_seq_length() == reference.past_key_values.get_seq_length() > 0


def test_hidden_states_by_keyword_are_kept_for_the_recomputation():
    model = qwen2(1)
    layer = decoder(model)[0]
    Full().apply(model)
    hidden = torch.randn(1, 8, 64, requires_grad=True)
    rotary = model.model.rotary_emb(hidden, torch.arange(8)[None])
    layer(hidden_states=hidden, position_embeddings=rotary).sum().backward()
    by_name, hidden.grad = hidden.grad, None
    layer(hidden, position_embeddings=rotary).sum().backward()
    assert torch.equal(by_name, hidden.grad)


def test_a_model_without_layers_is_an_error_that_says_what_was_looked_for():
    with pytest.raises(ConfigError, match="GradientCheckpointingLayer") as error:
        Full().apply(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert "_no_split_modules" in str(error.value)
    assert "ModuleList" in str(error.value)


def test_layers_are_found_by_no_split_name_and_by_module_list_where_transformers_marks_none():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.blocks = nn.ModuleList([Block() for _ in range(3)])

    model = Model()
    assert decoder_layers(model) == list(model.blocks)
    model._no_split_modules = ["Linear"]
    assert decoder_layers(model) == [*model.heads, *(block.linear for block in model.blocks)]


@pytest.mark.parametrize("wrap", ["peft", "value_head"])
def test_layers_are_found_through_wrappers(wrap):
    model = qwen2()
    layers = decoder(model)
    if wrap == "peft":
        peft = pytest.importorskip("peft")
        wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))
    else:
        wrapped = nn.ModuleDict({"pretrained_model": model, "v_head": nn.Linear(64, 1)})
    assert decoder_layers(wrapped) == layers
