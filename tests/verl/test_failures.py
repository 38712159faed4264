"""Runs that can't go on: they end with the reason, soon, and leave no process behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from tests.verl import harness
from tests.verl.conftest import placed

pytestmark = pytest.mark.verl


@pytest.fixture(scope="module")
def broken_critic(tmp_path_factory):
    """The critic's weights can't be read: its worker fails while it is set up."""
    folder = tmp_path_factory.mktemp("broken")
    critic = folder / "critic"
    shutil.copytree(harness.files().critic, critic)
    (critic / "model.safetensors").write_bytes(b"not a model")
    lines = [line for line in harness.base_overrides(1) if not line.startswith("critic.model.path")]
    lines = [*lines, *placed(actor=[0], critic=[2]), f"critic.model.path={critic}"]
    job = harness.run_trainer(folder, lines, env={harness.RUN: str(folder)})
    return job, harness.left_by(str(folder))


def test_a_worker_that_fails_in_set_up_ends_the_run_with_its_reason(broken_critic):
    job, _ = broken_critic
    assert job.code != 0
    assert "safetensors" in job.output.lower()
    assert "please install trl" not in job.output


def test_a_failed_run_leaves_no_process_behind(broken_critic):
    _, left = broken_critic
    assert left == []


FAILS = """import os

import torch
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine


def optimizer_step(self):
    raise torch.OutOfMemoryError("no memory left on rank 1")


if os.environ.get("RANK") == "1":
    FSDPEngine.optimizer_step = optimizer_step
"""
"""A module that verl imports before it builds a model (`model.external_lib`)."""


@pytest.fixture(scope="module")
def out_of_memory(tmp_path_factory):
    """One rank of the actor runs out of memory in its update, while the other waits for it to clip gradients."""
    folder = tmp_path_factory.mktemp("out-of-memory")
    (folder / "fails_on_rank_1.py").write_text(FAILS)
    lines = [*harness.base_overrides(2), *placed(actor=[0, 1], critic=[2])]
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    job = harness.run_trainer(
        folder,
        [*lines, "actor_rollout_ref.model.external_lib=fails_on_rank_1"],
        env={harness.RUN: str(folder), "PYTHONPATH": path},
    )
    return job, harness.left_by(str(folder))


def test_a_rank_without_memory_ends_the_run_with_its_error_though_others_wait_for_it(out_of_memory):
    job, left = out_of_memory
    assert job.code != 0
    assert job.metrics == {}
    assert "OutOfMemoryError: no memory left on rank 1" in job.output
    assert left == []


@pytest.fixture(scope="module")
def interrupted_demo(tmp_path_factory):
    """`verl-sharding demo`, interrupted while its workers start."""
    cache = tmp_path_factory.mktemp("cache")
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1", harness.RUN: str(cache)}
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    demo = subprocess.Popen(
        [sys.executable, "-m", "verl_ext_sharding.cli.main", "demo", "--device", "cpu", "--verbose"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    seen = []
    assert demo.stdout is not None
    for line in demo.stdout:
        seen.append(line)
        if "starting workers and loading models" in line:
            break
    else:
        pytest.fail("the demo ended before its workers started: " + "".join(seen[-30:]))
    started = {p.pid for p in psutil.Process(demo.pid).children(recursive=True)}
    assert len(harness.processes_of(str(cache))) > 5  # the value reaches Ray's processes
    demo.send_signal(signal.SIGINT)
    rest, _ = demo.communicate(timeout=120)
    result = demo.returncode, rest, started, harness.left_by(str(cache)), bystander.poll()
    bystander.kill()
    bystander.wait()
    return result


def test_an_interrupted_demo_says_so_and_exits_with_130(interrupted_demo):
    code, output, _, _, _ = interrupted_demo
    assert code == 130
    assert "stopped" in output


def test_an_interrupted_demo_ends_every_process_that_it_started(interrupted_demo):
    _, _, started, left, _ = interrupted_demo
    assert len(started) > 5
    assert left == []
    assert [pid for pid in started if psutil.pid_exists(pid) and _is_alive(pid)] == []


def test_an_interrupted_demo_ends_no_other_process(interrupted_demo):
    assert interrupted_demo[4] is None


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
