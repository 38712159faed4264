"""What a rollout server is told: plain values, read once from verl's config. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_ext_sharding.errors import ConfigError

Mode = Literal["hybrid", "colocated", "standalone"]

DTYPES = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
}
"""Spellings of `rollout.dtype`, as vLLM and verl accept them, and torch's name for each."""

ATTENTION = ("sdpa", "eager")


@dataclass(kw_only=True, frozen=True)
class ModelSpec:
    """Which model the server holds, in plain values.

    Args:
        path: Folder, hub name or hdfs path of the checkpoint.
        config_path: The same for the config, or None for `path`.
        tokenizer_path: The same for the tokenizer, or None for `path`.
        dtype: `rollout.dtype`, one of `DTYPES`.
        attn_implementation: "sdpa" or "eager"; None is transformers' own choice: sdpa where the model has it.
        override_config: `model.override_config`, as verl applies it to the actor.
        trust_remote_code: As transformers.
        external_lib: Modules to import first.
        use_shm: Copy the checkpoint to /dev/shm first, as verl does.
        load_weights: Read the weights from `path`; False leaves them to `update_weights`.
    """

    path: str
    config_path: str | None = None
    tokenizer_path: str | None = None
    dtype: str = "bfloat16"
    attn_implementation: str | None = None
    override_config: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    external_lib: tuple[str, ...] = ()
    use_shm: bool = False
    load_weights: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(
                "actor_rollout_ref.rollout.dtype",
                expected=", ".join(DTYPES),
                found=repr(self.dtype),
                consequence="the rollout server does not start",
                remedy="actor_rollout_ref.rollout.dtype=bfloat16",
            )


@dataclass(kw_only=True, frozen=True)
class ServerSettings:
    """What a server needs to know, in plain values. Names are those of `actor_rollout_ref.rollout`.

    Args:
        model: Which model.
        device: "cpu", "cuda", or another torch device type.
        mode: verl's rollout mode; decides what sleep and wake do.
        replica_rank: Which of the replicas this is.
        servers_per_node: Servers that share the node's cores and host memory.
        seed: `rollout.seed`; the server's own request seeds start from it.
        logprobs_mode: "processed_logprobs" or "raw_logprobs".
        max_model_len: Longest sequence in tokens, or None for what the model was made for.
        max_num_seqs: Most requests that run at once.
        max_num_batched_tokens: Most tokens of one prefill.
        gpu_memory_utilization: Share of the device's memory for weights, keys and values, in (0, 1].
        free_cache_engine: Whether sleep frees memory at all.
        full_determinism: Compute each request alone.
    """

    model: ModelSpec
    device: str = "cpu"
    mode: Mode = "hybrid"
    replica_rank: int = 0
    servers_per_node: int = 1
    seed: int = 42
    full_determinism: bool = False
    logprobs_mode: str = "processed_logprobs"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    prompt_length: int = 512
    response_length: int = 512
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.5
    free_cache_engine: bool = True


def server_settings(
    rollout: Mapping[str, Any],
    model: Mapping[str, Any],
    *,
    mode: Mode,
    device: str,
    replica_rank: int,
    servers_per_node: int,
) -> ServerSettings:
    """Reads verl's config once.

    Args:
        rollout: `actor_rollout_ref.rollout` (or a reward or teacher model's), resolved, as nested mappings.
        model: `actor_rollout_ref.model`, likewise.
        mode: verl's rollout mode.
        device: Device type that the server computes on.
        replica_rank: Which of the replicas.
        servers_per_node: Servers that share a node.
    """
    same = (
        "seed full_determinism logprobs_mode temperature top_p top_k repetition_penalty ignore_eos prompt_length "
        "response_length max_model_len max_num_seqs max_num_batched_tokens gpu_memory_utilization free_cache_engine"
    )
    given = {name: rollout[name] for name in same.split() if rollout.get(name) is not None}
    loads = mode != "hybrid" and rollout.get("load_format", "dummy") != "dummy"
    return ServerSettings(
        model=_model_spec(rollout, model, load_weights=loads),
        device=device,
        mode=mode,
        replica_rank=replica_rank,
        servers_per_node=max(1, servers_per_node),
        **given,
    )


def _model_spec(rollout: Mapping[str, Any], model: Mapping[str, Any], *, load_weights: bool) -> ModelSpec:
    override = dict(model.get("override_config") or {})
    wanted = ((rollout.get("engine_kwargs") or {}).get("hf") or {}).get("attn_implementation")
    actors = override.get("attn_implementation")
    external = model.get("external_lib") or ()
    return ModelSpec(
        path=model["path"],
        config_path=model.get("hf_config_path"),
        tokenizer_path=model.get("tokenizer_path"),
        dtype=rollout.get("dtype", "bfloat16"),
        attn_implementation=wanted or (actors if actors in ATTENTION else None),
        override_config=override,
        trust_remote_code=bool(model.get("trust_remote_code", False)),
        external_lib=(external,) if isinstance(external, str) else tuple(external),
        use_shm=bool(model.get("use_shm", False)),
        load_weights=load_weights,
    )
