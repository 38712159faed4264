"""PPO with a LoRA actor whose reference is the actor without its adapter, and a critic, in verl's own trainer."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("verl")

from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.v1 import trainer_base
from verl.utils import tensordict_utils as tu

from verl_ext_sharding import driver
from verl_ext_sharding.config.changes import parse_overrides
from verl_ext_sharding.patch_points import values_adapter
from verl_ext_sharding.patching import apply, remove

JOB = (
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
)
LORA, KL, NO_CRITIC = (
    "actor_rollout_ref.model.lora_rank=8",
    "algorithm.use_kl_in_reward=True",
    "algorithm.adv_estimator=grpo",
)


class Batch:
    """A batch's keys, as the trainer hands them to workers."""

    keys, partition_id = ("a", "b"), "train"

    def __init__(self):
        self.extra_info = {}

    def __len__(self):
        return len(self.keys)


@pytest.fixture
def asked(monkeypatch):
    """`asked()`: what actor and critic are told of adapters in the log-probs of a reference and the values after it."""
    told = {}

    def hear(name, answer):
        def method(batch):
            told[name] = batch.extra_info.get("no_lora_adapter", False)
            return answer(batch)

        return method

    rows = tu.get_tensordict({name: torch.ones(2, 3) for name in ("log_probs", "values", "response_mask")})
    store = SimpleNamespace(kv_batch_get=lambda **_: TensorDict(rows.clone()), kv_batch_put=lambda **_: None)
    monkeypatch.setattr(trainer_base, "tq", store)
    monkeypatch.setattr(trainer_base, "response_from_nested", lambda values, mask: values)
    monkeypatch.setattr(trainer_base.ray, "get", lambda futures: futures)

    def run():
        trainer = SimpleNamespace(
            config=OmegaConf.create({"actor_rollout_ref": {"rollout": {"temperature": 1.0}}}),
            ref_in_actor=True,
            actor_rollout_wg=SimpleNamespace(compute_log_prob=hear("reference", lambda batch: batch.keys)),
            critic_wg=SimpleNamespace(infer_batch=hear("critic", lambda _: SimpleNamespace(futures=[]))),
        )
        batch = Batch()
        for compute in (trainer_base.PPOTrainer._compute_ref_log_prob, trainer_base.PPOTrainer._compute_values):
            batch = compute(trainer, batch, {})
        return told

    return run


def test_verl_leaves_the_references_adapter_out_of_the_critic_too(asked):
    assert asked() == {"reference": True, "critic": True}


def test_the_critic_keeps_its_adapter(asked):
    apply(values_adapter.SPEC)
    try:
        assert asked() == {"reference": True, "critic": False}
    finally:
        remove(values_adapter.SPEC)


@pytest.mark.parametrize(
    ("settings", "needed"), [((LORA, KL), True), ((LORA,), False), ((KL,), False), ((LORA, KL, NO_CRITIC), False)]
)
def test_the_patch_is_needed_where_reference_and_critic_come_after_one_another(settings, needed, compose):
    lines = [*JOB, *settings]
    plan = driver.prepare(compose(*lines), parse_overrides(lines))
    assert (values_adapter.SPEC.needed_by in driver.needed_keys(plan, plan.placement)) is needed
