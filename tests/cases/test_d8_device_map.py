"""D8, the map: layers over several devices as a user writes them (trl#1691, verl#181), checked before weights are loaded."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.device_map import rows
from verl_ext_sharding.training.layer_map import plan_layers

GIVEN = {"embed": 0, "layers 0-13": 0, "layers 14-27": 1, "norm": 1, "lm_head": 1}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 28,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def planned(device_map, *, tied=False, num_devices=2, device_numbers=None, change=None):
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=tied))
        if change is not None:
            change(model)
    return plan_layers(model, device_map, role="actor", num_devices=num_devices, device_numbers=device_numbers)


def table(layer_map):
    return {row.modules: row.place for row in rows(layer_map)}


def test_the_map_as_given_puts_each_half_on_its_device():
    assert table(planned(GIVEN)) == {
        "model.embed_tokens": 0,
        "model.layers.0-13": 0,
        "model.layers.14-27": 1,
        "model.norm": 1,
        "model.rotary_emb": 0,
        "lm_head": 1,
    }


def test_a_tied_head_is_moved_to_the_embedding_and_said():
    layer_map = planned(GIVEN, tied=True)
    assert layer_map.place_of("lm_head") == layer_map.place_of("model.embed_tokens") == 0
    assert layer_map.notes == (
        "lm_head shares its weights with model.embed_tokens: it lies with it on place 0, not where the map put it",
    )


def test_a_tied_head_on_the_embeddings_device_stays_there():
    layer_map = planned({**GIVEN, "lm_head": 0}, tied=True)
    assert layer_map.place_of("lm_head") == 0
    assert not any("not where the map put it" in note for note in layer_map.notes)


@pytest.mark.parametrize(
    ("left_out", "named"),
    [
        ("norm", "model.norm.weight"),
        ("embed", "model.embed_tokens.weight"),
        ("lm_head", "lm_head.weight"),
        ("layers 14-27", "model.layers.14.self_attn.q_proj.weight"),
    ],
)
def test_a_map_that_misses_a_parameter_is_refused_with_its_name(left_out, named):
    with pytest.raises(ConfigError) as caught:
        planned({key: place for key, place in GIVEN.items() if key != left_out})
    assert caught.value.subject == "sharding.roles.actor.device_map"
    assert named in caught.value.found


def test_a_map_that_misses_a_buffer_is_refused_with_its_name():
    with pytest.raises(ConfigError) as caught:
        planned(GIVEN, change=lambda model: model.model.register_buffer("scale", torch.ones(1)))
    assert "none for 1 of" in caught.value.found
    assert "model.scale" in caught.value.found


def test_places_are_not_the_jobs_device_numbers():
    numbers = {key: place + 2 for key, place in GIVEN.items()}
    with pytest.raises(ConfigError) as caught:
        planned(numbers, device_numbers=(2, 3))
    assert caught.value.remedy == (
        "'sharding.roles.actor.device_map={embed:0,layers 0-13:0,layers 14-27:1,norm:1,lm_head:1}'"
    )


@pytest.mark.parametrize("tied", [False, True])
def test_auto_divides_the_model_in_two_without_a_map(tied):
    layer_map = planned("auto", tied=tied)
    places = [layer_map.place_of(f"model.layers.{n}") for n in range(28)]
    assert places == sorted(places)
    first, second = layer_map.bytes_by_place.values()
    layer = layer_map.num_bytes["model.layers.0"]
    assert abs(first - second) <= layer
