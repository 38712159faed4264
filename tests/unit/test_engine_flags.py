"""Flags of verl's engines other than FSDP: those that break the run are refused, those that nothing reads are told."""

import shlex

import pytest

from verl_ext_sharding import driver
from verl_ext_sharding.config.changes import parse_overrides
from verl_ext_sharding.config.engine_flags import check_flags, unread_flags

ACTOR, REF, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.model"
JOB = (
    "trainer.n_gpus_per_node=4",
    "data.train_batch_size=8",
    f"{ACTOR}.ppo_mini_batch_size=8",
    f"{ACTOR}.use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "algorithm.use_kl_in_reward=True",
)
VEOMNI, MEGATRON = "model_engine=veomni", "model_engine=megatron"
TITAN = (
    "model_engine=torchtitan",
    *(f"{block}.torchtitan.data_parallel_shard_size=4" for block in (ACTOR, "critic")),
)


@pytest.fixture
def planned(compose):
    """The notes of the plan of a job of four devices."""

    def run(*overrides):
        lines = [*JOB, *overrides]
        return driver.prepare(compose(*lines), explicit=parse_overrides(lines)).table.notes

    return run


def said(notes, key):
    return [note for note in notes if note.startswith(key)]


# What breaks the run


@pytest.mark.parametrize(
    ("overrides", "subject"),
    [
        ((VEOMNI, *(f"{ACTOR}.veomni.{flag}=True" for flag in flags)), f"{ACTOR}.veomni.enable_fsdp_offload")
        for flags in (
            ("enable_fsdp_offload", "param_offload"),
            ("enable_fsdp_offload", "optimizer_offload"),
            ("enable_fsdp_offload", "param_offload", "optimizer_offload"),
        )
    ]
    + [
        ((VEOMNI, f"{ACTOR}.veomni.optimizer_offload=True"), f"{ACTOR}.veomni.optimizer_offload"),
        (
            (VEOMNI, f"{REF}.veomni.enable_fsdp_offload=True", f"{ACTOR}.veomni.param_offload=True"),
            f"{REF}.veomni.enable_fsdp_offload",  # the reference's flag follows the actor's
        ),
        (
            (VEOMNI, "critic.veomni.enable_fsdp_offload=True", "critic.veomni.param_offload=True"),
            "critic.veomni.enable_fsdp_offload",
        ),
        ((*TITAN, f"+{ACTOR}.torchtitan.offload_policy=True"), f"{ACTOR}.torchtitan.offload_policy"),
        (
            (*TITAN, f"+{ACTOR}.torchtitan.offload_policy=True", f"{ACTOR}.torchtitan.param_offload=True"),
            f"{ACTOR}.torchtitan.offload_policy",
        ),
    ],
    ids=str,
)
def test_flags_that_break_the_run_are_refused_and_each_way_out_is_planned(overrides, subject, planned, refused):
    error = refused(*overrides)
    assert error.subject == subject
    for way in error.remedy.split(", or "):
        planned(*overrides, *shlex.split(way))


@pytest.mark.parametrize(
    "overrides",
    [
        (VEOMNI, f"{ACTOR}.veomni.enable_fsdp_offload=True"),
        (VEOMNI, f"{ACTOR}.veomni.param_offload=True", f"{ACTOR}.veomni.optimizer_offload=True"),
        (*TITAN, f"{ACTOR}.torchtitan.param_offload=True", f"{ACTOR}.torchtitan.optimizer_offload=True"),
        (*TITAN, f"+{REF}.torchtitan.offload_policy=True", f"{REF}.torchtitan.param_offload=True"),
        (MEGATRON, f"{ACTOR}.megatron.optimizer_offload=True"),
    ],
    ids=str,
)
def test_flags_that_verl_honours_are_planned(overrides, planned):
    planned(*overrides)


def test_a_model_on_one_rank_is_under_no_policy():
    veomni = {"engine.enable_fsdp_offload": True, "engine.param_offload": True}
    check_flags("veomni", "engine", veomni, ranks=1)
    titan = {"engine.offload_policy": True, "engine.param_offload": True, "engine.data_parallel_shard_size": 1}
    check_flags("torchtitan", "engine", titan, ranks=1, generates=True)


def test_a_policy_of_torchtitan_stands_alone_where_no_rollout_is_given_the_weights(planned):
    check_flags("torchtitan", "engine", {"engine.offload_policy": True, "engine.data_parallel_shard_size": 2}, ranks=2)


# What nothing reads


@pytest.mark.parametrize(
    ("engine", "key", "own"),
    [
        ((VEOMNI,), f"{MODEL}.enable_activation_offload=True", f"{ACTOR}.veomni.enable_async_activation_offload=True"),
        (
            (MEGATRON,),
            "critic.model.enable_activation_offload=True",
            "+critic.megatron.override_transformer_config.fine_grained_activation_offloading=True",
        ),
        (TITAN, f"{MODEL}.enable_activation_offload=True", None),
        (
            (MEGATRON,),
            f"{MODEL}.enable_gradient_checkpointing=True",
            f"{ACTOR}.megatron.override_transformer_config.recompute_granularity=full",
        ),
        (TITAN, f"{MODEL}.enable_gradient_checkpointing=False", f"{ACTOR}.torchtitan.activation_checkpoint=none"),
    ],
    ids=str,
)
def test_a_flag_of_fsdp_alone_is_told_with_the_engines_own_and_with_that_no_more(engine, key, own, planned):
    name = key.partition("=")[0]
    (note,) = said(planned(*engine, key), name)
    assert "has no effect" in note
    if own is None:
        assert "no such thing" in note
        return
    typed = [word for word in shlex.split(note.partition("; in it ")[2]) if "=" in word]
    assert typed[0] == own
    assert said(planned(*engine, key, *typed), name) == []


@pytest.mark.parametrize(
    "overrides",
    [
        (f"{MODEL}.enable_activation_offload=True",),
        (VEOMNI, f"{MODEL}.enable_gradient_checkpointing=False"),  # which its engine reads
        (MEGATRON,),
        (MEGATRON, f"{MODEL}.enable_gradient_checkpointing=False"),
        (*TITAN, f"{MODEL}.enable_gradient_checkpointing=True"),  # selective is its default
    ],
    ids=str,
)
def test_flags_that_are_read_or_that_say_what_happens_anyway_need_no_note(overrides, planned):
    assert said(planned(*overrides), MODEL) == []


def test_the_blocks_of_sft_are_told_in_its_own_words():
    values = {"model.enable_activation_offload": True, "model.enable_gradient_checkpointing": True}
    notes = list(unread_flags("automodel", "engine", "model", values, explicit=list(values)))
    assert "which has no such thing" in notes[0]
    assert "engine.activation_checkpointing=True" in notes[1]
