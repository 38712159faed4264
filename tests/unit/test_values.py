"""Values that are no numbers, and interpolations that lead nowhere, are errors with their key."""

import pytest
from omegaconf import OmegaConf

from verl_ext_sharding.config.translate import values_of
from verl_ext_sharding.config.values import resolving, whole_number
from verl_ext_sharding.errors import ConfigError


def test_a_whole_number_is_returned():
    assert whole_number("k", 3, instead=1) == 3


@pytest.mark.parametrize(
    ("value", "found", "number"),
    [(4.0, "4.0", 4), (1e3, "1000.0", 1000), ("8", "the text '8'", 8), ("8.0", "the text '8.0'", 8)],
)
def test_what_spells_a_whole_number_is_refused_with_that_number(value, found, number):
    with pytest.raises(ConfigError) as caught:
        whole_number("k", value, instead=2)
    assert (caught.value.found, caught.value.remedy) == (found, f"k={number}")


@pytest.mark.parametrize("value", ["16k", 1.5, 0.0, "-3", 0, -1, None, True, [1], float("inf"), float("nan")], ids=str)
def test_anything_else_is_refused_with_its_key_and_what_to_type(value):
    with pytest.raises(ConfigError) as caught:
        whole_number("k", value, instead=2)
    assert caught.value.subject == "k"
    assert caught.value.found in ("null" if value is None else str(value), f"the text '{value}'")
    assert caught.value.remedy == "k=2"


def test_zero_may_be_allowed_and_the_override_may_differ_from_the_key():
    assert whole_number("k", 0, instead=1, at_least=0) == 0
    with pytest.raises(ConfigError) as caught:
        whole_number("k", -1, instead=2, at_least=0, override="++k")
    assert caught.value.expected == "a whole number, 0 or more"
    assert caught.value.remedy == "++k=2"


def unreadable(**config):
    config = OmegaConf.create(config)
    with pytest.raises(ConfigError) as caught, resolving(config):
        values_of(config)
    return caught.value


def test_an_interpolation_without_a_target_is_named_where_it_was_written():
    error = unreadable(a={"follows": "${oc.select:b.size,3}"}, b={"size": "${nope}"})
    assert error.subject == "b.size"
    assert error.found.startswith("${nope}: ")
    assert "'nope' not found" in error.found
    assert error.remedy == "b.size=<value>"


def test_a_missing_environment_variable_may_be_exported_instead():
    error = unreadable(b={"sizes": ["${oc.env:NO_SUCH_VARIABLE}"]})
    assert error.subject == "b.sizes"
    assert error.remedy == "export NO_SUCH_VARIABLE=<value>, or b.sizes=<value>"


def test_what_can_not_be_found_is_named_as_omegaconf_names_it():
    assert unreadable(a={"b": "${.c}", "c": "${unknown_resolver:1}"}).subject in ("a.b", "a.c")


def test_other_errors_pass():
    with pytest.raises(KeyError), resolving(OmegaConf.create({})):
        raise KeyError("k")
