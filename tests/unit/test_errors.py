"""Errors of one shape, which arrive on the other side of a Ray call as what they are."""

import pickle

import pytest

from verl_ext_sharding import errors
from verl_ext_sharding.errors import ClusterError, ConfigError, PatchError, PlacementError, ShardingError, did_you_mean

FIELDS = {"expected": "8", "found": "7", "consequence": "the run does not start", "remedy": "x=8"}
CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, ShardingError)]


@pytest.mark.parametrize("cls", CLASSES)
def test_a_message_has_all_five_parts_each_on_its_line(cls):
    lines = str(cls("critic.x", **FIELDS)).splitlines()
    assert lines[0] == "critic.x"
    assert [line.split(":", 1)[1].strip() for line in lines[1:]] == list(FIELDS.values())


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_an_error_survives_pickling_with_its_class_and_parts(cls, protocol):
    error = cls("critic.x", **FIELDS)
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is cls
    assert str(again) == str(error)
    assert (again.subject, again.remedy) == ("critic.x", "x=8")


@pytest.mark.parametrize("cls", CLASSES)
def test_a_role_is_named_in_every_part_once_it_is_known(cls):
    error = cls("<role>.x", **{part: f"{text} of <role>" for part, text in FIELDS.items()})
    error.name_role("critic")
    assert "<role>" not in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert error.remedy == "x=8 of critic"


@pytest.mark.parametrize("cls", CLASSES)
def test_no_part_may_be_left_out(cls):
    for part in FIELDS:
        with pytest.raises(TypeError):
            cls("critic.x", **{name: text for name, text in FIELDS.items() if name != part})


def test_the_users_mistakes_are_value_errors_and_all_others_are_not():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(PlacementError, ConfigError)
    for cls in (ClusterError, PatchError):
        assert issubclass(cls, RuntimeError)
        assert not issubclass(cls, ValueError)


@pytest.mark.parametrize(
    ("name", "near"),
    [("critc", "critic"), ("devises", "devices"), ("plugn", "plugin"), ("xyzzy", None), ("", None)],
)
def test_a_misspelt_name_finds_the_nearest_known_one(name, near):
    assert did_you_mean(name, ["critic", "devices", "plugin", "rollout"]) == near


def test_names_may_come_from_any_iterable():
    assert did_you_mean("actr", (name for name in ("actor", "ref"))) == "actor"
    assert did_you_mean("actor", []) is None
