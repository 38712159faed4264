"""Which attention a role's model runs, and how it gets there: `auto | flash_attention_2 | varlen | sdpa | eager`.

`resolve_attention` decides from facts alone and says why; `set_attention` writes the choice into a config before the model is
built (what verl hard-codes for critics).
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, PretrainedConfig
from transformers.masking_utils import AttentionMaskInterface

from verl_ext_sharding.errors import ConfigError, unknown_choice
from verl_ext_sharding.training import packed_flash, packed_sdpa, packing, sequence_parallel, varlen
from verl_ext_sharding.training.attention_support import (
    IMPLEMENTATIONS,
    ModelSupport,
    model_support,
    runs_flash_whatever_is_set,
)
from verl_ext_sharding.versions import in_range

__all__ = [
    "REQUESTS",
    "AttentionChoice",
    "ModelSupport",
    "check_whole_rows",
    "is_transformers_flash",
    "flash_attn_importable",
    "model_support",
    "register",
    "resolve_attention",
    "set_attention",
]

logger = logging.getLogger(__name__)

REQUESTS = ("auto", *IMPLEMENTATIONS)
"""What a user may write."""

EXCHANGING = (varlen.NAME, packed_sdpa.NAME, packed_flash.NAME)
"""Implementations, as transformers knows them, whose masks say with which ranks to exchange heads (`sequence_parallel`)."""

ULYSSES, PADDING = "ulysses_sequence_parallel_size", "use_remove_padding"
"""The last names of verl's keys, which stand in a block of each role's."""

_AMPERE = (8, 0)


@dataclass(kw_only=True, frozen=True)
class AttentionChoice:
    """The attention of a model.

    Args:
        name: Implementation as transformers knows it: one of `REQUESTS` but "auto", "sdpa_packed" or "fa2_packed".
        reason: Why this one, and why not those before it, in one line for the log.
    """

    name: str
    reason: str


def resolve_attention(
    requested: str,
    *,
    use_remove_padding: bool,
    device_capability: tuple[int, int] | None,
    flash_attn_importable: bool,
    torch_version: str,
    model_supports: ModelSupport,
    dtype: torch.dtype,
    ulysses_size: int = 1,
    role: str = "actor",
    because: str = "as asked for",
    ulysses_key: str = ULYSSES,
    padding_key: str = PADDING,
) -> AttentionChoice:
    """Decides which attention a role runs, from facts alone.

    Args:
        requested: One of `REQUESTS`.
        use_remove_padding: Whether verl packs sequences into one row.
        device_capability: CUDA compute capability, or None without CUDA.
        flash_attn_importable: Whether `import flash_attn` works, see `flash_attn_importable`.
        torch_version: Such as "2.11.0+cu130".
        model_supports: See `model_support`.
        dtype: Type that the forward pass computes in (verl's `mixed_precision.param_dtype`, bfloat16 by default).
        ulysses_size: Ulysses sequence parallel size; above 1 verl exchanges heads around flash-attn, and all but "eager" do here.
        role: Role in messages.
        because: Why one that was named is taken, in words.
        ulysses_key: verl's key of `ulysses_size`, for what to type.
        padding_key: verl's key of `use_remove_padding`, for what to type.

    Raises:
        ConfigError: The name is unknown, or what was asked for can't run; the message names what can.
    """
    key = f"sharding.roles.{role}.attn_implementation"
    if requested not in REQUESTS:
        raise unknown_choice(key, requested, REQUESTS)
    facts = {
        "use_remove_padding": use_remove_padding,
        "device_capability": device_capability,
        "flash_attn_importable": flash_attn_importable,
        "torch_version": torch_version,
        "model_supports": model_supports,
        "dtype": dtype,
        "ulysses_size": ulysses_size,
    }
    obstacles = _obstacles(facts)
    possible = [name for name in IMPLEMENTATIONS if obstacles[name] is None]
    if requested == "auto" and possible:
        skipped = [f"not {name}: {obstacles[name]}" for name in IMPLEMENTATIONS[: IMPLEMENTATIONS.index(possible[0])]]
        return _choice(possible[0], "; ".join(skipped) or "flash-attn is installed", use_remove_padding, model_supports)
    if requested != "auto" and obstacles[requested] is None:
        return _choice(requested, because, use_remove_padding, model_supports)
    raise ConfigError(
        f"{key}={requested}",
        expected="an attention that this model, card and torch can run",
        found="; ".join(f"{name}: {why}" for name, why in obstacles.items() if why and requested in ("auto", name)),
        consequence="the run stops before the models load",
        remedy=f"{key}={possible[0]}, or {key}=auto"
        if possible
        else _remedy(role, requested, facts, ulysses_key, padding_key),
    )


def _obstacles(facts: Mapping[str, Any]) -> dict[str, str | None]:
    """Why each implementation can't run under some facts, or None."""
    return {name: _obstacle(name, **facts) for name in IMPLEMENTATIONS}


def _choice(name: str, reason: str, use_remove_padding: bool, model_supports: ModelSupport) -> AttentionChoice:
    if name == packed_flash.TRANSFORMERS and _takes_boundaries(model_supports, use_remove_padding):
        told = "told once in a forward pass where sequences start"
        return AttentionChoice(name=packed_flash.NAME, reason=f"{reason}; {told}")
    if name != "sdpa" or not use_remove_padding:
        return AttentionChoice(name=name, reason=reason)
    if why := model_supports.obstacle(packed_sdpa.NAME, packed=True):
        return AttentionChoice(
            name=name, reason=f"{reason}; packed sequences kept apart by transformers' own square mask: {why}"
        )
    return AttentionChoice(name=packed_sdpa.NAME, reason=f"{reason}; packed sequences kept apart in groups")


def _takes_boundaries(model_supports: ModelSupport, packed: bool) -> bool:
    """Whether masks that are boundaries reach a model's attention, and keep apart what is packed."""
    reach = model_supports.obstacle(packed_sdpa.NAME, packed=packed) is None
    return reach and not (packed and "sdpa" in model_supports.why_not_packed)


def _remedy(role: str, requested: str, facts: Mapping[str, Any], ulysses_key: str, padding_key: str) -> str:
    """What makes one possible where none is: the change of one fact, or else of two."""
    whole_rows, padded = f"{ulysses_key}=1", f"{padding_key}=False"
    ways: list[tuple[str, dict[str, Any]]] = [
        ("install flash-attn", {"flash_attn_importable": True}),
        (whole_rows, {"ulysses_size": 1}),
        (padded, {"use_remove_padding": False}),
    ]
    both = f"{whole_rows} {padded}", {"ulysses_size": 1, "use_remove_padding": False}
    for choices in (ways, [both]):
        found = [
            text + more
            for text, changed in choices
            if any(facts[name] != value for name, value in changed.items())
            and (more := _beside(role, requested, {**facts, **changed})) is not None
        ]
        if found:
            return ", or ".join(found)
    return "use another model"


def _beside(role: str, requested: str, facts: Mapping[str, Any]) -> str | None:
    """What to type beside a change that leads to these facts, with a space before it; None: nothing can run then either."""
    obstacles = _obstacles(facts)
    if all(obstacles.values()):
        return None
    return "" if obstacles.get(requested) is None else f" sharding.roles.{role}.attn_implementation=auto"


def _obstacle(
    name: str,
    *,
    use_remove_padding: bool,
    device_capability: tuple[int, int] | None,
    flash_attn_importable: bool,
    torch_version: str,
    model_supports: ModelSupport,
    dtype: torch.dtype,
    ulysses_size: int,
) -> str | None:
    """Why an implementation can't run, or None."""
    fused = name in ("flash_attention_2", "varlen")
    model = model_supports.obstacle(name, packed=use_remove_padding)
    checks = (
        (name == "flash_attention_2" and not flash_attn_importable, "flash-attn can't be imported"),
        (name == "varlen" and not in_range(torch_version, ">=2.10"), f"torch {torch_version} is older than 2.10"),
        (fused and device_capability is None, "it needs a CUDA device"),
        (fused and device_capability is not None and device_capability < _AMPERE, _too_old(device_capability)),
        (
            fused and dtype not in varlen.HALF,
            f"it computes in bfloat16 or float16, not {str(dtype).removeprefix('torch.')}",
        ),
        (model is not None, str(model)),
    )
    found = next((why for blocked, why in checks if blocked), None)
    if found is not None or ulysses_size == 1:
        return found
    return _ulysses_obstacle(name, use_remove_padding, torch_version, model_supports)


def _ulysses_obstacle(
    name: str, use_remove_padding: bool, torch_version: str, model_supports: ModelSupport
) -> str | None:
    """Why an implementation would attend to one rank's slice of a row alone, or None."""
    if name == "flash_attention_2":
        return None  # verl's own exchange, or ours
    if name == "eager":
        return "with ulysses_sequence_parallel_size above 1 it would see the tokens of one rank alone"
    if not use_remove_padding:
        return "with ulysses_sequence_parallel_size above 1 rows must be packed"
    if not in_range(torch_version, f">={sequence_parallel.MIN_TORCH}"):
        return f"torch {torch_version} has no exchange with a gradient for ulysses_sequence_parallel_size above 1"
    why = model_supports.obstacle(packed_sdpa.NAME, packed=True) if name == "sdpa" else None
    return f"with ulysses_sequence_parallel_size above 1 rows go in groups of sequences: {why}" if why else None


def _too_old(capability: tuple[int, int] | None) -> str:
    return f"compute capability {capability[0]}.{capability[1]} is before Ampere's 8.0" if capability else ""


def is_transformers_flash(name: str) -> bool:
    """Whether an implementation is transformers' flash attention, by whatever package; verl exchanges heads in it alone."""
    return "flash" in name


def check_whole_rows(
    name: str, hf_config: PretrainedConfig, *, ulysses_size: int, role: str, ulysses_key: str = ULYSSES
) -> None:
    """Refuses an attention, by verl's own key, that with Ulysses would see one rank's slice of a row; verl says nothing.

    Args:
        name: Implementation as transformers knows it.
        hf_config: The model's config.
        ulysses_size: Ulysses sequence parallel size.
        role: Role in messages.
        ulysses_key: verl's key of `ulysses_size`, for what to type.

    Raises:
        ConfigError: Nothing would be exchanged.
    """
    if ulysses_size == 1 or is_transformers_flash(name) or name in EXCHANGING or runs_flash_whatever_is_set(hf_config):
        return
    raise ConfigError(
        f"attention of {role}",
        expected=f"one that sees whole rows, of which ulysses_sequence_parallel_size={ulysses_size} gives each rank a slice",
        found=f"attn_implementation={name} by verl's key, for which verl exchanges nothing between ranks",
        consequence="the run stops before it trains on slices, which nothing would say",
        remedy=f"sharding.roles.{role}.attn_implementation=auto, or {ulysses_key}=1",
    )


def flash_attn_importable() -> bool:
    """Whether flash-attn is installed and its compiled part loads. Imports it."""
    if importlib.util.find_spec("flash_attn") is None:
        return False
    try:
        importlib.import_module("flash_attn")
    except Exception as error:
        logger.warning("flash-attn is installed but does not import: %s", error)
        return False
    return True


def register() -> None:
    """Makes `varlen`, `sdpa_packed` and `fa2_packed` known to transformers in this process. Idempotent."""
    AttentionInterface.register(varlen.NAME, varlen.varlen_attention)
    AttentionMaskInterface.register(varlen.NAME, packing.packed_mask)
    AttentionInterface.register(packed_flash.NAME, packed_flash.packed_flash_attention)
    boundaries = partial(packing.packed_mask, implementation=packed_flash.TRANSFORMERS)
    AttentionMaskInterface.register(packed_flash.NAME, boundaries)
    AttentionInterface.register(packed_sdpa.NAME, packed_sdpa.packed_sdpa_attention)
    AttentionMaskInterface.register(packed_sdpa.NAME, packing.grouped_mask)


def set_attention(hf_config: PretrainedConfig, choice: AttentionChoice) -> None:
    """Writes a choice into the config that a model is about to be built from.

    `from_pretrained(config=hf_config)` honours it as long as it gets no `attn_implementation` of its own, which is what verl's
    `load_valuehead_model` passes for every critic.

    Args:
        hf_config: The config; changed in place, parts of a composite one too.
        choice: From `resolve_attention`.
    """
    register()
    if choice.name == packed_flash.NAME:
        packed_flash.prepare()
    hf_config._attn_implementation = choice.name
    logger.info("attention of %s: %s (%s)", hf_config.model_type, choice.name, choice.reason)
