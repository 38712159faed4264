"""Overrides as they are typed: values as Hydra reads them, quoted where a shell would change them. Standard library only."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

_PLAIN = re.compile(r"(\$\{[\w.:,]+\}|[\w/.:+%@?|*-])+")
"""Text that Hydra's grammar takes without quotes."""

_SHELL = re.compile(r"[{}'\"\s$&;|()`\\]")
"""What a shell takes for its own: bash makes two words of `{a:1,b:2}`."""

_IN_QUOTES = re.compile(r'["$`\\!]')
"""What a shell still takes for its own between double quotes."""


def as_override(value: Any) -> str:
    """A value as Hydra reads it on the command line.

    Args:
        value: A plain value, list or mapping.
    """
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{as_override(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(as_override, value)) + "]"
    text = str(value)
    if not isinstance(value, str) or _PLAIN.fullmatch(text):
        return text
    return "'" + text.replace("'", "\\'") + "'"


def as_argument(override: str) -> str:
    """An override as one types it into a shell.

    Args:
        override: `key=value`, as Hydra reads it.
    """
    if not _SHELL.search(override):
        return override
    return f'"{override}"' if "'" in override and not _IN_QUOTES.search(override) else shlex.quote(override)
