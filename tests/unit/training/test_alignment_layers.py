"""Models over four fake devices: right devices, the numbers of one device, and no copy that isn't needed.

The fake devices belong to a process, so all cases run in one subprocess (this file as a script), and the tests read what
each of them found.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import traceback
import weakref
from pathlib import Path

import pytest
import torch
from checkpointing_models import SHAPE, batch, gpt_neox, llama, loss_of, qwen2
from fake_devices import MISMATCH, FakeDevices
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3nTextConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2ForTokenClassification,
)

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.training import alignment
from verl_ext_sharding.training.checkpointing import Full

TESTS = Path(__file__).resolve().parents[2]
DECODER = {
    "model": 3,  # the norm, and the rotary frequencies, which have to follow
    "model.embed_tokens": 0,
    **{f"model.layers.{index}": index for index in range(4)},
}
NEOX = {name.replace("model", "gpt_neox").replace("embed_tokens", "embed_in"): at for name, at in DECODER.items()}
MODELS = {
    "qwen2": (qwen2, {**DECODER, "lm_head": 3}),
    "llama": (llama, {**DECODER, "lm_head": 3}),
    "gpt_neox": (lambda: gpt_neox(dropout=0.0), {**NEOX, "lm_head": 3, "embed_out": 3}),
}


def run(bench, model, inputs, output=None):
    """Loss, gradients as values, and where what ended; the inputs are on the host."""
    model.zero_grad(set_to_none=True)
    device = None if output is None else bench.device(output)
    alignment.apply(model, output_device=device)
    bench.copies.clear()
    with bench:
        logits = model(**inputs, use_cache=False).logits
        forward_copies = list(bench.copies)
        loss = loss_from(logits.cpu(), inputs)
        loss.backward()
    grads = {name: bench.values(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return logits.device, loss.detach(), grads, forward_copies


def loss_from(logits, inputs):
    labels = inputs["input_ids"] % logits.shape[-1]
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


def on_one_device(model, inputs):
    model = copy.deepcopy(model)
    loss = loss_from(model(**inputs, use_cache=False).logits, inputs)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def difference(reference, loss, grads):
    assert grads.keys() == reference[1].keys()
    return max([abs(loss - reference[0]).item(), *((grads[n] - g).abs().max().item() for n, g in reference[1].items())])


def compared(bench, model, devices, prepare=lambda model: None, output=3, inputs=None):
    inputs = batch() if inputs is None else inputs
    reference = on_one_device(model, inputs)
    bench.place(model, devices)
    before = bench.devices(model)
    prepare(model)
    at, loss, grads, copies = run(bench, model, inputs, output)
    after = bench.devices(model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    return {
        "difference": difference(reference, loss, grads),
        "output": str(at),
        "moved_weights": [name for name, _ in model.named_parameters() if before[name] != after[name]],
        "grads_elsewhere": [n for n, d in bench.grad_devices(model).items() if d != after[n]],
        "without_grad": sorted(trained - grads.keys()),
        "rotary": sorted({after[name] for name, _ in model.named_buffers()}),
        "copies": [[str(one.source), str(one.target), list(one.shape)] for one in copies],
    }


def checkpoint_by_transformers(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def token_classifier():
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPE, num_hidden_layers=4, num_key_value_heads=2, num_labels=1, attn_implementation="sdpa")
    config.classifier_dropout = 0.0
    return Qwen2ForTokenClassification(config).train()


def mismatch_without_alignment(bench):
    messages = {}
    for name, (build, devices) in MODELS.items():
        model = build()
        bench.place(model, devices)
        alignment.apply(model)
        alignment.remove(model)
        inputs = {key: bench.on(0, value) for key, value in batch().items()}
        with bench:
            try:
                loss_of(model, inputs, use_cache=False)
            except RuntimeError as error:
                messages[name] = str(error)
    return messages


def lora(bench):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(qwen2(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    devices = {f"base_model.model.{name}": at for name, at in MODELS["qwen2"][1].items()}
    found = compared(bench, model, devices, checkpoint_by_transformers)
    assert alignment.applied(model).boundaries[-1] == "base_model.model.lm_head"
    return found


def adapters_on_another_device_than_their_layer(bench):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(qwen2(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    layers = {f"base_model.model.model.layers.{index}": 1 for index in range(4)}
    adapters = {
        f"{layer}.self_attn.{projection}.{matrix}": 2
        for layer in layers
        for projection in ("q_proj", "v_proj")
        for matrix in ("lora_A", "lora_B")
    }
    return compared(bench, model, {"": 0, **layers, **adapters})


def a_layer_cut_in_two(bench):
    return compared(bench, qwen2(), {**MODELS["qwen2"][1], "model.layers.1.mlp": 2, "model.layers.2.self_attn": 0})


VISION = {
    "depth": 3,
    "hidden_size": 16,
    "out_hidden_size": 64,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
}
PICTURE, NUM_PATCHES, SIDE = 90, 16, 3 * 2 * 4 * 4
"""Id of a picture's place, its patches, and the values in each of them."""


def picture_model():
    """A vision tower that sorts its patches into windows before its layers, and back after them."""
    text = {**SHAPE, "num_hidden_layers": 4, "num_key_value_heads": 2}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config={**VISION, "window_size": 16, "fullatt_block_indexes": [1]},
        image_token_id=PICTURE,
        vision_start_token_id=91,
        vision_end_token_id=92,
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    model.model.visual.requires_grad_(False)
    return model


def picture():
    ids = torch.arange(12)[None].clone()
    ids[0, 3:7] = PICTURE
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.linspace(-1, 1, NUM_PATCHES * SIDE).reshape(NUM_PATCHES, SIDE),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "position_ids": torch.arange(12).expand(3, 1, 12),
    }


TOWER = {"model.visual": 0, "model.visual.blocks.1": 1, "model.visual.blocks.2": 2, "model.visual.merger": 2}


def vision_tower_over_several_devices(bench):
    return compared(bench, picture_model(), {"": 3, "model.language_model": 1, **TOWER}, inputs=picture())


def what_a_tower_gives_to_its_caller(bench):
    """Where the tower's results are, and the decoder's inputs, which the caller adds them to."""
    model = picture_model()
    bench.place(model, {"": 3, "model.language_model.layers": 1, **TOWER})
    alignment.apply(model)
    at = []
    model.model.visual.register_forward_hook(lambda *args: at.append(str(args[-1].pooler_output.device)))
    model.model.get_input_embeddings().register_forward_hook(lambda *args: at.append(str(args[-1].device)))
    with bench, torch.no_grad():
        model(**picture(), use_cache=False)
    return sorted(at)


def layers_that_read_keys_of_earlier_ones(bench):
    """Two of four layers compute keys and values, and write them into a dict from which the others read."""
    config = Gemma3nTextConfig(
        **{**SHAPE, "intermediate_size": [32] * 4, "activation_sparsity_pattern": [0.0] * 4, "head_dim": 16},
        num_hidden_layers=4,
        num_key_value_heads=2,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=SHAPE["vocab_size"],
        laurel_rank=4,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    layers = {f"model.layers.{index}": index for index in range(4)}
    return compared(bench, model, {"": 0, **layers, "model.embed_tokens_per_layer": 2, "model.norm": 3})


def tied_head(bench):
    return compared(bench, qwen2(tie_word_embeddings=True), {**DECODER, "lm_head": 3})


def embedding_away_from_the_first_layer(bench):
    devices = {"": 3, "model.embed_tokens": 0, "model.layers": 1, "model.layers.3": 2}
    return compared(bench, qwen2(), devices)


def layers_in_wrappers(bench):
    """torch's checkpoint wrapper in the place of each layer."""
    model = gpt_neox(dropout=0.0)
    for index, layer in enumerate(list(model.gpt_neox.layers)):
        model.gpt_neox.layers[index] = checkpoint_wrapper(layer)
    return compared(bench, model, {"": 3, "gpt_neox.embed_in": 0, "gpt_neox.layers": 1})


class Pictures(nn.Module):
    """Its first weights are not its embedding's."""

    def __init__(self):
        super().__init__()
        self.vision = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.embed = nn.Embedding(5, 8)

    def get_input_embeddings(self):
        return self.embed

    def forward(self, ids, picture):
        return self.embed(ids) + self.vision(picture)


def embedding_after_other_weights(bench):
    model = Pictures()
    bench.place(model, {"vision.0": 1, "vision.1": 2, "embed": 3})
    made = alignment.apply(model)
    bench.copies.clear()
    with bench:
        out = model(torch.arange(3), torch.ones(3, 8))
    way = [str(one.target) for one in bench.copies if one.shape == (3, 8)]
    return {"input": str(made.input_device), "output": str(out.device), "way": way}


class OwnWeights(nn.Module):
    """Adds weights of its own to what its children return, which are elsewhere, called twice and themselves cut."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))})
        self.shared = self.inner["a"]
        self.own = nn.ParameterList([nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))])

    def forward(self, x, *, residual):
        x = self.inner["a"](x * self.own[0]) + residual + self.own[1]
        return {"out": self.shared(self.inner["b"](x) + x) * self.own[0]}


class LayersAndOwnWeights(nn.Module):
    """Layers in a list, and weights of its own before, between and after them."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x, *, residual):
        for layer in self.layers:
            x = layer(x * self.scale) + residual
        return {"out": x * self.scale}


def own_weights(bench):
    found = []
    for build, devices in (
        (OwnWeights, {"own": 1, "inner.a": 2, "inner.b.0": 1, "inner.b.1": 0}),
        (LayersAndOwnWeights, {"scale": 1, "layers.0": 0, "layers.1": 2}),
    ):
        torch.manual_seed(0)
        model = build()
        one = copy.deepcopy(model)
        x, residual = torch.randn(2, 8), torch.randn(2, 8)
        one(x, residual=residual)["out"].sum().backward()
        bench.place(model, devices)
        made = alignment.apply(model, output_device=torch.device("cpu"))
        with bench:
            out = model(x, residual=residual)["out"]
            out.sum().backward()
        pairs = zip(model.parameters(), one.parameters(), strict=True)
        difference = max((bench.values(p.grad) - q.grad).abs().max().item() for p, q in pairs)
        found.append({"boundaries": made.boundaries, "output": str(out.device), "difference": difference})
    return found


def dropout_with_checkpointing(bench):
    """Each device has its own generator: recomputation has to restore the one that the layer uses."""
    found = {}
    for name, devices in {
        "cut_after_embedding": {"": 3, "gpt_neox.embed_in": 0, "gpt_neox.layers": 1},
        "cut_between_layers": {**NEOX, "lm_head": 3, "embed_out": 3},
    }.items():
        model = gpt_neox(dropout=0.3)
        bench.place(model, devices)
        bench.seed(5)
        _, loss, grads, _ = run(bench, model, batch())
        checkpoint_by_transformers(model)
        bench.seed(5)
        _, again, recomputed, _ = run(bench, model, batch())
        found[name] = difference((loss, grads), again, recomputed)
    return found


def hidden_states_without_gradients(bench):
    """How many inputs of layers are alive at the end of a forward without gradients."""
    model = qwen2()
    bench.place(model, MODELS["qwen2"][1])
    alignment.apply(model)
    inputs, alive = [], []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, args: inputs.append(weakref.ref(args[0])))
    model.lm_head.register_forward_hook(lambda *args: alive.append(sum(ref() is not None for ref in inputs)))
    with bench, torch.no_grad():
        model(**batch(), use_cache=False)
    return {"layers": len(inputs), "alive": alive[0]}


def a_cache_and_hidden_states(bench):
    """What a forward with a KV cache returns, and a second one with it."""
    model = qwen2().eval()
    one = copy.deepcopy(model)
    bench.place(model, MODELS["qwen2"][1])
    alignment.apply(model, output_device=bench.device(1))
    first, second = batch(padded=0)["input_ids"].split(20, dim=1)
    with bench, torch.no_grad():
        out = model(input_ids=first, use_cache=True, output_hidden_states=True)
        after = model(input_ids=second, past_key_values=out.past_key_values, use_cache=True)
    with torch.no_grad():
        whole = one(input_ids=torch.cat([first, second], dim=1)).logits[:, 20:]
    return {
        "type": type(out).__name__,
        "logits": str(out.logits.device),
        "hidden_states": sorted({str(one.device) for one in out.hidden_states}),
        "cache": [str(layer.keys.device) for layer in out.past_key_values.layers],
        "difference": (bench.values(after.logits) - whole).abs().max().item(),
    }


def removed(bench):
    """What is left of an alignment over several devices; whether it is applied again after weights moved."""
    model = qwen2()
    bench.place(model, MODELS["qwen2"][1])
    original = dict(model.named_buffers())
    first = alignment.apply(model)
    again = alignment.apply(model)
    followed = bench.devices(model)["model.rotary_emb.inv_freq"]
    alignment.remove(model)
    back = all(buffer is original[name] for name, buffer in model.named_buffers())
    bench.place(model, MODELS["qwen2"][1])
    alignment.apply(model)
    bench.place(model, MODELS["qwen2"][1])
    alignment.apply(model)
    followed_again = bench.devices(model)["model.rotary_emb.inv_freq"]
    alignment.remove(model)
    hooks = sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())
    alignment.apply(model)
    bench.place(model, {"": 2})
    moved = alignment.apply(model)
    return {
        "same_object": first is again,
        "followed": [followed, followed_again],
        "original_buffers": back,
        "hooks": hooks,
        "after_moving": [str(moved.input_device), list(moved.boundaries)],
        "boundaries": list(first.boundaries),
    }


def cut_module(bench):
    model = qwen2()
    bench.place(model, {"": 0, "model.layers.2.self_attn.q_proj.bias": 1})
    try:
        alignment.apply(model)
    except ConfigError as error:
        return str(error)
    return None


CASES = {
    **{
        f"{name} {how}": lambda bench, name=name, prepare=prepare: compared(
            bench, MODELS[name][0](), MODELS[name][1], prepare
        )
        for name in MODELS
        for how, prepare in {
            "plain": lambda model: None,
            "checkpointed by transformers": checkpoint_by_transformers,
            "checkpointed by us": lambda model: Full().apply(model),
        }.items()
    },
    "value model": lambda bench: compared(bench, token_classifier(), {**DECODER, "score": 3}, output=0),
    **{
        function.__name__: function
        for function in (
            mismatch_without_alignment,
            lora,
            adapters_on_another_device_than_their_layer,
            a_layer_cut_in_two,
            vision_tower_over_several_devices,
            what_a_tower_gives_to_its_caller,
            layers_that_read_keys_of_earlier_ones,
            tied_head,
            embedding_away_from_the_first_layer,
            layers_in_wrappers,
            embedding_after_other_weights,
            own_weights,
            dropout_with_checkpointing,
            hidden_states_without_gradients,
            a_cache_and_hidden_states,
            removed,
            cut_module,
        )
    },
}


def main():
    torch.set_num_threads(1)
    bench, found = FakeDevices(4), {}
    for name, case in CASES.items():
        try:
            found[name] = case(bench)
        except Exception:
            found[name] = {"failed": traceback.format_exc()}
    Path(sys.argv[1]).write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each case found, by name."""
    file = tmp_path_factory.mktemp("fake_devices") / "found.json"
    paths = [str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, str(file)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(file.read_text())

    def of(name):
        result = results[name]
        assert not (isinstance(result, dict) and "failed" in result), result["failed"]
        return result

    return of


TRAINED = [name for name in CASES if name.partition(" ")[0] in MODELS] + [
    "value model",
    "lora",
    "adapters_on_another_device_than_their_layer",
    "a_layer_cut_in_two",
    "vision_tower_over_several_devices",
    "layers_that_read_keys_of_earlier_ones",
    "tied_head",
    "embedding_away_from_the_first_layer",
    "layers_in_wrappers",
]
"""Cases with forward and backward of a whole model."""


@pytest.mark.parametrize("name", TRAINED)
def test_d8_loss_and_gradients_are_those_of_one_device(found, name):
    assert found(name)["difference"] < 1e-5


@pytest.mark.parametrize("name", TRAINED)
def test_d8_outputs_end_on_the_declared_device_and_each_gradient_on_its_weights(found, name):
    result = found(name)
    assert result["output"] == ("fakegpu:0" if name == "value model" else "fakegpu:3")
    assert (result["moved_weights"], result["grads_elsewhere"], result["without_grad"]) == ([], [], [])


@pytest.mark.parametrize("name", MODELS)
def test_without_alignment_the_devices_differ(found, name):
    assert MISMATCH in found("mismatch_without_alignment")[name]


@pytest.mark.parametrize("name", MODELS)
def test_rotary_frequencies_follow_to_the_first_layer(found, name):
    assert found(f"{name} plain")["rotary"] == [0]


@pytest.mark.parametrize("name", MODELS)
def test_a_shared_tensor_goes_to_each_device_once_and_hidden_states_over_each_cut_once(found, name):
    copies = found(f"{name} plain")["copies"]
    hidden = [[source, target] for source, target, shape in copies if shape == [2, 40, 64]]
    assert hidden == [["fakegpu:0", "fakegpu:1"], ["fakegpu:1", "fakegpu:2"], ["fakegpu:2", "fakegpu:3"]]
    for target in ("fakegpu:1", "fakegpu:2", "fakegpu:3"):
        from_first = [shape for source, at, shape in copies if (source, at) == ("fakegpu:0", target)]
        shared = [shape for shape in from_first if shape != [2, 40, 64]]
        assert len(shared) == 4, shared  # cos, sin, mask, positions
    assert [source for source, _, _ in copies].count("cpu") == 2


def test_shared_tensors_are_copied_once_for_the_layers_of_one_device(found):
    copies = found("embedding_away_from_the_first_layer")["copies"]
    to_three_layers = [shape for _, target, shape in copies if target == "fakegpu:1"]
    # the embedding's output, mask and inputs; nothing again for the second and third layer
    assert to_three_layers.count([2, 40, 64]) == 1
    assert len(to_three_layers) <= 4
    assert [shape for _, target, shape in copies if target == "fakegpu:2"].count([1, 40, 16]) == 2


def test_a_wrapper_in_the_list_stands_for_its_layer(found):
    result = found("layers_in_wrappers")
    shared = [shape for source, _, shape in result["copies"] if shape in ([1, 40, 4], [2, 1, 40, 40])]
    assert (result["rotary"], shared) == ([1], [])  # made where the layers are


def test_inputs_go_to_the_embedding_whatever_weights_come_before_it(found):
    result = found("embedding_after_other_weights")
    assert (result["input"], result["output"]) == ("fakegpu:3", "fakegpu:3")


def test_a_tower_gives_its_results_where_the_decoder_has_its_inputs(found):
    assert found("what_a_tower_gives_to_its_caller") == ["fakegpu:1", "fakegpu:1"]


def test_what_a_sequence_passes_on_goes_from_part_to_part_and_its_result_to_the_caller(found):
    way = found("embedding_after_other_weights")["way"]
    assert way == ["fakegpu:3", "fakegpu:1", "fakegpu:2", "fakegpu:3"]


def test_a_module_with_weights_of_its_own_gets_its_childrens_results_back(found):
    children, layers = found("own_weights")
    assert children["boundaries"] == ["", "inner.a", "inner.b", "inner.b.0", "inner.b.1"]
    assert layers["boundaries"] == ["", "layers.0", "layers.1"]
    for result in (children, layers):
        assert result["output"] == "cpu"
        assert result["difference"] < 1e-5


@pytest.mark.parametrize("cut", ["cut_after_embedding", "cut_between_layers"])
def test_recomputed_dropout_is_that_of_the_forward_pass(found, cut):
    assert found("dropout_with_checkpointing")[cut] < 1e-6


def test_no_copy_of_hidden_states_is_kept_without_gradients(found):
    result = found("hidden_states_without_gradients")
    assert result == {"layers": 4, "alive": 0}


def test_a_kv_cache_stays_with_its_layers_and_hidden_states_come_out_with_the_logits(found):
    result = found("a_cache_and_hidden_states")
    assert result["type"] == "CausalLMOutputWithPast"
    assert result["cache"] == [f"fakegpu:{index}" for index in range(4)]
    assert (result["logits"], result["hidden_states"]) == ("fakegpu:1", ["fakegpu:1"])
    assert result["difference"] < 1e-5


def test_removal_leaves_no_hook_and_the_original_buffers(found):
    result = found("removed")
    assert result["same_object"]
    assert result["followed"] == [0, 0]
    assert (result["hooks"], result["original_buffers"]) == (0, True)


def test_boundaries_are_the_whole_the_decoder_and_what_lies_on_one_device_in_it(found):
    layers = [f"model.layers.{index}" for index in range(4)]
    expected = ["", "model", "model.embed_tokens", *layers, "model.norm", "model.rotary_emb", "lm_head"]
    assert found("removed")["boundaries"] == expected


def test_after_weights_moved_it_is_applied_anew(found):
    assert found("removed")["after_moving"] == ["fakegpu:2", [""]]


def test_a_module_whose_own_weights_are_apart_is_refused_by_name(found):
    message = found("cut_module")
    assert "model.layers.2.self_attn.q_proj.weight on fakegpu:0" in message
    assert "model.layers.2.self_attn.q_proj.bias on fakegpu:1" in message


if __name__ == "__main__":
    main()
