"""How engines come to their weights: tied models are read once, and a resume passes by the card. Each beside verl's own."""

from __future__ import annotations

import pytest

from tests.verl import loading_runs
from tests.verl.loading_runs import BUILT, CONTENTS, RESUMED

pytestmark = pytest.mark.verl

TIED = {"tied", "lora", "ref", "both_equal"}
"""Cases in which head and embedding are one parameter."""

each_built = pytest.mark.parametrize("name", [case.name for case in BUILT])
compared = pytest.mark.parametrize("name", [case.name for case in BUILT if case.role != "ref"])

each_resumed = pytest.mark.parametrize("name", [case.name for case in RESUMED])
offloaded = pytest.mark.parametrize("name", [case.name for case in RESUMED if case.engine])


@pytest.fixture(scope="module")
def ranks():
    return loading_runs.results()


@pytest.fixture(scope="module")
def resumed(ranks):
    return [rank["resumed"] for rank in ranks]


# Building


@each_built
def test_only_the_first_rank_has_the_model_in_memory_before_it_is_sharded(name, ranks):
    first, second = (rank["built"][name]["ours"]["whole_bytes"] for rank in ranks)
    assert first > 350_000
    assert second == 0


def test_verl_has_a_tied_model_in_memory_on_every_rank_and_another_on_the_first(ranks):
    first, second = ([rank["built"][name]["stock"]["whole_bytes"] for name in ("tied", "untied")] for rank in ranks)
    assert first[0] == second[0] > 0
    assert first[1] > 0 == second[1]


@pytest.mark.parametrize("name", ["large", "large_untied"])
def test_the_other_rank_reads_the_file_without_ever_holding_much_of_it(name, ranks):
    first, second = (rank["peak"][name] for rank in ranks)
    assert first["peak"] >= first["model"]
    assert second["peak"] < 0.1 * first["model"]


@each_built
def test_names_that_share_a_parameter_are_the_same_on_every_rank_and_those_of_the_file(name, ranks):
    first, second = (rank["built"][name]["ours"]["shared"] for rank in ranks)
    assert first == second
    assert len(first) == (name in TIED)


@compared
def test_they_share_it_as_in_verl_before_and_after_a_step_and_the_optimizer_has_it_once(name, ranks):
    for rank in ranks:
        stock, ours = (rank["built"][name][engine] for engine in ("stock", "ours"))
        for what in ("shared", "shared afterwards", "num_states"):
            assert ours[what] == stock[what]


@compared
def test_weights_and_outputs_are_bit_for_bit_those_of_verl_before_and_after_a_step(name, ranks):
    for rank in ranks:
        found = rank["built"][name]
        assert set(found["difference"].values()) == {0.0}
        assert found["ours"]["step"]["loss"] == found["stock"]["step"]["loss"]
        assert found["ours"]["step"]["grad_norm"] == found["stock"]["step"]["grad_norm"] > 0.0


@pytest.mark.parametrize("name", ["tied", "lora"])
def test_fsdp1_builds_a_tied_model_from_the_first_rank_with_the_weights_of_verl(name, ranks):
    for rank in ranks:
        found = rank["fsdp1"][name]
        assert found["stock is tied"]
        assert found["tied"]
        assert found["built"] == 0.0


@pytest.mark.parametrize("name", ["tied", "lora"])
def test_fsdp1_resumes_with_the_weights_that_were_saved(name, ranks):
    for rank in ranks:
        assert rank["fsdp1"][name]["changed"] > 0.0
        assert rank["fsdp1"][name]["loaded"] == 0.0


# Resuming


@each_resumed
def test_no_byte_of_a_checkpoint_comes_to_life_on_the_card_that_it_was_saved_from(name, resumed):
    for rank in resumed:
        assert rank[name]["ours"]["revived_bytes"] == 0


def test_verl_brings_all_of_a_checkpoint_to_life_there(resumed):
    for rank in resumed:
        assert rank["plain"]["stock"]["revived_bytes"] > 500_000


@offloaded
def test_offloaded_parameters_stay_on_the_host_during_a_resume(name, resumed):
    for rank in resumed:
        assert rank[name]["ours"]["moves"] == 0
        assert rank[name].get("stock", {"moves": 1})["moves"] == 1


@each_resumed
def test_a_resumed_run_goes_on_bit_for_bit_though_the_files_are_gone(name, resumed):
    for rank in resumed:
        ours = rank[name]["ours"]
        assert (ours["loaded"], ours["loss"], ours["weights"]) == (0.0, 0.0, 0.0)
        assert ours["steps"] == [1.0]


@each_resumed
def test_schedule_and_random_states_are_those_that_were_saved(name, resumed):
    for rank in resumed:
        assert rank[name]["ours"]["schedule"] == rank[name]["schedule"] == 1
        assert rank[name]["ours"]["random"]


def test_states_that_come_to_the_device_for_the_step_are_on_the_host_after_a_resume(resumed):
    for rank in resumed:
        found = rank["per_step"]["ours"]["optimizer_bytes"]
        assert found["device"] == 0 < found["host"]


@pytest.mark.parametrize("contents", CONTENTS, ids="+".join)
def test_load_contents_says_what_is_loaded_and_nothing_else_is(contents, ranks):
    for rank in ranks:
        found = rank["parts"]["+".join(contents)]
        assert {part for part, loaded in found.items() if loaded} == set(contents)


def test_a_checkpoint_of_which_files_are_missing_is_an_error_that_counts_them(ranks):
    for rank in ranks:
        assert rank["parts"]["error"].startswith("ConfigError")
        assert "2 of 16 ranks" in rank["parts"]["error"]
