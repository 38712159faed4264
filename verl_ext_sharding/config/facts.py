"""Reads what placement must know of a job out of verl's composed config. No verl import: plain keys only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.job import EngineFacts, JobFacts, MicroBatch, ServerFacts

_MODEL_PARALLEL = {
    "megatron": ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    "torchtitan": ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"),
    "veomni": ("ulysses_parallel_size",),
}
"""Keys below the block of a strategy whose product is the ranks that one sample takes; FSDP has `_ULYSSES`."""

_ULYSSES = "ulysses_sequence_parallel_size"


def job_facts(config: DictConfig) -> JobFacts:
    """The job as placement sees it.

    Args:
        config: verl's composed PPO config, not necessarily resolved.

    Raises:
        ConfigError: The config is none of `verl.trainer.main_ppo`, or a number in it is none.
    """
    if "actor_rollout_ref" not in config or "algorithm" not in config:
        raise _not_ppo(config)
    mode = str(_get(config, "trainer.v1.trainer_mode", "sync"))
    engines = {"actor": _engine(config, "actor_rollout_ref.actor", "fsdp_config", "ActorRolloutRefWorker")}
    if needs_reference(config):
        engines["ref"] = _engine(config, "actor_rollout_ref.ref", "fsdp_config", "ActorRolloutRefWorker", trains=False)
    if needs_critic(config):
        engines["critic"] = _engine(config, "critic", "fsdp", "TrainingWorker")
    return JobFacts(
        num_nodes=_count(config, "trainer.nnodes", 1),
        devices_per_node=_count(config, "trainer.n_gpus_per_node", 1),
        mode=mode,
        engines=engines,
        rollout=_server(
            config,
            "actor_rollout_ref.rollout",
            own_devices=_own(config, "actor_rollout_ref.rollout") if mode == "separate_async" else 0,
        ),
        reward=_reward(config),
        teacher=_teacher(config),
        ref_in_actor=uses_lora(config),
        hybrid_rollout=mode != "separate_async" or bool(_get(config, "actor_rollout_ref.hybrid_engine", True)),
        train_batch_size=_count(config, "data.train_batch_size", 1),
        rollout_n=_count(config, "actor_rollout_ref.rollout.n", 1),
        parameter_sync_step=_count(config, f"trainer.v1.{mode}.parameter_sync_step", 1),
        transfer_queue_units=_transfer_queue_units(config),
    )


def needs_critic(config: DictConfig) -> bool:
    """As verl's `trainer.ppo.utils.need_critic`."""
    enable = _get(config, "critic.enable", None)
    return bool(enable) if enable is not None else str(config.algorithm.adv_estimator) == "gae"


def needs_reference(config: DictConfig) -> bool:
    """As verl's `trainer.ppo.utils.need_reference_policy`."""
    return bool(
        _get(config, "algorithm.use_kl_in_reward", False) or _get(config, "actor_rollout_ref.actor.use_kl_loss", False)
    )


def uses_lora(config: DictConfig, model: str = "actor_rollout_ref.model") -> bool:
    """As verl's trainer decides `ref_in_actor` (trainer/ppo/v1/trainer_base.py).

    Args:
        config: verl's composed config.
        model: Block of the model.
    """
    rank = int(_get(config, f"{model}.lora.rank", 0) or 0)
    rank = rank if rank > 0 else int(_get(config, f"{model}.lora_rank", 0) or 0)
    return rank > 0 or _get(config, f"{model}.lora_adapter_path", None) is not None


def _engine(config: DictConfig, block: str, fsdp: str, worker: str, *, trains: bool = True) -> EngineFacts:
    strategy = str(_get(config, f"{block}.strategy", "fsdp"))
    if strategy in _MODEL_PARALLEL:
        parallel = math.prod(_count(config, f"{block}.{strategy}.{name}", 1) for name in _MODEL_PARALLEL[strategy])
    else:
        parallel = _count(config, f"{block}.{fsdp}.{_ULYSSES}", 1)
        # A deprecated key that wins where it is set (workers/config/actor.py); the critic's is never read.
        legacy = _count(config, f"{block}.{_ULYSSES}", 1) if block != "critic" else 1
        parallel = legacy if legacy > 1 else parallel
    mini = f"{block}.ppo_mini_batch_size"
    return EngineFacts(
        strategy=strategy,
        model_parallel_size=parallel,
        mini_batch_size=_count(config, mini, 1) if trains and _get(config, mini, None) is not None else None,
        micro_batches=tuple(_micro_batches(config, block)),
        worker_class=worker,
    )


def _micro_batches(config: DictConfig, block: str) -> Iterator[MicroBatch]:
    """Fixed micro-batches that verl really uses (workers/engine_workers.py, trainer/ppo/v1/trainer_base.py).

    The critic's own `ppo_micro_batch_size_per_gpu` is not among them: the v1 trainer leaves its engine at token budgets.
    """
    rollout = "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
    candidates = {
        "actor_rollout_ref.actor": (("ppo_micro_batch_size_per_gpu", False),),
        "actor_rollout_ref.ref": (("log_prob_micro_batch_size_per_gpu", True),),
        "critic": (("fsdp.micro_batch_size_per_gpu", False), ("fsdp.infer_micro_batch_size_per_gpu", True)),
    }
    dynamic = {"actor_rollout_ref.ref": "log_prob_use_dynamic_bsz", "critic": "fsdp.use_dynamic_bsz"}
    if _get(config, f"{block}.{dynamic.get(block, 'use_dynamic_bsz')}", block == "critic"):
        return
    for key, of_step in candidates[block]:
        if _get(config, f"{block}.{key}", None) is not None:
            yield MicroBatch(key=f"{block}.{key}", samples=_count(config, f"{block}.{key}", 1), of_step=of_step)
    if block == "actor_rollout_ref.actor" and _get(config, rollout, None) is not None:
        yield MicroBatch(key=rollout, samples=_count(config, rollout, 1), of_step=True)


def _server(config: DictConfig, block: str, own_devices: int = 0) -> ServerFacts:
    tensor = ranks = _count(config, f"{block}.tensor_model_parallel_size", 1)
    if _get(config, f"{block}.disaggregation.enabled", False):  # one replica prefills and decodes (llm_server.py)
        decode = _count(config, f"{block}.disaggregation.decode_tensor_model_parallel_size", tensor)
        ranks = tensor * _count(config, f"{block}.disaggregation.prefill_replicas", 1)
        ranks += decode * _count(config, f"{block}.disaggregation.decode_replicas", 1)
    for size in ("data_parallel_size", "pipeline_model_parallel_size"):
        ranks *= _count(config, f"{block}.{size}", 1)
    return ServerFacts(
        name=str(_get(config, f"{block}.name", None) or "unset"),
        ranks_per_replica=ranks,
        own_devices=own_devices,
        tensor_parallel_size=tensor,
    )


def _own(config: DictConfig, block: str) -> int:
    return int(_get(config, f"{block}.nnodes", 0) or 0) * int(_get(config, f"{block}.n_gpus_per_node", 0) or 0)


def _reward(config: DictConfig) -> ServerFacts | None:
    if not _get(config, "reward.reward_model.enable", False):
        return None
    own_pool = bool(_get(config, "reward.reward_model.enable_resource_pool", False))
    return _server(config, "reward.reward_model.rollout", _own(config, "reward.reward_model") if own_pool else 0)


def _teacher(config: DictConfig) -> ServerFacts | None:
    if not _get(config, "distillation.enabled", False):
        return None
    names = [str(name) for name in _get(config, "distillation.teacher_models", {})]
    # The default name counts only alone (workers/config/distillation.py).
    first = next((name for name in names if name != "teacher_model"), "teacher_model")
    return _server(config, f"distillation.teacher_models.{first}.inference", _own(config, "distillation"))


def _transfer_queue_units(config: DictConfig) -> int:
    if str(_get(config, "transfer_queue.backend.storage_backend", "SimpleStorage")) != "SimpleStorage":
        return 1
    return 1 + int(_get(config, "transfer_queue.backend.SimpleStorage.num_data_storage_units", 8))


def _get(config: Any, key: str, default: Any) -> Any:
    """A key's value, or the default when the path doesn't exist or is `???`."""
    if not OmegaConf.is_config(config):
        config = OmegaConf.create(config)
    value = OmegaConf.select(config, key, default=default, throw_on_missing=False)
    return default if value is None else value


def _count(config: Any, key: str, default: int) -> int:
    """A key's value as a whole number of 1 or more; unset, null and `???` read as the default."""
    value = _get(config, key, default)
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1 or number != value:
        raise ConfigError(
            key,
            expected="a whole number, 1 or more",
            found=str(value),
            consequence="the run does not start",
            remedy=f"{key}={default}",
        )
    return number


def _not_ppo(config: DictConfig) -> ConfigError:
    return ConfigError(
        "trainer.plugin",
        expected="a config of verl.trainer.main_ppo, whose roles can be placed",
        found=f"a config with {', '.join(sorted(map(str, config)))}",
        consequence="the run does not start, since nothing of `sharding` would act",
        remedy="trainer.plugin=null",
    )
