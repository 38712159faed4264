#!/usr/bin/env bash
# GRPO on four cards of 80 GB (A100, H100): 7B, every parameter trained, sharded over all four.
#
# Update: 16 bytes a parameter over four cards, 28 GiB, and about 8 GiB for activations and log-probs of 16384 tokens.
# Generation: 21 GiB of the actor stay beside vLLM, which takes half of each card: 14 GiB of weights, the rest for its
# cache. Host: 28 GiB for the reference policy, which verl always keeps there.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
TRAIN_FILES=${TRAIN_FILES:-$HOME/data/gsm8k/train.parquet}
VAL_FILES=${VAL_FILES:-$HOME/data/gsm8k/test.parquet}

exec "${PYTHON:-python3}" -m verl.trainer.main_ppo \
    trainer.plugin=sharding \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=4 \
    algorithm.adv_estimator=grpo \
    data.train_files="$TRAIN_FILES" \
    data.val_files="$VAL_FILES" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.n=8 \
    "sharding.roles.actor.devices=[0,1,2,3]" \
    "sharding.roles.ref.devices=[0,1,2,3]" \
    sharding.roles.actor.attn_implementation=auto \
    sharding.roles.actor.logits=auto \
    sharding.roles.actor.gradient_checkpointing=true \
    sharding.roles.ref.attn_implementation=auto \
    sharding.roles.ref.logits=auto \
    sharding.roles.actor.max_tokens=16384 \
    sharding.roles.rollout.max_new_tokens=2048 \
    sharding.roles.rollout.batch_size=256 \
    sharding.roles.rollout.gpu_memory_utilization=0.5 \
    "trainer.logger=[console]" \
    trainer.project_name=verl_sharding_examples \
    trainer.val_before_train=False \
    trainer.total_epochs=1 \
    "$@"
