"""Dynamic batching of reward scoring: what arrives while the model works goes into the next batches."""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from verl_ext_sharding.rollout.reward_requests import RewardRequestError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Score = Callable[[Sequence[Sequence[int]]], list[list[float]]]


@dataclass(kw_only=True, frozen=True)
class ScoringLimits:
    """How much one forward pass takes.

    Args:
        max_num_seqs: Most sequences, 1 or more.
        max_num_batched_tokens: Most tokens, padding included; a longer sequence is scored alone.
        equal_lengths: Only sequences of one length share a pass, for models whose score would change with padding.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    equal_lengths: bool = False


def plan_batches(lengths: Sequence[int], limits: ScoringLimits) -> list[list[int]]:
    """Groups sequences of like length, the longest first: a pass that is too large fails early, and memory is reused.

    Args:
        lengths: Tokens of each sequence.
        limits: How much one pass takes.

    Returns:
        Indices into `lengths`; each in one batch.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        batch = batches[-1] if batches else []
        width = lengths[batch[0]] if batch else 0
        fits = len(batch) < limits.max_num_seqs and (len(batch) + 1) * width <= limits.max_num_batched_tokens
        if batch and fits and (lengths[index] == width or not limits.equal_lengths):
            batch.append(index)
        else:
            batches.append([index])
    return batches


@dataclass(kw_only=True, eq=False)
class _Item:
    """One sequence that waits for its score."""

    ids: Sequence[int]
    future: Future[list[float]] = field(default_factory=Future)


class ScoringEngine:
    """Scores sequences in a thread of its own, which alone touches the model; its callers' loops stay free.

    All that waits is taken at once, sorted into batches, and scored before later arrivals are looked at, so that no
    sequence is overtaken for ever. A batch that fails is scored again one by one: an input that the model can't digest
    fails alone, and what was too much at once may pass.

    Args:
        score: Logits of each of some sequences, by one forward pass.
        limits: How much one pass takes.
        recover: Called after a failed pass, to give memory back.
        initializer: Called in the thread before anything else.
    """

    def __init__(
        self,
        score: Score,
        limits: ScoringLimits,
        *,
        recover: Callable[[], None] = lambda: None,
        initializer: Callable[[], None] | None = None,
    ) -> None:
        self._score = score
        self._limits = limits
        self._recover = recover
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="hf-reward", initializer=initializer)
        self._lock = threading.Lock()
        self._waiting: list[_Item] = []
        self._planned: deque[list[_Item]] = deque()
        self._scheduled = False

    def submit(self, rows: Sequence[Sequence[int]]) -> list[Future[list[float]]]:
        """Queues the sequences of one request, so that they share passes however fast the thread takes them.

        Args:
            rows: Token ids of each, checked.

        Returns:
            A future for each: it gives the logits, or a `RewardRequestError` with the cause.
        """
        items = [_Item(ids=ids) for ids in rows]
        with self._lock:
            self._waiting += items
            if items and not self._scheduled:
                self._scheduled = True
                self._executor.submit(self._advance)
        return [item.future for item in items]

    def call(self, function: Callable[..., Result], *args: Any) -> Future[Result]:
        """Runs a function in the engine's thread, between two passes."""
        return self._executor.submit(function, *args)

    def abort(self) -> int:
        """Fails all that waits, the pass that runs aside; returns how many that were."""
        with self._lock:
            dropped = [*(item for batch in self._planned for item in batch), *self._waiting]
            self._planned.clear()
            self._waiting.clear()
        for item in dropped:
            if item.future.set_running_or_notify_cancel():
                item.future.set_exception(RewardRequestError("the request was aborted", status=503))
        return len(dropped)

    def close(self) -> None:
        """Ends the thread; what waits fails."""
        self.abort()
        self._executor.shutdown(wait=True)

    def _advance(self) -> None:
        """Scores one batch, then queues itself behind the calls that have come meanwhile."""
        with self._lock:
            if not self._planned:
                items, self._waiting = self._waiting, []
                plan = plan_batches([len(item.ids) for item in items], self._limits)
                self._planned.extend([items[index] for index in batch] for batch in plan)
            batch = self._planned.popleft() if self._planned else []
        self._run([item for item in batch if item.future.set_running_or_notify_cancel()])
        with self._lock:
            self._scheduled = bool(self._planned or self._waiting)
            if self._scheduled:
                self._executor.submit(self._advance)

    def _run(self, batch: list[_Item]) -> None:
        if not batch:
            return
        try:
            scores = self._score([item.ids for item in batch])
        except Exception as error:
            self._fail(batch, error)
            return
        for item, logits in zip(batch, scores, strict=True):
            item.future.set_result(logits)

    def _fail(self, batch: list[_Item], error: Exception) -> None:
        longest = max(len(item.ids) for item in batch)
        logger.error("scoring %d sequences of up to %d tokens failed", len(batch), longest, exc_info=error)
        cause = f"{type(error).__name__}: {error}"
        traceback.clear_frames(error.__traceback__)  # their locals hold the tensors of the failed pass
        try:
            self._recover()
        except Exception:  # after a device-side assert every later call to the device fails; callers must still hear
            logger.exception("giving memory back failed")
        if len(batch) > 1:
            for item in batch:
                self._run([item])
            return
        message = f"the reward model failed on a sequence of {longest} tokens: {cause}"
        batch[0].future.set_exception(RewardRequestError(message, status=500))
