"""Which class scores samples: verl's manager of the reward loop has its worker class fixed, where the agent loop has a key.

A subclass or a hook can't do it: the trainer builds the manager by its imported name, and the manager starts its workers while
it is built. verl's keys for a reward function and a reward manager could carry ours, but they are the user's.
"""

from __future__ import annotations

from typing import Any

from verl_ext_sharding.patching import original
from verl_ext_sharding.patching.spec import PatchSpec

NEEDED_BY = "reward.reward_model.enable"


def init_reward_loop_workers(self: Any) -> None:
    """As verl's, with workers of ours."""
    import ray

    from verl_ext_sharding.rollout.reward_worker import ShardingRewardLoopWorker

    self.reward_loop_workers_class = ray.remote(ShardingRewardLoopWorker)
    original(SPEC)(self)


SPEC = PatchSpec(
    id="reward-inputs",
    target="verl.experimental.reward_loop.reward_loop:RewardLoopManager._init_reward_loop_workers",
    replacement=init_reward_loop_workers,
    signature=("self",),
    fingerprints={"0.9.0": "0e9b3f4cc12b6ce0", "0.9.1": "0e9b3f4cc12b6ce0"},
    processes=frozenset({"worker"}),
    needed_by=NEEDED_BY,
    upstream_issue="none filed",
    remove_when="verl has a key for the class of its reward loop workers, as it has agent_loop_manager_class",
)
