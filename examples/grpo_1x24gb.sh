#!/usr/bin/env bash
# GRPO on one card of 24 GB (RTX 3090, RTX 4090, L4, A10): 0.5B, every parameter trained.
#
# Update: weights, gradients and Adam take 16 bytes a parameter, 7.4 GiB, and activations with the log-probs of 16384
# tokens about 2 GiB. Generation: 5.5 GiB of the actor stay, and vLLM takes half of the card. Host: 2 GiB for the
# reference policy, which verl always keeps there.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
TRAIN_FILES=${TRAIN_FILES:-$HOME/data/gsm8k/train.parquet}
VAL_FILES=${VAL_FILES:-$HOME/data/gsm8k/test.parquet}

exec "${PYTHON:-python3}" -m verl.trainer.main_ppo \
    trainer.plugin=sharding \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=1 \
    algorithm.adv_estimator=grpo \
    data.train_files="$TRAIN_FILES" \
    data.val_files="$VAL_FILES" \
    data.train_batch_size=64 \
    data.max_prompt_length=512 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.n=8 \
    "sharding.roles.actor.devices=[0]" \
    "sharding.roles.ref.devices=[0]" \
    sharding.roles.actor.attn_implementation=auto \
    sharding.roles.actor.logits=auto \
    sharding.roles.actor.gradient_checkpointing=true \
    sharding.roles.ref.attn_implementation=auto \
    sharding.roles.ref.logits=auto \
    sharding.roles.actor.max_tokens=16384 \
    sharding.roles.rollout.max_new_tokens=1024 \
    sharding.roles.rollout.batch_size=128 \
    sharding.roles.rollout.gpu_memory_utilization=0.5 \
    "trainer.logger=[console]" \
    trainer.project_name=verl_sharding_examples \
    trainer.val_before_train=False \
    trainer.total_epochs=1 \
    "$@"
