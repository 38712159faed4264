"""Case D4: offload flags that contradict each other are resolved and said, or refused with the reason."""

from __future__ import annotations

import json
import struct

import pytest

from verl_ext_sharding.cli.plan import parse_overrides
from verl_ext_sharding.config.facts import job_facts
from verl_ext_sharding.config.measures import ENGINE_BLOCK, MODEL_BLOCK
from verl_ext_sharding.config.offload import offload_notes, stored_bytes
from verl_ext_sharding.config.translate import request_of, values_of
from verl_ext_sharding.errors import ConfigError

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
        with pytest.raises(ConfigError) as caught:
            offload_notes(request_of(config), job_facts(config), values_of(config), parse_overrides(overrides))
        return caught.value

    return refused


@pytest.fixture
def model(tmp_path):
    """A model folder with the header of a safetensors file: 3 GiB of parameters in fp32."""
    header = {
        "__metadata__": {"format": "pt"},
        "layer": {"dtype": "BF16", "shape": [3, 1 << 28], "data_offsets": [0, 0]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    (tmp_path / "config.json").write_text("{}")
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


def test_d_bytes_that_no_file_here_tells_are_not_spoken_of(notes, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (said,) = notes(*REFERENCE, "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B", *flags(REF, param_offload=False))
    assert said.endswith("always keeps ref's parameters on the host")


def test_c_a_reference_is_always_under_the_policy_so_only_resharding_helps(refusal):
    error = refusal(*REFERENCE, f"{ACTOR}.strategy=fsdp2", *flags(REF, reshard_after_forward=False))
    assert error.remedy == f"{REF}.fsdp_config.reshard_after_forward=True"


def test_c_what_the_error_offers_for_a_trained_role_is_accepted(notes, refusal):
    wrong = f"{ACTOR}.strategy=fsdp2", *flags(ACTOR, offload_policy=True, reshard_after_forward=False)
    for way in refusal(*wrong).remedy.split(", or "):
        notes(*wrong, *way.split())


@pytest.mark.parametrize(
    "spread",
    [
        ["sharding.roles.ref.layout=device_map", "sharding.roles.ref.devices=[0]"],
        ["sharding.roles.actor.layout=device_map"],
        [
            "sharding.roles.actor.layout=device_map",
            "sharding.roles.ref.devices=[1]",
            "sharding.roles.ref.layout=device_map",
        ],
    ],
)
def test_d_a_reference_whose_layers_are_spread_is_not_sharded_and_its_flag_counts(spread, notes):
    assert notes(*REFERENCE, *spread, "sharding.roles.ref.offload.params=False") == []


def test_d_a_sharded_reference_away_from_a_spread_actor_is_offloaded(refusal):
    spread = "sharding.roles.actor.layout=device_map", "sharding.roles.ref.devices=[1]"
    error = refusal(*REFERENCE, *spread, "sharding.roles.ref.offload.params=False")
    assert error.subject == "sharding.roles.ref.offload.params"


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


@pytest.mark.parametrize(
    ("role", "dtype", "expected"),
    [
        ("ref", None, 3 << 29),  # verl loads what never trains in bf16
        ("actor", None, 3 << 30),
        ("critic", None, 3 << 30),
        ("ref", "fp32", 3 << 30),
        ("actor", "bf16", 3 << 29),
        ("ref", "fp8", None),
    ],
)
def test_parameters_are_counted_in_the_dtype_that_they_are_stored_in(role, dtype, expected, model):
    values = {f"{ENGINE_BLOCK[role]}.model_dtype": dtype, f"{MODEL_BLOCK[role]}.path": str(model)}
    assert stored_bytes(role, values) == expected


def test_without_a_model_no_bytes_are_known():
    assert stored_bytes("ref", {}) is None
