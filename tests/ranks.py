"""Several ranks on gloo: checks that run in each of them, and programs of which each rank is a process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl_ext_sharding import envs

TIMEOUT_S = 900


def run(check: Callable[..., None], *args: Any, num_ranks: int = 2) -> None:
    """`check(rank, *args)` in each rank of a process group, with one thread; what a rank raises is raised here.

    Args:
        check: A function of a module that can be imported.
        args: Can be pickled.
        num_ranks: At least 1.
    """
    import torch.multiprocessing

    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        torch.multiprocessing.spawn(_run, (num_ranks, f"{folder}/store", check, args), nprocs=num_ranks)


def _run(rank: int, num_ranks: int, store: str, check: Callable[..., None], args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    check(rank, *args)
    leave()


def run_program(module: str, num_ranks: int, folder: Path, spec: str) -> None:
    """`python -m <module> <folder>` as each rank of a job on the CPU, until all have ended.

    Args:
        module: Calls `init_process_group`, and `leave` when it is done.
        num_ranks: At least 1.
        folder: Its argument, and where each rank's output goes (`rank<N>.log`).
        spec: Of the run, see `RunSpec.to_json`; read before `import verl`, as in a worker.

    Raises:
        AssertionError: A rank failed; the end of each log is in it.
        subprocess.TimeoutExpired: It took longer than `TIMEOUT_S`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    settings = {envs.VERL_PLATFORM: "cpu", envs.SPEC: spec}
    ranks = [_start(module, rank, num_ranks, folder, {**address, **settings}) for rank in range(num_ranks)]
    try:
        codes = [rank.wait(TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * num_ranks, "\n".join(_log(folder, rank).read_text()[-6000:] for rank in range(num_ranks))


def _start(module: str, rank: int, num_ranks: int, folder: Path, settings: Mapping[str, str]) -> subprocess.Popen:
    environment = {
        **os.environ,
        **settings,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", module, str(folder)]
    root = Path(__file__).parents[1]
    with _log(folder, rank).open("w") as log:
        return subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def leave() -> None:
    """Ends this rank once all ranks are done: exit code 0, and nothing after it is run.

    A rank that leaves through the interpreter's exit now and then aborts ("terminate called without an active exception"),
    most likely in a thread of gloo that lets go of a tensor when no interpreter is left to take it.
    """
    import torch

    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
