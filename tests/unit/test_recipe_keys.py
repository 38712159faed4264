"""Keys of older verl versions in a recipe's yaml."""

import shlex

import pytest
from omegaconf import OmegaConf

from verl_ext_sharding import driver
from verl_ext_sharding.cli.plan import compose
from verl_ext_sharding.config.changes import parse_overrides
from verl_ext_sharding.config.recipe_keys import check_recipe_keys, check_words
from verl_ext_sharding.errors import ConfigError


def _recipe(tmp_path, text):
    (tmp_path / "my_recipe.yaml").write_text(
        "hydra:\n  searchpath:\n    - pkg://verl.trainer.config\ndefaults:\n  - ppo_trainer\n  - _self_\n" + text
    )
    return compose([], config_name="my_recipe", config_path=str(tmp_path))


def test_an_old_key_of_a_recipe_is_answered_with_the_new_one(tmp_path):
    config = _recipe(tmp_path, "critic:\n  model:\n    fsdp_config:\n      param_offload: true\n")
    with pytest.raises(ConfigError) as caught:
        check_recipe_keys(config)
    assert "critic.model.fsdp_config.param_offload=True" in caught.value.found
    assert "write critic.fsdp.param_offload=True in the yaml file" in caught.value.remedy


def test_keys_that_a_recipe_invents_for_itself_are_its_own(tmp_path):
    check_recipe_keys(_recipe(tmp_path, "my_block:\n  anything: 1\nreward:\n  my_weight: 0.5\n"))


def test_verls_own_tree_has_no_old_key():
    check_recipe_keys(compose([]))


def test_extra_keys_that_verl_takes_are_left_alone():
    config = compose([])
    OmegaConf.update(config, "critic.model.override_config.attn_implementation", "sdpa", force_add=True)
    check_recipe_keys(config)


def _typed(remedy):
    return shlex.split(remedy.partition("; or type ")[2])


RECIPES = {
    "a block": "critic: {model: {fsdp_config: {param_offload: true, optimizer_offload: false}}}",
    "two blocks": "critic: {fsdp_config: {fsdp_size: 4}}\nray_init: {num_cpus: 8}",
    "nothing in it": "critic: {model: {fsdp_config: {}}}",
    "a reference": "my: {size: 2}\ncritic: {fsdp_config: {fsdp_size: '${my.size}'}}",
    "a list": "trainer: {profile_steps: [1, 2]}",
    "keys of rewards": "custom_reward_function: {path: /x/r.py, name: f}\nreward_model: {enable: true, reward_manager: dapo}",
    "both": "critic: {fsdp_config: {fsdp_size: 4}}\nsandbox_fusion: {url: 'http://host:80/x'}",
}


@pytest.mark.parametrize("text", RECIPES.values(), ids=RECIPES)
def test_what_a_refusal_offers_to_type_repairs_the_recipe(text, tmp_path):
    with pytest.raises(ConfigError) as caught:
        check_recipe_keys(_recipe(tmp_path, text))
    overrides = _typed(caught.value.remedy)
    assert overrides
    check_recipe_keys(compose(overrides, config_name="my_recipe", config_path=str(tmp_path)))


def test_all_values_of_a_block_reach_their_new_keys(tmp_path):
    with pytest.raises(ConfigError) as caught:
        check_recipe_keys(_recipe(tmp_path, RECIPES["a block"]))
    assert _typed(caught.value.remedy) == [
        "~critic.model.fsdp_config",
        "critic.fsdp.param_offload=True",
        "critic.fsdp.optimizer_offload=False",
    ]


@pytest.mark.parametrize("plus", ["+", "++"])
@pytest.mark.parametrize(
    ("lines", "remedy"),
    [
        (["critic.model.fsdp_config.param_offload=True"], "write critic.fsdp.param_offload=True"),
        (["critic.model.fsdp_config={param_offload:True,grad_offload:True}"],
         "write critic.fsdp.param_offload=True; remove critic.model.fsdp_config.grad_offload"),
        (["critic.nccl_timeout=9"], "write actor_rollout_ref.nccl_timeout=9"),
        (["ray_init.num_cpus=8"], "write ray_kwargs.ray_init.num_cpus=8"),
        (["critic.offload_policy=True"], "write critic.fsdp.offload_policy=True"),
        (["reward_model.reward_kwargs.max_resp_len=9"], "write +reward.reward_kwargs.max_resp_len=9"),
    ],
)  # fmt: skip
def test_an_old_key_that_is_added_on_the_command_line_keeps_key_and_value(plus, lines, remedy):
    written = [f"{plus}{line}" for line in lines]
    with pytest.raises(ConfigError) as caught:
        check_recipe_keys(compose(written), parse_overrides(written))
    assert caught.value.remedy == remedy


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("custom_reward_function.path=/x", "write reward.custom_reward_function.path=/x"),
        ("reward_model.enable=True", "write reward.reward_model.enable=True"),
        ("reward_model.model.path=/m", "write reward.reward_model.model_path=/m"),
        (
            "reward_model.rollout.engine_kwargs={vllm:{x:1}}",
            "write +reward.reward_model.rollout.engine_kwargs.vllm.x=1",
        ),
        ("reward_model.model.trust_remote_code=True", "remove reward_model.model.trust_remote_code"),
        ("sandbox_fusion.max_concurrent=3", "write reward.sandbox_fusion.max_concurrent=3"),
    ],
)
def test_a_key_of_verls_yaml_that_nothing_reads_is_answered_with_the_one_that_is_read(line, remedy):
    with pytest.raises(ConfigError) as caught:
        check_recipe_keys(compose([line]), parse_overrides([line]))
    assert caught.value.found == line.replace("={vllm:{x:1}}", ".vllm.x=1")
    assert caught.value.remedy == remedy


@pytest.mark.parametrize(
    "line", ["reward_model.enable=null", "custom_reward_function.path=null", "reward_model.rollout.engine_kwargs={}"]
)
def test_a_key_that_nothing_reads_may_say_nothing(line):
    check_recipe_keys(compose([line]), parse_overrides([line]))


@pytest.mark.parametrize("engine", ["dp", "megatron", "veomni", "torchtitan"])
def test_no_engines_own_tree_has_an_old_key(engine):
    check_recipe_keys(compose([f"model_engine={engine}"]))


def test_a_key_that_an_old_verl_had_without_its_plus_is_right_with_it():
    line = "+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True"
    check_recipe_keys(compose([line]), parse_overrides([line]))


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("+trainer.nnode=2", "trainer.nnodes=2"),
        ("++trainer.n_gpu_per_node=2", "trainer.n_gpus_per_node=2"),
        ("+data.trainBatchSize=8", "data.train_batch_size=8"),
        ("+actor_rollout_ref.roolout.n=4", "actor_rollout_ref.rollout.n=4"),
        ("+algorithm.kl_ctrl.kl_coeff=0.1", "algorithm.kl_ctrl.kl_coef=0.1"),
        ("+data.train_file=[/a,/b]", "data.train_files=[/a,/b]"),
    ],
)
def test_a_key_misspelt_behind_a_plus_is_refused_with_the_right_one(line, right):
    with pytest.raises(ConfigError) as caught:
        check_recipe_keys(compose([line]), parse_overrides([line]))
    assert caught.value.remedy.partition(", or ")[0] == right
    check_recipe_keys(compose([right]), parse_overrides([right]))


@pytest.mark.parametrize(
    "line",
    [
        "+data.gen_prompt_size=8",
        "+data.image_key2=b",
        "+trainer.max_ref_ckpt_to_keep=1",
        "+my.nnode=2",
        "+reward.reward_kwargs.max_resp_len=9",
        "++critic.fsdp.micro_batch_size_per_gpu=1",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16",
        "+distillation.teacher_models.teacher_models.num_replicas=1",
        "+actor_rollout_ref.model.override_config.num_hidden_layer=2",
        "~trainer.nnodes=1",
    ],
)
def test_a_key_of_the_users_own_may_be_added_also_where_it_is_like_one_of_verls(line):
    check_recipe_keys(compose([line]), parse_overrides([line]))


def test_a_key_of_another_engine_is_one_that_this_run_does_not_read():
    line = "+critic.nccl_timeout=9"
    check_recipe_keys(compose([line[1:], "model_engine=megatron"]), parse_overrides([line[1:]]))
    with pytest.raises(ConfigError):
        check_recipe_keys(compose([line]), parse_overrides([line]))


def test_the_new_keys_of_rewards_are_left_alone():
    check_recipe_keys(compose(["reward.custom_reward_function.path=/x", "reward.reward_model.enable=True"]))


def test_a_job_with_a_reward_key_that_nothing_reads_is_refused_before_it_is_planned():
    written = ["custom_reward_function.path=/x"]
    with pytest.raises(ConfigError) as caught:
        driver.prepare(compose(written), parse_overrides(written))
    assert caught.value.remedy == "write reward.custom_reward_function.path=/x"


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("actor_rollout_ref.actor.use_kl_loss=no", "false"),
        ("critic.use_dynamic_bsz=yes", "true"),
        ("actor_rollout_ref.actor.fsdp_config.param_offload='False'", "false"),
        ("reward.reward_model.enable=off", "false"),
    ],
)
def test_a_word_where_verl_has_true_or_false_is_refused_with_what_it_means(override, value):
    with pytest.raises(ConfigError) as caught:
        check_words(compose([override]))
    key = override.partition("=")[0]
    assert caught.value.remedy == f"{key}={value}"
    check_words(compose([caught.value.remedy]))


def test_a_misspelt_name_is_refused_in_the_composed_config():
    with pytest.raises(ConfigError) as caught:
        check_words(compose(["algorithm.adv_estimator=GAE"]))
    assert caught.value.remedy == "algorithm.adv_estimator=gae"
    check_words(compose([caught.value.remedy]))


def test_words_elsewhere_and_words_of_ours_are_left_alone():
    check_words(compose(["sharding.guards.token_ids=off", "trainer.experiment_name=on", "+my_block.mode=off"]))
