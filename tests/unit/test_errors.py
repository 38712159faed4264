"""Errors of one shape, which arrive on the other side of a Ray call as what they are."""

import pickle
import traceback

import pytest

from verl_ext_sharding import errors
from verl_ext_sharding.errors import (
    ClusterError,
    ConfigError,
    PatchError,
    PlacementError,
    PlainErrors,
    ShardingError,
    did_you_mean,
    first_line,
    misspelling_of,
)

FIELDS = {"expected": "8", "found": "7", "consequence": "the run does not start", "remedy": "x=8"}
CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, ShardingError)]


@pytest.mark.parametrize("cls", CLASSES)
def test_a_message_has_all_five_parts_each_on_its_line(cls):
    lines = str(cls("critic.x", **FIELDS)).splitlines()
    assert lines[0] == "critic.x"
    assert [line.split(":", 1)[1].strip() for line in lines[1:]] == list(FIELDS.values())


def test_a_part_of_several_lines_stays_in_its_column():
    lines = str(ConfigError("critic.x", **{**FIELDS, "found": "HTTP 502\n<html>"})).splitlines()
    assert lines[2:4] == ["  found:    HTTP 502", "            <html>"]


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


# Misspelt names


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("nnode", "nnodes"),
        ("trainBatchSize", "train_batch_size"),
        ("kl_coeff", "kl_coef"),
        ("roolout", "rollout"),
        ("n_gpu_per_node", "n_gpus_per_node"),
    ],
)
def test_a_name_of_which_each_word_is_nearly_a_known_ones_is_a_misspelling(name, known):
    assert misspelling_of(name, ["other", known]) == known


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("nnodes", "nnodes"),
        ("min_tokens", "max_tokens"),
        ("image_key2", "image_key"),
        ("ppo_infer_max_tokens", "ppo_max_tokens"),
        ("rollout_is", "rollout_rs"),
    ],
)
def test_a_name_with_another_word_or_number_is_one_of_its_own(name, known):
    assert misspelling_of(name, [known]) is None


# Errors of others


@pytest.mark.parametrize(
    ("error", "line"), [(ValueError("a\nb"), "a"), (AssertionError(), "AssertionError"), (OSError("\n"), "OSError")]
)
def test_an_error_has_a_first_line_also_where_it_says_nothing(error, line):
    assert first_line(error) == line


# Leaving verl's mains


def deep_inside(error):
    try:
        raise KeyError("a cause")
    except KeyError as cause:
        raise error from cause


def frames_of(error):
    with pytest.raises(type(error)) as caught, PlainErrors():
        deep_inside(error)
    return [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_an_error_of_ours_comes_without_our_frames_and_causes():
    error = ConfigError("critic.x", **FIELDS)
    assert "deep_inside" not in frames_of(error)
    assert error.__cause__ is None


def test_any_other_error_keeps_its_frames():
    assert "deep_inside" in frames_of(ValueError("verl's own"))
