"""What a patch point declares about itself (`PatchSpec`) and what became of it in this process (`PatchStatus`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Literal

Process = Literal["driver", "worker"]
State = Literal["pending", "applied", "skipped", "removed", "failed"]

_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")
_TARGET = re.compile(r"[\w.]+:[\w.]+")


@dataclass(kw_only=True, frozen=True, eq=False)
class PatchSpec:
    """One place of another package whose behaviour we replace.

    Args:
        id: `<area>-<effect>`, also the name of the diff in `patches/`.
        target: `package.module:Qual.name` of the function or method that is replaced.
        replacement: The plain module-level function that takes its place. Never a closure and never wrapped, so that
            Ray pickles it by reference. It reaches the original through `patching.original(SPEC)`. In place of a
            classmethod it takes the class first, in place of a staticmethod it takes the bare arguments.
        distribution: Distribution that owns the target ("verl", "hydra-core").
        range: Releases of it that the patch is meant for, such as ">=0.9,<0.10".
        signature: Parameter names of the target, in order, `self` included, without stars.
        fingerprints: `{release: fingerprint}` of the target's source, oldest release first, see `patching.fingerprint`.
        processes: Where it is applied: the driver, Ray workers, or both.
        needed_by: The key of the user's config that makes it necessary, or None when the run works without it.
        upstream_issue: Where the need is known upstream, a URL or "none filed".
        remove_when: What has to happen upstream for the patch to be deleted.
    """

    id: str
    target: str
    replacement: Callable[..., Any]
    distribution: str = "verl"
    range: str = ">=0.9,<0.10"
    signature: tuple[str, ...]
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    processes: frozenset[Process]
    needed_by: str | None
    upstream_issue: str
    remove_when: str

    def __post_init__(self) -> None:
        assert _ID.fullmatch(self.id), f"patch id must be <area>-<effect>: {self.id!r}"
        assert _TARGET.fullmatch(self.target), f"target must be module:Qual.name: {self.target!r}"
        assert isinstance(self.replacement, FunctionType), f"{self.id}: replacement must be a plain function"
        assert self.replacement.__qualname__.isidentifier(), f"{self.id}: replacement must be module-level"
        assert self.replacement.__closure__ is None, f"{self.id}: replacement must not be a closure"
        assert not hasattr(self.replacement, "__wrapped__"), f"{self.id}: replacement must not be wrapped"
        assert self.processes, f"{self.id}: no process to apply it in"

    @property
    def module(self) -> str:
        """Module that holds the target."""
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        """Qualified name of the target inside its module."""
        return self.target.partition(":")[2]

    @property
    def requirement(self) -> str:
        """What to give to pip for a release that the patch was checked against; the range if there is none."""
        newest = list(self.fingerprints)[-1:]
        return f"{self.distribution}=={newest[0]}" if newest else f"{self.distribution}{self.range}"

    def status(self, state: State, *, reason: str = "", fingerprint_known: bool | None = None) -> PatchStatus:
        """This patch's line in a table of patches; the arguments are those of `PatchStatus`."""
        return PatchStatus(
            id=self.id,
            target=self.target,
            state=state,
            reason=reason,
            needed_by=self.needed_by,
            fingerprint_known=fingerprint_known,
            processes=self.processes,
            upstream_issue=self.upstream_issue,
            remove_when=self.remove_when,
        )


@dataclass(kw_only=True, frozen=True)
class PatchStatus:
    """What became of one patch in this process; `doctor` prints it, driver and workers compare it.

    Args:
        id: The patch.
        target: `package.module:Qual.name`.
        state: "pending" until the target's module is imported, then "applied", "skipped" (it doesn't fit and the run
            works without it) or "failed" (it doesn't fit and was asked for); "removed" after `remove`.
        reason: Why it is in that state; empty while pending and when applied.
        needed_by: The key that makes it necessary, or None.
        fingerprint_known: Whether the installed source is one that the patch was checked against; None if not read yet.
        processes: Where it is meant to be applied.
        upstream_issue: Where the need is known upstream.
        remove_when: What lets the patch be deleted.
    """

    id: str
    target: str
    state: State
    reason: str
    needed_by: str | None
    fingerprint_known: bool | None
    processes: frozenset[Process]
    upstream_issue: str
    remove_when: str
