"""From the typed request to verl's own keys; what verl has no key for, and this version no code, is refused."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext_sharding.config.changes import KeyChange
from verl_ext_sharding.config.measures import ENGINE_BLOCK, ENGINE_ROLES, MODEL_BLOCK, handled_keys
from verl_ext_sharding.config.micro_batches import accompanying_changes
from verl_ext_sharding.config.reward_keys import acting_keys, reward_changes
from verl_ext_sharding.config.rollout_limits import KEYS as ROLLOUT_LIMITS
from verl_ext_sharding.config.rollout_limits import translate_limits
from verl_ext_sharding.config.schema import RoleConfig, ShardingConfig
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.bundles import Placement
from verl_ext_sharding.placement.job import JobFacts
from verl_ext_sharding.placement.servers import parts_fit

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_MICRO_BATCH = {
    "actor": (
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    ),
    "ref": ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",),
    # The v1 trainer builds the critic's engine without critic.ppo_micro_batch_size_per_gpu (trainer_base.py, _setup).
    "critic": ("critic.fsdp.micro_batch_size_per_gpu", "critic.fsdp.infer_micro_batch_size_per_gpu"),
}
_MAX_TOKENS = {
    "actor": (
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    ),
    "ref": ("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",),
    "critic": ("critic.ppo_infer_max_token_len_per_gpu",),
}
_DYNAMIC = {
    "actor": ("actor_rollout_ref.actor.use_dynamic_bsz", "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz"),
    "ref": ("actor_rollout_ref.ref.log_prob_use_dynamic_bsz",),
    "critic": ("critic.fsdp.use_dynamic_bsz",),
}

_ACT_ELSEWHERE = (
    "sharding.placement.",
    "sharding.communication.",
    "sharding.guards.align_inputs",
    "sharding.guards.token_ids",
)
"""Blocks and keys that act beside verl's keys in every job, as do the devices of each role."""


def translate(
    request: ShardingConfig,
    facts: JobFacts,
    placement: Placement,
    current: Mapping[str, Any],
    explicit: Collection[str] = (),
    *,
    reward_model: Mapping[str, Any] | None = None,
) -> list[KeyChange]:
    """verl's own keys for everything in the request that verl has a key for.

    Args:
        request: The user's request.
        facts: The job.
        placement: Where its roles run.
        current: verl's resolved values by dotted key, from `values_of`.
        explicit: verl's keys that the user wrote on the command line.
        reward_model: The reward model's Hugging Face config, where there is one that can be read.

    Raises:
        ConfigError: A key of the request has no effect in this version, nothing is skipped silently; or keys contradict
            each other.
    """
    changes: list[KeyChange] = []
    for role in ("actor", "ref", "critic"):
        changes += role_changes(role, getattr(request.roles, role), facts, spread=is_spread(role, request))
    changes += accompanying_changes(request, facts, current)
    _check_fused(request, current)
    changes += translate_limits(request.roles.rollout, current, context_length=None, explicit=explicit)
    changes += _servers(placement, facts, current)
    changes += reward_changes(request, facts, placement, current, reward_model)
    limits = {f"sharding.roles.rollout.{name}" for name in ROLLOUT_LIMITS}  # they act even where they change nothing
    handled = limits | {change.why for change in changes} | set(handled_keys(request))
    handled.add("sharding.roles.ref.offload.params")  # `offload_notes` says what becomes of it
    refuse_unsupported(request, handled=handled | set(acting_keys(request, facts, current)))
    return changes


def is_spread(role: str, request: ShardingConfig) -> bool:
    """Whether the layers of a role are spread over the devices of one process: its own layout, or that of the actor it follows."""
    asked = getattr(request.roles, role)
    follows = role == "ref" and asked.devices is None and asked.layout is None
    return bool((request.roles.actor if follows else asked).layout == "device_map")


def role_changes(role: str, config: RoleConfig, facts: JobFacts, *, spread: bool = False) -> Iterator[KeyChange]:
    """verl's keys of one trained role, where its engine stands in a PPO config.

    Args:
        role: "actor", "ref" or "critic".
        config: What the user asked for it.
        facts: The job; of it, the role's engine counts.
        spread: See `is_spread`.

    Raises:
        ConfigError: The job has no such role, its engine is not FSDP, or two settings exclude each other.
    """
    prefix = f"sharding.roles.{role}"
    engine = ENGINE_BLOCK[role]
    if config == type(config)(devices=config.devices):
        return
    if role not in facts.engines or (role == "ref" and facts.ref_in_actor):
        raise _no_such_role(role)
    if facts.engines[role].strategy not in ("fsdp", "fsdp2"):
        raise _not_fsdp(role, facts.engines[role].strategy)
    if config.dtype is not None:
        yield KeyChange(key=f"{engine}.model_dtype", new=_DTYPES[config.dtype], why=f"{prefix}.dtype")
    if config.compute_dtype is not None:
        precision = {"param_dtype": _DTYPES[config.compute_dtype], "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        yield KeyChange(key=f"{engine}.mixed_precision", new=precision, why=f"{prefix}.compute_dtype")
    if role == "ref":
        _refuse_backward(prefix, config)
    alone = role == "actor" and (
        facts.ref_in_actor or "ref" not in facts.engines
    )  # else the key is its reference's too
    if config.attn_implementation is not None and (alone or role == "critic"):
        key = f"{MODEL_BLOCK[role]}.override_config.attn_implementation"
        yield KeyChange(key=key, new=config.attn_implementation, why=f"{prefix}.attn_implementation", implied=True)
    if config.gradient_checkpointing is not None and role != "ref":
        key = f"{MODEL_BLOCK[role]}.enable_gradient_checkpointing"
        on, ours = config.gradient_checkpointing is not False, not isinstance(config.gradient_checkpointing, bool)
        yield KeyChange(key=key, new=on, why=f"{prefix}.gradient_checkpointing", implied=ours)
    if config.offload.params is not None and (role != "ref" or spread):
        yield KeyChange(key=f"{engine}.param_offload", new=config.offload.params, why=f"{prefix}.offload.params")
    if config.offload.optimizer is not None and role != "ref":
        key = f"{engine}.optimizer_offload"
        between_phases = config.offload.optimizer is True  # "step" is ours, and leaves nothing for verl to move
        yield KeyChange(key=key, new=between_phases, why=f"{prefix}.offload.optimizer")
    if False in (config.offload.params, config.offload.optimizer) and role != "ref":
        name = "params" if config.offload.params is False else "optimizer"
        yield KeyChange(key=f"{engine}.offload_policy", new=False, why=f"{prefix}.offload.{name}")
    # ours take the place of verl's own fused kernels; the key is the actor's too, and the reference's engine needs none
    if role == "actor" and getattr(config, "logits", None) is not None:
        key = "actor_rollout_ref.model.use_fused_kernels"
        yield KeyChange(key=key, new=False, why=f"{prefix}.logits")
    if config.offload.activations is not None and role != "ref":
        key, on = f"{MODEL_BLOCK[role]}.enable_activation_offload", config.offload.activations
        yield KeyChange(key=key, new=on, why=f"{prefix}.offload.activations", implied=on)
    if config.micro_batch_size is not None and config.max_tokens is not None:
        raise _two_micro_batches(prefix)
    if config.micro_batch_size is not None:
        for key in _DYNAMIC[role]:
            yield KeyChange(key=key, new=False, why=f"{prefix}.micro_batch_size")
        for key in _MICRO_BATCH[role]:
            yield KeyChange(key=key, new=config.micro_batch_size, why=f"{prefix}.micro_batch_size")
    if config.max_tokens is not None:
        for key in _DYNAMIC[role]:
            yield KeyChange(key=key, new=True, why=f"{prefix}.max_tokens")
        for key in _MAX_TOKENS[role]:
            yield KeyChange(key=key, new=config.max_tokens, why=f"{prefix}.max_tokens")


def _check_fused(request: ShardingConfig, current: Mapping[str, Any]) -> None:
    """Refuses `logits=fused` where something reads the logits that it never makes; `auto` takes another way there."""
    actor = "actor_rollout_ref.actor"
    mode = current.get("distillation.distillation_loss.loss_mode")
    readers = {
        f"{actor}.calculate_sum_pi_squared=True": current.get(f"{actor}.calculate_sum_pi_squared"),
        f"distillation.distillation_loss.loss_mode={mode}": current.get("distillation.enabled") and "topk" in str(mode),
    }
    found = [reader for reader, reads in readers.items() if reads]
    if request.roles.actor.logits == "fused" and found:
        raise ConfigError(
            "sharding.roles.actor.logits=fused",
            expected="nothing that reads the logits themselves",
            found=found[0],
            consequence="the run does not start",
            remedy="sharding.roles.actor.logits=auto",
        )


def _servers(placement: Placement, facts: JobFacts, current: Mapping[str, Any]) -> Iterator[KeyChange]:
    """Keys by which verl itself sizes the pools of reward model and teacher, and rollout servers that span nodes."""
    blocks = {"reward": "reward.reward_model", "teacher": "distillation"}
    for role, block in blocks.items():
        pool = placement.pool_of(role)
        if pool is None or not placement.managed:
            continue
        per_node = placement.per_node(pool.devices)
        why = f"sharding.roles.{role}.devices"
        yield KeyChange(key=f"{block}.nnodes", new=len(per_node), why=why)
        yield KeyChange(key=f"{block}.n_gpus_per_node", new=len(per_node[0]), why=why)
        if role == "reward":
            apart = not set(pool.devices) & set(placement.devices_of("actor"))
            yield KeyChange(key=f"{block}.enable_resource_pool", new=apart, why=why)
    key = "actor_rollout_ref.rollout.n_gpus_per_node"
    actor = [len(numbers) for numbers in placement.per_node(placement.devices_of("rollout"))]
    cut = isinstance(current.get(key), int) and parts_fit(facts.rollout, current[key], actor)
    if facts.hybrid_rollout and facts.mode != "separate_async" and not cut:
        why = "sharding.roles.actor.devices" if placement.managed else "trainer.n_gpus_per_node"
        yield KeyChange(key=key, new=actor[0], why=why)


def refuse_unsupported(request: ShardingConfig, handled: set[str]) -> None:
    """Refuses every changed key that nothing acts on.

    Args:
        request: The user's request.
        handled: Keys of the request that became keys of verl.

    Raises:
        ConfigError: Names the first such key.
    """
    for role in (*ENGINE_ROLES, "reward"):
        asked = getattr(request.roles, role)
        if asked.device_map != "auto" and asked.layout != "device_map":
            raise _map_without_layout(role, asked.device_map)
    for key, value in request.changed().items():
        if key in handled or key.endswith(".devices") or key.startswith(_ACT_ELSEWHERE):
            continue
        if _is_default_effect(key, value):
            continue
        raise ConfigError(
            key,
            expected=f"{_without_effect(key)} in this version: nothing acts on this key yet",
            found=str(value),
            consequence="the run does not start, since the request would be skipped",
            remedy=f"remove {key}",
        )


def _without_effect(key: str) -> str:
    """The values of a key that ask for nothing, as a user writes them."""
    value: Any = ShardingConfig()
    for name in key.split(".")[1:]:
        value = getattr(value, name)
    default = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"{default}, the default, or off" if key == "sharding.fit" else default


def _is_default_effect(key: str, value: Any) -> bool:
    """Values that ask for what happens anyway."""
    stays = [("layout", "fsdp"), ("gradient_checkpointing", False), ("params", True)]
    stays += [("optimizer", False), ("activations", False)]
    role = key.split(".")[2] if key.startswith("sharding.roles.") else ""
    name = key.rpartition(".")[2]
    if role == "ref":
        return (name, value) in stays  # ref is always offloaded, and never runs backward
    if role in ("actor", "critic"):
        return (name, value) == ("layout", "fsdp")
    return (key, value) == ("sharding.fit", "off")


def _refuse_backward(prefix: str, config: RoleConfig) -> None:
    given = {
        "gradient_checkpointing": config.gradient_checkpointing,
        "offload.activations": config.offload.activations,
        "offload.optimizer": config.offload.optimizer,
    }
    asked = [name for name, value in given.items() if value]
    if asked:
        raise ConfigError(
            f"{prefix}.{asked[0]}",
            expected="null or false: the reference never trains",
            found=" and ".join(asked),
            consequence="the run does not start",
            remedy="remove " + " and ".join(f"{prefix}.{name}" for name in asked),
        )


def _map_without_layout(role: str, device_map: Any) -> ConfigError:
    return ConfigError(
        f"sharding.roles.{role}.device_map",
        expected=f"sharding.roles.{role}.layout=device_map beside it",
        found=f"{device_map} without it",
        consequence="the run does not start, since the map would be skipped",
        remedy=f"sharding.roles.{role}.layout=device_map, or remove sharding.roles.{role}.device_map",
    )


def _two_micro_batches(prefix: str) -> ConfigError:
    return ConfigError(
        prefix,
        expected="micro_batch_size (samples) or max_tokens (a token budget)",
        found="both",
        consequence="the run does not start",
        remedy=f"remove {prefix}.micro_batch_size or {prefix}.max_tokens",
    )


def _no_such_role(role: str) -> ConfigError:
    return ConfigError(
        f"sharding.roles.{role}",
        expected=f"a job that has a {role} of its own (with LoRA the actor is its reference)",
        found=f"settings for a {role} that this job does not use",
        consequence="the run does not start",
        remedy=f"remove the sharding.roles.{role} overrides",
    )


def _not_fsdp(role: str, strategy: str) -> ConfigError:
    return ConfigError(
        f"sharding.roles.{role}",
        expected="strategy fsdp or fsdp2 for memory settings",
        found=f"strategy {strategy}; only devices can be set for it",
        consequence="the run does not start",
        remedy=f"set verl's own keys of {strategy}, or model_engine=dp (FSDP)",
    )


def request_of(config: DictConfig) -> ShardingConfig:
    """The typed request in a composed config.

    Raises:
        ConfigError: Unknown key or wrong value.
    """
    block = config.get("sharding")
    return ShardingConfig.parse(OmegaConf.to_container(block, resolve=True) if OmegaConf.is_config(block) else block)


def values_of(config: DictConfig) -> dict[str, Any]:
    """verl's resolved values by dotted key; blocks and lists are left out, `???` reads None."""
    values: dict[str, Any] = {}
    stack: list[tuple[str, Any]] = [("", OmegaConf.to_container(config, resolve=True))]
    while stack:
        path, node = stack.pop()
        if isinstance(node, dict):
            stack += [(f"{path}.{key}" if path else str(key), item) for key, item in node.items()]
        elif not isinstance(node, list):
            values[path] = None if node == "???" else node
    return values
