"""Reads what the remedy of an error says to type."""

from __future__ import annotations

import re


def number_after(key: str, remedy: str) -> int:
    """The number that a remedy gives to a key."""
    found = re.search(rf"{re.escape(key)}=(\d+)", remedy)
    assert found is not None, f"no number for {key} in {remedy!r}"
    return int(found[1])
