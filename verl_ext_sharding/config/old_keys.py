"""Answers a key that an older release of verl had with the key and value to write now, or with why it is gone.

Hydra itself only says that a key is unknown. What became of each stands in `old_keys_table` and `older_keys_table`, for SFT
in `old_sft_keys`, and in `unread_keys` for those that verl's yaml still has and nothing reads.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from verl_ext_sharding.config.arguments import as_argument
from verl_ext_sharding.config.old_keys_table import SINCE_0_7, TRAINING_ROLES, Replacement
from verl_ext_sharding.config.old_sft_keys import SFT
from verl_ext_sharding.config.older_keys_table import BEFORE_0_4_1, BEFORE_0_7
from verl_ext_sharding.config.unread_keys import UNREAD
from verl_ext_sharding.errors import ConfigError, did_you_mean

REPLACEMENTS = SINCE_0_7 + BEFORE_0_7 + BEFORE_0_4_1
"""Keys of PPO configs; the first that matches wins."""

_PREFIXES = "+~"
_NULLS = ("null", "none", "~")
_ROLE = "<role>"
_ENGINES = {"megatron": "megatron", "veomni": "veomni", "torchtitan": "torchtitan", "fsdp_config": "dp", "fsdp": "dp"}
"""`model_engine` that has a block of this name in its config."""


@dataclass(kw_only=True, frozen=True)
class Answer:
    """What to write instead of an old key.

    Args:
        key: The old key, without Hydra's `+`; a deletion keeps its `~`.
        value: The old value as typed, None when there was none.
        since: The first release of verl without the key.
        new_key: Where it is now, or None: gone.
        overrides: What to type. Empty: nothing takes its place.
        reason: Why it moved, or why it is gone, as a sentence without its full stop.
        available: Whether this run's config has `new_key`; it may belong to another model engine.
        needs: Those of `overrides` that what another key asks for gives way to.
    """

    key: str
    value: str | None
    since: str
    new_key: str | None
    overrides: tuple[str, ...]
    reason: str
    available: bool
    needs: tuple[str, ...] = ()

    @property
    def remedy(self) -> str:
        """What to type, as one line."""
        if not self.overrides:
            return f"remove {self.key}"
        written = f"write {' '.join(map(as_argument, self.overrides))}"
        if self.available:
            return written
        engine = next((name for part, name in _ENGINES.items() if f".{part}." in f"{self.new_key}."), None)
        return (
            f"{written} with {f'model_engine={engine}' if engine else 'an engine that has it'}, else remove {self.key}"
        )

    @property
    def written(self) -> str:
        """The old key as it was typed, with its value."""
        return self.key if self.value is None else f"{self.key}={self.value}"

    def error(self) -> ConfigError:
        """The answer as the error that ends the run."""
        return refusal([self])


def refusal(answers: Sequence[Answer], undo: Iterable[str] = ()) -> ConfigError:
    """One error for all old keys of a run, so that one attempt repairs them all.

    Args:
        answers: One or more.
        undo: Overrides that take keys of a yaml file back; empty: all old keys stand on the command line.
    """
    first = answers[0]
    more = f" and {len(answers) - 1} more" if len(answers) > 1 else ""
    remedy = _remedy(answers)
    typed = [*undo, *_moved(answers)]
    return ConfigError(
        f"{first.key}{more}: {'keys' if more else 'a key'} of an older verl",
        expected=f"{'keys' if more else 'a key'} of verl {max((a.since for a in answers), key=_release)} or later",
        found=", ".join(answer.written for answer in answers),
        consequence=f"the run does not start; {'; '.join(dict.fromkeys(answer.reason for answer in answers))}",
        remedy=f"{remedy} in the yaml file; or type {' '.join(map(as_argument, typed))}" if undo else remedy,
    )


def _remedy(answers: Sequence[Answer]) -> str:
    """What to write and what to remove, each once."""
    moved = _moved(answers)
    gone = [answer.key for answer in answers if not answer.overrides]
    elsewhere = [answer.remedy for answer in answers if answer.overrides and not answer.available]
    parts = [f"write {' '.join(map(as_argument, moved))}"] if moved else []
    parts += [f"remove {', '.join(gone)}"] if gone else []
    return "; ".join(parts + elsewhere)


def _moved(answers: Iterable[Answer]) -> list[str]:
    """What to type for the keys that moved, each once.

    A value of the user's wins over one that goes along with another key, and gives way to one that another key needs.
    """
    there = [answer for answer in answers if answer.available and answer.overrides]
    users = {answer.overrides[-1].partition("=")[0] for answer in there}
    along = [line for answer in there for line in answer.overrides[:-1] if line.partition("=")[0] not in users]
    needed = {line.partition("=")[0]: line for answer in there for line in answer.needs}
    lines = [*needed.values(), *along, *(answer.overrides[-1] for answer in there)]
    return list(dict.fromkeys(line for line in lines if needed.get(line.partition("=")[0], line) == line))


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def answer(key: str, value: str | None, known_keys: Collection[str]) -> Answer | None:
    """What became of a key of verl 0.1 to 0.9.0.

    Args:
        key: Dotted key from the command line or from a recipe's yaml; Hydra's `+`, `++` and `~` may stand before it.
        value: Its value as typed, or None.
        known_keys: Every dotted key of this run's composed config, blocks included.

    Returns:
        The answer, or None for a key that this run's config has or that verl never had.
    """
    bare = key.lstrip(_PREFIXES)
    found = None if bare in known_keys else _find(_table(known_keys), bare, value, known_keys)
    if found is None or not key.startswith("~"):
        return found
    # Deleting it in its new place could take away what verl reads there, a whole block even.
    reason = f"{found.reason}; so there is nothing left to delete"
    return replace(found, key=f"~{bare}", new_key=None, overrides=(), reason=reason, available=False)


def _table(known_keys: Collection[str]) -> Iterable[Replacement]:
    """The old keys of a PPO job, or of an SFT job, whose config has one engine and no actor."""
    is_sft = "engine" in known_keys and "actor_rollout_ref" not in known_keys
    return SFT if is_sft else REPLACEMENTS + UNREAD


def answer_unread(key: str, value: str, known_keys: Collection[str]) -> Answer | None:
    """Where to write a value of a key that verl's yaml has and nothing reads, or None for any other key.

    Args:
        key: Dotted key of a composed config.
        value: Its value as one would type it.
        known_keys: Every dotted key that verl has, blocks included.
    """
    return _find(UNREAD, key, value, known_keys)


def _find(
    replacements: Iterable[Replacement], key: str, value: str | None, known_keys: Collection[str]
) -> Answer | None:
    for replacement in replacements:
        match = _pattern(replacement.old).fullmatch(key)
        if match is not None:
            place, reason, available = _place(replacement, match, known_keys)
            return Answer(
                key=key,
                value=value,
                since=replacement.since,
                new_key=place,
                overrides=() if place is None else _overrides(place, value, replacement),
                reason=reason,
                available=available,
                needs=_needs(value, replacement),
            )
    return None


def _place(replacement: Replacement, match: re.Match[str], known_keys: Collection[str]) -> tuple[str | None, str, bool]:
    """Where the key is now, why, and whether this run's config has that place."""
    reason = _fill(replacement.reason, match)
    places = [_fill(place, match) for place in replacement.new]
    for place in places:
        if place in known_keys or (place.startswith("+") and _can_be_added(place[1:], known_keys)):
            return place, reason, True
    if not places:
        return None, reason, False
    block, _, leaf = places[0].rpartition(".")
    siblings = [known[len(block) + 1 :] for known in known_keys if known.startswith(f"{block}.")]
    if not siblings:
        return places[0], reason, False
    moved = replacement.old.endswith(".*")  # the block did as said, but never had such a key
    close = did_you_mean(leaf, siblings) if moved else None
    return f"{block}.{close}" if close else None, f"{reason}; {block} has no {leaf}", close is not None


def _can_be_added(place: str, known_keys: Collection[str]) -> bool:
    """Whether a `+` makes a key that verl reads: one below an engine's block is read by that engine alone."""
    parts = place.split(".")
    missing = {part for depth, part in enumerate(parts, start=1) if ".".join(parts[:depth]) not in known_keys}
    return parts[0] not in missing and not missing & _ENGINES.keys()


def _overrides(place: str, value: str | None, replacement: Replacement) -> tuple[str, ...]:
    along = (*_needs(value, replacement), *replacement.also)
    if value is None or replacement.value is None:
        return (*along, f"{place}={'<value>' if value is None else value}")
    if value.lower() in _NULLS:
        return ()
    try:
        return (*along, f"{place}={replacement.value(value)}")
    except ValueError:
        return (*along, f"{place}=<value>")


def _needs(value: str | None, replacement: Replacement) -> tuple[str, ...]:
    return () if value is not None and value.lower() == "false" else replacement.needs


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
