"""Which attention a role's model runs, and how it gets there: `auto | flash_attention_2 | varlen | sdpa | eager`.

`resolve_attention` decides from facts alone and says why; `set_attention` writes the choice into a config before the model is
built (what verl hard-codes for critics), `apply` and `remove` change a model that exists.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from verl_ext_sharding.errors import ConfigError, did_you_mean
from verl_ext_sharding.training import packed_sdpa, packing, varlen
from verl_ext_sharding.versions import in_range

logger = logging.getLogger(__name__)

REQUESTS = ("auto", "flash_attention_2", "varlen", "sdpa", "eager")
"""What a user may write."""

_PREFERENCE = ("flash_attention_2", "varlen", "sdpa", "eager")
_AMPERE = (8, 0)
_HALF = frozenset({torch.float16, torch.bfloat16})
_PREVIOUS = "_sharding_previous_attention"


@dataclass(kw_only=True, frozen=True)
class AttentionChoice:
    """The attention of a model.

    Args:
        name: Implementation as transformers knows it: one of `REQUESTS` but "auto", or "sdpa_packed".
        reason: Why this one, and why not those before it, in one line for the log.
    """

    name: str
    reason: str


@dataclass(kw_only=True, frozen=True)
class ModelSupport:
    """What a model's architecture allows.

    Args:
        why_not: For each implementation that it can't run, the reason. The key "packed" says why its masks can't keep packed
            sequences apart; "sdpa_packed" why only transformers' own sdpa keeps them apart.
    """

    why_not: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


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
        ulysses_size: Ulysses sequence parallel size; above 1 only flash-attn exchanges heads between ranks.
        role: Role in messages.

    Raises:
        ConfigError: The name is unknown, or what was asked for can't run; the message names what can.
    """
    subject = f"sharding.roles.{role}.attn_implementation={requested}"
    if requested not in REQUESTS:
        near = did_you_mean(requested, REQUESTS)
        raise ConfigError(
            subject,
            expected=f"one of {', '.join(REQUESTS)}",
            found=requested,
            consequence="the run stops before the models load",
            remedy=f"set sharding.roles.{role}.attn_implementation={near or 'auto'}",
        )
    obstacles = {
        name: _obstacle(
            name,
            use_remove_padding=use_remove_padding,
            device_capability=device_capability,
            flash_attn_importable=flash_attn_importable,
            torch_version=torch_version,
            model_supports=model_supports,
            dtype=dtype,
            ulysses_size=ulysses_size,
        )
        for name in _PREFERENCE
    }
    possible = [name for name in _PREFERENCE if obstacles[name] is None]
    if requested == "auto" and possible:
        skipped = [f"not {name}: {obstacles[name]}" for name in _PREFERENCE[: _PREFERENCE.index(possible[0])]]
        return _choice(possible[0], "; ".join(skipped) or "flash-attn is installed", use_remove_padding, model_supports)
    if requested != "auto" and obstacles[requested] is None:
        return _choice(requested, "as asked for", use_remove_padding, model_supports)
    raise ConfigError(
        subject,
        expected="an attention that this model, card and torch can run",
        found="; ".join(f"{name}: {why}" for name, why in obstacles.items() if why and requested in ("auto", name)),
        consequence="the run stops before the models load",
        remedy=_remedy(role, possible, use_remove_padding, ulysses_size),
    )


def _choice(name: str, reason: str, use_remove_padding: bool, model_supports: ModelSupport) -> AttentionChoice:
    if name != "sdpa" or not use_remove_padding:
        return AttentionChoice(name=name, reason=reason)
    if why := model_supports.why_not.get(packed_sdpa.NAME):
        return AttentionChoice(
            name=name, reason=f"{reason}; packed sequences kept apart by transformers' own square mask: {why}"
        )
    return AttentionChoice(name=packed_sdpa.NAME, reason=f"{reason}; packed sequences kept apart in groups")


def _remedy(role: str, possible: list[str], use_remove_padding: bool, ulysses_size: int) -> str:
    if possible:
        return f"set sharding.roles.{role}.attn_implementation={possible[0]} (or auto)"
    model = "critic.model" if role == "critic" else "actor_rollout_ref.model"
    if ulysses_size > 1:
        return "install flash-attn, or set ulysses_sequence_parallel_size=1 for this role"
    return f"install flash-attn, or set {model}.use_remove_padding=False" if use_remove_padding else "use another model"


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
    packed = model_supports.why_not.get("packed") if use_remove_padding and name != "flash_attention_2" else None
    checks = (
        (name == "flash_attention_2" and not flash_attn_importable, "flash-attn can't be imported"),
        (name == "varlen" and not in_range(torch_version, ">=2.10"), f"torch {torch_version} is older than 2.10"),
        (fused and device_capability is None, "it needs a CUDA device"),
        (fused and device_capability is not None and device_capability < _AMPERE, _too_old(device_capability)),
        (fused and dtype not in _HALF, f"it computes in bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"),
        (
            name != "flash_attention_2" and ulysses_size > 1,
            f"ulysses_sequence_parallel_size={ulysses_size} exchanges heads in flash_attention_2 only",
        ),
        (packed is not None, str(packed)),
        (name in model_supports.why_not, model_supports.why_not.get(name, "")),
    )
    return next((why for blocked, why in checks if blocked), None)


def _too_old(capability: tuple[int, int] | None) -> str:
    return f"compute capability {capability[0]}.{capability[1]} is before Ampere's 8.0" if capability else ""


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


def model_support(hf_config: PretrainedConfig) -> ModelSupport:
    """Reads from a model's config, class and source what attention it can run.

    Args:
        hf_config: Config of a causal language model or of a critic of the same architecture.
    """
    why_not: dict[str, str] = {}
    model_class = AutoModelForCausalLM._model_mapping.get(type(hf_config), None)
    if model_class is None or not model_class._supports_attention_backend:
        reason = f"{hf_config.model_type} is not built on transformers' attention interface"
        return ModelSupport(why_not={"varlen": reason, packed_sdpa.NAME: reason, "packed": reason})
    if not model_class._supports_flash_attn:
        why_not["flash_attention_2"] = why_not["varlen"] = (
            f"transformers has no flash attention for {hf_config.model_type}"
        )
    if not model_class._supports_sdpa:
        reason = f"transformers has no sdpa for {hf_config.model_type}: its scores are not a plain softmax"
        why_not |= {"sdpa": reason, "varlen": reason}
    if getattr(hf_config, "attn_logit_softcapping", None) is not None:
        reason = f"it has no cap on scores, and {hf_config.model_type} caps them (attn_logit_softcapping)"
        why_not |= {"sdpa": reason, "varlen": reason}
    if getattr(hf_config, "vision_config", None) is not None:
        reason = "it is for text models"
        why_not |= {"varlen": reason, packed_sdpa.NAME: reason}
    if getattr(hf_config, "attention_dropout", 0.0):
        why_not["varlen"] = f"it has no dropout, and attention_dropout={hf_config.attention_dropout}"
    if (head_dim := _head_dim(hf_config)) and head_dim > varlen.MAX_HEAD_DIM:
        why_not["varlen"] = f"its heads are at most {varlen.MAX_HEAD_DIM} wide, not {head_dim}"
    if not _masks_see_positions(sys.modules[model_class.__module__]):
        why_not["packed"] = (
            f"{hf_config.model_type} builds its masks without position_ids, so packed sequences would see each other"
        )
    return ModelSupport(why_not=why_not)


def _head_dim(hf_config: PretrainedConfig) -> int | None:
    if head_dim := getattr(hf_config, "head_dim", None):
        return int(head_dim)
    heads, width = getattr(hf_config, "num_attention_heads", None), getattr(hf_config, "hidden_size", None)
    return width // heads if heads and width else None


def _masks_see_positions(module: ModuleType) -> bool:
    """Whether a modeling file hands `position_ids`, the only trace of packing, to every causal mask that it builds."""
    builders = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError):
        return False
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    keywords = [
        {keyword.arg for keyword in call.keywords} for call in calls if getattr(call.func, "id", None) in builders
    ]
    return bool(keywords) and all("position_ids" in names or None in names for names in keywords)


def register() -> None:
    """Makes `varlen` and `sdpa_packed` known to transformers in this process. Idempotent."""
    AttentionInterface.register(varlen.NAME, varlen.varlen_attention)
    AttentionMaskInterface.register(varlen.NAME, packing.packed_mask)
    AttentionInterface.register(packed_sdpa.NAME, packed_sdpa.packed_sdpa_attention)
    AttentionMaskInterface.register(packed_sdpa.NAME, packing.grouped_mask)


def unregister() -> None:
    """Takes both names out of transformers again. Idempotent."""
    for interface in (AttentionInterface, AttentionMaskInterface):
        for name in (varlen.NAME, packed_sdpa.NAME):
            interface._global_mapping.pop(name, None)


def set_attention(hf_config: PretrainedConfig, choice: AttentionChoice) -> None:
    """Writes a choice into the config that a model is about to be built from.

    `from_pretrained(config=hf_config)` honours it as long as it gets no `attn_implementation` of its own, which is what verl's
    `load_valuehead_model` passes for every critic.

    Args:
        hf_config: The config; changed in place, parts of a composite one too.
        choice: From `resolve_attention`.
    """
    register()
    hf_config._attn_implementation = choice.name
    logger.info("attention of %s: %s (%s)", hf_config.model_type, choice.name, choice.reason)


def apply(model: PreTrainedModel, choice: AttentionChoice) -> None:
    """Makes a model run the chosen attention from its next forward on. Idempotent.

    Args:
        model: The model, before or after it is sharded.
        choice: From `resolve_attention`.

    Raises:
        ConfigError: The model isn't built on transformers' attention interface.
    """
    register()
    previous = model.config._attn_implementation
    if previous != choice.name:
        model.set_attn_implementation(choice.name)
        if model.config._attn_implementation != choice.name:
            raise ConfigError(
                f"attn_implementation={choice.name}",
                expected="a model built on transformers' attention interface",
                found=f"{type(model).__name__}, which keeps {model.config._attn_implementation}",
                consequence="the run stops: the setting would have no effect",
                remedy=f"set attn_implementation={previous}",
            )
        state: dict[str, Any] = model.__dict__
        state.setdefault(_PREVIOUS, previous)
    logger.info("attention of %s: %s (%s)", type(model).__name__, choice.name, choice.reason)


def remove(model: PreTrainedModel) -> None:
    """Gives a model the attention back that it had before the first `apply`. Idempotent.

    Args:
        model: The model.
    """
    previous = model.__dict__.pop(_PREVIOUS, None)
    if previous is not None:
        model.set_attn_implementation(previous)
