"""verl's SFT trainer on CPU, under each launcher and alone; and launchers around the PPO trainer, which are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

from tests.verl import harness

pytestmark = pytest.mark.verl

STEPS = 2
ASKED = "trainer.plugin=sharding"
MODULE = ("-m", "verl.trainer.sft_trainer")
TORCHRUN = ("torchrun", "--nproc_per_node=2")
ACCELERATE = ("accelerate", "launch", "--num_processes=2", "--num_machines=1", "--mixed_precision=no")

MEASURES = (
    "sharding.roles.actor.gradient_checkpointing={policy:every_n,every:2}",
    "sharding.roles.actor.offload={params:true,optimizer:step,activations:true}",
    "sharding.roles.actor.logits=chunked",
    "sharding.roles.actor.micro_batch_size=2",
)

BY_HAND = (
    "engine.strategy=fsdp2",
    "engine.use_torch_compile=False",
    "+engine.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
    "model.use_remove_padding=False",
    "+model.override_config.attn_implementation=sdpa",
    "data.num_workers=0",
)
"""What the plugin sets on a CPU, for a run without it."""


@dataclass
class Started:
    """A process that runs, and where it writes."""

    process: subprocess.Popen
    folder: Path

    def finish(self) -> harness.Job:
        """Waits for the end."""
        output, _ = self.process.communicate(timeout=harness.TIMEOUT_S)
        (self.folder / "output.log").write_text(output)
        metrics = harness.read_metrics(self.folder / "metrics.jsonl")
        return harness.Job(code=self.process.returncode, output=output, metrics=metrics)


def start(folder: Path, *arguments: str, launcher: tuple[str, ...] = (), **env: str) -> Started:
    """Starts Python with arguments, under a launcher or alone, free of what a launcher of the tests themselves may have set."""
    folder.mkdir(parents=True, exist_ok=True)
    launchers = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_",
        "TORCHELASTIC_",
        "ACCELERATE_",
        "SLURM_",
        "OMPI_",
        "PMI_",
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith((*launchers, "VERL_"))}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        **env,
    }
    command = [str(Path(sys.executable).parent / launcher[0]), *launcher[1:]] if launcher else [sys.executable]
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return Started(process, folder)


@pytest.fixture(scope="module")
def sft(tmp_path_factory):
    """Starts SFT of the tiny model on a conversation data set."""
    data = tmp_path_factory.mktemp("data") / "train.parquet"
    rows = [(left, right) for left in range(8) for right in range(4)]
    messages = [
        [
            {"role": "user", "content": f"{left}+{right}="},
            {"role": "assistant", "content": f"{left + right}" + " is the sum" * (1 + right)},
        ]
        for left, right in rows
    ]
    pd.DataFrame({"messages": messages}).to_parquet(data)

    def started(name: str, *overrides: str, module: tuple[str, str] = MODULE, **options) -> Started:
        folder = tmp_path_factory.mktemp(name)
        lines = [
            f"model.path={harness.files().model}",
            f"data.train_files={data}",
            "data.train_batch_size=8",
            "data.max_length=128",
            f"trainer.total_training_steps={STEPS}",
            "trainer.resume_mode=disable",
            "trainer.logger=[console,file]",
            f"trainer.default_local_dir={folder}/checkpoints",
        ]
        return start(folder, *module, *lines, *overrides, **options)

    return started


@pytest.fixture(scope="module")
def plain(sft):
    """Two processes of torchrun, the plugin on, nothing asked of it."""
    return sft("plain", ASKED, "trainer.device=cpu", launcher=TORCHRUN).finish()


def curve(job: harness.Job) -> list[float]:
    """Loss and gradient norm of each step."""
    harness.assert_trained(job, STEPS)
    return [job.metrics[step][f"train/{name}"] for step in sorted(job.metrics) for name in ("loss", "grad_norm")]


def test_sft_trains_under_torchrun_on_gloo_and_saves(plain):
    assert len(curve(plain)) == 2 * STEPS
    assert plain.metrics[1]["train/loss"] > plain.metrics[2]["train/loss"]
    assert "global_step_2/model_world_size_2_rank_1.pt" in plain.output


def test_what_the_plugin_sets_is_shown_once(plain):
    assert plain.output.count("engine.strategy=fsdp2  (was fsdp)") == 1
    assert plain.output.count("TORCH_NCCL_ASYNC_ERROR_HANDLING") == 1


def test_memory_measures_leave_loss_and_gradients_as_they_are(plain, sft):
    job = sft("measured", ASKED, "trainer.device=cpu", *MEASURES, launcher=TORCHRUN).finish()
    assert curve(job) == pytest.approx(curve(plain), rel=1e-6)
    done = next(line for line in job.output.splitlines() if "memory of actor" in line)
    for measure in ("gradient checkpointing: every_n", "activations: on the host", "optimizer states: on the host"):
        assert measure in done
    assert "log-probs: chunked" in done
    for change in ("engine.param_offload=True", "data.micro_batch_size_per_gpu=2", "data.use_dynamic_bsz=False"):
        assert change in job.output


def test_sft_without_the_plugin_is_stock_and_says_nothing(plain, sft):
    stock = {"VERL_USE_EXTERNAL_MODULES": "tests.verl.stock_sft", "PYTHONPATH": str(Path(__file__).parents[2])}
    job = sft(
        "stock",
        "trainer.device=cpu",
        *BY_HAND,
        launcher=TORCHRUN,
        VERL_PLATFORM="cpu",
        VERL_LOGGING_LEVEL="WARN",
        **stock,
    ).finish()
    assert curve(job) == curve(plain)
    assert "(was " not in job.output
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in job.output
    assert "patch logprobs-chunked" not in job.output


def test_accelerate_launch_gives_each_process_its_rank(plain, sft):
    job = sft("accelerate", ASKED, "trainer.device=cpu", launcher=(*ACCELERATE, "--multi_gpu")).finish()
    assert curve(job) == pytest.approx(curve(plain), rel=1e-6)
    assert "model_world_size_2_rank_1.pt" in job.output


def test_a_process_that_no_launcher_started_trains_alone(plain, sft):
    job = sft("alone", ASKED, VERL_PLATFORM="cpu").finish()
    assert curve(job) == pytest.approx(curve(plain), rel=1e-6)
    assert "trainer.device=cpu  (was cuda)" in job.output
    assert "model_world_size_1_rank_0.pt" in job.output


# Refused


@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_a_launcher_around_the_ppo_trainer_is_refused_before_verl_is_imported(launcher, tmp_path):
    overrides = [*harness.base_overrides(steps=1), "sharding.roles.critic.devices=[2,3]"]
    job = start(tmp_path, "-m", "verl.trainer.main_ppo", *overrides, launcher=launcher).finish()
    assert job.code != 0
    assert f"verl.trainer.main_ppo under {' '.join(launcher[: 2 if launcher is ACCELERATE else 1])}" in job.output
    command = next(line for line in job.output.splitlines() if "fix:" in line)
    assert "python -m verl.trainer.main_ppo trainer.plugin=sharding" in command
    assert command.endswith("'sharding.roles.critic.devices=[2,3]'")
    assert "Hydra" not in job.output


@pytest.fixture(scope="module")
def refused(sft, tmp_path_factory):
    """Three runs that end before anything is built, side by side."""
    ppo = [line.replace(ASKED, f"++{ASKED}") for line in harness.base_overrides(steps=1)]
    rank_1 = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    jobs = {
        "other role": sft("role", ASKED, "trainer.device=cpu", "sharding.roles.critic.dtype=bfloat16"),
        "ray": sft("ray", ASKED, "trainer.device=cpu", module=("-m", "verl.trainer.sft_trainer_ray")),
        "driver": start(tmp_path_factory.mktemp("driver"), "-m", "verl.trainer.main_ppo", *ppo, **rank_1),
    }
    return {name: job.finish() for name, job in jobs.items()}


def test_a_setting_of_another_role_ends_the_run_before_the_model_loads(refused):
    job = refused["other role"]
    assert job.code != 0
    assert "remove sharding.roles.critic.dtype, or write sharding.roles.actor.dtype" in job.output
    assert "Loading weights" not in job.output


def test_sft_on_ray_is_refused_with_the_command_for_torchrun(refused):
    job = refused["ray"]
    assert job.code != 0
    assert "fix:      torchrun --nproc_per_node=gpu -m verl.trainer.sft_trainer model.path=" in job.output


def test_a_second_driver_that_the_command_line_did_not_show_is_refused_before_ray_starts(refused):
    job = refused["driver"]
    assert job.code != 0
    assert "torchrun, process 1 of 2 (WORLD_SIZE=2)" in job.output
    assert "fix:      python -m verl.trainer.main_ppo ++trainer.plugin=sharding" in job.output
    assert "ray init kwargs" not in job.output
