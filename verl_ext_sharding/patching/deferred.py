"""Runs a hook when a module is imported, without importing it: `wrapt`'s post-import hooks, with three gaps closed.

- A module that another thread is still importing is waited for; wrapt alone would hand it over half made.
- A hook that raises makes the import fail, and meets the next attempt to import the module again; wrapt alone would
  have forgotten it, and the second attempt would go through unpatched.
- Hooks on one module all survive the failure of one of them.

Limits, which are wrapt's: a module run as a script (`python -m package.module`) is not imported under its own name, and
a module that is reloaded is not seen again.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

import wrapt

Hook = Callable[[ModuleType], None]

_waiting: dict[str, list[Hook]] = {}
"""Hooks of modules that are not imported yet, in order of registration. Lock-free: `setdefault`, `append` and `pop`
are atomic, and holding a lock of ours while asking for an import lock is how deadlocks are made."""


def when_imported(module: str, hook: Hook) -> None:
    """Runs a hook once a module is imported: now if it is, else as the last act of its import, before anyone uses it.

    Args:
        module: Full name of the module. It is never imported by this call.
        hook: Called with the module, once.

    Raises:
        Exception: What the hook raises: here if the module is imported already, else out of the import statement.
    """
    if module in sys.modules:
        hook(importlib.import_module(module))
        return
    _waiting.setdefault(module, []).append(hook)
    wrapt.register_post_import_hook(_run, module)


def _run(module: ModuleType) -> None:
    """Runs what waits for a module. Registered once for each hook: the first call finds all of them, the rest none."""
    name = module.__name__
    hooks = _waiting.pop(name, [])
    try:
        for hook in hooks:
            hook(module)
    except Exception:
        if getattr(module.__spec__, "_initializing", False):
            # importlib drops a module whose import fails. Dropped here already, it counts as not imported again, and
            # the hooks wait for the next attempt.
            sys.modules.pop(name, None)
            for hook in hooks:
                when_imported(name, hook)
        raise
