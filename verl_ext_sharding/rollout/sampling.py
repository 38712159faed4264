"""Picks the next token of each row: a function of that row's logits, history and seed, and of nothing else."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from verl_ext_sharding.rollout.requests import RolloutError, SamplingParams

CHUNK_BYTES = 1 << 30
"""Working memory of one sampling call: rows beyond it are sampled in turns."""

_BYTES_PER_ENTRY = 40
"""float32 logits, scores and a sorted copy; float64 probabilities, their sum and one temporary."""


class SampledRow(Protocol):
    """What sampling needs to know of a row. `rng` is the row's own, so no other row can move it."""

    params: SamplingParams
    rng: random.Random

    def history(self) -> Sequence[int]:
        """Prompt and response so far, for the repetition penalty."""
        ...


def choose_tokens(
    logits: torch.Tensor,
    rows: Sequence[SampledRow],
    *,
    banned: torch.Tensor | None = None,
    raw_logprobs: bool = False,
) -> tuple[list[int], list[float]]:
    """Samples one token a row.

    The log-prob is what verl's actor computes from the same logits: log-softmax, in float32, of the logits after
    penalty, temperature and truncation (vLLM's `processed_logprobs`); greedy rows have temperature 1, as in vLLM.
    Without truncation it runs over every row of the vocabulary, banned ones too, since the actor's does.

    Args:
        logits: Shape (rows, vocab), any floating dtype.
        rows: One for each row of `logits`.
        banned: Ids that must never be drawn, int64 on the device of `logits`, or None.
        raw_logprobs: Report the log-softmax of the logits as the model gave them instead.

    Returns:
        Token ids and log-probs, one each a row.

    Raises:
        RolloutError: When the model's logits are not finite.
    """
    size = max(1, CHUNK_BYTES // (_BYTES_PER_ENTRY * logits.shape[-1]))
    tokens: list[int] = []
    log_probs: list[float] = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        chosen = _choose(logits[start : start + size].float(), part, banned, raw_logprobs)
        for token, log_prob in chosen.tolist():
            if not math.isfinite(log_prob):
                raise _not_finite(log_prob)
            tokens.append(int(token))
            log_probs.append(log_prob)
    return tokens, log_probs


def _choose(
    logits: torch.Tensor, rows: Sequence[SampledRow], banned: torch.Tensor | None, raw_logprobs: bool
) -> torch.Tensor:
    """Returns (rows, 2) float64 on the device of the logits: token id and log-prob."""
    scores = _penalised(logits, rows)
    chosen = torch.empty((len(rows), 2), dtype=torch.float64, device=logits.device)
    for members in _grouped(rows):
        params, whole = rows[members[0]].params, len(members) == len(rows)
        index = torch.tensor(members, device=logits.device)
        group = scores if whole else scores[index]
        processed, token = _draw(group, params, [rows[member] for member in members], banned)
        reported = (logits if whole else logits[index]) if raw_logprobs else processed
        log_prob = reported.gather(-1, token) - reported.logsumexp(-1, keepdim=True)
        chosen[index] = torch.cat([token.double(), log_prob.double()], dim=-1)
    return chosen


def _draw(
    scores: torch.Tensor, params: SamplingParams, rows: Sequence[SampledRow], banned: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Processed scores (group, vocab) and the chosen ids (group, 1) of rows that share their parameters."""
    allowed = scores if banned is None else scores.index_fill(-1, banned, -math.inf)
    if params.greedy:
        return scores, allowed.argmax(-1, keepdim=True)
    if params.truncates:
        processed = allowed = _warped(allowed, params)
    else:
        processed, allowed = _warped(scores, params), _warped(allowed, params)
    uniform = torch.tensor([[row.rng.random()] for row in rows], dtype=torch.float64, device=scores.device)
    return processed, _inverse_cdf(allowed, uniform)


def _inverse_cdf(scores: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first id whose cumulated probability exceeds the uniform draw, (group, 1).

    In float64, so that the sum over a vocabulary adds no error to speak of: two batches that agree on the logits
    agree on the token.
    """
    cumulated = scores.double().softmax(-1).cumsum(-1)
    total = cumulated[:, -1:].contiguous()
    token = torch.searchsorted(cumulated, uniform * total, right=True)
    last = torch.searchsorted(cumulated, total)  # the last id with any probability, should the product round up
    return torch.minimum(token, last).clamp_(max=scores.shape[-1] - 1)  # NaN finds no id: the caller reports it


def _warped(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Temperature and truncation by transformers' own warpers, in the order of its `generate`; vLLM cuts by min_p first."""
    warpers: list[LogitsProcessor] = []
    if params.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    unused_ids = torch.empty((0,), dtype=torch.long, device=scores.device)
    for warper in warpers:
        scores = warper(unused_ids, scores)
    return scores


def _penalised(logits: torch.Tensor, rows: Sequence[SampledRow]) -> torch.Tensor:
    """Logits after each row's repetition penalty; the same tensor when no row has one."""
    scores = logits
    for index, row in enumerate(rows):
        penalty = row.params.repetition_penalty
        if penalty == 1.0:
            continue
        scores = logits.clone() if scores is logits else scores
        history = torch.tensor([list(row.history())], dtype=torch.long, device=logits.device)
        scores[index] = RepetitionPenaltyLogitsProcessor(penalty)(history, logits[index : index + 1])[0]
    return scores


def _grouped(rows: Sequence[SampledRow]) -> list[list[int]]:
    """Row numbers in groups that share their warpers, in order of first appearance."""
    groups: dict[tuple[float, ...], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        params = row.params
        groups[params.temperature, params.top_p, params.top_k, params.min_p].append(index)
    return list(groups.values())


def _not_finite(log_prob: float) -> RolloutError:
    return RolloutError(
        "logits of the rollout model",
        expected="finite numbers",
        found=f"a token of log-prob {log_prob}",
        consequence="the requests of this batch fail",
        remedy="look at actor/grad_norm of the last step; in float16, try actor_rollout_ref.rollout.dtype=bfloat16",
    )
