"""What a job saves can be loaded afterwards, or the job is refused before it starts."""

from __future__ import annotations

import pytest

pytest.importorskip("omegaconf")

from omegaconf import OmegaConf

from verl_ext_sharding.config.saved_contents import check_saved_contents
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.job import EngineFacts

BLOCKS = {
    "actor": ("actor_rollout_ref.actor.checkpoint", "actor_rollout_ref.model"),
    "critic": ("critic.checkpoint", "critic.model"),
}
WITH_HF = ["model", "optimizer", "hf_model", "extra"]


def config_of(role, contents, *, lora=8, save_freq=10):
    config = OmegaConf.create({"trainer": {"save_freq": save_freq}})
    block, model = BLOCKS[role]
    OmegaConf.update(config, f"{block}.save_contents", contents, force_add=True)
    OmegaConf.update(config, f"{model}.lora_rank", lora, force_add=True)
    return config


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
@pytest.mark.parametrize("role", BLOCKS)
def test_a_model_with_adapters_is_not_saved_under_names_that_nothing_loads(role, strategy, job):
    facts = job(engines={role: EngineFacts(strategy=strategy)})
    with pytest.raises(ConfigError) as caught:
        check_saved_contents(config_of(role, WITH_HF), facts)
    assert caught.value.subject == f"{BLOCKS[role][0]}.save_contents"
    assert "save_contents=[model,optimizer,extra], and" in caught.value.remedy
    assert f"<checkpoint>/{role}" in caught.value.remedy
    with pytest.raises(ConfigError, match=r"save_contents=\[model\], and"):
        check_saved_contents(config_of(role, ["hf_model"]), facts)


@pytest.mark.parametrize("role", BLOCKS)
def test_what_can_be_loaded_is_accepted(role, job):
    facts = job(engines={role: EngineFacts(strategy="fsdp2")})
    check_saved_contents(config_of(role, ["model", "optimizer", "extra"]), facts)
    check_saved_contents(config_of(role, WITH_HF, lora=0), facts)
    check_saved_contents(config_of(role, WITH_HF, save_freq=-1), facts)
    check_saved_contents(config_of(role, WITH_HF), job(engines={role: EngineFacts(strategy="megatron")}))
