"""The keys that verl's yaml still has for old commands (`legacy_reward_impl.yaml`), and that its PPO trainer reads no more.

Up to 0.8 `main_ppo` moved them to the `reward` block (`migrate_legacy_reward_impl`, experimental/reward_loop); since 0.9 only
the fully asynchronous recipe does, so that elsewhere a job with them trains on the default reward without a word.
"""

from __future__ import annotations

from verl_ext_sharding.config.old_keys_table import Replacement

BLOCKS = ("custom_reward_function", "reward_model", "sandbox_fusion")
"""Where these keys stand. All of verl's own values there are null."""

_REASON = "verl's yaml still has it, but its PPO trainer reads everything about rewards under reward"
_SERVER = "the reward model is a vLLM or SGLang server, for which verl reads it nowhere"


def _manager(name: str) -> str:
    """The reward loop's manager that scores as one of `verl.workers.reward_manager` did."""
    if name == "batch":
        raise ValueError(name)  # its functions take many samples at once, those of the reward loop take one
    return "remote" if name == "prime" else name


_MOVED = {
    "num_workers": "reward.num_workers",
    "reward_loop_source": "reward.reward_manager.source",
    "reward_loop_module_path": "reward.reward_manager.module.path",
    "reward_loop_class_name": "reward.reward_manager.module.name",
    "model.path": "reward.reward_model.model_path",
    **{name: f"reward.reward_model.{name}" for name in ("enable", "enable_resource_pool", "n_gpus_per_node", "nnodes")},
}

UNREAD = (
    Replacement(
        old="reward_model.reward_manager",
        since="0.9",
        reason="the reward loop has the managers naive, dapo, gdpo and remote, which took the place of prime",
        new=("reward.reward_manager.name",),
        value=_manager,
    ),
    *(Replacement(old=f"reward_model.{old}", since="0.9", reason=_REASON, new=(new,)) for old, new in _MOVED.items()),
    Replacement(old="reward_model.reward_kwargs.*", since="0.9", reason=_REASON, new=("+reward.reward_kwargs.*",)),
    Replacement(old="reward_model.model.external_lib", since="0.9", reason=_SERVER),
    Replacement(old="reward_model.model.trust_remote_code", since="0.9", reason=_SERVER),
    Replacement(
        old="reward_model.rollout.engine_kwargs.*",
        since="0.9",
        reason=_REASON,
        new=("reward.reward_model.rollout.engine_kwargs.*", "+reward.reward_model.rollout.engine_kwargs.*"),
    ),
    Replacement(old="reward_model.rollout.*", since="0.9", reason=_REASON, new=("reward.reward_model.rollout.*",)),
    Replacement(
        old="custom_reward_function.*",
        since="0.9",
        reason=_REASON,
        new=("reward.custom_reward_function.*", "+reward.custom_reward_function.*"),
    ),
    Replacement(old="sandbox_fusion.*", since="0.9", reason=_REASON, new=("reward.sandbox_fusion.*",)),
)
"""Each of these keys, with where verl reads its value now."""
