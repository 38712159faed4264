"""Versions: ours, the range of verl that we support, and what is installed."""

from __future__ import annotations

import re
from importlib import metadata

__version__ = "0.1.0"

VERL_RANGE = ">=0.9,<0.10"
"""The verl releases that this version supports, as in setup.py."""

VERL_TESTED = ("0.9.0", "0.9.1")
"""The releases whose sources every patch point is checked against."""


def installed(distribution: str) -> str | None:
    """Version of an installed distribution, or None. Reads metadata only, imports nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def in_range(version: str, specifier: str = VERL_RANGE) -> bool:
    """Whether a release lies in a range such as ">=0.9,<0.10". Pre-release suffixes are ignored.

    Args:
        version: A version such as "0.9.1" or "0.9.1.dev0".
        specifier: Comma-separated clauses of `>=`, `>`, `<=`, `<`, `==`.
    """
    release = _release(version)
    compare = {
        ">=": lambda bound: release >= bound,
        "<=": lambda bound: release <= bound,
        "==": lambda bound: release == bound,
        ">": lambda bound: release > bound,
        "<": lambda bound: release < bound,
    }
    for clause in specifier.split(","):
        match = re.fullmatch(r"\s*(>=|<=|==|>|<)\s*([0-9.]+)\s*", clause)
        assert match is not None, f"not a version clause: {clause!r}"
        if not compare[match[1]](_release(match[2])):
            return False
    return True


def _release(version: str) -> tuple[int, int, int]:
    numbers = [int(part) for part in re.findall(r"\d+", re.split(r"[a-z+]", version, maxsplit=1)[0])]
    major, minor, patch = [*numbers, 0, 0, 0][:3]
    return major, minor, patch
