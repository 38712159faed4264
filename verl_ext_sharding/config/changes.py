"""Changes to verl's own keys: what we set, why, and the check that the user did not write something else."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from verl_ext_sharding.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, frozen=True)
class KeyChange:
    """One key of verl that we set.

    Args:
        key: Dotted key.
        new: Value to set.
        why: The user's key or the fact that asks for it.
        old: Value before, filled in by `apply_changes`.
        default: The change stands in for a default: a value that the user wrote wins.
    """

    key: str
    new: Any
    why: str
    old: Any = None
    default: bool = False


def explicit_keys() -> dict[str, str]:
    """`{key: value as text}` of the overrides that the user wrote on the command line; empty outside `hydra.main`."""
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return {}
    return parse_overrides(HydraConfig.get().overrides.task)


def parse_overrides(lines: Iterable[str]) -> dict[str, str]:
    """Splits `key=value` overrides; prefixes `+`, `++` and `~` don't belong to the key."""
    pairs = (line.lstrip("+~").partition("=") for line in lines)
    return {key: value for key, sign, value in pairs if sign}


def apply_changes(config: DictConfig, changes: Iterable[KeyChange], explicit: Mapping[str, str]) -> list[KeyChange]:
    """Sets verl's keys in place.

    Args:
        config: verl's config.
        changes: What to set.
        explicit: Overrides that the user wrote, from `explicit_keys`.

    Returns:
        The changes that changed something, with `old` filled in.

    Raises:
        ConfigError: The user wrote the same key with another value.
    """
    applied = []
    for change in changes:
        old = OmegaConf.select(config, change.key, default=None, throw_on_missing=False)
        old = OmegaConf.to_container(old) if isinstance(old, DictConfig | ListConfig) else old
        if old == change.new:
            continue
        if change.key in explicit:
            if change.default:
                continue
            raise _contradiction(change, explicit[change.key])
        with open_dict(config):
            OmegaConf.update(config, change.key, change.new, merge=False, force_add=True)
        applied.append(KeyChange(key=change.key, new=change.new, why=change.why, old=old, default=change.default))
        logger.debug("%s=%s (was %s): %s", change.key, change.new, old, change.why)
    return applied


def _contradiction(change: KeyChange, written: str) -> ConfigError:
    return ConfigError(
        change.key,
        expected=f"{change.new}, which {change.why} asks for",
        found=f"{change.key}={written} on the command line",
        consequence="the run does not start, since both can't hold",
        remedy=f"remove {change.key}={written}, or change {change.why}",
    )
