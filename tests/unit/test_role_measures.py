"""What verl has no key for, as workers are told of it: checkpointing policies by name, layers over several devices."""

import json

import pytest
from omegaconf import OmegaConf

from verl_ext_sharding.config.measures import LayerSpread, RoleMeasures, handled_keys, measures_of
from verl_ext_sharding.config.schema import ShardingConfig
from verl_ext_sharding.errors import ConfigError

KEY = "sharding.roles.critic.gradient_checkpointing"
POLICIES = ("auto", "full", "every_n", "selective")  # a budget takes a number, and so a block


def parsed(**critic):
    return ShardingConfig.parse({"roles": {"critic": critic}})


# Layers over several devices


@pytest.mark.parametrize(
    "layers",
    [
        None,
        LayerSpread(),
        LayerSpread(device_map="balanced_low_0", devices=(3, 1), reserved_bytes=(0, 2**40)),
        LayerSpread(device_map={"model": {"layers": {"0": 0}}, "": 1}, devices=(0, 1), device_bytes=24 * 2**30),
    ],
    ids=str,
)
def test_a_spread_survives_the_way_through_the_environment_beside_other_measures(layers):
    measures = RoleMeasures(attention="sdpa", offload_activations=True, layers=layers)
    again = RoleMeasures.from_dict(json.loads(json.dumps(measures.to_dict())))
    assert again == measures
    assert layers is None or isinstance(again.layers.devices, tuple)


def test_a_spread_alone_is_a_measure():
    assert RoleMeasures(layers=LayerSpread()) != RoleMeasures()


def test_layout_and_map_of_each_spread_role_act():
    request = ShardingConfig.parse(
        {"roles": {"actor": {"layout": "device_map"}, "critic": {"layout": "fsdp"}, "ref": {"device_map": "auto"}}}
    )
    assert set(handled_keys(request)) == {"sharding.roles.actor.layout", "sharding.roles.actor.device_map"}


@pytest.mark.parametrize(("layout", "acts"), [("device_map", True), ("fsdp", False)])
def test_memory_of_a_device_acts_where_layers_are_spread(layout, acts):
    request = ShardingConfig.parse({"memory": {"gpu_gib": 24.0}, "roles": {"critic": {"layout": layout}}})
    assert ("sharding.memory.gpu_gib" in set(handled_keys(request))) is acts


# Gradient checkpointing by name


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_may_be_named_by_plain_text(name):
    request = parsed(gradient_checkpointing=name)
    assert request.roles.critic.gradient_checkpointing == name
    assert request.changed() == {KEY: name}


@pytest.mark.parametrize("name", POLICIES)
def test_a_named_policy_is_the_measure_that_a_block_with_its_name_is(name):
    as_text, as_block = parsed(gradient_checkpointing=name), parsed(gradient_checkpointing={"policy": name})
    assert measures_of(as_text) == measures_of(as_block) == {"critic": RoleMeasures(checkpointing={"policy": name})}
    assert list(handled_keys(as_text)) == [KEY]


@pytest.mark.parametrize("name", POLICIES)
def test_the_worker_reads_a_named_policy_as_it_reads_the_text(name):
    policy_config = pytest.importorskip("verl_ext_sharding.training.policy_config")
    (measures,) = measures_of(parsed(gradient_checkpointing=name)).values()
    assert policy_config.parse_policy(measures.checkpointing) == policy_config.parse_policy(name)


@pytest.mark.parametrize(
    ("value", "checkpointing"), [(None, None), (False, None), (True, True), ({}, True), ({"every": 3}, {"every": 3})]
)
def test_a_switch_and_a_block_without_a_name_stay_what_they_were(value, checkpointing):
    assert (
        measures_of(parsed(gradient_checkpointing=value)).get("critic", RoleMeasures()).checkpointing == checkpointing
    )


@pytest.mark.parametrize("name", ["Full", "every", "", "true", "off"])
def test_a_policy_that_is_not_there_is_refused_with_those_that_are(name):
    with pytest.raises(ConfigError) as caught:
        parsed(gradient_checkpointing=name)
    assert caught.value.subject == KEY
    assert all(policy in caught.value.expected for policy in POLICIES)
    assert "true/false" in caught.value.expected


@pytest.mark.parametrize(
    ("value", "subject"),
    [
        ("budget", KEY),
        ({"policy": "budget"}, f"{KEY}.budget"),
        ({"policy": "full", "every": 2}, f"{KEY}.every"),
        ({"policy": "every_n", "budget": 0.5}, f"{KEY}.budget"),
    ],
    ids=str,
)
def test_what_the_worker_could_not_apply_is_refused_before_it_starts(value, subject):
    with pytest.raises(ConfigError) as caught:
        parsed(gradient_checkpointing=value)
    assert caught.value.subject == subject


def test_a_policy_may_be_typed_on_the_command_line(compose):
    config = compose(*(f"sharding.roles.{role}.gradient_checkpointing=full" for role in ("actor", "critic")))
    assert OmegaConf.select(config, KEY) == OmegaConf.select(config, KEY.replace("critic", "actor")) == "full"
