"""Whether one micro-batch of each role can hold the job's longest sequence, checked before any model loads.

With dynamic batch sizes verl packs sequences up to `tokens per GPU * sequence-parallel size`, and asserts in the first
step that draws a longer one (`rearrange_micro_batches`, verl/utils/seqlen_balancing.py). A sequence is at most prompt +
response long, so the smallest budget is known beforehand: that length divided by the sequence-parallel size.

The critic differs, in verl 0.9.0 and 0.9.1: the V1 trainer gives its engine `critic.ppo_infer_max_token_len_per_gpu` for
training too (verl/trainer/ppo/v1/trainer_base.py), a field of 32768 tokens that no yaml file has, and reads neither
`critic.use_dynamic_bsz` nor `critic.ulysses_sequence_parallel_size`. What counts there is the engine's block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl_ext_sharding.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
CRITIC_TOKENS = "critic.ppo_max_token_len_per_gpu"
CRITIC_INFER_TOKENS = "critic.ppo_infer_max_token_len_per_gpu"

CRITIC_DEFAULT_TOKENS = 32768
"""Default of `ppo_infer_max_token_len_per_gpu`, verl/workers/config/critic.py."""

SP_SIZES = (1, 2, 4)
"""Sequence-parallel sizes that an error offers, besides the present one."""

_ULYSSES = "ulysses_sequence_parallel_size"
_SP_KEYS = {
    "megatron": "megatron.context_parallel_size",
    "veomni": "veomni.ulysses_parallel_size",
    "torchtitan": "torchtitan.tensor_parallel_size",
}
"""Key below a role's block by which each strategy's engine multiplies the budget; FSDP has `_ULYSSES`."""


@dataclass(kw_only=True, frozen=True)
class Heads:
    """Attention heads of a model: Ulysses and tensor parallelism divide them.

    Args:
        query: Attention heads.
        key_value: Key/value heads, fewer with grouped attention.
    """

    query: int
    key_value: int

    def divide(self, size: int) -> bool:
        """Whether a parallel size is possible, as verl/models/transformers/monkey_patch.py asserts it."""
        return self.query % size == 0 and (self.key_value % size == 0 or size % self.key_value == 0)


@dataclass(kw_only=True, frozen=True)
class TokenBudget:
    """What one micro-batch of one computation may hold.

    Args:
        role: Whose computation, in words.
        key: verl's key of the budget, without Hydra's prefix.
        tokens_per_gpu: Its value, in tokens.
        sp_key: verl's key of the sequence-parallel size.
        sp_size: Its value, 1 or more.
        in_yaml: Whether verl's yaml has `key`, so that Hydra need not be told to add it.
        heads: Attention heads of the model. None: unknown.
        heads_matter: Whether the heads must divide by the sequence-parallel size.
        num_ranks: GPUs of the role, which must divide by the sequence-parallel size. None: unknown.
        note: What else to say about the present value.
    """

    role: str
    key: str
    tokens_per_gpu: int
    sp_key: str
    sp_size: int = 1
    in_yaml: bool = True
    heads: Heads | None = None
    heads_matter: bool = True
    num_ranks: int | None = None
    note: str = ""

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that fits, in tokens."""
        return self.tokens_per_gpu * self.sp_size

    def allows(self, sp_size: int) -> bool:
        """Whether the role can run at a sequence-parallel size. One that isn't known to work is not allowed."""
        if sp_size in (1, self.sp_size):
            return True
        if self.num_ranks is not None and self.num_ranks % sp_size:
            return False
        return not self.heads_matter or (self.heads is not None and self.heads.divide(sp_size))


def longest_sequence(values: Mapping[str, Any]) -> int:
    """Prompt + response of the job, in tokens.

    Args:
        values: verl's resolved values, by dotted key.
    """
    prompt = values.get(f"{ROLLOUT}.prompt_length") or values["data.max_prompt_length"]
    response = values.get(f"{ROLLOUT}.response_length") or values["data.max_response_length"]
    return int(prompt) + int(response)


def token_budgets(
    values: Mapping[str, Any],
    roles: Collection[str],
    heads: Mapping[str, Heads] | None = None,
    num_ranks: Mapping[str, int] | None = None,
) -> list[TokenBudget]:
    """The budgets that this job's micro-batches must keep to.

    Args:
        values: verl's resolved values, by dotted key.
        roles: The roles that the job trains or asks for log-probs, of "actor", "ref" and "critic".
        heads: Attention heads by role.
        num_ranks: GPUs by role.

    Returns:
        One budget for each computation with a dynamic batch size. A fixed one counts sequences, however long.
    """
    budgets = []
    for role in roles:
        model, ranks = (heads or {}).get(role), (num_ranks or {}).get(role)
        budgets += [replace(budget, heads=model, num_ranks=ranks) for budget in _READERS[role](values)]
    return budgets


def check_token_budgets(budgets: Sequence[TokenBudget], longest_tokens: int) -> None:
    """Refuses a budget that the longest sequence exceeds.

    Args:
        budgets: From `token_budgets`.
        longest_tokens: From `longest_sequence`.

    Raises:
        ConfigError: Names each such budget, and the overrides that repair all of them at each possible
            sequence-parallel size.
    """
    short = [budget for budget in budgets if budget.capacity_tokens < longest_tokens]
    if not short:
        return
    found = [
        f"{budget.role} {budget.tokens_per_gpu}"
        + (f" x sequence parallel {budget.sp_size} = {budget.capacity_tokens}" if budget.sp_size > 1 else "")
        + f" ({budget.key}{'; ' + budget.note if budget.note else ''})"
        for budget in short
    ]
    raise ConfigError(
        "token budget below the longest sequence",
        expected=f"micro-batches of at least {longest_tokens} tokens, prompt + response",
        found=", ".join(found),
        consequence="the run does not start; the first step with such a sequence would end in an assertion",
        remedy="\n  or:       ".join(" ".join(lines) for lines in fixes(short, longest_tokens).values()),
    )


def fixes(budgets: Sequence[TokenBudget], longest_tokens: int) -> dict[int, tuple[str, ...]]:
    """The overrides that make every budget hold the longest sequence.

    Args:
        budgets: Those that are too small.
        longest_tokens: Length of the longest sequence, in tokens.

    Returns:
        `{sequence-parallel size: overrides}` for each size that all of them allow. Size 1 always works.
    """
    sizes = sorted({*SP_SIZES, *(budget.sp_size for budget in budgets)})
    return {
        size: tuple(dict.fromkeys(_fix(budgets, size, -(-longest_tokens // size))))
        for size in sizes
        if all(budget.allows(size) for budget in budgets)
    }


def _fix(budgets: Sequence[TokenBudget], sp_size: int, tokens_per_gpu: int) -> Iterator[str]:
    yield from (f"{budget.sp_key}={sp_size}" for budget in budgets if budget.sp_size != sp_size)
    yield from (f"{'' if budget.in_yaml else '++'}{budget.key}={tokens_per_gpu}" for budget in budgets)


def _actor(values: Mapping[str, Any]) -> Iterator[TokenBudget]:
    """The actor's own budget, and that of the log-probs of rollouts, which its engine computes."""
    engine = _policy_engine(values, ACTOR)
    if values.get(f"{ACTOR}.use_dynamic_bsz"):
        key = f"{ACTOR}.ppo_max_token_len_per_gpu"
        yield TokenBudget(role="actor", key=key, tokens_per_gpu=int(values[key]), **engine)
    if values.get(f"{ROLLOUT}.log_prob_use_dynamic_bsz"):
        key = f"{ROLLOUT}.log_prob_max_token_len_per_gpu"
        yield TokenBudget(role="rollout log-prob", key=key, tokens_per_gpu=int(values[key]), **engine)


def _ref(values: Mapping[str, Any]) -> Iterator[TokenBudget]:
    if values.get(f"{REF}.log_prob_use_dynamic_bsz"):
        key = f"{REF}.log_prob_max_token_len_per_gpu"
        engine = _policy_engine(values, REF)
        yield TokenBudget(role="ref", key=key, tokens_per_gpu=int(values[key]), **engine)


def _critic(values: Mapping[str, Any]) -> Iterator[TokenBudget]:
    strategy = str(values.get("critic.strategy", "fsdp"))
    block = strategy if strategy in _SP_KEYS else "fsdp"
    if not values.get(f"critic.{block}.use_dynamic_bsz", True):
        return
    sp_key = f"critic.{_SP_KEYS.get(strategy, f'fsdp.{_ULYSSES}')}"
    engine = _engine(strategy, sp_key, values.get(sp_key))
    infer_tokens = int(values.get(CRITIC_INFER_TOKENS) or CRITIC_DEFAULT_TOKENS)
    tokens = int(values.get(CRITIC_TOKENS) or CRITIC_DEFAULT_TOKENS)
    v1 = bool(values.get("trainer.use_v1", True))
    note = f"{CRITIC_TOKENS}={tokens} is not read by trainer.use_v1=true" if v1 and tokens != infer_tokens else ""
    if not v1:
        yield TokenBudget(role="critic", key=CRITIC_TOKENS, tokens_per_gpu=tokens, **engine)
    yield TokenBudget(
        role="critic" if v1 else "critic values",
        key=CRITIC_INFER_TOKENS,
        tokens_per_gpu=infer_tokens,
        in_yaml=False,
        note=note,
        **engine,
    )


_READERS = {"actor": _actor, "ref": _ref, "critic": _critic}


def _policy_engine(values: Mapping[str, Any], block: str) -> dict[str, Any]:
    """Sequence parallelism of actor or ref: FSDP's size beside the engine's block wins, if it is not 1."""
    strategy = str(values.get(f"{block}.strategy", "fsdp"))
    if strategy in _SP_KEYS:
        key = f"{block}.{_SP_KEYS[strategy]}"
        return _engine(strategy, key, values.get(key))
    outer = int(values.get(f"{block}.{_ULYSSES}") or 1)
    inner = values.get(f"{block}.fsdp_config.{_ULYSSES}")
    return _engine(strategy, f"{block}.{_ULYSSES}", outer if outer > 1 else inner)


def _engine(strategy: str, sp_key: str, sp_size: Any) -> dict[str, Any]:
    """Arguments of `TokenBudget`. Megatron's context parallelism splits the sequence only, not the heads."""
    return {"sp_key": sp_key, "sp_size": int(sp_size or 1), "heads_matter": strategy != "megatron"}
