"""The errors of this package, all of one shape: subject, expected, found, consequence, remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from types import TracebackType

ROLE = "<role>"
"""Stands in an error's fields for a role that what raises it does not know; see `ShardingError.name_role`."""


class ShardingError(Exception):
    """Base of every error that this package raises on purpose.

    Args:
        subject: What the message is about, in the user's words (a key, a role, a node).
        expected: What would have been right.
        found: What was there instead.
        consequence: What happens now.
        remedy: What to type or change; ends in an override or a command wherever one exists.
    """

    def __init__(self, subject: str, *, expected: str, found: str, consequence: str, remedy: str) -> None:
        super().__init__(subject, expected, found, consequence, remedy)
        self.subject = subject
        self.expected = expected
        self.found = found
        self.consequence = consequence
        self.remedy = remedy

    def name_role(self, role: str) -> None:
        """Puts a role in place of `ROLE` in every field, so that the fix can be typed as it stands."""
        for field in ("subject", "expected", "found", "consequence", "remedy"):
            setattr(self, field, getattr(self, field).replace(ROLE, role))

    def __str__(self) -> str:
        parts = {"expected": self.expected, "found": self.found, "now": self.consequence, "fix": self.remedy}
        lines = [f"  {f'{name}:':<10}" + str(text).replace("\n", f"\n{' ' * 12}") for name, text in parts.items()]
        return "\n".join([self.subject, *lines])

    def __reduce__(self) -> tuple[object, tuple[type[ShardingError], tuple[str, ...]]]:
        return _rebuild, (type(self), (self.subject, self.expected, self.found, self.consequence, self.remedy))


def _rebuild(cls: type[ShardingError], fields: tuple[str, str, str, str, str]) -> ShardingError:
    """Unpickles an error: Ray carries them from worker to driver."""
    subject, expected, found, consequence, remedy = fields
    return cls(subject, expected=expected, found=found, consequence=consequence, remedy=remedy)


class PlainErrors:
    """Inside the block, errors of ours leave it without our frames and causes: what is wrong stands in the message."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if isinstance(error, ShardingError):
            raise error.with_traceback(None) from None


class ConfigError(ShardingError, ValueError):
    """The user's configuration can't be met as written."""


class PlacementError(ConfigError):
    """The roles can't be placed on the devices as asked."""


class ClusterError(ShardingError, RuntimeError):
    """Ray or a node is not as the run needs it."""


class PatchError(ShardingError, RuntimeError):
    """A patch point doesn't fit the installed verl."""


class TokenIdError(ShardingError, ValueError):
    """A batch holds token ids that a model's embedding has no row for."""


class RewardInputError(ShardingError, ValueError):
    """A sample can't be given to the reward model as it is."""


class RewardServerError(ShardingError, RuntimeError):
    """The reward model's server doesn't answer, or answers with no usable score."""


def first_error_of(process: str) -> str:
    """The beginning of a remedy: where it stands why a process of the run has ended.

    Args:
        process: Its name, such as "vllm server".
    """
    return f"look for the first error of the {process} in the run's output or in Ray's logs (session_latest/logs)"


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its class where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def why_it_ended(error: BaseException) -> str:
    """What Ray says of why an actor has ended, on one line; the first line of the error where it doesn't say.

    Args:
        error: Ray's, whose first line is the same for every reason.
    """
    _, found, reason = str(error).partition("The actor is dead because ")
    return " ".join(reason.split()) if found else first_line(error)


def did_you_mean(name: str, known: Iterable[str], *, at_least: float = 0.6) -> str | None:
    """Returns the known name closest to a misspelt one, or None when none is near.

    Args:
        name: The misspelt one.
        known: The names that there are.
        at_least: How alike they must be, from 0 to 1.
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=at_least)
    return close[0] if close else None


def misspelling_of(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that a name is without doubt meant to be, or None: one may also be new, and just alike.

    Args:
        name: Words with underscores. Each must be spelt as, or nearly as, the known name's; another word or number is
            another name, as are `max_tokens` and `min_tokens`.
        known: The names that there are.
    """
    for other in known:
        words, others = name.split("_"), other.split("_")
        if name == other:
            return None
        if same_letters(name, other):
            return other
        if len(words) != len(others) or re.sub(r"\d", "", name) == re.sub(r"\d", "", other):
            continue
        if all(
            word == right or did_you_mean(word, [right], at_least=0.8)
            for word, right in zip(words, others, strict=True)
        ):
            return other
    return None


def unknown_choice(key: str, found: str, choices: Sequence[str]) -> ConfigError:
    """The error for a value that is none of a key's.

    Args:
        key: The user's key.
        found: What was written.
        choices: What may be; the first is offered where none is like it.
    """
    return ConfigError(
        f"{key}={found}",
        expected=f"one of {', '.join(choices)}",
        found=found,
        consequence="the run stops before the models load",
        remedy=f"{key}={did_you_mean(found, choices) or choices[0]}",
    )


def same_letters(name: str, other: str) -> bool:
    """Whether two names differ in case, hyphens and underscores alone."""
    first, second = (re.sub(r"[-_]", "", text).lower() for text in (name, other))
    return first == second
