"""`validate_config` compares batch sizes with all GPUs of the job, also where a role has only some of them.

A job whose actor has 2 of 6 devices is refused for a batch of 4. The replacement shows the original the actor's share;
critic and reference are checked by `placement.checks`.
"""

from __future__ import annotations

from typing import Any

from verl_ext_sharding.errors import PlainErrors
from verl_ext_sharding.patching import original
from verl_ext_sharding.patching.spec import PatchSpec


def validate_config(config: Any, use_reference_policy: bool, use_critic: bool) -> None:
    """As verl's, on the number of devices that the actor really has."""
    from verl_ext_sharding import driver

    with PlainErrors():
        if driver.asked_for(config):
            config = driver.view_for_validation(config)
    original(SPEC)(config=config, use_reference_policy=use_reference_policy, use_critic=use_critic)


SPEC = PatchSpec(
    id="config-role-sizes",
    target="verl.utils.config:validate_config",
    replacement=validate_config,
    signature=("config", "use_reference_policy", "use_critic"),
    fingerprints={"0.9.0": "872f5c54ad99cdae", "0.9.1": "26702e723b1e50fc"},
    processes=frozenset({"driver"}),
    needed_by="trainer.plugin",
    upstream_issue="none filed",
    remove_when="verl validates batch sizes against each role's own data-parallel size",
)
