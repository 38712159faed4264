"""verl's reward loop worker with inputs that the reward model can take, and with errors that say what is wrong.

verl's own sends prompt and response whatever their length, knows only vLLM and SGLang, repeats a failed request 16 times
(about six minutes until a dead server is an error), returns no `reward_extra_info` although the agent loop reads it, and
passes a score of NaN on to the trainer. A user's own reward function is left as it is.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from typing import Any

import aiohttp
from transformers import AutoConfig
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.utils.fs import copy_to_local

from verl_ext_sharding import rollout
from verl_ext_sharding.config.reward_limits import MODEL_PATH, embedding_rows, reward_limit
from verl_ext_sharding.config.translate import request_of
from verl_ext_sharding.errors import (
    ConfigError,
    RewardInputError,
    RewardServerError,
    ShardingError,
    first_error_of,
)
from verl_ext_sharding.rollout.reward_inputs import RewardInput, RewardTemplate, check_vocabulary

logger = logging.getLogger(__name__)

TRUNCATED = "reward_input_truncated"
"""1 for a sample that was cut, else 0; verl's validation averages it for each data source."""

NUM_TOKENS = "reward_input_tokens"
"""Length of a sample's input as it was sent, in the reward model's tokens."""

RETRY_DELAYS_S = (1.0, 2.0, 4.0)
"""Pauses before a failed request is repeated. verl's router has tried each server three times by then."""

CONNECT_TIMEOUT_S = 10.0
REPLY_TIMEOUT_S = 1800.0
"""For one reply: thousands of samples may wait for one server."""

_ENDPOINTS = {"vllm": "classify", rollout.NAME: "classify", "sglang": "v1/embeddings"}
"""Path of each server that scores a text."""


class ShardingRewardLoopWorker(RewardLoopWorker):
    """Scores samples with a discriminative reward model. Constructed by verl, as its base class is."""

    template: RewardTemplate | None = None
    """Set where verl itself asks a reward model: not for a rule, nor for a user's own function."""

    first_error: ShardingError | None = None
    """The first sample's that could not be scored, for `workers.prompt_failures`: verl logs it and goes on."""

    def _init_reward_fn(self) -> None:
        # Named, not `super()`: Ray copies inherited methods onto the class that it pickles.
        RewardLoopWorker._init_reward_fn(self)
        reward = self.config.reward
        if reward.reward_model.enable and reward.custom_reward_function.path is None:
            self.template = self._reward_template()

    def _reward_template(self) -> RewardTemplate:
        request, reward_model = request_of(self.config), self.config.reward.reward_model
        local_path = copy_to_local(reward_model.model_path)
        hf_config = AutoConfig.from_pretrained(local_path, trust_remote_code=True).to_dict()
        tokenizer = self.reward_model_tokenizer
        model = self.config.actor_rollout_ref.model
        rows = embedding_rows(hf_config)
        check_vocabulary(
            self.input_tokenizer,
            tokenizer,
            rows=rows,
            model=reward_model.model_path,
            policy_model=model.get("tokenizer_path") or model.path,
        )
        limit = reward_limit(
            hf_config,
            engine=reward_model.rollout.name,
            max_model_len=reward_model.rollout.get("max_model_len"),
            tokenizer_max_length=getattr(tokenizer, "model_max_length", None),
            max_input_tokens=request.roles.reward.max_input_tokens,
        )
        policy = request.guards.reward_length
        logger.info("reward inputs: at most %s tokens (%s), %s", limit.tokens, limit.source, policy)
        return RewardTemplate(tokenizer=tokenizer, limit=limit, policy=policy, rows=rows)

    async def compute_score(self, data: Any) -> dict[str, Any]:
        """As verl's; remembers the first error, also one that is not ours where a reward model is asked."""
        try:
            return await RewardLoopWorker.compute_score(self, data)
        except ShardingError as error:
            self.first_error = self.first_error or error
            raise
        except Exception as error:
            if self.template is not None:
                self.first_error = self.first_error or _not_scored(self.config, error)
            raise

    async def _preprocess_reward_inputs(self, data: Any) -> str:
        return self._prepare(data).text

    def _prepare(self, data: Any) -> RewardInput:
        """The input of the one sample in `data`, a `DataProto`.

        Raises:
            RewardInputError: It is too long and may not be cut.
        """
        assert len(data) == 1, "one sample at a time"
        assert self.template is not None, "no reward model is asked in this run"
        item = data[0]
        responses = item.batch["responses"]
        num_tokens = item.non_tensor_batch.get("response_len")
        if num_tokens is None:
            num_tokens = item.batch["attention_mask"][-responses.shape[-1] :].sum()
        response = self.input_tokenizer.decode(responses[: int(num_tokens)])
        if self.input_tokenizer.eos_token:
            response = response.replace(self.input_tokenizer.eos_token, "")
        return self.template.prepare(list(item.non_tensor_batch["raw_prompt"]), response)

    async def compute_score_disrm(self, data: Any) -> dict[str, Any]:
        """One sample's score.

        Returns:
            `reward_score`, and `reward_extra_info` with `TRUNCATED` and `NUM_TOKENS`.

        Raises:
            RewardInputError: The sample is too long and may not be cut.
            RewardServerError: The server doesn't answer, or answers with no finite score.
        """
        engine = self.config.reward.reward_model.rollout.name
        if engine not in _ENDPOINTS:
            raise ConfigError(
                "reward.reward_model.rollout.name",
                expected=f"one of {', '.join(_ENDPOINTS)}, which score a text",
                found=str(engine),
                consequence="the run stops",
                remedy=f"reward.reward_model.rollout.name={rollout.NAME}",
            )
        prepared = self._prepare(data)
        payload = {"model": self.config.reward.reward_model.model_path, "input": prepared.text}
        if engine != "sglang":
            payload["use_activation"] = False
        output = await self._post_request(payload, _ENDPOINTS[engine])
        score = self._read_score(output, "embedding" if engine == "sglang" else "probs", data[0], prepared)
        logger.debug("scored %s", json.dumps({"text": prepared.text, "score": score}))
        return {
            "reward_score": score,
            "reward_extra_info": {TRUNCATED: int(prepared.truncated), NUM_TOKENS: prepared.num_tokens},
        }

    async def _post_request(
        self, payload: dict[str, Any], endpoint: str, max_retries: int = 1 + len(RETRY_DELAYS_S)
    ) -> Any:
        """Posts to the router, a few times if it doesn't answer or answers with an error of the server's (5xx).

        Raises:
            RewardServerError: No answer.
        """
        url = f"http://{self.reward_router_address}/{endpoint}"
        timeout = aiohttp.ClientTimeout(total=REPLY_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        last: Exception | None = None
        for attempt in range(max_retries):
            if attempt:
                await asyncio.sleep(RETRY_DELAYS_S[min(attempt, len(RETRY_DELAYS_S)) - 1])
            try:
                async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url, json=payload) as reply:
                    if reply.status >= 400:
                        text = (await reply.text())[:500]
                        raise _StatusError(reply.status, text)
                    return await reply.json(content_type=None)
            except _StatusError as error:
                last = error
                if error.status < 500:
                    break
            except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
                last = error
            logger.warning("%s, attempt %d of %d: %r", url, attempt + 1, max_retries, last)
        raise self._no_answer(url, last, attempt + 1) from last

    def _no_answer(self, url: str, last: Exception | None, attempts: int) -> RewardServerError:
        reward_model = self.config.reward.reward_model
        return RewardServerError(
            f"server of the reward model {reward_model.model_path}",
            expected=f"a score from {url}",
            found=f"{last!r} after {attempts} {'attempt' if attempts == 1 else 'attempts'}",
            consequence="the run stops, since it has no rewards",
            remedy=f"{first_error_of(f'{reward_model.rollout.name} reward server')}; out of memory: a smaller "
            "reward.reward_model.rollout.gpu_memory_utilization, or sharding.roles.reward.devices on devices of its own",
        )

    def _read_score(self, output: Any, field: str, item: Any, prepared: RewardInput) -> float:
        """The score in a server's answer: the last value, as verl reads it."""
        model = self.config.reward.reward_model.model_path
        try:
            score = float(output["data"][-1][field][-1])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RewardServerError(
                f"answer of the reward model {model}",
                expected=f'{{"data": [{{"{field}": [score]}}]}}',
                found=str(output)[:300],
                consequence="the run stops, since a sample has no score",
                remedy=f"check that {MODEL_PATH} is a model with a classification head",
            ) from error
        if math.isfinite(score):
            return score
        raise RewardServerError(
            f"score of the reward model {model}",
            expected="a finite number",
            found=f"{score} for {_sample(item)}, {prepared.num_tokens} tokens, which ends in {prepared.text[-80:]!r}",
            consequence="the run stops, since such a reward would spoil the advantages of its whole batch",
            remedy="reward.reward_model.rollout.dtype=bfloat16 or float32 (float16 overflows), or check the model's weights",
        )


class _StatusError(Exception):
    """An HTTP status that is an error, with what the server said."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status = status

    def __repr__(self) -> str:
        return f"HTTP {self.args[0]}: {self.args[1]}"


def _not_scored(config: Any, error: Exception) -> RewardInputError:
    return RewardInputError(
        f"a sample for the reward model {config.reward.reward_model.model_path}",
        expected="a score",
        found=f"{type(error).__name__}: {error}",
        consequence="the run stops, since a sample has no score",
        remedy=first_error_of("reward loop worker"),
    )


def _sample(item: Any) -> str:
    """A sample by the names that its batch has for it."""
    names = [f"{key} {item.non_tensor_batch[key]}" for key in ("uid", "index") if key in item.non_tensor_batch]
    return f"sample {', '.join(names)}" if names else "a sample"
