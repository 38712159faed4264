"""What goes into and comes out of one generation request. Standard library only."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_ext_sharding.errors import ConfigError, ShardingError, did_you_mean

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM (`_SAMPLING_EPS`)."""

_KNOWN = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "stop",
        "stop_token_ids",
        "skip_special_tokens",
        "ignore_eos",
        "max_tokens",
        "max_new_tokens",
        "logprobs",
        "seed",
        "n",
    }
)
_TEXT_ONLY = frozenset({"detokenize", "spaces_between_special_tokens", "include_stop_str_in_output"})
"""Accepted and unused: they shape text, and this server returns token ids."""

_LACKING: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "best_of": (1,),
    "bad_words": ([],),
    "logit_bias": ({},),
    "allowed_token_ids": ([],),
    "prompt_logprobs": (),
    "structured_outputs": (),
}
"""Parameters of vLLM that this server has not, and their values that ask for nothing."""

_ROLE = "actor_rollout_ref.rollout"


class RolloutError(ShardingError, RuntimeError):
    """The rollout server can't serve a request in the state that it is in."""


@dataclass(kw_only=True, frozen=True)
class SamplingDefaults:
    """What a request falls back to where its sampling parameters say nothing.

    Args:
        temperature: `rollout.temperature`.
        top_p: `rollout.top_p`.
        top_k: `rollout.top_k`; -1 and 0 are off.
        repetition_penalty: `rollout.repetition_penalty`.
        ignore_eos: `rollout.ignore_eos`.
        prompt_length: `rollout.prompt_length`, in tokens.
        response_length: `rollout.response_length`, in tokens.
        max_model_len: Most tokens of prompt and response together.
        vocab_size: Rows of the embedding; prompt ids lie in [0, vocab_size).
        eos_token_ids: Ids that end a response unless `ignore_eos`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    prompt_length: int
    response_length: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(kw_only=True, frozen=True)
class SamplingParams:
    """How one request is sampled, checked and complete.

    Args:
        max_tokens: Most tokens to generate, at least 1.
        temperature: Divides the logits; 0 is greedy.
        top_p: Nucleus size in (0, 1]; 1 is off.
        top_k: Number of candidates; 0 is off.
        min_p: Least probability relative to the most likely token, in [0, 1]; 0 is off.
        repetition_penalty: Over prompt and response; 1 is off.
        stop_token_ids: Ids that end the response and are its last token.
        stop: Texts that end the response; the token that completes one is its last.
        skip_special_tokens: Whether special tokens are left out of the text in which `stop` is looked for.
        seed: Seed of this request alone, or None where the server derives one.
        logprobs: Whether to return the log-prob of each token.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: bool = True

    def __post_init__(self) -> None:
        _require(self.temperature >= 0, "temperature", "a number >= 0 (0 is greedy)", self.temperature)
        _require(0 < self.top_p <= 1, "top_p", "a number in (0, 1]", self.top_p)
        _require(self.top_k >= 0, "top_k", "-1 or 0 (off), or a number >= 1", self.top_k)
        _require(0 <= self.min_p <= 1, "min_p", "a number in [0, 1]", self.min_p)
        _require(self.repetition_penalty > 0, "repetition_penalty", "a number > 0", self.repetition_penalty)
        texts = all(isinstance(text, str) and text for text in self.stop)
        _require(texts, "stop", "a text or a list of texts, none of them empty", self.stop)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken at each position."""
        return self.temperature < GREEDY_BELOW

    @property
    def truncates(self) -> bool:
        """Whether some candidates are cut off before the draw."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


@dataclass(kw_only=True)
class GenerationOutput:
    """The answer to one request: the attributes of verl's `TokenOutput`, without importing verl.

    Args:
        token_ids: Response token ids.
        log_probs: Log-prob of each response token, or None when not asked for.
        routed_experts: Always None: this backend does not replay expert routing.
        stop_reason: "completed" (a stop token or the length), or "aborted".
        num_preempted: Times that the request lost its place; always 0 here.
        extra_fields: `global_steps` of the weights, and `num_cached_tokens`.
    """

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = 0
    extra_fields: dict[str, Any] = field(default_factory=dict)


def parse_sampling_params(
    values: Mapping[str, Any], *, num_prompt_tokens: int, defaults: SamplingDefaults
) -> SamplingParams:
    """Turns verl's sampling dict into checked parameters, with verl's own rules for lengths.

    Args:
        values: Sampling parameters as an agent loop sends them; never changed. None means "not set".
        num_prompt_tokens: Length of the prompt.
        defaults: What holds where `values` says nothing.

    Raises:
        ConfigError: For an unknown key, a value out of range, or a prompt that leaves no room.
    """
    given = {key: value for key, value in values.items() if value is not None and not _asks_nothing(key, value)}
    for key in given:
        if key not in _KNOWN:
            close = None if key in _LACKING else did_you_mean(key, _KNOWN)
            raise ConfigError(
                f"sampling parameter {key!r}",
                expected=", ".join(sorted(_KNOWN)),
                found=f"{key}={given[key]!r}",
                consequence="this request is refused; rollout.name=hf ignores nothing silently",
                remedy=f"write {close!r}" if close else f"drop {key!r}, or use {_ROLE}.name=vllm",
            )
    _require(given.get("n", 1) == 1, "n", "1 (agent loops send one request a repeat)", given.get("n"))
    ignore_eos = bool(given.get("ignore_eos", defaults.ignore_eos))
    stops = frozenset(int(token) for token in given.get("stop_token_ids", ()))
    top_k = int(given.get("top_k", defaults.top_k))
    return SamplingParams(
        max_tokens=_max_tokens(given, num_prompt_tokens, defaults),
        temperature=float(given.get("temperature", defaults.temperature)),
        top_p=float(given.get("top_p", defaults.top_p)),
        top_k=0 if top_k == -1 else top_k,
        min_p=float(given.get("min_p", 0.0)),
        repetition_penalty=float(given.get("repetition_penalty", defaults.repetition_penalty)),
        stop_token_ids=stops if ignore_eos else stops | defaults.eos_token_ids,
        stop=(stop,) if isinstance(stop := given.get("stop", ()), str) else tuple(stop),
        skip_special_tokens=bool(given.get("skip_special_tokens", True)),
        seed=None if given.get("seed") is None else int(given["seed"]),
        logprobs=bool(given.get("logprobs", False)),
    )


def check_prompt(prompt_ids: Any, defaults: SamplingDefaults) -> tuple[int, ...]:
    """Returns the prompt as plain ints, or says what is wrong with it.

    Args:
        prompt_ids: Token ids as verl's `normalize_token_ids` takes them: a list, an array or a tensor, what a tokenizer
            returns (a mapping with `input_ids`), or a batch of one of these.
        defaults: Holds the vocabulary size and the longest sequence.

    Raises:
        ConfigError: For an empty prompt, an id outside the embedding, or a prompt that leaves no room.
    """
    from verl.utils.tokenizer import normalize_token_ids  # the rest of this module needs no verl

    prompt = tuple(normalize_token_ids(prompt_ids))
    wrong = next((token for token in prompt if not 0 <= token < defaults.vocab_size), None)
    if not prompt or wrong is not None:
        raise ConfigError(
            "prompt of a rollout request",
            expected=f"one token id or more, each in [0, {defaults.vocab_size})",
            found="no token" if not prompt else f"id {wrong} in a prompt of {len(prompt)} tokens",
            consequence="this request is refused before it reaches the model",
            remedy="use the tokenizer of the model: actor_rollout_ref.model.tokenizer_path",
        )
    if len(prompt) >= defaults.max_model_len:
        raise ConfigError(
            "prompt of a rollout request",
            expected=f"fewer than {defaults.max_model_len} tokens, so that one can be generated",
            found=f"{len(prompt)} tokens",
            consequence="this request is refused",
            remedy=f"{_ROLE}.max_model_len={len(prompt) + defaults.response_length} or a smaller data.max_prompt_length",
        )
    return prompt


def stable_seed(*parts: object) -> int:
    """A seed that depends on the parts alone: the same in every process and on every machine.

    Args:
        parts: Anything whose `str` says what it is: numbers, strings, digests as hex.

    Returns:
        A number in [0, 2**63).
    """
    text = "\x1f".join(f"{len(str(part))}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def prompt_digest(prompt_ids: Sequence[int]) -> str:
    """Hex digest of token ids: tells one prompt, or one turn of a conversation, from another."""
    return hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=16).hexdigest()


def _asks_nothing(key: str, value: Any) -> bool:
    return key in _TEXT_ONLY or value in _LACKING.get(key, ())


def _max_tokens(given: Mapping[str, Any], num_prompt_tokens: int, defaults: SamplingDefaults) -> int:
    """The response budget: verl's rule (`vllm_async_server.py`), cut to what the context leaves."""
    limit = given.get("max_tokens", given.get("max_new_tokens"))
    if limit is None:
        total = defaults.prompt_length + defaults.response_length
        limit = min(defaults.response_length, total - num_prompt_tokens)
    return max(1, min(int(limit), defaults.max_model_len - num_prompt_tokens))


def _require(holds: bool, key: str, expected: str, found: object) -> None:
    if holds:
        return
    raise ConfigError(
        f"sampling parameter {key!r}",
        expected=expected,
        found=repr(found),
        consequence="this request is refused",
        remedy=f"{_ROLE}.{key}=... within that range, or the agent loop's own value",
    )
