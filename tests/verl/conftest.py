"""Runs that several modules look at, each made once."""

from __future__ import annotations

import pytest

from tests.verl import harness

STEPS = 3
"""How many steps are compared."""

SAVED = 2
"""Step whose checkpoint another run goes on from."""

REWARD_POSITIONS = 48
"""What the reward model of `grpo` can take."""

EXPORTED = {"NCCL_IB_DISABLE": "0"}
"""What the user of `grpo` exported."""


def placed(**roles: list[int]) -> list[str]:
    return [f"sharding.roles.{role}.devices={devices}".replace(" ", "") for role, devices in roles.items()]


def resume_from(folder, step: int) -> list[str]:
    """Overrides that go on from a checkpoint; the last of two values for one key counts."""
    return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/global_step_{step}"]


@pytest.fixture(scope="session")
def colocated(once):
    """Every role on every device: verl's own pool, with the plugin on."""
    lines = harness.base_overrides(SAVED + STEPS, num_devices=2)
    return once("colocated", lambda folder: harness.run_trainer(folder, lines))


@pytest.fixture(scope="session")
def split(once):
    """Actor on a list with a gap, critic and reference apart; saves at step 2."""

    def run(folder):
        lines = [
            *harness.base_overrides(SAVED + STEPS),
            *placed(actor=[0, 2], critic=[1], ref=[3]),
            f"trainer.save_freq={SAVED}",
            f"trainer.default_local_dir={folder}/checkpoints",
        ]
        return harness.run_trainer(folder, lines), folder / "checkpoints"

    return once("split", run)


@pytest.fixture(scope="session")
def overlapping(once, split):
    """Lists that overlap without being equal, so that processes share devices; goes on from what `split` saved."""
    lines = [*placed(actor=[0, 1], critic=[1, 2], ref=[0]), *resume_from(split[1], SAVED)]
    return once(
        "overlapping", lambda folder: harness.run_trainer(folder, [*harness.base_overrides(SAVED + STEPS), *lines])
    )


@pytest.fixture(scope="session")
def reward_model(once):
    """A sequence classifier with fewer positions than a prompt and its response can have."""
    return once("reward-model", _make_reward_model)


def _make_reward_model(folder) -> str:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(harness.files().model)
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=REWARD_POSITIONS,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def grpo_overrides(reward_model: str, steps: int) -> list[str]:
    """GRPO whose scores come from a reward model that our own server holds."""
    replaced = ("algorithm.adv_estimator", "reward.custom_reward_function")
    return [
        *[line for line in harness.base_overrides(steps) if not line.startswith(replaced)],
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=False",
        "actor_rollout_ref.rollout.n=2",
        "reward.reward_model.enable=True",
        f"reward.reward_model.model_path={reward_model}",
        "reward.reward_model.rollout.name=hf",
        "reward.reward_model.rollout.tensor_model_parallel_size=1",
        "sharding.roles.reward.dtype=float32",
    ]


@pytest.fixture(scope="session")
def grpo(once, reward_model):
    """Every role apart, validation, a limit on requests, and variables that the user exported."""
    lines = [
        *grpo_overrides(reward_model, STEPS),
        *placed(actor=[1, 3], ref=[0], reward=[2]),
        "actor_rollout_ref.actor.use_kl_loss=True",
        "sharding.roles.rollout.batch_size=4",
        f"trainer.test_freq={STEPS}",
    ]
    env = {**EXPORTED, "VERL_LOGGING_LEVEL": "DEBUG"}
    return once("grpo", lambda folder: harness.run_trainer(folder, lines, env=env))
