"""Launchers that start one process per device: right for SFT, wrong around `main_ppo`, whose one driver starts its own workers.

What is looked at is an environment and a command line; nothing is started, and nothing heavy imported.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext_sharding import envs
from verl_ext_sharding.errors import ConfigError

PPO_TRAINER = "verl.trainer.main_ppo"
ASKED = "trainer.plugin=sharding"
_UNREACHED = ("verl.trainer.main_generation_server",)

_ACCELERATE = "ACCELERATE_MIXED_PRECISION"
"""Set by every `accelerate launch`; what else starts with ACCELERATE_ may be exported by the user."""

_TORCH = "TORCHELASTIC_RUN_ID"

_SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by `ray job submit`, whose one driver inherits the environment of a node's `ray start`."""

_TASKS = (
    # A batch script that no srun started has SLURM_NTASKS, but no step of its own with several tasks.
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("mpirun", "PMI_SIZE", "PMI_RANK"),
)
"""Launchers of tasks that know nothing of torch: name, number of tasks, own number. Open MPI, MVAPICH, MPICH and Intel MPI."""


@dataclass(kw_only=True, frozen=True)
class Program:
    """What runs in this process, as a user would start it.

    Args:
        target: `("-m", "verl.trainer.main_ppo")` or `("train.py",)`.
        arguments: The overrides.
    """

    target: tuple[str, ...]
    arguments: tuple[str, ...] = ()

    @classmethod
    def current(cls) -> Program:
        """This process's own program."""
        return cls.of(sys.argv, sys.modules.get("__main__"))

    @classmethod
    def of(cls, argv: list[str], main: Any) -> Program:
        """Reads a program from its command line.

        Args:
            argv: As `sys.argv`.
            main: The module `__main__`, whose `__spec__` tells `python -m` from a script.
        """
        name = getattr(getattr(main, "__spec__", None), "name", None)
        target = ("-m", name.removesuffix(".__main__")) if name else (argv[0],)
        return cls(target=target, arguments=tuple(argv[1:]))

    @property
    def module(self) -> str | None:
        """Name of the module that `python -m` runs, or None for a script."""
        return self.target[1] if self.target[0] == "-m" else None

    def python(self) -> str:
        """The command for one process, quoted for a shell."""
        return shlex.join(("python", *self.target, *self.arguments))

    def torchrun(self, num_machines: int = 1) -> str:
        """The command for one process on each GPU, quoted for a shell; with several machines, to be typed on each of them."""
        command = shlex.join(("--nproc_per_node=gpu", *self.target, *self.arguments))
        if num_machines == 1:
            return f"torchrun {command}"
        where = "--node_rank=$RANK --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT"
        return f"torchrun --nnodes={num_machines} {where} {command}"


@dataclass(kw_only=True, frozen=True)
class Launch:
    """How a process was started that is not alone.

    Args:
        launcher: Name of the launcher, as on the command line.
        rank: Number of this process.
        num_processes: All of them. 1 only where accelerate was asked for several, saw no accelerator and started one.
        evidence: What says so: a variable with its value, or an option.
        tasks: Started as a task (srun, mpirun), by something that sets none of torch's variables.
    """

    launcher: str
    rank: int
    num_processes: int
    evidence: str
    tasks: bool = False

    def __str__(self) -> str:
        if self.num_processes == 1:
            return f"{self.launcher}, asked for several processes by {self.evidence}"
        return f"{self.launcher}, process {self.rank} of {self.num_processes} ({self.evidence})"


def find_launch(environ: Mapping[str, str]) -> Launch | None:
    """The launcher that started this process as one of several, or None.

    `RANK` and `WORLD_SIZE` without `LOCAL_RANK` describe a machine of a cluster (Kubeflow's PyTorchJob sets them), where a
    single driver is usual, and are no launcher. verl numbers its Ray workers as torchrun does; they carry the run's spec.

    Args:
        environ: Environment of the process.
    """
    if envs.SPEC in environ:
        return None
    launcher = "accelerate launch" if _ACCELERATE in environ else None
    size = _number(environ, "WORLD_SIZE")
    if size > 1 and "RANK" in environ and (_TORCH in environ or "LOCAL_RANK" in environ):
        launcher = launcher or ("torchrun" if _TORCH in environ else "a launcher that sets RANK and LOCAL_RANK")
        return Launch(
            launcher=launcher, rank=_number(environ, "RANK"), num_processes=size, evidence=f"WORLD_SIZE={size}"
        )
    for name, variable, own in _TASKS:
        size = _number(environ, variable)
        if size > 1 and _SUBMITTED not in environ:
            return Launch(
                launcher=launcher or name,
                rank=_number(environ, own),
                num_processes=size,
                evidence=f"{variable}={size}",
                tasks=True,
            )
    if launcher and "WORLD_SIZE" not in environ and {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        # Set by accelerate for --num_processes above 1 (accelerate/utils/launch.py), started or not.
        return Launch(launcher=launcher, rank=0, num_processes=1, evidence="--num_processes")
    return None


def require_one_driver(
    environ: Mapping[str, str] | None = None, program: Program | None = None, *, joins_ray: bool = False
) -> None:
    """Refuses several drivers of one PPO job, in each of them, before Ray starts.

    Args:
        environ: Environment of the process; None: this one's.
        program: What runs; None: this process's.
        joins_ray: A Ray cluster is there to be joined. Task 0 of srun or mpirun may then drive it: scripts that run
            `ray start` on every node drive from one of them.

    Raises:
        ConfigError: Names the launcher and ends in the command to type.
    """
    launch = find_launch(os.environ if environ is None else environ)
    if launch is None or (launch.tasks and launch.rank == 0 and joins_ray):
        return
    program = program or Program.current()
    raise ConfigError(
        f"{program.module or program.target[0]} under {launch.launcher}",
        expected="one process: verl's PPO trainer is one driver, which starts its own workers on Ray",
        found=str(launch),
        consequence="the run does not start, since each process would start the whole job",
        remedy=program.python(),
    )


def refuse_at_start(environ: Mapping[str, str], argv: Sequence[str], command: Sequence[str]) -> None:
    """As `require_one_driver`, while `python -m verl.trainer.main_ppo` imports verl: many seconds before there is a config.

    What the command line does not say, and other programs, are left to the driver.

    Args:
        environ: Environment of the process.
        argv: `sys.argv`, which starts with `-m` as long as Python looks for the module.
        command: `sys.orig_argv`.

    Raises:
        SystemExit: The process is one of several drivers.
    """
    before = len(command) - len(argv)
    if ASKED not in argv or before < 1 or tuple(command[before - 1 : before + 1]) != ("-m", PPO_TRAINER):
        return
    try:
        program = Program(target=("-m", PPO_TRAINER), arguments=tuple(argv[1:]))
        require_one_driver(environ, program, joins_ray=True)  # whether there is a Ray to join is seen later
    except ConfigError as error:
        raise SystemExit(str(error)) from None


def refuse_unreached() -> None:
    """Refuses a program that reads verl's PPO config and in which nothing of ours is called afterwards.

    Raises:
        ConfigError: It is the program of this process.
    """
    module = Program.current().module
    if module not in _UNREACHED:
        return
    raise ConfigError(
        f"trainer.plugin with {module}",
        expected=f"{PPO_TRAINER}, or verl.trainer.sft_trainer",
        found=module,
        consequence="the run does not start, since nothing of `sharding` would act",
        remedy="trainer.plugin=null",
    )


@dataclass(kw_only=True, frozen=True)
class Ranks:
    """The process's place in a group of one process per device, as torchrun numbers them.

    Args:
        rank: Number in the whole job.
        world_size: Processes of the job.
        local_rank: Number on this machine, and so of its device.
        local_world_size: Processes on this machine.
        alone: No launcher numbered it: the job is this process.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    alone: bool = False

    def as_env(self) -> dict[str, str]:
        """The variables that a launcher would have set for a process that is alone, with a free port."""
        assert self.alone
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        numbers = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
        return {"MASTER_ADDR": "127.0.0.1"} | {name: str(number) for name, number in numbers.items()}


def ranks_of(environ: Mapping[str, str], program: Program) -> Ranks:
    """Where a process of SFT stands among the others.

    Args:
        environ: Environment of the process.
        program: What runs, for the command that an error ends in.

    Raises:
        ConfigError: Several processes were started, but nothing numbered them for torch.
    """
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= environ.keys():
        world_size = _number(environ, "WORLD_SIZE") or 1
        return Ranks(
            rank=_number(environ, "RANK"),
            world_size=world_size,
            local_rank=_number(environ, "LOCAL_RANK"),
            local_world_size=_number(environ, "LOCAL_WORLD_SIZE") or world_size,
        )
    launch = find_launch(environ)
    machines = _number(environ, "WORLD_SIZE")
    if launch is not None and launch.tasks:
        raise _not_numbered(str(launch), program.torchrun(), program)
    if machines > 1:
        found = f"WORLD_SIZE={machines} without LOCAL_RANK, which numbers machines"
        raise _not_numbered(found, program.torchrun(machines), program)
    return Ranks(alone=True)


def _not_numbered(found: str, command: str, program: Program) -> ConfigError:
    return ConfigError(
        f"{program.module or program.target[0]} in several processes",
        expected="RANK, LOCAL_RANK and WORLD_SIZE for each process, as torchrun and accelerate launch set them",
        found=found,
        consequence="the run does not start, since each process would train a model of its own",
        remedy=command,
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    """A variable as a whole number; 0 when it is not set or none."""
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0
