"""Device maps as users write them, checked against what a model is made of. No torch here."""

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.device_map import ModelLayout, TensorInfo, check, override, parse, parse_places, rows

KEY = "sharding.roles.critic.device_map"
WHOLE = {"model.embed_tokens": 0, "model.layers.0-27": 0, "model.norm": 0, "lm_head": 0}
HALVES = {"embed": 0, "layers 0-13": 0, "layers 14-27": 1, "norm": 1, "lm_head": 1}


def layout(num_layers=28, *, tied=False, extra=(), blocks="model.layers"):
    """A decoder: 100 bytes of embedding and of head, 10 and 20 in each layer, 1 of norm; `extra` adds tensors."""
    sizes = {"model.embed_tokens.weight": 100}
    for index in range(num_layers):
        sizes |= {f"{blocks}.{index}.attn.weight": 10, f"{blocks}.{index}.mlp.weight": 20}
    sizes |= {"model.norm.weight": 1}
    tensors = {name: TensorInfo(num_bytes=size, num_elements=size, trained=True) for name, size in sizes.items()}
    tensors["model.rotary_emb.inv_freq"] = TensorInfo(num_bytes=4, num_elements=1, kind="computed")
    tensors["lm_head.weight"] = TensorInfo(num_bytes=100, num_elements=100, trained=True)
    tensors |= dict(extra)
    modules = {}
    for name in tensors:
        parts = name.split(".")
        modules |= dict.fromkeys(".".join(parts[:end]) for end in range(1, len(parts)))
    return ModelLayout(
        model_class="Qwen2ForCausalLM",
        tensors=tensors,
        modules=tuple(modules),
        blocks=tuple(f"{blocks}.{index}" for index in range(num_layers)),
        tied=(("model.embed_tokens.weight", "lm_head.weight"),) if tied else (),
    )


def checked(device_map, model=None, *, num_devices=2, device_numbers=None):
    places = parse(device_map, role="critic", num_devices=num_devices, device_numbers=device_numbers)
    assert isinstance(places, dict)
    return check(places, model or layout(), role="critic", num_devices=num_devices, device_numbers=device_numbers)


def typed(line):
    """The map that a shell and Hydra make of a remedy."""
    (argument,) = shlex.split(line)
    parsed = OverridesParser.create().parse_override(argument)
    assert parsed.key_or_group == KEY
    return parsed.value()


# Places


@pytest.mark.parametrize(
    ("written", "place"), [(0, 0), ("1", 1), ("cuda:1", 1), ("CUDA:0", 0), ("npu:1", 1), (" 1 ", 1), ("cpu", "cpu")]
)
def test_every_form_of_a_place_is_read(written, place):
    assert parse_places({"model": written}, role="critic", num_devices=2) == {"model": place}


def test_keys_that_yaml_makes_numbers_or_nested_maps_are_paths_again():
    nested = {"model": {"embed_tokens": 0, "layers": {0: 0, 1: "1"}}, 3: 1, "": 0}
    assert parse_places(nested, role="critic", num_devices=2) == {
        "model.embed_tokens": 0,
        "model.layers.0": 0,
        "model.layers.1": 1,
        "3": 1,
        "": 0,
    }


@pytest.mark.parametrize("mode", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_modes_are_read_as_they_are(mode):
    assert parse(mode, role="critic", num_devices=2) == mode


# Keys


@pytest.mark.parametrize(
    "layers",
    [
        *(
            "layers 0-13",
            "layers.0-13",
            "model.layers.0-13",
            "model.layers[0-13]",
            "layers [0 - 13]",
            "model.layers 0-13",
        ),
        *("layers 0\N{EN DASH}13", "layers 0..13", "layers 0 to 13", "layers[0 to 13]"),
    ],
)
def test_every_form_of_a_range_of_layers_is_read(layers):
    found = checked({"": 1, layers: 0})
    assert [n for n in range(28) if found.tensors[f"model.layers.{n}.mlp.weight"] == 0] == list(range(14))


@pytest.mark.parametrize("key", ["layers.1", "layers 1", "layers[1]", "model.layers.1"])
def test_a_key_matches_whole_names_between_dots(key):
    found = checked({"": 1, key: 0})
    assert [n for n in range(28) if found.tensors[f"model.layers.{n}.mlp.weight"] == 0] == [1]


@pytest.mark.parametrize(
    ("key", "module"), [("norm", "model.norm"), ("embed", "model.embed_tokens"), ("layers", "model.layers")]
)
def test_a_short_name_is_the_one_module_that_it_can_mean(key, module):
    found = checked({"": 1, key: 0})
    assert {name for name, place in found.tensors.items() if place == 0} >= {
        name for name in found.tensors if name.startswith(f"{module}.")
    }
    assert found.tensors["lm_head.weight"] == 1


GPT2 = {
    "transformer.wte.weight": 100,
    **{f"transformer.h.{n}.attn.weight": 10 for n in range(4)},
    "transformer.ln_f.weight": 1,
    "score.weight": 1,
}


def of_other_names(names=GPT2, blocks="transformer.h", **parts):
    """A model whose modules are called otherwise, with the parts that were found in it."""
    tensors = {name: TensorInfo(num_bytes=size, num_elements=size) for name, size in names.items()}
    modules = dict.fromkeys(
        ".".join(name.split(".")[:end]) for name in tensors for end in range(1, len(name.split(".")))
    )
    layers = tuple(f"{blocks}.{n}" for n in range(4))
    return ModelLayout(model_class="Other", tensors=tensors, modules=tuple(modules), blocks=layers, parts=parts)


@pytest.mark.parametrize(
    "device_map",
    [
        {"embed": 0, "layers 0-1": 0, "layers 2-3": 1, "norm": 1, "lm_head": 1},
        {"model.embed_tokens": 0, "model.layers.0-1": 0, "model.layers.2-3": 1, "model.norm": 1, "lm_head": 1},
        {"embeddings": 0, "blocks[0-1]": 0, "layer 2": 1, "layer 3": 1, "final_layer_norm": 1, "head": 1},
    ],
    ids=["short", "as most are called", "yet others"],
)
def test_usual_names_mean_the_models_own_parts_where_no_module_is_called_so(device_map):
    parts = {"embedding": "transformer.wte", "layers": "transformer.h", "norm": "transformer.ln_f", "head": "score"}
    assert {name: place for name, place in checked(device_map, of_other_names(**parts)).modules.items() if place} == {
        "transformer.h.2": 1,
        "transformer.h.3": 1,
        "transformer.ln_f": 1,
        "score": 1,
    }


def test_of_several_modules_of_a_usual_name_the_decoders_is_meant():
    names = {"vision.layers.0.weight": 1, "vision.norm.weight": 1}
    names |= {f"text.layers.{n}.weight": 1 for n in range(4)} | {"text.norm.weight": 1}
    model = of_other_names(names, "text.layers", layers="text.layers", norm="text.norm")
    found = checked({"": 0, "layers 1-3": 1, "norm": 1}, model)
    assert {name for name, place in found.tensors.items() if place} == {
        *(f"text.layers.{n}.weight" for n in (1, 2, 3)),
        "text.norm.weight",
    }


@pytest.mark.parametrize("around", ["base_model.model.{}", "module.{}", "language_model.{}", "_orig_mod.{}"])
def test_what_wrappers_and_other_versions_put_around_a_name_is_left_out(around):
    whole = {"model.embed_tokens": 0, "model.layers.0-27": 0, "model.norm": 1, "lm_head": 1}
    assert checked({around.format(key): place for key, place in whole.items()}) == checked(whole)


def test_a_short_name_does_not_mean_what_lies_inside_of_layers():
    inside = TensorInfo(num_bytes=1, num_elements=1)
    found = checked({"": 1, "norm": 0}, layout(2, extra={"model.layers.0.norm.weight": inside}))
    assert found.tensors["model.norm.weight"] == 0
    assert found.tensors["model.layers.0.norm.weight"] == 1


def test_two_letters_are_no_short_name():
    with pytest.raises(ConfigError) as caught:
        checked({"": 0, "no": 1})
    assert "the nearest are model.norm" in caught.value.expected


def test_the_longest_key_counts_whatever_the_order():
    for device_map in ({"": 0, "model": 1, "model.norm": 0}, {"model.norm": 0, "model": 1, "": 0}):
        found = checked(device_map)
        assert (found.place_of("model.norm"), found.place_of("model.layers.5"), found.place_of("lm_head")) == (0, 1, 0)


def test_two_keys_may_name_one_module_with_one_place():
    assert checked({"": 0, "norm": 1, "model.norm": 1}).place_of("model.norm") == 1


# What the map holds


def test_every_tensor_lies_below_exactly_one_module_of_the_map():
    found = checked(HALVES)
    for name in layout().tensors:
        assert sum(name.startswith(f"{module}.") for module in found.modules) == 1, name
    assert list(found.modules)[:3] == ["model.embed_tokens", "model.layers.0", "model.layers.1"]


def test_a_module_without_layers_may_be_spread_down_to_its_own_tensors():
    part = TensorInfo(num_bytes=1, num_elements=1)
    model = layout(2, extra={"visual.a.weight": part, "visual.b.weight": part, "visual.b.inner.bias": part})
    found = checked({"": 0, "visual.b.weight": 1}, model)
    assert {module: place for module, place in found.modules.items() if module.startswith("visual")} == {
        "visual.a": 0,
        "visual.b.weight": 1,
        "visual.b.inner": 0,
    }


def test_computed_buffers_follow_the_first_layer_where_no_key_names_them():
    split = {"embed": 0, "layers": 1, "norm": 1, "lm_head": 1}
    assert checked(split).place_of("model.rotary_emb") == 1
    assert checked({**split, "rotary_emb": 0}).place_of("model.rotary_emb") == 0


def test_bytes_are_counted_by_place_and_tied_ones_once():
    assert checked(HALVES).bytes_by_place == {0: 100 + 14 * 30 + 4, 1: 14 * 30 + 1 + 100}
    assert checked(HALVES, layout(tied=True)).bytes_by_place == {0: 100 + 14 * 30 + 4, 1: 14 * 30 + 1}


def test_the_table_folds_consecutive_layers_and_shows_the_jobs_device_numbers():
    table = rows(checked(HALVES, device_numbers=(2, 3)))
    assert [(row.modules, row.place, row.device, row.num_bytes) for row in table] == [
        ("model.embed_tokens", 0, 2, 100),
        ("model.layers.0-13", 0, 2, 420),
        ("model.layers.14-27", 1, 3, 420),
        ("model.norm", 1, 3, 1),
        ("model.rotary_emb", 0, 2, 4),
        ("lm_head", 1, 3, 100),
    ]


def test_the_map_as_an_override_reads_back_as_the_same_map():
    found = checked({**HALVES, "norm": "cpu"})
    assert checked(typed(found.override)) == found


def test_keys_that_hydra_does_not_read_are_typed_so_that_it_does():
    line = override("critic", {"model.layers[0-13]": 0, "layers 14": "cpu", "odd:{key}": 1})
    assert typed(line) == {"model.layers.0-13": 0, "layers 14": "cpu", "odd:{key}": 1}


# Notes


def test_a_plain_map_needs_no_note():
    assert checked(HALVES).notes == ()


def test_a_tied_head_elsewhere_is_moved_to_the_embedding_and_said():
    bias = {"lm_head.bias": TensorInfo(num_bytes=1, num_elements=1)}
    found = checked(HALVES, layout(tied=True, extra=bias))
    assert found.tensors["lm_head.weight"] == found.tensors["lm_head.bias"] == 0
    assert found.notes == (
        "lm_head shares its weights with model.embed_tokens: it lies with it on place 0, not where the map put it",
    )


def test_a_tied_head_needs_no_key_and_the_way_back_is_said():
    found = checked({key: place for key, place in HALVES.items() if key != "lm_head"}, layout(tied=True))
    assert found.place_of("lm_head") == 0
    (note,) = found.notes
    assert note == (
        "lm_head, model.embed_tokens share their weights: they lie on place 0, where the last hidden states come back to"
    )


def test_layers_that_share_weights_are_moved_whole():
    model = layout(4)
    model = ModelLayout(**{**vars(model), "tied": (("model.layers.0.mlp.weight", "model.layers.3.mlp.weight"),)})
    found = checked({"": 1, "layers 0-1": 0}, model)
    assert found.tensors["model.layers.3.attn.weight"] == found.tensors["model.layers.3.mlp.weight"] == 0
    assert "model.layers.3 shares its weights with model.layers.0" in found.notes[0]


def test_layers_on_the_host_are_said_to_compute_there():
    (note,) = checked({"": 0, "layers 14-27": "cpu", "norm": "cpu", "lm_head": "cpu"}, num_devices=1).notes
    assert note.startswith("model.layers.14-27, model.norm, lm_head: on the host, where it also computes")


def test_a_map_that_goes_back_and_forth_is_said():
    (note,) = checked({"": 0, "layers 1": 1, "layers 3": 1}).notes
    assert "goes back to an earlier place at model.layers.2, model.layers.3, model.layers.4" in note


def test_an_empty_device_is_said_with_both_ways_out():
    found = checked({"": 2, "embed": 0}, num_devices=4, device_numbers=(4, 5, 6, 7))
    (note,) = found.notes
    assert note == (
        "no layer lies on devices [5,7]: sharding.roles.critic.devices=[4,6] "
        f"'{KEY}={{model.embed_tokens:0,model.layers.0-27:1,model.norm:1,model.rotary_emb:1,lm_head:1}}' "
        f"leaves them to others, {KEY}=auto uses all"
    )


def test_an_empty_device_is_named_by_place_where_its_number_is_not_known():
    (note,) = checked(WHOLE, num_devices=2).notes
    assert note == f"no layer lies on place [1]: {KEY}=auto uses all"


# Mistakes


@pytest.mark.parametrize(
    ("device_map", "expected", "found", "remedy"),
    [
        pytest.param({}, "a place for every module", "an empty map", f"{KEY}=auto", id="empty"),
        pytest.param("blanced", "auto, balanced, balanced_low_0", "blanced", f"{KEY}=balanced", id="mode"),
        pytest.param("cuda:0", "or a map {module: place}", "cuda:0", f"{KEY}=auto", id="a device as mode"),
        pytest.param(
            {"model": 0, "lm_head": "disk"},
            "a position 0 to 1 in critic's own list of 2 devices, or cpu",
            "lm_head: disk",
            f"'{KEY}={{model:0,lm_head:cpu}}'",
            id="disk",
        ),
        pytest.param({"model": "meta"}, "or cpu", "model: meta", f"'{KEY}={{model:cpu}}'", id="meta"),
        pytest.param(
            {"model": "cuda", "norm": 1}, "a position 0 to 1", "model: cuda", f"'{KEY}={{model:0,norm:1}}'", id="cuda"
        ),
        pytest.param({"model": -1}, "a position 0 to 1", "model: -1", f"'{KEY}={{model:0}}'", id="negative"),
        pytest.param({"model": True}, "a position 0 to 1", "model: True", f"'{KEY}={{model:0}}'", id="bool"),
        pytest.param({"model": 1.0}, "a position 0 to 1", "model: 1.0", f"'{KEY}={{model:1}}'", id="fraction"),
        pytest.param(
            {"model": "cuda1", "norm": "device 0"},
            "a position 0 to 1",
            "model: cuda1, norm: device 0",
            f"'{KEY}={{model:1,norm:0}}'",
            id="other words for a place",
        ),
        pytest.param(
            {0: ["embed", "layers 0-13"], 1: ["layers 14-27", "norm", "lm_head"]},
            "{module: place}, and a position 0 to 1",
            "0: ['embed', 'layers 0-13'], 1: ['layers 14-27', 'norm', 'lm_head']",
            f"'{KEY}={{embed:0,layers 0-13:0,layers 14-27:1,norm:1,lm_head:1}}'",
            id="from places to modules",
        ),
        pytest.param({"": 5}, "a position 0 to 1", "'': 5", f"{KEY}=auto", id="whole model out of range"),
        pytest.param(
            {"embed": 0, "layers 0-13": 1, "layers 14-27": 2, "norm": 3, "lm_head": 3},
            "list of 2 devices",
            "layers 14-27: 2, norm: 3, lm_head: 3",
            f"'{KEY}={{embed:0,layers 0-13:0,layers 14-27:1,norm:1,lm_head:1}}'",
            id="map for four devices",
        ),
        pytest.param(
            {"model.norm": 0, "model": {"norm": 1}},
            "one place for each module",
            "model.norm: 0 and model.norm: 1",
            f"'{KEY}={{model.norm:0}}'",
            id="written twice",
        ),
        pytest.param(
            {**HALVES, "model.norm": 0},
            "one place for each module",
            "model.norm on 1 by 'norm' and on 0 by 'model.norm'",
            f"'{KEY}={{model.embed_tokens:0,model.layers.0-13:0,model.layers.14-27:1,model.norm:0,model.rotary_emb:0,"
            "lm_head:1}'",
            id="two names, two places",
        ),
        pytest.param(
            {**HALVES, "layers 14-27": 1, "layers.13-27": 1},
            "one place for each module",
            "model.layers.13 on 0 by 'layers 0-13' and on 1 by 'layers.13-27'",
            f"'{KEY}={{model.embed_tokens:0,model.layers.0-12:0,model.layers.13-27:1,model.norm:1,model.rotary_emb:0,"
            "lm_head:1}'",
            id="ranges that overlap",
        ),
        pytest.param(
            {**WHOLE, "embd": 1},
            "a module of Qwen2ForCausalLM; the nearest are model.embed_tokens",
            "embd: 1",
            f"'{KEY}={{model.embed_tokens:1,model.layers.0-27:0,model.norm:0,lm_head:0}}'",
            id="misspelt",
        ),
        pytest.param(
            {**WHOLE, "model.layer.3": 1},
            "the nearest are model.layers",
            "model.layer.3: 1",
            f"'{KEY}={{model.embed_tokens:0,model.layers.0-2:0,model.layers.3:1,model.layers.4-27:0,model.norm:0,"
            "model.rotary_emb:0,lm_head:0}'",
            id="misspelt list",
        ),
        pytest.param({"zzzzzz": 0}, "the nearest are", "zzzzzz: 0", f"{KEY}=auto", id="no such module"),
        pytest.param(
            {"": 0, "mlp": 1},
            "one module; 'mlp' may be model.layers.0.mlp, model.layers.1.mlp",
            "mlp: 1",
            f"'{KEY}={{model.embed_tokens:0,model.layers.0-27:0,model.norm:0,model.rotary_emb:0,lm_head:0}}'",
            id="ambiguous",
        ),
        pytest.param(
            {**WHOLE, "layers 14-28": 1},
            "layers 0 to 27 of model.layers",
            "layers 14-28: 1",
            f"'{KEY}={{model.embed_tokens:0,model.layers.0-13:0,model.layers.14-27:1,model.norm:0,model.rotary_emb:0,"
            "lm_head:0}'",
            id="beyond the last layer",
        ),
        pytest.param(
            {"layers 13-0": 0, "norm": 1},
            "from the lower to the higher",
            "layers 13-0: 0",
            f"'{KEY}={{model.embed_tokens:0,model.layers.0-27:0,model.norm:1,model.rotary_emb:0,lm_head:1}}'",
            id="descending",
        ),
        pytest.param(
            {**{f"model.layers.{n}": n // 16 for n in range(32)}, "model.embed": 0, "model.norn": 1, "lm_head": 1},
            "layers 0 to 27 of model.layers",
            "model.layers.28: 1, and 5 more such keys",
            "'"
            + KEY
            + "={"
            + ",".join(f"model.layers.{n}:{n // 16}" for n in range(28))
            + ",model.embed_tokens:0,model.norm:1,lm_head:1}'",
            id="the map of a longer model",
        ),
        pytest.param(
            {"norm 0-3": 0, "lm_head": 1},
            "numbered layers below model.norm",
            "norm 0-3: 0",
            f"'{KEY}={{model.embed_tokens:1,model.layers.0-27:1,model.norm:1,model.rotary_emb:1,lm_head:1}}'",
            id="no list",
        ),
        pytest.param(
            {**HALVES, "model.layers.3.mlp": 1, "model.layers.4.mlp": 1},
            "each layer of Qwen2ForCausalLM whole on one place",
            "model.layers.3 on 0 and 1, and 1 more such layers",
            f"'{KEY}={{model.embed_tokens:0,model.layers.0-13:0,model.layers.14-27:1,model.norm:1,model.rotary_emb:0,"
            "lm_head:1}'",
            id="a layer spread",
        ),
        pytest.param(
            {**WHOLE, "lm_head.bias": 1},
            "one place for the tensors that belong to one module",
            "lm_head.weight on 0 and lm_head.bias on 1",
            f"'{KEY}={{model.embed_tokens:0,model.layers.0-27:0,model.norm:0,model.rotary_emb:0,lm_head:0}}'",
            id="a module spread",
        ),
        pytest.param(
            {"embed": 0, "layers 0-9": 0, "layers 12-27": 1, "lm_head": 1},
            "a place for every parameter and buffer",
            "none for 5 of 60: model.layers.10.attn.weight, model.layers.10.mlp.weight, model.layers.11.attn.weight, "
            "model.layers.11.mlp.weight, model.norm.weight, in model.layers.10-11, model.norm",
            f"'{KEY}={{model.embed_tokens:0,model.layers.0-11:0,model.layers.12-27:1,model.norm:1,model.rotary_emb:0,"
            "lm_head:1}'",
            id="modules left out",
        ),
    ],
)
def test_a_wrong_map_is_refused_with_what_to_type_instead(device_map, expected, found, remedy):
    bias = {"lm_head.bias": TensorInfo(num_bytes=1, num_elements=1)} if "lm_head.bias" in device_map else {}
    with pytest.raises(ConfigError) as caught:
        checked(device_map, layout(extra=bias))
    error = caught.value
    assert error.subject == KEY
    assert expected in error.expected
    assert found in error.found
    assert error.consequence == "the run stops before any weight is loaded"
    assert error.remedy == remedy
    if "{" in remedy:
        typed(remedy)


def test_device_numbers_of_the_job_are_refused_with_the_map_in_places():
    with pytest.raises(ConfigError) as caught:
        checked(
            {**HALVES, "embed": 2, "layers 0-13": 2, "layers 14-27": 3, "norm": 3, "lm_head": 3}, device_numbers=(2, 3)
        )
    assert "places count within devices=[2,3], they are not device numbers" in caught.value.expected
    assert "embed: 2, layers 0-13: 2, layers 14-27: 3, norm: 3, lm_head: 3" in caught.value.found
    assert checked(typed(caught.value.remedy)) == checked(HALVES)


def test_a_buffer_of_the_checkpoint_needs_a_place_and_is_named_without_one():
    buffer = TensorInfo(num_bytes=8, num_elements=2, kind="buffer")
    with pytest.raises(ConfigError) as caught:
        checked(HALVES, layout(extra={"model.gate.bias": buffer}))
    assert "none for 1 of 61: model.gate.bias" in caught.value.found


def test_layers_without_a_place_are_named_one_by_one_where_others_lie_between():
    with pytest.raises(ConfigError) as caught:
        checked({"embed": 0, "layers 0-9": 0, "layers 11": 0, "layers 13-27": 1, "norm": 1, "lm_head": 1})
    assert caught.value.found.endswith(", in model.layers.10, model.layers.12")


def test_many_tensors_without_a_place_are_counted():
    with pytest.raises(ConfigError) as caught:
        checked({"embed": 0})
    assert "model.layers.2.attn.weight and 53 more, in model.layers.0-27, model.norm, lm_head" in caught.value.found


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers.3.mlp": 1},
        {"layers 5-20": 1},
        {"embed": 1},
        {"layers 0-9": 1, "layers 5-27": 0},
        {"embd": 0, "layerz 0-27": 1, "norm 3": 1},
        {"layers 20-40": 1, "mlp": 0},
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_the_map_that_a_refusal_offers_is_right(wrong, tied):
    model = layout(tied=tied)
    with pytest.raises(ConfigError) as caught:
        checked(wrong, model)
    assert checked(typed(caught.value.remedy), model).tensors.keys() == model.tensors.keys()
