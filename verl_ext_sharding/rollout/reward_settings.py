"""What a reward server is told: verl's config and the run's request as plain values. Imports neither torch nor verl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_ext_sharding.config.reward import RewardServerSettings

WHERE = "reward.reward_model"
"""Config node of the reward model, for messages."""


@dataclass(kw_only=True, frozen=True)
class RewardServing:
    """One reward server, in plain values.

    Args:
        path: Folder, hub name or hdfs path of the checkpoint; also the name that requests give as `model`.
        dtype: `rollout.dtype`, one of `settings.DTYPES`.
        trust_remote_code: As transformers.
        use_shm: Copy the checkpoint to /dev/shm first, as verl does.
        attn_implementation: As transformers knows it, or None for its own choice.
        asked: Where the model computes.
        device: "cpu", "cuda", or another torch device type.
        num_devices: Devices that the process sees.
        gpu_memory_utilization: Share of each device that weights may fill where a `device_map` is worked out.
        replica_rank: Which of the replicas this is.
        servers_per_node: Servers that share the node's cores.
        max_model_len: Longest sequence in tokens, or None for what the model was made for.
        max_num_seqs: Most sequences of one forward pass.
        max_num_batched_tokens: Most tokens of one forward pass, padding included; a longer sequence is scored alone.
        sleeps: Whether `sleep` frees the device.
        full_determinism: Score each sequence alone.
    """

    path: str
    dtype: str = "bfloat16"
    trust_remote_code: bool = False
    use_shm: bool = False
    attn_implementation: str | None = None
    asked: RewardServerSettings = field(default_factory=RewardServerSettings)
    device: str = "cpu"
    num_devices: int = 1
    gpu_memory_utilization: float = 0.5
    replica_rank: int = 0
    servers_per_node: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    sleeps: bool = True
    full_determinism: bool = False


def reward_serving(
    rollout: Mapping[str, Any],
    model: Mapping[str, Any],
    asked: RewardServerSettings,
    *,
    device: str,
    standalone: bool,
    replica_rank: int,
    servers_per_node: int,
) -> RewardServing:
    """Reads verl's config once.

    Args:
        rollout: `reward.reward_model.rollout`, resolved, as nested mappings.
        model: verl's model config of the reward model, likewise.
        asked: What the run's request says.
        device: Device type that the server computes on.
        standalone: The server has devices that verl reserved for it alone, outside the job's pools.
        replica_rank: Which of the replicas.
        servers_per_node: Servers that share a node.
    """
    same = "dtype full_determinism gpu_memory_utilization max_model_len max_num_seqs max_num_batched_tokens"
    given = {name: rollout[name] for name in same.split() if rollout.get(name) is not None}
    engine = (rollout.get("engine_kwargs") or {}).get("hf") or {}
    attention = asked.attn_implementation or engine.get("attn_implementation")
    frees = bool(rollout.get("free_cache_engine", True))
    return RewardServing(
        path=model["path"],
        trust_remote_code=bool(model.get("trust_remote_code", False)),
        use_shm=bool(model.get("use_shm", False)),
        attn_implementation=None if attention == "auto" else attention,
        asked=asked,
        device=device,
        num_devices=rollout.get("tensor_model_parallel_size") or 1,
        replica_rank=replica_rank,
        servers_per_node=max(1, servers_per_node),
        sleeps=frees and not asked.own_pool and not standalone,
        **given,
    )
