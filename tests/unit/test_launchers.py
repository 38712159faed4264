"""Launchers: how a process was started, read from its environment, and the command that a user should have typed."""

import json
import shlex
import subprocess
import sys
import types

import pytest

from verl_ext_sharding import envs
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.launchers import (
    Program,
    Ranks,
    find_launch,
    ranks_of,
    refuse_at_start,
    require_one_driver,
)

OVERRIDES = ("trainer.plugin=sharding", "sharding.roles.critic.devices=[2,3]", "trainer.logger=['console']")
PPO = Program(target=("-m", "verl.trainer.main_ppo"), arguments=OVERRIDES)
SFT = Program(target=("-m", "verl.trainer.sft_trainer"), arguments=OVERRIDES)

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}
ASKED_FOR_SEVERAL = {**ACCELERATE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
DEEPSPEED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node0"}
SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_NTASKS": "4"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
INTEL_MPI = {"PMI_SIZE": "8", "PMI_RANK": "7"}
MVAPICH = {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"}

SEVERAL = [
    pytest.param(TORCHRUN, "torchrun", 3, 4, id="torchrun"),
    pytest.param({**TORCHRUN, **ACCELERATE}, "accelerate launch", 3, 4, id="accelerate"),
    pytest.param(ASKED_FOR_SEVERAL, "accelerate launch", 0, 1, id="accelerate-without-accelerator"),
    pytest.param({**OPEN_MPI, **ASKED_FOR_SEVERAL}, "accelerate launch", 1, 2, id="accelerate-with-mpirun"),
    pytest.param(DEEPSPEED, "a launcher that sets RANK and LOCAL_RANK", 1, 2, id="deepspeed"),
    pytest.param(SRUN, "srun", 2, 4, id="srun"),
    pytest.param(OPEN_MPI, "mpirun", 1, 2, id="open-mpi"),
    pytest.param(INTEL_MPI, "mpirun", 7, 8, id="intel-mpi"),
    pytest.param(MVAPICH, "mpirun", 0, 2, id="mvapich"),
]

ONE = [
    pytest.param({}, id="python"),
    pytest.param({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, id="torchrun-of-one"),
    pytest.param(ACCELERATE, id="accelerate-of-one"),
    pytest.param({"ACCELERATE_LOG_LEVEL": "info", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, id="variable-of-the-user"),
    pytest.param({"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}, id="address-of-a-cluster"),
    pytest.param({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "node0"}, id="machine-of-a-cluster"),
    pytest.param({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, id="batch-script-of-slurm"),
    pytest.param({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, id="srun-of-one"),
    pytest.param({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, id="mpirun-of-one"),
    pytest.param({**SRUN, "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, id="ray-job-on-a-node-of-srun"),
    pytest.param({**TORCHRUN, envs.SPEC: "{}"}, id="ray-worker"),
    pytest.param({**DEEPSPEED, "WORLD_SIZE": "two"}, id="no-number"),
]


@pytest.mark.parametrize(("environ", "launcher", "rank", "num_processes"), SEVERAL)
def test_a_launcher_of_several_processes_is_found_with_its_numbers(environ, launcher, rank, num_processes):
    launch = find_launch(environ)
    assert (launch.launcher, launch.rank, launch.num_processes) == (launcher, rank, num_processes)


@pytest.mark.parametrize("environ", ONE)
def test_one_process_is_no_launch_whatever_the_cluster_exports(environ):
    assert find_launch(environ) is None
    require_one_driver(environ, PPO)


@pytest.mark.parametrize(("environ", "launcher", "rank", "num_processes"), SEVERAL)
def test_several_drivers_are_refused_in_each_process_with_the_command_to_type(environ, launcher, rank, num_processes):
    with pytest.raises(ConfigError) as caught:
        require_one_driver(environ, PPO)
    error = caught.value
    assert error.subject == f"verl.trainer.main_ppo under {launcher}"
    assert launcher in error.found
    assert "one driver" in error.expected
    assert str(error).endswith(PPO.python())


def test_the_error_says_which_of_how_many_processes_it_is():
    with pytest.raises(ConfigError, match=r"process 3 of 4 \(WORLD_SIZE=4\)"):
        require_one_driver(TORCHRUN, PPO)


@pytest.mark.parametrize("tasks", [SRUN, OPEN_MPI], ids=["srun", "mpirun"])
def test_task_0_may_drive_a_ray_that_a_script_started_on_every_node_and_no_other_task_may(tasks):
    first = {name: "0" if "RANK" in name or "PROCID" in name else value for name, value in tasks.items()}
    require_one_driver(first, PPO, joins_ray=True)
    with pytest.raises(ConfigError):
        require_one_driver(first, PPO, joins_ray=False)
    with pytest.raises(ConfigError):
        require_one_driver(tasks, PPO, joins_ray=True)


def test_rank_0_of_torchrun_never_drives_since_all_ranks_run_the_same_program():
    with pytest.raises(ConfigError):
        require_one_driver({**TORCHRUN, "RANK": "0"}, PPO, joins_ray=True)


# The command


def test_the_command_survives_a_shell_with_every_override_as_it_was():
    arguments = ("a=[1,2]", "b='x y'", "+c={d: 1}", "e=$HOME", 'f="*"')
    command = Program(target=("-m", "verl.trainer.main_ppo"), arguments=arguments).python()
    show = f"{shlex.quote(sys.executable)} -c 'import json, sys; print(json.dumps(sys.argv[1:]))'"
    in_shell = command.replace("python -m verl.trainer.main_ppo", show)
    shown = subprocess.run(in_shell, shell=True, capture_output=True, text=True).stdout
    assert tuple(json.loads(shown)) == arguments


@pytest.mark.parametrize(
    ("argv", "name", "command"),
    [
        (["/site/verl/trainer/main_ppo.py", "a=1"], "verl.trainer.main_ppo", "python -m verl.trainer.main_ppo a=1"),
        (["/site/recipe/__main__.py"], "recipe.__main__", "python -m recipe"),
        (["my script.py", "a=1"], None, "python 'my script.py' a=1"),
    ],
)
def test_a_program_is_what_its_user_started(argv, name, command):
    main = types.ModuleType("__main__")
    main.__spec__ = types.SimpleNamespace(name=name) if name else None
    assert Program.of(argv, main).python() == command


# While verl is being imported


def start(environ, *arguments, module="verl.trainer.main_ppo", options=("-u",)):
    argv = ["-m", *arguments]
    refuse_at_start(environ, argv, ["/usr/bin/python", *options, "-m", module, *arguments])


def test_the_ppo_trainer_is_refused_while_verl_is_imported():
    with pytest.raises(SystemExit) as caught:
        start(TORCHRUN, *OVERRIDES)
    assert str(caught.value.code).endswith(PPO.python())
    assert "torchrun, process 3 of 4" in str(caught.value.code)


def test_only_a_command_that_asks_for_the_plugin_is_refused_while_verl_is_imported():
    start(TORCHRUN, "trainer.device=cpu")


def test_other_programs_are_left_to_the_driver():
    start(TORCHRUN, *OVERRIDES, module="verl.trainer.sft_trainer")
    start(TORCHRUN, *OVERRIDES, module="recipe.main")
    refuse_at_start(TORCHRUN, ["train.py", *OVERRIDES], ["python", "train.py", *OVERRIDES])
    refuse_at_start(TORCHRUN, ["-m", *OVERRIDES], ["-m", *OVERRIDES])


def test_one_driver_and_a_first_task_start():
    start({}, *OVERRIDES)
    start({**SRUN, "SLURM_PROCID": "0"}, *OVERRIDES)
    with pytest.raises(SystemExit):
        start(SRUN, *OVERRIDES)


# SFT, which is meant to be launched so


def test_a_process_of_torchrun_has_the_numbers_that_torchrun_gave_it():
    expected = Ranks(rank=3, world_size=4, local_rank=1, local_world_size=2)
    assert ranks_of(TORCHRUN, SFT) == expected
    assert ranks_of({**TORCHRUN, **ACCELERATE}, SFT) == expected


def test_without_a_size_of_the_machine_all_processes_are_on_one():
    assert ranks_of(DEEPSPEED, SFT) == Ranks(rank=1, world_size=2, local_rank=1, local_world_size=2)


@pytest.mark.parametrize("environ", [{}, ACCELERATE, ASKED_FOR_SEVERAL, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_a_process_that_nothing_numbered_is_alone(environ):
    assert ranks_of(environ, SFT) == Ranks(alone=True)


def test_a_process_that_is_alone_gets_what_a_launcher_would_have_set():
    environ = Ranks(alone=True).as_env()
    port = int(environ.pop("MASTER_PORT"))
    assert 1024 <= port < 65536
    assert environ == {
        "MASTER_ADDR": "127.0.0.1",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }


@pytest.mark.parametrize("environ", [SRUN, OPEN_MPI], ids=["srun", "mpirun"])
def test_tasks_that_torch_knows_nothing_of_are_refused_with_torchrun(environ):
    with pytest.raises(ConfigError) as caught:
        ranks_of(environ, SFT)
    assert caught.value.remedy.startswith("torchrun --nproc_per_node=gpu -m verl.trainer.sft_trainer trainer.plugin=")


def test_machines_of_a_cluster_are_refused_with_a_torchrun_for_each_of_them():
    with pytest.raises(ConfigError) as caught:
        ranks_of({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "1"}, SFT)
    assert caught.value.remedy.startswith(
        "torchrun --nnodes=4 --node_rank=$RANK --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT "
        "--nproc_per_node=gpu -m verl.trainer.sft_trainer "
    )
