"""`sharding.roles.reward` as verl's own keys of the reward model's server, and what else of it acts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verl_ext_sharding.config.changes import KeyChange
from verl_ext_sharding.config.reward import KEY, handled_reward_keys
from verl_ext_sharding.config.reward_limits import (
    CUSTOM_FUNCTION,
    MAX_INPUT_TOKENS,
    POLICY,
    ROLLOUT,
    is_discriminative,
    propose_reward_max_model_len,
)
from verl_ext_sharding.config.schema import ShardingConfig
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.bundles import Placement
from verl_ext_sharding.placement.job import JobFacts

HF = "hf"
"""verl's name for our backend, see `rollout.NAME`."""


def reward_changes(
    request: ShardingConfig,
    facts: JobFacts,
    placement: Placement,
    current: Mapping[str, Any],
    hf_config: Mapping[str, Any] | None = None,
) -> Iterator[KeyChange]:
    """verl's keys for the reward model.

    Args:
        request: The user's request.
        facts: The job.
        placement: Where the roles run.
        current: verl's resolved values by dotted key.
        hf_config: The reward model's config, where it can be read.

    Raises:
        ConfigError: The job has no reward model, or one that the setting does not act on.
    """
    reward = request.roles.reward
    _check_there(request, facts, current)
    if facts.reward is None:
        return
    if reward.dtype is not None:
        yield KeyChange(key=f"{ROLLOUT}.dtype", new=reward.dtype, why=f"{KEY}.dtype")
    if reward.micro_batch_size is not None:
        yield KeyChange(key=f"{ROLLOUT}.max_num_seqs", new=reward.micro_batch_size, why=f"{KEY}.micro_batch_size")
    if reward.max_tokens is not None:
        yield KeyChange(key=f"{ROLLOUT}.max_num_batched_tokens", new=reward.max_tokens, why=f"{KEY}.max_tokens")
    if reward.layout == "device_map" and facts.reward.name == HF:
        devices = placement.devices_of("reward")
        count = len(devices) if devices else facts.reward.own_devices
        yield KeyChange(key=f"{ROLLOUT}.tensor_model_parallel_size", new=count, why=f"{KEY}.layout")
    if hf_config is not None and is_discriminative(current):
        change = propose_reward_max_model_len(hf_config, facts.reward.name, current.get(f"{ROLLOUT}.max_model_len"))
        if change is not None:
            yield change


def acting_keys(request: ShardingConfig, facts: JobFacts, current: Mapping[str, Any]) -> Iterator[str]:
    """Keys of the request that act without a key of verl."""
    if facts.reward is not None and facts.reward.name == HF:
        yield from handled_reward_keys(request)
    if is_discriminative(current):
        yield from (MAX_INPUT_TOKENS, POLICY)


def _check_there(request: ShardingConfig, facts: JobFacts, current: Mapping[str, Any]) -> None:
    changed = {key: value for key, value in request.changed().items() if key.startswith(f"{KEY}.") or key == POLICY}
    changed.pop(f"{KEY}.devices", None)
    if not changed:
        return
    key, value = next(iter(changed.items()))
    if facts.reward is None:
        raise _refused(key, "a job that has a reward model", value, f"reward.reward_model.enable=True, or remove {key}")
    of_inputs = [key for key in changed if key in (MAX_INPUT_TOKENS, POLICY)]
    if of_inputs and not is_discriminative(current):
        raise _refused(
            of_inputs[0],
            f"a reward model that verl itself asks for scores ({CUSTOM_FUNCTION}=null)",
            f"{changed[of_inputs[0]]} with a reward function of the user's, which prepares its own inputs",
            f"remove {of_inputs[0]}",
        )
    only_hf = set(handled_reward_keys(request)) & changed.keys()
    if only_hf and facts.reward.name != HF:
        name = sorted(only_hf)[0]
        raise _refused(
            name,
            f"{ROLLOUT}.name={HF}, which acts on it",
            f"{changed[name]} with {ROLLOUT}.name={facts.reward.name}",
            f"{ROLLOUT}.name={HF}, or remove {name}",
        )


def _refused(key: str, expected: str, found: Any, remedy: str) -> ConfigError:
    return ConfigError(
        key,
        expected=expected,
        found=str(found),
        consequence="the run does not start, since the request would be skipped",
        remedy=remedy,
    )
