"""The critic computes values with its own weights, whatever the reference before it did with the actor's adapter.

With LoRA the actor without its adapter is the reference: the trainer says so in `extra_info` of the batch, and leaves it there.
The critic then fails for want of an adapter, or computes values without its own.
"""

from __future__ import annotations

from typing import Any

from verl_ext_sharding.patching import original
from verl_ext_sharding.patching.spec import PatchSpec

_WITHOUT_ADAPTER = "no_lora_adapter"


def compute_values(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
    """As verl's, of a batch that asks for no adapter to be left out."""
    batch.extra_info.pop(_WITHOUT_ADAPTER, None)
    return original(SPEC)(self, batch, metrics)


SPEC = PatchSpec(
    id="values-adapter",
    target="verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_values",
    replacement=compute_values,
    signature=("self", "batch", "metrics"),
    fingerprints={"0.9.0": "dd12d9bc1ed8e5e7", "0.9.1": "dd12d9bc1ed8e5e7"},
    processes=frozenset({"worker"}),
    needed_by="actor_rollout_ref.model.lora.rank",
    upstream_issue="none filed",
    remove_when="verl's trainer no longer leaves no_lora_adapter in the batch that the critic gets",
)
