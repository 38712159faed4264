"""Role -> pool and role -> worker class: verl's trainer maps actor, rollout, reference and critic to one global pool.

A subclass can't do it: trainers register under fixed names (`register_trainer` refuses a second one), and recipes bring
their own subclasses of `PPOTrainer`.
"""

from __future__ import annotations

from typing import Any

from verl_ext_sharding.patching import original
from verl_ext_sharding.patching.spec import PatchSpec


def init_resource_pool_mgr(self: Any) -> None:
    """As verl's, then places the roles as the run's spec says."""
    from verl_ext_sharding.config import spec

    original(SPEC)(self)
    run = spec.current()
    if run is not None:
        from verl_ext_sharding.workers import trainer

        trainer.place_roles(self, run)


SPEC = PatchSpec(
    id="trainer-role-pools",
    target="verl.trainer.ppo.v1.trainer_base:PPOTrainer._init_resource_pool_mgr",
    replacement=init_resource_pool_mgr,
    signature=("self",),
    fingerprints={"0.9.0": "623d061ebdd5bf26", "0.9.1": "547e5af6d79fd38d"},
    processes=frozenset({"worker"}),
    needed_by="trainer.plugin",
    upstream_issue="https://github.com/verl-project/verl/issues/7269",
    remove_when="verl reads a pool for each role from its config (RFC 7269)",
)
