"""Changes to verl's own keys: what we set, why, and the check that the user did not write something else."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from verl_ext_sharding.config.arguments import as_argument, as_override
from verl_ext_sharding.config.dtypes import full_dtype
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
        implied: Ours acts in the place of verl's key, which stays as it is; another value that the user wrote contradicts it.
        added: verl's config files have no such key, filled in by `apply_changes`: an override of it starts with `+`.
    """

    key: str
    new: Any
    why: str
    old: Any = None
    default: bool = False
    implied: bool = False
    added: bool = False


def explicit_keys() -> dict[str, str]:
    """`{key: value as text}` of the overrides that the user wrote on the command line; empty outside `hydra.main`."""
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return {}
    return parse_overrides(HydraConfig.get().overrides.task)


def added_keys() -> set[str]:
    """Keys of the overrides that the user wrote with a `+`, which Hydra takes by any name; empty outside `hydra.main`."""
    from hydra.core.hydra_config import HydraConfig

    lines = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    return set(parse_overrides(line for line in lines if line.startswith("+")))


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
        ConfigError: The user wrote the same keys with other values.
    """
    applied, refused = [], []
    for change in changes:
        old = OmegaConf.select(config, change.key, default=None, throw_on_missing=False)
        old = OmegaConf.to_container(old) if isinstance(old, DictConfig | ListConfig) else old
        if _same(old, change.new):
            continue
        written = [key for key in explicit if _differ(config, change, key, explicit[key])]
        if written and change.default:
            continue
        if written:
            refused.append((change, f"{written[0]}={explicit[written[0]]}"))
            continue
        if change.implied:
            continue
        added = not _exists(config, change.key)
        with open_dict(config):
            OmegaConf.update(config, change.key, change.new, merge=False, force_add=True)
        applied.append(replace(change, old=old, added=added))
        logger.debug("%s=%s (was %s): %s", change.key, change.new, old, change.why)
    if refused:
        raise _contradiction(refused)
    return applied


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal to verl, which reads a dtype in several spellings."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return bool(full_dtype(one) == full_dtype(other))


def _differ(config: DictConfig, change: KeyChange, key: str, text: str) -> bool:
    """Whether an override that the user wrote sets a changed key, or a part of it, to something else.

    Args:
        config: verl's config, before the change.
        change: A change whose value is not in the config yet.
        key: A key that the user wrote: the changed one, one below it, or a block that holds it.
        text: The value that the user wrote.
    """
    if key == change.key:
        return True
    if change.key.startswith(f"{key}."):
        name = change.key.removeprefix(f"{key}.").partition(".")[0]
        return re.search(rf"\b{re.escape(name)}\s*:", text) is not None
    if key.startswith(f"{change.key}."):
        wanted: Any = change.new
        for name in key.removeprefix(f"{change.key}.").split("."):
            wanted = wanted.get(name) if isinstance(wanted, Mapping) else None
        return not _same(OmegaConf.select(config, key, default=None, throw_on_missing=False), wanted)
    return False


def _exists(config: DictConfig, key: str) -> bool:
    """Whether a key is in the config, whatever its value."""
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    return isinstance(node, DictConfig) and name in node.keys()  # noqa: SIM118  (`in` is false for null and ???)


def _contradiction(refused: Sequence[tuple[KeyChange, str]]) -> ConfigError:
    """One error for all that the user wrote and a request contradicts, so that one attempt repairs them all."""
    changes = [change for change, _ in refused]
    asked = " and ".join(dict.fromkeys(change.why for change in changes))
    written = list(dict.fromkeys(line for _, line in refused))
    expected = ", ".join(f"{change.key}={as_override(change.new)}" for change in changes)
    return ConfigError(
        changes[0].key,
        expected=f"{as_override(changes[0].new) if len(changes) == 1 else expected}, which {asked} asks for",
        found=f"{' '.join(written)} on the command line",
        consequence="the run does not start, since both can't hold",
        remedy=f"remove {' '.join(map(as_argument, written))}, or change {asked}",
    )
