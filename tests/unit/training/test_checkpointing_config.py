"""The config value of gradient checkpointing becomes the policy it names, or an error that says what to write.

One reading of it serves the driver, by way of the schema, and the workers: both are asked here.
"""

from __future__ import annotations

import json

import pytest

from verl_ext_sharding.config.checkpointing_policy import POLICY_KEYS, read_policy
from verl_ext_sharding.config.measures import RoleMeasures, measures_of
from verl_ext_sharding.config.schema import CheckpointingConfig, PolicyName, ShardingConfig
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.training.checkpointing import Auto, Budget, EveryN, Full, Off, Selective
from verl_ext_sharding.training.policy_config import parse_policy

KEY = "sharding.roles.critic.gradient_checkpointing"

VALUES = [
    (True, Auto()),
    ("full", Full()),
    ("every_n", EveryN(2)),
    ({}, Auto()),
    ({"policy": "auto"}, Auto()),
    ({"policy": "full", "use_reentrant": False, "every": None}, Full()),
    ({"policy": "every_n", "every": 4}, EveryN(4)),
    ({"every": 3}, EveryN(3)),
    ({"policy": "selective"}, Selective(("attention", "matmul"))),
    ({"policy": "selective", "keep": ["attention", "narrow_matmul"]}, Selective(("attention", "narrow_matmul"))),
    ({"keep": "attention"}, Selective(("attention",))),
    ({"policy": "budget", "budget": 0.2}, Budget(share=0.2)),
    ({"policy": "budget", "budget": "0.2"}, Budget(share=0.2)),
    ({"budget": "0.2", "compile": True}, Budget(share=0.2, compile=True)),
    ({"budget": 1}, Budget(share=1.0)),
    ({"budget": 0}, Budget(share=0.0)),
    ({"budget": 1e-5}, Budget(share=1e-5)),
    ({"policy": "budget", "budget": "4GiB"}, Budget(kept_bytes=4 * 2**30)),
    ({"policy": "budget", "budget": "1.5 GB", "compile": False}, Budget(kept_bytes=1_500_000_000, compile=False)),
    ({"policy": "budget", "budget": " 4096b"}, Budget(kept_bytes=4096)),
    ({"use_reentrant": False}, Auto()),
]

REFUSED = [
    ({"policy": "full", "use_reentrant": True}, "use_reentrant", "use_reentrant=false"),
    ({"policy": "full", "every": 2}, "every", "every=null"),
    ({"every": 2, "budget": 0.5}, "budget", "budget=null"),
    ({"keep": ["attention"], "compile": True}, "compile", "compile=null"),
    ({"policy": "every_n", "every": 0}, "every", "every=2"),
    ({"policy": "every_n", "every": True}, "every", "every=1"),
    ({"keep": ["foo"]}, "keep", "keep=[attention,matmul]"),
    ({"policy": "selective", "keep": []}, "keep", "keep=[attention,matmul]"),
    ({"policy": "selective", "keep": "attn"}, "keep", "keep=[attention,matmul]"),
    ({"policy": "selective", "keep": [["matmul"]]}, "keep", "keep=[attention,matmul]"),
    ({"policy": "budget"}, "budget", "budget=0.5"),
    ({"compile": True}, "budget", "budget=0.5"),
    ({"budget": 0.5, "compile": "no"}, "compile", "compile="),
    ({"budget": 20}, "budget", "budget=0.5"),
    ({"budget": -0.1}, "budget", "budget=0.5"),
    ({"budget": float("nan")}, "budget", "budget=0.5"),
    ({"budget": "lots"}, "budget", "budget=0.5"),
    ({"budget": "20%"}, "budget", "budget=0.5"),
    ({"budget": "4 G"}, "budget", "budget=0.5"),
    ({"budget": "0B"}, "budget", "budget=0.5"),
    ({"budget": True}, "budget", "budget=0.5"),
]


def in_driver(value) -> RoleMeasures:
    request = ShardingConfig.parse({"roles": {"critic": {"gradient_checkpointing": value}}})
    return measures_of(request).get("critic", RoleMeasures())


@pytest.mark.parametrize(("value", "policy"), VALUES, ids=str)
def test_a_value_becomes_the_policy_it_names(value, policy):
    assert parse_policy(value) == policy


@pytest.mark.parametrize(("value", "policy"), VALUES, ids=str)
def test_the_worker_gets_the_same_policy_from_what_the_driver_has_made_of_it(value, policy):
    sent = json.loads(json.dumps(in_driver(value).to_dict()))
    assert parse_policy(RoleMeasures.from_dict(sent).checkpointing) == policy


@pytest.mark.parametrize(("value", "policy"), [(None, None), (False, Off())])
def test_nothing_leaves_verl_alone_and_false_keeps_all_activations(value, policy):
    assert parse_policy(value) == policy


@pytest.mark.parametrize(("value", "key", "remedy"), REFUSED, ids=str)
def test_a_value_that_means_nothing_is_refused_by_the_driver_with_the_roles_key_and_what_to_write(value, key, remedy):
    with pytest.raises(ConfigError) as error:
        in_driver(value)
    assert error.value.subject == f"{KEY}.{key}"
    assert error.value.remedy.startswith(f"{KEY}.{remedy}")


@pytest.mark.parametrize(("value", "key", "remedy"), REFUSED, ids=str)
def test_a_value_that_means_nothing_is_refused_by_the_worker_too(value, key, remedy):
    with pytest.raises(ConfigError) as error:
        parse_policy(value, role="critic")
    assert error.value.subject == f"{KEY}.{key}"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"policy": "ful"}, "policy=full"),
        ({"policy": "every_n", "evry": 2}, "every=2"),
        ({"policy": "full", "depth": 2}, "remove"),
        (2, "a policy's name"),
    ],
    ids=str,
)
def test_what_the_schema_does_not_let_through_is_explained_all_the_same(value, said):
    with pytest.raises(ConfigError, match=KEY) as error:
        read_policy(value, key=KEY)
    assert said in str(error.value)


def test_keys_of_two_policies_are_refused_as_that():
    with pytest.raises(ConfigError) as error:
        in_driver({"every": 2, "budget": 0.5})
    assert error.value.expected == "keys of one policy, every_n or budget"
    assert error.value.found == "every and budget"


def test_the_schema_names_the_policies_and_keys_that_are_read():
    assert PolicyName.__args__ == tuple(POLICY_KEYS)
    keys = {key for keys in POLICY_KEYS.values() for key in keys}
    assert keys | {"policy", "use_reentrant"} == set(CheckpointingConfig.__dataclass_fields__)
