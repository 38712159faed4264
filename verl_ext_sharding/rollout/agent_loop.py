"""verl's agent loop with a seed for each sample, so that a response depends neither on its server nor on its turn.

Used through verl's own key:
`actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_ext_sharding.rollout.agent_loop.SeededAgentLoopManager`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ

from verl_ext_sharding.rollout.requests import stable_seed

_Worker = getattr(AgentLoopWorkerTQ, "__ray_actor_class__", AgentLoopWorkerTQ)


class SeededAgentLoopWorker(_Worker):  # type: ignore[misc, valid-type]
    """Gives each sample of each repeat its own seed; the server adds a hash of the prompt, so that turns differ."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Named, not inherited: Ray copies inherited methods onto the class that it pickles, and verl's own __init__ would
        # arrive as a copy whose `super()` refers to a copy of its class.
        _Worker.__init__(self, *args, **kwargs)

    async def _run_agent_loop(
        self,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        *,
        agent_name: str,
        trace: bool = True,
        **kwargs: Any,
    ) -> Any:
        seed = sample_seed(
            self.config.actor_rollout_ref.rollout.get("seed", 0), trajectory, session_id=kwargs.get("session_id", 0)
        )
        return await super()._run_agent_loop(
            {**sampling_params, "seed": seed}, trajectory, agent_name=agent_name, trace=trace, **kwargs
        )


class SeededAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager over seeded workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(SeededAgentLoopWorker)


def sample_seed(rollout_seed: int, trajectory: Mapping[str, Any], *, session_id: int) -> int:
    """Seed of one repeat of one sample at one step.

    Args:
        rollout_seed: `rollout.seed`.
        trajectory: verl's, with `step`, `validate` and `sample_index`.
        session_id: Which repeat, in [0, rollout.n).
    """
    return stable_seed(
        rollout_seed, trajectory["step"], bool(trajectory["validate"]), trajectory["sample_index"], session_id
    )
