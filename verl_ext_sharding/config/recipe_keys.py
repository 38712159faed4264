"""Keys of older verl versions that a recipe's yaml adds to the tree: Hydra takes them, and verl reads them nowhere."""

from __future__ import annotations

import functools
from importlib import util
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_ext_sharding.config import old_keys
from verl_ext_sharding.config.override_hints import known_keys

_GENERATED = "_generated_ppo_*.yaml"
"""verl ships its composed trees, one for each engine (trainer/config)."""


def check_recipe_keys(config: DictConfig) -> None:
    """Answers the first key of the composed config that only an older verl had.

    Args:
        config: The composed config, recipe included.

    Raises:
        ConfigError: Names the key and what to write now.
    """
    known = _verl_keys()
    if not known:
        return
    for key in sorted(known_keys(config) - known):
        value = OmegaConf.select(config, key, default=None, throw_on_missing=False)
        written = None if value is None or OmegaConf.is_config(value) else str(value)
        found = old_keys.answer(key, written, known)
        if found is not None:
            raise found.error()


@functools.cache
def _verl_keys() -> frozenset[str]:
    """Every key that the installed verl has for any engine, blocks included; empty when its trees are not to be found."""
    package = util.find_spec("verl")
    if package is None or not package.submodule_search_locations:
        return frozenset()
    folder = Path(next(iter(package.submodule_search_locations))) / "trainer" / "config"
    trees = [OmegaConf.load(file) for file in sorted(folder.glob(_GENERATED))]
    return frozenset(key for tree in trees if isinstance(tree, DictConfig) for key in known_keys(tree))
