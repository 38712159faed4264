"""The reward server: a Ray actor that answers `/classify` over HTTP.

Imports neither verl nor, until it starts, torch: an actor that only holds a further device of a server stays small.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from verl_ext_sharding.rollout.reward_engine import ScoringEngine, ScoringLimits
from verl_ext_sharding.rollout.reward_http import RewardHTTP
from verl_ext_sharding.rollout.reward_requests import (
    ClassifyRequest,
    RewardRequestError,
    check_ids,
    parse_request,
    response,
)
from verl_ext_sharding.rollout.reward_settings import RewardServing

if TYPE_CHECKING:
    from verl_ext_sharding.rollout.reward_model import RewardModel

logger = logging.getLogger(__name__)

_POLL_S = 0.01

_ASLEEP = (
    "the reward server sleeps: its weights are off the device, which the other roles use now; verl wakes it before "
    "scoring (is a request sent out of turn?). A server that must always answer needs "
    "reward.reward_model.enable_resource_pool=True or reward.reward_model.rollout.free_cache_engine=False"
)
_PAUSED = "the reward server takes no requests between abort_all_requests and resume_generation"


class HFRewardServer:
    """Serves a sequence-classification model, for verl's reward loop. A plain class: `reward_replica.py` makes the actor.

    Args:
        serving: What to serve, and how.
    """

    def __init__(self, serving: RewardServing) -> None:
        self._serving = serving
        self._model: RewardModel
        self._engine: ScoringEngine
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="hf-tokenize")
        self._lock = threading.Lock()  # HTTP and the actor's methods run in threads of their own
        self._in_flight = 0
        self._asleep = False
        self._paused = False
        self.http = RewardHTTP(self)

    async def start(self, visible_devices: str | None = None, visible_devices_name: str | None = None) -> str:
        """Loads the model and starts the HTTP server.

        Args:
            visible_devices: Value for the device variable of the platform, set before the device is first used.
            visible_devices_name: Name of that variable, or None on a platform without one.

        Returns:
            "host:port", with brackets around an IPv6 host.

        Raises:
            ConfigError: The model can't be served as asked.
        """
        import ray

        if visible_devices_name is not None and visible_devices is not None:
            os.environ[visible_devices_name] = visible_devices
        await self.load()
        return await self.http.listen(ray.util.get_node_ip_address().strip("[]"))

    async def load(self) -> None:
        """Loads the model; after that `http` answers.

        Raises:
            ConfigError: The model can't be served as asked.
        """
        loader = ThreadPoolExecutor(1, thread_name_prefix="hf-load")
        self._model = await asyncio.wrap_future(loader.submit(_load, self._serving))
        loader.shutdown()
        serving = self._serving
        limits = ScoringLimits(
            max_num_seqs=1 if serving.full_determinism else min(serving.max_num_seqs, self._model.most_rows),
            max_num_batched_tokens=serving.max_num_batched_tokens,
            equal_lengths=not self._model.pads,
        )
        self._engine = ScoringEngine(
            self._model.score, limits, recover=self._model.give_back, initializer=self._limit_threads
        )
        logger.info("reward server %d: %s", serving.replica_rank, self._model.described)
        names = self._model.labels.names
        if len(names) > 1:
            logger.warning(
                "%s has %d outputs (%s); verl takes the last one, %s, as the score",
                serving.path,
                len(names),
                ", ".join(names[:5]),
                names[-1],
            )

    async def close(self) -> None:
        """Ends the HTTP server and the engine."""
        self.http.close()
        self._engine.close()
        self._tokenizing.shutdown()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Brings the weights back to their devices.

        Args:
            tags: Accepted as in verl's other servers; weights are all that there is.

        Raises:
            RolloutError: The devices have no room for them.
        """
        await asyncio.wrap_future(self._engine.call(self._model.wake_up))
        self._asleep = False

    async def sleep(self) -> None:
        """Frees the devices once no request is left. Nothing happens with `free_cache_engine=False`, nor to a server
        with devices of its own."""
        if not self._serving.sleeps:
            return
        with self._lock:
            self._asleep = True
        await self.wait_for_requests_to_drain()
        await asyncio.wrap_future(self._engine.call(self._model.sleep))

    async def wait_for_requests_to_drain(self) -> None:
        """Returns once no admitted request is left."""
        while self._in_flight:
            await asyncio.sleep(_POLL_S)

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Fails what waits, and refuses requests until `resume_generation`.

        Args:
            reject_request: Accepted as in verl's other servers; requests are refused either way.

        Returns:
            `aborted_count`, and no `request_ids`: verl names no reward request.
        """
        with self._lock:
            self._paused = True
        return {"aborted_count": self._engine.abort(), "request_ids": []}

    async def resume_generation(self) -> None:
        """Takes requests again."""
        self._paused = False

    async def clear_kv_cache(self) -> None:
        """Nothing to clear: scoring keeps no keys and values."""

    async def release_kv_cache(self) -> None:
        """Nothing to release, as above."""

    async def resume_kv_cache(self) -> None:
        """Nothing to restore, as above."""

    async def start_profile(self, **kwargs: Any) -> None:
        """Logs that there is nothing to start: verl's profiler covers its workers, not this process."""
        logger.info(
            "a reward model with rollout.name=hf has no profiler of its own: ignoring start_profile(%s)", kwargs
        )

    async def stop_profile(self) -> None:
        """The counterpart of `start_profile`."""

    async def weight_bytes(self) -> int:
        """Bytes of the weights on the devices that compute; 0 while they are in host memory."""
        return self._model.weight_bytes

    def state(self) -> dict[str, Any]:
        """See `reward_http.Answers`."""
        return {"status": "ok", "sleeping": self._asleep}

    def models(self) -> list[dict[str, Any]]:
        """See `reward_http.Answers`."""
        return [{"id": self._serving.path, "object": "model", "max_model_len": self._model.max_model_len}]

    async def answer(self, body: Any) -> dict[str, Any]:
        """See `reward_http.Answers`."""
        request = parse_request(body, self._serving.path)
        self._enter()
        try:
            ids = await asyncio.get_running_loop().run_in_executor(self._tokenizing, self._tokenized, request)
            futures = [asyncio.wrap_future(future) for future in self._engine.submit(ids)]
            await asyncio.wait(futures)  # all of them, whatever fails: sleep waits for this request
        finally:
            self._leave()
        failed = [error for future in futures if (error := future.exception()) is not None]
        if failed:
            raise failed[0]
        scores = [future.result() for future in futures]
        num_tokens = sum(map(len, ids))
        return response(request, scores, num_tokens=num_tokens, model=self._serving.path, labels=self._model.labels)

    def _tokenized(self, request: ClassifyRequest) -> list[Sequence[int]]:
        rows: list[Sequence[int]] = [
            self._model.tokenized(item, request.add_special_tokens) if isinstance(item, str) else item
            for item in request.inputs
        ]
        for row in rows:
            check_ids(row, max_model_len=self._model.max_model_len, embedding_rows=self._model.embedding_rows)
        return rows

    def _enter(self) -> None:
        """Admits a request, which `sleep` then waits for."""
        with self._lock:
            if self._asleep or self._paused:
                raise RewardRequestError(_ASLEEP if self._asleep else _PAUSED, status=503)
            self._in_flight += 1

    def _leave(self) -> None:
        with self._lock:
            self._in_flight -= 1

    def _limit_threads(self) -> None:
        if self._serving.device == "cpu":
            import torch

            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self._serving.servers_per_node))


def _load(serving: RewardServing) -> RewardModel:
    if serving.full_determinism:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    from verl_ext_sharding.rollout.reward_model import load

    if serving.full_determinism:
        torch.use_deterministic_algorithms(True, warn_only=True)
    return load(serving)
