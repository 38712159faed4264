"""Attention heads of a role's model, read from its `config.json`: what sequence parallelism may divide."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext_sharding.config.measures import MODEL_BLOCK

_NAMES = ("num_attention_heads", "num_key_value_heads")


@dataclass(kw_only=True, frozen=True)
class Heads:
    """Attention heads of a model: Ulysses and tensor parallelism divide them.

    Args:
        query: Attention heads.
        key_value: Key/value heads, fewer with grouped attention.
    """

    query: int
    key_value: int

    def divide(self, size: int) -> bool:
        """Whether a parallel size is possible, as verl/models/transformers/monkey_patch.py asserts it."""
        return self.query % size == 0 and (self.key_value % size == 0 or size % self.key_value == 0)


def heads_of(values: Mapping[str, Any], role: str) -> Heads | None:
    """The heads of a role's model, or None where its config can't be read here or leaves them to a default.

    Args:
        values: verl's resolved values, by dotted key.
        role: "actor", "ref" or "critic".
    """
    block = MODEL_BLOCK[role]
    path = values.get(f"{block}.hf_config_path") or values.get(f"{block}.path")
    file = config_file(str(path)) if path else None
    if file is None:
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    numbers = _numbers(config) | _overridden(values, block)
    if not all(isinstance(numbers.get(name), int) and numbers[name] > 0 for name in _NAMES):
        return None
    return Heads(query=numbers[_NAMES[0]], key_value=numbers[_NAMES[1]])


def _numbers(config: Any) -> dict[str, Any]:
    """As verl looks for them: in the config, or else in its `text_config`."""
    for part in (config, config.get("text_config") if isinstance(config, Mapping) else None):
        if isinstance(part, Mapping) and all(part.get(name) is not None for name in _NAMES):
            return {name: part[name] for name in _NAMES}
    return {}


def _overridden(values: Mapping[str, Any], block: str) -> dict[str, Any]:
    """As verl's `HFModelConfig` applies `override_config`."""
    prefixes = (f"{block}.override_config", f"{block}.override_config.model_config")
    return {name: values[f"{p}.{name}"] for p in prefixes for name in _NAMES if values.get(f"{p}.{name}") is not None}


def config_file(path: str) -> Path | None:
    """`config.json` of a model folder, or of a model of the hub that is in the local cache."""
    file = Path(path).expanduser() / "config.json"
    if file.is_file():
        return file
    folder = _hub_cache() / f"models--{path.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    file = folder / "snapshots" / revision / "config.json"
    return file if file.is_file() else None


def _hub_cache() -> Path:
    """Where `huggingface_hub` keeps models (its constants.py)."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"
