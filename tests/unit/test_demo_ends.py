"""However the demo ends, its trainer ends with it: interrupts of each kind, a reader that leaves, a log that can't be written."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from verl_ext_sharding.demo import command, processes, runner
from verl_ext_sharding.demo.processes import Interrupts

DEMO = """
import resource, signal, sys
from verl_ext_sharding.cli import main
from verl_ext_sharding.demo import assets, runner

def build(model, root):
    root.mkdir(parents=True, exist_ok=True)
    return assets.Assets(**dict.fromkeys(("model", "critic", "train_files", "val_files", "reward"), root))

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
runner._devices = lambda device: ("cpu", 4)
if "full" in sys.argv:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, 2**12))
if "real-files" not in sys.argv:
    assets.build = build
sys.exit(main.main(["demo", "--verbose"]))
"""

TRAINER = """
import contextlib, os, signal, time
if {stubborn}:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
print("trainer", os.getpid(), flush=True)
while True:
    with contextlib.suppress(OSError):
        os.write(1, b"x" * 1000 + b"\\n")
    time.sleep(0.05)
"""
"""Goes on when nobody reads it any more, as Ray's driver does."""


@pytest.fixture
def demo(tmp_path):
    """Starts the demo with a script in place of verl's trainer, and returns it once that runs, with its process."""
    started = []

    def start(*words, stubborn=False):
        trainer = tmp_path / "verl" / "trainer"
        trainer.mkdir(parents=True)
        for folder in (trainer.parent, trainer):
            (folder / "__init__.py").touch()
        (trainer / "main_ppo.py").write_text(TRAINER.format(stubborn=stubborn))
        path = os.pathsep.join([str(tmp_path), *sys.path])
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(DEMO), *words],
            env={**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(psutil.Process(child.pid))
        for line in child.stdout:
            if line.startswith("trainer "):
                started.append(psutil.Process(int(line.split()[1])))
                return child, started[-1]
        pytest.fail("no trainer was started: " + child.stderr.read())

    yield start
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def has_ended(process):
    psutil.wait_procs([process], timeout=10)
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_that_ends_the_demo_ends_its_trainer(number, demo):
    child, trainer = demo()
    child.send_signal(number)
    output, errors = child.communicate(timeout=30)
    assert child.returncode == 128 + number
    assert output.splitlines()[-1] == "stopped"
    assert errors == ""
    assert has_ended(trainer)


def test_a_second_interrupt_waits_for_nothing_and_leaves_nothing(demo):
    child, trainer = demo(stubborn=True)
    child.send_signal(signal.SIGINT)
    for line in child.stdout:
        if line.startswith("stopping"):
            break
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=processes.GRACE_S / 2)
    assert child.returncode == 130
    assert has_ended(trainer)


def test_a_reader_of_the_output_that_leaves_ends_the_trainer(demo):
    child, trainer = demo()
    child.stdout.close()
    child.wait(timeout=30)
    assert child.returncode not in (0, None)
    assert has_ended(trainer)


def test_a_full_disk_ends_the_trainer_and_is_told(demo):
    child, trainer = demo("full")
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 2
    assert "XDG_CACHE_HOME=/tmp/verl-sharding verl-sharding demo" in errors
    assert "Traceback" not in errors
    assert has_ended(trainer)


def test_a_cache_folder_that_can_not_be_made_is_told_without_a_traceback(tmp_path):
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DEMO), "real-files"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XDG_CACHE_HOME": str(tmp_path / "file")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "XDG_CACHE_HOME=/tmp/verl-sharding" in done.stderr
    assert "Traceback" not in done.stderr


def test_two_demos_at_once_write_two_logs(tmp_path):
    with command.open_log(tmp_path) as first:
        first.write("first\n")
        first.flush()
        with command.open_log(tmp_path) as second:
            assert second.name != first.name
        assert Path(first.name).read_text() == "first\n"
    with command.open_log(tmp_path) as third:
        assert third.name == first.name
        assert Path(first.name).read_text() == ""


def test_the_trainer_finds_what_a_relative_python_path_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([".", "lib", "/opt/lib"]))
    expected = os.pathsep.join([str(tmp_path), str(tmp_path / "lib"), "/opt/lib"])
    assert runner._environment()["PYTHONPATH"] == expected


def test_a_signal_while_the_trainer_starts_is_raised_once_it_can_be_stopped(monkeypatch):
    def started(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)  # Python calls handlers between two instructions
        return "run"

    monkeypatch.setattr(processes, "Run", started)
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        assert interrupts.start([], {}, "") == "run"
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert interrupts.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_was_told_to_outlive_its_terminal_does():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_torn_number_in_a_line_of_metrics_is_no_end_of_the_demo(capsys):
    observed = runner.Observed()
    runner._on_step(1, "timing_s/step:4.5 - critic/score/mean:1.2.3", observed, 1, time.monotonic())
    assert observed.steps[1]["timing_s/step"] == 4.5
