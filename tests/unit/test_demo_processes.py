"""A run of the demo: its output line by line, and its end without leaving anything behind or taking anything along."""

import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from verl_ext_sharding.demo import processes
from verl_ext_sharding.demo.processes import Run


@pytest.fixture
def run(tmp_path):
    """Starts a script as a run; whatever is left of it when the test ends is killed by its process id."""
    started = []

    def start(script, env=None, **variables):
        env = dict(os.environ, PYTHONUNBUFFERED="1") if env is None else env
        child = Run([sys.executable, "-c", textwrap.dedent(script)], env={**env, **variables}, cwd=str(tmp_path))
        started.append(psutil.Process(child._child.pid))
        return child

    yield start
    for child in started:
        if child.is_running():
            for process in [*child.children(recursive=True), child]:
                process.kill()


def is_gone(pid):
    """Whether a process is no longer there, or only its exit code is."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def pids_after(marker, lines):
    """The process ids that a run printed in a line that starts with a marker."""
    line = next(line for line in lines if line.startswith(marker))
    return [int(pid) for pid in line.split()[1:]]


# Output


def test_lines_come_in_order_from_both_streams_and_the_exit_code_is_the_programs(run):
    child = run(
        """
        import sys
        print("one")
        print("two", file=sys.stderr)
        print("three  ")
        sys.exit(3)
        """
    )
    assert list(child.lines()) == ["one", "two", "three  "]
    assert child.wait() == 3


def test_bytes_that_are_no_text_do_not_stop_the_output(run):
    child = run("import os; os.write(1, b'\\xff\\xfe caf\\xc3\\xa9\\nend\\n')")
    first, second = child.lines()
    assert first.endswith(" café")
    assert second == "end"


def test_a_last_line_without_an_end_is_a_line(run):
    assert list(run("print('no end', end='')").lines()) == ["no end"]


def test_a_run_sees_its_own_folder_and_exactly_the_environment_that_it_was_given(run, tmp_path):
    child = run("import os; print(os.getcwd()); print(sorted(os.environ))", env={"ONLY": "1"})
    folder, names = child.lines()
    assert os.path.samefile(folder, tmp_path)
    assert "ONLY" in names
    assert "HOME" not in names


def test_a_program_that_a_signal_ended_has_a_negative_code(run):
    child = run("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert list(child.lines()) == []
    assert child.wait() == -signal.SIGTERM


# The end


FAMILY = """
import subprocess, sys, time
sleeper = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
stubborn = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
            "signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"]
parts = [subprocess.Popen(sleeper, stdout=subprocess.PIPE),
         subprocess.Popen(stubborn, stdout=subprocess.PIPE),
         subprocess.Popen(sleeper, stdout=subprocess.PIPE, start_new_session=True)]
for part in parts:
    part.stdout.readline()
print("family", *(part.pid for part in parts))
time.sleep(600)
"""


def test_stopping_ends_every_process_of_the_run_also_those_that_ignore_signals(run):
    child = run(FAMILY)
    family = pids_after("family", child.lines())
    child.stop()
    assert [pid for pid in [child._child.pid, *family] if not is_gone(pid)] == []


def test_stopping_ends_no_other_process(run):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as bystander:
        try:
            child = run("import time; print('ready'); time.sleep(600)")
            assert next(child.lines()) == "ready"
            child.stop()
            assert bystander.poll() is None
        finally:
            bystander.kill()


def test_a_run_may_end_by_itself_when_it_is_interrupted(run, tmp_path):
    child = run(
        """
        import pathlib, time
        try:
            print("ready")
            time.sleep(600)
        except KeyboardInterrupt:
            time.sleep(0.2)
            pathlib.Path("tidied").touch()
            raise SystemExit(7)
        """
    )
    assert next(child.lines()) == "ready"
    child.stop()
    assert (tmp_path / "tidied").exists()
    assert child.wait() == 7


def test_a_run_that_does_not_end_by_itself_is_ended(run, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 0.1)
    child = run(
        """
        import signal, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("ready")
        time.sleep(600)
        """
    )
    assert next(child.lines()) == "ready"
    child.stop()
    assert is_gone(child._child.pid)


def test_a_run_that_writes_more_than_anyone_reads_can_be_stopped(run, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 0.1)
    child = run(
        """
        import signal, sys
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("ready")
        while True:
            sys.stdout.write("x" * 100_000)
        """
    )
    assert next(child.lines()) == "ready"
    child.stop()
    assert is_gone(child._child.pid)


def test_children_of_a_parent_that_ends_first_are_ended_too(run):
    child = run(
        """
        import subprocess, sys, time
        part = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print("family", part.pid)
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            raise SystemExit(0)
        """
    )
    (orphan,) = pids_after("family", child.lines())
    child.stop()
    assert is_gone(orphan)


def test_an_interrupt_of_this_process_does_not_reach_the_run_by_itself(run):
    child = run("import os; print('group', os.getpgrp())")
    assert pids_after("group", child.lines()) != [os.getpgrp()]


def test_a_run_that_has_ended_can_be_stopped(run):
    child = run("pass")
    assert child.wait() == 0
    child.stop()
    child.stop()
    assert child.wait() == 0
