"""Weights are stored in one dtype and read in another: the numbers of a cast model, gradients in the stored dtype."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from checkpointing_models import SHAPE, packed, qwen2
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from verl_ext_sharding.training import compute_dtype
from verl_ext_sharding.training.checkpointing import Full

BF16 = torch.bfloat16


def cast(model, dtype=BF16):
    """The same model with its parameters stored in another dtype; buffers stay."""
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data = parameter.data.to(dtype)
    return other


def stored(model):
    """Parameters by name, below every wrapper."""
    return dict(model.named_parameters(remove_duplicate=False))


def step(model, inputs=None):
    """Logits, and the gradient of each parameter after one backward pass."""
    model.zero_grad()
    logits = model(**(inputs or packed(24)), use_cache=False).logits
    logits.float().square().mean().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def model(request):
    return qwen2(2, tie_word_embeddings=request.param)


@pytest.fixture
def spread():
    """A small model with one module of each kind, reading its weights in bf16."""
    torch.manual_seed(0)
    made = nn.ModuleDict({"in": nn.Embedding(8, 4), "norm": nn.LayerNorm(4), "out": nn.Linear(4, 8)})
    compute_dtype.apply(made, BF16)
    return made


# Numbers


def test_logits_are_those_of_a_cast_model_bit_for_bit(model):
    expected, _ = step(cast(model))
    compute_dtype.apply(model, BF16)
    with compute_dtype.computing():
        logits, _ = step(model)
    assert logits.dtype == BF16
    assert torch.equal(logits, expected)


def test_each_layer_gives_what_the_layer_of_a_cast_model_gives(model):
    def outputs(of):
        seen = {}
        for name, module in of.named_modules():
            if name.endswith(("proj", "norm", "layernorm", "embed_tokens", "lm_head")):
                module.register_forward_hook(lambda m, args, output, name=name: seen.update({name: output.detach()}))
        with torch.no_grad(), compute_dtype.computing():
            of(**packed(24), use_cache=False)
        return seen

    expected = outputs(cast(model))
    compute_dtype.apply(model, BF16)
    found = outputs(model)
    assert len(found) == 2 * 9 + 3
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_gradients_arrive_on_the_stored_parameters_in_their_own_dtype_with_the_values_of_the_cast_model():
    model = qwen2(2)
    _, expected = step(cast(model))
    before = stored(model)
    compute_dtype.apply(model, BF16)
    with compute_dtype.computing():
        _, gradients = step(model)
    assert gradients.keys() == expected.keys() == before.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, expected[name].float()), name
        assert before[name].grad is gradient


def test_a_tied_weight_gets_the_gradients_of_both_its_uses_in_full_precision():
    untied, tied = qwen2(2), qwen2(2, tie_word_embeddings=True)
    tied.load_state_dict(untied.state_dict())
    with torch.no_grad():
        untied.lm_head.weight.copy_(untied.model.embed_tokens.weight)
        tied.model.embed_tokens.weight.copy_(untied.model.embed_tokens.weight)
    for each in (untied, tied):
        compute_dtype.apply(each, BF16)
    with compute_dtype.computing():
        (_, apart), (_, together) = step(untied), step(tied)
    both = apart["model.embed_tokens.weight"] + apart["lm_head.weight"]
    assert tied.lm_head.weight.dtype == torch.float32
    assert torch.equal(together["model.embed_tokens.weight"], both)


def test_micro_batches_add_up_in_full_precision():
    layer = nn.Linear(1, 1, bias=False)
    compute_dtype.apply(layer, BF16)
    with compute_dtype.computing():
        for value in (256.0, 1.0):  # their sum has more digits than bf16
            layer(torch.full((1, 1), value, dtype=BF16)).sum().backward()
    assert layer.weight.grad.item() == 257.0


def test_a_step_of_the_optimizer_that_bf16_would_swallow_changes_the_stored_weight():
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    compute_dtype.apply(layer, BF16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=2**-12)
    with compute_dtype.computing():
        layer(torch.ones(1, 1, dtype=BF16)).sum().backward()
    optimizer.step()
    assert layer.weight.item() == 1 - 2**-12


# When it acts


def test_outside_the_computation_weights_are_read_as_they_are_stored(spread):
    assert spread["out"].weight is spread["out"]._parameters["weight"]
    with compute_dtype.computing():
        assert spread["out"].weight.dtype == BF16
    assert spread["out"].weight is spread["out"]._parameters["weight"]


def test_after_an_error_weights_are_read_as_they_are_stored(spread):
    with pytest.raises(ZeroDivisionError), compute_dtype.computing():
        1 / 0  # noqa: B018
    assert spread["out"].weight.dtype == torch.float32


def test_a_computation_inside_another_ends_alone(spread):
    with compute_dtype.computing():
        with compute_dtype.computing():
            pass
        assert spread["out"].weight.dtype == BF16


def test_a_model_without_a_compute_dtype_is_not_touched_by_the_computation_of_another():
    layer = nn.Linear(2, 2)
    with compute_dtype.computing():
        assert layer.weight is layer._parameters["weight"]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_modules_that_are_stored_in_the_compute_dtype_stay_as_they_are(dtype):
    layer = nn.Linear(2, 2, dtype=dtype)
    compute_dtype.apply(layer, dtype)
    assert type(layer) is nn.Linear


def test_only_what_is_stored_in_another_dtype_is_cast_and_integers_never():
    module = nn.Module()
    module.wide = nn.Parameter(torch.ones(2))
    module.narrow = nn.Parameter(torch.ones(2, dtype=BF16))
    module.packed = nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False)
    module.register_parameter("absent", None)
    compute_dtype.apply(module, BF16)
    with compute_dtype.computing():
        assert (module.wide.dtype, module.absent) == (BF16, None)
        assert module.narrow is module._parameters["narrow"]
        assert module.packed is module._parameters["packed"]


# What stays the model's


def test_parameters_names_and_state_are_those_of_the_model(model):
    names, parameters = list(model.state_dict()), stored(model)
    classes = [type(module).__name__ for module in model.modules()]
    compute_dtype.apply(model, BF16)
    with compute_dtype.computing():
        state = model.state_dict()
        assert list(state) == names
        assert {value.dtype for value in state.values()} == {torch.float32}
        assert all(parameter is parameters[name] for name, parameter in stored(model).items())
    assert [type(module).__name__ for module in model.modules()] == classes
    assert isinstance(model.lm_head, nn.Linear)
    assert repr(model) == repr(qwen2(2, tie_word_embeddings=model.config.tie_word_embeddings))


def test_a_state_dict_can_be_loaded_while_it_is_applied(spread):
    state = {name: torch.zeros_like(value) for name, value in spread.state_dict().items()}
    spread.load_state_dict(state)
    assert not any(parameter.any() for parameter in spread.parameters())
    assert {parameter.dtype for parameter in spread.parameters()} == {torch.float32}


def test_a_parameter_that_is_assigned_takes_the_place_of_the_old_one_and_is_cast(spread):
    weight = nn.Parameter(torch.ones(8, 4))
    spread["out"].weight = weight
    assert spread["out"]._parameters["weight"] is weight
    with compute_dtype.computing():
        assert torch.equal(spread["out"].weight, weight.to(BF16))


def test_a_deep_copy_computes_as_the_model_does_with_weights_of_its_own(spread):
    other = copy.deepcopy(spread)
    with compute_dtype.computing():
        assert other["out"].weight.dtype == BF16
    assert other["out"].weight is not spread["out"].weight
    compute_dtype.remove(other)
    assert type(other["out"]) is nn.Linear
    assert type(spread["out"]) is not nn.Linear


def test_a_pickled_model_computes_as_it_did_with_the_same_weights(spread):
    other = pickle.loads(pickle.dumps(spread))
    assert torch.equal(other["out"].weight, spread["out"].weight)
    with compute_dtype.computing():
        assert other["out"].weight.dtype == BF16
    compute_dtype.remove(other)
    assert type(other["out"]) is nn.Linear


# Applying and removing


def test_applying_twice_is_applying_once(spread):
    classes = [type(module) for module in spread.modules()]
    compute_dtype.apply(spread, BF16)
    assert [type(module) for module in spread.modules()] == classes


def test_another_dtype_takes_the_place_of_the_first(spread):
    compute_dtype.apply(spread, torch.float16)
    with compute_dtype.computing():
        assert spread["out"].weight.dtype == torch.float16
    compute_dtype.remove(spread)
    assert type(spread["out"]) is nn.Linear


def test_after_removal_every_class_is_the_original_and_nothing_is_left(model):
    before = [(type(module), set(vars(module))) for module in model.modules()]
    compute_dtype.apply(model, BF16)
    compute_dtype.remove(model)
    compute_dtype.remove(model)
    after = [(type(module), set(vars(module))) for module in model.modules()]
    assert all(now[0] is then[0] and now[1] == then[1] for now, then in zip(after, before, strict=True))
    with compute_dtype.computing():
        assert model.lm_head.weight is model.lm_head._parameters["weight"]


# With recomputation, compilation and adapters


def test_recomputation_in_the_backward_pass_casts_again_and_gives_the_same_gradients():
    plain, recomputing = qwen2(2), qwen2(2)
    Full().apply(recomputing)
    for each in (plain, recomputing):
        compute_dtype.apply(each, BF16)
    with compute_dtype.computing():
        (logits, gradients), (again, recomputed) = step(plain), step(recomputing)
    assert torch.equal(logits, again)
    assert all(torch.equal(gradients[name], recomputed[name]) for name in gradients)


def test_a_checkpointed_layer_keeps_no_cast_weight_for_the_backward_pass():
    layer = nn.Linear(64, 64)
    compute_dtype.apply(layer, BF16)
    kept = {True: [], False: []}
    for recomputes, saved in kept.items():
        inputs = torch.ones(1, 64, dtype=BF16, requires_grad=True)
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t
        )
        with compute_dtype.computing(), hooks:
            (checkpoint(layer, inputs, use_reentrant=False) if recomputes else layer(inputs)).sum().backward()
    assert 64 * 64 in kept[False]
    assert 64 * 64 not in kept[True]


def test_a_compiled_layer_is_compiled_once_for_all_steps_and_gives_the_same_numbers():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(4, 8), nn.RMSNorm(8), nn.Linear(8, 4))
    compute_dtype.apply(layer, BF16)
    compiled, counter = copy.deepcopy(layer), CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    run = torch.compile(compiled, backend=counter, fullgraph=True)
    optimizer = torch.optim.SGD([*layer.parameters(), *compiled.parameters()], lr=0.5)
    for _ in range(3):
        inputs = torch.randn(3, 4, dtype=BF16)
        with compute_dtype.computing():
            expected, found = layer(inputs), run(inputs)
            (expected.sum() + found.sum()).backward()
        assert torch.equal(found, expected)
        optimizer.step()
        optimizer.zero_grad()
    assert counter.frame_count == 1
    assert found.dtype == BF16


def test_a_compiled_layer_reads_stored_weights_where_nothing_computes():
    layer = nn.Linear(4, 4)
    compute_dtype.apply(layer, BF16)
    torch._dynamo.reset()
    run = torch.compile(layer, backend="eager", fullgraph=True)
    with compute_dtype.computing():
        assert run(torch.ones(1, 4, dtype=BF16)).dtype == BF16
    assert run(torch.ones(1, 4)).dtype == torch.float32


@pytest.fixture
def adapted():
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj", "embed_tokens"], init_lora_weights=False)
    return peft.get_peft_model(qwen2(2), config)


def test_adapters_are_cast_with_the_layers_that_they_adapt(adapted):
    expected, expected_gradients = step(cast(adapted))
    compute_dtype.apply(adapted, BF16)
    with compute_dtype.computing():
        logits, gradients = step(adapted)
    assert torch.equal(logits, expected)
    assert gradients.keys() == expected_gradients.keys()
    assert all("lora_" in name for name in gradients)
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, expected_gradients[name].float()), name


def test_adapters_are_merged_as_they_are_stored(adapted):
    plain = copy.deepcopy(adapted)
    compute_dtype.apply(adapted, BF16)
    for each in (plain, adapted):
        each.merge_adapter()
    name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    assert torch.equal(adapted.get_parameter(name), plain.get_parameter(name))
    assert adapted.get_parameter(name).shape == (SHAPE["hidden_size"], SHAPE["hidden_size"])
