"""Answers a key that an older release of verl had with the key and value to write now, or with why it is gone.

Hydra itself only says that a key is unknown. What became of each key stands in `old_keys_table`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from dataclasses import dataclass

from verl_ext_sharding.config.old_keys_table import REPLACEMENTS, TRAINING_ROLES, Replacement
from verl_ext_sharding.errors import ConfigError, did_you_mean

_PREFIXES = "+~"
_NULLS = ("null", "none", "~")
_ROLE = "<role>"
_ENGINES = {"megatron": "megatron", "veomni": "veomni", "torchtitan": "torchtitan", "fsdp_config": "dp", "fsdp": "dp"}
"""`model_engine` that has a block of this name in its config."""


@dataclass(kw_only=True, frozen=True)
class Answer:
    """What to write instead of an old key.

    Args:
        key: The old key, without Hydra's `+` or `~`.
        value: The old value as typed, None when there was none.
        since: The first release of verl without the key.
        new_key: Where it is now, or None: gone.
        overrides: What to type. Empty: nothing takes its place.
        reason: Why it moved, or why it is gone, as a sentence without its full stop.
        available: Whether this run's config has `new_key`; it may belong to another model engine.
    """

    key: str
    value: str | None
    since: str
    new_key: str | None
    overrides: tuple[str, ...]
    reason: str
    available: bool

    @property
    def remedy(self) -> str:
        """What to type, as one line."""
        if not self.overrides:
            return f"remove {self.key}"
        written = f"write {' '.join(self.overrides)}"
        if self.available:
            return written
        engine = next((name for part, name in _ENGINES.items() if f".{part}." in f"{self.new_key}."), None)
        return (
            f"{written} with {f'model_engine={engine}' if engine else 'an engine that has it'}, else remove {self.key}"
        )

    @property
    def message(self) -> str:
        """The whole answer, as one line."""
        return f"{self.key} is gone since verl {self.since}: {self.remedy} ({self.reason})"

    def error(self) -> ConfigError:
        """The answer as the error that ends the run."""
        written = self.key if self.value is None else f"{self.key}={self.value}"
        return ConfigError(
            f"{self.key}: a key of an older verl",
            expected=f"a key of verl {self.since} or later",
            found=written,
            consequence=f"the run does not start; {self.reason}",
            remedy=self.remedy,
        )


def answer(key: str, value: str | None, known_keys: Collection[str]) -> Answer | None:
    """What became of a key of verl 0.4 to 0.9.0.

    Args:
        key: Dotted key from the command line or from a recipe's yaml; Hydra's `+`, `++` and `~` may stand before it.
        value: Its value as typed, or None.
        known_keys: Every dotted key of this run's composed config, blocks included.

    Returns:
        The answer, or None for a key that this run's config has or that verl never had.
    """
    bare = key.lstrip(_PREFIXES)
    if bare in known_keys:
        return None
    for replacement in REPLACEMENTS:
        match = _pattern(replacement.old).fullmatch(bare)
        if match is not None:
            place, reason, available = _place(replacement, match, known_keys)
            return Answer(
                key=bare,
                value=value,
                since=replacement.since,
                new_key=place,
                overrides=() if place is None else _overrides(place, value, replacement, deletes=key.startswith("~")),
                reason=reason,
                available=available,
            )
    return None


def _place(replacement: Replacement, match: re.Match[str], known_keys: Collection[str]) -> tuple[str | None, str, bool]:
    """Where the key is now, why, and whether this run's config has that place."""
    reason = _fill(replacement.reason, match)
    places = [_fill(place, match) for place in replacement.new]
    for place in places:
        if _is_known(place, known_keys):
            return place, reason, True
    if not places:
        return None, reason, False
    block, _, leaf = places[0].rpartition(".")
    siblings = [known[len(block) + 1 :] for known in known_keys if known.startswith(f"{block}.")]
    if not siblings:
        return places[0], reason, False
    close = did_you_mean(leaf, siblings)  # the block moved as said, but never had such a key
    return f"{block}.{close}" if close else None, f"{reason}; {block} has no {leaf}", close is not None


def _overrides(place: str, value: str | None, replacement: Replacement, *, deletes: bool) -> tuple[str, ...]:
    if deletes:
        return (f"~{place}",)
    if value is None or replacement.value is None:
        return (*replacement.also, f"{place}={'<value>' if value is None else value}")
    if value.lower() in _NULLS:
        return ()
    try:
        return (*replacement.also, f"{place}={replacement.value(value)}")
    except ValueError:
        return (*replacement.also, f"{place}=<value>")


def _is_known(place: str, known_keys: Collection[str]) -> bool:
    if place.startswith("+"):
        return _open_block(place[1:], known_keys)
    return place in known_keys


def _open_block(key: str, known_keys: Collection[str]) -> bool:
    """Whether some block above a key exists, so that Hydra can add the key there."""
    blocks = key.split(".")
    return any(".".join(blocks[:depth]) in known_keys for depth in range(2, len(blocks)))


def _fill(text: str, match: re.Match[str]) -> str:
    """Repeats in a place or a reason what the pattern matched."""
    groups = match.groupdict()
    if groups.get("rest") is not None:
        text = re.sub(r"\.\*$", lambda _: groups["rest"], text)
    return text.replace(_ROLE, groups.get("role") or _ROLE)


@functools.cache
def _pattern(old: str) -> re.Pattern[str]:
    """The regular expression of a table entry's `old`."""
    head = old.removesuffix(".*")
    roles = "|".join(map(re.escape, TRAINING_ROLES))
    expression = re.escape(head).replace(re.escape(_ROLE), f"(?P<role>{roles})")
    return re.compile(expression + (r"(?P<rest>(\.[^.=]+)*)" if head != old else ""))
