"""Fields of verl's config classes, among them those that no yaml of verl's lists: Hydra takes them with a `+` alone."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from importlib import util
from pathlib import Path

_PACKAGES = ("workers/config", "utils/profiler", "trainer/config")
"""Where verl has the classes that `_target_` names."""


@dataclass(kw_only=True, frozen=True)
class _Class:
    """A class as its source has it.

    Args:
        bases: Names of what it inherits from.
        fields: Its own annotated names.
    """

    bases: tuple[str, ...]
    fields: frozenset[str]


def fields_of(target: str) -> frozenset[str]:
    """The fields of a config class, inherited ones included, read from verl's source: nothing of verl is imported.

    Args:
        target: Its dotted name, as `_target_` has it.

    Returns:
        Their names; empty for a class that is not found.
    """
    return _fields(target.rpartition(".")[2])


def _fields(name: str) -> frozenset[str]:
    found = _classes().get(name)
    if found is None:
        return frozenset()
    own = {field for field in found.fields if not field.startswith("_")}
    return frozenset(own).union(*map(_fields, found.bases))


@functools.cache
def _classes() -> dict[str, _Class]:
    package = util.find_spec("verl")
    if package is None or not package.submodule_search_locations:
        return {}
    root = Path(next(iter(package.submodule_search_locations)))
    files = [file for folder in _PACKAGES for file in sorted((root / folder).glob("*.py"))]
    nodes = [
        node for file in files for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, ast.ClassDef)
    ]
    return {node.name: _Class(bases=_bases(node), fields=_annotated(node)) for node in nodes}


def _bases(node: ast.ClassDef) -> tuple[str, ...]:
    return tuple(base.id for base in node.bases if isinstance(base, ast.Name))


def _annotated(node: ast.ClassDef) -> frozenset[str]:
    named = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
    return frozenset(target.id for target in named if isinstance(target, ast.Name))
