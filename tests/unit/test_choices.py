"""Keys of verl that take one of a few names: misspelt ones are refused, a user's own are not."""

import ast
import importlib.util
from pathlib import Path

import pytest

from verl_ext_sharding.config.choices import CHOICES, check_choices
from verl_ext_sharding.errors import ConfigError

ESTIMATOR, MANAGER, LOGGER = "algorithm.adv_estimator", "reward.reward_manager.name", "trainer.logger"


@pytest.mark.parametrize(
    ("key", "written", "right"),
    [
        (ESTIMATOR, "GAE", "gae"),
        (ESTIMATOR, "Reinforce-Plus-Plus", "reinforce_plus_plus"),
        (MANAGER, "DAPO", "dapo"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "GSPO", "gspo"),
        ("actor_rollout_ref.actor.loss_agg_mode", "token_mean", "token-mean"),
        ("actor_rollout_ref.actor.kl_loss_type", "low_var_k", "low_var_kl"),
        ("algorithm.kl_penalty", "K3+", "k3+"),
        ("critic.optim.lr_scheduler_type", "cosin", "cosine"),
        ("optim.lr_scheduler_type", "Constant", "constant"),
        ("critic.fsdp.model_dtype", "bfloat", "bfloat16"),
        ("data.truncation", "eror", "error"),
        ("trainer.resume_mode", "resume-path", "resume_path"),
        ("trainer.device", "gpu", "cuda"),
        ("actor_rollout_ref.rollout.load_format", "dummy_dtensor", "dummy"),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend", "hccl", "nccl"),
        (LOGGER, "Wandb", "wandb"),
        (LOGGER, ["console", "tensorbord"], "[console,tensorboard]"),
    ],
)
def test_a_misspelt_or_renamed_name_is_refused_with_the_right_one(key, written, right):
    with pytest.raises(ConfigError) as caught:
        check_choices({key: written})
    assert caught.value.subject == key
    assert caught.value.remedy == f"{key}={right}"


@pytest.mark.parametrize(
    "values",
    [
        {ESTIMATOR: "gpro"},  # a user's own, for all that can be known
        {ESTIMATOR: "my_grpo"},
        {ESTIMATOR: "${my.estimator}"},
        {MANAGER: "DAPO", "reward.reward_manager.source": "importlib"},  # a class of the user's
        {MANAGER: "batched"},
        {"actor_rollout_ref.rollout.load_format": "runai_streamer"},
        {"critic.fsdp.model_dtype": 16},
        {"data.truncation": None},
        {"trainer.device": "xpu"},
        {LOGGER: ["console", "file"]},
        {"my_block.adv_estimator": "GAE"},
    ],
    ids=str,
)
def test_right_names_and_those_of_the_users_own_code_are_left_to_verl(values):
    check_choices(values)


def _names(key):
    return next(choice.names for choice in CHOICES if choice.key == key)


def _source(module):
    verl = importlib.util.find_spec("verl")  # finds the package without importing it
    return ast.parse(Path(verl.submodule_search_locations[0], *module.split("/")).read_text())


def _registered(tree, decorator):
    calls = [d for node in ast.walk(tree) for d in getattr(node, "decorator_list", ()) if isinstance(d, ast.Call)]
    return {call.args[0].value for call in calls if getattr(call.func, "id", "") == decorator}


def test_every_estimator_of_verl_is_known():
    tree = _source("trainer/ppo/core_algos.py")
    (enum,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "AdvantageEstimator")
    assert {item.value.value for item in enum.body if isinstance(item, ast.Assign)} == set(_names(ESTIMATOR))


def test_every_policy_loss_of_verl_is_known():
    found = _registered(_source("trainer/ppo/core_algos.py"), "register_policy_loss")
    assert found == set(_names("policy_loss.loss_mode"))


def test_every_reward_manager_of_verl_is_known():
    folder = "experimental/reward_loop/reward_manager"
    found = set()
    for name in ("naive", "dapo", "gdpo", "remote"):
        found |= _registered(_source(f"{folder}/{name}.py"), "register")
    assert found == set(_names(MANAGER))


def test_every_logger_of_verl_is_known():
    lists = [node for node in ast.walk(_source("utils/tracking.py")) if isinstance(node, ast.Assign)]
    (found,) = (ast.literal_eval(n.value) for n in lists if getattr(n.targets[0], "id", "") == "supported_backend")
    assert {*found, "tracking"} == set(_names(LOGGER))
