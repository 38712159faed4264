"""Keys of a role's block that verl's v1 trainer does not read, and what does what they say.

The trainer builds the critic's engine from `critic.<engine>`, with `critic.ppo_infer_max_token_len_per_gpu` as the budget of
both training and values (trainer/ppo/v1/trainer_base.py, `_setup`); engines clip gradients by `optim.clip_grad`, and take
their strategy from the role. So in verl 0.9.0 and 0.9.1 the other keys of these are read at most by checks of the config.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from verl_ext_sharding.config.facts import FSDP, critic_engine
from verl_ext_sharding.config.measures import ENGINE_BLOCK
from verl_ext_sharding.config.schema import ShardingConfig
from verl_ext_sharding.config.token_budget import (
    CRITIC_DEFAULT_TOKENS,
    CRITIC_INFER_TOKENS,
    CRITIC_TOKENS,
    longest_sequence,
)
from verl_ext_sharding.placement.bundles import Placement
from verl_ext_sharding.placement.job import EngineFacts, JobFacts

_FORWARD_TOKENS = "critic.forward_max_token_len_per_gpu"
_ULYSSES = "critic.ulysses_sequence_parallel_size"
_FIXED = "critic.use_dynamic_bsz"
_SIZES = tuple(f"critic.{name}_micro_batch_size_per_gpu" for name in ("ppo", "ppo_infer", "forward"))


def idle_notes(
    request: ShardingConfig,
    facts: JobFacts,
    placement: Placement,
    values: Mapping[str, Any],
    explicit: Collection[str] = (),
) -> list[str]:
    """One sentence for what the user wrote into such keys, where it differs from what counts.

    Args:
        request: The user's request.
        facts: The job.
        placement: Where its roles run.
        values: verl's resolved values by dotted key.
        explicit: verl's keys that the user wrote on the command line; those of a recipe's yaml are often old.
    """
    notes = [*_clipping(facts, values, explicit), *_strategies(facts, values, explicit)]
    if "critic" not in facts.engines:
        return notes
    engine, asked = facts.engines["critic"], request.roles.critic
    block = critic_engine(engine.strategy)
    ours = engine.strategy in ("fsdp", "fsdp2")
    if values.get(f"{block}.use_dynamic_bsz", True) and asked.max_tokens is None:
        ranks = placement.processes_of("critic") // engine.model_parallel_size
        samples = (engine.mini_batch_size or 1) * facts.rollout_n // max(1, ranks)
        fixed = list(_fixed(block, values, explicit, samples=samples, ours=ours))
        notes += fixed or _budgets(block, engine, values, explicit, ours=ours)
    inner = f"{ENGINE_BLOCK['critic']}.ulysses_sequence_parallel_size"
    asks = _ULYSSES in explicit and inner not in explicit and asked.layout != "device_map"
    if ours and asks and (size := values.get(_ULYSSES)) != engine.sequence_parallel_size:
        notes.append(_note([_ULYSSES], size, f"{inner}={engine.sequence_parallel_size}", f"{inner}={size}"))
    return notes


def _clipping(facts: JobFacts, values: Mapping[str, Any], explicit: Collection[str]) -> Iterator[str]:
    for role in facts.engines:
        block = ENGINE_BLOCK[role].rpartition(".")[0]
        key, counts = f"{block}.grad_clip", f"{block}.optim.clip_grad"
        if role != "ref" and key in explicit and values.get(key) != values.get(counts):
            yield _note([key], values.get(key), f"{counts}={values.get(counts)}", f"{counts}={values.get(key)}")


def _strategies(facts: JobFacts, values: Mapping[str, Any], explicit: Collection[str]) -> Iterator[str]:
    """verl writes a role's strategy over that of its engine (workers/config/actor.py and critic.py, `__post_init__`)."""
    for role, engine in facts.engines.items():
        key, counts = f"{ENGINE_BLOCK[role]}.strategy", f"{ENGINE_BLOCK[role].rpartition('.')[0]}.strategy"
        if engine.strategy in FSDP and key in explicit and values.get(key) != engine.strategy:
            yield _note([key], values.get(key), f"{counts}={engine.strategy}", f"{counts}={values.get(key)}")


def _budgets(
    block: str, engine: EngineFacts, values: Mapping[str, Any], explicit: Collection[str], *, ours: bool
) -> Iterator[str]:
    """Token budgets, which verl replaces by another one."""
    counts = values.get(CRITIC_INFER_TOKENS, CRITIC_DEFAULT_TOKENS)
    keys = [CRITIC_TOKENS, _FORWARD_TOKENS, *(f"{block}.{part}max_token_len_per_gpu" for part in ("", "infer_"))]
    written = [key for key in keys if key in explicit and values.get(key) not in (None, counts)]
    if not written or CRITIC_INFER_TOKENS in explicit or not isinstance(asked := values[written[0]], int):
        return
    enough = max(asked, -(-longest_sequence(values) // engine.sequence_parallel_size))
    key = "sharding.roles.critic.max_tokens" if ours else f"++{CRITIC_INFER_TOKENS}"
    yield _note(written, asked, f"{CRITIC_INFER_TOKENS}={counts}", f"{key}={enough}")


def _fixed(
    block: str, values: Mapping[str, Any], explicit: Collection[str], *, samples: int, ours: bool
) -> Iterator[str]:
    """Fixed micro-batches, beside an engine that packs by a token budget."""
    own = [f"{block}.{part}micro_batch_size_per_gpu" for part in ("", "infer_")]
    fixed = () if values.get(_FIXED) else (*_SIZES, _FIXED)
    written = [key for key in (*own, *fixed) if key in explicit and values.get(key) is not None]
    if not written or f"{block}.use_dynamic_bsz" in explicit:
        return
    sizes = [values.get(key) for key in (*written, _SIZES[0])]
    asked = next((size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and size > 0), 1)
    size = math.gcd(asked, samples)  # one that divides the samples of a rank, as verl asserts
    ours = ours and all(values[key] == size for key in own if key in explicit)  # else both would be asked for
    lines = [f"++{block}.use_dynamic_bsz=False", *(f"++{key}={size}" for key in own)]
    counts = f"{block}.use_dynamic_bsz=True and {CRITIC_INFER_TOKENS}="
    counts += str(values.get(CRITIC_INFER_TOKENS, CRITIC_DEFAULT_TOKENS))
    typed = f"sharding.roles.critic.micro_batch_size={size}" if ours else " ".join(lines)
    yield _note(written, values[written[0]], counts, typed)


def _note(keys: list[str], value: Any, counts: str, typed: str) -> str:
    have = "has" if len(keys) == 1 else "have"
    also = "".join(f" and {key}" for key in keys[1:])
    return f"{keys[0]}={value}{also} {have} no effect: verl's v1 trainer goes by {counts}; write {typed}"
