"""Case D4: offload flags that contradict each other are resolved and said, or refused with the reason."""

from __future__ import annotations

import json
import struct

import pytest

from verl_ext_sharding.cli.plan import parse_overrides
from verl_ext_sharding.config.facts import job_facts
from verl_ext_sharding.config.offload import offload_notes, parameter_bytes
from verl_ext_sharding.config.translate import request_of, translate, values_of
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.bundles import place

ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
REFERENCE = ("algorithm.use_kl_in_reward=True",)
"""A job with a reference."""


@pytest.fixture
def notes(compose):
    def noted(*overrides):
        config = compose(*overrides)
        return offload_notes(request_of(config), job_facts(config), values_of(config), parse_overrides(overrides))

    return noted


@pytest.fixture
def refusal(compose):
    def refused(*overrides):
        config = compose(*overrides)
        facts = job_facts(config)
        with pytest.raises(ConfigError) as caught:
            translate(request_of(config), facts, place({}, facts), values_of(config), parse_overrides(overrides))
        return caught.value

    return refused


@pytest.fixture
def model(tmp_path):
    """A folder with the header of a safetensors file: 3 GiB of parameters in fp32."""
    header = {
        "__metadata__": {"format": "pt"},
        "layer": {"dtype": "BF16", "shape": [3, 1 << 28], "data_offsets": [0, 0]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return tmp_path


def flags(block, **values):
    return [f"{block}.fsdp_config.{name}={value}" for name, value in values.items()]


def test_a_on_fsdp2_only_offload_policy_is_kept_and_the_optimizer_steps_on_the_cpu(notes):
    said = notes(
        f"{ACTOR}.strategy=fsdp2", *flags(ACTOR, param_offload=True, optimizer_offload=True, offload_policy=True)
    )
    assert f"{ACTOR}.fsdp_config.offload_policy wins on FSDP2" in said[0]
    assert "drops param_offload and optimizer_offload" in said[0]
    assert "optimizer steps on the CPU" in said[1]


def test_a_flags_of_sharding_are_resolved_as_verls_own_are(notes):
    said = notes(
        f"{ACTOR}.strategy=fsdp2",
        *flags(ACTOR, offload_policy=True),
        "sharding.roles.actor.offload.params=True",
        "sharding.roles.actor.offload.optimizer=step",
    )
    assert "drops param_offload and optimizer_offload" in said[0]


@pytest.mark.parametrize(
    ("policy", "engine", "strategy"),
    [
        (f"{ACTOR}.fsdp_config.offload_policy", f"{ACTOR}.fsdp_config", f"{ACTOR}.strategy"),
        ("critic.fsdp.offload_policy", "critic.fsdp", "critic.strategy"),
    ],
)
def test_b_on_fsdp1_the_flag_has_no_effect_and_those_that_have_one_are_offered(policy, engine, strategy, notes):
    (said,) = notes(f"{strategy}=fsdp", f"{policy}=True")
    assert f"{policy} has no effect on FSDP1" in said
    assert f"{engine}.param_offload=True {engine}.optimizer_offload=True" in said


def test_c_the_policy_without_resharding_is_refused(refusal):
    error = refusal(f"{ACTOR}.strategy=fsdp2", *flags(ACTOR, offload_policy=True, reshard_after_forward=False))
    assert error.subject == f"{ACTOR}.fsdp_config.reshard_after_forward"
    assert "verl#4974" in error.consequence
    assert f"{ACTOR}.fsdp_config.reshard_after_forward=True" in error.remedy


def test_d_the_reference_is_offloaded_whatever_its_flag_says_with_the_host_bytes_that_this_takes(notes, model):
    (said,) = notes(*REFERENCE, f"actor_rollout_ref.model.path={model}", *flags(REF, param_offload=False))
    assert "always keeps ref's parameters on the host" in said
    assert "3.00 GiB" in said


def test_d_our_own_flag_that_asks_for_it_is_refused_since_it_can_not_be_done(refusal, model):
    error = refusal(*REFERENCE, f"actor_rollout_ref.model.path={model}", "sharding.roles.ref.offload.params=False")
    assert error.subject == "sharding.roles.ref.offload.params"
    assert "3.00 GiB" in error.remedy


def test_flags_that_nobody_wrote_need_no_note(notes):
    assert notes(*REFERENCE, f"{ACTOR}.strategy=fsdp2", f"{REF}.strategy=fsdp2") == []


def test_a_reference_inside_the_actor_has_no_flags_of_its_own(notes):
    lora = "actor_rollout_ref.model.lora_rank=8"
    assert notes(*REFERENCE, lora, *flags(REF, param_offload=False)) == []


def test_on_a_cpu_there_is_nothing_to_say(notes):
    assert notes("trainer.device=cpu", *flags(ACTOR, offload_policy=True)) == []


@pytest.mark.parametrize(("dtype", "expected"), [(None, 3 << 30), ("fp32", 3 << 30), ("bf16", 3 << 29)])
def test_parameters_are_counted_in_the_dtype_that_they_are_stored_in(dtype, expected, model):
    assert parameter_bytes(str(model), dtype) == expected


def test_parameters_that_are_not_here_or_not_readable_are_unknown(tmp_path):
    assert parameter_bytes("Qwen/Qwen2.5-7B", None) is None
    assert parameter_bytes(None, None) is None
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 16)
    assert parameter_bytes(str(tmp_path), None) is None
