"""Whether one micro-batch of each role can hold the job's longest sequence, checked before any model loads.

With dynamic batch sizes verl packs sequences up to `tokens per GPU * sequence-parallel size`, and asserts in the first
step that draws a longer one (`rearrange_micro_batches`, verl/utils/seqlen_balancing.py). A sequence is at most prompt +
response long, so the smallest budget is known beforehand: that length divided by the sequence-parallel size.

The critic differs, in verl 0.9.0 and 0.9.1: the V1 trainer gives its engine `critic.ppo_infer_max_token_len_per_gpu` for
training too (verl/trainer/ppo/v1/trainer_base.py), a field of 32768 tokens that no yaml file has, and reads neither
`critic.use_dynamic_bsz` nor `critic.ulysses_sequence_parallel_size`. What counts there is the engine's block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl_ext_sharding.config.facts import critic_engine
from verl_ext_sharding.config.measures import MODEL_BLOCK
from verl_ext_sharding.config.model_heads import Heads, heads_of
from verl_ext_sharding.config.values import whole_number
from verl_ext_sharding.errors import ConfigError, PlacementError
from verl_ext_sharding.placement.bundles import Placement
from verl_ext_sharding.placement.checks import check_job
from verl_ext_sharding.placement.job import EngineFacts, JobFacts

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
CRITIC_INFER_TOKENS = "critic.ppo_infer_max_token_len_per_gpu"
CRITIC_TOKENS = "critic.ppo_max_token_len_per_gpu"

DEFAULT_TOKENS, CRITIC_DEFAULT_TOKENS = 16384, 32768
"""verl's defaults; the critic's stands in no yaml (`ppo_infer_max_token_len_per_gpu`, verl/workers/config/critic.py)."""

SP_SIZES = (1, 2, 4)
"""Sequence-parallel sizes that an error offers, besides the present ones."""

_FLASH = ("flash_attention_2", "auto")
"""Attention by which a sequence may lie on several ranks, whoever asks for it; "auto" takes none that it may not lie on."""

Sizes = Mapping[str, int]
"""Sequence-parallel size of each role."""


@dataclass(kw_only=True, frozen=True)
class TokenBudget:
    """What one micro-batch of one computation may hold.

    Args:
        name: Whose computation, in words.
        role: The role whose engine computes it.
        key: verl's key of the budget.
        tokens_per_gpu: Its value, in tokens.
        sp_size: The engine's sequence-parallel size.
        override: What to type before the `=` to change it.
        note: What else to say about the present value.
    """

    name: str
    role: str
    key: str
    tokens_per_gpu: int
    sp_size: int = 1
    override: str
    note: str = ""

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that fits, in tokens."""
        return self.tokens_per_gpu * self.sp_size


def check_token_budgets(values: Mapping[str, Any], facts: JobFacts, placement: Placement) -> None:
    """Refuses a budget that the longest sequence exceeds, and batches that are neither fixed nor dynamic.

    Args:
        values: verl's resolved values, by dotted key.
        facts: The job.
        placement: Where its roles run.

    Raises:
        ConfigError: Names each such budget, and the overrides that repair all of them: at the sequence-parallel sizes that
            the job has, and at each other one that its heads, ranks and batches allow.
    """
    check_batch_kinds(values, facts)
    longest_tokens = longest_sequence(values)
    budgets = token_budgets(values, facts, longest_tokens)
    short = [budget for budget in budgets if budget.capacity_tokens < longest_tokens]
    if not short:
        return
    found = [
        f"{budget.name} {budget.tokens_per_gpu}"
        + (f" x sequence parallel {budget.sp_size} = {budget.capacity_tokens}" if budget.sp_size > 1 else "")
        + f" ({budget.key}{'; ' + budget.note if budget.note else ''})"
        for budget in short
    ]
    offered = fixes(budgets, longest_tokens, facts, lambda sizes: _runs(sizes, values, facts, placement))
    raise ConfigError(
        "token budget below the longest sequence",
        expected=f"micro-batches of at least {longest_tokens} tokens, prompt + response",
        found=", ".join(found),
        consequence="the run does not start; the first step with such a sequence would end in an assertion",
        remedy="\n  or:       ".join(" ".join(lines) for lines in offered),
    )


def longest_sequence(values: Mapping[str, Any]) -> int:
    """Prompt + response of the job, in tokens.

    Args:
        values: verl's resolved values, by dotted key.

    Raises:
        ConfigError: One of the lengths is no number.
    """
    total = 0
    for name in ("prompt", "response"):
        key = f"data.max_{name}_length"
        length = whole_number(key, values.get(key), instead=512)
        key = f"{ROLLOUT}.{name}_length"
        total += whole_number(key, values.get(key, length), instead=length)
    return total


def token_budgets(values: Mapping[str, Any], facts: JobFacts, longest_tokens: int = 1) -> list[TokenBudget]:
    """The budgets that this job's micro-batches must keep to.

    Args:
        values: verl's resolved values, by dotted key.
        facts: The job.
        longest_tokens: What a budget that is no number should have been, in tokens.

    Returns:
        One budget for each computation with a dynamic batch size. A fixed one counts sequences, however long.

    Raises:
        ConfigError: A budget is no number.
    """
    budgets = []
    for role, name, key, note in _computations(values, facts):
        sp_size = facts.engines[role].sequence_parallel_size
        ours = f"sharding.roles.{role}.max_tokens"
        override = ours if values.get(ours) is not None else f"++{key}" if key == CRITIC_INFER_TOKENS else key
        default = CRITIC_DEFAULT_TOKENS if key == CRITIC_INFER_TOKENS else DEFAULT_TOKENS
        enough = max(default, -(-longest_tokens // sp_size))
        tokens = whole_number(key, values.get(key, default), instead=enough, override=override)
        budgets.append(
            TokenBudget(
                name=name, role=role, key=key, tokens_per_gpu=tokens, sp_size=sp_size, override=override, note=note
            )
        )
    return budgets


def _computations(values: Mapping[str, Any], facts: JobFacts) -> Iterator[tuple[str, str, str, str]]:
    """Role, name, key and note of each computation that packs sequences up to a budget."""
    roles = [role for role in facts.engines if not _schedules_itself(values, role, facts.engines[role])]
    if "actor" in roles and values.get(f"{ACTOR}.use_dynamic_bsz"):
        yield "actor", "actor", f"{ACTOR}.ppo_max_token_len_per_gpu", ""
    if "actor" in roles and facts.actor_log_probs and values.get(f"{ROLLOUT}.log_prob_use_dynamic_bsz"):
        yield "actor", "rollout log-prob", f"{ROLLOUT}.log_prob_max_token_len_per_gpu", ""
    if "ref" in roles and not facts.ref_in_actor and values.get(f"{REF}.log_prob_use_dynamic_bsz"):
        yield "ref", "ref", f"{REF}.log_prob_max_token_len_per_gpu", ""
    if "critic" in roles and values.get(f"{critic_engine(facts.engines['critic'].strategy)}.use_dynamic_bsz", True):
        unread = values.get(CRITIC_TOKENS, CRITIC_DEFAULT_TOKENS)
        differs = unread != values.get(CRITIC_INFER_TOKENS, CRITIC_DEFAULT_TOKENS)
        note = f"{CRITIC_TOKENS}={unread} is not read by trainer.use_v1=true" if differs else ""
        yield "critic", "critic", CRITIC_INFER_TOKENS, note


def _schedules_itself(values: Mapping[str, Any], role: str, engine: EngineFacts) -> bool:
    """Megatron's dynamic context parallelism has a budget of its own (`max_seqlen_per_dp_cp_rank`) and reads no other."""
    block = {"actor": ACTOR, "ref": REF}.get(role, role)
    return engine.strategy == "megatron" and bool(values.get(f"{block}.megatron.dynamic_context_parallel"))


def fixes(
    budgets: Sequence[TokenBudget], longest_tokens: int, facts: JobFacts, runs: Callable[[Sizes], bool]
) -> list[tuple[str, ...]]:
    """The overrides that make every budget hold the longest sequence, one tuple for each choice of parallel sizes.

    Args:
        budgets: All of the job.
        longest_tokens: Length of the longest sequence, in tokens.
        facts: The job.
        runs: Whether the job runs at other sequence-parallel sizes.

    Returns:
        The present sizes first, then each of `SP_SIZES` for all roles that every one of them can run at.
    """
    present = {budget.role: budget.sp_size for budget in budgets}
    others = [dict.fromkeys(present, size) for size in SP_SIZES]
    choices = [present, *(sizes for sizes in others if sizes != present and runs(sizes))]
    return [tuple(dict.fromkeys(_fix(budgets, sizes, longest_tokens, facts))) for sizes in choices]


def _fix(budgets: Sequence[TokenBudget], sizes: Sizes, longest_tokens: int, facts: JobFacts) -> Iterator[str]:
    for role, engine in facts.engines.items():
        # The reference's size follows the actor's in verl's yaml: one that is to stay must be typed.
        follows = role == "ref" and not facts.ref_in_actor and _changes("actor", sizes, facts)
        if _changes(role, sizes, facts) or (follows and role not in sizes):
            size = sizes.get(role, engine.sequence_parallel_size)
            yield from (f"{key}={size}" for key in engine.sequence_parallel_keys)
    for budget in budgets:
        if min(budget.capacity_tokens, budget.tokens_per_gpu * sizes[budget.role]) < longest_tokens:
            yield f"{budget.override}={-(-longest_tokens // sizes[budget.role])}"


def _changes(role: str, sizes: Sizes, facts: JobFacts) -> bool:
    return role in sizes and sizes[role] != facts.engines[role].sequence_parallel_size


def _runs(sizes: Sizes, values: Mapping[str, Any], facts: JobFacts, placement: Placement) -> bool:
    """Whether roles can run at other sequence-parallel sizes: heads and packing, then ranks and batches."""
    changed = {role: size for role, size in sizes.items() if _changes(role, sizes, facts)}
    if not all(_splits(role, size, values, facts.engines[role].strategy) for role, size in changed.items()):
        return False
    engines = dict(facts.engines)
    for role, size in changed.items():
        engine = engines[role]
        others = engine.model_parallel_size // engine.sequence_parallel_size
        engines[role] = replace(engine, model_parallel_size=others * size, sequence_parallel_size=size)
    try:
        check_job(placement, replace(facts, engines=engines))
    except PlacementError:
        return False
    return True


def _splits(role: str, size: int, values: Mapping[str, Any], strategy: str) -> bool:
    """Whether an engine can split a sequence over a number of ranks; what isn't known to work is not offered."""
    if strategy == "torchtitan":
        return False  # its other parallel sizes must be set anew with it (ParallelDims)
    if size == 1 or strategy == "megatron":  # context parallelism leaves heads whole
        return True
    ours = values.get(f"sharding.roles.{role}.attn_implementation")
    asked = ours or values.get(f"{MODEL_BLOCK[role]}.override_config.attn_implementation") or _FLASH[0]
    heads: Heads | None = heads_of(values, role)
    packs = bool(values.get(f"{MODEL_BLOCK[role]}.use_remove_padding"))
    shares = asked in _FLASH or ours == "varlen"
    return packs and shares and heads is not None and heads.divide(size)


def check_batch_kinds(values: Mapping[str, Any], facts: JobFacts) -> None:
    """Refuses computations of one engine that verl would batch in two ways, and fixed batches without a size.

    verl asserts the first in the actor's worker, after the reference is loaded (workers/engine_workers.py, `init_model`),
    and divides by None for the second in the first step.

    Raises:
        ConfigError: Names the keys.
    """
    key, log_probs = f"{ACTOR}.use_dynamic_bsz", f"{ROLLOUT}.log_prob_use_dynamic_bsz"
    dynamic = bool(values.get(key))
    if "actor" in facts.engines and dynamic != bool(values.get(log_probs, dynamic)):
        fixed_size = f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"
        size = values.get(f"{ACTOR}.ppo_micro_batch_size_per_gpu") or 1
        also = f" {fixed_size}={size}" if not dynamic and values.get(fixed_size) is None else ""
        raise ConfigError(
            log_probs,
            expected=f"the same as {key}: one engine computes both",
            found=f"{not dynamic} with {key}={dynamic}",
            consequence="the run does not start",
            remedy=f"{log_probs}={dynamic}{also}",
        )
    for role, switch, sizes in _fixed_batches(values, facts):
        missing = [size for size in sizes if values.get(size.lstrip("+")) is None]
        if missing:
            raise ConfigError(
                missing[0].lstrip("+"),
                expected=f"samples of one micro-batch of {role}, since {switch.lstrip('+')} is off",
                found="null",
                consequence="the run does not start",
                remedy=f"{' '.join(f'{size}=1' for size in missing)}, or {switch}=True",
            )


def _fixed_batches(values: Mapping[str, Any], facts: JobFacts) -> Iterator[tuple[str, str, list[str]]]:
    """Role, switch and sizes of the fixed batches that verl's own checks don't look at: they ask for a fixed actor's."""
    switch = f"{REF}.log_prob_use_dynamic_bsz"
    own = "ref" in facts.engines and not facts.ref_in_actor and bool(values.get(f"{ACTOR}.use_dynamic_bsz"))
    if own and not values.get(switch, False):
        yield "ref", switch, [f"{REF}.log_prob_micro_batch_size_per_gpu"]
    if "critic" in facts.engines:
        engine = critic_engine(facts.engines["critic"].strategy)
        switch = f"{engine}.use_dynamic_bsz"
        if not values.get(switch, True):
            yield "critic", f"++{switch}", [f"++{engine}.{part}micro_batch_size_per_gpu" for part in ("", "infer_")]
