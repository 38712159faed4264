"""The rollout server: a Ray actor around the generation engine. Imports no verl, so that it starts fast."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.monitor import events
from verl_ext_sharding.rollout import memory
from verl_ext_sharding.rollout.batches import ABORTED, BatchLimits, Row, SamplingRules
from verl_ext_sharding.rollout.generation import GenerationEngine
from verl_ext_sharding.rollout.modeling import HostedModel, build, max_positions, placeholder_ids, vocab_size
from verl_ext_sharding.rollout.requests import (
    GenerationOutput,
    RolloutError,
    SamplingDefaults,
    SamplingParams,
    check_prompt,
    parse_sampling_params,
    prompt_digest,
    stable_seed,
)
from verl_ext_sharding.rollout.settings import ServerSettings
from verl_ext_sharding.rollout.stop_strings import StopStrings
from verl_ext_sharding.rollout.transport import WeightReceiver
from verl_ext_sharding.rollout.weights import Piece, WeightLoader
from verl_ext_sharding.training.guards import num_ids

logger = logging.getLogger(__name__)

_RESERVE = 0.9
"""Share of the memory budget that keys and values get; the rest is for activations and logits of one step."""

_DRAIN_POLL_S = 0.01


class HFServer:
    """Generates with transformers, for verl's rollout replicas. A plain class: `replica.py` makes the Ray actor.

    Args:
        settings: What to serve, and how.
        visible_devices: Value for the device variable of the platform, set before the device is first used.
        visible_devices_name: Name of that variable, or None on a platform without one.
    """

    def __init__(
        self, settings: ServerSettings, visible_devices: str | None = None, visible_devices_name: str | None = None
    ) -> None:
        if visible_devices_name is not None and visible_devices is not None:
            os.environ[visible_devices_name] = visible_devices
        self._settings = settings
        self._device = torch.device("cpu") if settings.device == "cpu" else torch.device(settings.device, 0)
        if settings.device == "cpu":
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // settings.servers_per_node))
        if settings.full_determinism:
            torch.use_deterministic_algorithms(True, warn_only=True)
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="hf-build")
        self._building = self._builder.submit(build, settings.model, self._device)
        self._hosted: HostedModel
        self._tokenizer: Any
        self._engine: GenerationEngine
        self._defaults: SamplingDefaults
        self._receiver: WeightReceiver | None = None
        self._loader: WeightLoader | None = None
        self._kv_awake = True
        self._global_steps = 0
        self._seen: Counter[str] = Counter()
        self._gate = asyncio.Event()
        self._gate.set()
        self._rejecting = False

    async def start(self) -> None:
        """Waits for the model, which has been building since the actor was made, and starts the engine.

        Raises:
            ConfigError: When `max_model_len` is beyond what the model was made for.
        """
        self._hosted, eos, self._tokenizer = await asyncio.wrap_future(self._building)
        self._builder.shutdown()
        self._defaults = self._sampling_defaults(eos)
        unknown = range(num_ids(self._tokenizer), self._defaults.vocab_size)
        banned = sorted({*placeholder_ids(self._hosted.model.config), *unknown})
        self._engine = GenerationEngine(
            self._hosted.model,
            limits=BatchLimits(
                max_num_seqs=self._settings.max_num_seqs,
                max_prefill_tokens=self._settings.max_num_batched_tokens,
                kv_cache_bytes=self._kv_cache_budget_bytes,
            ),
            rules=SamplingRules(
                raw_logprobs=self._settings.logprobs_mode == "raw_logprobs",
                banned=torch.tensor(banned, device=self._device) if banned else None,
            ),
            max_model_len=self._defaults.max_model_len,
            full_determinism=self._settings.full_determinism,
        )
        logger.info(
            "rollout server %d: %s on %s, %s batches, weights %s",
            self._settings.replica_rank,
            type(self._hosted.model).__name__,
            self._device,
            "merging" if self._engine.merges else "static",
            self._hosted.weights,
        )

    async def generate(
        self,
        prompt_ids: Any,
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> GenerationOutput:
        """Generates one response, token ids in and token ids out.

        Args:
            prompt_ids: Prompt token ids.
            sampling_params: See `requests.parse_sampling_params`; never changed.
            request_id: Names the request for `abort_request`.
            image_data: Refused unless None or empty, like the other media.
            video_data: As above.
            audio_data: As above.
            mm_processor_kwargs: As above.

        Raises:
            ConfigError: For parameters or a prompt that can't be served.
            RolloutError: When the server sleeps or its weights are incomplete.
        """
        _require_text_only(image_data, video_data, audio_data, mm_processor_kwargs)
        prompt = check_prompt(prompt_ids, self._defaults)
        params = parse_sampling_params(sampling_params, num_prompt_tokens=len(prompt), defaults=self._defaults)
        while not self._gate.is_set():
            if self._rejecting:
                return self._output(None)
            await self._gate.wait()
        self._require_awake()
        row = Row(
            request_id=request_id,
            prompt_ids=prompt,
            params=params,
            rng=random.Random(self._seed(params.seed, prompt)),
            stop_strings=self._stop_strings(params),
        )
        finished: Row = await asyncio.wrap_future(self._engine.submit(row))
        return self._output(finished)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Brings memory back: for "weights" room for an update (or their values from the host), and "kv_cache".

        Args:
            tags: Which of the two; None is both. A colocated server always wakes both, a standalone one never slept.
        """
        if self._settings.mode == "standalone":
            return
        if tags is None or "weights" in tags or self._settings.mode == "colocated":
            await self._call(self._hosted.allocate)
        if tags is None or "kv_cache" in tags or self._settings.mode == "colocated":
            self._kv_awake = True

    async def sleep(self) -> None:
        """Frees memory once no request runs: weights and KV of a hybrid server, KV of a colocated one, whose weights
        move to host memory. Nothing happens to a standalone server, or with `free_cache_engine=False`."""
        if not self._settings.free_cache_engine or self._settings.mode == "standalone":
            return
        await self.wait_for_requests_to_drain()
        events.emit("rollout", replica=self._settings.replica_rank, peak_running=self._engine.peak_running)
        self._kv_awake = False
        await self._call(self._free, True)

    async def wait_for_requests_to_drain(self) -> None:
        """Returns once no admitted request is left."""
        while self._engine.request_ids:
            await asyncio.sleep(_DRAIN_POLL_S)

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """Closes the gate and ends every request with what it has, "aborted"; `resume_generation` opens it again.

        Args:
            reset_prefix_cache: Accepted as in vLLM's server; there is no prefix cache to reset.
            reject_request: Answer requests that come while the gate is closed with "aborted" at once, instead of
                holding them until it opens: for a server that leaves rotation.

        Returns:
            `aborted_count` and `request_ids`.
        """
        self._gate.clear()
        self._rejecting = reject_request
        if reject_request:
            self._wake_parked()
        request_ids = await asyncio.wrap_future(self._engine.abort())
        return {"aborted_count": len(request_ids), "request_ids": request_ids}

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        """Ends one request with what it has.

        Returns:
            `aborted` and `request_id`, and `error` when this server does not have it.
        """
        if await asyncio.wrap_future(self._engine.abort([request_id])):
            return {"aborted": True, "request_id": request_id}
        return {"aborted": False, "request_id": request_id, "error": f"Request {request_id} not found"}

    async def resume_generation(self) -> None:
        """Opens the gate."""
        self._rejecting = False
        self._gate.set()

    async def clear_kv_cache(self) -> None:
        """Frees keys and values that no running request needs."""
        await self._call(self._engine.drop_cache)

    async def release_kv_cache(self) -> None:
        """Frees keys and values for the time of a weight update, weights stay. A colocated server has none to give."""
        if self._settings.free_cache_engine and self._settings.mode != "colocated":
            await self._call(self._free, False)

    async def resume_kv_cache(self) -> None:
        """The counterpart of `release_kv_cache`: the next batch allocates what it needs."""
        self._kv_awake = True

    async def begin_weights_update(self, handle: Any | None = None, proof: bytes = b"") -> bool:
        """Starts an update. Until it is complete the server refuses requests, and those that run are held.

        Args:
            handle: CUDA IPC handle of the trainer's bucket, or None.
            proof: What the bucket begins with.

        Returns:
            Whether the bucket is mapped here; if not, buckets come through host memory.
        """
        return await self._call(self._begin_update, handle, proof)

    async def load_weights_bucket(self, pieces: list[Piece], host_bucket: Any | None = None) -> None:
        """Loads one bucket: the given uint8 array, or the mapped one when it is None."""
        assert self._receiver is not None, "load_weights_bucket comes after begin_weights_update"
        await self._call(self._receiver.load, pieces, host_bucket)

    async def finish_weights_update(self, global_steps: int | None = None) -> None:
        """Checks that the update was complete, and takes requests again.

        Args:
            global_steps: Version of the weights, reported with each response; None keeps the last.

        Raises:
            WeightSyncError: When tensors are missing or unknown.
        """
        await self._call(self._finish_update)
        if global_steps is not None:
            await self.set_global_steps(global_steps)

    async def cancel_weights_update(self) -> None:
        """Ends an update that failed at the trainer, and the requests that it held. The weights stay unusable until a
        complete one."""
        await self._call(self._cancel_update)

    async def set_global_steps(self, global_steps: int) -> None:
        """Sets the version of the weights; the server's own request seeds start over from it."""
        self._global_steps = int(global_steps)
        self._seen.clear()

    async def start_profile(self, **kwargs: Any) -> None:
        """Logs that there is nothing to start: the trainer's profiler covers the worker, not this process."""
        logger.info("rollout.name=hf has no profiler of its own: ignoring start_profile(%s)", kwargs)

    async def stop_profile(self) -> None:
        """The counterpart of `start_profile`."""

    @property
    def engine(self) -> GenerationEngine:
        """The engine, under the name that verl's vLLM server has for it: `workers.prompt_failures` asks whether it lives."""
        return self._engine

    def get_rollout_config(self) -> ServerSettings:
        """The settings: `max_num_seqs`, `max_model_len` and so on, for routers."""
        return self._settings

    async def resident_bytes(self) -> dict[str, int]:
        """Memory of this process: resident set, weights on the device, keys and values, and the device allocator."""
        on_device = self._device.type != "cpu"
        allocated = torch.get_device_module(self._device).memory_reserved(self._device) if on_device else 0
        return {
            "resident_bytes": memory.resident_bytes(),
            "weight_bytes": self._hosted.weight_bytes,
            "kv_cache_bytes": self._engine.kv_cache_bytes,
            "device_reserved_bytes": int(allocated),
        }

    async def _call(self, function: Any, *args: Any) -> Any:
        return await asyncio.wrap_future(self._engine.call(function, *args))

    def _free(self, with_weights: bool) -> None:
        self._engine.drop_cache()
        if with_weights and self._settings.mode == "hybrid":
            self._hosted.discard()
        elif with_weights:
            self._hosted.to_host()
        memory.give_back(self._device)

    def _begin_update(self, handle: Any | None, proof: bytes) -> bool:
        self._close_receiver()
        self._engine.hold()
        self._hosted.allocate()
        self._hosted.weights = "incomplete"
        self._loader = WeightLoader(self._hosted.model)
        self._receiver = WeightReceiver(self._loader, self._device, handle, proof)
        return self._receiver.shares_memory

    def _finish_update(self) -> None:
        assert self._loader is not None, "finish_weights_update comes after begin_weights_update"
        loader = self._loader
        self._close_receiver()
        loader.finish()
        self._hosted.weights = "ready"
        self._engine.go_on()

    def _cancel_update(self) -> None:
        self._close_receiver()
        self._engine.fail(_update_failed())
        self._engine.go_on()

    def _close_receiver(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = self._loader = None

    def _wake_parked(self) -> None:
        """Lets requests that wait at the gate see that they are rejected."""
        self._gate.set()
        self._gate.clear()

    def _require_awake(self) -> None:
        self._hosted.require_weights()
        if not self._kv_awake:
            raise RolloutError(
                "rollout server",
                expected="a woken server",
                found="a sleeping one",
                consequence="the request fails",
                remedy="wake_up(['kv_cache']) before generate (verl's trainers do: is a request sent out of turn?)",
            )

    def _stop_strings(self, params: SamplingParams) -> StopStrings | None:
        if not params.stop:
            return None
        decode = functools.partial(
            self._tokenizer.decode,
            skip_special_tokens=params.skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return StopStrings(params.stop, decode)

    def _seed(self, seed: int | None, prompt: tuple[int, ...]) -> int:
        """The request's seed: from its own and the prompt, or, without one, from what this server has seen."""
        digest = prompt_digest(prompt)
        if seed is not None:
            return stable_seed(seed, digest)
        self._seen[digest] += 1
        rank = self._settings.replica_rank
        return stable_seed(self._settings.seed, self._global_steps, rank, digest, self._seen[digest])

    def _output(self, row: Row | None) -> GenerationOutput:
        """The answer; None stands for a request that was rejected at the gate."""
        fields = {"global_steps": self._global_steps, "num_cached_tokens": 0}
        if row is None:
            return GenerationOutput(token_ids=[], stop_reason=ABORTED, extra_fields=fields)
        log_probs = list(row.log_probs) if row.params.logprobs else None
        return GenerationOutput(
            token_ids=list(row.token_ids), log_probs=log_probs, stop_reason=row.stop_reason, extra_fields=fields
        )

    def _sampling_defaults(self, eos: frozenset[int]) -> SamplingDefaults:
        settings, model = self._settings, self._hosted.model
        longest = max_positions(model.config)
        limit = settings.max_model_len or longest or settings.prompt_length + settings.response_length
        if longest is not None and limit > longest:
            raise ConfigError(
                "actor_rollout_ref.rollout.max_model_len",
                expected=f"at most {longest}, the model's max_position_embeddings",
                found=str(limit),
                consequence="the rollout server does not start",
                remedy=f"actor_rollout_ref.rollout.max_model_len={longest}",
            )
        return SamplingDefaults(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            repetition_penalty=settings.repetition_penalty,
            ignore_eos=settings.ignore_eos,
            prompt_length=settings.prompt_length,
            response_length=settings.response_length,
            max_model_len=limit,
            vocab_size=vocab_size(model),
            eos_token_ids=eos,
        )

    def _kv_cache_budget_bytes(self) -> int:
        """What keys and values may take now: their share of the device, and no more than what is free."""
        share = self._settings.gpu_memory_utilization
        total, free = memory.total_bytes(self._device), memory.available_bytes(self._device)
        if self._device.type == "cpu":
            return int(_RESERVE * share * free / self._settings.servers_per_node)
        return int(_RESERVE * max(0, min(share * total - self._hosted.weight_bytes, free)))


def _require_text_only(*media: Any) -> None:
    if not any(media):
        return
    raise ConfigError(
        "rollout request with images, video or audio",
        expected="token ids alone: rollout.name=hf generates from text",
        found="multimodal data",
        consequence="this request is refused",
        remedy="actor_rollout_ref.rollout.name=vllm",
    )


def _update_failed() -> RolloutError:
    return RolloutError(
        "rollout request that ran as an update of the weights began",
        expected="a complete update, after which it goes on",
        found="an update that failed",
        consequence="the request fails",
        remedy="see the error of the weight update before this one",
    )
