"""All patches of this package, and how they fit what is installed here. Reads sources; imports no target."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Collection
from types import ModuleType

from verl_ext_sharding import patch_points, versions
from verl_ext_sharding.errors import PatchError
from verl_ext_sharding.patching.fingerprint import Examination, examine, module_source
from verl_ext_sharding.patching.spec import PatchSpec, PatchStatus, State

ABSENT = "absent"
"""What `parity` says of a target or a distribution that is not there."""


@functools.cache
def known_specs() -> tuple[PatchSpec, ...]:
    """Every `SPEC` and `SPECS` of the modules in `verl_ext_sharding.patch_points`, sorted by id.

    Modules whose name starts with an underscore hold what patch points share and are left out. Ids, targets and
    replacements are unique: two patches of one function would undo each other.
    """
    names = sorted(info.name for info in pkgutil.iter_modules(patch_points.__path__) if not info.name.startswith("_"))
    modules = [importlib.import_module(f"{patch_points.__name__}.{name}") for name in names]
    return collect(modules)


def collect(modules: Collection[ModuleType]) -> tuple[PatchSpec, ...]:
    """The patches that some modules declare, sorted by id.

    Args:
        modules: Each has a module-level `SPEC`, a `PatchSpec`, or `SPECS`, a tuple of them.
    """
    specs: list[PatchSpec] = []
    for module in modules:
        declared = (*getattr(module, "SPECS", ()), *([module.SPEC] if hasattr(module, "SPEC") else []))
        assert declared, f"{module.__name__} declares neither SPEC nor SPECS"
        specs += declared
    for what in ("id", "target", "replacement"):
        values = [getattr(spec, what) for spec in specs]
        twice = [value for value in values if values.count(value) > 1]
        assert not twice, f"two patches have the same {what}: {twice[0]}"
    return tuple(sorted(specs, key=lambda spec: spec.id))


def parity() -> dict[str, str]:
    """What must be equal on every node for the patches to do the same everywhere.

    Returns:
        `{patch id: fingerprint of the target's installed source}`, `{"release:<distribution>": version}` for each
        patched distribution and this one; `ABSENT` for what is not there.
    """
    specs = known_specs()
    found = {spec.id: _examine_installed(spec).fingerprint or ABSENT for spec in specs}
    for distribution in sorted({spec.distribution for spec in specs}):
        found[f"release:{distribution}"] = versions.installed(distribution) or ABSENT
    found["release:verl-ext-sharding"] = versions.__version__
    return found


def forecast(needed: Collection[str] = ()) -> list[PatchStatus]:
    """What `install` would come to in a process that imports every target, for `doctor`. Sorted by id.

    Args:
        needed: Keys of the config that the run makes use of, compared with `needed_by`.

    Returns:
        "pending" for a patch that fits; for one that does not, "failed" if the run needs it and "skipped" if not.
    """
    lines = []
    for spec in known_specs():
        found = _examine_installed(spec)
        if found.problem is None:
            lines.append(spec.status("pending", fingerprint_known=found.known))
        else:
            reason = f"found {found.problem.found}; expected {found.problem.expected}"
            state: State = "failed" if spec.needed_by in needed else "skipped"
            lines.append(spec.status(state, reason=reason, fingerprint_known=found.known))
    return lines


def _examine_installed(spec: PatchSpec) -> Examination:
    try:
        source_text = module_source(spec.module)
    except PatchError as error:
        release = versions.installed(spec.distribution)
        return Examination(release=release, fingerprint=None, known=False, problem=error)
    return examine(spec, source_text)
