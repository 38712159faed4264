"""Runs requests through the model: a batch that rows join and leave at each token, and one that stays as it began."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import DynamicCache
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria

from verl_ext_sharding.rollout.kv_cache import HEADROOM_TOKENS, SlotCache, bytes_per_token
from verl_ext_sharding.rollout.requests import SamplingParams
from verl_ext_sharding.rollout.sampling import choose_tokens
from verl_ext_sharding.rollout.stop_strings import StopStrings

COMPLETED = "completed"
ABORTED = "aborted"


@dataclass(kw_only=True, eq=False)
class Row:
    """One request and what it has generated so far.

    Args:
        request_id: Name of the request, for abort and for reports.
        prompt_ids: The prompt.
        params: How to sample.
        rng: The request's own random numbers: one for each sampled token.
        stop_strings: Texts that end it, or None.
        future: Where the finished row itself goes.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    rng: random.Random
    stop_strings: StopStrings | None = None
    future: Future[Row] = field(default_factory=Future)
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    stop_reason: str | None = None

    def history(self) -> Sequence[int]:
        """Prompt and response so far."""
        return (*self.prompt_ids, *self.token_ids)

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values a running batch holds: all but the newest."""
        return len(self.prompt_ids) + len(self.token_ids) - 1

    @property
    def longest(self) -> int:
        """Tokens of prompt and response, should the request use its whole budget."""
        return len(self.prompt_ids) + self.params.max_tokens

    def add(self, token: int, log_prob: float) -> bool:
        """Takes the next token; returns whether it was the last."""
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        if (
            token in self.params.stop_token_ids
            or len(self.token_ids) >= self.params.max_tokens
            or (self.stop_strings is not None and self.stop_strings.end(self.token_ids))
        ):
            self.stop_reason = COMPLETED
        return self.stop_reason is not None


@dataclass(kw_only=True, frozen=True)
class BatchLimits:
    """How much may run at once.

    Args:
        max_num_seqs: Most rows of a batch.
        max_prefill_tokens: Most tokens of one prefill, padding included; a longer prompt is prefilled alone.
        kv_cache_bytes: Bytes that keys and values may take, asked anew whenever a batch starts.
    """

    max_num_seqs: int
    max_prefill_tokens: int
    kv_cache_bytes: Callable[[], int]


@dataclass(kw_only=True, frozen=True)
class SamplingRules:
    """What holds for every row of a server.

    Args:
        raw_logprobs: Report log-probs of the model's own logits.
        banned: Ids never drawn, int64 on the model's device, or None.
    """

    raw_logprobs: bool = False
    banned: torch.Tensor | None = None


class MergingBatch:
    """Continuous batching: newcomers are prefilled on their own, then their rows join the running batch.

    Args:
        model: A causal language model whose cache is plain (`kv_cache.can_merge`).
        limits: How much may run at once.
        rules: Sampling rules of the server.
    """

    def __init__(self, model: torch.nn.Module, limits: BatchLimits, rules: SamplingRules) -> None:
        self.model = model
        self.rows: list[Row] = []
        self._limits = limits
        self._rules = rules
        self._cache: SlotCache | None = None
        self._budget_bytes = 0
        self._token_bytes = bytes_per_token(model.config, model.dtype)  # until a prefill shows what it is
        self._last_logits_only = _takes(model, "logits_to_keep")

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the key-value buffers now."""
        return self._cache.nbytes if self._cache is not None else 0

    def admit(self, waiting: Sequence[Row]) -> int:
        """How many of the waiting rows, from the front, the next prefill can take.

        Room is kept for the whole budget of every row, so a running row never has to be put back. A batch of nothing
        takes at least one.
        """
        if not self.rows:
            self._budget_bytes = self._limits.kv_cache_bytes()
        longest = max((row.longest for row in self.rows), default=0)
        widest, prompts = 0, set()
        for count, row in enumerate(waiting):
            longest = max(longest, row.longest)
            widest = max(widest, len(row.prompt_ids))
            prompts.add(row.prompt_ids)
            num_rows = len(self.rows) + count + 1
            kept_bytes = num_rows * (longest + HEADROOM_TOKENS[1]) * self._token_bytes
            full = num_rows > self._limits.max_num_seqs or kept_bytes > self._budget_bytes
            too_wide = len(prompts) * widest > self._limits.max_prefill_tokens
            if (full and num_rows > 1) or (too_wide and count > 0):
                return count
        return len(waiting)

    def prefill(self, rows: Sequence[Row]) -> list[Row]:
        """Computes the prompts of new rows and samples their first tokens; returns the rows that this ended.

        Rows with the same prompt (the repeats of one group) share its computation.
        """
        prompts = {prompt: index for index, prompt in enumerate(dict.fromkeys(row.prompt_ids for row in rows))}
        width = max(map(len, prompts))
        cache = DynamicCache()
        ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        logits = self._forward(ids, [len(prompt) for prompt in prompts], cache)
        source = [prompts[row.prompt_ids] for row in rows]
        running = [index for index, done in enumerate(self._sample(logits[source], rows)) if not done]
        if running:
            if self._cache is None:
                self._cache = SlotCache(len(cache.layers))
            self._cache.append(cache, [source[index] for index in running], width)
            self._token_bytes = self._cache.token_bytes
            self.rows.extend(rows[index] for index in running)
            self._tighten()
        return [row for row in rows if row.stop_reason is not None]

    def step(self) -> list[Row]:
        """Generates one token for each running row; returns the rows that it ended, which leave the batch."""
        assert self._cache is not None
        self._cache.reserve(len(self.rows), self._cache.width)
        lengths = [row.num_cached + 1 for row in self.rows]
        logits = self._forward([[row.token_ids[-1]] for row in self.rows], lengths, self._cache)
        self._sample(logits, self.rows)
        return self.remove([row for row in self.rows if row.stop_reason is not None])

    def remove(self, leaving: Sequence[Row]) -> list[Row]:
        """Takes rows out of the batch and gives their slots away; returns them."""
        if leaving and self._cache is not None:
            gone = set(map(id, leaving))
            order = self._cache.keep([index for index, row in enumerate(self.rows) if id(row) not in gone])
            self.rows = [self.rows[index] for index in order]
            self._tighten()
        return list(leaving)

    def clear(self) -> None:
        """Forgets every row and frees the key-value buffers."""
        self.rows, self._cache = [], None

    def _tighten(self) -> None:
        if not self.rows:
            self._cache = None
        elif self._cache is not None:
            self._cache.trim(max(row.num_cached for row in self.rows))

    def _sample(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[bool]:
        tokens, log_probs = choose_tokens(
            logits, rows, banned=self._rules.banned, raw_logprobs=self._rules.raw_logprobs
        )
        return [row.add(token, log_prob) for row, token, log_prob in zip(rows, tokens, log_probs, strict=True)]

    def _forward(self, ids: list[list[int]], lengths: list[int], cache: DynamicCache | SlotCache) -> torch.Tensor:
        """Logits (rows, vocab) of the last position.

        Args:
            ids: New ids of each row, padded on the left to one length.
            lengths: Real tokens of each row, these ids included.
            cache: Cache of the rows; its rows end at one column.
        """
        device = self.model.device
        input_ids = torch.tensor(ids, device=device)
        length = torch.tensor(lengths, device=device).unsqueeze(1)
        query = input_ids.shape[1]
        position_ids = (length - query + torch.arange(query, device=device)).clamp_(min=0)
        total = query + cache.get_seq_length()
        mask = None
        if min(lengths) < total:
            mask = (torch.arange(total, device=device) >= total - length).long()
        keep: dict[str, Any] = {"logits_to_keep": 1} if self._last_logits_only else {}
        output = self.model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            **keep,
        )
        return output.logits[:, -1]


class StaticBatch:
    """One batch of prompts of the same length, driven by transformers' `generate` from start to end.

    For models whose cache rows can't be merged, and for runs that must repeat bit for bit (one row each). Prompts of
    one length need no padding, so no architecture's state sees a padded token.

    Args:
        model: Any model with transformers' `generate`.
        rules: Sampling rules of the server.
    """

    def __init__(self, model: torch.nn.Module, rules: SamplingRules) -> None:
        self.model = model
        self._rules = rules

    def run(self, rows: Sequence[Row], *, aborted: Callable[[Row], bool], done: Callable[[Row], None]) -> None:
        """Generates until every row has ended.

        Args:
            rows: Rows whose prompts have one length.
            aborted: Asked after each token whether a row should end now.
            done: Called with each row as it ends.
        """
        device = self.model.device
        input_ids = torch.tensor([row.prompt_ids for row in rows], device=device)
        config = GenerationConfig(
            max_new_tokens=max(row.params.max_tokens for row in rows), do_sample=False, use_cache=True, pad_token_id=0
        )
        self.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=config,
            logits_processor=LogitsProcessorList([_ForcedChoice(rows, self._rules, done)]),
            stopping_criteria=StoppingCriteriaList([_AllEnded(rows, aborted, done)]),
        )


class _ForcedChoice(LogitsProcessor):
    """Samples each row as the merging batch does, and leaves `generate` that one token to take."""

    def __init__(self, rows: Sequence[Row], rules: SamplingRules, done: Callable[[Row], None]) -> None:
        self._rows, self._rules, self._done = rows, rules, done

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        live = [index for index, row in enumerate(self._rows) if row.stop_reason is None]
        forced = torch.full_like(scores, -torch.inf)
        forced[:, 0] = 0.0
        if not live:
            return forced
        rows = [self._rows[index] for index in live]
        tokens, log_probs = choose_tokens(
            scores[live], rows, banned=self._rules.banned, raw_logprobs=self._rules.raw_logprobs
        )
        for index, row, token, log_prob in zip(live, rows, tokens, log_probs, strict=True):
            forced[index, 0] = -torch.inf
            forced[index, token] = 0.0
            if row.add(token, log_prob):
                self._done(row)
        return forced


class _AllEnded(StoppingCriteria):
    """Ends `generate` once no row is left to generate for."""

    def __init__(self, rows: Sequence[Row], aborted: Callable[[Row], bool], done: Callable[[Row], None]) -> None:
        self._rows, self._aborted, self._done = rows, aborted, done

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        for row in self._rows:
            if row.stop_reason is None and self._aborted(row):
                row.stop_reason = ABORTED
                self._done(row)
        ended = all(row.stop_reason is not None for row in self._rows)
        return torch.full((input_ids.shape[0],), ended, dtype=torch.bool, device=input_ids.device)


def takes_positions(model: torch.nn.Module) -> bool:
    """Whether the model can be told where a left-padded row begins."""
    return _takes(model, "position_ids") and _takes(model, "attention_mask")


def _takes(model: torch.nn.Module, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters
