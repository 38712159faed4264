"""Reads `sharding.roles.<role>.gradient_checkpointing` into a policy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from verl_ext_sharding.errors import ConfigError, did_you_mean
from verl_ext_sharding.training.checkpointing import KEY, Auto, Budget, EveryN, Full, Off, Policy, Selective

_KEYS = {
    "auto": frozenset[str](),
    "off": frozenset[str](),
    "full": frozenset[str](),
    "every_n": frozenset({"every"}),
    "selective": frozenset({"keep"}),
    "budget": frozenset({"budget", "compile"}),
}
"""The keys that each policy takes beside `policy` and `use_reentrant`."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_policy(value: object) -> Policy | None:
    """The policy that a config value means.

    Args:
        value: None (leave verl's setting alone); True (`auto`) or False; a policy's name; or a mapping with `policy`
            and that policy's own keys: `every` (every_n), `keep` (selective), `budget` and `compile` (budget).
            `budget` is a share from 0 to 1 (0.2 or "0.2") or bytes with their unit ("4GiB"). A mapping that names no
            policy is read by its key: `{every: 2}` is every_n, `{budget: 0.2}` is budget. `use_reentrant` may be false.

    Raises:
        ConfigError: An unknown policy or key, a value out of range, or `use_reentrant: true`.
    """
    if value is None:
        return None
    if isinstance(value, bool):
        return Auto() if value else Off()
    if isinstance(value, str):
        value = {"policy": value}
    if not isinstance(value, Mapping):
        raise _error("", "true, false, a policy's name or a mapping", value, "{policy: full}")
    given = {str(key): item for key, item in value.items() if item is not None}
    _check_reentrant(given.pop("use_reentrant", False))
    name = given.pop("policy", None) or _implied(given)
    if name not in _KEYS:
        close = did_you_mean(str(name), _KEYS)
        raise _error(".policy", f"one of {', '.join(_KEYS)}", name, f"{{policy: {close or 'full'}}}")
    for key in given:
        if key not in _KEYS[name]:
            known = sorted({*_KEYS[name], "policy", "use_reentrant"})
            close = did_you_mean(key, known)
            fix = f"{{policy: {name}, {close}: {given[key]}}}" if close else f"{{policy: {name}}}"
            raise _error(f".{key}", f"keys of policy {name}: {', '.join(known)}", key, fix)
    return _BUILD[name](given)


def parse_budget(value: object) -> dict[str, Any]:
    """The arguments of `Budget` that a value means: `{"share": ...}` or `{"kept_bytes": ...}`.

    Args:
        value: A number from 0 to 1, as number or string, or a string of bytes with a unit: "4GiB", "500 MB".

    Raises:
        ConfigError: Neither.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(?:([kmgt]i?)?(b))?\s*", str(value), re.IGNORECASE)
    if isinstance(value, bool) or match is None:
        raise _error(".budget", "a share from 0 to 1, or bytes with a unit", value, "{policy: budget, budget: 0.2}")
    number, prefix, unit = float(match[1]), match[2], match[3]
    if unit:
        return {"kept_bytes": int(number * _UNITS[(prefix or "").lower()])}
    if number > 1:
        fix = f"{{policy: budget, budget: {number / 100:g}}} or {{policy: budget, budget: {number:g}GiB}}"
        raise _error(".budget", "a share from 0 to 1, or bytes with a unit", value, fix)
    return {"share": number}


def _implied(given: Mapping[str, object]) -> str:
    names = [name for name, keys in _KEYS.items() if keys & given.keys()]
    return names[0] if len(names) == 1 else "auto"


def _budget(given: Mapping[str, Any]) -> Policy:
    if "budget" not in given:
        raise _error(".budget", "a share from 0 to 1, or bytes with a unit", "nothing", "{policy: budget, budget: 0.2}")
    return Budget(**parse_budget(given["budget"]), compile=given.get("compile"))


def _selective(given: Mapping[str, Any]) -> Policy:
    keep = given.get("keep", ("attention", "matmul"))
    return Selective(keep=(keep,) if isinstance(keep, str) else tuple(keep))


_BUILD: dict[str, Callable[[Mapping[str, Any]], Policy]] = {
    "auto": lambda given: Auto(),
    "off": lambda given: Off(),
    "full": lambda given: Full(),
    "every_n": lambda given: EveryN(**given),
    "selective": _selective,
    "budget": _budget,
}


def _check_reentrant(value: object) -> None:
    if value is False:
        return
    raise ConfigError(
        f"{KEY}.use_reentrant",
        expected="false",
        found=repr(value),
        consequence="reentrant checkpointing recomputes nothing for layers whose input needs no gradient (LoRA), keeps no"
        " keyword inputs, hides its saved tensors from activation offload and can't be compiled, so it is refused",
        remedy=f"{KEY}.use_reentrant=false",
    )


def _error(key: str, expected: str, found: object, remedy: str) -> ConfigError:
    return ConfigError(
        f"{KEY}{key}",
        expected=expected,
        found=repr(found),
        consequence="the policy is unclear, so nothing is started",
        remedy=f'"{KEY}={remedy}"',
    )
