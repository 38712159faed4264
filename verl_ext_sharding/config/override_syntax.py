"""Overrides that Hydra can't read, or takes for a sweep: what to type so that it reads what was meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from verl_ext_sharding.config.arguments import as_argument
from verl_ext_sharding.config.schema import PLUGIN_NAME, takes_list
from verl_ext_sharding.errors import ConfigError

if TYPE_CHECKING:
    from hydra.errors import OverrideParseException

_SWITCH = "trainer.plugin"


def explain(lines: Sequence[str], *, sweeps: bool = True, asked: bool = False) -> ConfigError | None:
    """A better error for the first override that Hydra refuses as it is written, or None where it reads them all.

    Args:
        lines: The overrides as typed.
        sweeps: Whether a sweep is refused: the run is no `--multirun`.
        asked: The run asks for the plugin; else it does if an override says so. In any other run, only keys of ours count.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    asked = asked or f"{_SWITCH}={PLUGIN_NAME}" in lines
    parser = OverridesParser.create()
    for index, line in enumerate(lines):
        if not asked and not _is_ours(_key(line)):
            continue
        try:
            (override,) = parser.parse_overrides([line])
        except OverrideParseException as error:
            return _unreadable(line, lines[index + 1 :], error)
        if sweeps and override.is_sweep_override() and not override.is_hydra_override():
            return _swept(override)
    return None


def _key(line: str) -> str:
    return line.lstrip("+~").partition("=")[0]


def _is_ours(key: str) -> bool:
    return key in (_SWITCH, PLUGIN_NAME) or key.startswith(f"{PLUGIN_NAME}.")


def _unreadable(line: str, following: Sequence[str], error: OverrideParseException) -> ConfigError:
    meant = next((text for text in _whole(line, following) if _is_readable(text)), None)
    quoted = "write key=value, in single quotes where it has braces, quotes or spaces, which a shell takes for its own"
    return ConfigError(
        _key(line) or "the overrides",
        expected="key=value, as Hydra reads it",
        found=f"{line}: {str(error.message).splitlines()[0]}",
        consequence="the run does not start",
        remedy=quoted if meant is None else as_argument(meant),
    )


def _whole(line: str, following: Sequence[str]) -> Iterator[str]:
    """What a word may be a part of: a shell makes two of `[2, 3]`; or a list or map without its end."""
    for end in range(1, len(following) + 1):
        yield " ".join([line, *following[:end]])
    for bracket in "]}":
        yield f"{line}{bracket}"


def _is_readable(line: str) -> bool:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if "=" not in line:
        return False
    try:
        OverridesParser.create().parse_override(line)
    except HydraException:
        return False
    return True


def _swept(override: Any) -> ConfigError:
    """The error for several values without brackets, which Hydra takes for those of several runs."""
    key, element = override.key_or_group, override.get_key_element()
    values = _values(override)
    is_list = _takes_list(key, values)
    ways = [as_argument(f"{element}=[{','.join(values)}]")] if is_list is not False else []
    if not is_list:
        ways.append(as_argument(f"{element}={PLUGIN_NAME if key == _SWITCH else values[0]}"))
    kinds = {True: "a list in brackets", False: "one value", None: "one value, or a list in brackets"}
    return ConfigError(
        key,
        expected=kinds[is_list],
        found=f"{override.input_line}, which Hydra takes for a sweep over several runs (--multirun)",
        consequence="the run does not start",
        remedy=", or ".join(ways),
    )


def _takes_list(key: str, values: Sequence[str]) -> bool | None:
    """Whether a key takes a list; None: it may. Of verl's keys, which have no types, those of numbers take one."""
    if key in (_SWITCH, PLUGIN_NAME):
        return False
    if not _is_ours(key) and all(value.replace(".", "").isdecimal() for value in values):
        return False
    return takes_list(key)


def _values(override: Any) -> list[str]:
    """The values of a sweep, as Hydra reads them."""
    from hydra.errors import HydraException

    try:
        return [text.replace("\\:", ":") for text in override.sweep_string_iterator()]
    except HydraException:  # a pattern, or an interval
        return ["<value>"]
