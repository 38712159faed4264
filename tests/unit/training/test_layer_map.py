"""Device maps of real models on meta: what is read of them, and how their layers are divided."""

import random

import pytest
import torch
import transformers
from accelerate.utils import check_device_map
from accelerate.utils.modeling import compute_module_sizes
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForTokenClassification
from transformers.integrations.accelerate import expand_device_map

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.device_map import ModelLayout, TensorInfo
from verl_ext_sharding.training.layer_map import (
    DeviceNeeds,
    balanced_cuts,
    check_transformers,
    describe,
    infer,
    plan_layers,
)

KEY = "sharding.roles.critic.device_map"
NUM_LAYERS = 6
SIZES = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def on_meta(name):
    tied = name in ("qwen2 tied", "gemma2")
    sizes = {**SIZES, "tie_word_embeddings": tied}
    model_type, auto = name.split()[0], AutoModelForCausalLM
    if name == "qwen2 value model":
        auto, sizes["num_labels"] = AutoModelForTokenClassification, 1
    if name in ("qwen2_5_vl", "qwen3_vl", "gemma3"):
        tower = {"depth": 4, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
        auto, sizes = AutoModelForImageTextToText, {"text_config": sizes, "vision_config": tower}
    config = AutoConfig.for_model(model_type, **sizes)
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.float32)
    if name == "qwen2 lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]), low_cpu_mem_usage=True)
    return model


NAMES = (
    "qwen2 tied",
    "qwen2 untied",
    "llama",
    "mistral",
    "gemma2",
    "gpt_neox",
    "qwen3_moe",
    "qwen2 value model",
    "qwen2_5_vl",
    "qwen2 lora",
)
BLOCKS = {
    "gpt_neox": "gpt_neox.layers",
    "qwen2_5_vl": "model.language_model.layers",
    "qwen2 lora": "base_model.model.model.layers",
}


@pytest.fixture(scope="module")
def models():
    return {name: on_meta(name) for name in NAMES}


def plan(model, device_map="auto", *, num_devices=2, **options):
    return plan_layers(model, device_map, role="critic", num_devices=num_devices, **options)


def runs(layer_map, layout):
    """Places in the order of execution, without what follows others: computed buffers and tied heads."""
    followers = {name.rpartition(".")[0] for name in layout.aliases}
    return [
        place
        for name, place in layer_map.tensors.items()
        if layout.tensors[name].kind != "computed" and name.rpartition(".")[0] not in followers
    ]


# Reading a model


@pytest.mark.parametrize("name", NAMES)
def test_a_layout_holds_every_tensor_and_every_layer(models, name):
    layout = describe(models[name], role="critic")
    named = {n for n, _ in models[name].named_parameters(remove_duplicate=False)}
    assert layout.tensors.keys() == named | {n for n, _ in models[name].named_buffers(remove_duplicate=False)}
    layers = BLOCKS.get(name, "model.layers")
    assert [block for block in layout.blocks if block.startswith(layers)] == [
        f"{layers}.{n}" for n in range(NUM_LAYERS)
    ]
    assert len(layout.blocks) == NUM_LAYERS + (4 if name == "qwen2_5_vl" else 0)
    assert all(info.kind == "computed" for n, info in layout.tensors.items() if n.endswith("inv_freq"))


SHORT = {"embed": 0, "layers 0-2": 0, "layers 3-5": 1, "norm": 1, "lm_head": 1}
OWN_NAMES = {
    "llama": ("model.embed_tokens", "model.layers", "model.norm", "lm_head"),
    "qwen2 value model": ("model.embed_tokens", "model.layers", "model.norm", "score"),
    "gpt_neox": ("gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm", "embed_out"),
    "gptj": ("transformer.wte", "transformer.h", "transformer.ln_f", "lm_head"),
    "opt": ("model.decoder.embed_tokens", "model.decoder.layers", "model.decoder.final_layer_norm", "lm_head"),
    "qwen2_5_vl": (*(f"model.language_model.{name}" for name in ("embed_tokens", "layers", "norm")), "lm_head"),
    "qwen3_vl": (*(f"model.language_model.{name}" for name in ("embed_tokens", "layers", "norm")), "lm_head"),
    "gemma3": (*(f"model.language_model.{name}" for name in ("embed_tokens", "layers", "norm")), "lm_head"),
}
"""Embedding, layers, norm and head, as each model calls them."""


@pytest.mark.parametrize("name", OWN_NAMES)
def test_a_map_in_short_names_is_read_for_each_family_as_its_decoders(models, name):
    model = models.get(name) or on_meta(name)
    embedding, layers, norm, head = OWN_NAMES[name]
    written = {embedding: 0, f"{layers}.0-2": 0, f"{layers}.3-5": 1, norm: 1, head: 1}
    assert plan(model, {"": 0} | SHORT).override == plan(model, {"": 0} | written).override


@pytest.mark.parametrize("name", ["qwen2 tied", "gemma2", "qwen2 untied", "gpt_neox", "qwen2 value model"])
def test_tied_weights_are_read_with_the_embedding_first(models, name):
    tied = (("model.embed_tokens.weight", "lm_head.weight"),) if name in ("qwen2 tied", "gemma2") else ()
    assert describe(models[name], role="critic").tied == tied


def test_weights_that_the_model_declares_tied_are_tied_before_they_are():
    model = on_meta("qwen2 tied")
    model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    assert describe(model, role="critic").tied == (("model.embed_tokens.weight", "lm_head.weight"),)


def test_the_declared_source_is_first_where_its_head_is_registered_before_it():
    model = nn.Module()
    model.head, model.embed = nn.Linear(2, 2, bias=False), nn.Embedding(2, 2)
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    model.head.weight = model.embed.weight
    model.all_tied_weights_keys = {"head.weight": "embed.weight"}
    assert describe(model, role="critic").tied == (("embed.weight", "head.weight"),)


def test_bytes_are_those_of_the_stored_dtype_and_buffers_keep_theirs(models):
    model = models["llama"]
    assert sum(t.num_bytes for t in describe(model, role="critic").tensors.values()) == compute_module_sizes(model)[""]
    layout = describe(model, role="critic", dtype=torch.bfloat16)
    parameters = sum(t.num_bytes for t in layout.tensors.values() if t.kind == "parameter")
    assert parameters == 2 * sum(p.numel() for p in model.parameters())
    assert layout.tensors["model.rotary_emb.inv_freq"].num_bytes == 4 * model.model.rotary_emb.inv_freq.numel()


def test_frozen_parameters_are_read_as_not_trained(models):
    tensors = describe(models["qwen2 lora"], role="critic").tensors
    assert {"lora" in name for name, info in tensors.items() if info.trained} == {True}


def test_a_buffer_of_the_checkpoint_is_told_from_a_computed_one():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    model.register_buffer("kept", torch.zeros(1))
    model.register_buffer("made", torch.zeros(1), persistent=False)
    kinds = {
        name: info.kind for name, info in describe(model, role="critic").tensors.items() if name in ("kept", "made")
    }
    assert kinds == {"kept": "buffer", "made": "computed"}


def test_a_model_without_layers_is_refused():
    with pytest.raises(ConfigError) as caught:
        describe(nn.Linear(2, 2), role="critic")
    assert caught.value.subject == KEY
    assert f"neither in Linear of transformers {transformers.__version__}" in caught.value.found
    assert caught.value.remedy.endswith("sharding.roles.critic.layout=fsdp")


# What transformers knows


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        {"model_type": "qwen2"},
        {"model_type": "new", "architectures": ["New"], "auto_map": {"AutoModelForCausalLM": "modeling_new.New"}},
        transformers.Qwen2Config(),
    ],
    ids=["known", "no class", "own code", "config"],
)
def test_models_that_transformers_can_build_pass(config):
    check_transformers(config, role="critic")


@pytest.mark.parametrize(
    ("config", "found", "remedy"),
    [
        (
            {"model_type": "qwen99", "architectures": ["Qwen99"], "transformers_version": "99.1.0"},
            "model type 'qwen99', saved with transformers 99.1.0",
            'pip install --upgrade "transformers>=99.1.0"',
        ),
        ({"model_type": "qwen99"}, "model type 'qwen99'", 'pip install --upgrade "transformers"'),
        (
            {"model_type": "qwen2", "architectures": ["Qwen2ForTomorrow"], "transformers_version": "4.1.0"},
            "class Qwen2ForTomorrow, saved with transformers 4.1.0",
            'pip install --upgrade "transformers"',
        ),
    ],
)
def test_a_model_that_transformers_does_not_know_is_refused_with_the_version_that_does(config, found, remedy):
    with pytest.raises(ConfigError) as caught:
        check_transformers(config, role="critic")
    assert caught.value.expected == f"a model that transformers {transformers.__version__} knows"
    assert (caught.value.subject, caught.value.found, caught.value.remedy) == (KEY, found, remedy)


# Dividing real models


@pytest.mark.parametrize("num_devices", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_divided_in_order_whole_and_over_all_devices(models, name, num_devices):
    layer_map = plan(models[name], num_devices=num_devices)
    layout = describe(models[name], role="critic")
    places = runs(layer_map, layout)
    assert places == sorted(places)
    assert set(places) == set(range(num_devices))
    for block in layout.blocks:
        assert len({p for n, p in layer_map.tensors.items() if n.startswith(f"{block}.")}) == 1
    for group in layout.tied:
        assert len({layer_map.tensors[n] for n in group}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_libraries_read_the_map_as_it_is_meant(models, name):
    layer_map = plan(models[name], num_devices=3)
    check_device_map(models[name], dict(layer_map.modules))
    assert expand_device_map(dict(layer_map.modules), list(layer_map.tensors)) == dict(layer_map.tensors)


def test_gradients_and_optimizer_states_count_where_they_are():
    layout = ModelLayout(
        model_class="Model",
        tensors={f"layers.{n}.weight": TensorInfo(num_bytes=4, num_elements=1, trained=n < 2) for n in range(6)},
        modules=("layers", *(f"layers.{n}" for n in range(6))),
        blocks=tuple(f"layers.{n}" for n in range(6)),
    )
    weights = infer(layout, role="critic", mode="auto", num_devices=2)
    states = infer(layout, role="critic", mode="auto", num_devices=2, needs=DeviceNeeds(extra_bytes_per_parameter=12))
    assert list(weights.tensors.values()) == [0, 0, 0, 1, 1, 1]
    assert list(states.tensors.values()) == [0, 1, 1, 1, 1, 1]  # 16 and 16 + 4 x 4


def test_a_device_with_less_memory_gets_fewer_layers(models):
    def layers_on_first(first, second):
        layer_map = plan(models["llama"], needs=DeviceNeeds(memory_bytes=(first, second)))
        return sum(layer_map.place_of(f"model.layers.{n}") == 0 for n in range(NUM_LAYERS))

    assert layers_on_first(2**20, 2**20) == 3
    assert layers_on_first(2**20, 3 * 2**20) < 3 < layers_on_first(3 * 2**20, 2**20)


def test_balanced_low_0_leaves_the_first_device_the_embedding_alone(models):
    layer_map = plan(models["llama"], "balanced_low_0", num_devices=3)
    assert [module for module, place in layer_map.modules.items() if place == 0] == ["model.embed_tokens"]
    assert len({layer_map.place_of(f"model.layers.{n}") for n in range(NUM_LAYERS)}) == 2


def test_balanced_low_0_gives_the_first_device_no_more_than_the_others_have_no_room_for(models):
    layout = describe(models["llama"], role="critic")
    block = sum(t.num_bytes for n, t in layout.tensors.items() if n.startswith("model.layers.0."))
    head = layout.tensors["lm_head.weight"].num_bytes + layout.tensors["model.norm.weight"].num_bytes
    memory = (2**20, 2 * block, 2 * block + head)
    layer_map = plan(models["llama"], "balanced_low_0", num_devices=3, needs=DeviceNeeds(memory_bytes=memory))
    assert [layer_map.place_of(f"model.layers.{n}") for n in range(NUM_LAYERS)] == [0, 0, 1, 1, 2, 2]


def test_sequential_fills_one_device_after_the_other_and_says_which_stay_empty(models):
    needs = DeviceNeeds(memory_bytes=(2**20,) * 3)
    layer_map = plan(models["llama"], "sequential", num_devices=3, device_numbers=(1, 2, 3), needs=needs)
    assert layer_map.bytes_by_place[0] > 0
    assert layer_map.bytes_by_place[1] == layer_map.bytes_by_place[2] == 0
    assert layer_map.notes[0].startswith("no layer lies on devices [2,3]: sharding.roles.critic.devices=[1]")


def test_sequential_uses_a_device_to_its_last_byte(models):
    layout = describe(models["llama"], role="critic")
    modules = ("model.embed_tokens.", "model.rotary_emb.", "model.layers.0.", "model.layers.1.")
    first = sum(tensor.num_bytes for name, tensor in layout.tensors.items() if name.startswith(modules))
    for memory, count in ((first, 2), (first - 1, 1)):
        layer_map = plan(models["llama"], "sequential", needs=DeviceNeeds(memory_bytes=(memory, 2**30)))
        assert sum(layer_map.place_of(f"model.layers.{n}") == 0 for n in range(NUM_LAYERS)) == count


def test_sequential_without_known_memory_is_refused(models):
    with pytest.raises(ConfigError) as caught:
        plan(models["llama"], "sequential")
    assert caught.value.remedy == f"sharding.memory.gpu_gib=80, or {KEY}=auto"


def test_a_tied_head_lies_with_the_embedding_and_the_way_back_is_said(models):
    layer_map = plan(models["qwen2 tied"])
    assert layer_map.place_of("lm_head") == layer_map.place_of("model.embed_tokens") == 0
    assert layer_map.place_of("model.norm") == 1
    assert any("where the last hidden states come back to" in note for note in layer_map.notes)


def test_rotary_buffers_lie_with_the_first_layer(models):
    for mode in ("auto", "balanced_low_0"):
        layer_map = plan(models["llama"], mode, num_devices=3)
        assert layer_map.place_of("model.rotary_emb") == layer_map.place_of("model.layers.0")


def test_more_devices_than_modules_leave_the_rest_empty_and_say_so(models):
    layer_map = plan(models["llama"], num_devices=NUM_LAYERS + 5, device_numbers=range(NUM_LAYERS + 5))
    assert list(layer_map.bytes_by_place.values()).count(0) == 2  # embedding, layers, norm and head have one each
    assert layer_map.notes == (
        'no layer lies on devices [9,10]: sharding.roles.critic.devices="0-8" leaves them to others',
    )


# Models that don't fit

GIB = 2**30


def big(num_layers=4):
    """Layers of 1 GiB in float32, all trained."""
    tensors = {
        f"layers.{n}.weight": TensorInfo(num_bytes=GIB, num_elements=GIB // 4, trained=True) for n in range(num_layers)
    }
    blocks = tuple(f"layers.{n}" for n in range(num_layers))
    return ModelLayout(model_class="Model", tensors=tensors, modules=("layers", *blocks), blocks=blocks)


@pytest.mark.parametrize("mode", ["auto", "balanced_low_0", "sequential"])
def test_a_model_that_does_not_fit_is_refused_with_needed_and_free_memory_and_ways_out(mode):
    needs = DeviceNeeds(memory_bytes=(5 * GIB, 5 * GIB), extra_bytes_per_parameter=12)  # 4 GiB a layer
    with pytest.raises(ConfigError) as caught:
        infer(big(), role="critic", mode=mode, num_devices=2, device_numbers=(2, 3), needs=needs)
    error = caught.value
    loads = {"sequential": ("4.0", "12.0")}.get(mode, ("8.0", "8.0"))
    assert error.subject == KEY
    assert error.found == (
        f"device 2: {loads[0]} of 5.0, device 3: {loads[1]} of 5.0 GiB needed; in all 16.0 of 10.0 GiB"
    )
    assert error.remedy == (
        "4 devices with 5.0 GiB free each in sharding.roles.critic.devices, "
        "or sharding.roles.critic.dtype=bfloat16, or offload.params=true for a role that shares these devices"
    )


def test_a_layer_larger_than_any_device_is_not_answered_with_more_devices():
    with pytest.raises(ConfigError) as caught:
        infer(big(), role="critic", mode="auto", num_devices=2, needs=DeviceNeeds(memory_bytes=(GIB // 2,) * 2))
    assert "devices with" not in caught.value.remedy
    assert caught.value.remedy.startswith("sharding.roles.critic.dtype=bfloat16")


def test_a_written_map_that_overfills_a_device_is_refused_with_auto_where_that_fits(models):
    needs = DeviceNeeds(memory_bytes=(250_000, 250_000))
    with pytest.raises(ConfigError) as caught:
        plan(models["llama"], {"": 1, "embed": 0}, needs=needs)
    assert caught.value.remedy.startswith(f"{KEY}=auto, or ")
    plan(models["llama"], "auto", needs=needs)


@pytest.mark.parametrize("mode", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_nothing_goes_to_the_host_that_was_not_asked_to(mode):
    layer_map = infer(big(), role="critic", mode=mode, num_devices=2, needs=DeviceNeeds(memory_bytes=(2 * GIB,) * 2))
    assert list(layer_map.modules.values()) == [0, 0, 1, 1]


def test_computed_buffers_do_not_move_their_layer_before_what_comes_first():
    tensors = {
        "rotary.freq": TensorInfo(num_bytes=1, num_elements=1, kind="computed"),
        "patch.weight": TensorInfo(num_bytes=50, num_elements=50),
        "layers.0.weight": TensorInfo(num_bytes=50, num_elements=50),
        "layers.1.weight": TensorInfo(num_bytes=100, num_elements=100),
    }
    blocks = ("layers.0", "layers.1")
    layout = ModelLayout(
        model_class="Model", tensors=tensors, modules=("rotary", "patch", "layers", *blocks), blocks=blocks
    )
    found = infer(layout, role="critic", mode="auto", num_devices=3)
    assert (found.place_of("patch"), found.place_of("layers.0"), found.place_of("rotary")) == (0, 1, 1)


# Any sizes


def least_maximum(costs, num_devices):
    """The best maximum of consecutive groups, by bisection: fill groups up to a limit, and count them."""
    low, high = max(costs), sum(costs)
    while low < high:
        limit, groups, load = (low + high) // 2, 1, 0
        for cost in costs:
            groups, load = (groups + 1, cost) if load + cost > limit else (groups, load + cost)
        low, high = (low, limit) if groups <= num_devices else (limit + 1, high)
    return low


def random_layout(rng):
    sizes = {"embed.weight": rng.randrange(1, 10**6)}
    sizes |= {f"layers.{n}.weight": rng.randrange(1, 10**6) for n in range(rng.randrange(8, 40))}
    sizes |= {"norm.weight": rng.randrange(1, 100), "head.weight": sizes["embed.weight"]}
    tensors = {name: TensorInfo(num_bytes=4 * size, num_elements=size, trained=True) for name, size in sizes.items()}
    blocks = tuple(name.rpartition(".")[0] for name in tensors if name.startswith("layers"))
    tied = (("embed.weight", "head.weight"),) if rng.random() < 0.5 else ()
    return ModelLayout(
        model_class="Model",
        tensors=tensors,
        modules=("embed", "layers", *blocks, "norm", "head"),
        blocks=blocks,
        tied=tied,
    )


@pytest.mark.parametrize("seed", range(24))
def test_any_model_is_divided_as_evenly_as_consecutive_layers_allow(seed):
    rng = random.Random(seed)
    layout, num_devices = random_layout(rng), 2 + seed % 7
    layer_map = infer(
        layout,
        role="critic",
        mode=rng.choice(["auto", "balanced"]),
        num_devices=num_devices,
        needs=DeviceNeeds(memory_bytes=(10**12,) * num_devices, extra_bytes_per_parameter=12),
    )
    assert layer_map.tensors.keys() == layout.tensors.keys()
    places = runs(layer_map, layout)
    assert places == sorted(places)
    assert set(places) == set(range(num_devices))
    costs = [16 * t.num_elements for name, t in layout.tensors.items() if name not in layout.aliases]
    loads = [0] * num_devices
    for name in layout.tensors.keys() - layout.aliases:
        loads[layer_map.tensors[name]] += 16 * layout.tensors[name].num_elements
    assert max(loads) == least_maximum(costs, num_devices)


def test_of_equal_maxima_the_most_even_cut_is_taken():
    assert balanced_cuts([10, 1, 1, 1, 1], (1, 1, 1)) == (1, 3, 5)
