"""What verl or torch asserts of a PPO job only once its processes run: meshes of engines, sizes of servers, separate_async."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verl_ext_sharding.config.facts import UNSET
from verl_ext_sharding.config.measures import ENGINE_BLOCK
from verl_ext_sharding.errors import ConfigError, did_you_mean
from verl_ext_sharding.placement.bundles import Placement
from verl_ext_sharding.placement.devices import format_devices
from verl_ext_sharding.placement.job import JobFacts, ServerFacts
from verl_ext_sharding.placement.servers import free_devices

_ROLLOUT = "actor_rollout_ref.rollout"
_BACKENDS = ("vllm", "sglang", "trtllm", "hf")
_RENAMED_BACKENDS = {"sglang_async": "sglang"}
"""Names of verl 0.4 and earlier -> theirs now."""

_BATCH = "data.train_batch_size"
_MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"


def check_asserts(values: Mapping[str, Any], facts: JobFacts, placement: Placement) -> None:
    """Refuses what would fail minutes later, with all that Ray has started by then.

    Args:
        values: verl's resolved values by dotted key, with what the request set.
        facts: The job, read from the same values.
        placement: Where its roles run.

    Raises:
        ConfigError: Names the key and what to write.
    """
    for role in facts.engines:
        _check_shard_groups(role, values, facts, placement)
        if facts.engines[role].strategy == "torchtitan":
            block = f"{ENGINE_BLOCK[role].rpartition('.')[0]}.torchtitan"
            ranks = placement.processes_of(role) // facts.engines[role].model_parallel_size
            check_titan_mesh(block, values, ranks, whose=role)
    for role, server in facts.servers.items():
        _check_server(role, server, values)
    if facts.reward is None:
        _check_pool_without_model(values)
    if facts.mode == "separate_async":
        _check_separate_async(values, facts, placement)


def _check_shard_groups(role: str, values: Mapping[str, Any], facts: JobFacts, placement: Placement) -> None:
    """Groups of `fsdp_size` ranks must be all of the ranks.

    verl's mesh has `ranks // fsdp_size` rows (`create_device_mesh`, workers/engine/fsdp/utils.py), so a rest of the ranks is
    in no mesh; VeOmni asserts the same of its data-parallel ranks (workers/engine/veomni/transformer_impl.py).
    """
    engine, ranks = facts.engines[role], placement.processes_of(role)
    if engine.strategy in ("fsdp", "fsdp2"):
        key = f"{ENGINE_BLOCK[role]}.fsdp_size"
    elif engine.strategy == "veomni":
        key = f"{ENGINE_BLOCK[role].rpartition('.')[0]}.veomni.fsdp_size"
        ranks //= engine.model_parallel_size
    else:
        return
    size = values.get(key)
    if not ranks or not isinstance(size, int) or size < 0 or size >= ranks or (size and ranks % size == 0):
        return
    fitting = max(n for n in range(1, max(1, size) + 1) if ranks % n == 0)
    raise ConfigError(
        key,
        expected=f"-1, or a size that divides the {ranks} data-parallel ranks of {role}"
        if engine.strategy == "veomni"
        else f"-1, or a size that divides the {ranks} ranks of {role}",
        found=f"{size}: {ranks % size} ranks would be in no group" if size else "0",
        consequence="the run does not start",
        remedy=f"{key}=-1 (one group of all)" + (f", or {key}={fitting}" if size else ""),
    )


def check_titan_mesh(block: str, values: Mapping[str, Any], ranks: int, *, whose: str) -> None:
    """Its mesh is all of the ranks (`ParallelDims`), and verl takes shards x replicas for the data-parallel size.

    Args:
        block: verl's block of the engine.
        values: verl's resolved values by dotted key.
        ranks: Data-parallel ranks.
        whose: Whose ranks, for the message.

    Raises:
        ConfigError: Shards x replicas are not as many.
    """
    block = f"{block}.data_parallel"
    shards, replicas = (values.get(f"{block}_{name}_size") for name in ("shard", "replicate"))
    if not isinstance(shards, int) or not isinstance(replicas, int):
        return
    if shards > 0 and shards * replicas == ranks:
        return
    kept = replicas if replicas > 0 and ranks % replicas == 0 else 1
    other = f" {block}_replicate_size={kept}" if kept != replicas else ""
    raise ConfigError(
        f"{block}_shard_size",
        expected=f"a size that makes {ranks} with {block}_replicate_size: {whose} has {ranks} data-parallel ranks",
        found=f"{shards} x {replicas}",
        consequence="the run does not start",
        remedy=f"{block}_shard_size={ranks // kept}{other}",
    )


def _check_server(role: str, server: ServerFacts, values: Mapping[str, Any]) -> None:
    """As `RolloutConfig.__post_init__` (workers/config/rollout.py), and as the registries of backends know their names."""
    name, mode = f"{server.block}.name", f"{server.block}.mode"
    if values.get(mode) == "sync":
        raise ConfigError(
            mode,
            expected="async: verl 0.7 took the other mode out",
            found="sync",
            consequence="the run does not start",
            remedy=f"{mode}=async, or remove {mode}",
        )
    close = _RENAMED_BACKENDS.get(server.name) or did_you_mean(server.name.lower(), _BACKENDS, at_least=0.8)
    if close and server.name not in _BACKENDS:  # a recipe may register others
        raise ConfigError(
            name,
            expected=", ".join(_BACKENDS),
            found=server.name,
            consequence="the run does not start",
            remedy=f"{name}={close}",
        )
    _check_parallel_sizes(server, values)
    if role == "reward" and server.name == UNSET:
        raise ConfigError(
            name,
            expected=f"what serves the reward model: {', '.join(_BACKENDS)}",
            found="nothing: verl has no default for it",
            consequence="the run does not start",
            remedy=f"{name}=vllm",
        )
    if role == "reward" and values.get("reward.reward_model.model_path") is None:
        raise ConfigError(
            "reward.reward_model.model_path",
            expected="the reward model, since reward.reward_model.enable=True",
            found="null",
            consequence="the run does not start",
            remedy="reward.reward_model.model_path=<its folder or name>, or reward.reward_model.enable=False",
        )


def _check_pool_without_model(values: Mapping[str, Any]) -> None:
    """verl sizes the reward model's own pool whether there is a model or not (`_init_resource_pool_mgr`)."""
    block = "reward.reward_model"
    sizes = [values.get(f"{block}.{name}") or 0 for name in ("nnodes", "n_gpus_per_node")]
    if values.get(f"{block}.enable_resource_pool") and min(sizes) <= 0:
        raise ConfigError(
            f"{block}.enable_resource_pool",
            expected=f"False with {block}.enable=False, or a pool of {block}.nnodes and {block}.n_gpus_per_node",
            found=f"True with {block}.nnodes={sizes[0]} {block}.n_gpus_per_node={sizes[1]}",
            consequence="the run does not start",
            remedy=f"{block}.enable_resource_pool=False",
        )


def _check_parallel_sizes(server: ServerFacts, values: Mapping[str, Any]) -> None:
    """As `RolloutConfig.__post_init__` and the replicas that prefill and decode apart (workers/rollout/*_rollout/*_pd_replica.py)."""
    block, disaggregation = server.block, f"{server.block}.disaggregation"
    size = {name: values.get(f"{block}.{name}") or 1 for name in ("tensor_model_parallel_size", "data_parallel_size")}
    whole = size["tensor_model_parallel_size"] * size["data_parallel_size"]
    pipeline, experts = f"{block}.pipeline_model_parallel_size", f"{block}.expert_parallel_size"
    wrong = []
    if server.name in _BACKENDS[:3] and (values.get(pipeline) or 1) > 1:
        wrong.append((pipeline, f"1: verl has no pipelines in {server.name}", 1))
    if server.name in _BACKENDS[:2] and (values.get(experts) or 1) not in (1, whole):
        wrong.append((experts, f"1, or tensor_model_parallel_size x data_parallel_size = {whole}", whole))
    if values.get(f"{disaggregation}.enabled") and server.name not in _BACKENDS[:2]:
        wrong.append((f"{disaggregation}.enabled", f"False with {block}.name={server.name}", False))
    if server.decoders is not None:
        apart = f"1 with {disaggregation}.enabled=True"
        if (values.get(f"{disaggregation}.prefill_replicas") or 1) > 1:
            wrong.append((f"{disaggregation}.prefill_replicas", apart, 1))
        if size["data_parallel_size"] > 1:
            wrong.append((f"{block}.data_parallel_size", apart, 1))
    for key, expected, right in wrong:
        raise ConfigError(
            key,
            expected=expected,
            found=str(values.get(key)),
            consequence="the run does not start",
            remedy=f"{key}={right}",
        )


def _check_separate_async(values: Mapping[str, Any], facts: JobFacts, placement: Placement) -> None:
    """As `PPOTrainerSeparateAsync.__init__` (trainer/ppo/v1/trainer_separate_async.py); `check_servers` sees to its pool."""
    mode, mini, steps = (
        "trainer.v1.trainer_mode=separate_async",
        facts.engines["actor"].mini_batch_size,
        facts.parameter_sync_step,
    )
    if mini is not None and facts.train_batch_size != steps * mini:
        other = f", or {_MINI_BATCH}={facts.train_batch_size // steps}" if facts.train_batch_size % steps == 0 else ""
        raise ConfigError(
            _BATCH,
            expected=f"{steps * mini} with {mode}: parameter_sync_step={steps} x {_MINI_BATCH}={mini}",
            found=str(facts.train_batch_size),
            consequence="the run does not start",
            remedy=f"{_BATCH}={steps * mini}{other}",
        )
    backend = f"{_ROLLOUT}.checkpoint_engine.backend"
    if values.get(backend, "naive") == "naive":
        raise ConfigError(
            backend,
            expected=f"nccl, nixl, mooncake or another that sends weights to other devices, with {mode}",
            found="naive, which hands them over on the same device",
            consequence="the run does not start",
            remedy=f"{backend}=nccl",  # on NPUs it is the name of the engine on HCCL
        )
    if facts.reward is not None and facts.reward.own_nodes is None:
        raise ConfigError(
            "reward.reward_model.enable_resource_pool",
            expected=f"True with {mode}: its rollout never pauses, so no device becomes free for a reward model",
            found="False: the reward model on the actor's devices",
            consequence="the run does not start",
            remedy=", or ".join(_ways_to_part(facts.reward, values, placement)),
        )
    switch = "trainer.v1.separate_async.hybrid_rollout.enable_switch"
    if facts.hybrid_rollout and values.get(switch) and values.get(f"{_ROLLOUT}.disaggregation.enabled"):
        raise ConfigError(
            switch,
            expected=f"False with {_ROLLOUT}.disaggregation.enabled=True",
            found="True",
            consequence="the run does not start",
            remedy=f"{switch}=False, or {_ROLLOUT}.disaggregation.enabled=False",
        )


def _ways_to_part(reward: ServerFacts, values: Mapping[str, Any], placement: Placement) -> Iterator[str]:
    """Devices without the actor for a reward model, where there are any, and a pool of its own."""
    devices, block = "sharding.roles.reward.devices", "reward.reward_model"
    if free := free_devices(reward, placement):
        yield f"{devices}={format_devices(free)}"
    listed = values.get(devices, ()) is not None  # of what is set, lists alone are not among the values
    pool = f"{block}.enable_resource_pool=True {block}.nnodes=1 {block}.n_gpus_per_node={reward.ranks_per_replica}"
    yield f"{devices}=null {pool}" if listed else pool
