"""The reward model of a run, as the driver looks at it before the run: what its servers are asked, what inputs may not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext_sharding import rollout
from verl_ext_sharding.config.reward import RewardServerSettings, reward_server_settings
from verl_ext_sharding.config.reward_checkpoint import check_reward_model
from verl_ext_sharding.config.reward_limits import (
    ENABLE,
    MAX_MODEL_LEN,
    MODEL_PATH,
    is_discriminative,
    read_hf_config,
    reward_length_finding,
    reward_limit,
)
from verl_ext_sharding.config.schema import ShardingConfig
from verl_ext_sharding.placement.job import JobFacts


def hf_config_of(config: DictConfig) -> dict[str, Any] | None:
    """The reward model's Hugging Face config, where the job has one that the driver can read."""
    path = OmegaConf.select(config, MODEL_PATH, default=None)
    enabled = bool(OmegaConf.select(config, ENABLE, default=False))
    return read_hf_config(str(path)) if enabled and path is not None else None


def check(
    config: DictConfig, request: ShardingConfig, facts: JobFacts, hf_config: Mapping[str, Any] | None = None
) -> RewardServerSettings | None:
    """What is asked of reward servers of `rollout.name=hf`, or None where there are none.

    Args:
        config: verl's composed config, with the keys that the request sets.
        request: The user's request.
        facts: The job.
        hf_config: From `hf_config_of`.

    Raises:
        ConfigError: The first thing that such a server can't do.
    """
    if facts.reward is None or facts.reward.name != rollout.NAME:
        return None
    from verl_ext_sharding.rollout.checks import check_reward

    block = config.reward.reward_model
    asked = reward_server_settings(request, own_pool=bool(block.enable_resource_pool))
    errors = check_reward(OmegaConf.to_container(block.rollout, resolve=True), asked)
    if hf_config is not None:
        errors += check_reward_model(hf_config, block.model_path, max_model_len=block.rollout.max_model_len)
    for error in errors:
        raise error
    return asked


def notes(
    request: ShardingConfig, facts: JobFacts, values: Mapping[str, Any], hf_config: Mapping[str, Any] | None
) -> list[str]:
    """What the user should know of the reward model before the run.

    Args:
        request: The user's request.
        facts: The job.
        values: verl's resolved values by dotted key.
        hf_config: From `hf_config_of`.

    Raises:
        ConfigError: More is asked of the reward model than it can take.
    """
    if facts.reward is None or hf_config is None or not is_discriminative(values):
        return []
    limit = reward_limit(
        hf_config,
        engine=facts.reward.name,
        max_model_len=values.get(MAX_MODEL_LEN),
        max_input_tokens=request.roles.reward.max_input_tokens,
    )
    finding = reward_length_finding(
        limit,
        max_prompt_length=int(values.get("data.max_prompt_length") or 0),
        max_response_length=int(values.get("data.max_response_length") or 0),
        policy=request.guards.reward_length,
    )
    return [finding] if finding is not None else []
