"""How many parameters a model has, from files that are here: headers of safetensors, or its config.json. Loads nothing."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from verl_ext_sharding.config.model_heads import config_file

_MAX_HEADER_BYTES = 100 << 20
"""Limit of the safetensors format."""

_DENSE_DECODERS = ("llama", "mistral", "phi3", "qwen2", "qwen3")
"""Values of `model_type` whose layers `_dense_decoder` describes."""


def num_parameters(model: str | None) -> int | None:
    """Parameters of a model; None where no file here says it.

    Args:
        model: Its folder, or its id on the hub, of which only the local cache is read.
    """
    file = config_file(model) if model else None
    if file is None:
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        weights = _weight_files(file.parent)
        if weights and not config.get("quantization_config"):  # which packs several weights into one number
            return sum(_num_elements(weight) for weight in weights)
        return _dense_decoder(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, struct.error):
        return None  # files that can't be read as they should are not for a plan to complain about


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers would load; empty unless all of them are here."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
        files = [folder / name for name in sorted(names)]
    else:
        files = [folder / "model.safetensors"]
    return files if all(file.exists() for file in files) else []


def _num_elements(file: Path) -> int:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{file} is no safetensors file")
        header = json.loads(stream.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _dense_decoder(config: dict[str, Any]) -> int | None:
    """Embedding, head, and per layer the attention's q, k, v, o, the MLP's gate, up, down, and two norms.

    From `LlamaModel`, `LlamaDecoderLayer`, `LlamaAttention` and `LlamaMLP` (transformers, models/llama/modeling_llama.py),
    whose shapes the other model types share; their biases and norms of heads, under 0.1 %, are left out.
    """
    if config.get("model_type") not in _DENSE_DECODERS:
        return None
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    # Qwen3 has a default of its own, which its configs write out
    head = int(config["head_dim"] if config["model_type"] == "qwen3" else config.get("head_dim") or hidden // heads)
    attention = 2 * hidden * head * (heads + int(config["num_key_value_heads"]))
    layer = attention + 3 * hidden * int(config["intermediate_size"]) + 2 * hidden
    embeddings = int(config["vocab_size"]) * hidden * (1 if config.get("tie_word_embeddings", False) else 2)
    return embeddings + int(config["num_hidden_layers"]) * layer + hidden
