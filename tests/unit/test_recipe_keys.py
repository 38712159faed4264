"""Keys of older verl versions in a recipe's yaml."""

import pytest
from omegaconf import OmegaConf

from verl_ext_sharding.cli.plan import compose
from verl_ext_sharding.config.recipe_keys import check_recipe_keys
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
    assert "critic.model.fsdp_config" in str(caught.value)
    assert "critic.fsdp" in str(caught.value)


def test_keys_that_a_recipe_invents_for_itself_are_its_own(tmp_path):
    check_recipe_keys(_recipe(tmp_path, "my_block:\n  anything: 1\nreward:\n  my_weight: 0.5\n"))


def test_verls_own_tree_has_no_old_key():
    check_recipe_keys(compose([]))


def test_extra_keys_that_verl_takes_are_left_alone():
    config = compose([])
    OmegaConf.update(config, "critic.model.override_config.attn_implementation", "sdpa", force_add=True)
    check_recipe_keys(config)
