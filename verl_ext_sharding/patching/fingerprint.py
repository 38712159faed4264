"""Fingerprints of source code: has the function that a patch replaces changed since we read it?

Works on text, by `ast`, and finds the text without importing the module that it belongs to: `doctor` runs where verl
does not import, and a patched object must never vouch for itself. The same code has the same fingerprint on every
Python that we support, whatever its comments, docstrings, quotes and line breaks.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_ext_sharding import envs, versions
from verl_ext_sharding.errors import PatchError, did_you_mean
from verl_ext_sharding.patching.spec import PatchSpec

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_NUM_HEX_DIGITS = 16
_IGNORED_FIELDS = frozenset({"ctx", "kind", "type_comment"})
"""Fields that repeat the position of a node, or that only say how a literal was spelt."""


def fingerprint(source_text: str, qualname: str) -> str:
    """Fingerprint of a function, method or class: decorators, annotations and body count; comments, docstrings and
    layout do not.

    A name that is defined several times (if/else, try/except, overloads) is fingerprinted over all its definitions. A
    method that a class inherits from a class of the same module is that class's.

    Args:
        source_text: Source of the whole module.
        qualname: Name inside the module, such as "Trainer.fit".

    Returns:
        The first 16 hexadecimal digits of a SHA-256.

    Raises:
        PatchError: If the source does not parse or defines no such name.
    """
    text = "\n".join(_dump(node) for node in _definitions(source_text, qualname))
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:_NUM_HEX_DIGITS]


def signature(source_text: str, qualname: str) -> tuple[str, ...]:
    """Parameter names of a function or method, in the order of `inspect.signature`, without stars; of a class, those
    of its `__init__`.

    Args:
        source_text: Source of the whole module.
        qualname: Name inside the module, such as "Trainer.fit". If it is defined several times, the last one counts.

    Raises:
        PatchError: If the source does not parse or defines no such name.
    """
    node = _definitions(source_text, qualname)[-1]
    if isinstance(node, ast.ClassDef):
        return signature(source_text, f"{qualname}.__init__")
    args = node.args
    ordered = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
    return tuple(arg.arg for arg in ordered if arg is not None)


def module_source(module: str, root: Path | None = None) -> str:
    """Source text of a module, found without importing it or its parent packages.

    Args:
        module: Full name, such as "verl.trainer.ppo.core_algos".
        root: A folder that holds the unpacked top package, or a wheel. None: what this process imports, or would.

    Raises:
        PatchError: If there is no such module, or it has no source file.
    """
    relative = module.replace(".", "/")
    candidates = (f"{relative}/__init__.py", f"{relative}.py")
    if root is None:
        file = _installed_file(module)
        if file is not None:
            return read_source(file)
    elif root.is_dir():
        for candidate in candidates:
            if (root / candidate).is_file():
                return read_source(root / candidate)
    elif root.is_file():
        with zipfile.ZipFile(root) as wheel:
            names = frozenset(wheel.namelist())
            for candidate in candidates:
                if candidate in names:
                    return importlib.util.decode_source(wheel.read(candidate))
    raise PatchError(
        f"source of module {module}",
        expected=" or ".join(candidates),
        found=f"neither in {'the installed packages' if root is None else root}",
        consequence="a patch of this module can't be checked, so it is not applied",
        remedy=f"check that the release that has {module} is installed, and as source (.py)",
    )


def read_source(file: Path) -> str:
    """Text of a Python file, decoded as Python does it."""
    return importlib.util.decode_source(file.read_bytes())


@dataclass(kw_only=True, frozen=True)
class Examination:
    """How a patch fits a source.

    Args:
        release: Installed release of the patch's distribution, or None if it has no metadata (a bare checkout).
        fingerprint: Of the target in that source, or None if the target is not there.
        known: Whether the patch was checked against a source with this fingerprint.
        problem: Why it must not be applied, ready to be raised, or None if it fits.
    """

    release: str | None
    fingerprint: str | None
    known: bool
    problem: PatchError | None


def examine(spec: PatchSpec, source_text: str) -> Examination:
    """Compares a patch with the source of its target's module and with the installed release. Never raises.

    A fingerprint that is known from any release fits: an unchanged function in a later release of the range is safe. A
    distribution without metadata is judged by the fingerprint alone.

    Args:
        spec: The patch.
        source_text: Source of the module that holds its target.
    """
    release = versions.installed(spec.distribution)
    try:
        found = fingerprint(source_text, spec.qualname)
    except PatchError as error:
        return Examination(release=release, fingerprint=None, known=False, problem=_misfit(spec, release, error.found))
    known = found in spec.fingerprints.values()
    problem = None
    if not known:
        problem = _misfit(spec, release, f"a source with fingerprint {found}, which it was not checked against")
    elif release is not None and not versions.in_range(release, spec.range):
        problem = _misfit(spec, release, f"a release out of range (fingerprint {found} is known)")
    return Examination(release=release, fingerprint=found, known=known, problem=problem)


def _misfit(spec: PatchSpec, release: str | None, found: str) -> PatchError:
    known = ", ".join(f"{known} ({fingerprint})" for known, fingerprint in spec.fingerprints.items())
    dropped = "" if spec.needed_by is None else f"take {spec.needed_by} out of the config, or "
    return PatchError(
        f"patch {spec.id} on {spec.target}",
        expected=f"{spec.distribution} {spec.range}, source as in {known or 'no release yet'}",
        found=f"{spec.distribution} {release or 'without release metadata'}: {found}",
        consequence="the patch is not applied",
        remedy=f"pip install '{spec.requirement}', or {dropped}set {envs.DISABLE}=1",
    )


def _installed_file(module: str) -> Path | None:
    """Source file of a module of this process. Asks importlib for the top package only: that imports nothing."""
    top, _, rest = module.partition(".")
    try:
        found = getattr(sys.modules.get(top), "__spec__", None) or importlib.util.find_spec(top)
    except ValueError:  # a module made by hand, without a spec
        return None
    if found is None:
        return None
    files = [Path(found.origin)] if found.origin is not None and not rest else []
    if rest:
        for folder in found.submodule_search_locations or ():
            stem = Path(folder, *rest.split("."))
            files += [stem / "__init__.py", stem.with_name(f"{stem.name}.py")]
    return next((file for file in files if file.suffix == ".py" and file.is_file()), None)


def _definitions(source_text: str, qualname: str) -> list[Definition]:
    """All definitions of a name, in source order; never empty."""
    try:
        tree = ast.parse(source_text)
    except SyntaxError as error:
        raise _no_definition(qualname, f"source that does not parse: {error}") from error
    found = _lookup(tree, tree, qualname.split("."))
    if not found:
        owner, _, name = qualname.rpartition(".")
        scopes = _lookup(tree, tree, owner.split(".")) if owner else [tree]
        near = did_you_mean(name, (node.name for scope in scopes for node in _defined_in(scope.body)))
        raise _no_definition(qualname, f"no def or class {qualname}" + (f", but a {near}" if near else ""))
    return found


def _lookup(module: ast.Module, scope: ast.Module | ast.ClassDef, path: Sequence[str]) -> list[Definition]:
    """Definitions below a scope: its own, else those of its base classes in the same module, left to right."""
    name, *rest = path
    found = [node for node in _defined_in(scope.body) if node.name == name]
    if rest:
        return [hit for node in found if isinstance(node, ast.ClassDef) for hit in _lookup(module, node, rest)]
    if found or isinstance(scope, ast.Module):
        return found
    bases = [base.id for base in scope.bases if isinstance(base, ast.Name)]
    earlier = [node for node in _defined_in(module.body) if node.lineno < scope.lineno]
    for base in bases:
        for node in earlier:
            if isinstance(node, ast.ClassDef) and node.name == base:
                found += _lookup(module, node, [name])
        if found:
            break
    return found


def _defined_in(body: Sequence[ast.stmt]) -> Iterator[Definition]:
    """Functions and classes that a block defines in its own scope: through if, try, with and loops, not into bodies."""
    for statement in body:
        if isinstance(statement, Definition):
            yield statement
            continue
        for block in ("body", "handlers", "orelse", "finalbody"):
            for inner in getattr(statement, block, ()):
                yield from _defined_in(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _dump(node: object) -> str:
    """Text of a tree that depends on the code alone. `ast.dump` differs from one Python to the next."""
    if isinstance(node, list):
        return f"[{','.join(_dump(item) for item in node)}]"
    if not isinstance(node, ast.AST):
        return ascii(node)
    parts = []
    for name in sorted(set(node._fields) - _IGNORED_FIELDS):
        value = getattr(node, name, None)
        if name == "body" and isinstance(node, Definition):
            value = _without_docstring(node.body)
        elif name == "values" and isinstance(node, ast.JoinedStr):
            value = _merged_text(node.values)
        if value is not None and value != []:  # a field that this Python has and another lacks is empty
            parts.append(f"{name}={_dump(value)}")
    return f"{type(node).__name__}({','.join(parts)})"


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body


def _merged_text(values: list[ast.expr]) -> list[ast.expr]:
    """Pieces of an f-string, without empty text and with neighbouring text joined: Pythons cut it differently."""
    merged: list[ast.expr] = []
    for value in values:
        last = merged[-1] if merged else None
        if isinstance(value, ast.Constant) and isinstance(last, ast.Constant):
            merged[-1] = ast.Constant(value=str(last.value) + str(value.value))
        elif not (isinstance(value, ast.Constant) and value.value == ""):
            merged.append(value)
    return merged


def _no_definition(qualname: str, found: str) -> PatchError:
    return PatchError(
        f"patch target {qualname}",
        expected=f"a function, method or class {qualname} defined in this module",
        found=found,
        consequence="the patch can't be checked, so it is not applied",
        remedy="name the class that defines the method, or install a release that still has it",
    )
