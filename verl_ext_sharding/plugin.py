"""The `verl.plugins` entry point: verl imports this module at the end of `import verl`, in every process.

Its import registers hooks and nothing else. verl swallows exceptions here (verl/__init__.py logs them at DEBUG), so a
failure of ours is shouted, kept for `verl-sharding doctor`, and ends the process if its run asked for the plugin.
"""

from __future__ import annotations

import logging
import os
import traceback

from verl_ext_sharding import envs

failure: str | None = None
"""Traceback of a failed load in this process, or None."""


def _load() -> None:
    global failure
    try:
        from verl_ext_sharding import loading

        loading.load()
    except Exception as error:
        failure = traceback.format_exc()
        logging.getLogger(__name__).error(
            "verl-ext-sharding failed to load and is inactive in process %d: %s\n%s", os.getpid(), error, failure
        )
        if os.environ.get(envs.SPEC):
            # SystemExit is no Exception: verl does not catch it, and a run that asked for us must not go on without.
            raise SystemExit(f"verl-ext-sharding failed to load in a run that asked for it: {error}") from error


if not envs.disabled():
    _load()
