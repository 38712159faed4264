"""Reads what placement must know of a job out of verl's composed config. No verl import: plain keys only."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext_sharding.config.measures import ENGINE_BLOCK, MODEL_BLOCK
from verl_ext_sharding.config.values import whole_number
from verl_ext_sharding.errors import ConfigError, did_you_mean
from verl_ext_sharding.placement.job import (
    EXPERT_PARALLEL,
    MODEL_PARALLEL,
    EngineFacts,
    JobFacts,
    MicroBatch,
    ServerFacts,
)

_ROLLOUT = "actor_rollout_ref.rollout"

_ULYSSES = "ulysses_sequence_parallel_size"

UNSET = "unset"
"""Backend of servers whose name verl's config leaves open (`???`)."""

TEACHER = "teacher_model"
"""verl's own name of a teacher."""

FSDP = ("fsdp", "fsdp2", "fsdp_turbo")
"""Strategies whose block is `fsdp_config` of actor and ref, and `fsdp` of the critic."""

_MODES = ("sync", "colocate_async", "separate_async")
"""Trainers that verl registers (trainer/ppo/v1)."""

_TENSOR_PARALLEL = 2
"""verl's default for inference servers, which counts where a block is added without it (`RolloutConfig`)."""


def job_facts(config: DictConfig) -> JobFacts:
    """The job as placement sees it.

    Args:
        config: verl's composed PPO config, not necessarily resolved.

    Raises:
        ConfigError: The config is none of `verl.trainer.main_ppo`, a number in it is none, or verl has no such trainer or
            engine.
    """
    if "actor_rollout_ref" not in config or "algorithm" not in config:
        raise _not_ppo(config)
    mode = _mode(config)
    engines = {"actor": _engine(config, "actor", "ActorRolloutRefWorker")}
    if needs_reference(config):
        engines["ref"] = _engine(config, "ref", "ActorRolloutRefWorker", trains=False)
    if needs_critic(config):
        engines["critic"] = _engine(config, "critic", "TrainingWorker")
    return JobFacts(
        num_nodes=_count(config, "trainer.nnodes", 1, required=True),
        devices_per_node=_count(config, "trainer.n_gpus_per_node", 8, required=True),
        mode=mode,
        engines=engines,
        rollout=_server(
            config,
            _ROLLOUT,
            own_nodes=_own(config, _ROLLOUT) if mode == "separate_async" else None,
        ),
        reward=_reward(config),
        teacher=_teacher(config),
        ref_in_actor=uses_lora(config),
        hybrid_rollout=mode != "separate_async" or bool(_get(config, "actor_rollout_ref.hybrid_engine", True)),
        train_batch_size=_count(config, "data.train_batch_size", 1024, required=True),
        rollout_n=_count(config, "actor_rollout_ref.rollout.n", 1, required=True),
        parameter_sync_step=_count(config, f"trainer.v1.{mode}.parameter_sync_step", 1, required=True),
        critic_warmup=_count(config, "trainer.critic_warmup", 0, at_least=0, required=True),
        actor_log_probs=_actor_log_probs(config),
        transfer_queue_units=_transfer_queue_units(config),
        reward_workers=_reward_workers(config),
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
    ranks = [_count(config, f"{model}.{name}", 0, at_least=-sys.maxsize) for name in ("lora.rank", "lora_rank")]
    return max(ranks) > 0 or _get(config, f"{model}.lora_adapter_path", None) is not None


def _actor_log_probs(config: DictConfig) -> bool:
    """As verl's trainer skips the old log-probs (`_compute_old_log_prob`); with LoRA the actor's engine is the reference."""
    bypassed = bool(_get(config, "algorithm.rollout_correction.bypass_mode", False))
    return not bypassed or (needs_reference(config) and uses_lora(config))


def _engine(config: DictConfig, role: str, worker: str, *, trains: bool = True) -> EngineFacts:
    block = ENGINE_BLOCK[role].rpartition(".")[0]
    strategy = _strategy(config, role, block)
    names = MODEL_PARALLEL.get(strategy, ())
    sequence = tuple(f"{block}.{strategy}.{name}" for name in names[:1]) or _ulysses_keys(config, role, block)
    sequence_parallel = _count(config, sequence[0], 1)
    others = math.prod(_count(config, f"{block}.{strategy}.{name}", 1) for name in names[1:])
    expert_parallel, expert_ranks = _experts(config, f"{block}.{strategy}", strategy)
    return EngineFacts(
        strategy=strategy,
        model_parallel_size=sequence_parallel * others,
        mini_batch_size=_count(config, f"{block}.ppo_mini_batch_size", 256, required=True) if trains else None,
        micro_batches=tuple(_micro_batches(config, role, block, strategy)),
        worker_class=worker,
        dynamic_batches=bool(_get(config, f"{block}.{'log_prob_' if role == 'ref' else ''}use_dynamic_bsz", False)),
        sequence_parallel_size=sequence_parallel,
        sequence_parallel_keys=sequence,
        expert_parallel_size=expert_parallel,
        expert_ranks=expert_ranks,
    )


def _experts(config: DictConfig, block: str, strategy: str) -> tuple[int, int]:
    """Parts of the experts, and ranks of one copy of them; without parts there are none that are not the model's."""
    names = EXPERT_PARALLEL.get(strategy)
    parts = _count(config, f"{block}.{names[0]}", 1) if names else 1
    if names is None or parts == 1:
        return 1, 1
    tensor = 1
    if strategy == "megatron":
        tensor = _count(config, f"{block}.tensor_model_parallel_size", 1)
        tensor = _count(config, f"{block}.expert_tensor_parallel_size", tensor)
    return parts, parts * tensor * math.prod(_count(config, f"{block}.{name}", 1) for name in names[1:])


def _ulysses_keys(config: DictConfig, role: str, block: str) -> tuple[str, ...]:
    """Where FSDP's size is set: a deprecated key beside the engine's block wins above 1; the critic's is never read."""
    inner = f"{ENGINE_BLOCK[role]}.{_ULYSSES}"
    if role == "critic":
        return (inner,)
    outer = f"{block}.{_ULYSSES}"
    if _count(config, inner, 1) == 1:
        return (outer,)
    return (outer, inner) if _count(config, outer, 1) > 1 else (inner,)


def _strategy(config: DictConfig, role: str, block: str) -> str:
    """The engine's name, one that verl builds from the engine's block that is there."""
    key = f"{block}.strategy"
    strategy = str(_get(config, key, "fsdp"))
    there = _get(config, block, {})
    known = [name for name in MODEL_PARALLEL if name in there]
    if ENGINE_BLOCK[role].rpartition(".")[2] in there:
        known += FSDP[:2] if role == "critic" else FSDP  # fsdp_turbo has no value model
    model = MODEL_BLOCK[role]
    if not known or strategy in known or _get(config, f"{model}.external_lib", None) is not None:
        return strategy
    engine = strategy if strategy in MODEL_PARALLEL else "dp" if strategy in FSDP[:2] else None
    instead = f"model_engine={engine}, or " if engine else ""
    raise ConfigError(
        key,
        expected=f"{' or '.join(known)}, an engine of verl that {block} has settings for",
        found=strategy,
        consequence="the run does not start",
        remedy=f"{instead}{key}={did_you_mean(strategy.lower(), known) or known[0]}, or {model}.external_lib=<the module that "
        "registers an engine of your own>",
    )


def _mode(config: DictConfig) -> str:
    """The trainer's name: one of verl's, or one whose settings a recipe adds beside theirs."""
    key = "trainer.v1.trainer_mode"
    mode = str(_get(config, key, "sync"))
    if mode in _MODES or mode in _get(config, "trainer.v1", {}):
        return mode
    close = next((name for name in _MODES if mode in name), None) or did_you_mean(mode, _MODES) or _MODES[0]
    raise ConfigError(
        key,
        expected=f"{', '.join(_MODES)}, or a trainer that a recipe registers",
        found=mode,
        consequence="the run does not start",
        remedy=f"{key}={close}, or '+trainer.v1.{mode}={{}}' beside it for a trainer of your own",
    )


def _micro_batches(config: DictConfig, role: str, block: str, strategy: str) -> Iterator[MicroBatch]:
    """Fixed micro-batches that verl really uses (workers/engine_workers.py, trainer/ppo/v1/trainer_base.py).

    The critic's own `ppo_micro_batch_size_per_gpu` is not among them: the v1 trainer leaves its engine at token budgets.
    """
    engine = critic_engine(strategy)
    candidates: dict[str, tuple[tuple[str, bool], ...]] = {
        "actor": ((f"{block}.ppo_micro_batch_size_per_gpu", False),),
        "ref": ((f"{block}.log_prob_micro_batch_size_per_gpu", True),),
        "critic": ((f"{engine}.micro_batch_size_per_gpu", False), (f"{engine}.infer_micro_batch_size_per_gpu", True)),
    }
    dynamic = {"ref": f"{block}.log_prob_use_dynamic_bsz", "critic": f"{engine}.use_dynamic_bsz"}
    if _get(config, dynamic.get(role, f"{block}.use_dynamic_bsz"), role == "critic"):
        return
    found = candidates[role]
    if role == "actor" and _actor_log_probs(config):
        found += (("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", True),)
    ours = f"sharding.roles.{role}.micro_batch_size"
    for key, of_step in found:
        if _get(config, key, None) is None:
            continue
        # verl's yaml has none of the critic's engine
        override = ours if _get(config, ours, None) is not None else f"++{key}" if role == "critic" else key
        yield MicroBatch(key=key, samples=_count(config, key, 1), of_step=of_step, override=override)


def critic_engine(strategy: str) -> str:
    """verl's block of the critic's engine."""
    return f"critic.{strategy}" if strategy in MODEL_PARALLEL else ENGINE_BLOCK["critic"]


def _server(config: DictConfig, block: str, own_nodes: tuple[int, ...] | None = None) -> ServerFacts:
    tensor = ranks = _count(config, f"{block}.tensor_model_parallel_size", _TENSOR_PARALLEL)
    decoders = None
    # one replica prefills and decodes (llm_server.py); reward models and teachers have plain ones whatever their block says
    if block == _ROLLOUT and _get(config, f"{block}.disaggregation.enabled", False):
        decode = _count(config, f"{block}.disaggregation.decode_tensor_model_parallel_size", tensor)
        decoders = _count(config, f"{block}.disaggregation.decode_replicas", 1), decode
        ranks = tensor * _count(config, f"{block}.disaggregation.prefill_replicas", 1) + math.prod(decoders)
    data = _count(config, f"{block}.data_parallel_size", 1)
    ranks *= data * _count(config, f"{block}.pipeline_model_parallel_size", 1)
    return ServerFacts(
        name=str(_get(config, f"{block}.name", None) or UNSET),
        ranks_per_replica=ranks,
        own_nodes=own_nodes,
        tensor_parallel_size=tensor,
        block=block,
        data_parallel_size=data,
        decoders=decoders,
    )


def _own(config: DictConfig, block: str) -> tuple[int, ...]:
    """Devices on each node of a pool of its own; 0 nodes or 0 devices, verl's defaults for "not set", make none."""
    sizes = (_get(config, f"{block}.{name}", 0) for name in ("nnodes", "n_gpus_per_node"))
    if 0 in sizes:
        return ()
    return (_count(config, f"{block}.n_gpus_per_node", 1),) * _count(config, f"{block}.nnodes", 1)


def _reward(config: DictConfig) -> ServerFacts | None:
    if not _get(config, "reward.reward_model.enable", False):
        return None
    own_pool = bool(_get(config, "reward.reward_model.enable_resource_pool", False))
    return _server(config, "reward.reward_model.rollout", _own(config, "reward.reward_model") if own_pool else None)


def _teacher(config: DictConfig) -> ServerFacts | None:
    if not _get(config, "distillation.enabled", False):
        return None
    names = teacher_names(map(str, _get(config, "distillation.teacher_models", {})))
    blocks = [f"distillation.teacher_models.{name}" for name in names]
    servers = [_server(config, f"{block}.inference", _own(config, "distillation")) for block in blocks]
    if names == [TEACHER]:
        return servers[0]
    replicas: list[ServerFacts] = []
    for block, server in zip(blocks, servers, strict=True):
        key = f"{block}.num_replicas"
        replicas += [server] * (_count(config, key, 1) if _get(config, key, 0) else 0)
    return replace(
        servers[0],
        replicas=tuple(server.ranks_per_replica for server in replicas),
        replica_units=tuple(server.node_unit for server in replicas),
    )


def teacher_names(written: Iterable[str]) -> list[str]:
    """The teachers that verl starts (`DistillationConfig`, workers/config/distillation.py).

    Args:
        written: Names below `distillation.teacher_models`. verl's own counts only alone, where its servers fill the pool.
    """
    return [name for name in written if name != TEACHER] or [TEACHER]


def _transfer_queue_units(config: DictConfig) -> int:
    if str(_get(config, "transfer_queue.backend.storage_backend", "SimpleStorage")) != "SimpleStorage":
        return 1
    return 1 + _count(config, "transfer_queue.backend.SimpleStorage.num_data_storage_units", 8)


def _reward_workers(config: DictConfig) -> int:
    """Of the one reward manager whose workers start processes (experimental/reward_loop/reward_manager/remote.py)."""
    manager = "reward.reward_manager"
    if (
        _get(config, f"{manager}.name", "naive") != "remote"
        or _get(config, f"{manager}.source", "register") != "register"
    ):
        return 0
    return _count(config, "reward.num_workers", 8)


def _get(config: Any, key: str, default: Any) -> Any:
    """A key's value, or the default when the path doesn't exist or is `???`."""
    if not OmegaConf.is_config(config):
        config = OmegaConf.create(config)
    value = OmegaConf.select(config, key, default=default, throw_on_missing=False)
    return default if value is None else value


def _count(config: Any, key: str, default: int, *, at_least: int = 1, required: bool = False) -> int:
    """A key's value as a whole number; unset and `???` read as the default, and so does null unless it is required."""
    value = _get(config, key, default)
    if required and OmegaConf.select(config, key, default=default, throw_on_missing=False) is None:
        value = None
    return whole_number(key, value, instead=default, at_least=at_least)


def _not_ppo(config: DictConfig) -> ConfigError:
    return ConfigError(
        "trainer.plugin",
        expected="a config of verl.trainer.main_ppo, whose roles can be placed",
        found=f"a config with {', '.join(sorted(map(str, config)))}",
        consequence="the run does not start, since nothing of `sharding` would act",
        remedy="trainer.plugin=null",
    )
