"""Offload flags that contradict each other are resolved and said, or refused (D4)."""

from __future__ import annotations

import pytest

from verl_ext_sharding.config.offload_plan import OffloadRequest, resolve_offload
from verl_ext_sharding.errors import ConfigError

GIB = 2**30


def test_d4a_on_fsdp2_only_offload_policy_is_kept_and_the_optimizer_steps_on_the_cpu():
    plan = resolve_offload(
        strategy="fsdp2",
        role="actor",
        requested=OffloadRequest(params=True, optimizer=True),
        offload_policy=True,
        param_bytes=3 * GIB,
    )
    assert (plan.offload_policy, plan.params, plan.optimizer, plan.optimizer_device) == (True, False, False, "host")
    assert plan.host_bytes == 3 * GIB
    said = " ".join(plan.notes)
    assert "param_offload and optimizer_offload" in said
    assert "optimizer steps on the CPU" in said


def test_d4b_on_fsdp1_offload_policy_has_no_effect_and_the_flags_that_have_one_are_offered():
    plan = resolve_offload(strategy="fsdp", role="critic", requested=OffloadRequest(), offload_policy=True)
    assert (plan.offload_policy, plan.params, plan.optimizer, plan.optimizer_device) == (False, False, False, "device")
    (note,) = plan.notes
    assert "no effect on FSDP1" in note
    assert "critic.fsdp.param_offload=True" in note
    assert "critic.fsdp.optimizer_offload=True" in note
    assert "critic.strategy=fsdp2" in note


@pytest.mark.parametrize("role", ["actor", "critic", "ref"])
def test_d4c_offload_policy_without_resharding_is_refused(role):
    with pytest.raises(ConfigError, match=r"reshard_after_forward=True") as error:
        resolve_offload(
            strategy="fsdp2",
            role=role,
            requested=OffloadRequest(),
            offload_policy=True,
            reshard_after_forward=False,
        )
    assert "verl#4974" in str(error.value)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_d4d_ref_is_offloaded_whatever_its_flag_says_and_the_host_bytes_are_named(strategy):
    plan = resolve_offload(strategy=strategy, role="ref", requested=OffloadRequest(params=False), param_bytes=6 * GIB)
    assert plan.params
    assert plan.host_bytes == 6 * GIB
    (note,) = plan.notes
    assert "always" in note
    assert "6.00 GiB" in note


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
@pytest.mark.parametrize("params", [None, False, True])
@pytest.mark.parametrize("optimizer", [None, False, True, "step"])
@pytest.mark.parametrize("activations", [None, False, True])
def test_flags_that_do_not_contradict_are_done_as_asked_and_need_no_note(strategy, params, optimizer, activations):
    plan = resolve_offload(
        strategy=strategy,
        role="actor",
        requested=OffloadRequest(params=params, optimizer=optimizer, activations=activations),
        param_bytes=GIB,
    )
    assert plan.params is bool(params)
    assert plan.optimizer is (optimizer is True)
    assert plan.optimizer_per_step is (optimizer == "step")
    assert plan.activations is bool(activations)
    assert plan.host_bytes == (GIB if params else None)
    assert plan.notes == ()


def test_resharding_off_is_fine_where_nothing_is_offloaded_by_policy():
    plan = resolve_offload(
        strategy="fsdp2", role="actor", requested=OffloadRequest(params=True), reshard_after_forward=False
    )
    assert plan.params


@pytest.mark.parametrize("request_", [OffloadRequest(optimizer=True), OffloadRequest(activations=True)], ids=str)
def test_a_flag_that_would_do_nothing_for_a_role_is_refused(request_):
    with pytest.raises(ConfigError, match=r"sharding\.roles\.ref\.offload"):
        resolve_offload(strategy="fsdp", role="ref", requested=request_)


@pytest.mark.parametrize(("strategy", "role"), [("megatron", "actor"), ("fsdp", "rollout")])
def test_an_engine_without_offload_is_refused(strategy, role):
    with pytest.raises(ConfigError):
        resolve_offload(strategy=strategy, role=role, requested=OffloadRequest())


def test_an_unknown_optimizer_mode_is_refused():
    with pytest.raises(ConfigError, match="true, false or step"):
        OffloadRequest(optimizer="steps")
