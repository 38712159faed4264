"""The keys that verl 0.1 to 0.6.1 had and no release since 0.7.0, each with what to write now, or why it is gone.

Found by comparing the key trees of those releases with 0.9.1's, and each checked in 0.9.1's source.
"""

from __future__ import annotations

from verl_ext_sharding.config.old_keys_table import AGENT_LOOP, REWARD_SERVER, SCHEDULE, Replacement, wait_steps

_TRUE = ("true", "1", "yes", "on")


def _policy_gradient_loss(on: str) -> str:
    return "reinforce" if on.lower() in _TRUE else "ppo_clip"


def _kept_checkpoints(previous_is_removed: str) -> str:
    return "1" if previous_is_removed.lower() in _TRUE else "null"


_PROFILER = "tools are set in tool_config, per role"
_NSIGHT = "profiling is set once for all roles, under global_profiler"
_SERVER_ENGINE = "engine_kwargs start empty, so Hydra must add the key; the server decides whether it knows it"
_NPU_CONTENTS = "what is recorded is one list, tool_config.npu.contents, of npu, cpu, memory, shapes, module and stack"

BEFORE_0_7 = (
    Replacement(
        old="actor_rollout_ref.actor.use_token_level_loss",
        since="0.4",
        reason="the way in which a loss is averaged has a name",
        new=("actor_rollout_ref.actor.loss_agg_mode",),
        value=lambda on: "token-mean" if on.lower() in _TRUE else "seq-mean-token-mean",
    ),
    Replacement(
        old="ray_init.timeline_json_file", since="0.6", reason="it moved", new=("ray_kwargs.timeline_json_file",)
    ),
    Replacement(old="ray_init.*", since="0.6", reason="it moved", new=("ray_kwargs.ray_init.*",)),
    Replacement(old="trainer.profile_steps", since="0.6", reason=_NSIGHT, new=("global_profiler.steps",)),
    *(
        Replacement(
            old=f"trainer.{side}_nsight_options.*",
            since="0.6",
            reason=_NSIGHT,
            new=(f"global_profiler.global_tool_config.nsys.{side}_nsight_options.*",),
        )
        for side in ("controller", "worker")
    ),
    *(
        replacement
        for block, since in (("trainer.npu_profile", "0.6"), ("profile", "0.5"))
        for replacement in (
            Replacement(
                old=f"{block}.options.save_path", since=since, reason=_NSIGHT, new=("global_profiler.save_path",)
            ),
            *(
                Replacement(
                    old=f"{block}.options.{name}",
                    since=since,
                    reason=_PROFILER,
                    new=(f"actor_rollout_ref.actor.profiler.tool_config.npu.{name}",),
                )
                for name in ("level", "analysis")
            ),
            Replacement(old=f"{block}.*", since=since, reason=_PROFILER + "; " + _NPU_CONTENTS),
        )
    ),
    Replacement(
        old="<role>.profiler.discrete",
        since="0.6",
        reason=_PROFILER,
        new=("<role>.profiler.tool_config.nsys.discrete",),
    ),
    *(
        Replacement(
            old=f"{block}.profiler.discrete",
            since="0.6",
            reason=_NSIGHT,
            new=("global_profiler.global_tool_config.nsys.discrete",),
        )
        for block in ("actor_rollout_ref", "actor_rollout_ref.rollout")
    ),
    Replacement(
        old="actor_rollout_ref.profiler.*", since="0.6", reason=_PROFILER, new=("actor_rollout_ref.actor.profiler.*",)
    ),
    *(
        Replacement(old=f"<role>.profile.{old}", since="0.6", reason=_PROFILER, new=(f"<role>.profiler.{new}",))
        for old, new in (("use_profile", "enable"), ("profile_ranks", "ranks"), ("save_path", "save_path"))
    ),
    Replacement(
        old="<role>.profile.step_start",
        since="0.6",
        reason=SCHEDULE,
        new=("<role>.profiler.tool_config.torch.schedule.wait",),
        value=wait_steps,
    ),
    Replacement(
        old="<role>.profile.step_end",
        since="0.6",
        reason=SCHEDULE,
        new=("<role>.profiler.tool_config.torch.schedule.active",),
        value=lambda end: f"<{end} - step_start>",
    ),
    Replacement(old="<role>.profile.*", since="0.6", reason=_PROFILER, new=("<role>.profiler.*",)),
    *(
        Replacement(
            old=f"{model}.gradient_checkpointing_kwargs.activations_checkpoint_{old}",
            since="0.5",
            reason="Megatron's recomputation is set among its own transformer settings",
            new=(f"{role}.megatron.override_transformer_config.recompute_{old}",),
        )
        for model, role in (("actor_rollout_ref.model", "actor_rollout_ref.actor"), ("critic.model", "critic"))
        for old in ("granularity", "method", "num_layers")
    ),
    *(
        Replacement(
            old=f"{model}.gradient_checkpointing_kwargs.*",
            since="0.5",
            reason="FSDP always checkpoints with use_reentrant=False when enable_gradient_checkpointing is on",
        )
        for model in ("actor_rollout_ref.model", "critic.model")
    ),
    Replacement(
        old="critic.kl_ctrl.*", since="0.5", reason="the KL penalty is the algorithm's", new=("algorithm.kl_ctrl.*",)
    ),
    Replacement(
        old="actor_rollout_ref.ref.model.*",
        since="0.7",
        reason="the reference policy is the actor's model before training, actor_rollout_ref.model",
    ),
    Replacement(
        old="actor_rollout_ref.rollout.multi_turn.completion_callback",
        since="0.6",
        reason=AGENT_LOOP,
    ),
    Replacement(
        old="actor_rollout_ref.rollout.use_fire_sampling", since="0.5", reason="FIRE sampling is gone from the rollout"
    ),
    *(
        Replacement(
            old=f"actor_rollout_ref.rollout.engine_kwargs.{name}",
            since="0.6",
            reason=_SERVER_ENGINE,
            new=(f"+actor_rollout_ref.rollout.engine_kwargs.{name}",),
        )
        for name in ("sglang.attention_backend", "vllm.disable_mm_preprocessor_cache", "vllm.swap_space")
    ),
    Replacement(old="algorithm.pf_ppo._target_", since="0.6", reason="verl builds algorithm.pf_ppo without it"),
    Replacement(
        old="algorithm.rollout_correction.use_policy_gradient",
        since="0.7",
        reason="the loss is named, and holds in bypass mode (algorithm.rollout_correction.bypass_mode=true)",
        new=("algorithm.rollout_correction.loss_type",),
        value=_policy_gradient_loss,
    ),
)
"""Keys that verl 0.4.1 to 0.6.1 had; `profile`, only its examples before 0.5."""


_MEGATRON_OPTIMIZER = "Megatron's optimizer has its own names"
_OVERLONG = "+reward.reward_kwargs.overlong_buffer_cfg"
_OVERLONG_REASON = "DAPO's penalty is read from the arguments of the reward manager dapo"

BEFORE_0_4_1 = (
    *(
        Replacement(
            old=f"{model}.use_rmpad", since="0.2", reason="it was renamed", new=(f"{model}.use_remove_padding",)
        )
        for model in ("actor_rollout_ref.model", "critic.model")
    ),
    Replacement(old="reward_model.model.use_rmpad", since="0.2", reason=REWARD_SERVER),
    Replacement(old="reward_model.param_offload", since="0.4", reason=REWARD_SERVER),
    # The manager reads max_resp_len and log too, as soon as the buffer is on (reward_manager/dapo.py).
    *(
        replacement
        for block in ("custom_reward_function.overlong_buffer", "reward_model.overlong_buffer")
        for replacement in (
            Replacement(
                old=f"{block}.enable",
                since="0.4.1",
                reason=_OVERLONG_REASON,
                new=(f"{_OVERLONG}.enable",),
                also=(
                    "+reward.reward_kwargs.max_resp_len=${data.max_response_length}",
                    f"{_OVERLONG}.log=False",
                ),
            ),
            Replacement(old=f"{block}.*", since="0.4.1", reason=_OVERLONG_REASON, new=(f"{_OVERLONG}.*",)),
        )
    ),
    Replacement(
        old="<role>.megatron.num_layers_per_virtual_pipeline_stage",
        since="0.3",
        reason="the number of virtual stages of each pipeline rank is set, not the layers of one",
        new=("<role>.megatron.virtual_pipeline_model_parallel_size",),
        value=lambda layers: f"<layers / pipeline_model_parallel_size / {layers}>",
    ),
    *(
        replacement
        for optimizer in ("actor_rollout_ref.actor.optim", "critic.optim")
        for replacement in (
            Replacement(
                old=f"{optimizer}.warmup_style",
                since="0.4.1",
                reason=_MEGATRON_OPTIMIZER,
                new=(f"{optimizer}.lr_decay_style",),
            ),
            Replacement(
                old=f"{optimizer}.min_lr_ratio",
                since="0.4.1",
                reason=f"{_MEGATRON_OPTIMIZER}, the smallest learning rate as such",
                new=(f"{optimizer}.min_lr",),
                value=lambda ratio: f"<{ratio} * lr>",
            ),
        )
    ),
    Replacement(
        old="actor_rollout_ref.ref.param_offload",
        since="0.4",
        reason="it belongs to the engine",
        new=("actor_rollout_ref.ref.megatron.param_offload", "actor_rollout_ref.ref.fsdp_config.param_offload"),
    ),
    *(
        Replacement(
            old=f"{role}.checkpoint.contents",
            since="0.4.1",
            reason="what is saved and what is loaded are two keys, the second as the first",
            new=(f"{role}.checkpoint.save_contents",),
        )
        for role in ("actor_rollout_ref.actor", "critic")
    ),
    Replacement(old="actor_rollout_ref.rollout.chat_scheduler", since="0.4.1", reason=AGENT_LOOP),
    Replacement(
        old="actor_rollout_ref.rollout.multi_turn.max_turns",
        since="0.4.1",
        reason="turns of the assistant and of the user are counted apart",
        new=("actor_rollout_ref.rollout.multi_turn.max_assistant_turns",),
    ),
    Replacement(
        old="trainer.val_generations_to_log_to_wandb",
        since="0.4",
        reason="other loggers show them too",
        new=("trainer.log_val_generations",),
    ),
    Replacement(
        old="trainer.remove_previous_ckpt_in_save",
        since="0.3",
        reason="how many checkpoints stay is a number, and the critic's is trainer.max_critic_ckpt_to_keep",
        new=("trainer.max_actor_ckpt_to_keep",),
        value=_kept_checkpoints,
    ),
)
"""Keys that verl 0.1 to 0.4.0 or its recipes had."""
