"""`verl-sharding plan`: what a command would do, shown without importing verl or starting anything."""

import json
import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from verl_ext_sharding import launchers
from verl_ext_sharding.cli import main, plan, render
from verl_ext_sharding.config.changes import KeyChange
from verl_ext_sharding.errors import ConfigError

JOB = [
    "trainer.n_gpus_per_node=4",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "algorithm.use_kl_in_reward=True",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
]
FIXED = [
    "actor_rollout_ref.actor.use_dynamic_bsz=False",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
    "critic.ppo_micro_batch_size_per_gpu=1",
]
SPLIT = ["sharding.roles.actor.devices=[0,1]", "sharding.roles.critic.devices=[2]", "sharding.roles.ref.devices=[3]"]


@pytest.fixture
def shown(capsys):
    """Runs `verl-sharding plan --placement` and returns what it printed."""

    def run(*arguments):
        assert main.main(["plan", "--placement", *arguments]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys):
    """Runs `verl-sharding plan --placement` and returns the error that it ended with."""

    def run(*arguments):
        assert main.main(["plan", "--placement", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        return captured.err

    return run


def in_a_shell(line):
    """The words that bash makes of a line."""
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def cells(text, role):
    line = next(line for line in text.splitlines() if line.split()[:1] == [role])
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


# What is shown


def test_each_role_is_a_row_with_class_engine_devices_ranks_and_node(shown):
    text = shown(*JOB, *SPLIT)
    assert cells(text, "actor") == ["actor", "ActorRolloutRefWorker", "fsdp", "[0,1]", "2 dp", "0", "rollout"]
    assert cells(text, "rollout") == ["rollout", "rollout server", "vllm", "[0,1]", "2 servers x 1", "0", "actor"]
    assert cells(text, "critic") == ["critic", "TrainingWorker", "fsdp", "[2]", "1 dp", "0", "none"]
    assert cells(text, "ref") == ["ref", "ActorRolloutRefWorker", "fsdp", "[3]", "1 dp", "0", "none"]


def test_the_switch_may_be_left_out_or_written(shown):
    assert shown(*JOB, *SPLIT) == shown(*JOB, *SPLIT, "trainer.plugin=sharding")


def test_without_a_request_the_plan_shows_verls_own_placement(shown):
    text = shown(*JOB)
    assert cells(text, "critic")[3] == "[0,1,2,3]"
    assert "ref shares the actor's processes" in text


def test_json_has_the_same_rows_and_is_stable(shown):
    first, second = (shown("--json", *JOB, *SPLIT) for _ in range(2))
    assert first == second
    data = json.loads(first)
    assert {row["role"]: row["devices"] for row in data["rows"]} == {
        "actor": [0, 1],
        "rollout": [0, 1],
        "critic": [2],
        "ref": [3],
    }
    assert data["changes"] == []


def test_the_keys_of_verl_that_change_are_shown_as_overrides_with_why(shown):
    text = shown(*JOB, "sharding.roles.critic.dtype=bfloat16", "sharding.roles.critic.max_tokens=4096")
    assert "set because of sharding.roles.critic.dtype:" in text
    assert "  critic.fsdp.model_dtype=bf16  (was fp32)" in text
    assert "  +critic.ppo_infer_max_token_len_per_gpu=4096  (was not there)" in text


def test_what_is_shown_can_be_typed(shown, compose):
    settings = ["critic.max_tokens=4096", "actor.compute_dtype=bfloat16", "ref.micro_batch_size=2"]
    settings = [f"sharding.roles.{setting}" for setting in settings]
    lines = [line.split("  (was")[0].strip() for line in shown(*JOB, *settings).splitlines() if "  (was" in line]
    typed = compose(*JOB, *in_a_shell(" ".join(lines)))
    changes = json.loads(shown("--json", *JOB, *settings))["changes"]
    assert len(changes) == len(lines) > len(settings)
    for change in changes:
        value = OmegaConf.select(typed, change["key"])
        assert (OmegaConf.to_container(value) if OmegaConf.is_config(value) else value) == change["new"]


def test_a_long_override_is_not_folded(capsys):
    value = {f"a_rather_long_name_{i}": "fp32" for i in range(20)}
    render.show_changes([KeyChange(key="critic.fsdp.mixed_precision", new=value, why="x")])
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "True"), ([0, 1], "[0,1]"), ({"a": None, "b": [1, {"c": 2}]}, "{a:null,b:[1,{c:2}]}")],
    ids=str,
)
def test_values_are_shown_as_hydra_reads_them(value, text, capsys):
    render.show_changes([KeyChange(key="a.b", new=value, why="x", old=value)])
    line, _, before = capsys.readouterr().out.splitlines()[1].strip().partition("  ")
    assert in_a_shell(line) == [f"a.b={text}"]
    assert before == f"(was {text})"


def test_what_is_unknown_reads_not_available_and_never_zero(capsys):
    render.show(render.table("t", ("a", "b"), [(None, 0)]))
    assert capsys.readouterr().out.split()[-2:] == ["n/a", "0"]


def test_markup_in_a_value_is_shown_as_it_is(capsys):
    render.show("a [bold]key[/bold] of [0,1]")
    assert capsys.readouterr().out == "a [bold]key[/bold] of [0,1]\n"


# Recipes and other configs


def test_a_recipes_config_is_planned(shown, tmp_path):
    (tmp_path / "my_ppo.yaml").write_text(
        "hydra:\n  searchpath: [pkg://verl.trainer.config]\ndefaults: [ppo_trainer, _self_]\n"
        "trainer: {n_gpus_per_node: 2}\nsharding: {roles: {critic: {devices: [1]}}}\n"
    )
    text = shown("--config-path", str(tmp_path), "--config-name", "my_ppo", "data.train_batch_size=256")
    assert cells(text, "critic")[3] == "[1]"


def test_the_megatron_config_is_planned(shown):
    lines = [line for line in JOB if "tensor_model" not in line]
    text = shown(
        "--config-name", "ppo_megatron_trainer", *lines, *SPLIT, "actor_rollout_ref.rollout.data_parallel_size=1"
    )
    assert cells(text, "critic")[2] == "megatron"


# What is refused


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["sharding.roles.critc.devices=[1]"],
            ["sharding.roles.critc: no such key", "did you mean sharding.roles.critic?"],
        ),
        (["sharding.roles.critic.devices=[4]"], ["sharding.roles.critic.devices", "devices 0 to 3", "device 4"]),
        (["sharding.roles.reward.devices=[1]"], ["sharding.roles.reward.devices", "reward.reward_model.enable=True"]),
        (["sharding.roles.reward.dtype=float16"], ["sharding.roles.reward.dtype", "a job that has a reward model"]),
        (
            [*FIXED, "data.train_batch_size=9"],
            ["data.train_batch_size", "9 prompts x 1 responses", "data.train_batch_size=12"],
        ),
        (["trainer.use_v1=False"], ["trainer.use_v1", "trainer.use_v1=True"]),
        (["trainer.plugin=shardng"], ["trainer.plugin", "shardng", "trainer.plugin=sharding"]),
        (["trainer.plugin=null"], ["trainer.plugin", "verl's own", "trainer.plugin=sharding"]),
        (["no.such.key=1"], ["no.such.key"]),
        (["sharding.roles.critic.dtype=bfloat16", "critic.fsdp.model_dtype=fp16"], ["critic.fsdp.model_dtype=fp16"]),
        (["="], ["the overrides"]),
    ],
    ids=str,
)
def test_a_command_that_can_not_run_ends_with_exit_code_2_and_what_to_type(overrides, parts, refused):
    error = refused(*JOB, *overrides)
    for part in parts:
        assert part in error
    assert error.count("\n  fix:") == 1


SFT = ["--config-name", "sft_trainer_engine", "trainer.n_gpus_per_node=4"]


def test_a_job_of_sft_is_planned_with_its_one_role_on_every_device(shown):
    text = shown(*SFT, "sharding.roles.actor.dtype=bfloat16")
    assert cells(text, "actor") == ["actor", "TrainingWorker", "fsdp", "[0,1,2,3]", "4 processes", "0", "none"]
    assert "  engine.model_dtype=bf16  (was fp32)" in text
    assert "torchrun" in text


def test_a_plan_of_sft_for_programs_has_the_keys_of_any_plan(shown):
    data = json.loads(shown("--json", *SFT, "trainer.nnodes=2", "sharding.roles.actor.offload.params=true"))
    assert data.keys() == json.loads(shown("--json", *JOB)).keys()
    assert (data["rows"][0]["devices"], data["rows"][0]["nodes"]) == (list(range(8)), [0, 1])
    assert [(change["key"], change["new"]) for change in data["changes"]] == [("engine.param_offload", True)]


def test_a_plan_of_sft_tells_what_verl_does_otherwise_than_its_keys_say(shown):
    policy = "engine.strategy=fsdp2", "engine.offload_policy=True"
    said = "with offload_policy the optimizer steps on the CPU, slower than on the device"
    assert f"  - {said}" in shown(*SFT, *policy)
    assert json.loads(shown("--json", *SFT, *policy))["notes"][1:] == [said]


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("sharding.roles.critic.dtype=bfloat16", ["sharding.roles.critic.dtype", "sharding.roles.actor.dtype"]),
        ("sharding.roles.actor.micro_batch_size=48", ["a divisor of 64", "over 4 data-parallel ranks"]),
        ("trainer.n_gpus_per_node=many", ["trainer.n_gpus_per_node", "many"]),
    ],
)
def test_what_sft_can_not_do_is_refused_by_the_plan_as_by_the_run(override, parts, refused):
    error = refused(*SFT, override)
    for part in parts:
        assert part in error


def test_a_config_of_another_program_is_refused(refused, tmp_path):
    (tmp_path / "other.yaml").write_text(
        "hydra: {searchpath: [pkg://verl.trainer.config]}\ndefaults: [sharding: base, _self_]\ntrainer: {plugin: null}\n"
    )
    error = refused("--config-path", str(tmp_path), "--config-name", "other")
    assert "verl.trainer.main_ppo" in error


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["--config-name", "ppo_trainr"], "--config-name=ppo_trainer"),
        (["--config-name", "no_such_config"], "--config-name=ppo_trainer"),
        (["--config-path", "no_such_folder"], "leave it out for verl's own"),
        (["model_engine=megatorn"], "model_engine=megatron"),
    ],
)
def test_a_config_that_is_not_there_is_answered_with_one_that_is(arguments, fix, refused):
    assert refused(*arguments).rstrip().endswith(fix)


@pytest.mark.parametrize("line", ["no_value", "a=b=c", "x={a b"])
def test_an_override_that_can_not_be_read_is_named(line, refused):
    assert f"found:    {line}: " in refused(*JOB, line)


def test_a_config_folder_of_verls_own_may_be_written_as_for_main_ppo(shown, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert shown("--config-path=config", *JOB) == shown(*JOB)


def test_without_verl_the_error_says_what_to_install(monkeypatch, refused):
    monkeypatch.setattr(plan.util, "find_spec", lambda name: None)
    error = refused(*JOB)
    assert "pip install 'verl-ext-sharding[verl]'" in error


# What is not started


_LIGHT = """
import sys
from verl_ext_sharding.cli import main
code = main.main(["plan", "--placement", *sys.argv[1:]])
heavy = [name for name in ("torch", "ray", "verl", "transformers") if name in sys.modules]
sys.exit(code or f"imported {heavy}" if heavy else code)
"""


@pytest.mark.parametrize("arguments", [[*JOB, *SPLIT], SFT], ids=["ppo", "sft"])
def test_a_plan_imports_neither_torch_nor_ray_nor_verl(arguments, tmp_path):
    command = [sys.executable, "-c", _LIGHT, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


# The command line


def test_without_a_command_there_is_help_and_an_exit_code(capsys):
    with pytest.raises(SystemExit) as ended:
        main.main([])
    assert ended.value.code == 2
    assert "usage: verl-sharding" in capsys.readouterr().err


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("verl-ext-sharding 0.")


def test_compose_refuses_with_our_own_error_where_there_is_one(compose):
    with pytest.raises(ConfigError) as caught:
        compose("sharding.fit=aply")
    assert caught.value.subject == "sharding.fit"


def test_a_program_that_nothing_of_ours_reaches_is_refused_as_its_config_is_composed(monkeypatch, compose):
    program = launchers.Program(target=("-m", "verl.trainer.main_generation_server"))
    monkeypatch.setattr(launchers.Program, "current", lambda: program)
    with pytest.raises(ConfigError) as caught:
        compose()
    assert "verl.trainer.main_generation_server" in caught.value.subject
    compose("trainer.plugin=null")
