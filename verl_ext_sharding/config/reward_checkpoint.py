"""What a reward model's config shows of a checkpoint that `rollout.name=hf` can't serve, before its weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_ext_sharding.config.reward_limits import MAX_MODEL_LEN, MODEL_PATH, ROLLOUT, model_limit
from verl_ext_sharding.errors import ConfigError

_OTHER_HEADS = (
    "ForCausalLM",
    "ForConditionalGeneration",
    "ForMultipleChoice",
    "ForQuestionAnswering",
    "ForTokenClassification",
)
"""Endings of architectures with another head. Some keep it under the name of a classifier's, with a bias or a training of
its own: it would load without a word and score something else. A critic that verl saved is the likeliest."""


def check_reward_model(
    hf_config: Mapping[str, Any], path: str, *, max_model_len: int | None = None
) -> list[ConfigError]:
    """What a reward model's own config shows before its weights are read.

    Args:
        hf_config: Its Hugging Face config as a plain mapping.
        path: `reward.reward_model.model_path`.
        max_model_len: `reward.reward_model.rollout.max_model_len`.

    Returns:
        One error for each problem; empty when there is none.
    """
    errors = []
    architectures = hf_config.get("architectures") or []
    if any(name.endswith(_OTHER_HEADS) for name in architectures):
        errors.append(no_classifier(path, ", ".join(architectures)))
    longest = model_limit(hf_config)
    if max_model_len is not None and longest.tokens is not None and max_model_len > longest.tokens:
        errors.append(beyond_positions(max_model_len, longest.tokens, longest.source))
    return errors


def no_classifier(path: str, found: str) -> ConfigError:
    """The error for a checkpoint that gives no score for a sequence."""
    return ConfigError(
        f"{MODEL_PATH}={path}",
        expected="a trained sequence-classification model (...ForSequenceClassification), whose head gives the score",
        found=found,
        consequence="the reward server does not start",
        remedy=f"a reward model's checkpoint in {MODEL_PATH}; for one that generates, {ROLLOUT}.name=vllm",
    )


def beyond_positions(limit: int, longest: int, source: str) -> ConfigError:
    """The error for a `max_model_len` that is more than the reward model takes."""
    return ConfigError(
        MAX_MODEL_LEN,
        expected=f"at most {longest}, which the reward model takes: {source}",
        found=str(limit),
        consequence="the reward server does not start",
        remedy=f"{MAX_MODEL_LEN}={longest}",
    )
