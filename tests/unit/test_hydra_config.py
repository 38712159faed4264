"""`trainer.plugin` and the `sharding` group are part of verl's own config, without `+`, wherever verl's config is used."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_ext_sharding import driver, envs
from verl_ext_sharding.config.schema import ShardingConfig
from verl_ext_sharding.errors import ConfigError

ASKED = "trainer.plugin=sharding"
CRITIC = "sharding.roles.critic.devices=[1]"
PKG = "pkg://verl.trainer.config"


def run(*arguments, sent=None, **environment):
    """Runs Python in a process of its own, so that the plugin comes in through verl's entry point."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(
        command, env={**env, **environment}, cwd=Path(__file__).parent, input=sent, capture_output=True, text=True
    )


def write_recipe(folder, searchpath, own=""):
    """A recipe with a primary config of its own, which reaches verl's by `hydra.searchpath`."""
    folder.mkdir()
    text = f"hydra:\n  searchpath: [{searchpath}]\ndefaults: [ppo_trainer, _self_]\nrecipe: {{alpha: 0.5}}\n{own}"
    (folder / "my_ppo.yaml").write_text(text)
    return str(folder)


_COMPOSE = """
import json, sys
import verl
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.errors import HydraException
from omegaconf import OmegaConf
answers = {}
for name, (folder, config_name, overrides) in json.load(sys.stdin).items():
    where = initialize_config_dir(folder, version_base=None) if folder else initialize_config_module(
        "verl.trainer.config", version_base=None)
    with where:
        try:
            config = compose(config_name, overrides=overrides)
            kept = {key: config[key] for key in ("trainer", "sharding", "recipe") if key in config}
            answers[name] = {"config": OmegaConf.to_container(OmegaConf.create(kept))}
        except HydraException as error:
            answers[name] = {"error": str(error)}
print("answers", json.dumps(answers))
"""


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    """Every config of this module, composed by `hydra.compose` in one process that has imported verl."""
    from importlib import util

    root = tmp_path_factory.mktemp("recipes")
    verl = next(iter(util.find_spec("verl").submodule_search_locations))
    by_pkg = write_recipe(root / "by_pkg", PKG)
    by_file = write_recipe(root / "by_file", f"file://{verl}/trainer/config")
    own = (
        "trainer: {plugin: sharding}\nsharding: {fit: off, guards: {token_ids: off}, roles: {critic: {devices: 2-3}}}\n"
    )
    in_yaml = write_recipe(root / "in_yaml", PKG, own)
    typo = write_recipe(root / "typo", PKG, "sharding: {roles: {critc: {devices: [1]}}}\n")
    typo_of_switch = write_recipe(root / "typo_of_switch", PKG, "trainer: {plugn: sharding}\n")
    ppo = (None, "ppo_trainer")
    cases = {
        "default": (*ppo, []),
        "ppo": (*ppo, [ASKED, CRITIC]),
        "megatron file": (None, "ppo_megatron_trainer", [ASKED, CRITIC]),
        "megatron choice": (*ppo, ["model_engine=megatron", ASKED, CRITIC]),
        "sft": (None, "sft_trainer_engine", [ASKED, CRITIC]),
        "recipe by pkg": (by_pkg, "my_ppo", [ASKED, CRITIC]),
        "recipe by file": (by_file, "my_ppo", [ASKED, CRITIC]),
        "recipe in yaml": (in_yaml, "my_ppo", []),
        "split": (*ppo, ["sharding=split"]),
        "split and more": (*ppo, ["sharding=split", "sharding.roles.ref.devices=[0]"]),
        "split in recipe": (by_pkg, "my_ppo", ["sharding=split"]),
        "map": (*ppo, ["sharding.roles.critic.devices={node0:[0,1],node1:[0]}"]),
        "range": (*ppo, ["sharding.roles.critic.devices=2-3"]),
        "reference": (*ppo, ["sharding.roles.critic.devices=${sharding.roles.actor.devices}"]),
        "off": (*ppo, ["sharding.fit=off"]),
        "checkpointing": (*ppo, ["sharding.roles.critic.gradient_checkpointing={policy:every_n,every:3}"]),
        "misspelt role": (*ppo, [ASKED, "sharding.roles.critc.devices=[1]"]),
        "misspelt role in yaml": (typo, "my_ppo", []),
        "misspelt plugin": (*ppo, ["trainer.plugn=sharding"]),
        "misspelt plugin in sft": (None, "sft_trainer_engine", ["trainer.plugn=sharding"]),
        "misspelt trainer": (*ppo, ["trianer.plugin=sharding"]),
        "misspelt block": (*ppo, ["shardng.fit=off"]),
        "misspelt choice": (*ppo, ["sharding=splt"]),
        "added key": (*ppo, ["+sharding.roles.critic.foo=1"]),
        "added block": (*ppo, ["+sharding.role.critic.devices=[1]"]),
        "added misspelt key": (*ppo, [ASKED, "+sharding.roles.actor.device=[0]"]),
        "added misspelt role": (
            *ppo,
            [ASKED, "+sharding.roles.critc.dtype=float16", "+sharding.roles.critc.devices=1"],
        ),
        "verl's name of a role": (*ppo, [ASKED, "sharding.roles.actor_rollout_ref.devices=[2]"]),
        "verl's key in a role": (*ppo, [ASKED, "sharding.roles.rollout.n=8"]),
        "added key of verl's in a role": (*ppo, [ASKED, "+sharding.roles.critic.lr=1e-6"]),
        "verl's key in the block of a role": (*ppo, [ASKED, "sharding.roles.rollout={n:8}"]),
        "list without brackets": (*ppo, [ASKED, CRITIC.replace("[1]", "2,3")]),
        "list without brackets or switch": (*ppo, [CRITIC.replace("[1]", "2,3")]),
        "list that a shell took apart": (*ppo, [ASKED, CRITIC.replace("[1]", "[2,"), "3]"]),
        "list of verl's without brackets": (*ppo, [ASKED, "trainer.logger=console,wandb"]),
        "list without brackets in a run of verl's": (*ppo, ["trainer.logger=console,wandb"]),
        "list that a shell took apart in a run of verl's": (*ppo, ["trainer.logger=[console,", "wandb]"]),
        "wrong type": (*ppo, ["sharding.roles.critic.micro_batch_size=four"]),
        "wrong word": (*ppo, ["sharding.fit=aply"]),
        "out of range": (*ppo, ["sharding.placement.timeout_s=0"]),
        "key below null": (*ppo, ["sharding.roles.critic.devices.node0=[0]"]),
        "key below null twice": (*ppo, ["sharding.roles.critic.gradient_checkpointing.policy.x=1"]),
        "two keys below null": (
            *ppo,
            [f"sharding.roles.actor.gradient_checkpointing.{line}" for line in ("policy=every_n", "every=3")],
        ),
        "key that no yaml lists": (*ppo, [ASKED, "critic.fsdp.mixed_precision.param_dtype=fp16"]),
        "inherited key that no yaml lists": (*ppo, [ASKED, "critic.fsdp.use_dynamic_bsz=True"]),
        "key of an empty block": (*ppo, [ASKED, "critic.model.override_config.attn_implementation=sdpa"]),
        "key of an empty block that verl has": (
            *ppo,
            [ASKED, "actor_rollout_ref.rollout.engine_kwargs.vllm.enable_prefix_caching=True"],
        ),
        "key that follows another, which is typed": (
            None,
            "ppo_trainer",
            [
                ASKED,
                "model_engine=megatron",
                *(
                    f"+actor_rollout_ref.{role}.megatron.override_transformer_config.use_flash_attn=True"
                    for role in ("actor", "ref")
                ),
            ],
        ),
        "unknown key of a class of verl's": (*ppo, [ASKED, "actor_rollout_ref.actor.fsdp_config.no_such_key=1"]),
        "key of another role": (*ppo, [ASKED, "reward.reward_model.strategy=fsdp2"]),
        "key of the role's own blocks": (*ppo, [ASKED, "actor_rollout_ref.actor.param_offload=True"]),
        "key of a block": (*ppo, ["sharding.roles.critic={devices:[1],layot:fsdp}"]),
        "key of a block in a block": (*ppo, ["sharding.roles={critic:{offload:{param:true}}}"]),
        "key of a block of trainer": (*ppo, ["trainer={plugn:sharding}"]),
        "a map in a block": (*ppo, ["sharding.roles.critic={devices:{node0:[0]},layot:fsdp}"]),
        "null for a block": (*ppo, [ASKED, "sharding.roles.critic=null", "sharding.roles.actor.offload=null"]),
        "a value for a block": (*ppo, ["sharding.roles.critic.offload=true"]),
        "old key": (*ppo, [ASKED, "critic.model.fsdp_config.param_offload=True"]),
        "two old keys": (*ppo, [ASKED, "critic.fsdp_config.fsdp_size=2", "critic.nccl_timeout=9"]),
        "old block": (*ppo, [ASKED, "critic.model={fsdp_config:{param_offload:True,fsdp_size:2}}"]),
        "old key where the recipe asks": (in_yaml, "my_ppo", ["critic.model.fsdp_config.param_offload=True"]),
        "old block deleted": (*ppo, [ASKED, "~critic.model.fsdp_config"]),
        "old place of a policy": (*ppo, [ASKED, "actor_rollout_ref.ref.offload_policy=True"]),
        "someone else's key": (*ppo, [ASKED, "data.no_such_key=1"]),
        "old key and one that nothing reads": (
            *ppo,
            [
                ASKED,
                "critic.model.fsdp_config.fsdp_size=2",
                "reward_model.enable=True",
                "custom_reward_function.path=null",
            ],
        ),
        "end of a key": (*ppo, [ASKED, "actor.optim.lr=1e-6"]),
        "end of two keys": (*ppo, [ASKED, "model.path=/m"]),
        "end of many keys": (*ppo, [ASKED, "trainer.enable=True"]),
        "key of another block": (*ppo, [ASKED, "actor_rollout_ref.actor.lr=1e-6"]),
        "misspelt key of verl": (*ppo, [ASKED, "trainer.nnode=2"]),
        "misspelt key of verl without us": (*ppo, ["trainer.nnode=2"]),
        "added switch": (*ppo, ["+trainer.plugn=sharding"]),
        "added switch in a list": (*ppo, ["++trainer.plugins=[sharding]"]),
        "added switch at the top": (*ppo, ["+plugin=sharding"]),
        "added switch of another name": (*ppo, ["+trainer.sharding=true"]),
        "added switch in sft": (None, "sft_trainer_engine", ["+trainer.plugn=sharding"]),
        "misspelt switch in yaml": (typo_of_switch, "my_ppo", []),
        "added misspelt block": (*ppo, [ASKED, "+shardng.roles.critic.devices=[1]"]),
        "switch at the top": (*ppo, ["plugin=sharding"]),
        "switch of another name": (*ppo, ["trainer.sharding=true"]),
        "key below the switch": (*ppo, ["trainer.plugin.name=sharding"]),
        "null for the group": (*ppo, [ASKED, "sharding=null"]),
        "number for the group": (*ppo, [ASKED, "sharding=1"]),
        "list for the group": (*ppo, [ASKED, "sharding=[split]"]),
        "added group": (*ppo, [ASKED, "+sharding=split"]),
        "list for a role": (*ppo, [ASKED, "sharding.roles.critic=[4,5]"]),
        "old key of sft": (
            None,
            "sft_trainer_engine",
            [ASKED, "model.partial_pretrain=/m", "data.prompt_key=question"],
        ),
        "a recipe's own keys": (
            *ppo,
            [
                ASKED,
                "+trainer.tag=sharding",
                "+plugins=[a]",
                "+sharding_rules.roles=3",
                "+trainer.plugin_dir=/x",
                "+share.fit=1",
            ],
        ),
    }
    done = run("-c", _COMPOSE, sent=json.dumps(cases))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("answers")[2])


# Composed


@pytest.mark.parametrize("case", ["ppo", "megatron file", "megatron choice", "sft", "recipe by pkg", "recipe by file"])
def test_the_plugin_is_asked_for_without_a_plus(case, composed):
    config = composed[case]["config"]
    assert config["trainer"]["plugin"] == "sharding"
    assert config["sharding"]["roles"]["critic"]["devices"] == [1]
    assert ShardingConfig.parse(config["sharding"]).changed() == {"sharding.roles.critic.devices": [1]}


def test_without_a_word_of_the_user_the_plugin_is_off_and_the_block_is_the_default(composed):
    config = composed["default"]["config"]
    assert config["trainer"]["plugin"] is None
    assert ShardingConfig.parse(config["sharding"]) == ShardingConfig()


def test_a_recipe_keeps_its_own_keys(composed):
    assert composed["recipe by pkg"]["config"]["recipe"] == {"alpha": 0.5}


def test_a_recipes_own_file_may_set_the_block_with_a_bare_off(composed):
    config = composed["recipe in yaml"]["config"]
    assert config["trainer"]["plugin"] == "sharding"
    assert ShardingConfig.parse(config["sharding"]).changed() == {
        "sharding.fit": "off",
        "sharding.guards.token_ids": "off",
        "sharding.roles.critic.devices": "2-3",
    }


@pytest.mark.parametrize("case", ["split", "split in recipe"])
def test_a_group_choice_sets_the_devices_of_all_roles(case, composed):
    roles = composed[case]["config"]["sharding"]["roles"]
    devices = {role: roles[role]["devices"] for role in ("actor", "critic", "ref", "reward")}
    assert devices == {"actor": "first_half", "critic": "second_half?", "ref": "second_half?", "reward": None}


def test_a_single_key_goes_on_top_of_a_group_choice(composed):
    roles = composed["split and more"]["config"]["sharding"]["roles"]
    assert (roles["ref"]["devices"], roles["critic"]["devices"]) == ([0], "second_half?")


@pytest.mark.parametrize(
    ("case", "devices"),
    [
        ("map", {"node0": [0, 1], "node1": [0]}),
        ("range", "2-3"),
        ("reference", "${sharding.roles.actor.devices}"),
    ],
)
def test_devices_may_be_written_in_every_form(case, devices, composed):
    assert composed[case]["config"]["sharding"]["roles"]["critic"]["devices"] == devices


def test_null_for_a_block_leaves_verl_alone(composed):
    assert ShardingConfig.parse(composed["null for a block"]["config"]["sharding"]) == ShardingConfig()


def test_off_is_a_word_on_the_command_line_too(composed):
    assert ShardingConfig.parse(composed["off"]["config"]["sharding"]).fit == "off"


def test_checkpointing_may_be_a_block_on_the_command_line(composed):
    role = ShardingConfig.parse(composed["checkpointing"]["config"]["sharding"]).roles.critic
    assert (role.gradient_checkpointing.policy, role.gradient_checkpointing.every) == ("every_n", 3)


def test_keys_that_a_recipe_adds_for_itself_are_its_own(composed):
    config = composed["a recipe's own keys"]["config"]
    assert (config["trainer"]["tag"], config["trainer"]["plugin_dir"]) == ("sharding", "/x")


# Refused


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("misspelt role", ["sharding.roles.critc: no such key", "Then type sharding.roles.critic.devices=[1]"]),
        ("misspelt role in yaml", ["sharding.roles.critc: no such key", "did you mean sharding.roles.critic?"]),
        ("misspelt plugin", ["trainer.plugn: no such key", "did you mean trainer.plugin?"]),
        ("misspelt plugin in sft", ["trainer.plugn: no such key", "did you mean trainer.plugin?"]),
        ("misspelt trainer", ["trianer: no such key", "did you mean trainer?"]),
        ("misspelt block", ["shardng: no such key", "did you mean sharding?"]),
        ("misspelt choice", ["sharding=splt", "fix:      sharding=split"]),
        ("added key", ["sharding.roles.critic.foo: no such key", "devices", "remove sharding.roles.critic.foo"]),
        ("added block", ["sharding.role: no such key", "did you mean sharding.roles?"]),
        (
            "added misspelt key",
            ["did you mean sharding.roles.actor.devices? Then type sharding.roles.actor.devices=[0]"],
        ),
        ("added misspelt role", ["Then type sharding.roles.critic.dtype=float16 sharding.roles.critic.devices=1"]),
        ("verl's name of a role", ["did you mean sharding.roles.actor? Then type sharding.roles.actor.devices=[2]"]),
        ("verl's key in a role", ["did you mean actor_rollout_ref.rollout.n? Then type actor_rollout_ref.rollout.n=8"]),
        ("added key of verl's in a role", ["did you mean critic.optim.lr? Then type critic.optim.lr=1e-6"]),
        ("verl's key in the block of a role", ["did you mean actor_rollout_ref.rollout.n?"]),
        ("list without brackets", ["fix:      sharding.roles.critic.devices=[2,3]"]),
        ("list without brackets or switch", ["fix:      sharding.roles.critic.devices=[2,3]"]),
        ("list that a shell took apart", ["fix:      'sharding.roles.critic.devices=[2, 3]'"]),
        ("list of verl's without brackets", ["fix:      trainer.logger=[console,wandb], or trainer.logger=console"]),
        ("list without brackets in a run of verl's", ["Ambiguous value for argument 'trainer.logger=console,wandb'"]),
        ("list that a shell took apart in a run of verl's", ["no viable alternative at input '[console,'"]),
        ("wrong type", ["sharding.roles.critic.micro_batch_size", "a whole number", "four"]),
        ("wrong word", ["sharding.fit", "off or report or apply", "aply"]),
        ("out of range", ["sharding.placement.timeout_s", "more than 0", "sharding.placement.timeout_s=120"]),
        ("key below null", ["sharding.roles.critic.devices as a whole", "sharding.roles.critic.devices={node0:[0]}"]),
        ("key below null twice", ["sharding.roles.critic.gradient_checkpointing={policy:{x:1}}"]),
        ("two keys below null", ["sharding.roles.actor.gradient_checkpointing={policy:every_n,every:3}"]),
        ("key that no yaml lists", ["fix:      +critic.fsdp.mixed_precision.param_dtype=fp16"]),
        ("inherited key that no yaml lists", ["fix:      +critic.fsdp.use_dynamic_bsz=True"]),
        ("key of an empty block", ["fix:      +critic.model.override_config.attn_implementation=sdpa"]),
        ("key of an empty block that verl has", ["fix:      actor_rollout_ref.rollout.enable_prefix_caching=True"]),
        (
            "key that follows another, which is typed",
            ["fix:      remove +actor_rollout_ref.ref.megatron.override_transformer_config.use_flash_attn=True"],
        ),
        ("unknown key of a class of verl's", ["fix:      remove actor_rollout_ref.actor.fsdp_config.no_such_key=1"]),
        ("key of another role", ["no longer a training worker", "fix:      remove reward.reward_model.strategy"]),
        ("key of the role's own blocks", ["fix:      actor_rollout_ref.actor.fsdp_config.param_offload=True"]),
        ("old key", ["critic.model.fsdp_config.param_offload=True", "write critic.fsdp.param_offload=True"]),
        ("key of a block", ["sharding.roles.critic.layot: no such key", "did you mean sharding.roles.critic.layout?"]),
        ("key of a block in a block", ["did you mean sharding.roles.critic.offload.params?"]),
        ("key of a block of trainer", ["trainer.plugn: no such key", "did you mean trainer.plugin?"]),
        ("a map in a block", ["did you mean sharding.roles.critic.layout?"]),
        ("a value for a block", ["'sharding.roles.critic.offload={params:true,optimizer:true}'"]),
        ("two old keys", ["write critic.fsdp.fsdp_size=2 actor_rollout_ref.nccl_timeout=9"]),
        ("old block", ["write critic.fsdp.param_offload=True critic.fsdp.fsdp_size=2"]),
        ("old key where the recipe asks", ["write critic.fsdp.param_offload=True"]),
        ("old block deleted", ["remove ~critic.model.fsdp_config"]),
        ("old place of a policy", ["write actor_rollout_ref.ref.fsdp_config.offload_policy=True"]),
        ("someone else's key", ["fix:      remove data.no_such_key=1, or type +data.no_such_key=1 if code of yours"]),
        ("old key and one that nothing reads", ["write critic.fsdp.fsdp_size=2 reward.reward_model.enable=True"]),
        ("end of a key", ["fix:      actor_rollout_ref.actor.optim.lr=1e-6"]),
        ("end of two keys", ["fix:      actor_rollout_ref.model.path=/m or critic.model.path=/m"]),
        ("end of many keys", ["fix:      remove trainer.enable=True"]),
        ("key of another block", ["fix:      actor_rollout_ref.actor.optim.lr=1e-6"]),
        ("misspelt key of verl", ["trainer.nnode: no such key", "fix:      trainer.nnodes=2"]),
        ("misspelt key of verl without us", ["Could not override 'trainer.nnode'."]),
        ("added switch", ["trainer.plugn: no such key", "fix:      trainer.plugin=sharding"]),
        ("added switch in a list", ["trainer.plugins: no such key", "fix:      trainer.plugin=sharding"]),
        ("added switch at the top", ["plugin: no such key", "fix:      trainer.plugin=sharding"]),
        ("added switch of another name", ["trainer.sharding: no such key", "fix:      trainer.plugin=sharding"]),
        ("added switch in sft", ["trainer.plugn: no such key", "fix:      trainer.plugin=sharding"]),
        ("misspelt switch in yaml", ["trainer.plugn: no such key", "fix:      trainer.plugin=sharding"]),
        ("added misspelt block", ["shardng: no such key", "did you mean sharding?"]),
        ("switch at the top", ["plugin: no such key", "fix:      trainer.plugin=sharding"]),
        ("switch of another name", ["trainer.sharding: no such key", "fix:      trainer.plugin=sharding"]),
        ("key below the switch", ["trainer.plugin.name: no such key", "fix:      trainer.plugin=sharding"]),
        ("null for the group", ["sharding=base or sharding=split", "remove sharding=null"]),
        ("number for the group", ["sharding=base or sharding=split", "remove sharding=1"]),
        ("list for the group", ["sharding=[split]", "fix:      sharding=split"]),
        ("added group", ["+sharding=split", "fix:      sharding=split"]),
        ("list for a role", ["sharding.roles.critic", "fix:      sharding.roles.critic.devices=[4,5]"]),
        ("old key of sft", ["write model.path=/m; remove data.prompt_key", "data.messages_key"]),
    ],
)
def test_a_mistake_is_refused_with_the_right_key_named(case, parts, composed):
    error = composed[case]["error"]
    for part in parts:
        assert part in error


def test_a_plus_is_not_offered_where_verls_class_takes_no_such_key(composed):
    assert "or type +" not in composed["unknown key of a class of verl's"]["error"]
    assert "or type +" in composed["someone else's key"]["error"]


# Through the command


_ASK = """
import verl
from hydra import compose, initialize_config_module
with initialize_config_module("verl.trainer.config", version_base=None):
    compose("ppo_trainer", overrides=["trainer.plugin=sharding"])
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """Commands as users type them, two at a time."""
    folder = tmp_path_factory.mktemp("commands")
    write_recipe(folder / "config", PKG)
    (folder / "recipe.py").write_text(
        "import hydra\nimport verl\n\n\n"
        "@hydra.main(config_path='config', config_name='my_ppo', version_base=None)\n"
        "def main(config):\n    print('plugin', config.trainer.plugin, config.sharding.roles.actor.devices)\n\n\n"
        "main()\n"
    )
    ppo, here = ("-m", "verl.trainer.main_ppo"), f"hydra.run.dir={folder}"
    lines = {
        "asked": ((*ppo, "--cfg", "job", ASKED, CRITIC), {}),
        "misspelt": ((*ppo, "--cfg", "job", ASKED, "sharding.roles.critc.devices=[1]"), {}),
        "no plugins": (("-c", _ASK), {envs.VERL_PLUGINS: "none"}),
        "off switch": (("-c", _ASK), {envs.DISABLE: "1"}),
        "old trainer": ((*ppo, ASKED, "trainer.use_v1=False", here), {}),
        "recipe": ((str(folder / "recipe.py"), ASKED, "sharding=split", here), {}),
    }
    with ThreadPoolExecutor(max_workers=2) as pool:
        running = {name: pool.submit(run, *arguments, **env) for name, (arguments, env) in lines.items()}
        return {name: future.result() for name, future in running.items()}


def test_the_job_config_of_a_command_shows_the_request(commands):
    done = commands["asked"]
    assert done.returncode == 0, done.stderr
    config = OmegaConf.create(done.stdout)
    assert config.trainer.plugin == "sharding"
    assert config.sharding.roles.critic.devices == [1]
    assert config.critic.fsdp.param_offload is False


def test_a_command_with_a_misspelt_role_fails_with_the_right_one_named(commands):
    assert commands["misspelt"].returncode != 0
    assert "did you mean sharding.roles.critic?" in commands["misspelt"].stderr


@pytest.mark.parametrize("name", ["no plugins", "off switch"])
def test_where_the_plugin_is_kept_out_asking_for_it_fails(name, commands):
    assert commands[name].returncode != 0
    assert "Could not override 'trainer.plugin'" in commands[name].stderr


def test_a_recipes_own_command_knows_the_plugin(commands):
    assert commands["recipe"].returncode == 0, commands["recipe"].stderr
    assert "plugin sharding first_half" in commands["recipe"].stdout


def test_the_old_trainer_is_refused_before_ray_starts(commands):
    done = commands["old trainer"]
    assert done.returncode != 0
    for part in ("trainer.use_v1", "False with trainer.plugin=sharding", "trainer.use_v1=True"):
        assert part in done.stderr
    assert "Started a local Ray instance" not in done.stderr


# Whether a config asks for the plugin


def config(**trainer):
    return OmegaConf.create({"trainer": trainer, "sharding": {"roles": {}}})


def test_the_plugin_is_on_only_by_its_name():
    assert driver.asked_for(config(plugin="sharding"))
    assert not driver.asked_for(config(plugin=None))


def test_a_stock_config_does_not_ask_for_the_plugin():
    assert not driver.asked_for(OmegaConf.create({"trainer": {"nnodes": 1}}))
    assert not driver.asked_for(OmegaConf.create({}))


@pytest.mark.parametrize("value", ["shardng", "other", True, ""])
def test_another_plugin_name_is_refused_with_the_right_one(value):
    with pytest.raises(ConfigError) as caught:
        driver.asked_for(config(plugin=value))
    assert caught.value.subject == "trainer.plugin"
    assert caught.value.found == str(value)
    assert caught.value.remedy == "trainer.plugin=sharding"


def test_settings_without_the_switch_are_refused_and_not_skipped():
    asked = OmegaConf.create({"trainer": {"plugin": None}, "sharding": {"roles": {"critic": {"devices": [1]}}}})
    with pytest.raises(ConfigError) as caught:
        driver.asked_for(asked)
    assert caught.value.subject == "trainer.plugin"
    assert "sharding.roles.critic.devices=[1]" in caught.value.found
    assert caught.value.remedy == "trainer.plugin=sharding"
