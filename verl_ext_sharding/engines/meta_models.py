"""The models of a job on meta: their layers are known, and none of their weights is read."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from accelerate import init_empty_weights

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.training.layer_map import check_transformers

_ATTENTION = "eager"
"""Can be built everywhere. The config names what is to run, which may be missing here, or be replaced by our engines first."""


def meta_model(
    hf_config: Any, *, role: str, model_type: str = "language_model", trust_remote_code: bool = False
) -> torch.nn.Module:
    """Builds the model that verl's engine will load, without memory.

    Args:
        hf_config: The transformers config; it is not changed.
        role: For messages.
        model_type: "language_model", or "value_model" for one with a value head.
        trust_remote_code: Whether code of the checkpoint may run.

    Raises:
        ConfigError: The installed transformers does not know the model, or it has no value head of its own.
    """
    from verl.utils.model import get_hf_auto_model_class  # its import computes, which nothing below does

    check_transformers(hf_config, role=role)
    config = copy.deepcopy(hf_config)
    for one in (config, config.get_text_config()):
        one.pad_token_id = None  # one without a row is for the engine to explain, which builds the model with it
    with init_empty_weights(include_buffers=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if model_type == "value_model":
            return _value_model(config, role, trust_remote_code)
        auto_class = get_hf_auto_model_class(hf_config=config)
        model: torch.nn.Module = auto_class.from_config(
            config, trust_remote_code=trust_remote_code, attn_implementation=_ATTENTION
        )
        return model


def _value_model(config: Any, role: str, trust_remote_code: bool) -> torch.nn.Module:
    from transformers import AutoModelForTokenClassification

    remote = trust_remote_code and "AutoModelForTokenClassification" in (getattr(config, "auto_map", None) or {})
    if not remote and type(config) not in AutoModelForTokenClassification._model_mapping:
        raise ConfigError(
            f"sharding.roles.{role}.layout=device_map",
            expected="a model with a token-classification head in transformers",
            found=f"{type(config).__name__}, whose value head is trl's wrapper around the model",
            consequence="the run stops before the model loads",
            remedy=f"sharding.roles.{role}.layout=fsdp",
        )
    config.num_labels = 1  # as verl's engine sets it
    model: torch.nn.Module = AutoModelForTokenClassification.from_config(
        config, trust_remote_code=trust_remote_code, attn_implementation=_ATTENTION
    )
    return model
