"""Case S1: each key listed under "Old keys" of verl 0.9.1 is answered with the new key, or with why it is gone."""

import pytest

from verl_ext_sharding import driver
from verl_ext_sharding.config.changes import parse_overrides
from verl_ext_sharding.config.old_keys import answer
from verl_ext_sharding.errors import ConfigError

KNOWN = frozenset(
    {
        "critic.fsdp",
        "critic.fsdp.param_offload",
        "actor_rollout_ref.actor.fsdp_config.offload_policy",
        "actor_rollout_ref.actor.fsdp_config.param_offload",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
        "actor_rollout_ref.nccl_timeout",
    }
)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("critic.model.fsdp_config.param_offload", "critic.fsdp.param_offload"),
        ("critic.fsdp_config.param_offload", "critic.fsdp.param_offload"),
        ("actor_rollout_ref.actor.offload_policy", "actor_rollout_ref.actor.fsdp_config.offload_policy"),
        (
            "actor_rollout_ref.rollout.update_weights_bucket_megabytes",
            "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
        ),
        ("critic.nccl_timeout", "actor_rollout_ref.nccl_timeout"),
    ],
)
def test_a_moved_key_is_answered_with_the_new_key_and_its_value(old, new):
    found = answer(old, "512", KNOWN)
    assert found is not None
    assert found.overrides == (f"{new}=512",)
    assert f"{new}=512" in str(found.error())


@pytest.mark.parametrize(
    ("old", "why"),
    [
        ("actor_rollout_ref.actor.fsdp_config.grad_offload", "gradients move to the host with the parameters"),
        ("actor_rollout_ref.ref.fsdp_config.grad_offload", "gradients move to the host with the parameters"),
        ("critic.fsdp_config.grad_offload", "gradients move to the host with the parameters"),
        ("reward_model.model.fsdp_config.param_offload", "the reward model is a vLLM or SGLang server"),
        ("reward_model.model.fsdp_config.wrap_policy.min_num_params", "the reward model is a vLLM or SGLang server"),
    ],
)
def test_a_key_that_is_gone_is_answered_with_the_reason(old, why):
    found = answer(old, "True", KNOWN)
    assert found is not None
    assert found.overrides == ()
    assert why in str(found.error())


@pytest.mark.parametrize("written", ["+{}", "++{}", "{}"])
@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("critic.model.fsdp_config.param_offload=True", "write critic.fsdp.param_offload=True"),
        ("actor_rollout_ref.rollout.update_weights_bucket_megabytes=512",
         "write actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=512"),
        ("critic.nccl_timeout=600", "write actor_rollout_ref.nccl_timeout=600"),
        ("reward_model.model.fsdp_config.param_offload=True", "remove reward_model.model.fsdp_config.param_offload"),
    ],
)  # fmt: skip
def test_a_command_with_an_old_key_ends_in_what_to_type_with_and_without_a_plus(written, line, remedy, compose):
    typed = [written.format(line)]
    with pytest.raises(ConfigError) as caught:
        driver.prepare(compose(*typed), parse_overrides(typed))
    assert caught.value.remedy == remedy


def test_a_key_that_never_existed_is_left_to_hydra():
    assert answer("critic.fsdp.parm_offload", "True", KNOWN) is None
