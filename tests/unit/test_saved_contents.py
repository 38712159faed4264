"""What a job saves can be loaded afterwards, or the job is refused before it starts."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("omegaconf")

from omegaconf import OmegaConf

from verl_ext_sharding.config.saved_contents import check_hf_model, check_lora_only, check_saved_contents
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


def lora_only(role, adapters=None, folder=None, **options):
    config = config_of(role, ["model"], **options)
    block, model = BLOCKS[role]
    OmegaConf.update(config, f"{block}.save_lora_only", True, force_add=True)
    if adapters is not None:
        (folder / "adapter_config.json").write_text(json.dumps(adapters))
        OmegaConf.update(config, f"{model}.lora_adapter_path", str(folder), force_add=True)
    return config


@pytest.mark.parametrize(
    ("role", "adapters", "found"),
    [
        ("critic", None, "the value head"),
        ("actor", {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ("actor", {"trainable_token_indices": [3], "bias": "none"}, "trainable_token_indices"),
        ("actor", {"bias": "lora_only"}, "biases"),
    ],
    ids=str,
)
def test_adapters_alone_are_not_saved_where_more_is_trained(role, adapters, found, job, tmp_path):
    facts = job(engines={role: EngineFacts(strategy="fsdp2")})
    config = lora_only(role, adapters, tmp_path)
    with pytest.raises(ConfigError) as caught:
        check_saved_contents(config, facts)
    assert found in caught.value.found
    key = f"{BLOCKS[role][0]}.save_lora_only"
    assert caught.value.remedy == f"++{key}=False"
    OmegaConf.update(config, key, False)
    check_saved_contents(config, facts)


@pytest.mark.parametrize(
    "adapters", [None, {}, {"modules_to_save": None, "trainable_token_indices": None, "bias": "none", "use_dora": True}]
)
def test_adapters_alone_are_saved_where_they_are_all_that_is_trained(adapters, job, tmp_path):
    check_saved_contents(lora_only("actor", adapters, tmp_path), job(engines={"actor": EngineFacts(strategy="fsdp2")}))


def test_a_critic_that_saves_nothing_or_has_no_adapters_may_ask_for_adapters_alone(job):
    facts = job(engines={"critic": EngineFacts(strategy="fsdp2")})
    check_saved_contents(lora_only("critic", save_freq=-1), facts)
    check_saved_contents(lora_only("critic", lora=0), facts)


@pytest.mark.parametrize("save_freq", [-1, 10, "after_each_epoch"])
def test_sft_saves_after_its_last_step_at_least(save_freq, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"modules_to_save": ["lm_head"]}')
    config = OmegaConf.create(
        {
            "trainer": {"save_freq": save_freq},
            "checkpoint": {"save_contents": ["model", "hf_model"], "save_lora_only": True},
            "model": {"lora_rank": 8, "lora_adapter_path": str(tmp_path)},
        }
    )
    for check in (check_hf_model, check_lora_only):
        with pytest.raises(ConfigError):
            check(config, "fsdp2", checkpoint="checkpoint", model="model")
