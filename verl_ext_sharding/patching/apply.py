"""Puts a patch in place, takes it away again, and knows what became of it in this process.

The replacement itself takes the target's place, never a wrapper around it: Ray pickles a plain module-level function
by reference, so it arrives on the other side as what it is; closures and `functools.wraps` wrappers arrive half patched.

What a patch can't reach:

- a name that another module imported from the target's module before the patch came (`from module import function`).
  Patch points therefore sit where the target is looked up at each call;
- an actor class that `ray.remote` made before the patch came: it has copies of the methods;
- static and class methods of an actor, in the worker: Ray copies only the others onto the class that it sends, so a
  patch of those has to be installed in the worker as well.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_ext_sharding.errors import PatchError
from verl_ext_sharding.patching.deferred import when_imported
from verl_ext_sharding.patching.fingerprint import examine, read_source
from verl_ext_sharding.patching.spec import PatchSpec, PatchStatus, Process, State

logger = logging.getLogger(__name__)

_lock = threading.RLock()
"""Held while objects or the tables below change; never while a module is imported."""


@dataclass(kw_only=True, frozen=True)
class _Slot:
    """The place that a target lives in, and what is there now.

    Args:
        owner: Module or class that the target is an attribute of.
        name: Name of that attribute.
        is_own: Whether it is in the owner's `__dict__`; False for a method that the class inherits.
        raw: What the `__dict__` (the owner's or a base class's) holds: a function, a staticmethod, a classmethod.
        function: The callable inside `raw`.
    """

    owner: ModuleType | type
    name: str
    is_own: bool
    raw: Any
    function: Callable[..., Any]


@dataclass(kw_only=True, frozen=True)
class _Record:
    """An applied patch: the slot as it was, and the attributes that the replacement was given."""

    spec: PatchSpec
    slot: _Slot
    copied: tuple[str, ...]


_records: dict[str, _Record] = {}
_statuses: dict[str, PatchStatus] = {}
_known: dict[str, bool] = {}
"""Whether the installed fingerprint is a known one, for every patch whose target was looked at."""


def install(specs: Iterable[PatchSpec], *, process: Process, needed: Collection[str] = ()) -> None:
    """Applies the patches meant for this process, each when its target's module is imported; now if it already is.

    A patch that does not fit the installed release is skipped with a warning, unless the run needs it.

    Args:
        specs: All patches; those of other processes are left out.
        process: What this process is.
        needed: Keys of the config that this run makes use of, compared with `needed_by`.

    Raises:
        PatchError: If a patch that the run needs does not fit. Raised here when the module is imported already, else
            out of the statement that imports it. All other patches are in place or pending then.
    """
    assert not isinstance(needed, str), "needed is a collection of keys"
    errors = []
    for spec in specs:
        if process not in spec.processes:
            continue
        with _lock:
            if spec.id not in _records:
                _note(spec, "pending")
        try:
            when_imported(spec.module, functools.partial(_on_import, spec, spec.needed_by in needed))
        except PatchError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def apply(spec: PatchSpec) -> None:
    """Applies a patch now, importing its target's module if need be. Does nothing if it is in place.

    Args:
        spec: The patch; `processes` and `needed_by` are not looked at.

    Raises:
        PatchError: If the installed source is not one that the patch was checked against, the release is out of range,
            or the target can't be replaced.
    """
    apply_to(spec, importlib.import_module(spec.module))


def apply_to(spec: PatchSpec, module: ModuleType) -> None:
    """As `apply`, in a given module object: one that was executed under another name than `spec.module`.

    Args:
        spec: The patch.
        module: The module that holds the target.

    Raises:
        PatchError: As `apply`.
    """
    try:
        _apply(spec, module)
    except PatchError as error:
        _note(spec, "failed", error)
        raise


def remove(spec: PatchSpec) -> None:
    """Takes a patch away, so that the target is the very object that it was, and forgets it if it is still pending.

    Args:
        spec: The patch. If it is not in place, nothing happens.

    Raises:
        PatchError: If something else has replaced the target since: taking ours away would undo that as well.
    """
    with _lock:
        record = _records.get(spec.id)
        if record is not None:
            slot = record.slot
            current = _find_slot(spec, slot.owner)
            if current.function is not spec.replacement:
                raise PatchError(
                    f"patch {spec.id} on {spec.target}",
                    expected="our replacement in place",
                    found=f"{_name_of(current.function)}, put there afterwards",
                    consequence="nothing is changed",
                    remedy="undo the later patch first",
                )
            if slot.is_own:
                setattr(slot.owner, slot.name, slot.raw)
            else:
                delattr(slot.owner, slot.name)
            _forget(record)
        if spec.id in _statuses:
            _note(spec, "removed")


def original(spec: PatchSpec) -> Callable[..., Any]:
    """The callable that a patch replaces: valid while the patch is in place, and when it is not.

    Of a classmethod or staticmethod it is the function inside, to be called as the replacement is called.

    Args:
        spec: The patch. If it is not in place, its target's module is imported.

    Raises:
        PatchError: If there is no such target.
    """
    record = _records.get(spec.id)
    if record is None:
        module = importlib.import_module(spec.module)
        with _lock:  # a patch that comes between the two look-ups would make the replacement its own original
            record = _records.get(spec.id)
            if record is None:
                return _find_slot(spec, _find_owner(spec, module)).function
    return record.slot.function


def status() -> list[PatchStatus]:
    """What became of every patch that was installed or applied in this process, sorted by id."""
    with _lock:
        return [_statuses[id_] for id_ in sorted(_statuses)]


def _on_import(spec: PatchSpec, is_needed: bool, module: ModuleType) -> None:
    """The post-import hook of one patch."""
    with _lock:
        if _statuses[spec.id].state == "removed":
            return
        try:
            _apply(spec, module)
        except PatchError as error:
            if not is_needed:
                _note(spec, "skipped", error)
                logger.warning("%s skipped: found %s; expected %s", error.subject, error.found, error.expected)
                return
            _note(spec, "failed", error)
            raise PatchError(
                error.subject,
                expected=error.expected,
                found=error.found,
                consequence=f"{spec.needed_by} needs this patch, so the run stops here",
                remedy=error.remedy,
            ) from error


def _apply(spec: PatchSpec, module: ModuleType) -> None:
    """Replaces the target in a module that is imported. Idempotent for one module object."""
    with _lock:
        owner = _find_owner(spec, module)
        record = _records.get(spec.id)
        if record is not None:
            assert record.spec.replacement is spec.replacement, f"two patches have the id {spec.id}"
            if record.slot.owner is owner:  # in place, or below a patch that someone else put on top of it
                return
            _forget(record)  # the module was imported afresh: what we patched is gone
        examination = examine(spec, _source_of(spec, module))
        _known[spec.id] = examination.known
        if examination.problem is not None:
            raise examination.problem
        slot = _find_slot(spec, owner)
        replacement = spec.replacement
        assert slot.function is not replacement, f"{spec.id} is in place, but this process did not put it there"
        assert inspect.iscoroutinefunction(slot.function) == inspect.iscoroutinefunction(replacement), (
            f"{spec.id}: target and replacement must both be async or both not"
        )
        record = _Record(spec=spec, slot=slot, copied=_copy_attributes(slot.function, replacement))
        _records[spec.id] = record  # before the target changes: a thread may call the replacement at once
        try:
            setattr(slot.owner, slot.name, _wrapped_like(slot.raw, replacement))
        except (AttributeError, TypeError) as error:
            _forget(record)
            raise _no_target(spec, f"a target that can't be set: {error}") from error
        _note(spec, "applied")
        logger.info("patch %s on %s", spec.id, spec.target)


def _forget(record: _Record) -> None:
    """Takes back the attributes that the replacement was given, and drops the record."""
    for name in record.copied:
        vars(record.spec.replacement).pop(name, None)
    del _records[record.spec.id]


def _copy_attributes(source: Callable[..., Any], replacement: Callable[..., Any]) -> tuple[str, ...]:
    """Gives the replacement the attributes of the original that it lacks, and names them.

    verl's `@register` marks a worker's method by an attribute; without it, the worker group does not see the method.
    What describes the original to `inspect` stays behind: the replacement is no wrapper and has its own signature.
    """
    missing = {
        name: value
        for name, value in getattr(source, "__dict__", {}).items()
        if name not in ("__wrapped__", "__signature__") and name not in vars(replacement)
    }
    vars(replacement).update(missing)
    return tuple(missing)


def _wrapped_like(raw: Any, replacement: Callable[..., Any]) -> Any:
    """The replacement as the same kind of attribute as the one that it replaces."""
    if isinstance(raw, (staticmethod, classmethod)):
        return type(raw)(replacement)
    return replacement


def _find_owner(spec: PatchSpec, module: ModuleType) -> ModuleType | type:
    """Module or class that the target is an attribute of."""
    owner: ModuleType | type = module
    for name in spec.qualname.split(".")[:-1]:
        found = vars(owner).get(name)
        if not isinstance(found, type):
            raise _no_target(spec, f"no class {name} in {_name_of(owner)}")
        owner = found
    return owner


def _find_slot(spec: PatchSpec, owner: ModuleType | type) -> _Slot:
    """Looks the target up in the `__dict__` of its owner or of the owner's base classes, past all descriptors."""
    name = spec.qualname.rpartition(".")[2]
    holders = owner.__mro__ if isinstance(owner, type) else (owner,)
    for holder in holders:
        if name in vars(holder):
            raw = vars(holder)[name]
            function = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
            if not callable(function):
                raise _no_target(spec, f"a {type(raw).__name__}, which is no function or method")
            return _Slot(owner=owner, name=name, is_own=holder is owner, raw=raw, function=function)
    raise _no_target(spec, f"no {name} in {_name_of(owner)}")


def _source_of(spec: PatchSpec, module: ModuleType) -> str:
    """Text of the file that a module was loaded from; its objects may be patched already and are not asked."""
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py"):
        raise _no_target(spec, f"no source file of {module.__name__}, only {file}")
    try:
        return read_source(Path(file))
    except OSError as error:
        raise _no_target(spec, f"no readable source of {module.__name__}: {error}") from error


def _no_target(spec: PatchSpec, found: str) -> PatchError:
    return PatchError(
        f"patch {spec.id} on {spec.target}",
        expected=f"a function or method of {spec.distribution} {spec.range} that can be replaced",
        found=found,
        consequence="the patch is not applied",
        remedy=f"pip install '{spec.requirement}'",
    )


def _name_of(obj: Any) -> str:
    return getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None) or type(obj).__name__


def _note(spec: PatchSpec, state: State, error: PatchError | None = None) -> None:
    """Writes a patch's status."""
    reason = "" if error is None else f"found {error.found}; expected {error.expected}"
    with _lock:
        _statuses[spec.id] = spec.status(state, reason=reason, fingerprint_known=_known.get(spec.id))
