"""Values of a composed config as the user wrote them: numbers that are numbers, interpolations that resolve."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext_sharding.errors import ConfigError


def whole_number(key: str, value: Any, *, instead: int, at_least: int = 1, override: str | None = None) -> int:
    """A value that counts something, which verl uses as it stands.

    Args:
        key: Its key, for the message.
        value: As the config has it.
        instead: What the message offers.
        at_least: The smallest that is accepted.
        override: What to type before the `=`, where it isn't the key.

    Raises:
        ConfigError: The value is no whole number, or too small.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= at_least:
        return value
    spelt = None if isinstance(value, int) else _spelt_number(value)
    found = f"the text '{value}'" if spelt is not None and isinstance(value, str) else str(value)
    raise ConfigError(
        key,
        expected="a whole number" + (f", {at_least} or more" if at_least >= 0 else ""),
        found="null" if value is None else found,
        consequence="the run does not start",
        remedy=f"{override or key}={instead if spelt is None or spelt < at_least else spelt}",
    )


def _spelt_number(value: Any) -> int | None:
    """The whole number that a text or a float stands for, such as `'8'` or `1e3`."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return int(number) if number.is_integer() else None


@contextmanager
def resolving(config: DictConfig) -> Iterator[None]:
    """Turns OmegaConf's errors, such as an interpolation without a target, into ours.

    Args:
        config: The config that is read.

    Raises:
        ConfigError: Names the key whose value can't be read.
    """
    try:
        yield
    except OmegaConfBaseException as error:
        raise unreadable(error, config) from error


def unreadable(error: OmegaConfBaseException, config: DictConfig | None = None) -> ConfigError:
    """The error for a value that OmegaConf can't read, with the key where the mistake was written.

    Args:
        error: OmegaConf's, whose key may be one that only refers to the wrong one.
        config: The config that was read, where there is one already.
    """
    message = str(error.msg or error).splitlines()[0]
    missing = re.search(r"'([^']+)'", message)
    written = _written(config, missing[1]) if config is not None and missing else None
    key, value = written or (str(error.full_key or "") or None, None)
    variable = f"export {missing[1]}=<value>, or " if missing and "Environment variable" in message else ""
    return ConfigError(
        key or "the config",
        expected="a value, or an interpolation of something that is there",
        found=f"{value}: {message}" if value else message,
        consequence="the run does not start",
        remedy=f"{variable}{key}=<value>" if key else "correct the value named above",
    )


def _written(config: DictConfig, name: str) -> tuple[str, str] | None:
    """The first key whose text has an interpolation of a name, with that text."""
    stack: list[tuple[str, Any]] = [("", OmegaConf.to_container(config, resolve=False))]
    while stack:
        path, node = stack.pop(0)
        if isinstance(node, dict):
            stack += [(f"{path}.{key}" if path else str(key), item) for key, item in node.items()]
        elif isinstance(node, list):
            stack += [(path, item) for item in node]
        elif isinstance(node, str) and re.search(rf"\$\{{[^}}]*\b{re.escape(name)}\b", node):
            return path, node
    return None
