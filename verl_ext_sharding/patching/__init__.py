"""Replaces functions of other packages: versioned, reversible, one table for all. Knows nothing of verl.

    install(known_specs(), process="worker", needed={"sharding.roles.critic.devices"})

`known_specs`, `parity` and `forecast` are in `patching.ledger`, which imports the patch points.
"""

from verl_ext_sharding.patching.apply import apply, install, original, remove, status
from verl_ext_sharding.patching.deferred import when_imported
from verl_ext_sharding.patching.spec import PatchSpec, PatchStatus, Process, State

__all__ = [
    "PatchSpec",
    "PatchStatus",
    "Process",
    "State",
    "apply",
    "install",
    "original",
    "remove",
    "status",
    "when_imported",
]
