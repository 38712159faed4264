"""The share of cut reward inputs in verl's metric stream.

verl shows `reward_extra_info` in validation only, and there only where a reward model has devices of its own: a colocated
one's extra values are stored beside the samples and never read. Two hooks on the trainer, each calling verl's own method first:
after colocated scoring the values are put where verl's validation looks for them, and each step's metrics get

    reward_input/clip_ratio      share of samples that were cut
    reward_input/tokens/mean     length as sent, in the reward model's tokens
    reward_input/tokens/max
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import transfer_queue
from ray.exceptions import ActorDiedError
from tensordict import NonTensorStack, TensorDict

from verl_ext_sharding.errors import RewardServerError, first_error_of, why_it_ended
from verl_ext_sharding.rollout.reward_worker import NUM_TOKENS, TRUNCATED

_HOOKED = ("_compute_reward_colocate", "_compute_metrics")


def apply(trainer: Any) -> None:
    """Adds both hooks to a trainer instance. Idempotent.

    Args:
        trainer: A `PPOTrainer` whose reward model is discriminative.
    """
    trainer._compute_reward_colocate = types.MethodType(_compute_reward_colocate, trainer)
    trainer._compute_metrics = types.MethodType(_compute_metrics, trainer)


def remove(trainer: Any) -> None:
    """Takes both hooks away: the trainer's class acts alone again. Idempotent."""
    for name in _HOOKED:
        vars(trainer).pop(name, None)


def _compute_reward_colocate(trainer: Any, batch: Any, metrics: dict[str, Any] | None = None) -> Any:
    """As the trainer's, then copies our values of each sample into its `extra_fields`."""
    try:
        scored = type(trainer)._compute_reward_colocate(trainer, batch, metrics)
    except ActorDiedError as error:
        raise server_died(trainer.config, error) from error
    stored = transfer_queue.kv_batch_get(
        keys=scored.keys, partition_id=scored.partition_id, select_fields=["extra_fields", TRUNCATED, NUM_TOKENS]
    )
    values = {name: _listed(stored[name]) for name in (TRUNCATED, NUM_TOKENS)}
    merged = []
    for index, fields in enumerate(_listed(stored["extra_fields"])):
        fields = dict(fields) if isinstance(fields, dict) else {}
        info = {name: int(values[name][index]) for name in values}
        merged.append({**fields, "reward_extra_info": {**fields.get("reward_extra_info", {}), **info}})
    transfer_queue.kv_batch_put(
        keys=scored.keys,
        partition_id=scored.partition_id,
        fields=TensorDict({"extra_fields": NonTensorStack(*merged)}, batch_size=len(merged)),
    )
    return scored


def server_died(config: Any, error: Exception) -> RewardServerError:
    """What to say when Ray reports that a reward server is gone."""
    reward_model = config.reward.reward_model
    return RewardServerError(
        f"server of the reward model {reward_model.model_path}",
        expected="a process that scores samples",
        found=f"it has ended: {why_it_ended(error)}",
        consequence="the run stops, since there are no rewards without it",
        remedy=f"{first_error_of(f'{reward_model.rollout.name} reward server')}; killed for host memory: "
        "sharding.roles.reward.devices on another node, or a smaller reward.reward_model.rollout.max_num_batched_tokens",
    )


def _compute_metrics(trainer: Any, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """As the trainer's, then adds the share of the step's samples, padding left out."""
    result = type(trainer)._compute_metrics(trainer, batch, metrics, *args, **kwargs)
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    if keys:
        stored = transfer_queue.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
        metrics.update(summarise(_listed(stored["extra_fields"])))
    return result


def summarise(extra_fields: Sequence[Any]) -> dict[str, float]:
    """One step's metrics from its samples.

    Args:
        extra_fields: One mapping for each sample, as verl's agent loop stores it.

    Returns:
        The metrics; empty where no sample was scored by a reward model.
    """
    infos = [fields.get("reward_extra_info") or {} for fields in extra_fields if isinstance(fields, dict)]
    infos = [info for info in infos if TRUNCATED in info]
    if not infos:
        return {}
    lengths = [info[NUM_TOKENS] for info in infos]
    return {
        "reward_input/clip_ratio": sum(info[TRUNCATED] for info in infos) / len(infos),
        "reward_input/tokens/mean": sum(lengths) / len(lengths),
        "reward_input/tokens/max": max(lengths),
    }


def _listed(column: Any) -> list[Any]:
    """A column of TransferQueue as a list, whichever of its forms it came in."""
    return list(column.tolist() if hasattr(column, "tolist") else column)
