"""What `sharding.roles.<role>.gradient_checkpointing` may say: read in one way, by the driver before anything starts and by workers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_ext_sharding.errors import ConfigError, did_you_mean

POLICY_KEYS: Mapping[str, tuple[str, ...]] = {
    "auto": (),
    "full": (),
    "every_n": ("every",),
    "selective": ("keep",),
    "budget": ("budget", "compile"),
}
"""The policies, and the keys that each takes beside `policy` and `use_reentrant`."""

KEEPABLE = ("attention", "matmul", "narrow_matmul")
"""What `selective` can keep: attention outputs; outputs of matrix products (not of adapters' wide ones, nearly free to run again);
of those no wider than their input."""

_AMOUNT = re.compile(r"\s*(?P<number>\d*\.?\d+)\s*((?P<prefix>([kmgt]i?)?)(?P<unit>b))?\s*", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_BUDGET = 'a share (0 to 1) or bytes above 0 such as "4GiB"'


@dataclass(kw_only=True, frozen=True)
class PolicyChoice:
    """A policy that can be applied as it is: every value was checked.

    Args:
        name: One of `POLICY_KEYS`, or "off" (all activations are kept).
        every: Of `every_n`: one layer in so many is recomputed, 1 or more.
        keep: Of `selective`: one or more of `KEEPABLE`.
        share: Of `budget`: a share (0..1) of the activation memory; or
        kept_bytes: above 0; one of the two is given.
        compile: Of `budget`: whether layers are compiled; None: where it pays.
    """

    name: str
    every: int = 2
    keep: tuple[str, ...] = ("attention", "matmul")
    share: float | None = None
    kept_bytes: int | None = None
    compile: bool | None = None


def read_policy(value: object, *, key: str) -> PolicyChoice | None:
    """The policy that a config value means.

    Args:
        value: None (leave verl's setting alone); True (`auto`) or False (off); a policy's name; or a mapping with `policy`
            and that policy's own keys: `every` (every_n), `keep` (selective), `budget` and `compile` (budget). `budget` is
            a share from 0 to 1 (0.2 or "0.2") or bytes with their unit ("4GiB"). A mapping that names no policy is read by
            its keys: `{every: 2}` is every_n, `{budget: 0.2}` is budget, `{}` is auto. `use_reentrant` may be false.
        key: What the value stands at, for messages; "": they name keys inside of it alone.

    Raises:
        ConfigError: An unknown policy or key, keys of two policies, a value out of range, or `use_reentrant: true`.
    """
    if value is None:
        return None
    if isinstance(value, bool):
        return PolicyChoice(name="auto" if value else "off")
    if isinstance(value, str):
        value = {"policy": value}
    if not isinstance(value, Mapping):
        raise _refused(key, "", "true, false, a policy's name or a mapping", value, "true")
    given = {str(name): item for name, item in value.items() if item is not None}
    if given.pop("use_reentrant", False) is not False:
        raise _reentrant(key)
    name = given.pop("policy", None)
    name = _implied(key, given) if name is None else name
    if name not in POLICY_KEYS:
        close = did_you_mean(str(name), POLICY_KEYS) or "full"
        raise _refused(key, "policy", f"one of {', '.join(POLICY_KEYS)}", name, close)
    _check_keys(key, str(name), given)
    if name == "every_n":
        return PolicyChoice(name=name, every=_every(key, given.get("every", 2)))
    if name == "selective":
        return PolicyChoice(name=name, keep=_keep(key, given.get("keep", ("attention", "matmul"))))
    if name == "budget":
        return PolicyChoice(name=name, compile=_compile(key, given.get("compile")), **_budget(key, given.get("budget")))
    return PolicyChoice(name=str(name))


def _implied(key: str, given: Mapping[str, Any]) -> str:
    """The policy that a mapping without a name means, by its keys."""
    implied = {name: one for one, keys in POLICY_KEYS.items() for name in keys if name in given}
    if len(set(implied.values())) > 1:
        first, second = list(dict.fromkeys(implied.values()))[:2]
        name = next(name for name, one in implied.items() if one == second)
        raise _refused(key, name, f"keys of one policy, {first} or {second}", " and ".join(implied), "null")
    return next(iter(implied.values()), "auto")


def _check_keys(key: str, policy: str, given: Mapping[str, Any]) -> None:
    taken = POLICY_KEYS[policy]
    for name in given:
        if name in taken:
            continue
        known = [own for keys in POLICY_KEYS.values() for own in keys]
        if name in known:
            expected = f"with policy {policy} {' or '.join(taken) or 'no other key'}"
            raise _refused(key, name, expected, f"{name} as well", "null")
        close = did_you_mean(name, known)
        raise ConfigError(
            _joined(key, name),
            expected=f"one of {', '.join(('policy', *known, 'use_reentrant'))}",
            found=name,
            consequence="the run does not start",
            remedy=f"{_joined(key, close)}={given[name]}" if close else f"remove {_joined(key, name)}",
        )


def _every(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _refused(key, "every", "1 or more", value, "2")
    return value


def _keep(key: str, value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else ()
    if not names or not all(name in KEEPABLE for name in names):
        raise _refused(key, "keep", f"one or more of {', '.join(KEEPABLE)}", value, "[attention,matmul]")
    return names


def _compile(key: str, value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise _refused(key, "compile", "true or false", value, "false")
    return value


def _budget(key: str, value: Any) -> dict[str, Any]:
    text = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if text is not None and text["unit"]:
        num_bytes = int(float(text["number"]) * _UNITS[text["prefix"].lower()])
        if num_bytes > 0:
            return {"kept_bytes": num_bytes}
    elif text is not None or is_number:
        share = float(value)
        if 0 <= share <= 1:
            return {"share": share}
    raise _refused(key, "budget", _BUDGET, "nothing" if value is None else value, "0.5")


def _joined(key: str, name: str) -> str:
    return f"{key}.{name}" if key and name else key or name


def _refused(key: str, name: str, expected: str, found: object, value: str) -> ConfigError:
    subject = _joined(key, name)
    return ConfigError(
        subject,
        expected=expected,
        found=str(found),
        consequence="the run does not start",
        remedy=f"{subject}={value}",
    )


def _reentrant(key: str) -> ConfigError:
    return ConfigError(
        _joined(key, "use_reentrant"),
        expected="false: reentrant checkpointing recomputes nothing for layers whose input needs no gradient (LoRA), keeps"
        " no keyword inputs, hides its saved tensors from activation offload and can't be compiled",
        found="true",
        consequence="the run does not start",
        remedy=f"{_joined(key, 'use_reentrant')}=false",
    )
