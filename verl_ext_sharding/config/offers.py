"""What to type in place of a value that a key of `sharding` does not take: as near to what was meant as there is."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Union

from verl_ext_sharding.config.arguments import as_override
from verl_ext_sharding.config.checkpointing_policy import read_policy
from verl_ext_sharding.errors import ConfigError, did_you_mean

_SWITCHES = {
    "true": ("1", "yes", "on", "enable", "enabled"),
    "false": ("0", "no", "off", "disable", "disabled", "none", "never"),
}
"""Words for true and false that Hydra reads as text or numbers."""

_NOTHING = ("none", "null", "nil", "default")
_THOUSANDS = re.compile(r"(\d+)k", re.IGNORECASE)


def options_of(hint: Any) -> list[Any]:
    """The alternatives of a type hint: types, dataclasses, and the values of a `Literal`."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [option for part in typing.get_args(hint) for option in options_of(part)]
    if typing.get_origin(hint) is Literal:
        return list(typing.get_args(hint))
    return [hint]


def is_block(option: Any) -> bool:
    """Whether an alternative is a block of keys."""
    return isinstance(option, type) and dataclasses.is_dataclass(option)


def names_of(block: Any) -> list[str]:
    """The keys of a block."""
    return [field.name for field in dataclasses.fields(block)]


def is_off(value: Any) -> bool:
    """Whether a value is meant to switch something off."""
    return value is False or str(value).lower() in _SWITCHES["false"]


def instead(options: Sequence[Any], value: Any) -> str:
    """What may stand behind a key instead of a value: `=<value>`, or `.<key>=<value>` for one key of a block.

    Args:
        options: Of the key, from `options_of`.
        value: What was written.
    """
    if is_block(options[0]) and (found := _in_block(options[0], value)) is not None:
        return found
    block = next(filter(is_block, options), None)
    if block is not None and (pair := _as_pair(block, value)) is not None:
        return f"={{{pair}}}"
    text, words = str(value).lower(), [option for option in options if isinstance(option, str)]
    switch = next((name for name, spellings in _SWITCHES.items() if text in spellings), None)
    if bool in options and switch:
        return f"={switch}"
    if type(None) in options and text in _NOTHING:
        return "=null"
    if int in options and isinstance(value, float) and value.is_integer():
        return f"={int(value)}"
    if int in options and (thousands := _THOUSANDS.fullmatch(text)):
        return f"={1024 * int(thousands[1])}"
    close = did_you_mean(text, words, at_least=0.5) or next(
        (word for word in words if text and word.startswith(text)), None
    )
    return f"={close}" if close else _example(options)


def _as_pair(block: Any, value: Any) -> str | None:
    """A key of a block with its value where these stand without braces, which a shell takes if nothing quotes them; or a budget."""
    name, sign, _ = str(value).partition(":")
    if sign and name in names_of(block):
        return str(value)
    if "budget" not in names_of(block) or isinstance(value, bool):
        return None
    with suppress(ConfigError):
        read_policy({"budget": value}, key="")
        return f"budget:{value}"
    return None


def _in_block(block: Any, value: Any) -> str | None:
    """What a value in the place of a block was meant to set in it, or None."""
    names = names_of(block)
    if "devices" in names and isinstance(value, int | list) and not isinstance(value, bool):
        return f".devices={as_override(value)}"
    hints = typing.get_type_hints(block)
    switches = [name for name in names if bool in options_of(hints[name])]
    if switches == names and is_off(value):
        return _switched(names, "false")
    if isinstance(value, list) and value and set(map(str, value)) <= set(switches):
        return _switched(map(str, value), "true")
    return None


def _switched(names: Iterable[str], to: str) -> str:
    return "={" + ",".join(f"{name}:{to}" for name in names) + "}"


def _example(options: Sequence[Any]) -> str:
    """What may stand behind a key: a value with its `=`, or the first key of a block with one."""
    if is_block(options[0]):
        first = names_of(options[0])[0]
        return f".{first}{_example(options_of(typing.get_type_hints(options[0])[first]))}"
    for option in options:
        if isinstance(option, str):
            return f"={option}"
    plain = [typing.get_origin(option) or option for option in options]
    examples = {list: "[0]", bool: "true", int: "1", float: "0.5", str: "auto" if Mapping in plain else "<text>"}
    return "=" + next((examples[option] for option in plain if option in examples), "null")
