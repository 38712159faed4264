"""Whether what a job saves can be used afterwards: known before it trains for hours, not when its checkpoint is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext_sharding.config.facts import FSDP, uses_lora
from verl_ext_sharding.config.measures import MODEL_BLOCK
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.job import JobFacts

CHECKPOINT_BLOCK = {"actor": "actor_rollout_ref.actor.checkpoint", "critic": "critic.checkpoint"}
SFT_CHECKPOINT_BLOCK = "checkpoint"
"""Where verl's config says what is saved: of a PPO role, and of SFT."""


def check_saved_contents(config: DictConfig, facts: JobFacts) -> None:
    """Refuses `hf_model` of roles with adapters, and adapters alone where more is trained.

    Args:
        config: verl's composed PPO config, with what the request set.
        facts: The job, read from the same config.

    Raises:
        ConfigError: Names the key, and how the weights are had instead.
    """
    for role, checkpoint in CHECKPOINT_BLOCK.items():
        if role in facts.engines:
            strategy = facts.engines[role].strategy
            check_hf_model(config, strategy, checkpoint=checkpoint, model=MODEL_BLOCK[role], folder=f"/{role}")
            check_lora_only(config, strategy, checkpoint=checkpoint, model=MODEL_BLOCK[role])


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
    contents = _saved(config, checkpoint)
    if strategy not in FSDP or "hf_model" not in contents or not uses_lora(config, model):
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


def check_lora_only(config: DictConfig, strategy: str, *, checkpoint: str, model: str) -> None:
    """Refuses `save_lora_only` where more is trained than what verl takes for adapters by its name.

    Args:
        config: verl's composed config, with what the request set.
        strategy: Of the engine.
        checkpoint: Block of what is saved.
        model: Block of the model.

    Raises:
        ConfigError: Names the key, and what is trained besides.
    """
    asked = OmegaConf.select(config, f"{checkpoint}.save_lora_only", default=False)
    adapts = (OmegaConf.select(config, f"{model}.lora_rank", default=0) or 0) > 0  # the one that these engines look at
    if not asked or not adapts or strategy not in FSDP or "model" not in _saved(config, checkpoint):
        return
    path = OmegaConf.select(config, f"{model}.lora_adapter_path", default=None)
    others = ["the value head"] if model == MODEL_BLOCK["critic"] else []
    others += _trained_whole(_adapter_config(path)) if path is not None else []
    if others:
        raise more_than_adapters(checkpoint, " and ".join(others), consequence="the run does not start")


def more_than_adapters(checkpoint: str, found: str, *, consequence: str) -> ConfigError:
    """The error for `save_lora_only` of a model of which more is trained.

    Args:
        checkpoint: Block of what is saved.
        found: What is trained besides.
        consequence: What happens now.
    """
    return ConfigError(
        f"{checkpoint}.save_lora_only=True",
        expected="no more trained than adapters, which is all that it saves: the rest would be lost to a run that resumes",
        found=found,
        consequence=consequence,
        remedy=f"++{checkpoint}.save_lora_only=False",
    )


def _saved(config: DictConfig, checkpoint: str) -> list[str]:
    """Contents of a checkpoint; none where the job saves none, which SFT does after its last step whatever `save_freq`."""
    saves = checkpoint == SFT_CHECKPOINT_BLOCK or (OmegaConf.select(config, "trainer.save_freq", default=-1) or -1) > 0
    return list(OmegaConf.select(config, f"{checkpoint}.save_contents", default=None) or ()) if saves else []


def _adapter_config(path: str) -> dict[str, Any]:
    """PEFT's config of adapters in a local folder; of others, the engine knows when it saves."""
    try:
        read = json.loads((Path(path) / "adapter_config.json").read_text())
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _trained_whole(adapters: dict[str, Any]) -> Iterator[str]:
    """What PEFT trains besides low-rank matrices and magnitudes."""
    for key in ("modules_to_save", "trainable_token_indices"):
        if adapters.get(key):
            yield f"{key} of the adapters"
    if adapters.get("bias", "none") != "none":
        yield "biases of the model (bias of the adapters)"
