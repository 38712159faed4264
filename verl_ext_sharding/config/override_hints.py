"""Errors of Hydra overrides in the user's words: which key was meant, which type is right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext_sharding.config import old_keys
from verl_ext_sharding.config.changes import as_override
from verl_ext_sharding.config.schema import PLUGIN_NAME, unknown_key
from verl_ext_sharding.config.translate import request_of
from verl_ext_sharding.errors import ConfigError, did_you_mean


def explain(error: Exception, overrides: Iterable[Any], config: DictConfig) -> ConfigError | None:
    """A better error for an override that Hydra refused, or None when we know nothing better.

    Args:
        error: Hydra's exception.
        overrides: The parsed overrides.
        config: The config that they were applied to.
    """
    if "sharding" not in config:
        return None
    overrides = list(overrides)
    switched_on = OmegaConf.select(config, "trainer.plugin", default=None) == PLUGIN_NAME or any(
        o.key_or_group == "trainer.plugin" and o.value() == PLUGIN_NAME for o in overrides
    )
    answers = _old_keys(overrides, config) if switched_on else []
    if answers:
        return old_keys.refusal(answers)
    for override in overrides:
        key, value = override.key_or_group, override.value()
        if f"'{key}'" in str(error) or override.input_line in str(error):
            path, name, known = _first_missing(config, key, value)
            if name is None or not _is_ours(f"{path}.{name}" if path else name, value):
                return None
            return unknown_key(path, name, known) if known else _no_block(path, key, override.input_line)
    return None


def _is_ours(key: str, value: Any) -> bool:
    """Whether an override was meant for this package, as far as a misspelt one tells."""
    first = key.partition(".")[0]
    return did_you_mean(first, ["sharding"]) is not None or key.startswith("trainer.plug") or value == PLUGIN_NAME


def _no_block(path: str, key: str, line: str) -> ConfigError:
    """The error for a key below one that has no block: null, or a plain value."""
    below = key.removeprefix(f"{path}.")
    value = line.partition("=")[2]
    for name in reversed(below.split(".")):
        value = f"{{{name}:{value}}}"
    return ConfigError(
        key,
        expected=f"a value for {path} as a whole",
        found=f"{path} is no block, so it has no {below}",
        consequence="the run does not start",
        remedy=f"'{path}={value}'",
    )


def _old_keys(overrides: Iterable[Any], config: DictConfig) -> list[old_keys.Answer]:
    """What became of the keys of an older verl among the overrides; a block as a value counts key by key."""
    known = known_keys(config)
    found = []
    for override in overrides:
        if _first_missing(config, override.key_or_group, override.value())[1] is not None:
            found += [old_keys.answer(key, text, known) for key, text in _written(override)]
    return [answer for answer in found if answer is not None]


def _written(override: Any) -> Iterator[tuple[str, str | None]]:
    """The dotted keys that an override sets, as typed, and their values."""
    key, _, text = override.input_line.partition("=")
    stack: list[tuple[str, Any]] = [(key, override.value())]
    if not isinstance(override.value(), dict):
        yield key, text or None
        return
    while stack:
        path, value = stack.pop(0)
        if isinstance(value, dict) and value:
            stack = [(f"{path}.{name}", item) for name, item in value.items()] + stack
        else:
            yield path, as_override(value)


def known_keys(config: DictConfig) -> set[str]:
    """Every dotted key of a config, blocks included."""
    keys: set[str] = set()
    stack: list[tuple[str, Any]] = [("", config)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            for name in node:
                child = f"{path}.{name}" if path else str(name)
                keys.add(child)
                stack.append((child, node._get_node(name)))
    return keys


def _first_missing(config: DictConfig, key: str, value: Any = None) -> tuple[str, str | None, list[str]]:
    """Where a dotted key, or a block that is its value, leaves the tree.

    Returns:
        The path so far, the missing name (None: nothing is missing), the names that there are.
    """
    node: Any = config
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, DictConfig) or part not in node:
            known = [str(name) for name in node] if isinstance(node, DictConfig) else []
            return ".".join(parts[:depth]), part, known
        node = node._get_node(part)
    if isinstance(value, dict) and isinstance(node, DictConfig) and not node._is_none():
        for name, item in value.items():
            found = _first_missing(config, f"{key}.{name}", item)
            if found[1] is not None:
                return found
    return key, None, []


def check_types(config: DictConfig) -> None:
    """Checks the composed `sharding` block.

    Raises:
        ConfigCompositionException: A value has the wrong type or range.
    """
    from hydra.errors import ConfigCompositionException

    if not isinstance(config, DictConfig) or config.get("sharding") is None:
        return
    try:
        block = OmegaConf.create({"sharding": OmegaConf.to_container(config.sharding, resolve=True)})
    except OmegaConfBaseException:
        return  # an interpolation that only the run can resolve; the driver checks again
    try:
        request_of(block)
    except ConfigError as error:
        raise ConfigCompositionException(str(error)) from error
