"""Models of a run as the driver sees them: config files of checkpoints, and none of their weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext_sharding.config.facts import uses_lora
from verl_ext_sharding.config.measures import MODEL_BLOCK
from verl_ext_sharding.errors import first_line

logger = logging.getLogger(__name__)


def hf_config_of(config: DictConfig, role: str) -> Any:
    """The transformers config that a role's model is built from, or None where the driver can't read it.

    Args:
        config: verl's composed config.
        role: "actor", "ref" or "critic".
    """
    from transformers import AutoConfig

    block = OmegaConf.select(config, MODEL_BLOCK[role])
    path = block.get("hf_config_path", None) or block.path
    try:
        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=_trusted(config, role))
    except Exception as error:  # hub, network and file system each have errors of their own
        logger.info("model of %s can't be read here: %s", role, first_line(error))
        return None
    _override(hf_config, _overridden(block))
    return hf_config


def meta_model_of(config: DictConfig, role: str, *, valued: bool) -> Any:
    """A role's model on meta, or None where the driver can't read its config.

    Args:
        config: verl's composed config.
        role: "actor", "ref" or "critic".
        valued: With a value head.

    Raises:
        ConfigError: The installed transformers does not know the model, or it has no value head of its own.
    """
    from verl_ext_sharding.engines.meta_models import meta_model

    hf_config = hf_config_of(config, role)
    if hf_config is None:
        return None
    model_type = "value_model" if valued else "language_model"
    model = meta_model(hf_config, role=role, model_type=model_type, trust_remote_code=_trusted(config, role))
    if uses_lora(config, MODEL_BLOCK[role]):
        model.requires_grad_(False)
    return model


def _trusted(config: DictConfig, role: str) -> bool:
    return bool(OmegaConf.select(config, f"{MODEL_BLOCK[role]}.trust_remote_code", default=False))


def _overridden(block: DictConfig) -> dict[str, Any]:
    """As verl's `HFModelConfig` applies `override_config`."""
    plain = OmegaConf.to_container(block.get("override_config") or OmegaConf.create({}), resolve=True)
    assert isinstance(plain, dict)
    inner: dict[str, Any] = plain.get("model_config", plain)
    return inner


def _override(hf_config: Any, values: Mapping[str, Any]) -> None:
    """As verl's `update_model_config`; a block that the config has not is left to verl."""
    for key, value in values.items():
        if not isinstance(value, dict):
            setattr(hf_config, key, value)
        elif not isinstance(below := getattr(hf_config, key, None), dict | None):
            _override(below, value)
