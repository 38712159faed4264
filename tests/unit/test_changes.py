"""Changes to verl's keys: set, shown, and never against what the user wrote."""

import pytest
from omegaconf import OmegaConf

from verl_ext_sharding.config.changes import KeyChange, apply_changes, explicit_keys, parse_overrides
from verl_ext_sharding.errors import ConfigError

WHY = "sharding.roles.critic.dtype"


@pytest.fixture
def config():
    config = OmegaConf.create(
        {
            "critic": {"fsdp": {"model_dtype": "fp32", "mixed_precision": None, "wrap": {"size": 0}}, "name": "???"},
            "size": "${critic.fsdp.wrap.size}",
        }
    )
    OmegaConf.set_struct(config, True)
    return config


def change(key, new, **fields):
    return KeyChange(key=key, new=new, why=WHY, **fields)


def refusal(config, explicit, *changes):
    with pytest.raises(ConfigError) as caught:
        apply_changes(config, changes, explicit)
    return caught.value


def test_a_key_is_set_and_its_old_value_is_kept(config):
    (applied,) = apply_changes(config, [change("critic.fsdp.model_dtype", "bf16")], {})
    assert config.critic.fsdp.model_dtype == "bf16"
    assert (applied.old, applied.new, applied.why, applied.added) == ("fp32", "bf16", WHY, False)


def test_a_key_that_has_the_value_already_is_no_change(config):
    assert apply_changes(config, [change("critic.fsdp.model_dtype", "fp32")], {}) == []


def test_a_block_replaces_a_null(config):
    (applied,) = apply_changes(config, [change("critic.fsdp.mixed_precision", {"param_dtype": "bf16"})], {})
    assert config.critic.fsdp.mixed_precision == {"param_dtype": "bf16"}
    assert (applied.old, applied.added) == (None, False)


def test_a_block_is_compared_by_its_content(config):
    precision = change("critic.fsdp.mixed_precision", {"param_dtype": "bf16"})
    apply_changes(config, [precision], {})
    assert apply_changes(config, [precision], {}) == []


@pytest.mark.parametrize("key", ["critic.fsdp.infer_batch", "critic.new.block.key", "top"])
def test_a_key_that_verl_does_not_list_is_added_and_marked_so(key, config):
    (applied,) = apply_changes(config, [change(key, 4)], {})
    assert OmegaConf.select(config, key) == 4
    assert applied.added
    assert OmegaConf.is_struct(config)


def test_a_mandatory_key_is_set_and_is_not_an_added_one(config):
    (applied,) = apply_changes(config, [change("critic.name", "hf")], {})
    assert config.critic.name == "hf"
    assert not applied.added


def test_a_key_that_follows_another_is_compared_by_its_value(config):
    assert apply_changes(config, [change("size", 0)], {}) == []
    apply_changes(config, [change("size", 2)], {})
    assert config.size == 2
    assert config.critic.fsdp.wrap.size == 0


def test_the_same_value_on_the_command_line_is_fine(config):
    config.critic.fsdp.model_dtype = "bf16"
    assert apply_changes(config, [change("critic.fsdp.model_dtype", "bf16")], {"critic.fsdp.model_dtype": "bf16"}) == []


def test_verls_other_spelling_of_a_dtype_is_the_same_value(config):
    config.critic.fsdp.model_dtype = "bfloat16"
    config.critic.fsdp.mixed_precision = {"param_dtype": "half", "reduce_dtype": "float"}
    written = {"critic.fsdp.model_dtype": "bfloat16", "critic.fsdp.mixed_precision.param_dtype": "half"}
    precision = {"param_dtype": "fp16", "reduce_dtype": "fp32"}
    changes = [change("critic.fsdp.model_dtype", "bf16"), change("critic.fsdp.mixed_precision", precision)]
    assert apply_changes(config, changes, written) == []


def test_an_implied_value_leaves_verls_key_alone_and_a_written_one_may_not_differ(config):
    implied = change("critic.fsdp.model_dtype", "bf16", implied=True)
    assert apply_changes(config, [implied], {}) == []
    assert config.critic.fsdp.model_dtype == "fp32"
    assert refusal(config, {"critic.fsdp.model_dtype": "fp32"}, implied).subject == "critic.fsdp.model_dtype"


def test_another_value_on_the_command_line_is_refused_and_both_keys_are_named(config):
    error = refusal(config, {"critic.fsdp.model_dtype": "fp32"}, change("critic.fsdp.model_dtype", "bf16"))
    assert error.subject == "critic.fsdp.model_dtype"
    assert "bf16" in error.expected
    assert WHY in error.expected
    assert error.found == "critic.fsdp.model_dtype=fp32 on the command line"
    assert error.remedy == f"remove critic.fsdp.model_dtype=fp32, or change {WHY}"
    assert config.critic.fsdp.model_dtype == "fp32"


def test_a_stand_in_for_a_default_gives_way_to_the_command_line(config):
    stand_in = change("critic.fsdp.model_dtype", "bf16", default=True)
    assert apply_changes(config, [stand_in], {"critic.fsdp.model_dtype": "fp32"}) == []
    assert config.critic.fsdp.model_dtype == "fp32"


def test_a_stand_in_for_a_default_is_set_where_the_user_wrote_nothing(config):
    assert apply_changes(config, [change("critic.fsdp.model_dtype", "bf16", default=True)], {"critic.other": "1"})


# A part of what is set, or a block around it


PRECISION = {"param_dtype": "bf16", "reduce_dtype": "fp32"}


@pytest.fixture
def with_precision(config):
    OmegaConf.update(config, "critic.fsdp.mixed_precision", {"param_dtype": "fp16"}, force_add=True)
    return config


def test_another_value_for_a_part_of_it_is_refused(with_precision):
    written = {"critic.fsdp.mixed_precision.param_dtype": "fp16"}
    error = refusal(with_precision, written, change("critic.fsdp.mixed_precision", PRECISION))
    assert error.found == "critic.fsdp.mixed_precision.param_dtype=fp16 on the command line"


def test_the_same_value_for_a_part_of_it_is_fine(with_precision):
    with_precision.critic.fsdp.mixed_precision.param_dtype = "bf16"
    written = {"critic.fsdp.mixed_precision.param_dtype": "bf16"}
    apply_changes(with_precision, [change("critic.fsdp.mixed_precision", PRECISION)], written)
    assert with_precision.critic.fsdp.mixed_precision == PRECISION


def test_a_stand_in_gives_way_to_a_part_of_it(with_precision):
    written = {"critic.fsdp.mixed_precision.param_dtype": "fp16"}
    stand_in = change("critic.fsdp.mixed_precision", PRECISION, default=True)
    assert apply_changes(with_precision, [stand_in], written) == []
    assert with_precision.critic.fsdp.mixed_precision == {"param_dtype": "fp16"}


@pytest.mark.parametrize("text", ["{model_dtype:fp32}", "{wrap:{size:1},model_dtype: fp32}"])
def test_another_value_in_a_block_around_it_is_refused(text, config):
    error = refusal(config, {"critic.fsdp": text}, change("critic.fsdp.model_dtype", "bf16"))
    assert error.found == f"critic.fsdp={text} on the command line"


@pytest.mark.parametrize("text", ["{wrap:{size:1}}", "{other_model_dtype:fp32}", "{x:model_dtype}"])
def test_a_block_around_it_that_leaves_it_out_is_no_contradiction(text, config):
    apply_changes(config, [change("critic.fsdp.model_dtype", "bf16")], {"critic.fsdp": text})
    assert config.critic.fsdp.model_dtype == "bf16"


@pytest.mark.parametrize("key", ["critic.fsdp.model", "critic.fsdp.model_dtypes", "critic.fs", "model_dtype"])
def test_a_key_that_only_looks_alike_is_no_contradiction(key, config):
    assert apply_changes(config, [change("critic.fsdp.model_dtype", "bf16")], {key: "fp32"})


# What the user wrote


@pytest.mark.parametrize(
    ("line", "parsed"),
    [
        ("a.b=1", {"a.b": "1"}),
        ("+a.b=1", {"a.b": "1"}),
        ("++a.b=1", {"a.b": "1"}),
        ("~a.b=1", {"a.b": "1"}),
        ("~a.b", {}),
        ("a.b=", {"a.b": ""}),
        ("a.b=c=d", {"a.b": "c=d"}),
        ("a.b=[1,2]", {"a.b": "[1,2]"}),
        ("a.b={c:1}", {"a.b": "{c:1}"}),
    ],
)
def test_an_override_is_split_at_its_first_sign_and_loses_its_prefix(line, parsed):
    assert parse_overrides([line]) == parsed


def test_the_last_of_two_overrides_of_a_key_counts():
    assert parse_overrides(["a=1", "+a=2"]) == {"a": "2"}


def test_outside_a_command_the_user_wrote_nothing():
    assert explicit_keys() == {}


def test_all_that_a_request_contradicts_is_named_at_once():
    config = OmegaConf.create({"a": {"x": 1, "y": 2, "z": 3}})
    changes = [KeyChange(key=f"a.{name}", new=9, why="sharding.roles.actor.max_tokens") for name in "xyz"]
    with pytest.raises(ConfigError) as caught:
        apply_changes(config, changes, {"a.x": "1", "a.z": "3"})
    assert caught.value.expected == "a.x=9, a.z=9, which sharding.roles.actor.max_tokens asks for"
    assert caught.value.remedy == "remove a.x=1 a.z=3, or change sharding.roles.actor.max_tokens"
