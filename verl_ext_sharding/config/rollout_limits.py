"""The limits of the generation servers in the user's words, as verl's own keys, with their relations checked.

| `sharding.roles.rollout`   | verl                                                                         |
|----------------------------|------------------------------------------------------------------------------|
| `batch_size`               | `actor_rollout_ref.rollout.max_num_seqs`                                     |
| `max_new_tokens`           | `data.max_response_length`, which `rollout.response_length` follows          |
| `gpu_memory_utilization`   | `actor_rollout_ref.rollout.gpu_memory_utilization`                           |
| any of them                | `actor_rollout_ref.rollout.max_model_len`, if unset: prompt + response       |

The last one matters for memory: verl's `null` becomes the model's whole context, and vLLM refuses to start unless its
cache holds one sequence of that length, however short prompts and responses are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl_ext_sharding.config.changes import KeyChange
from verl_ext_sharding.config.schema import RolloutConfig
from verl_ext_sharding.config.values import whole_number
from verl_ext_sharding.errors import ConfigError

_PREFIX = "sharding.roles.rollout"
_ROLLOUT = "actor_rollout_ref.rollout"

MAX_NUM_SEQS = f"{_ROLLOUT}.max_num_seqs"
MAX_RESPONSE_LENGTH = "data.max_response_length"
RESPONSE_LENGTH = f"{_ROLLOUT}.response_length"
MAX_PROMPT_LENGTH = "data.max_prompt_length"
PROMPT_LENGTH = f"{_ROLLOUT}.prompt_length"
MAX_MODEL_LEN = f"{_ROLLOUT}.max_model_len"
MAX_NUM_BATCHED_TOKENS = f"{_ROLLOUT}.max_num_batched_tokens"
ENABLE_CHUNKED_PREFILL = f"{_ROLLOUT}.enable_chunked_prefill"
GPU_MEMORY_UTILIZATION = f"{_ROLLOUT}.gpu_memory_utilization"
NAME = f"{_ROLLOUT}.name"

KEYS: dict[str, tuple[str, ...]] = {
    "batch_size": (MAX_NUM_SEQS,),
    "max_new_tokens": (MAX_RESPONSE_LENGTH, RESPONSE_LENGTH),
    "gpu_memory_utilization": (GPU_MEMORY_UTILIZATION,),
}
"""verl's keys for each limit."""

CURRENT_KEYS = (
    *(key for keys in KEYS.values() for key in keys),
    MAX_PROMPT_LENGTH,
    PROMPT_LENGTH,
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    ENABLE_CHUNKED_PREFILL,
    NAME,
)
"""verl's keys whose values `translate_limits` reads."""

_SPARE_TOKENS = {"sglang": 1}
"""Tokens beyond prompt + response that a server keeps free, async_sglang_server.py of verl 0.9.1."""


@dataclass(kw_only=True, frozen=True)
class _Lengths:
    """Lengths in tokens once the limits hold, and the keys by which they are changed."""

    prompt: int
    response: int
    response_key: str
    max_model_len: int | None

    @property
    def longest(self) -> int:
        return self.prompt + self.response

    @property
    def written(self) -> str:
        return f"prompt {self.prompt} + response {self.response} = {self.longest} tokens"


def translate_limits(
    limits: RolloutConfig,
    current: Mapping[str, Any],
    context_length: int | None,
    explicit: Collection[str] = (),
) -> list[KeyChange]:
    """verl's keys for the limits that the user set. No limit set: nothing is changed and nothing is checked.

    Args:
        limits: The `sharding.roles.rollout` block.
        current: verl's resolved values, by dotted key; those of `CURRENT_KEYS` are read.
        context_length: `max_position_embeddings` of the model, in tokens. None: unknown.
        explicit: verl's keys that the user wrote on the command line.

    Returns:
        The changes, `old` filled in. Keys that already have the value are left out.

    Raises:
        ConfigError: The limits contradict each other, verl's keys that the user wrote, or the model's context length.
    """
    wanted = {name: getattr(limits, name) for name in KEYS if getattr(limits, name) is not None}
    if not wanted:
        return []
    changes = [change for name, value in wanted.items() for change in _changes(name, value, current, explicit)]
    after = {**current, **{change.key: change.new for change in changes}}
    lengths = _lengths(after, f"{_PREFIX}.max_new_tokens" if "max_new_tokens" in wanted else MAX_RESPONSE_LENGTH)
    _check_context(lengths, context_length)
    _check_max_model_len(lengths, context_length)
    proposal = propose_max_model_len(after, context_length)
    if proposal is not None:
        changes.append(proposal)
        after[proposal.key] = proposal.new
    _check_batched_tokens(after, lengths, context_length)
    return changes


def propose_max_model_len(current: Mapping[str, Any], context_length: int | None) -> KeyChange | None:
    """`max_model_len` for prompt and response, where verl would take the model's whole context.

    Args:
        current: verl's resolved values, by dotted key.
        context_length: `max_position_embeddings` of the model, in tokens. None: unknown.

    Returns:
        The change, which gives way to a value that the user wrote; None where there is nothing to gain.
    """
    lengths = _lengths(current, MAX_RESPONSE_LENGTH)
    needed = lengths.longest + _SPARE_TOKENS.get(str(current.get(NAME)), 0)
    if lengths.max_model_len is not None or context_length is None or needed >= context_length:
        return None
    why = f"{lengths.written}, where the model's context has {context_length}"
    return KeyChange(key=MAX_MODEL_LEN, new=needed, old=None, why=why, default=True)


def _changes(name: str, value: Any, current: Mapping[str, Any], explicit: Collection[str]) -> Iterator[KeyChange]:
    for key in KEYS[name]:
        old = current.get(key)
        if old == value:
            continue
        if key in explicit:
            raise ConfigError(
                f"{_PREFIX}.{name} and {key}",
                expected="one value, since both set the same limit",
                found=f"{_PREFIX}.{name}={value} and {key}={old}",
                consequence="the run does not start",
                remedy=f"remove {key}={old}, or write {_PREFIX}.{name}={old}",
            )
        yield KeyChange(key=key, new=value, old=old, why=f"{_PREFIX}.{name}")


def _lengths(values: Mapping[str, Any], response_key: str) -> _Lengths:
    prompt = _length(values, PROMPT_LENGTH, MAX_PROMPT_LENGTH)
    response = _length(values, RESPONSE_LENGTH, MAX_RESPONSE_LENGTH)
    limit = values.get(MAX_MODEL_LEN)
    return _Lengths(
        prompt=prompt,
        response=response,
        response_key=response_key,
        max_model_len=None if limit is None else whole_number(MAX_MODEL_LEN, limit, instead=prompt + response),
    )


def _length(values: Mapping[str, Any], key: str, followed: str) -> int:
    """The length of a key of verl's; one that it follows by default is looked at first, since that one was written."""
    lengths = [
        whole_number(name, values[name], instead=512) for name in (followed, key) if values.get(name) is not None
    ]
    assert lengths, f"verl's config has neither {key} nor {followed}"
    return lengths[-1]


def _check_context(lengths: _Lengths, context_length: int | None) -> None:
    if context_length is None or lengths.longest <= context_length:
        return
    raise ConfigError(
        f"{lengths.response_key}: longer than the model's context",
        expected=f"prompt + response of at most {context_length} tokens, the model's max_position_embeddings",
        found=lengths.written,
        consequence="the run does not start, since such a sequence can't be generated",
        remedy=_shorter(lengths, context_length),
    )


def _check_max_model_len(lengths: _Lengths, context_length: int | None) -> None:
    limit = lengths.max_model_len
    if limit is None:
        return
    if context_length is not None and limit > context_length:
        raise ConfigError(
            MAX_MODEL_LEN,
            expected=f"at most {context_length} tokens, the model's max_position_embeddings",
            found=str(limit),
            consequence="the run does not start, since the server would refuse it once the models are loaded",
            remedy=f"{MAX_MODEL_LEN}={lengths.longest}",
        )
    if lengths.longest > limit:
        raise ConfigError(
            f"{lengths.response_key} and {MAX_MODEL_LEN}",
            expected=f"prompt + response of at most {limit} tokens, as {MAX_MODEL_LEN} says",
            found=lengths.written,
            consequence="the run does not start, since the server would cut responses short without a word",
            remedy=f"{MAX_MODEL_LEN}={lengths.longest}, or {_shorter(lengths, limit)}",
        )


def _shorter(lengths: _Lengths, limit: int) -> str:
    """The override that makes the sequence fit, of the response if some of it is left."""
    if lengths.prompt < limit:
        return f"{lengths.response_key}={limit - lengths.prompt}"
    return (
        f"{MAX_PROMPT_LENGTH}={max(limit - lengths.response, 1)} with a {lengths.response_key} that leaves room for it"
    )


def _check_batched_tokens(values: Mapping[str, Any], lengths: _Lengths, context_length: int | None) -> None:
    """What one step of a vLLM server can hold: `max_num_batched_tokens`, see vLLM's `SchedulerConfig`."""
    batched = values.get(MAX_NUM_BATCHED_TOKENS)
    if batched is None or values.get(NAME) != "vllm":
        return
    batched = whole_number(MAX_NUM_BATCHED_TOKENS, batched, instead=8192)
    sequences = values.get(MAX_NUM_SEQS)
    if sequences is not None and batched < sequences:
        raise ConfigError(
            f"{MAX_NUM_SEQS} and {MAX_NUM_BATCHED_TOKENS}",
            expected=f"at least one token a step for each of {sequences} requests",
            found=f"{MAX_NUM_BATCHED_TOKENS}={batched}",
            consequence="the run does not start, since vLLM refuses it",
            remedy=f"{MAX_NUM_BATCHED_TOKENS}={sequences}, or {_PREFIX}.batch_size={batched}",
        )
    longest = values.get(MAX_MODEL_LEN) or context_length or lengths.longest
    if not values.get(ENABLE_CHUNKED_PREFILL, True) and batched < longest:
        raise ConfigError(
            f"{MAX_NUM_BATCHED_TOKENS}: too small without chunked prefill",
            expected=f"at least {longest}, the longest sequence, since {ENABLE_CHUNKED_PREFILL} is off",
            found=str(batched),
            consequence="the run does not start",
            remedy=f"{MAX_NUM_BATCHED_TOKENS}={longest}, or {ENABLE_CHUNKED_PREFILL}=true",
        )
