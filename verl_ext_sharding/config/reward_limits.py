"""How many tokens a reward model can take, read from its config, and whether a job's prompt + response can exceed it.

verl sends prompt and response to a discriminative reward model uncut, whatever their length. The limit is what no longer
works, not what was trained: the rows of a table of positions, or the length that the server refuses.

| positions                          | limit in tokens                                                                     |
|------------------------------------|-------------------------------------------------------------------------------------|
| table (BERT, GPT-2)                | its rows                                                                            |
| table that starts after the padding| rows - padding_idx - 1: RoBERTa's 514 are 512                                       |
| rotary                             | `max_position_embeddings`, stretched by rope scaling as transformers documents it   |
| relative or ALiBi (T5, DeBERTa)    | none of its own; then the tokenizer's `model_max_length` counts                     |

The server has its own: `rollout.max_model_len`, which verl fills with `max_position_embeddings` (vLLM, SGLang).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verl_ext_sharding.config.changes import KeyChange
from verl_ext_sharding.errors import ConfigError

MAX_INPUT_TOKENS = "sharding.roles.reward.max_input_tokens"
POLICY = "sharding.guards.reward_length"
ROLLOUT = "reward.reward_model.rollout"
MAX_MODEL_LEN = f"{ROLLOUT}.max_model_len"
ENABLE = "reward.reward_model.enable"
CUSTOM_FUNCTION = "reward.custom_reward_function.path"
MODEL_PATH = "reward.reward_model.model_path"

TEMPLATE_TOKENS = 32
"""What a chat template adds to a prompt and its response, for the check before launch: role headers, end-of-turn marks."""

_OFFSET_FAMILY = frozenset(
    {
        "camembert",
        "data2vec-text",
        "ibert",
        "layoutlmv3",
        "lilt",
        "longformer",
        "luke",
        "markuplm",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
"""Model types whose position ids start at padding_idx + 1: `create_position_ids_from_input_ids` in transformers."""

_UNLIMITED = frozenset({"t5", "mt5", "umt5", "longt5", "bloom", "mamba", "mamba2", "rwkv", "xlnet", "falcon_mamba"})
"""Model types with relative positions, ALiBi or none at all, whatever length their config mentions."""

_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "model_max_length",
)
"""Where configs keep the length, the usual name first."""

_ALREADY_STRETCHED = frozenset({"default", "llama3", "longrope", "su", "mrope"})
"""Rope scalings whose `max_position_embeddings` is the stretched length."""

_SENTINEL_TOKENS = 10**9
"""A tokenizer without a limit says 1e30."""

_SPARE_TOKENS = {"sglang": 1}
"""Tokens below its context length at which a server refuses an input (SGLang: `input_token_num >= context_len`)."""


@dataclass(kw_only=True, frozen=True)
class InputLimit:
    """The longest input.

    Args:
        tokens: In tokens of the reward model's tokenizer, special ones included. None: no limit is known.
        source: Where the number comes from, for messages.
    """

    tokens: int | None
    source: str


def model_limit(hf_config: Mapping[str, Any]) -> InputLimit:
    """What the model itself can take.

    Args:
        hf_config: A Hugging Face config as a plain mapping (`config.json`, or `PretrainedConfig.to_dict()`).
    """
    config = _text_config(hf_config)
    model_type = str(config.get("model_type", ""))
    if model_type in _UNLIMITED or _is_alibi(config) or _is_relative(config):
        return InputLimit(tokens=None, source=f"{model_type} has no table of positions")
    key = next((name for name in _LENGTH_KEYS if isinstance(config.get(name), int) and config[name] > 0), None)
    if key is None:
        return InputLimit(tokens=None, source=f"the config of {model_type or 'the model'} names no length")
    length = int(config[key])
    if model_type in _OFFSET_FAMILY:
        padding = config.get("pad_token_id")
        taken = (1 if padding is None or model_type == "mpnet" else int(padding)) + 1
        return InputLimit(
            tokens=length - taken, source=f"{key} {length} less the {taken} that come before the first position"
        )
    stretched = _stretched(config, length)
    if stretched != length:
        return InputLimit(tokens=stretched, source=f"{key} {length}, stretched by rope scaling")
    return InputLimit(tokens=length, source=f"{key} {length}")


def reward_limit(
    hf_config: Mapping[str, Any],
    *,
    engine: str,
    max_model_len: int | None = None,
    tokenizer_max_length: float | None = None,
    max_input_tokens: int | Literal["auto"] = "auto",
) -> InputLimit:
    """The longest input that model, server and user allow.

    Args:
        hf_config: The reward model's config.
        engine: `reward.reward_model.rollout.name`: vllm, sglang or hf.
        max_model_len: `reward.reward_model.rollout.max_model_len`. None: the server takes what verl gives it.
        tokenizer_max_length: `model_max_length` of the reward model's tokenizer; counts only for a model without a limit.
        max_input_tokens: `sharding.roles.reward.max_input_tokens`.

    Raises:
        ConfigError: The user asks for more than model and server take.
    """
    limits = [model_limit(hf_config)]
    server = max_model_len
    if server is None and engine in ("vllm", "sglang"):
        server = _text_config(hf_config).get("max_position_embeddings")
    if server is not None:
        spare = _SPARE_TOKENS.get(engine, 0)
        source = f"{MAX_MODEL_LEN}={server}" if max_model_len is not None else f"{engine}'s context of {server}"
        limits.append(InputLimit(tokens=int(server) - spare, source=f"{source}{f' less {spare}' if spare else ''}"))
    if limits[0].tokens is None and tokenizer_max_length is not None and tokenizer_max_length < _SENTINEL_TOKENS:
        limits.append(InputLimit(tokens=int(tokenizer_max_length), source="the tokenizer's model_max_length"))
    known = [limit for limit in limits if limit.tokens is not None]
    hard = min(known, key=lambda limit: limit.tokens or 0) if known else limits[0]
    if max_input_tokens == "auto":
        return hard
    if hard.tokens is not None and max_input_tokens > hard.tokens:
        raise ConfigError(
            MAX_INPUT_TOKENS,
            expected=f"auto, or at most {hard.tokens}: {hard.source}",
            found=str(max_input_tokens),
            consequence="the run does not start, since the reward model can't take that much",
            remedy=f"{MAX_INPUT_TOKENS}=auto",
        )
    return InputLimit(tokens=max_input_tokens, source=f"{MAX_INPUT_TOKENS}={max_input_tokens}")


def reward_length_finding(
    limit: InputLimit,
    *,
    max_prompt_length: int,
    max_response_length: int,
    policy: Literal["truncate", "error", "off"],
    template_tokens: int = TEMPLATE_TOKENS,
) -> str | None:
    """What to warn of before launch, or None where every sample fits.

    Lengths are counted in the policy's tokens, the limit in the reward model's, so this can only say that a sample *can* be
    too long. Each sample is counted in the reward model's own tokens when it is scored.

    Args:
        limit: From `reward_limit`.
        max_prompt_length: `data.max_prompt_length`.
        max_response_length: `data.max_response_length`.
        policy: `sharding.guards.reward_length`.
        template_tokens: What the reward model's chat template adds.
    """
    longest = max_prompt_length + max_response_length + template_tokens
    if limit.tokens is None or longest <= limit.tokens:
        return None
    then = {
        "truncate": "longer samples lose the beginning of their prompt, then of their response",
        "error": "a longer sample ends the run",
        "off": "a longer sample is sent as it is, and refused by the server or cut by it",
    }[policy]
    fits = limit.tokens - max_prompt_length - template_tokens
    remedy = f"data.max_response_length={fits}" if fits > 0 else "a reward model with a longer context"
    return (
        f"reward: prompt {max_prompt_length} + response {max_response_length} + about {template_tokens} of the template = "
        f"{longest} tokens can exceed the reward model's {limit.tokens} ({limit.source}); {POLICY}={policy}: {then}; "
        f"{remedy} avoids it"
    )


def propose_reward_max_model_len(hf_config: Mapping[str, Any], engine: str, current: int | None) -> KeyChange | None:
    """`max_model_len` for a model that takes less than its `max_position_embeddings`, where verl would give the latter.

    Args:
        hf_config: The reward model's config.
        engine: `reward.reward_model.rollout.name`.
        current: `reward.reward_model.rollout.max_model_len`.

    Returns:
        The change, which gives way to a value that the user wrote; None where verl's own choice is right.
    """
    declared, limit = _text_config(hf_config).get("max_position_embeddings"), model_limit(hf_config)
    if current is not None or engine not in ("vllm", "sglang") or declared is None or limit.tokens is None:
        return None
    if limit.tokens >= int(declared):
        return None
    return KeyChange(key=MAX_MODEL_LEN, new=limit.tokens, why=f"the reward model's {limit.source}", default=True)


def is_discriminative(values: Mapping[str, Any]) -> bool:
    """Whether verl itself asks a reward model for scores: there is one, and no reward function of the user's.

    Args:
        values: verl's resolved values by dotted key.
    """
    return bool(values.get(ENABLE)) and values.get(CUSTOM_FUNCTION) is None


def read_hf_config(path: str) -> dict[str, Any] | None:
    """The `config.json` of a model folder, or None where the path is no folder on this machine."""
    file = Path(path).expanduser() / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def embedding_rows(hf_config: Mapping[str, Any]) -> int | None:
    """Rows of a model's token embedding, `vocab_size`; None where the config doesn't say."""
    rows = _text_config(hf_config).get("vocab_size")
    return None if rows is None else int(rows)


def _text_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model: models with several parts keep it in `text_config`."""
    text = hf_config.get("text_config")
    has_length = any(hf_config.get(name) is not None for name in _LENGTH_KEYS)
    return text if isinstance(text, Mapping) and not has_length else hf_config


def _is_alibi(config: Mapping[str, Any]) -> bool:
    attention = config.get("attn_config")
    nested = isinstance(attention, Mapping) and attention.get("alibi")
    return bool(config.get("alibi") or nested or config.get("position_embedding_type") == "alibi")


def _is_relative(config: Mapping[str, Any]) -> bool:
    """DeBERTa's form: distances are clamped, and no table of positions is added to the input."""
    return bool(config.get("relative_attention")) and not config.get("position_biased_input", True)


def _stretched(config: Mapping[str, Any], length: int) -> int:
    """The length after rope scaling; configs of transformers 5 call it `rope_parameters`.

    Linear and dynamic scaling leave `max_position_embeddings` at the original length, and so do most YaRN configs.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, Mapping):
        return length
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    factor = scaling.get("factor")
    if kind in _ALREADY_STRETCHED or factor is None:
        return length
    if kind == "yarn":
        original = scaling.get("original_max_position_embeddings") or length
        return max(length, int(original * factor))
    return int(length * factor) if kind in ("linear", "dynamic", "ntk") else length
