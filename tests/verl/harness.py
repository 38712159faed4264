"""Runs verl's own trainer on CPU and collects what it did. One run takes minutes: fixtures share them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from verl_ext_sharding import envs
from verl_ext_sharding.demo import assets, command
from verl_ext_sharding.monitor import events

TIMEOUT_S = 900

RUN = "VERL_SHARDING_TEST_RUN"
"""Variable by which the processes of one run are told from those of others."""

NOISE = 5e-7
"""fp32 rounding of sums that are zero in exact arithmetic, such as mean advantages."""

NOT_COMPARED = (
    "timing",  # seconds
    "perf/",
    "mfu",
    "throughput",
    "agent_loop",
    "global_seqlen",  # of each data-parallel rank, whose number differs
    "rollout_probs_diff",  # rounding itself
    "rollout_corr/chi2",  # differences of rollout and actor log-probs: rounding again
    "rollout_corr/log_ppl_",
    "rollout_corr/kl",
    "critic/vpred_mean",  # mean over micro-batches of means over tokens: depends on how samples are grouped
)


@dataclass
class Job:
    """What a run left behind."""

    code: int
    output: str
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    events: list[dict] = field(default_factory=list)

    @property
    def placement(self) -> dict[str, list[int]]:
        """`{role: device numbers}` read back from the workers."""
        rows = [row for event in self.events if event["event"] == "placement" for row in event["rows"]]
        return {role: [r["device"] for r in rows if r["role"] == role] for role in {row["role"] for row in rows}}

    @property
    def rows(self) -> list[dict]:
        """Rows of the placement table, as read back."""
        return [row for event in self.events if event["event"] == "placement" for row in event["rows"]]


def files() -> assets.Assets:
    """The tiny model, built once per machine."""
    return assets.build()


def base_overrides(steps: int, num_devices: int = 4) -> list[str]:
    """The demo's job without its placement."""
    lines = command.overrides(files(), device="cpu", num_devices=num_devices, steps=steps)
    return [line for line in lines if not line.startswith("sharding.roles.")]


def run_trainer(folder: Path, overrides: list[str], env: dict[str, str] | None = None, live: Path | None = None) -> Job:
    """Runs `python -m verl.trainer.main_ppo` and waits for it.

    Args:
        folder: For its logs.
        overrides: Of verl's config.
        env: Variables beside the test's own.
        live: File that gets the output while the run goes on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = live or folder / "output.log"
    metrics = folder / "metrics.jsonl"
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_ADDRESS": "local",  # a Ray of its own, whatever else runs on this machine
        "OMP_NUM_THREADS": "1",
        envs.PRESTART: "0",
        "TOKENIZERS_PARALLELISM": "false",
        "VERL_SHARDING_EVENTS": "1",
        "VERL_FILE_LOGGER_PATH": str(metrics),
        **(env or {}),
    }
    with log.open("w") as stream:
        done = subprocess.run(
            [sys.executable, "-m", "verl.trainer.main_ppo", *overrides, "trainer.logger=[console,file]"],
            cwd=folder,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
        )
    output = log.read_text(errors="replace")
    return Job(
        code=done.returncode,
        output=output,
        metrics=read_metrics(metrics),
        events=[event for line in output.splitlines() if (event := events.parse(line))],
    )


def processes_of(run: str) -> list[int]:
    """Processes that live and carry a run's value of `RUN`."""
    return [process.pid for process in psutil.process_iter() if _carries(process, run)]


def left_by(run: str) -> list[int]:
    """Processes of a run that are still there once they had time to end."""
    for _ in range(60):
        if not processes_of(run):
            break
        time.sleep(0.5)
    return processes_of(run)


def _carries(process: psutil.Process, run: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(RUN) == run
    except psutil.Error:
        return False


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """`{step: metrics}` from verl's file logger."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: line["data"] for line in lines}


def differences(left: dict[str, float], right: dict[str, float], rel: float = 1e-5) -> dict[str, tuple]:
    """Metrics of one step that differ by more than `rel`, timings and rounding aside."""
    compared = [name for name in left if not any(part in name for part in NOT_COMPARED)]
    assert len(compared) > 40, f"only {len(compared)} metrics to compare"
    found = {}
    for name in compared:
        a, b = left[name], right.get(name)
        if not isinstance(a, int | float):
            continue
        if b is None or abs(a - b) > max(rel * max(abs(a), abs(b)), NOISE):
            found[name] = (a, b)
    return found


def assert_trained(job: Job, steps: int) -> None:
    """The run ended well after that many steps; else its last lines are shown."""
    assert job.code == 0, job.output[-6000:]
    assert len(job.metrics) >= steps, job.output[-3000:]
