"""The demo's command: verl's own trainer with the tiny model, each role on its own device where there are enough."""

from __future__ import annotations

import fcntl
import os
from importlib import util
from pathlib import Path
from typing import TextIO

from verl_ext_sharding.demo.assets import Assets

CPU_DEVICES = 4
"""Logical devices of a demo without GPUs."""


def role_devices(num_devices: int) -> dict[str, list[int]]:
    """Devices of each role, by how many there are: apart from four on, together on one."""
    layouts: dict[int, dict[str, list[int]]] = {
        1: {"actor": [0], "critic": [0], "ref": [0]},
        2: {"actor": [0], "critic": [1], "ref": [1]},
        3: {"actor": [0], "critic": [1], "ref": [2]},
    }
    return layouts.get(num_devices, {"actor": [0, 1], "critic": [2], "ref": [3]})


def overrides(assets: Assets, *, device: str, num_devices: int, steps: int) -> list[str]:
    """Overrides of `python -m verl.trainer.main_ppo`.

    Args:
        assets: The demo's files.
        device: "cpu" or "cuda".
        num_devices: Logical devices or GPUs to use, 1 to 4.
        steps: PPO steps.
    """
    lines = ["trainer.plugin=sharding", f"trainer.device={device}"]
    lines += [f"sharding.roles.{role}.devices={devices}" for role, devices in role_devices(num_devices).items()]
    return [line.replace(" ", "") for line in lines] + _job(assets, num_devices, steps) + _engine(device)


def _job(assets: Assets, num_devices: int, steps: int) -> list[str]:
    return [
        "trainer.nnodes=1",
        "+ray_kwargs.ray_init.include_dashboard=False",
        f"trainer.n_gpus_per_node={num_devices}",
        f"trainer.total_training_steps={steps}",
        "trainer.logger=[console]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        f"data.train_files={assets.train_files}",
        f"data.val_files={assets.val_files}",
        "data.train_batch_size=8",
        "data.max_prompt_length=64",
        "data.max_response_length=16",
        "data.dataloader_num_workers=0",
        "data.seed=0",
        f"actor_rollout_ref.model.path={assets.model}",
        f"critic.model.path={assets.critic}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
        "critic.use_dynamic_bsz=True",  # as the v1 trainer has it, whatever stands here
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "critic.optim.lr=1e-3",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={assets.reward}",
    ]


def _engine(device: str) -> list[str]:
    """What a GPU run needs beyond verl's defaults: a rollout that is installed, and no flash-attn where it is not."""
    if device == "cpu":
        return []
    rollout = "vllm" if util.find_spec("vllm") else "hf"
    lines = [
        f"actor_rollout_ref.rollout.name={rollout}",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
        "actor_rollout_ref.rollout.enforce_eager=True",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "critic.strategy=fsdp2",
    ]
    if util.find_spec("flash_attn") is None:
        for model in ("actor_rollout_ref.model", "critic.model"):
            lines += [f"+{model}.override_config.attn_implementation=sdpa", f"{model}.use_remove_padding=False"]
    return lines


def open_log(root: Path) -> TextIO:
    """Opens the file in which everything stands that verl and Ray print: `demo.log`, emptied first.

    A demo that runs at the same time keeps it; this one's then has its process id in its name.

    Args:
        root: The cache folder.
    """
    log = (root / "demo.log").open("a", encoding="utf-8")
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks
        log.close()
        return (root / f"demo-{os.getpid()}.log").open("w", encoding="utf-8")
    log.truncate(0)
    return log
