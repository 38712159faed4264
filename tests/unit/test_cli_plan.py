"""`verl-sharding plan`: what a command would do, shown without importing verl or starting anything."""

import json
import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from verl_ext_sharding import envs, launchers
from verl_ext_sharding.cli import main, plan, render
from verl_ext_sharding.config import override_syntax
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


@pytest.fixture(autouse=True)
def no_platform_exported(monkeypatch):
    """With VERL_PLATFORM=cpu, SFT is planned for CPUs."""
    monkeypatch.delenv(envs.VERL_PLATFORM, raising=False)


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


@pytest.mark.parametrize(("width", "least"), [(40, 80), (80, 80), (100, 100)])
def test_what_can_be_copied_from_a_table_is_whole_however_narrow_the_terminal(width, least, shown, monkeypatch):
    monkeypatch.setattr(render, "LOG_WIDTH", width)
    text = shown(*JOB, "sharding.roles.critic.devices=[2,3]").partition("\n\n")[0]
    for name in ("ActorRolloutRefWorker  fsdp", "[0,1,2,3]  4 servers x 1", "rollout server", " rollout,", " critic"):
        assert name in text
    assert max(map(len, text.splitlines())) == least


def test_only_the_last_column_is_folded_and_between_words(capsys, monkeypatch):
    monkeypatch.setattr(render, "LOG_WIDTH", 30)
    render.show(render.table("t", ("a name", "b"), [("TORCH_NCCL_ASYNC_ERROR_HANDLING", "its process ends")]))
    text = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert text[3:] == [f"TORCH_NCCL_ASYNC_ERROR_HANDLING{end}" for end in ("  its",)] + [
        f"{'':33}process",
        f"{'':33}ends",
        "",
    ]


def test_markup_in_a_value_is_shown_as_it_is(capsys):
    render.show("a [bold]key[/bold] of [0,1]")
    assert capsys.readouterr().out == "a [bold]key[/bold] of [0,1]\n"


# Recipes and other configs


def recipe(folder, *names, defaults="ppo_trainer", searchpath="pkg://verl.trainer.config"):
    """A folder with a recipe under each name, whose critic is on the device of the name's place in the list."""
    folder.mkdir(exist_ok=True)
    for device, name in enumerate(names):
        (folder / f"{name}.yaml").write_text(
            f"hydra:\n  searchpath: [{searchpath}]\ndefaults: [{defaults}, _self_]\ntrainer: {{n_gpus_per_node: 4}}\n"
            f"sharding: {{roles: {{critic: {{devices: [{device}]}}}}}}\n"
        )
    return str(folder)


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
        (["--config-path", "config", "--config-name", "ppo_trainr"], "--config-name=ppo_trainer"),
    ],
)
def test_a_config_that_is_not_there_is_answered_with_one_that_is(arguments, fix, refused):
    assert refused(*arguments).rstrip().endswith(fix)


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        ("--config-path={folder} --config-name=min", "--config-name=mine"),
        ("--config-path={folder} --config-name=mine.yml", "--config-name=mine"),
        ("--config-path={folder}", "--config-name=mine, or --config-name=older"),
        ("--config-path={folder} --config-name=nothing_like_it", "--config-name=mine, or --config-name=older"),
        ("--config-name={folder}/mine.yaml", "--config-path={folder} --config-name=mine"),
        ("--config-name={folder}/mine", "--config-path={folder} --config-name=mine"),
        ("--config-name=recipes/mine", "--config-path={folder} --config-name=mine"),
        ("--config-path={folder}/mine.yaml", "--config-path={folder} --config-name=mine"),
        ("{folder}/mine.yaml", "--config-path={folder} --config-name=mine"),
        ("recipes/mine.yaml", "--config-path={folder} --config-name=mine"),
    ],
)
def test_a_recipe_that_is_not_found_is_answered_with_the_one_that_was_meant(
    arguments, fix, refused, shown, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    folder = recipe(tmp_path / "recipes", "mine", "older")
    written = arguments.format(folder=folder).split()
    found = refused(*written).rstrip().rpartition("fix:      ")[2]
    assert found == fix.format(folder=folder)
    kept = [word for word in written if word == f"--config-path={folder}"]
    text = shown(*kept, *found.split(", or ")[0].split(), *JOB)
    assert cells(text, "critic")[3] == "[0]"


def test_a_config_with_another_ending_is_answered_with_its_new_name(refused):
    assert "mv some/plain.yml some/plain.yaml, and --config-path=" in refused("some/plain.yml")


def test_a_folder_without_configs_is_answered_with_where_verls_own_are(refused, tmp_path):
    assert refused("--config-path", str(tmp_path)).rstrip().endswith("leave it out for verl's own")


def test_a_recipe_that_does_not_say_where_verls_configs_are_is_answered_with_that(refused, shown, tmp_path):
    where = ["--config-path", recipe(tmp_path, "mine", searchpath=""), "--config-name=mine"]
    error = refused(*where)
    assert "found:    " in error
    fix = "hydra.searchpath=[pkg://verl.trainer.config]"
    assert f"fix:      {fix}, where" in error
    assert cells(shown(*where, *JOB, fix), "critic")[3] == "[0]"


def test_a_config_that_has_none_of_verls_is_answered_with_how_it_gets_one(refused, tmp_path):
    (tmp_path / "plain.yaml").write_text("trainer: {n_gpus_per_node: 4}\n")
    error = refused("--config-path", str(tmp_path), "--config-name=plain")
    assert '"defaults: [ppo_trainer, _self_]"' in error
    assert "into plain.yaml" in error


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("sharding.roles.critic.devices=2,3", "sharding.roles.critic.devices=[2,3]"),
        ("sharding.roles.critic.devices=2,3-3", "sharding.roles.critic.devices=[2,3-3]"),
        ("sharding.roles.critic.devices=cuda:2,cuda:3", "sharding.roles.critic.devices=[cuda:2,cuda:3]"),
        ("++sharding.roles.critic.devices=2,3", "++sharding.roles.critic.devices=[2,3]"),
        ("'sharding.roles.critic.devices=range(2,4)'", "sharding.roles.critic.devices=[2,3]"),
        ("sharding.roles.critic.devices=[2, 3]", "'sharding.roles.critic.devices=[2, 3]'"),
        ("sharding.roles.critic.devices=[2,3", "sharding.roles.critic.devices=[2,3]"),
        (
            "sharding.roles.actor.gradient_checkpointing={policy: every_n, every: 2}",
            "'sharding.roles.actor.gradient_checkpointing={policy: every_n, every: 2}'",
        ),
        (
            "sharding.roles.actor.gradient_checkpointing=full,every_n",
            "sharding.roles.actor.gradient_checkpointing=full",
        ),
        ("trainer.plugin=other,sharding", "trainer.plugin=sharding"),
        ("sharding=split,base", "sharding=split"),
        ("trainer.total_epochs=1,2", "trainer.total_epochs=1"),
        ("trainer.logger=console,wandb", "trainer.logger=[console,wandb], or trainer.logger=console"),
    ],
)
def test_a_list_without_its_brackets_or_its_quotes_is_answered_with_the_right_one(line, fix, refused, shown):
    assert refused(*JOB, *in_a_shell(line)).rstrip().rpartition("fix:      ")[2] == fix
    shown(*JOB, *in_a_shell(fix.partition(", or ")[0]))


@pytest.mark.parametrize("line", ["critic.x=glob(*)", "critic.x=interval(0,1)"])
def test_a_sweep_over_a_pattern_or_an_interval_is_refused_too(line, refused):
    assert "critic.x=<value>" in refused(*JOB, line)


def test_in_a_sweep_over_several_runs_values_stay_as_they_are():
    lines = ["trainer.plugin=sharding", "sharding.roles.critic.devices=[2],[3]"]
    assert override_syntax.explain(lines, sweeps=False) is None
    assert override_syntax.explain(lines) is not None


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


@pytest.mark.parametrize(
    ("variables", "fix"),
    [
        ({envs.DISABLE: "1"}, f"unset {envs.DISABLE}"),
        ({envs.VERL_PLUGINS: "none"}, f"unset {envs.VERL_PLUGINS}"),
        ({envs.VERL_PLUGINS: "other", envs.DISABLE: "yes"}, f"unset {envs.DISABLE} {envs.VERL_PLUGINS}"),
    ],
    ids=str,
)
def test_where_the_run_would_be_without_the_plugin_nothing_is_planned(variables, fix, refused, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert refused(*JOB).rstrip().endswith(f"fix:      {fix}")


@pytest.mark.parametrize(
    ("command", "launch"),
    [
        ("python -m verl.trainer.main_ppo trainer.nnodes=1", "python -m verl.trainer.main_ppo"),
        ("--json A=1 python3 verl/trainer/main_ppo.py trainer.nnodes=1", "A=1 python3 verl/trainer/main_ppo.py"),
        (
            "torchrun --nproc_per_node=4 -m verl.trainer.sft_trainer trainer.nnodes=1",
            "torchrun --nproc_per_node=4 -m verl.trainer.sft_trainer",
        ),
    ],
)
def test_of_a_command_that_was_pasted_whole_the_launch_is_to_be_left_out(command, launch, capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(["plan", *command.split()])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"leave out `{launch}`: give its overrides alone" in error
    assert ("--config-name sft_trainer_engine" in error) == ("sft" in launch)


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


def test_the_table_need_not_be_asked_for(capsys, shown):
    assert main.main(["plan", *JOB]) == 0
    assert capsys.readouterr().out == shown(*JOB)


def test_the_help_of_plan_has_commands_for_both_trainers(capsys):
    with pytest.raises(SystemExit):
        main.main(["plan", "--help"])
    text = capsys.readouterr().out
    assert "verl-sharding plan trainer.n_gpus_per_node=4 'sharding.roles.critic.devices=[2,3]'" in text
    assert "--config-name sft_trainer_engine" in text


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
