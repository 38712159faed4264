"""Runs a command in a session of its own, line by line, and ends every process that it started and no other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence

import psutil

GRACE_S = 20.0
"""How long an interrupted run may take to end by itself."""


class Run:
    """A child process and its descendants.

    Args:
        command: Program and arguments.
        env: Its whole environment.
        cwd: Its working folder.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        with _interruptible():
            self._child = subprocess.Popen(
                command,
                env=dict(env),
                cwd=cwd,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
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
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(GRACE_S)
        descendants |= self._descendants()
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(list(descendants), timeout=5)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=5)
        self._child.wait()

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
