"""What attention a model can run, and whether it keeps packed sequences apart: read from its config, its class and its source.

Nothing is built. A model is trusted with packed sequences only where its source shows that they stay apart: every mask is
built from `position_ids`, no layer carries anything else from one token to the next, and none counts tokens in the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import transformers
from transformers import PretrainedConfig, PreTrainedModel

from verl_ext_sharding.training import packed_sdpa, varlen
from verl_ext_sharding.training.modeling_source import ModelingSource

IMPLEMENTATIONS = ("flash_attention_2", varlen.NAME, "sdpa", "eager")
"""Attention implementations in the order of preference."""

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""Names that configs have for the share of attention weights that is dropped in training."""

_AUTO_CLASSES = frozenset(
    f"AutoModelFor{kind}" for kind in ("CausalLM", "ImageTextToText", "Vision2Seq", "TokenClassification")
)
"""By these verl loads actors, references and critics."""

_VERL_RUNS_FLASH = frozenset({"qwen2_vl", "qwen2_5_vl", "glm4v", "kimi_vl"})
"""Model types whose attention layers verl replaces by calls of flash-attn when sequences are packed (verl 0.9)."""

_VERL_KEEPS_APART = frozenset({"qwen3_5", "qwen3_5_moe"})
"""Model types whose linear attention verl replaces by one that is given the boundaries of packed sequences (verl 0.9)."""


@dataclass(kw_only=True, frozen=True)
class ModelSupport:
    """What a model's architecture allows.

    Args:
        why_not: For each implementation that it can't run, the reason. The key "sdpa_packed" says why only transformers' own
            sdpa can keep its packed sequences apart.
        why_not_packed: Likewise for packed sequences, which those implementations would mix.
    """

    why_not: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    why_not_packed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def obstacle(self, name: str, *, packed: bool) -> str | None:
        """Why an implementation can't run, or None.

        Args:
            name: One of `IMPLEMENTATIONS`, or "sdpa_packed".
            packed: Whether sequences are packed into one row.
        """
        return self.why_not.get(name) or (self.why_not_packed.get(name) if packed else None)


class _Reasons:
    """The first reason against each implementation counts."""

    def __init__(self) -> None:
        self.always: dict[str, str] = {}
        self.packed: dict[str, str] = {}

    def refuse(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            self.always.setdefault(name, reason)

    def refuse_packed(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            self.packed.setdefault(name, reason)

    def support(self) -> ModelSupport:
        return ModelSupport(why_not=self.always, why_not_packed=self.packed)


def model_support(
    hf_config: PretrainedConfig,
    *,
    trust_remote_code: bool = False,
    kernel: varlen.VarlenKernel | None = varlen.TORCH_KERNEL,
) -> ModelSupport:
    """Reads what attention a model can run.

    Args:
        hf_config: Config of a causal language model, of a model of images and text, or of a critic of the same architecture.
        trust_remote_code: Whether a class that comes with the checkpoint is loaded in the place of transformers' own.
        kernel: The kernel that `varlen` would run.
    """
    model_type, reasons = hf_config.model_type, _Reasons()
    model_class = None if trust_remote_code and _brings_its_class(hf_config) else _model_class(hf_config)
    if model_class is None:
        reason = f"{model_type} is none of transformers' own causal or image-text models"
        reasons.refuse((varlen.NAME, packed_sdpa.NAME), reason)
        reasons.refuse_packed(("sdpa", "eager"), f"{reason}: nothing shows that packed sequences stay apart")
        return reasons.support()
    text = hf_config.get_text_config()
    classes = [
        model_class,
        *_mapped(type(text), transformers.MODEL_MAPPING, transformers.MODEL_FOR_CAUSAL_LM_MAPPING)[:1],
    ]
    sources = [ModelingSource(cls) for cls in classes]
    _read_classes(classes, model_type, reasons)
    _read_config(hf_config, text, kernel, reasons)
    _read_packing(hf_config, text, classes, sources, reasons)
    return reasons.support()


def runs_flash_whatever_is_set(hf_config: PretrainedConfig) -> bool:
    """Whether verl calls flash-attn in the layers of a model whatever its attention is, when sequences are packed."""
    return hf_config.model_type in _VERL_RUNS_FLASH


def _brings_its_class(hf_config: PretrainedConfig) -> bool:
    """Whether a checkpoint names code of its own for its model; its config may be transformers' own all the same."""
    return any(name in _AUTO_CLASSES for name in getattr(hf_config, "auto_map", None) or ())


def _model_class(hf_config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class that verl loads: it asks for a model of images and text first, whatever `architectures` says."""
    mappings = (transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, transformers.MODEL_FOR_CAUSAL_LM_MAPPING)
    return next(iter(_mapped(type(hf_config), *mappings)), None)


def _mapped(config_class: type, *mappings: Any) -> list[type[PreTrainedModel]]:
    """The class of a config in each of transformers' mappings that has one."""
    found = [cls for mapping in mappings if (cls := mapping.get(config_class, None)) is not None]
    return [cls[0] if isinstance(cls, tuple) else cls for cls in found]


def _read_classes(classes: list[type[PreTrainedModel]], model_type: str, reasons: _Reasons) -> None:
    """What the classes say of themselves."""
    if not all(getattr(cls, "_supports_flash_attn", False) for cls in classes):
        reasons.refuse(("flash_attention_2", varlen.NAME), f"transformers has no flash attention for {model_type}")
    for cls in classes:
        instead = getattr(cls, "_compatible_flash_implementations", None)
        if instead and "flash_attention_2" not in instead:
            reasons.refuse(
                ("flash_attention_2",), f"transformers runs {instead[0]}, from the hub, in its place for {model_type}"
            )
    if not all(getattr(cls, "_supports_sdpa", False) for cls in classes):
        reason = f"transformers has no sdpa for {model_type}: its scores are not a plain softmax"
        reasons.refuse(("sdpa", varlen.NAME), reason)
    if not all(getattr(cls, "_supports_attention_backend", False) for cls in classes):
        reason = f"{model_type} is not built on transformers' attention interface"
        reasons.refuse((varlen.NAME, packed_sdpa.NAME), reason)


def _read_config(
    hf_config: PretrainedConfig, text: PretrainedConfig, kernel: varlen.VarlenKernel | None, reasons: _Reasons
) -> None:
    """What sizes and options of the language model rule out."""
    model_type = hf_config.model_type
    if getattr(text, "attn_logit_softcapping", None) is not None:
        reason = f"it has no cap on scores, and {model_type} caps them (attn_logit_softcapping)"
        reasons.refuse(("sdpa", varlen.NAME), reason)
    if getattr(text, "alibi", None) is True:
        reason = f"{model_type} adds alibi to its scores, scaled under eager alone"
        reasons.refuse(("flash_attention_2", "sdpa", varlen.NAME), reason)
    if getattr(text, "index_topk", None) is not None:
        reason = f"the tokens that {model_type} picks are added to a mask of numbers, which it has under eager alone"
        reasons.refuse(("sdpa", varlen.NAME), reason)
    if text is not hf_config or getattr(hf_config, "vision_config", None) is not None:
        reasons.refuse((varlen.NAME, packed_sdpa.NAME), f"it is for text models, and {model_type} has other parts")
    for name in _DROPOUTS:
        if share := getattr(text, name, None):
            reasons.refuse((varlen.NAME,), f"it has no dropout, and {name}={share}")
    if (width := _head_width(text)) and width > varlen.MAX_HEAD_DIM:
        reason = f"its heads are at most {varlen.MAX_HEAD_DIM} wide, not {width}"
        reasons.refuse(("flash_attention_2", varlen.NAME), reason)
    window = _window(text)
    if window is not None and kernel is not None and not kernel.has_window:
        reason = f"this torch's kernel has no sliding window, and {model_type} has one of {window} tokens"
        reasons.refuse((varlen.NAME,), reason)


def _read_packing(
    hf_config: PretrainedConfig,
    text: PretrainedConfig,
    classes: list[type[PreTrainedModel]],
    sources: list[ModelingSource],
    reasons: _Reasons,
) -> None:
    """What keeps packed sequences apart, and what doesn't."""
    model_type = hf_config.model_type
    layers = sources[-1]
    if model_type not in _VERL_KEEPS_APART and (reason := _mixing(text, classes, layers)):
        reasons.refuse_packed(IMPLEMENTATIONS, f"{model_type} {reason}, whichever attention runs")
    if runs_flash_whatever_is_set(hf_config):
        reason = f"verl calls flash-attn in the layers of {model_type}, whatever is set, when sequences are packed"
        reasons.refuse_packed((varlen.NAME, "sdpa", "eager"), reason)
    if (layer := layers.layer_that_reads_the_mask()) is not None:
        reasons.refuse((varlen.NAME, packed_sdpa.NAME), f"{layer} reads its mask, and needs a square one")
        reason = f"{layer} reads its mask: nothing shows that it keeps packed sequences apart"
        reasons.refuse_packed(("sdpa", "eager"), reason)
    calls = [call for source in sources for call in source.mask_calls()]
    if not calls or not all(calls):
        reason = f"{model_type} hands no position_ids to its masks, so packed sequences would see each other"
        reasons.refuse_packed((varlen.NAME, "sdpa", "eager"), reason)
    if not layers.positions_reach_attention():
        reason = f"nothing shows that {model_type} calls it with position_ids, without which packed sequences mix"
        reasons.refuse_packed(("flash_attention_2",), reason)


def _mixing(text: PretrainedConfig, classes: list[type[PreTrainedModel]], layers: ModelingSource) -> str | None:
    """How a model lets packed sequences reach each other beside its masks, or None."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    others = sorted(set(kinds) - _ATTENTION_LAYERS)
    if others == ["chunked_attention"]:
        return "cuts its chunks by places in the row, not in the sequence"
    if others:
        return f"has layers ({', '.join(others)}) that carry one packed sequence into the next"
    if not kinds and any(getattr(cls, "_is_stateful", False) for cls in classes):
        return "carries a state from one packed sequence into the next"
    if layer := layers.layer_that_counts_in_the_row():
        return f"counts tokens in the row, not in the sequence ({layer})"
    return None


def _window(text: PretrainedConfig) -> int | None:
    """The sliding window in use, in tokens, or None."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    return window if isinstance(window, int) and (kinds is None or "sliding_attention" in kinds) else None


def _head_width(text: PretrainedConfig) -> int | None:
    """The widest head. Latent attention has two parts in a query's head; some models have other heads in full layers."""

    def size(name: str) -> int:
        value = getattr(text, name, None)
        return value if isinstance(value, int) else 0

    latent = size("qk_nope_head_dim") + size("qk_rope_head_dim")
    widest = max(latent, *(size(name) for name in ("head_dim", "global_head_dim", "qk_head_dim", "v_head_dim")))
    if not widest and (heads := size("num_attention_heads")):
        widest = size("hidden_size") // heads
    return widest or None
