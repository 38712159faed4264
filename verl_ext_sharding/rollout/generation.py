"""The generation engine: one model, one thread, a queue in front of it."""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

import torch

from verl_ext_sharding.rollout.batches import (
    ABORTED,
    BatchLimits,
    MergingBatch,
    Row,
    SamplingRules,
    StaticBatch,
    takes_positions,
)
from verl_ext_sharding.rollout.kv_cache import bytes_per_token, can_merge
from verl_ext_sharding.rollout.requests import RolloutError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class GenerationEngine:
    """Serves requests from a thread of its own, which alone touches the model while it runs.

    Everything else that needs the model still (weights, sleep, wake) goes through `call`, so that it happens between
    two tokens and needs no lock. An error ends every request that is there at that moment, with that error; the engine
    goes on with later ones, which fail too where the device was lost: see `dead_error`.

    Args:
        model: A causal language model in eval mode.
        limits: How much may run at once.
        rules: Sampling rules.
        max_model_len: The longest sequence, in tokens.
        full_determinism: Compute each request alone, so that its log-probs repeat bit for bit.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        limits: BatchLimits,
        rules: SamplingRules,
        max_model_len: int,
        full_determinism: bool = False,
    ) -> None:
        self._limits = limits
        if full_determinism:
            self._limits = BatchLimits(
                max_num_seqs=1, max_prefill_tokens=limits.max_prefill_tokens, kv_cache_bytes=limits.kv_cache_bytes
            )
        self.merges = takes_positions(model) and can_merge(model.config, max_model_len)
        self._merging = MergingBatch(model, self._limits, rules)
        self._static = StaticBatch(model, rules)
        self._condition = threading.Condition()
        self._waiting: deque[Row] = deque()
        self._taken: list[Row] = []  # out of the queue, and not (yet) in a running batch
        self._calls: deque[_Call] = deque()
        self._abort_ids: set[str] = set()
        self._abort_all = False
        self._aborted_ids: list[str] = []
        self._closed = False
        self._held = False
        self.dead_error: BaseException | None = None
        """What failed when the device stopped answering, as it does for good after a device-side assert; named as vLLM's."""
        self.peak_running = 0
        """Most requests that ran at once, waiting ones aside, since the engine started."""
        self._thread = threading.Thread(target=self._run, name="hf-generation", daemon=True)
        self._thread.start()

    @property
    def errored(self) -> bool:
        """Whether no later request can succeed; named as vLLM's."""
        return self.dead_error is not None

    @property
    def request_ids(self) -> list[str]:
        """Requests that have not ended, running ones first."""
        with self._condition:
            return [row.request_id for row in self._unfinished()]

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the key-value buffers of the running batch."""
        return self._merging.kv_cache_bytes

    def submit(self, row: Row) -> Future[Row]:
        """Queues a request; its future gives the row back once it has ended, or the error that ended it.

        Raises:
            RolloutError: The engine is closed.
        """
        with self._condition:
            if self._closed:
                raise _closed()
            self._waiting.append(row)
            self._condition.notify()
        return row.future

    def call(self, function: Callable[..., Result], *args: Any) -> Future[Result]:
        """Runs a function in the engine's thread between two tokens (of a static batch: after it).

        Raises:
            RolloutError: The engine is closed.
        """
        call = _Call(function, args)
        with self._condition:
            if self._closed:
                raise _closed()
            self._calls.append(call)
            self._condition.notify()
        return call.future

    def abort(self, request_ids: Collection[str] | None = None) -> Future[list[str]]:
        """Ends requests with what they have so far.

        Args:
            request_ids: Which; None is all that are there now.

        Returns:
            A future of the ids that were ended, ready once they are.
        """
        with self._condition:
            if request_ids is None:
                self._abort_all = True
            else:
                self._abort_ids.update(request_ids)
            return self.call(self._abort_now, request_ids)

    def hold(self) -> None:
        """Generates nothing until `go_on`: the weights are changing. To be used through `call`."""
        self._held = True

    def go_on(self) -> None:
        """The counterpart of `hold`. To be used through `call`."""
        self._held = False

    def drop_cache(self) -> None:
        """Frees the key-value buffers unless rows are running. To be used through `call`."""
        if not self._merging.rows:
            self._merging.clear()

    def close(self) -> None:
        """Ends the thread; requests that are left fail."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    @torch.no_grad()
    def _run(self) -> None:
        while True:
            with self._condition:
                while not (self._closed or self._calls or (self._has_rows() and not self._held)):
                    self._condition.wait()
                if self._closed:
                    break
                calls = list(self._calls)
                self._calls.clear()
            for call in calls:
                call.run()
            try:
                if not self._held:
                    self._advance()
            except BaseException as error:
                logger.exception("generation failed; the requests that it held get the error")
                traceback.clear_frames(error.__traceback__)  # their locals hold the tensors of the failed step
                if not _answers(self._static.model.device):
                    self.dead_error = error
                self.fail(error)
        self.fail(_closed())
        for call in self._calls:
            call.future.set_exception(_closed())

    def _advance(self) -> None:
        """One token for what runs, after taking in what waits."""
        self._forget_cancelled()
        if self.merges:
            self._advance_merging()
        elif self._waiting:
            self._run_static()

    def _advance_merging(self) -> None:
        with self._condition:
            count = self._merging.admit(tuple(self._waiting)) if self._waiting else 0
            entering = [self._waiting.popleft() for _ in range(count)]
            self._taken = entering
        if entering:
            self._resolve(self._merging.prefill(entering))
            self._taken = []
        if self._merging.rows:
            self.peak_running = max(self.peak_running, len(self._merging.rows))
            self._resolve(self._merging.step())

    def _run_static(self) -> None:
        """Takes the oldest request and the others of its prompt length, and runs them to their end."""
        with self._condition:
            rows = self._same_length()
            for row in rows:
                self._waiting.remove(row)
            self._taken = rows
            self._aborted_ids = []
        self.peak_running = max(self.peak_running, len(rows))
        self._static.run(rows, aborted=self._is_aborted, done=self._static_done)
        self._taken = []

    def _static_done(self, row: Row) -> None:
        if row.stop_reason == ABORTED:
            self._aborted_ids.append(row.request_id)
        self._resolve([row])

    def _same_length(self) -> list[Row]:
        length = len(self._waiting[0].prompt_ids)
        config, dtype = self._static.model.config, self._static.model.dtype
        budget = self._limits.kv_cache_bytes()
        rows: list[Row] = []
        longest = 0
        for row in self._waiting:
            if len(row.prompt_ids) != length:
                continue
            longest = max(longest, row.longest)
            num_rows = len(rows) + 1
            too_many = num_rows > self._limits.max_num_seqs or num_rows * length > self._limits.max_prefill_tokens
            if rows and (too_many or num_rows * longest * bytes_per_token(config, dtype) > budget):
                break
            rows.append(row)
        return rows

    def _is_aborted(self, row: Row) -> bool:
        return self._abort_all or row.request_id in self._abort_ids or row.future.cancelled()

    def _abort_now(self, request_ids: Collection[str] | None) -> list[str]:
        """Ends what one `abort` named, and returns it. A static batch has ended its own rows by the time that this runs."""

        def named(request_id: str) -> bool:
            return request_ids is None or request_id in request_ids

        with self._condition:
            waiting = [row for row in self._waiting if named(row.request_id)]
            for row in waiting:
                self._waiting.remove(row)
            running = self._merging.remove([row for row in self._merging.rows if named(row.request_id)])
            self._abort_all = self._abort_all and request_ids is not None
            self._abort_ids.difference_update(self._abort_ids if request_ids is None else request_ids)
            ended = [request_id for request_id in self._aborted_ids if named(request_id)]
            self._aborted_ids = [request_id for request_id in self._aborted_ids if not named(request_id)]
        for row in (*running, *waiting):
            row.stop_reason = ABORTED
        self._resolve((*running, *waiting))
        return [*ended, *(row.request_id for row in (*running, *waiting))]

    def _forget_cancelled(self) -> None:
        """Drops rows whose caller has gone."""
        with self._condition:
            self._waiting = deque(row for row in self._waiting if not row.future.cancelled())
            self._merging.remove([row for row in self._merging.rows if row.future.cancelled()])

    def _has_rows(self) -> bool:
        return bool(self._waiting or self._merging.rows)

    def _unfinished(self) -> list[Row]:
        rows = (*self._merging.rows, *self._taken, *self._waiting)
        return [row for row in rows if row.stop_reason is None]

    def _resolve(self, rows: Sequence[Row]) -> None:
        for row in rows:
            _settle(row.future, row.future.set_result, row)

    def fail(self, error: BaseException) -> None:
        """Gives an error to every request, running or waiting, and empties the batch. To be used through `call`."""
        with self._condition:
            rows = (*self._merging.rows, *self._taken, *self._waiting)
            self._waiting.clear()
            self._taken = []
            self._merging.clear()
        for row in rows:
            _settle(row.future, row.future.set_exception, error)


class _Call:
    """A function to run in the engine's thread, and the future of its result."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.future: Future[Any] = Future()
        self._function, self._args = function, args

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._function(*self._args))
        except BaseException as error:
            self.future.set_exception(error)


def _answers(device: torch.device) -> bool:
    """Whether a device still computes."""
    if device.type in ("cpu", "meta"):
        return True
    try:
        torch.get_device_module(device).synchronize(device)
    except Exception:  # each accelerator has errors of its own
        return False
    return True


def _settle(future: Future[Row], settle: Callable[[Any], None], value: Any) -> None:
    """Sets a future's result or error; a caller who has cancelled meanwhile gets nothing."""
    try:
        if not future.done():
            settle(value)
    except InvalidStateError:
        logger.debug("the caller of a request left before its answer")


def _closed() -> RolloutError:
    return RolloutError(
        "rollout server",
        expected="a running generation engine",
        found="an engine that was closed",
        consequence="the request fails",
        remedy="see the server's log for why it was closed",
    )
