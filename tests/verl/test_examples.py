"""The scripts in examples/: each composes as it is, those for four cards also train at tiny size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verl import harness

pytestmark = pytest.mark.verl

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.sh"))


def _tiny(script: Path) -> list[str]:
    files = harness.files()
    lines = [
        "trainer.device=cpu",
        "actor_rollout_ref.rollout.name=hf",
        "data.train_batch_size=8",
        "data.max_prompt_length=64",
        "sharding.roles.rollout.max_new_tokens=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.total_training_steps=1",
        "trainer.resume_mode=disable",
        f"reward.custom_reward_function.path={files.reward}",
        "+ray_kwargs.ray_init.include_dashboard=False",
    ]
    return lines if script.name.startswith("grpo") else [*lines, f"critic.model.path={files.critic}"]


def _environment(**extra: str) -> dict[str, str]:
    files = harness.files()
    return {
        **os.environ,
        "PYTHON": sys.executable,
        "MODEL": str(files.model),
        "TRAIN_FILES": str(files.train_files),
        "VAL_FILES": str(files.val_files),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "RAY_ADDRESS": "local",
        **extra,
    }


def _run(script: Path, *arguments: str, cwd: Path, **extra: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(script), *arguments],
        cwd=cwd,
        env=_environment(**extra),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=harness.TIMEOUT_S,
    )


def test_there_is_an_example_for_each_machine_and_algorithm():
    assert [script.stem for script in EXAMPLES] == [
        f"{algorithm}_{machine}" for algorithm in ("grpo", "ppo") for machine in ("1x24gb", "4x24gb", "4x80gb")
    ]


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_an_example_composes_and_passes_its_arguments_on(script, tmp_path):
    done = _run(script, "trainer.total_epochs=7", "--cfg", "job", cwd=tmp_path)  # argparse wants flags last
    assert done.returncode == 0, done.stderr[-2000:]
    assert "plugin: sharding" in done.stdout
    assert "total_epochs: 7" in done.stdout


@pytest.mark.parametrize("script", [s for s in EXAMPLES if "4x24gb" in s.stem], ids=lambda script: script.stem)
def test_an_example_for_four_cards_trains_on_four_logical_devices(script, tmp_path):
    done = _run(script, *_tiny(script), cwd=tmp_path, VERL_SHARDING_EVENTS="1", RAY_DEDUP_LOGS="0")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert "step:1 - " in done.stdout
    assert '"event": "placement"' in done.stdout
