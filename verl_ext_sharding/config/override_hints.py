"""Errors of Hydra overrides in the user's words: which key was meant, which type is right."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext_sharding.config import old_keys
from verl_ext_sharding.config.arguments import as_argument, as_override
from verl_ext_sharding.config.schema import PLUGIN_NAME, ShardingConfig, unknown_key
from verl_ext_sharding.config.translate import request_of
from verl_ext_sharding.config.unread_keys import BLOCKS
from verl_ext_sharding.config.verl_fields import fields_of
from verl_ext_sharding.errors import ConfigError, did_you_mean

_REWARD_MODEL = "reward.reward_model."
_BLOCKS_OF_ROLES = ("actor_rollout_ref", "critic", "reward", "distillation")

_VERLS_BLOCKS = {
    "actor": "actor_rollout_ref.actor",
    "rollout": "actor_rollout_ref.rollout",
    "ref": "actor_rollout_ref.ref",
    "critic": "critic",
    "reward": "reward.reward_model",
    "teacher": "distillation",
}
"""Where verl has the keys of a role."""

_NO_KEY = ": no such key"
"""How the subject of `unknown_key`'s error ends."""

_MOST_PLACES = 2
"""How many keys are offered for one that stands in the wrong place; of more, none is likely to be meant."""


def explain(error: Exception, overrides: Iterable[Any], config: DictConfig) -> ConfigError | None:
    """A better error for an override that Hydra refused, or None when we know nothing better.

    Args:
        error: Hydra's exception.
        overrides: The parsed overrides.
        config: The config that they were applied to.
    """
    if "sharding" not in config:
        return None
    overrides = list(overrides)
    switched_on = OmegaConf.select(config, "trainer.plugin", default=None) == PLUGIN_NAME or any(
        o.key_or_group == "trainer.plugin" and o.value() == PLUGIN_NAME for o in overrides
    )
    answers = _old_keys(overrides, config) if switched_on else []
    if answers:
        return old_keys.refusal(answers)
    named = (o for o in overrides if f"'{o.key_or_group}'" in str(error) or o.input_line in str(error))
    refused = next(named, None)
    return None if refused is None else _explain_one(refused, overrides, config, switched_on)


def _explain_one(override: Any, overrides: Sequence[Any], config: DictConfig, switched_on: bool) -> ConfigError | None:
    key, value = override.key_or_group, override.value()
    path, name, known = _first_missing(config, key, value)
    if name is None:
        return _wrong_value(key, value) or _list_for_map(key, value, config) if key.startswith("sharding.") else None
    missing, close = f"{path}.{name}" if path else name, did_you_mean(name, known)
    if path == "trainer.plugin" or (close is None and _switches_on(name, value)):
        return _no_switch(key)
    if _is_ours(missing, value):
        if not known:
            return _no_block(path, key, overrides)
        error = unknown_key(path, name, known)
        _add_what_to_type(error, overrides, config)
        return error
    if not switched_on or override.is_delete():
        return None
    target = OmegaConf.select(config, f"{path}._target_")
    if name in fields_of(str(target)):
        return _unlisted(key, override.input_line)
    close = did_you_mean(name, known, at_least=0.8)
    if close:
        return _misspelt(missing, f"{path}.{close}" if path else close, override.input_line)
    if not known and isinstance(OmegaConf.select(config, path), DictConfig) and not _elsewhere(key, known_keys(config)):
        return _unlisted(key, override.input_line)
    written = {other.key_or_group for other in overrides}
    return _unknown(key, override.input_line, known_keys(config), written, is_typed=target is not None)


def _add_what_to_type(error: ConfigError, overrides: Iterable[Any], config: DictConfig) -> None:
    """Adds to the error for a key that there is not what to type in place of the overrides that have it.

    Where nothing of ours is like it, verl's own key of that name is offered: `actor_rollout_ref.rollout.n`.
    """
    missing = error.subject.removesuffix(_NO_KEY)
    meant = error.remedy.removeprefix("did you mean ").removesuffix("?")
    if meant == error.remedy:
        places = _of_verls_role(missing, config)
        if not places:
            return
        meant = places[0]
        error.remedy = f"did you mean {' or '.join(places)}?"
    lines = [o.input_line.lstrip("+") for o in overrides if f"{o.key_or_group}.".startswith(f"{missing}.")]
    if lines:  # else a block as a value has it, or a yaml file
        error.remedy += f" Then type {' '.join(as_argument(line.replace(missing, meant, 1)) for line in lines)}"


def _of_verls_role(key: str, config: DictConfig) -> list[str]:
    """Keys of verl's for a key of `sharding.roles.<role>` that is none of ours, in verl's blocks of that role."""
    role, _, rest = key.removeprefix("sharding.roles.").partition(".")
    if not key.startswith("sharding.roles.") or role not in _VERLS_BLOCKS:
        return []
    same = f"{_VERLS_BLOCKS[role]}.{rest}"
    known = {name for name in known_keys(config) if not name.startswith("sharding.")}
    return [same] if same in known else _elsewhere(same, known)


def _wrong_value(key: str, value: Any) -> ConfigError | None:
    """The error for a value that OmegaConf can't merge, such as a list for a block."""
    block: Any = value
    for name in reversed(key.split(".")[1:]):
        block = {name: block}
    try:
        ShardingConfig.parse(block)
    except ConfigError as error:
        return error
    return None


def _list_for_map(key: str, value: Any, config: DictConfig) -> ConfigError | None:
    """OmegaConf merges a map of a yaml file or an earlier override with no list; a text takes its place."""
    before = OmegaConf.select(config, key, default=None)
    if not isinstance(before, DictConfig) or not isinstance(value, list):
        return None
    text = f"[{','.join(map(str, value))}]"
    return ConfigError(
        key,
        expected=f"the list as text, since {key} is a map already, which a list can't replace",
        found=text,
        consequence="the run does not start",
        remedy=f"'{key}=\"{text}\"'",
    )


def _misspelt(wrong: str, right: str, line: str) -> ConfigError:
    """The error for a key of verl's that is nearly one. Hydra would have it added, so that nothing reads it."""
    return ConfigError(
        f"{wrong}: no such key",
        expected=right,
        found=wrong,
        consequence="the run does not start",
        remedy=as_argument(line.replace(wrong, right, 1)),
    )


def _unlisted(key: str, line: str) -> ConfigError:
    """The error for a key that verl reads and no yaml of verl's lists."""
    return ConfigError(
        key,
        expected=f"+{key}, since verl's yaml does not list it",
        found=key,
        consequence="the run does not start",
        remedy=as_argument(f"+{line}"),
    )


def _unknown(key: str, line: str, known: Collection[str], written: Collection[str], *, is_typed: bool) -> ConfigError:
    """The error for a key that verl has nowhere, or elsewhere. Hydra would have it added, so that nothing reads it.

    Args:
        key: The key.
        line: The override.
        known: Keys that there are.
        written: Keys of all overrides.
        is_typed: verl makes one of its classes of the block, which takes no key that it does not know.
    """
    places = _elsewhere(key, known)
    meant = [as_argument(line.replace(key, place, 1)) for place in places if place not in written]
    instead = f"remove {as_argument(line)}"
    if not places and not is_typed:
        instead += f", or type {as_argument(f'+{line}')} if code of yours reads it"
    return ConfigError(
        f"{key}: no such key",
        expected=" or ".join(places) or "a key of verl's config",
        found=key,
        consequence="the run does not start",
        remedy=" or ".join(meant) or instead,
    )


def _elsewhere(key: str, known: Collection[str]) -> list[str]:
    """Keys of verl's with the same end, such as `actor_rollout_ref.rollout.n` for `rollout.n`; none where many have it.

    Of several, those whose blocks are nearest: a key of one role is not offered for another's.
    """
    parts = key.split(".")
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        found = [name for name in known if name.endswith(f".{end}") and not _is_elsewhere(name)]
        depth = max((_shared(name, parts) for name in found), default=0)
        if found and not depth and parts[0] in _BLOCKS_OF_ROLES:
            return []
        found = [name for name in found if _shared(name, parts) == depth]
        if found:
            return sorted(found) if len(found) <= _MOST_PLACES else []
    return []


def _is_elsewhere(name: str) -> bool:
    """Whether a key of verl's is not read by its trainer, or by one engine of an extension alone."""
    return name.partition(".")[0] in BLOCKS or ".turbo_config." in name


def _shared(name: str, parts: Sequence[str]) -> int:
    """How many blocks a key shares with another, from the top."""
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(name.split("."), parts, strict=False))))


def _is_ours(key: str, value: Any) -> bool:
    """Whether an override was meant for this package, as far as a misspelt one tells."""
    first, leaf = key.partition(".")[0], key.rpartition(".")[2]
    meant = value == PLUGIN_NAME or _switches_on(leaf, value)
    return meant or did_you_mean(first, ["sharding"]) is not None or key.startswith("trainer.plug")


def _no_block(path: str, key: str, overrides: Iterable[Any]) -> ConfigError:
    """The error for a key below one that has no block: null, or a plain value. Its other keys go into the same block."""
    block: dict[str, Any] = {}
    for override in overrides:
        if override.key_or_group.startswith(f"{path}."):
            *blocks, name = override.key_or_group.removeprefix(f"{path}.").split(".")
            inner = functools.reduce(lambda here, below: here.setdefault(below, {}), blocks, block)
            inner[name] = override.value()
    return ConfigError(
        key,
        expected=f"a value for {path} as a whole",
        found=f"{path} is no block, so it has no {key.removeprefix(f'{path}.')}",
        consequence="the run does not start",
        remedy=as_argument(f"{path}={as_override(block)}"),
    )


def _old_keys(overrides: Iterable[Any], config: DictConfig) -> list[old_keys.Answer]:
    """What became of the keys of an older verl among the overrides; a block as a value counts key by key."""
    known = known_keys(config)
    found = []
    for override in overrides:
        is_there = _first_missing(config, override.key_or_group, override.value())[1] is None
        for key, text in _written(override):
            if not is_there:
                found.append(old_keys.answer(key, text, known) or _of_old_reward_model(key, text, known))
            elif text is not None and not override.is_delete():
                found.append(old_keys.answer_unread(key.lstrip("+"), text, known))
    return [answer for answer in found if answer is not None]


def _of_old_reward_model(key: str, text: str | None, known: Collection[str]) -> old_keys.Answer | None:
    """What became of a key that the reward model had as a worker, and that stands in the block of today's."""
    bare = key.lstrip("+")
    if not bare.startswith(_REWARD_MODEL):
        return None
    answer = old_keys.answer(f"reward_model.{bare.removeprefix(_REWARD_MODEL)}", text, known)
    return None if answer is None else replace(answer, key=key)


def _written(override: Any) -> Iterator[tuple[str, str | None]]:
    """The dotted keys that an override sets, as typed, and their values."""
    key, _, text = override.input_line.partition("=")
    stack: list[tuple[str, Any]] = [(key, override.value())]
    if not isinstance(override.value(), dict):
        yield key, text or None
        return
    while stack:
        path, value = stack.pop(0)
        if isinstance(value, dict) and value:
            stack = [(f"{path}.{name}", item) for name, item in value.items()] + stack
        else:
            yield path, as_override(value)


def known_keys(config: DictConfig) -> set[str]:
    """Every dotted key of a config, blocks included."""
    keys: set[str] = set()
    stack: list[tuple[str, Any]] = [("", config)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            for name in node:
                child = f"{path}.{name}" if path else str(name)
                keys.add(child)
                stack.append((child, node._get_node(name)))
    return keys


def _first_missing(config: DictConfig, key: str, value: Any = None) -> tuple[str, str | None, list[str]]:
    """Where a dotted key, or a block that is its value, leaves the tree.

    Returns:
        The path so far, the missing name (None: nothing is missing), the names that there are.
    """
    node: Any = config
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, DictConfig) or part not in node:
            known = [str(name) for name in node] if isinstance(node, DictConfig) else []
            return ".".join(parts[:depth]), part, known
        node = node._get_node(part)
    if isinstance(value, dict) and isinstance(node, DictConfig) and not node._is_none():
        for name, item in value.items():
            found = _first_missing(config, f"{key}.{name}", item)
            if found[1] is not None:
                return found
    return key, None, []


def check(config: DictConfig, overrides: Iterable[Any]) -> bool:
    """Checks a composed config: what is in the `sharding` block, and what stands beside it.

    Args:
        config: The config with the overrides applied.
        overrides: The parsed overrides.

    Returns:
        Whether it switches the plugin on.

    Raises:
        ConfigError: A value has the wrong type or range, or a key that was added was meant to be one of ours.
    """
    trainer = OmegaConf.select(config, "trainer") if isinstance(config, DictConfig) else None
    if not isinstance(trainer, DictConfig) or "plugin" not in trainer.keys():  # noqa: SIM118  (`in` is false for null)
        return False  # none of verl's
    _check_names(config, trainer)
    try:
        _check_types(config)
    except ConfigError as error:
        if error.subject.endswith(_NO_KEY):
            _add_what_to_type(error, overrides, config)
        raise
    switch = trainer._get_node("plugin")
    return isinstance(switch, Node) and bool(switch._value() == PLUGIN_NAME)


def _check_types(config: DictConfig) -> None:
    if config.get("sharding") is None:
        return
    try:
        block = OmegaConf.create({"sharding": OmegaConf.to_container(config.sharding, resolve=True)})
    except OmegaConfBaseException:
        return  # an interpolation that only the run can resolve; the driver checks again
    request_of(block)


def _check_names(config: DictConfig, trainer: DictConfig) -> None:
    """Refuses keys that a yaml file or a `+` added, which Hydra takes by any name, and that were meant to be ours."""
    sections = {field.name for field in fields(ShardingConfig)}
    others = [str(name) for name in config if name != PLUGIN_NAME]
    for name in others:
        node = config._get_node(name)
        block = isinstance(node, DictConfig) and not node._is_none() and not node._is_interpolation()
        if block and did_you_mean(name, [PLUGIN_NAME], at_least=0.8) and sections & set(map(str, node)):
            raise unknown_key("", name, [*(other for other in others if other != name), PLUGIN_NAME])
        if _switches_on(name, node):
            raise _no_switch(name)
    for name in map(str, trainer):
        if name != "plugin" and _switches_on(name, trainer._get_node(name)):
            raise _no_switch(f"trainer.{name}")


def _switches_on(name: str, value: Any) -> bool:
    """Whether a key other than `trainer.plugin` was meant to be that one, by its name and its value."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=False)
    elif isinstance(value, Node):
        value = value._value()
    asks = PLUGIN_NAME in value if isinstance(value, list) else value == PLUGIN_NAME
    return (asks and did_you_mean(name, ["plugin"]) is not None) or (name == PLUGIN_NAME and (asks or value is True))


def _no_switch(key: str) -> ConfigError:
    switch = f"trainer.plugin={PLUGIN_NAME}"
    return ConfigError(
        f"{key}: no such key",
        expected=f"{switch} to switch the plugin on",
        found=key,
        consequence="the run does not start, since it would be verl's own",
        remedy=switch,
    )


def check_choice(repo: Any, overrides: Iterable[Any]) -> None:
    """Refuses a choice of the group `sharding` that there is not, before Hydra does without saying what to type.

    Args:
        repo: Hydra's repository of configs.
        overrides: The parsed overrides.

    Raises:
        ConfigError: Names the override and what may be chosen.
    """
    for override in overrides:
        value = override.value()
        if override.key_or_group != PLUGIN_NAME or override.is_sweep_override() or override.is_delete():
            continue
        if isinstance(value, dict) or not repo.group_exists(PLUGIN_NAME):
            continue
        choices = repo.get_group_options(PLUGIN_NAME)
        if value in choices and not (override.is_add() or override.is_force_add()):
            continue
        close = did_you_mean(str(value[0] if isinstance(value, list) and value else value), choices)
        raise ConfigError(
            PLUGIN_NAME,
            expected=f"sharding={' or sharding='.join(choices)}, without a +",
            found=override.input_line,
            consequence="the run does not start",
            remedy=f"sharding={close}" if close else f"remove {override.input_line}",
        )
