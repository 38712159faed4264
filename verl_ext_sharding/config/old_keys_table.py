"""The keys that older releases of verl had and 0.9.1 lacks, each with what to write now, or why it is gone.

Found by comparing the composed key trees of verl 0.7.0 to 0.9.0 with 0.9.1's, and each checked in 0.9.1's source; those of
earlier releases stand in `older_keys_table`. The first entry that matches wins, so what is special about one key stands
before its block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

TRAINING_ROLES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
"""What `<role>` stands for in a pattern."""


@dataclass(kw_only=True, frozen=True)
class Replacement:
    """What became of one old key, or of a whole block.

    Args:
        old: Dotted key. `<role>` stands for one of `TRAINING_ROLES`; a trailing `.*` covers the block and all below it.
        since: The first release without the key.
        reason: Why it moved or what is there instead, as a sentence without its full stop.
        new: Where it is now, best first: the first one that the run's config has is offered. `<role>` and a trailing
            `.*` repeat what `old` matched; a leading `+` marks a key that Hydra must be told to add. Empty: gone.
        value: From the old value, as typed, to the new one. None: the value stays as it was.
        also: Overrides that the new place needs beside it, unless the user sets them too.
        needs: Overrides without which the new place does nothing: they win over other old keys, and a value of false
            needs none.
    """

    old: str
    since: str
    reason: str
    new: tuple[str, ...] = ()
    value: Callable[[str], str] | None = None
    also: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


def _veto_threshold(ratio: str) -> str:
    """`seq_max_k2` rejects a sequence above max(0.5 * (log ratio)^2), verl/trainer/ppo/rollout_corr_helper.py."""
    return f"{0.5 * math.log(float(ratio)) ** 2:.4g}"


def _lower_and_upper(lower: str) -> str:
    float(lower)
    return f"'{lower}_<rollout_rs_threshold>'"


def _first_steps(count: str) -> str:
    return f"[{','.join(str(step) for step in range(1, int(count) + 1))}]"


def _skip_action(action: str) -> str:
    return "repeat" if action == "repeat_last" else action


def wait_steps(start: str) -> str:
    """verl 0.7 waited step_start - 1 mini-batches and warmed up during one, utils/profiler/profile.py."""
    return str(max(int(start) - 1, 0))


_FSDP_CRITIC = "the critic's FSDP settings stand beside its model block, under critic.fsdp"
_GRADIENTS = "gradients move to the host with the parameters, by param_offload in the same block"
REWARD_SERVER = "the reward model is a vLLM or SGLang server, no longer a training worker"
_SERVER_LIMIT = REWARD_SERVER + ", with the server's own limits"
_REWARD_BLOCK = "everything about rewards stands under reward"
_SKIP = "skipping a rollout has a block of its own; skip.rollout_tq serves trainer.use_v1=true, skip.rollout the other"
SCHEDULE = (
    "torch.profiler's own schedule took its place: step_start=a step_end=b is wait=a-1 warmup=1 active=b-a repeat=1"
)
AGENT_LOOP = (
    "an agent loop of your own takes its place, registered in the yaml file that "
    "actor_rollout_ref.rollout.agent.agent_loop_config_path names"
)
_MINDSPEED = "on NPUs model_engine=megatron is the MindSpeed engine"
_RM_SERVER = "reward.reward_model.rollout"


SINCE_0_7 = (
    # Critic and actor: where FSDP is set.
    Replacement(
        old="critic.model.fsdp_config.grad_offload",
        since="0.4",
        reason="gradients move to the host with the parameters, by critic.fsdp.param_offload",
    ),
    Replacement(
        old="critic.model.fsdp_config.mixed_precision.*",
        since="0.8",
        reason=_FSDP_CRITIC,
        new=("+critic.fsdp.mixed_precision.*",),
    ),
    Replacement(old="critic.model.fsdp_config.*", since="0.8", reason=_FSDP_CRITIC, new=("critic.fsdp.*",)),
    Replacement(
        old="critic.fsdp_config.grad_offload",
        since="0.4",
        reason="gradients move to the host with the parameters, by critic.fsdp.param_offload",
    ),
    Replacement(old="critic.fsdp.grad_offload", since="0.4", reason=_GRADIENTS),
    Replacement(old="<role>.fsdp_config.grad_offload", since="0.4", reason=_GRADIENTS),
    Replacement(old="critic.fsdp_config.*", since="0.8", reason=_FSDP_CRITIC, new=("critic.fsdp.*",)),
    Replacement(
        old="<role>.offload_policy",
        since="0.4",
        reason="FSDP settings stand in the role's FSDP block",
        new=("<role>.fsdp_config.offload_policy", "<role>.fsdp.offload_policy"),
    ),
    Replacement(
        old="critic.nccl_timeout",
        since="0.7",
        reason="only the Megatron critic has it; one timeout stands for all roles, though the workers of verl 0.9 read "
        "neither, and torch's default holds",
        new=("actor_rollout_ref.nccl_timeout",),
    ),
    # Engines.
    Replacement(old="<role>.megatron.grad_offload", since="0.9.1", reason=_GRADIENTS),
    Replacement(
        old="<role>.load_weight", since="0.9", reason="the Megatron engine always loads the weights of the model's path"
    ),
    *(
        Replacement(
            old=f"{role}.router_replay.*",
            since="0.9.1",
            reason="router replay belongs to the engine, and only Megatron and VeOmni have it",
            new=(f"{role}.megatron.router_replay.*", f"{role}.veomni.router_replay.*"),
        )
        for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref")
    ),
    *(
        Replacement(
            old=f"{role}.checkpoint.mbridge_config.*",
            since="0.9",
            reason="it configures Megatron's bridge, and the key exists with model_engine=megatron only",
        )
        for role in ("actor_rollout_ref.actor", "critic")
    ),
    Replacement(
        old="actor_rollout_ref.actor.sum_pi_squared_checkpointing",
        since="0.8",
        reason="calculate_sum_pi_squared is computed without a checkpoint of its own",
    ),
    Replacement(
        old="<role>.veomni.activation_gpu_limit",
        since="0.9.1",
        reason="VeOmni offloads activations asynchronously and limits host memory instead, in GB, see "
        "enable_async_activation_offload and activation_offload_host_cache_limit_gb beside it",
        new=("<role>.veomni.enable_async_activation_offload",),
        value=lambda _: "True",
    ),
    Replacement(
        old="<role>.veomni.moe_load_balance_monitor_interval",
        since="0.9",
        reason="expert load is measured in the rollout, and needs rollout.enable_rollout_routing_replay=True",
        new=("actor_rollout_ref.rollout.moe_load_balance_metrics_interval",),
    ),
    Replacement(old="<role>.mindspeed.grad_offload", since="0.9.1", reason=f"{_MINDSPEED}, and {_GRADIENTS}"),
    Replacement(
        old="<role>.mindspeed.mcore_kwargs.*",
        since="0.9.1",
        reason=f"{_MINDSPEED}; what MindSpeed itself reads stands in <role>.megatron.override_transformer_config",
    ),
    Replacement(
        old="<role>.mindspeed.fsdp_kwargs.*", since="0.9.1", reason=f"{_MINDSPEED}, and there is no FSDP variant of it"
    ),
    Replacement(old="<role>.mindspeed.strategy", since="0.9.1", reason=_MINDSPEED),
    Replacement(old="<role>.mindspeed.*", since="0.9.1", reason=_MINDSPEED, new=("<role>.megatron.*",)),
    Replacement(old="actor_rollout_ref.ref.optim.*", since="0.9.1", reason="the reference policy is never trained"),
    Replacement(
        old="actor_rollout_ref.rollout.layer_name_map.*",
        since="0.8",
        reason="the Megatron engine finds the layers by itself when it exports weights",
    ),
    *(
        replacement
        for model in ("actor_rollout_ref.model", "critic.model")
        for replacement in (
            Replacement(
                old=f"{model}.override_config.model_config.*",
                since="0.8",
                reason="overrides of the Hugging Face config stand directly in override_config, which starts empty",
                new=(f"+{model}.override_config.*",),
            ),
            Replacement(
                old=f"{model}.override_config.moe_config.*",
                since="0.8",
                reason="the engines of verl 0.9 don't freeze the router of an expert model",
            ),
        )
    ),
    # Rollout.
    Replacement(
        old="actor_rollout_ref.rollout.update_weights_bucket_megabytes",
        since="0.7.1",
        reason="it sizes the buckets of the checkpoint engine",
        new=("actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",),
    ),
    Replacement(
        old="actor_rollout_ref.rollout.multi_turn.interaction_config_path",
        since="0.8",
        reason=f"interactions are gone; {AGENT_LOOP}",
    ),
    Replacement(
        old="actor_rollout_ref.rollout.skip.max_dump_step",
        since="0.9",
        reason=_SKIP + "; it lists the steps",
        new=("skip.rollout_tq.steps",),
        value=_first_steps,
    ),
    Replacement(
        old="actor_rollout_ref.rollout.skip.action",
        since="0.9",
        reason=_SKIP + "; repeat_last is called repeat",
        new=("skip.rollout_tq.action",),
        value=_skip_action,
    ),
    Replacement(old="actor_rollout_ref.rollout.skip._target_", since="0.9", reason=_SKIP + "; verl chooses the class"),
    Replacement(old="actor_rollout_ref.rollout.skip.*", since="0.9", reason=_SKIP, new=("skip.rollout_tq.*",)),
    Replacement(
        old="actor_rollout_ref.rollout.skip_rollout", since="0.8", reason=_SKIP, new=("skip.rollout_tq.enable",)
    ),
    Replacement(
        old="actor_rollout_ref.rollout.skip_dump_dir", since="0.8", reason=_SKIP, new=("skip.rollout_tq.dump_dir",)
    ),
    # Algorithm.
    Replacement(
        old="algorithm.rollout_correction.rollout_rs_threshold_lower",
        since="0.7.1",
        reason="both bounds stand in rollout_rs_threshold as 'lower_upper', and rollout_rs takes names such as "
        "token_k1 or seq_sum_k1",
        new=("algorithm.rollout_correction.rollout_rs_threshold",),
        value=_lower_and_upper,
    ),
    Replacement(
        old="algorithm.rollout_correction.rollout_token_veto_threshold",
        since="0.7.1",
        reason="rejecting a sequence for its worst token is rollout_rs=seq_max_k2, whose bound is half the squared "
        "log of the ratio",
        new=("algorithm.rollout_correction.rollout_rs_threshold",),
        value=_veto_threshold,
        also=("algorithm.rollout_correction.rollout_rs=seq_max_k2",),
    ),
    # Data.
    Replacement(
        old="data.continuous_token.*",
        since="0.9.1",
        reason="agent loops always tokenize that way, and read the family from the model's config",
    ),
    Replacement(
        old="data.datagen.*",
        since="0.8",
        reason="the dynamic data set is gone; a data set class of your own is data.custom_cls.path and .name",
    ),
    Replacement(
        old="data.sampler.*",
        since="0.8",
        reason="the order of prompts is data.shuffle or a data set class of your own (data.custom_cls.path and .name); "
        "trainer.v1.sampler.custom_sampler chooses among finished trajectories instead",
    ),
    # Profiling.
    Replacement(
        old="<role>.profiler.tool_config.torch.step_start",
        since="0.7.1",
        reason=SCHEDULE,
        new=("<role>.profiler.tool_config.torch.schedule.wait",),
        value=wait_steps,
    ),
    Replacement(
        old="<role>.profiler.tool_config.torch.step_end",
        since="0.7.1",
        reason=SCHEDULE,
        new=("<role>.profiler.tool_config.torch.schedule.active",),
        value=lambda end: f"<{end} - step_start>",
    ),
    # Reward.
    Replacement(old="reward_manager.*", since="0.7.1", reason=_REWARD_BLOCK, new=("reward.reward_manager.*",)),
    Replacement(
        old="reward_manager@reward_manager",
        since="0.7.1",
        reason=_REWARD_BLOCK + ", and its manager has no config group",
        new=("reward.reward_manager.name",),
        value=lambda _: "<name>",
    ),
    Replacement(
        old="reward_model@reward_model", since="0.7.1", reason=REWARD_SERVER + ", so there is no config group for it"
    ),
    Replacement(
        old="reward_model.sandbox_fusion.*", since="0.7.1", reason=_REWARD_BLOCK, new=("reward.sandbox_fusion.*",)
    ),
    Replacement(
        old="reward_model.rollout._target_", since="0.7.1", reason=_REWARD_BLOCK, new=(f"{_RM_SERVER}._target_",)
    ),
    # Between 0.6.1 and 0.7.0 verl's examples had these two; no release did.
    Replacement(
        old="reward_model.model_path", since="0.7", reason=_REWARD_BLOCK, new=("reward.reward_model.model_path",)
    ),
    Replacement(old="reward_model.inference.*", since="0.7", reason=REWARD_SERVER, new=(f"{_RM_SERVER}.*",)),
    Replacement(
        old="reward_model.max_length",
        since="0.7.1",
        reason=_SERVER_LIMIT + ", which refuses longer inputs; sharding.roles.reward.max_input_tokens truncates them",
        new=(f"{_RM_SERVER}.max_model_len",),
    ),
    *(
        Replacement(
            old=f"reward_model.{name}", since="0.7.1", reason=_SERVER_LIMIT, new=(f"{_RM_SERVER}.max_num_seqs",)
        )
        for name in ("micro_batch_size", "micro_batch_size_per_gpu")
    ),
    Replacement(
        old="reward_model.forward_max_token_len_per_gpu",
        since="0.7.1",
        reason=_SERVER_LIMIT,
        new=(f"{_RM_SERVER}.max_num_batched_tokens",),
    ),
    *(
        Replacement(
            old=f"reward_model.megatron.{old}", since="0.7.1", reason=REWARD_SERVER, new=(f"{_RM_SERVER}.{new}",)
        )
        for old, new in (
            ("tensor_model_parallel_size", "tensor_model_parallel_size"),
            ("pipeline_model_parallel_size", "pipeline_model_parallel_size"),
            ("expert_model_parallel_size", "expert_parallel_size"),
            ("dtype", "dtype"),
        )
    ),
    Replacement(
        old="reward_model.ulysses_sequence_parallel_size",
        since="0.7.1",
        reason=REWARD_SERVER + ", and splits a model by tensor parallelism",
        new=(f"{_RM_SERVER}.tensor_model_parallel_size",),
    ),
    Replacement(
        old="reward_model.model.input_tokenizer",
        since="0.7.1",
        reason="prompt and response are always decoded and written in the reward model's own chat template",
    ),
    *(
        Replacement(old=f"reward_model.{name}", since="0.7.1", reason="rewards are always computed by the reward loop")
        for name in ("use_reward_loop", "launch_reward_fn_async")
    ),
    *(
        Replacement(old=f"reward_model.{name}", since="0.7.1", reason=REWARD_SERVER)
        for name in (
            "load_weight",
            "megatron.*",
            "model.fsdp_config.*",
            "model.override_config.*",
            "model.use_fused_kernels",
            "model.use_remove_padding",
            "model.use_shm",
            "nccl_timeout",
            "profiler.*",
            "strategy",
            "use_dynamic_bsz",
        )
    ),
    # Trainer.
    Replacement(
        old="trainer.use_legacy_worker_impl",
        since="0.8",
        reason="the legacy workers are gone; the choice that is left is trainer.use_v1, between two trainers",
    ),
)
"""Keys that verl 0.7.0 to 0.9.0 had."""
