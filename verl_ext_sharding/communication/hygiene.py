"""Decides the environment variables of collective communication, from what a node has and what the user set.

- `TORCH_NCCL_ASYNC_ERROR_HANDLING=1`: a rank that fails or hangs in a collective ends its process, instead of the whole
  job waiting. torch renamed it from `NCCL_ASYNC_ERROR_HANDLING`, which is translated.
- `NCCL_IB_DISABLE=1` only where no InfiniBand device exists. RoCE devices stand in the same folder and count as one.
- `NCCL_P2P_DISABLE=1` only where no pair of GPUs has peer access.

What the user exported wins over hardware and defaults; a `sharding.communication` key that says the opposite of it is
refused. Hardware differs from node to node while a Ray job has one environment, so with several nodes `decide_here` runs
once on each that has GPUs of the job (as a Ray task, given `exported()` of the driver), `merge` takes the strictest value,
and the driver sets `as_env` of the result in the `runtime_env` of `ray.init`: from there it reaches
the task runner, every worker and the rollout servers, on all nodes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from verl_ext_sharding.communication import topology
from verl_ext_sharding.communication.topology import P2PMatrix
from verl_ext_sharding.config.schema import CommunicationConfig
from verl_ext_sharding.errors import ConfigError

ASYNC_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
ASYNC_ERROR_HANDLING_OLD = "NCCL_ASYNC_ERROR_HANDLING"
IB_DISABLE = "NCCL_IB_DISABLE"
P2P_DISABLE = "NCCL_P2P_DISABLE"
NAMES = (ASYNC_ERROR_HANDLING, IB_DISABLE, P2P_DISABLE)
"""The variables that are decided, in the order of the table."""

_NUMBER = re.compile(r"-?\d+|0x[0-9a-f]+", re.IGNORECASE)

SYS_CLASS_INFINIBAND = Path("/sys/class/infiniband")
"""Where Linux lists RDMA devices: InfiniBand, RoCE, and the adapters of some clouds."""

Source = Literal["user", "config", "auto"]


@dataclass(kw_only=True, frozen=True)
class Setting:
    """One decided variable.

    Args:
        name: Name of the environment variable.
        value: Its value, or None: left alone.
        source: Who decided: the user's environment, a `sharding.communication` key, or what the node has.
        reason: Why, in a few words.
    """

    name: str
    value: str | None
    source: Source
    reason: str


def decide(
    config: CommunicationConfig,
    environ: Mapping[str, str],
    *,
    sys_class_infiniband: Path = SYS_CLASS_INFINIBAND,
    p2p_matrix: P2PMatrix | None = None,
) -> list[Setting]:
    """Decides each variable of `NAMES` for one node.

    Args:
        config: The `sharding.communication` block.
        environ: The environment that the user started from.
        sys_class_infiniband: Folder with one entry for each RDMA device.
        p2p_matrix: Peer access between the node's GPUs; None: unknown.

    Returns:
        One setting for each name, also for those left alone.

    Raises:
        ConfigError: The user asks for InfiniBand or peer access, and this node has none; or for the opposite of what is
            exported.
    """
    check_exports(config, environ)
    exports = exported(environ)
    return [
        _exported_setting(exports, ASYNC_ERROR_HANDLING) or _async_error_handling(config.async_error_handling),
        _exported_setting(exports, IB_DISABLE) or _infiniband(config.infiniband, sys_class_infiniband),
        _exported_setting(exports, P2P_DISABLE) or _peer_access(config.p2p, p2p_matrix),
    ]


def decide_here(config: CommunicationConfig, driver_exports: Mapping[str, str] | None = None) -> list[Setting]:
    """`decide` for the node on which it runs.

    Args:
        config: The `sharding.communication` block.
        driver_exports: `exported()` of the driver's environment, which wins over this node's own.
    """
    environ = {**exported(os.environ), **(driver_exports or {})}
    return decide(config, environ, p2p_matrix=topology.detect())


def check_exports(config: CommunicationConfig, environ: Mapping[str, str]) -> None:
    """Refuses an exported variable that is no number, and a key that says the opposite of one: which counts would be a guess.

    Args:
        config: The `sharding.communication` block.
        environ: The environment that the user started from.

    Raises:
        ConfigError: Names the variable, and the key.
    """
    exports = exported(environ)
    for name, value in exports.items():
        if not _NUMBER.fullmatch(value.strip()):
            raise _no_number(name, value)
    for key, variable, wanted in (
        ("infiniband", IB_DISABLE, config.infiniband),
        ("p2p", P2P_DISABLE, config.p2p),
        # true is the default, and so may not be the user's word
        ("async_error_handling", ASYNC_ERROR_HANDLING, "auto" if config.async_error_handling else False),
    ):
        setting = _exported_setting(exports, variable)
        if wanted != "auto" and setting is not None and _means(setting) != wanted:
            raise _contradiction(f"sharding.communication.{key}", wanted, setting)


def exported(environ: Mapping[str, str]) -> dict[str, str]:
    """What the user set of the variables that matter here, the old name included. An empty value is not set."""
    names = (*NAMES, ASYNC_ERROR_HANDLING_OLD)
    return {name: environ[name] for name in names if environ.get(name, "").strip()}


def as_env(settings: Iterable[Setting]) -> dict[str, str]:
    """The variables for Ray's `runtime_env`. The user's own are among them: Ray workers on other nodes lack them."""
    return {setting.name: setting.value for setting in settings if setting.value is not None}


def merge(per_node: Mapping[str, Sequence[Setting]]) -> list[Setting]:
    """One environment for all nodes: what the user exported, else the strictest value.

    Strictest is what every node can do: a job in which one node lacks InfiniBand must not use it anywhere, or the
    nodes disagree on their transport and never connect.

    Args:
        per_node: `decide_here` of each node, by the node's name. At least one.

    Raises:
        ConfigError: Nodes export different values of one variable.
    """
    assert per_node, "no node to merge"
    return [_merge_one(name, per_node) for name in NAMES]


def _merge_one(name: str, per_node: Mapping[str, Sequence[Setting]]) -> Setting:
    found = {node: setting for node, settings in per_node.items() for setting in settings if setting.name == name}
    by_user = {node: setting for node, setting in found.items() if setting.source == "user"}
    if len({setting.value for setting in by_user.values()}) > 1:
        raise _nodes_disagree(name, by_user)
    candidates = by_user or found
    strictest = max(candidates.values(), key=lambda setting: _strictness(setting.value))
    nodes = [node for node, setting in candidates.items() if setting.value == strictest.value]
    if len(nodes) == len(found):
        return strictest
    return replace(strictest, reason=f"{strictest.reason}, on {', '.join(nodes)} of {len(found)} nodes")


def _strictness(value: str | None) -> int:
    """Left alone, then switched on, then switched off."""
    return 0 if value is None else 1 if value == "0" else 2


def _exported_setting(exports: Mapping[str, str], name: str) -> Setting | None:
    if name in exports:
        return Setting(name=name, value=exports[name], source="user", reason="exported")
    if name == ASYNC_ERROR_HANDLING and ASYNC_ERROR_HANDLING_OLD in exports:
        reason = f"exported as {ASYNC_ERROR_HANDLING_OLD}, its name before torch 2.2"
        return Setting(name=name, value=exports[ASYNC_ERROR_HANDLING_OLD], source="user", reason=reason)
    return None


def _means(setting: Setting) -> bool:
    """Whether an exported value leaves what it is about on: `NCCL_*_DISABLE=0`, error handling other than 0."""
    zero = str(setting.value).strip() == "0"
    return not zero if setting.name == ASYNC_ERROR_HANDLING else zero


def _async_error_handling(on: bool) -> Setting:
    reason = "a failed collective ends its process" if on else "sharding.communication.async_error_handling=false"
    return Setting(name=ASYNC_ERROR_HANDLING, value="1" if on else "0", source="config", reason=reason)


def _infiniband(wanted: bool | Literal["auto"], folder: Path) -> Setting:
    key = "sharding.communication.infiniband"
    devices = _rdma_devices(folder)
    if wanted is True and devices == []:
        raise _not_there(key, "an InfiniBand or RoCE device", f"none in {folder}", IB_DISABLE)
    if wanted != "auto":
        return Setting(name=IB_DISABLE, value=_disable(wanted), source="config", reason=f"{key}={str(wanted).lower()}")
    if devices is None:
        return Setting(name=IB_DISABLE, value=None, source="auto", reason=f"{folder} can't be read")
    if not devices:
        return Setting(name=IB_DISABLE, value="1", source="auto", reason=f"no device in {folder}")
    return Setting(name=IB_DISABLE, value=None, source="auto", reason=f"found {', '.join(devices)}")


def _rdma_devices(folder: Path) -> list[str] | None:
    """Names of the RDMA devices; None: this system doesn't say."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except FileNotFoundError:
        return [] if folder.parent.is_dir() else None  # without the parent there is no sysfs at all
    except OSError:
        return None


def _peer_access(wanted: bool | Literal["auto"], matrix: P2PMatrix | None) -> Setting:
    key = "sharding.communication.p2p"
    possible = matrix.possible if matrix is not None else None
    if wanted is True and matrix is not None and possible is False:
        raise _not_there(key, "GPUs with peer access", f"no pair has it: {matrix.obstacles}", P2P_DISABLE)
    if wanted != "auto":
        return Setting(name=P2P_DISABLE, value=_disable(wanted), source="config", reason=f"{key}={str(wanted).lower()}")
    if matrix is None:
        return Setting(name=P2P_DISABLE, value=None, source="auto", reason="peer access is unknown")
    if possible is False:
        reason = f"no pair of the {matrix.num_gpus} GPUs has peer access: {matrix.obstacles}"
        return Setting(name=P2P_DISABLE, value="1", source="auto", reason=reason)
    if matrix.num_gpus < 2:
        return Setting(name=P2P_DISABLE, value=None, source="auto", reason=f"{matrix.num_gpus} GPU, no pair")
    reason = "GPUs with peer access" if possible else "peer access is unknown for some pairs"
    return Setting(name=P2P_DISABLE, value=None, source="auto", reason=reason)


def _disable(wanted: bool) -> str:
    return "0" if wanted else "1"


def _not_there(key: str, expected: str, found: str, variable: str) -> ConfigError:
    return ConfigError(
        f"{key}=true",
        expected=expected,
        found=found,
        consequence="the run does not start, since NCCL would silently use something slower",
        remedy=f"{key}=auto, or export {variable}=0 to insist",
    )


def _no_number(name: str, value: str) -> ConfigError:
    """NCCL takes its default for what is no number (param.cc), and torch ends the process (`getCvarInt`)."""
    on = value.strip().lower() in ("true", "yes", "on", "y")
    return ConfigError(
        f"{name}={value}",
        expected="a number, 0 or 1",
        found=f"'{value}', exported",
        consequence="the run does not start, since it would not be taken for what it says",
        remedy=f"export {name}={int(on)}, where the job starts and where Ray was started",
    )


def _contradiction(key: str, wanted: bool, setting: Setting) -> ConfigError:
    default = "true" if setting.name == ASYNC_ERROR_HANDLING else "auto"
    return ConfigError(
        f"{key}={str(wanted).lower()}",
        expected=f"{setting.name} not exported, or with the same meaning",
        found=f"{setting.name}={setting.value} {setting.reason}",
        consequence="the run does not start, since both can't hold",
        remedy=f"{key}={default}, or unset {setting.name} where the job starts and where Ray was started",
    )


def _nodes_disagree(name: str, by_user: Mapping[str, Setting]) -> ConfigError:
    return ConfigError(
        f"{name} differs between nodes",
        expected="one value, since a Ray job has one environment",
        found=", ".join(f"{setting.value} on {node}" for node, setting in by_user.items()),
        consequence="the run does not start",
        remedy=f"export the same {name} on every node, or on the driver only",
    )
