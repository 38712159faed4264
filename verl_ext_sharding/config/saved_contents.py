"""Whether what a job saves can be used afterwards: known before it trains for hours, not when its checkpoint is read."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_ext_sharding.config.facts import FSDP, uses_lora
from verl_ext_sharding.config.measures import MODEL_BLOCK
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.job import JobFacts

_CHECKPOINT = {"actor": "actor_rollout_ref.actor.checkpoint", "critic": "critic.checkpoint"}


def check_saved_contents(config: DictConfig, facts: JobFacts) -> None:
    """Refuses `hf_model` of roles with adapters.

    Args:
        config: verl's composed PPO config, with what the request set.
        facts: The job, read from the same config.

    Raises:
        ConfigError: Names the key, and how the weights are had instead.
    """
    for role, checkpoint in _CHECKPOINT.items():
        if role in facts.engines:
            strategy = facts.engines[role].strategy
            check_hf_model(config, strategy, checkpoint=checkpoint, model=MODEL_BLOCK[role], folder=f"/{role}")


def check_hf_model(config: DictConfig, strategy: str, *, checkpoint: str, model: str, folder: str = "") -> None:
    """Refuses `hf_model` of a model with adapters.

    verl's FSDP engines write it under PEFT's names (`base_model.model...base_layer.weight`, utils/checkpoint/
    fsdp_checkpoint_manager.py), of which `from_pretrained` knows none: it makes up all weights, with no more than a warning.

    Args:
        config: verl's composed config, with what the request set.
        strategy: Of the engine.
        checkpoint: Block of what is saved.
        model: Block of the model.
        folder: Where its files are in a checkpoint, with a slash in front.

    Raises:
        ConfigError: Names the key, and how the weights are had instead.
    """
    contents = list(OmegaConf.select(config, f"{checkpoint}.save_contents", default=None) or ())
    saves = (OmegaConf.select(config, "trainer.save_freq", default=-1) or -1) > 0
    if not saves or strategy not in FSDP or "hf_model" not in contents or not uses_lora(config, model):
        return
    others = [one for one in contents if one != "hf_model"]
    kept = others if "model" in others else ["model", *others]
    raise ConfigError(
        f"{checkpoint}.save_contents",
        expected="no hf_model with LoRA: verl writes it under the names of adapters, and whoever loads it gets random weights",
        found=f"[{','.join(contents)}]",
        consequence="the run does not start",
        remedy=f"{checkpoint}.save_contents=[{','.join(kept)}], and afterwards `python -m verl.model_merger merge --backend fsdp "
        f"--local_dir <checkpoint>{folder} --target_dir <folder>`, which writes model and adapter",
    )
