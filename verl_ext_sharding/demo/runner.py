"""Runs the demo and shows it: a line for each long stage and each step, and the devices read back at the end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from verl_ext_sharding import envs
from verl_ext_sharding.cli import render
from verl_ext_sharding.demo import assets, command
from verl_ext_sharding.demo.processes import Interrupts, Run
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.monitor import events
from verl_ext_sharding.placement.devices import format_devices

_STEP = re.compile(r"\bstep:(\d+) - (.*)")
_METRIC = re.compile(r"([\w/@.\-]+):(?:np\.\w+\()?(-?\d+(?:\.\d*)?(?:e[+-]?\d+)?|nan|inf)")
_TAIL_LINES = 40

_STAGES = {
    "ray": "starting Ray",
    "nodes": "comparing versions on each node",
    "devices": "reserving devices",
    "workers": "starting workers and loading models",
    "rollout": "starting rollout servers",
    "training": "generating and training",
}


@dataclass(kw_only=True)
class Observed:
    """What was seen of a run.

    Args:
        rows: Devices read back from the workers.
        steps: Metrics of each step.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    steps: dict[int, dict[str, float]] = field(default_factory=dict)


def run(*, steps: int, device: str, verbose: bool, overrides: Sequence[str]) -> int:
    """Trains the tiny model and prints what happened.

    Args:
        steps: PPO steps, 1 or more.
        device: "auto", "cpu" or "cuda".
        verbose: Print all output of verl and Ray.
        overrides: Further overrides for verl's trainer.

    Returns:
        0 when the run trained every step on the devices that it was asked to, else the trainer's exit code or 1.
    """
    if steps < 1:
        raise _no_steps(steps)
    with Interrupts() as interrupts:
        try:
            return _run(interrupts, steps, device, verbose, overrides)
        except KeyboardInterrupt:
            render.show("stopped")
            return 128 + (interrupts.number or signal.SIGINT)


def _run(interrupts: Interrupts, steps: int, device: str, verbose: bool, overrides: Sequence[str]) -> int:
    started = time.monotonic()
    device, num_devices = _devices(device)
    root = assets.cache_root()
    try:
        files = assets.build(_model(device), root)
        log = command.open_log(root)
    except OSError as error:
        raise _not_written(error) from error
    lines = [*command.overrides(files, device=device, num_devices=num_devices, steps=steps), *overrides]
    render.show(
        f"verl.trainer.main_ppo on {num_devices} {'logical devices' if device == 'cpu' else 'GPUs'}, {steps} steps"
    )
    render.show(f"all output: {log.name}")
    trainer = interrupts.start([sys.executable, "-m", "verl.trainer.main_ppo", *lines], _environment(), str(root))
    try:
        interrupts.check()
        observed = _follow(trainer, log, steps, started, verbose)
        code = trainer.wait()
    except BaseException as error:  # a full disk, or a reader of our output that has left: `verl-sharding demo | head`
        with contextlib.ExitStack() as last:
            last.callback(trainer.stop)
            if isinstance(error, KeyboardInterrupt):
                render.show("stopping: ending every process of this demo (at once, if you interrupt again)")
        raise
    if code != 0:
        _show_failure(Path(log.name), code)
        return code if code > 0 else 1
    return _summarise(observed, steps, time.monotonic() - started)


def _follow(trainer: Run, log: TextIO, steps: int, started: float, verbose: bool) -> Observed:
    observed = Observed()
    try:
        for line in trainer.lines():
            try:
                log.write(line + "\n")
                log.flush()
            except OSError as error:
                raise _not_written(error) from error
            if verbose:
                sys.stdout.write(line + "\n")
            event = events.parse(line)
            if event is not None:
                _on_event(event, observed, started)
            elif match := _STEP.search(line):
                _on_step(int(match[1]), match[2], observed, steps, started)
    finally:
        with contextlib.suppress(OSError):  # what could not be written is told above
            log.close()
    return observed


def _on_event(event: dict[str, Any], observed: Observed, started: float) -> None:
    if event["event"] == "placement":
        observed.rows = event["rows"]
    elif event["event"] == "stage":
        _progress(_STAGES.get(event["name"], event["name"]), started)


def _on_step(number: int, text: str, observed: Observed, steps: int, started: float) -> None:
    metrics = {name: float(value) for name, value in _METRIC.findall(text)}
    if "timing_s/step" not in metrics:
        return
    observed.steps[number] = metrics
    reward = metrics.get("critic/score/mean", float("nan"))
    _progress(f"step {number}/{steps}: {metrics['timing_s/step']:.1f} s, reward {reward:.3f}", started)


def _progress(text: str, started: float) -> None:
    render.show(f"  {time.monotonic() - started:5.0f} s  {text}")
    sys.stdout.flush()


def _summarise(observed: Observed, steps: int, total_s: float) -> int:
    rows: list[tuple[Any, ...]] = []
    for role in dict.fromkeys(row["role"] for row in observed.rows):
        mine = [row for row in observed.rows if row["role"] == role]
        known = sorted({device for row in mine for device in row["devices"]})
        ids = [number for row in mine for number in row["accelerator"].split(",")]
        accelerators = sorted({int(number) for number in ids if number.isdigit()})
        rows.append(
            (
                role,
                format_devices(known or accelerators),
                ",".join(row["accelerator"] for row in mine),
                mine[0]["worker"],
                mine[0]["engine"],
                _phases(role, observed.steps),
            )
        )
    columns: tuple[str, ...] = ("role", "devices", "accelerators", "worker", "engine", "time in the last step")
    render.show(render.table("Roles and devices (read back from the workers)", columns, rows))
    columns = ("step", "time s", "reward", "rollout/actor prob difference (max)")
    render.show(render.table("Steps", columns, [_step_row(n, m) for n, m in sorted(observed.steps.items())]))
    complete = len(observed.steps) == steps and bool(observed.rows)
    render.show(f"{'done' if complete else 'incomplete'}: {len(observed.steps)} of {steps} steps in {total_s:.0f} s")
    return 0 if complete else 1


def _step_row(number: int, metrics: dict[str, float]) -> tuple[Any, ...]:
    difference = metrics.get("training/rollout_probs_diff_max")
    return (
        number,
        f"{metrics['timing_s/step']:.1f}",
        f"{metrics.get('critic/score/mean', float('nan')):.3f}",
        None if difference is None else f"{difference:.1e}",
    )


_PHASES = {
    "actor": ("old_log_prob", "update_actor"),
    "rollout": ("gen",),
    "critic": ("values", "update_critic"),
    "ref": ("ref",),
}


def _phases(role: str, steps: dict[int, dict[str, float]]) -> str | None:
    if not steps:
        return None
    last = steps[max(steps)]
    times = [(name, last.get(f"timing_s/{name}")) for name in _PHASES.get(role, ())]
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in times if seconds is not None) or None


def _devices(device: str) -> tuple[str, int]:
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and not gpus:
        raise ConfigError(
            "--device",
            expected="cpu or auto on a machine without GPUs",
            found="cuda, but torch sees no GPU",
            consequence="the demo does not start",
            remedy="verl-sharding demo --device cpu",
        )
    if device == "cpu" or not gpus:
        return "cpu", command.CPU_DEVICES
    return "cuda", min(gpus, command.CPU_DEVICES)


def _model(device: str) -> assets.TinyModel:
    """On GPUs, heads of 64: inference kernels know no smaller ones."""
    return assets.TinyModel() if device == "cpu" else assets.TinyModel(hidden_size=256, intermediate_size=512)


def _environment() -> dict[str, str]:
    defaults = {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false"}
    fixed = {envs.EVENTS: "1", "RAY_ADDRESS": "local", "RAY_DEDUP_LOGS": "0", "PYTHONUNBUFFERED": "1"}
    threads = {"OMP_NUM_THREADS": "1"} if (os.cpu_count() or 1) <= command.CPU_DEVICES else {}
    found = os.environ.get("PYTHONPATH")
    if found:  # entries may be relative, and the trainer runs in a folder of its own
        fixed["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in found.split(os.pathsep))
    return {**threads, **defaults, **os.environ, **fixed}


def _show_failure(log: Path, code: int) -> None:
    tail = deque(log.read_text(encoding="utf-8", errors="replace").splitlines(), maxlen=_TAIL_LINES)
    for line in tail:
        render.show(line)
    render.show(f"the trainer ended with exit code {code}; all output: {log}")


def _not_written(error: OSError) -> ConfigError:
    return ConfigError(
        "XDG_CACHE_HOME, or else ~/.cache: where the demo's files and its log lie",
        expected="a folder that you can write to, with some megabytes free",
        found=str(error),
        consequence="the demo ends, and leaves nothing running",
        remedy="XDG_CACHE_HOME=/tmp/verl-sharding verl-sharding demo",
    )


def _no_steps(steps: int) -> ConfigError:
    return ConfigError(
        "--steps",
        expected="1 or more",
        found=str(steps),
        consequence="the demo does not start",
        remedy="verl-sharding demo --steps 3",
    )
