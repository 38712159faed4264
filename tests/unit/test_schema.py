"""The `sharding` block: its defaults, every key misspelt, every value of the wrong type."""

import dataclasses
import math
import types
import typing
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

import verl_ext_sharding.config
from verl_ext_sharding.config import schema
from verl_ext_sharding.config.schema import CheckpointingConfig, ShardingConfig, unknown_key
from verl_ext_sharding.errors import ConfigError

GROUP = Path(verl_ext_sharding.config.__file__).parent / "group" / "sharding"


def as_block(config):
    """A config as the plain block that a user could have written."""
    return {
        f.name: as_block(value) if dataclasses.is_dataclass(value) else value
        for f in dataclasses.fields(config)
        for value in [getattr(config, f.name)]
    }


def leaves(block, path="sharding"):
    for name, value in block.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}.{name}")
        else:
            yield f"{path}.{name}", value


def blocks(block, path="sharding"):
    yield path
    for name, value in block.items():
        if isinstance(value, dict):
            yield from blocks(value, f"{path}.{name}")


def nested(key, value):
    """`{"roles": {"critic": {"dtype": value}}}` for `sharding.roles.critic.dtype`."""
    for name in reversed(key.split(".")[1:]):
        value = {name: value}
    return value


def typed(text):
    """A value as Hydra reads it."""
    return OverridesParser.create().parse_override(f"x={text}").value()


def hint_of(key):
    cls = ShardingConfig
    *path, name = key.split(".")[1:]
    for part in path:
        cls = typing.get_type_hints(cls)[part]
    return typing.get_type_hints(cls)[name]


def options(hint):
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [option for part in typing.get_args(hint) for option in options(part)]
    return [hint]


DEFAULTS = as_block(ShardingConfig())
LEAVES = dict(leaves(DEFAULTS))
BLOCKS = list(blocks(DEFAULTS))


def refusal(block):
    with pytest.raises(ConfigError) as caught:
        ShardingConfig.parse(block)
    return caught.value


# Defaults


def test_the_yaml_file_and_the_schema_have_the_same_keys_and_defaults():
    base = OmegaConf.to_container(OmegaConf.load(GROUP / "base.yaml"))
    assert dict(leaves(base)) == LEAVES
    assert {key: type(value) for key, value in leaves(base)} == {key: type(value) for key, value in LEAVES.items()}


def test_the_defaults_parse_to_the_defaults():
    assert ShardingConfig.parse(DEFAULTS) == ShardingConfig()
    assert ShardingConfig.parse({}) == ShardingConfig()
    assert ShardingConfig().changed() == {}


@pytest.mark.parametrize("name", ["split.yaml"])
def test_each_group_file_sets_only_keys_that_there_are(name):
    block = OmegaConf.to_container(OmegaConf.load(GROUP / name))
    assert block.pop("defaults") == ["base", "_self_"]
    ShardingConfig.parse(block)


# Walks over every key


@pytest.mark.parametrize("path", BLOCKS)
def test_a_misspelt_key_of_any_block_is_refused_with_the_one_that_was_meant(path):
    block = DEFAULTS
    for part in path.split(".")[1:]:
        block = block[part]
    for name in block:
        for misspelt in (name[:-1], name + "x", name[0] + name):
            if misspelt in block or len(misspelt) < 2:
                continue
            error = refusal(nested(f"{path}.{misspelt}", None))
            assert error.subject == f"{path}.{misspelt}: no such key"
            assert error.found == misspelt
            assert all(known in error.expected for known in block)
            assert error.remedy == f"did you mean {path}.{name}?"


@pytest.mark.parametrize("path", BLOCKS)
def test_a_key_like_none_there_is_is_refused_with_its_removal(path):
    assert refusal(nested(f"{path}.qqq", 1)).remedy == f"remove {path}.qqq"


@pytest.mark.parametrize("path", BLOCKS[1:])
@pytest.mark.parametrize("value", [3, "text", [1], True], ids=str)
def test_a_plain_value_in_place_of_a_block_is_refused_with_a_key_of_it(path, value):
    error = refusal(nested(path, value))
    assert error.subject == path
    assert error.found == str(value)
    key, _, text = error.remedy.strip("'").partition("=")
    assert key.startswith(path)
    assert ShardingConfig.parse(nested(key, typed(text)))


@pytest.mark.parametrize("path", BLOCKS[1:])
def test_null_in_place_of_a_block_leaves_verl_alone(path):
    assert ShardingConfig.parse(nested(path, None)) == ShardingConfig()


def test_null_in_place_of_the_whole_asks_for_nothing():
    assert ShardingConfig.parse(None) == ShardingConfig()


@pytest.mark.parametrize("block", [3, "base", []], ids=str)
def test_the_whole_block_must_be_one(block):
    assert refusal(block).subject == "sharding"


SAMPLES = ["no such word", 7, 0.5, True, [1], {"a": 1}, None]


def accepts(hint, sample):
    """Whether a type hint allows a sample, read independently of the schema's own code."""
    for option in options(hint):
        origin = typing.get_origin(option) or option
        if origin is typing.Literal:
            if sample in typing.get_args(option) and not isinstance(sample, bool):
                return True
        elif option is types.NoneType:
            if sample is None:
                return True
        elif origin is float:
            if isinstance(sample, int | float) and not isinstance(sample, bool):
                return True
        elif origin is int:
            if isinstance(sample, int) and not isinstance(sample, bool):
                return True
        elif dataclasses.is_dataclass(origin):
            continue
        elif isinstance(sample, origin):
            return True
    return False


@pytest.mark.parametrize("key", LEAVES)
def test_a_value_of_the_wrong_type_is_refused_with_its_key_and_value_and_a_type_that_is_right(key):
    hint = hint_of(key)
    for sample in SAMPLES:
        if accepts(hint, sample) or (isinstance(sample, dict) and CheckpointingConfig in options(hint)):
            continue
        error = refusal(nested(key, sample))
        assert error.subject == key, sample
        assert error.found == ("null" if sample is None else str(sample))
        assert error.expected
        assert error.remedy.strip("'").startswith(f"{key}=")


@pytest.mark.parametrize("key", LEAVES)
def test_the_value_that_an_error_offers_is_accepted(key):
    for sample in SAMPLES:
        try:
            ShardingConfig.parse(nested(key, sample))
        except ConfigError as error:
            offered = error.remedy.strip("'").partition("=")[2]
            if offered != "<text>" and error.subject == key:
                ShardingConfig.parse(nested(key, typed(offered)))


@pytest.mark.parametrize("key", LEAVES)
def test_each_changed_key_is_listed_under_its_full_name(key):
    for sample in SAMPLES:
        try:
            config = ShardingConfig.parse(nested(key, sample))
        except ConfigError:
            continue
        assert config.changed() == ({key: sample} if sample != LEAVES[key] else {})


# Words


@pytest.mark.parametrize("key", ["sharding.fit", "sharding.guards.token_ids", "sharding.guards.reward_length"])
def test_a_bare_off_of_a_yaml_file_means_off(key):
    block = OmegaConf.to_container(OmegaConf.create("value: off"))
    assert block["value"] is False
    config = ShardingConfig.parse(nested(key, block["value"]))
    assert config.changed() == {key: "off"}


@pytest.mark.parametrize("value", [True, 0, "Off", "apply ", None], ids=str)
def test_other_spellings_of_a_word_are_refused_with_the_words(value):
    error = refusal({"fit": value})
    assert error.expected == "off or report or apply"
    assert error.remedy == ("sharding.fit=apply" if value == "apply " else "sharding.fit=off")


@pytest.mark.parametrize("value", [True, False, "auto"])
def test_communication_takes_true_false_and_auto(value):
    assert ShardingConfig.parse({"communication": {"p2p": value}}).communication.p2p is value


@pytest.mark.parametrize("value", ["on", "off", 1, None], ids=str)
def test_communication_takes_nothing_else(value):
    assert refusal({"communication": {"p2p": value}}).subject == "sharding.communication.p2p"


# Ranges


@pytest.mark.parametrize(
    ("key", "bad", "good"),
    [
        ("placement.max_colocate_count", [0, -1], [1, 3]),
        ("placement.timeout_s", [0, -1.0, math.nan, math.inf], [0.1, 120]),
        ("memory.gpu_gib", [0, -24, math.nan, math.inf], [21.99]),
        ("memory.host_gib", [0, -1], [180]),
        ("memory.headroom", [-0.1, 1, math.nan], [0, 0.5]),
        ("monitor.interval_s", [0, -1, math.nan, math.inf], [0.5]),
        ("roles.rollout.batch_size", [0, -4], [1]),
        ("roles.rollout.max_new_tokens", [0], [1]),
        ("roles.rollout.gpu_memory_utilization", [0, 1, -0.5, 1.5, math.nan], [0.01, 0.99]),
        ("roles.actor.micro_batch_size", [0, -1], [1]),
        ("roles.ref.max_tokens", [0], [1]),
        ("roles.reward.max_input_tokens", [0, -1], [1, "auto"]),
        ("roles.reward.micro_batch_size", [0], [1]),
        ("roles.teacher.max_tokens", [-1], [1]),
    ],
)
def test_a_number_out_of_range_is_refused_with_its_full_key(key, bad, good):
    for value in bad:
        error = refusal(nested(f"sharding.{key}", value))
        assert error.subject == f"sharding.{key}"
        assert error.found in (str(value), str(float(value)))
        assert error.remedy.startswith(f"sharding.{key}=")
    for value in good:
        ShardingConfig.parse(nested(f"sharding.{key}", value))


# Gradient checkpointing: a switch or a block


CHECKPOINTING = "sharding.roles.critic.gradient_checkpointing"


@pytest.mark.parametrize("value", [True, False, None])
def test_checkpointing_may_be_a_switch(value):
    assert ShardingConfig.parse(nested(CHECKPOINTING, value)).roles.critic.gradient_checkpointing is value


def test_checkpointing_may_be_a_block():
    block = {"policy": "every_n", "every": 3}
    config = ShardingConfig.parse(nested(CHECKPOINTING, block))
    assert config.roles.critic.gradient_checkpointing == CheckpointingConfig(policy="every_n", every=3)
    assert list(config.changed()) == [CHECKPOINTING]


@pytest.mark.parametrize(
    ("block", "key"),
    [
        ({"policy": "half"}, "policy"),
        ({"every": 0}, "every"),
        ({"every": 1.5}, "every"),
        ({"budget": 1.5}, "budget"),
        ({"budget": -0.1}, "budget"),
        ({"budget": math.nan}, "budget"),
        ({"budget": "much"}, "budget"),
        ({"budget": "4 apples"}, "budget"),
        ({"use_reentrant": True}, "use_reentrant"),
    ],
    ids=str,
)
def test_mistakes_inside_the_checkpointing_block_are_named_by_their_full_key(block, key):
    error = refusal(nested(CHECKPOINTING, block))
    assert error.subject == f"{CHECKPOINTING}.{key}"
    assert error.remedy.startswith(f"{CHECKPOINTING}.{key}=")


@pytest.mark.parametrize("value", ["off", "none", False])
def test_a_policy_that_means_none_is_answered_with_false_in_place_of_the_block(value):
    error = refusal(nested(CHECKPOINTING, {"policy": value}))
    assert (error.subject, error.remedy) == (f"{CHECKPOINTING}.policy", f"{CHECKPOINTING}=false")


def test_null_inside_the_checkpointing_block_asks_for_nothing():
    block = {"policy": "full", "use_reentrant": None, "every": None}
    assert ShardingConfig.parse(nested(CHECKPOINTING, block)) == ShardingConfig.parse(
        nested(CHECKPOINTING, {"policy": "full"})
    )


def test_a_misspelt_key_inside_the_checkpointing_block_is_refused():
    assert refusal(nested(CHECKPOINTING, {"polcy": "full"})).remedy == f"did you mean {CHECKPOINTING}.policy?"


def test_the_keys_that_were_set_are_kept_also_where_they_are_zero_or_false():
    config = CheckpointingConfig(policy="budget", budget=0, compile=False)
    assert config.given() == {"policy": "budget", "budget": 0, "compile": False}
    assert CheckpointingConfig().given() == {}


def test_checkpointing_of_every_layer_is_every_one():
    assert ShardingConfig.parse(nested(CHECKPOINTING, {"policy": "every_n", "every": 1})).changed()


@pytest.mark.parametrize("budget", [0, 1, 0.25, "4GiB", "512 MiB", "1.5TB", "100B"])
def test_a_checkpointing_budget_is_a_share_or_bytes(budget):
    ShardingConfig.parse(nested(CHECKPOINTING, {"policy": "budget", "budget": budget}))


# Values keep their form


def test_devices_keep_the_form_they_were_written_in():
    for value in (2, "2-3", [2, 3], {"node0": [0]}, None):
        config = ShardingConfig.parse({"roles": {"critic": {"devices": value}}})
        assert config.roles.critic.devices == value


def test_whole_numbers_become_floats_where_floats_are_meant():
    assert isinstance(ShardingConfig.parse({"placement": {"timeout_s": 30}}).placement.timeout_s, float)


def test_a_config_can_not_be_changed_after_it_was_checked():
    config = ShardingConfig()
    for part in (config, config.roles, config.roles.critic, config.roles.critic.offload, config.placement):
        with pytest.raises(dataclasses.FrozenInstanceError):
            part.anything = 1


def test_the_error_for_an_unknown_key_at_the_top_has_no_dot_in_front():
    error = unknown_key("", "trainr", ["trainer", "data"])
    assert error.subject == "trainr: no such key"
    assert error.remedy == "did you mean trainer?"
    assert unknown_key("", "qqq", ["trainer"]).remedy == "remove qqq"


def test_the_plugin_is_asked_for_by_the_name_of_its_entry_point():
    assert schema.PLUGIN_NAME == "sharding"


@pytest.mark.parametrize(
    ("path", "name", "meant"),
    [
        ("sharding", "critic", "sharding.roles.critic"),
        ("sharding", "token_ids", "sharding.guards.token_ids"),
        ("sharding", "gpu_gib", "sharding.memory.gpu_gib"),
        ("sharding", "devices", "sharding.roles.actor.devices"),
        ("sharding.roles.actor", "params", "sharding.roles.actor.offload.params"),
        ("sharding.roles", "policy", "sharding.roles.actor"),
        ("sharding.roles", "reference", "sharding.roles.ref"),
        ("sharding.roles", "reward_model", "sharding.roles.reward"),
        ("sharding.roles.critic", "gpus", "sharding.roles.critic.devices"),
        ("sharding.roles.critic", "device", "sharding.roles.critic.devices"),
        ("sharding.roles.actor", "param_offload", "sharding.roles.actor.offload.params"),
        ("sharding.roles.ref", "offload_params", "sharding.roles.ref.offload.params"),
        ("sharding.roles.critic", "optimizer_offload", "sharding.roles.critic.offload.optimizer"),
        ("sharding.roles.critic", "activation_offload", "sharding.roles.critic.offload.activations"),
    ],
)
def test_a_key_without_its_block_or_by_another_name_is_answered_with_the_right_one(path, name, meant):
    block = {name: 1}
    for part in reversed(path.split(".")[1:]):
        block = {part: block}
    with pytest.raises(ConfigError) as caught:
        ShardingConfig.parse(block)
    assert caught.value.subject == f"{path}.{name}: no such key"
    assert caught.value.remedy == f"did you mean {meant}?"


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("sharding.fit", "aply", "sharding.fit=apply"),
        ("sharding.roles.critic.dtype", "bf16", "sharding.roles.critic.dtype=bfloat16"),
        ("sharding.roles.critic.dtype", "fp16", "sharding.roles.critic.dtype=float16"),
        (
            "sharding.roles.actor.attn_implementation",
            "flash",
            "sharding.roles.actor.attn_implementation=flash_attention_2",
        ),
        ("sharding.communication.infiniband", "disable", "sharding.communication.infiniband=false"),
        ("sharding.communication.p2p", 1, "sharding.communication.p2p=true"),
        ("sharding.guards.align_inputs", "no", "sharding.guards.align_inputs=false"),
        ("sharding.roles.critic.devices", 4.0, "sharding.roles.critic.devices=4"),
        ("sharding.roles.actor.micro_batch_size", 2.0, "sharding.roles.actor.micro_batch_size=2"),
        ("sharding.roles.critic", [4, 5], "sharding.roles.critic.devices=[4,5]"),
        ("sharding.roles.actor.dtype", "None", "sharding.roles.actor.dtype=null"),
        ("sharding.roles.actor.max_tokens", "16k", "sharding.roles.actor.max_tokens=16384"),
        ("sharding.roles.actor.max_tokens", -1, "sharding.roles.actor.max_tokens=null"),
        ("sharding.roles.actor.gradient_checkpointing", "none", "sharding.roles.actor.gradient_checkpointing=false"),
        (
            "sharding.roles.actor.gradient_checkpointing",
            "every:2",
            "'sharding.roles.actor.gradient_checkpointing={every:2}'",
        ),
        (
            "sharding.roles.actor.gradient_checkpointing",
            "budget:0.2",
            "'sharding.roles.actor.gradient_checkpointing={budget:0.2}'",
        ),
        (
            "sharding.roles.actor.gradient_checkpointing",
            0.2,
            "'sharding.roles.actor.gradient_checkpointing={budget:0.2}'",
        ),
        (
            "sharding.roles.actor.gradient_checkpointing",
            "4GiB",
            "'sharding.roles.actor.gradient_checkpointing={budget:4GiB}'",
        ),
        ("sharding.roles.actor.device_map", [0, 1], "sharding.roles.actor.device_map=auto"),
        ("sharding.roles.actor.gradient_checkpointing", "never", "sharding.roles.actor.gradient_checkpointing=false"),
        ("sharding.roles.actor.offload.optimizer", "none", "sharding.roles.actor.offload.optimizer=false"),
        ("sharding.roles.actor.offload.params", "None", "sharding.roles.actor.offload.params=false"),
        (
            "sharding.roles.actor.offload",
            False,
            "'sharding.roles.actor.offload={params:false,optimizer:false,activations:false}'",
        ),
        ("sharding.roles.critic.offload", True, "'sharding.roles.critic.offload={params:true,optimizer:true}'"),
        ("sharding.roles.ref.offload", True, "sharding.roles.ref.offload.params=true"),
        (
            "sharding.roles.critic.offload",
            ["params", "optimizer"],
            "'sharding.roles.critic.offload={params:true,optimizer:true}'",
        ),
    ],
)
def test_what_is_offered_is_what_the_wrong_value_was_meant_to_be(key, value, remedy):
    block = value
    for part in reversed(key.split(".")[1:]):
        block = {part: block}
    with pytest.raises(ConfigError) as caught:
        ShardingConfig.parse(block)
    assert caught.value.subject == key
    assert caught.value.remedy == remedy
