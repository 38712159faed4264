"""What Hydra takes and verl does not read as it was meant: keys of an older verl, added by a recipe's yaml or a `+` or kept in
verl's own yaml; keys that are misspelt behind a `+`; words where it has true or false; and misspelt names."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from importlib import util
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext_sharding.config import old_keys
from verl_ext_sharding.config.arguments import as_argument, as_override
from verl_ext_sharding.config.choices import check_choices
from verl_ext_sharding.config.override_hints import known_keys
from verl_ext_sharding.config.unread_keys import BLOCKS
from verl_ext_sharding.errors import ConfigError, misspelling_of

_GENERATED = "_generated_ppo_*.yaml"
"""verl ships its composed trees, one for each engine (trainer/config)."""

_ENGINE_CHOICES = ("actor_rollout_ref.actor._target_", "critic._target_")
"""Keys by which a config tells its engines."""

_NAMES_OF_USERS = ("distillation.teacher_models", "trainer.v1")
"""Blocks below which users choose the names."""

_WORDS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}


def check_recipe_keys(config: DictConfig, explicit: Collection[str] = ()) -> None:
    """Answers the keys of the composed config that only an older verl had or read, and those that a `+` added misspelt.

    Args:
        config: The composed config, recipe included.
        explicit: Keys that the user wrote on the command line; what is not among them stands in a yaml file.

    Raises:
        ConfigError: Names each such key and what to write now.
    """
    known = _keys_of_engines(config)
    if not known:
        return
    answers, undo = [], []
    for key, value in _leaves(config):
        found = _answer(key, value, known)
        if found is None:
            continue
        answers.append(found)
        if not any(key == written or key.startswith(f"{written}.") for written in explicit):
            undo.append(_undo(key, known))
    if answers:
        raise old_keys.refusal(answers, undo=dict.fromkeys(undo))
    check_spelling(config, explicit, known)


def check_spelling(config: DictConfig, keys: Collection[str], known: Collection[str]) -> None:
    """Refuses keys of the command line that are misspellings of keys that there are.

    Args:
        config: The composed config.
        keys: Keys that the user wrote.
        known: Keys that verl has, blocks included.

    Raises:
        ConfigError: Names the first such key, and the right one.
    """
    values = dict(_leaves(config))
    for key in keys:
        right = _meant(key, known)
        if right is not None and key in values:
            raise _misspelt(key, right, values[key])


def _meant(key: str, known: Collection[str]) -> str | None:
    """The key of verl's that one of the command line is a misspelling of, or None."""
    parts = key.split(".")
    depth = next((depth for depth in range(len(parts)) if ".".join(parts[: depth + 1]) not in known), None)
    block = ".".join(parts[:depth])
    if depth is None or block in _NAMES_OF_USERS:
        return None
    start = f"{block}." if block else ""
    siblings = {name.removeprefix(start).partition(".")[0] for name in known if name.startswith(start)}
    right = misspelling_of(parts[depth], sorted(siblings))
    return None if right is None else ".".join([*parts[:depth], right, *parts[depth + 1 :]])


def check_words(config: DictConfig) -> None:
    """Refuses a word where verl has true or false, and a misspelt name where it has a few: both would be taken in silence.

    Hydra reads `no` and `off` as text, and verl takes any text for true.

    Args:
        config: The composed config.

    Raises:
        ConfigError: Names the first such key.
    """
    switches = frozenset().union(*(tree.switches for tree in _verl_trees()))
    values = {key: value for key, value in _leaves(config) if not key.startswith("sharding.")}
    for key, value in values.items():
        means = _WORDS.get(value.lower()) if isinstance(value, str) else None
        if means is None or key.rpartition(".")[2] not in switches:
            continue
        raise ConfigError(
            key,
            expected="true or false",
            found=f"the text '{value}', which verl takes for true",
            consequence="the run does not start",
            remedy=f"{key}={str(means).lower()}",
        )
    check_choices(values)


def _answer(key: str, value: Any, known: Collection[str]) -> old_keys.Answer | None:
    text = None if value == "???" else as_override(value)
    if key in known:
        asks = key.startswith(tuple(f"{block}." for block in BLOCKS)) and text not in (None, "null", "{}", "[]")
        return old_keys.answer_unread(key, str(text), known) if asks else None
    found = old_keys.answer(key, text, known)
    if found is not None and found.new_key == f"+{key}":
        return None  # only an override without its + was wrong
    if found is None and text not in (None, "null"):
        found = old_keys.answer_unread(key, str(text), known)
    return replace(found, overrides=()) if found is not None and value == {} else found


def _misspelt(key: str, right: str, value: Any) -> ConfigError:
    name = key.rpartition(".")[2]
    return ConfigError(
        f"{key}: no key of verl's",
        expected=right,
        found=key,
        consequence="the run does not start, since verl would not read it",
        remedy=f"{as_argument(f'{right}={as_override(value)}')}, or +mine.{name} if it is one that code of yours reads",
    )


def _undo(key: str, known: Collection[str]) -> str:
    """The override that takes a key of a yaml file back, with the block around it that verl does not have either."""
    if key in known:
        return f"{key}=null"
    parts = key.split(".")
    names = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return f"~{next(name for name in names if name not in known)}"


def _leaves(config: DictConfig, path: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with a value of their own, as the file has it: references unresolved; an empty block is one too."""
    for name in config:
        node, key = config._get_node(name), f"{path}.{name}" if path else str(name)
        if isinstance(node, DictConfig) and len(node):
            yield from _leaves(node, key)
        elif OmegaConf.is_config(node):
            yield key, OmegaConf.to_container(node)
        else:
            yield key, node._value()


def _keys_of_engines(config: DictConfig) -> frozenset[str]:
    """Every key that verl has for this run's engines, blocks included; empty when verl's trees are not to be found."""
    trees = _verl_trees()
    chosen = [OmegaConf.select(config, key, default=None, throw_on_missing=False) for key in _ENGINE_CHOICES]
    of_run = [tree.keys for tree in trees if set(tree.targets) & set(chosen)]
    return frozenset().union(*(of_run or [tree.keys for tree in trees]))


@dataclass(kw_only=True, frozen=True)
class _Tree:
    """What the installed verl has for one engine.

    Args:
        targets: Its config classes.
        keys: Every key, blocks included.
        switches: Last names of the keys that are true or false.
    """

    targets: tuple[str, ...]
    keys: frozenset[str]
    switches: frozenset[str]


@functools.cache
def _verl_trees() -> list[_Tree]:
    package = util.find_spec("verl")
    if package is None or not package.submodule_search_locations:
        return []
    folder = Path(next(iter(package.submodule_search_locations))) / "trainer" / "config"
    trees = [OmegaConf.load(file) for file in sorted(folder.glob(_GENERATED))]
    return [
        _Tree(
            targets=tuple(str(OmegaConf.select(tree, key)) for key in _ENGINE_CHOICES),
            keys=frozenset(known_keys(tree)),
            switches=frozenset(key.rpartition(".")[2] for key, value in _leaves(tree) if isinstance(value, bool)),
        )
        for tree in trees
        if isinstance(tree, DictConfig)
    ]
