"""Patches a module that runs as a script: `python -m package.module` executes it as `__main__`, unseen by import hooks."""

from __future__ import annotations

import sys

from verl_ext_sharding.patching.apply import apply_to
from verl_ext_sharding.patching.spec import PatchSpec


def apply_to_script(spec: PatchSpec) -> bool:
    """Applies a patch to `__main__` if its target's module is what runs there. Call it from code that the script calls.

    Args:
        spec: The patch.

    Returns:
        Whether the script is the target's module.

    Raises:
        PatchError: As `apply`.
    """
    main = sys.modules.get("__main__")
    if getattr(getattr(main, "__spec__", None), "name", None) != spec.module:
        return False
    assert main is not None
    apply_to(spec, main)
    return True
