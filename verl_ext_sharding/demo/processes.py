"""Runs a command in a session of its own, line by line, and ends every process that it started and no other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil

GRACE_S = 20.0
"""How long an interrupted run may take to end by itself."""

_POLL_S = 0.1


class Run:
    """A child process and its descendants.

    Args:
        command: Program and arguments.
        env: Its whole environment.
        cwd: Its working folder.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        self._hurried = False
        with _interruptible():
            self._child = subprocess.Popen(
                command,
                env=dict(env),
                cwd=cwd,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",  # whatever the locale is: Ray and rich write it
                errors="replace",
                bufsize=1,
                start_new_session=True,  # Ctrl-C reaches us alone; we pass it on
            )

    def lines(self) -> Iterator[str]:
        """Output of the run, as it comes."""
        assert self._child.stdout is not None
        for line in self._child.stdout:
            yield line.rstrip("\n")

    def wait(self) -> int:
        """Exit code, negative for a signal."""
        return self._child.wait()

    def stop(self) -> None:
        """Interrupts the run, waits, and ends what is left of its descendants."""
        descendants = self._descendants()
        self._signal(signal.SIGINT)
        until = time.monotonic() + GRACE_S
        while self._child.poll() is None and time.monotonic() < until and not self._hurried:
            time.sleep(_POLL_S)
            descendants |= self._descendants()  # an interrupted run may still be starting some
        for process in list(descendants):
            with contextlib.suppress(psutil.NoSuchProcess):
                descendants |= set(process.children(recursive=True))
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(list(descendants), timeout=5)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=5)
        self._child.wait()

    def hurry(self) -> None:
        """Lets `stop`, which may be under way, wait no longer for the run to end by itself."""
        self._hurried = True

    def _descendants(self) -> set[psutil.Process]:
        """The child and all processes below it; psutil tells a reused process id from the one that we saw."""
        try:
            child = psutil.Process(self._child.pid)
            return {child, *child.children(recursive=True)}
        except psutil.NoSuchProcess:
            return set()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child.pid, number)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """A process that a script started in the background ignores SIGINT, and so would its children."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if not ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


class Interrupts:
    """Inside the block, the first signal that asks this process to end raises KeyboardInterrupt, so that what it started is
    ended too; a further one lets that wait no longer.

    Set by hand: a process started in the background of a script ignores Ctrl-C until told otherwise, and SIGTERM or the end
    of the terminal would end this process alone. A run that was started with `nohup` outlives its terminal.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._run: Run | None = None
        self._starting = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def start(self, command: Sequence[str], env: Mapping[str, str], cwd: str) -> Run:
        """Starts a run; a signal that comes meanwhile is raised once somebody can stop it, see `check`.

        Args:
            command: As of `Run`.
            env: As of `Run`.
            cwd: As of `Run`.
        """
        self._starting = True
        self._run = Run(command, env, cwd)
        return self._run

    def check(self) -> None:
        """Raises what came while the run was started."""
        self._starting = False
        if self.number is not None:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, _frame: Any) -> None:
        first = self.number is None
        self.number = self.number or number
        if not first and self._run is not None:
            self._run.hurry()
        elif first and not self._starting:
            raise KeyboardInterrupt
