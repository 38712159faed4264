#!/usr/bin/env bash
# PPO on four cards of 80 GB (A100, H100): actor and critic of 7B, every parameter trained, both sharded over all four.
#
# Two cards for each would be tight beside vLLM: 16 bytes a parameter over two are 57 GiB. Over four cards an update
# takes 28 GiB, 7 GiB for the other model's weights, and about 8 GiB for activations and log-probs of 16384 tokens.
# Adam's states of both wait on the host and come for the step alone, so that 14 GiB of weights stay beside vLLM, which
# takes half of each card. Host: about 140 GiB, reference policy included.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
TRAIN_FILES=${TRAIN_FILES:-$HOME/data/gsm8k/train.parquet}
VAL_FILES=${VAL_FILES:-$HOME/data/gsm8k/test.parquet}

exec "${PYTHON:-python3}" -m verl.trainer.main_ppo \
    trainer.plugin=sharding \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=4 \
    algorithm.adv_estimator=gae \
    algorithm.use_kl_in_reward=True \
    data.train_files="$TRAIN_FILES" \
    data.val_files="$VAL_FILES" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    critic.model.path="$MODEL" \
    critic.strategy=fsdp2 \
    "sharding.roles.actor.devices=[0,1,2,3]" \
    "sharding.roles.critic.devices=[0,1,2,3]" \
    "sharding.roles.ref.devices=[0,1,2,3]" \
    sharding.roles.actor.attn_implementation=auto \
    sharding.roles.actor.logits=auto \
    sharding.roles.actor.gradient_checkpointing=true \
    sharding.roles.critic.attn_implementation=auto \
    sharding.roles.critic.gradient_checkpointing=true \
    sharding.roles.ref.attn_implementation=auto \
    sharding.roles.ref.logits=auto \
    sharding.roles.actor.max_tokens=16384 \
    sharding.roles.actor.offload.optimizer=step \
    sharding.roles.critic.max_tokens=16384 \
    sharding.roles.critic.offload.optimizer=step \
    sharding.roles.rollout.max_new_tokens=2048 \
    sharding.roles.rollout.batch_size=256 \
    sharding.roles.rollout.gpu_memory_utilization=0.5 \
    "trainer.logger=[console]" \
    trainer.project_name=verl_sharding_examples \
    trainer.val_before_train=False \
    trainer.total_epochs=1 \
    "$@"
