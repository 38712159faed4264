"""Keys that verl's v1 trainer does not read are told where they were written, with what does what they say."""

import shlex

import pytest

from verl_ext_sharding import driver
from verl_ext_sharding.config.changes import parse_overrides

JOB = (
    "trainer.n_gpus_per_node=4",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
)
FIXED = ("critic.use_dynamic_bsz=False", "critic.ppo_micro_batch_size_per_gpu=1")
FSDP_OF_TWO = (
    "++critic.fsdp.use_dynamic_bsz=False ++critic.fsdp.micro_batch_size_per_gpu=2"
    " ++critic.fsdp.infer_micro_batch_size_per_gpu=2"
)
VEOMNI = "model_engine=veomni"


@pytest.fixture
def notes(compose):
    """What the plan of a job with a critic says of keys without effect."""

    def said(*overrides):
        lines = [*JOB, *overrides]
        plan = driver.prepare(compose(*lines), explicit=parse_overrides(lines))
        return [note for note in plan.table.notes if "no effect" in note]

    return said


@pytest.mark.parametrize(
    ("overrides", "typed"),
    [
        (("critic.ppo_max_token_len_per_gpu=2048",), "sharding.roles.critic.max_tokens=2048"),
        (("critic.forward_max_token_len_per_gpu=2048",), "sharding.roles.critic.max_tokens=2048"),
        (("+critic.fsdp.max_token_len_per_gpu=4096",), "sharding.roles.critic.max_tokens=4096"),
        (("+critic.fsdp.infer_max_token_len_per_gpu=4096",), "sharding.roles.critic.max_tokens=4096"),
        (("critic.ppo_max_token_len_per_gpu=512",), "sharding.roles.critic.max_tokens=1024"),  # the longest sequence
        (("+critic.fsdp.micro_batch_size_per_gpu=2",), "sharding.roles.critic.micro_batch_size=2"),
        (("+critic.fsdp.micro_batch_size_per_gpu=6",), FSDP_OF_TWO),  # a rank has two samples
        (FIXED, "sharding.roles.critic.micro_batch_size=1"),
        (("critic.ulysses_sequence_parallel_size=2",), "critic.fsdp.ulysses_sequence_parallel_size=2"),
        (("critic.grad_clip=0.5",), "critic.optim.clip_grad=0.5"),
        (("actor_rollout_ref.actor.grad_clip=0.5",), "actor_rollout_ref.actor.optim.clip_grad=0.5"),
        (("actor_rollout_ref.actor.fsdp_config.strategy=fsdp2",), "actor_rollout_ref.actor.strategy=fsdp2"),
        (("critic.fsdp.strategy=fsdp2",), "critic.strategy=fsdp2"),
        ((VEOMNI, "critic.ppo_max_token_len_per_gpu=2048"), "++critic.ppo_infer_max_token_len_per_gpu=2048"),
        (
            (VEOMNI, *FIXED),
            "++critic.veomni.use_dynamic_bsz=False ++critic.veomni.micro_batch_size_per_gpu=1"
            " ++critic.veomni.infer_micro_batch_size_per_gpu=1",
        ),
    ],
    ids=str,
)
def test_a_key_without_effect_is_told_with_a_line_that_has_it(overrides, typed, notes):
    (note,) = notes(*overrides)
    assert note.endswith(f"; write {typed}")
    assert notes(*overrides, *shlex.split(typed)) == []


def test_keys_of_one_setting_are_told_at_once(notes):
    (note,) = notes("critic.ppo_max_token_len_per_gpu=2048", "critic.forward_max_token_len_per_gpu=4096")
    assert "critic.ppo_max_token_len_per_gpu=2048 and critic.forward_max_token_len_per_gpu have no effect" in note


def test_of_fixed_micro_batches_and_a_budget_the_first_are_told(notes):
    (note,) = notes(*FIXED, "critic.ppo_max_token_len_per_gpu=2048")
    assert note.endswith("sharding.roles.critic.micro_batch_size=1")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("critic.ppo_max_token_len_per_gpu=32768", "critic.ulysses_sequence_parallel_size=1", "critic.grad_clip=1.0"),
        ("critic.use_dynamic_bsz=True",),
        ("critic.fsdp.strategy=fsdp2", "critic.strategy=fsdp2"),
        ("critic.ppo_micro_batch_size_per_gpu=2",),  # as verl's own examples have it beside token budgets
        ("critic.ppo_max_token_len_per_gpu=2048", "+critic.ppo_infer_max_token_len_per_gpu=4096"),
        (
            *FIXED,
            "+critic.fsdp.use_dynamic_bsz=False",
            "+critic.fsdp.micro_batch_size_per_gpu=1",
            "+critic.fsdp.infer_micro_batch_size_per_gpu=1",
        ),
        ("algorithm.adv_estimator=grpo", "critic.ppo_max_token_len_per_gpu=2048", "critic.grad_clip=0.5"),
    ],
    ids=str,
)
def test_values_that_hold_anyway_and_keys_that_are_read_need_no_note(overrides, notes):
    assert notes(*overrides) == []


def test_what_a_recipes_yaml_has_is_not_told(compose):
    config = compose(*JOB)
    config.critic.ppo_max_token_len_per_gpu = 2048
    plan = driver.prepare(config, explicit=parse_overrides(JOB))
    assert not [note for note in plan.table.notes if "no effect" in note]
