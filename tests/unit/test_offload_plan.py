"""What verl does with a role's offload flags: contradictions are said, or refused where they break the run."""

from __future__ import annotations

import pytest

from verl_ext_sharding.config.offload_plan import OffloadFlags, reference_notes, trained_notes
from verl_ext_sharding.errors import ConfigError

GIB = 2**30
TRAINED = {"actor": "actor_rollout_ref.actor.fsdp_config", "critic": "critic.fsdp"}
REF = "actor_rollout_ref.ref.fsdp_config"


@pytest.mark.parametrize("role", TRAINED)
@pytest.mark.parametrize(
    ("params", "optimizer", "dropped"),
    [
        (True, True, "param_offload and optimizer_offload"),
        (True, None, "param_offload"),
        (False, "step", "optimizer_offload"),
    ],
)
def test_on_fsdp2_the_policy_drops_the_other_flags_and_the_optimizer_steps_on_the_cpu(role, params, optimizer, dropped):
    flags = OffloadFlags(params=params, optimizer=optimizer, offload_policy=True)
    wins, slow = trained_notes(role, "fsdp2", flags)
    assert wins.startswith(f"{TRAINED[role]}.offload_policy wins on FSDP2")
    assert f"drops {dropped} (verl#5995)" in wins
    assert "optimizer steps on the CPU" in slow


def test_where_the_policy_drops_nothing_only_its_cost_is_said():
    (note,) = trained_notes("actor", "fsdp2", OffloadFlags(offload_policy=True))
    assert "optimizer steps on the CPU" in note


@pytest.mark.parametrize("role", TRAINED)
def test_on_fsdp1_the_policy_has_no_effect_and_the_flags_that_have_one_are_offered(role):
    (note,) = trained_notes(role, "fsdp", OffloadFlags(offload_policy=True, reshard_after_forward=False))
    assert "no effect on FSDP1" in note
    assert f"{TRAINED[role]}.param_offload=True {TRAINED[role]}.optimizer_offload=True" in note
    assert f"{TRAINED[role].rpartition('.')[0]}.strategy=fsdp2" in note


@pytest.mark.parametrize("role", TRAINED)
def test_the_policy_without_resharding_is_refused_with_both_ways_out(role):
    with pytest.raises(ConfigError) as caught:
        trained_notes(role, "fsdp2", OffloadFlags(offload_policy=True, reshard_after_forward=False))
    key = TRAINED[role]
    assert "verl#4974" in caught.value.consequence
    assert (
        caught.value.remedy
        == f"{key}.reshard_after_forward=True, or {key}.offload_policy=False {key}.param_offload=True"
    )


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
@pytest.mark.parametrize("params", [None, False, True])
@pytest.mark.parametrize("optimizer", [None, False, True, "step"])
@pytest.mark.parametrize("reshard", [True, False])
def test_flags_without_the_policy_do_what_they_say(strategy, params, optimizer, reshard):
    flags = OffloadFlags(params=params, optimizer=optimizer, reshard_after_forward=reshard)
    assert trained_notes("actor", strategy, flags) == []


@pytest.mark.parametrize("policy", [True, False])
def test_a_reference_on_fsdp2_must_reshard_and_no_other_flag_helps(policy):
    """It is always under CPUOffloadPolicy, whatever `offload_policy` says."""
    with pytest.raises(ConfigError) as caught:
        reference_notes("fsdp2", OffloadFlags(offload_policy=policy, reshard_after_forward=False), None)
    assert caught.value.remedy == f"{REF}.reshard_after_forward=True"


def test_a_reference_on_fsdp1_need_not_reshard():
    assert reference_notes("fsdp", OffloadFlags(reshard_after_forward=False), None) == []


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_a_reference_is_offloaded_whatever_its_flag_says_and_the_host_bytes_are_named(strategy):
    (note,) = reference_notes(strategy, OffloadFlags(params=False), 6 * GIB)
    assert f"{REF}.param_offload=False has no effect" in note
    assert note.endswith("always keeps ref's parameters on the host, 6.00 GiB over all its ranks")


def test_unknown_host_bytes_are_not_spoken_of():
    (note,) = reference_notes("fsdp2", OffloadFlags(params=False), None)
    assert note.endswith("on the host")


@pytest.mark.parametrize("params", [None, True])
def test_a_reference_that_is_asked_to_be_offloaded_needs_no_note(params):
    assert reference_notes("fsdp2", OffloadFlags(params=params), 6 * GIB) == []


def test_the_policy_of_a_reference_has_no_effect_on_fsdp1_and_is_what_happens_on_fsdp2():
    flags = OffloadFlags(offload_policy=True)
    assert reference_notes("fsdp2", flags, None) == []
    (note,) = reference_notes("fsdp", flags, None)
    assert f"{REF}.offload_policy has no effect on FSDP1" in note
