"""Device lists as users write them, turned into device numbers. Standard library only.

A device number counts over the whole job: node 0 (in verl's order, by address) has numbers 0 to n-1, node 1 the next, and
so on, with `trainer.n_gpus_per_node` devices on each. A per-node map uses the node's own numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext_sharding.errors import PlacementError, did_you_mean

WORDS = ("all", "first_half", "second_half")

_ALIASES = {"first": "first_half", "second": "second_half", "last": "second_half", "last_half": "second_half"}
"""Other words for them."""

_OPTIONAL = "?"

_RANGE = re.compile(r"(?:(?:cuda|gpu|npu)\s*:\s*)?(\d+)\s*-\s*(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"(?:(?:cuda|gpu|npu)\s*:\s*)?(\d+)", re.IGNORECASE)
_LIST = re.compile(r"\[(.*)\]")
_NODE = re.compile(r"node(\d+)")
_ON_NODE = re.compile(r"(node\d+)\s*:\s*(\d+(?:\s*-\s*\d+)?)")


@dataclass(kw_only=True, frozen=True)
class Topology:
    """The devices of the job.

    Args:
        num_nodes: `trainer.nnodes`, 1 or more.
        devices_per_node: `trainer.n_gpus_per_node`, 1 or more, the same on each node as verl wants it.
        node_names: Addresses of its nodes in verl's order, where a per-node map uses them. Ray's, once it runs; before, those
            that the maps name, in the same order.
    """

    num_nodes: int
    devices_per_node: int
    node_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key, number in (("trainer.nnodes", self.num_nodes), ("trainer.n_gpus_per_node", self.devices_per_node)):
            if number < 1:
                raise _error(key, "1 or more", str(number), f"{key}=1")

    @property
    def num_devices(self) -> int:
        """Devices of the whole job."""
        return self.num_nodes * self.devices_per_node

    def node_of(self, device: int) -> int:
        """Index of the node that holds a device number."""
        return device // self.devices_per_node

    def local(self, device: int) -> int:
        """The device's number on its own node."""
        return device % self.devices_per_node


def parse_devices(spec: Any, topology: Topology, *, key: str) -> tuple[int, ...]:
    """Turns a device list into device numbers, in the order in which they are written.

    Args:
        spec: `[2, 3]`, `2`, `"2-3"`, `"0,2-3"`, `"cuda:2"`, `"cuda:2-3"`, one of `WORDS`, or
            `{node0: [0, 1], node1: "0-1"}`. A list may be text too: `"[2, 3]"`, as a quoted override is.
        topology: The devices that there are.
        key: The user's key, for messages (`sharding.roles.critic.devices`).

    Returns:
        Device numbers without duplicates, at least one.

    Raises:
        PlacementError: A device is unknown or named twice, the list is empty or unreadable.
    """
    numbers = _from_map(spec, topology, key) if isinstance(spec, Mapping) else _flatten(spec, topology.num_devices, key)
    if not numbers:
        raise _error(key, "at least one device", "an empty list", f"{key}=[0], or {key}=null for verl's own choice")
    _check_known(numbers, topology, key, spec)
    repeated = sorted({n for n in numbers if numbers.count(n) > 1})
    if repeated:
        unique = format_devices(sorted(set(numbers)))
        raise _error(key, "each device once", f"device {_join(repeated)} more than once in {spec}", f"{key}={unique}")
    return tuple(numbers)


def addresses(specs: Iterable[Any]) -> tuple[str, ...]:
    """The addresses by which per-node maps name nodes, in verl's order of nodes: that of the addresses as text.

    Args:
        specs: Device lists as written.
    """
    names = {str(name) for spec in specs if isinstance(spec, Mapping) for name in spec}
    return tuple(sorted(name for name in names if _is_address(name)))


def _is_address(name: str) -> bool:
    import ipaddress  # every worker reads this module when verl is imported, and none of them needs it

    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def split_optional(spec: Any) -> tuple[Any, bool]:
    """Takes the mark of an optional list away: `second_half?` counts only in a job that has the role.

    Group files that set all roles at once use it; a list without the mark, for a role that the job has not, is an error.

    Args:
        spec: A device list as written.

    Returns:
        The list without its mark, and whether it had one.
    """
    if isinstance(spec, str) and spec.rstrip().endswith(_OPTIONAL):
        return spec.rstrip().removesuffix(_OPTIONAL), True
    return spec, False


def format_devices(devices: Sequence[int]) -> str:
    """The shortest spelling that Hydra reads back: `[0,1]`, or `"0-7"` for a run of more than four."""
    if len(devices) > 4 and list(devices) == list(range(devices[0], devices[-1] + 1)):
        return f'"{devices[0]}-{devices[-1]}"'
    return "[" + ",".join(map(str, devices)) + "]"


def count_devices(count: int) -> str:
    """A number of devices in words."""
    return f"{count} device{'' if count == 1 else 's'}"


def _flatten(spec: Any, num_devices: int, key: str) -> list[int]:
    if isinstance(spec, bool):
        raise _unreadable(spec, key)
    if isinstance(spec, int):
        return [spec]
    if isinstance(spec, str):
        if spec.strip().startswith("{"):
            raise _error(key, "a map without quotes around it", f"the text {spec}", f"'{key}={spec.strip()}'")
        inner = _LIST.fullmatch(spec.strip())
        if inner and not inner[1].strip():
            return []
        parts = [part.strip() for part in (inner[1] if inner else spec).split(",")]
        if "" in parts:
            raise _unreadable(spec, key)
        return [number for part in parts for number in _from_text(part, num_devices, key)]
    if isinstance(spec, Sequence):
        return [number for item in spec for number in _flatten(item, num_devices, key)]
    raise _unreadable(spec, key)


def _from_text(text: str, num_devices: int, key: str) -> list[int]:
    if text in WORDS:
        half = num_devices // 2
        if text != "all" and num_devices < 2:
            raise _error(key, "two devices or more to halve", f"{text} of {num_devices} device", f"{key}=all")
        return list({"all": range(num_devices), "first_half": range(half)}.get(text, range(half, num_devices)))
    if match := _RANGE.fullmatch(text):
        first, last = int(match[1]), int(match[2])
        if last < first:
            raise _error(key, "a range that ascends", text, f'{key}="{last}-{first}"')
        return list(range(first, min(last, max(first, num_devices)) + 1))  # one unknown device is enough to refuse it
    if match := _NUMBER.fullmatch(text):
        return [int(match[1])]
    raise _unreadable(text, key)


def _from_map(spec: Mapping[Any, Any], topology: Topology, key: str) -> list[int]:
    numbers = []
    for name, local_spec in spec.items():
        node = _node_index(str(name), spec, topology, key)
        local = _numbers_on(name, spec, topology.devices_per_node, key)
        if unknown := sorted(number for number in local if not 0 <= number < topology.devices_per_node):
            known: list[Any] = sorted(set(local) - set(unknown)) or ["all"]
            ways = [f"'{key}={_format_map({**spec, name: known})}'"]
            if unknown[-1] > 0:
                last = _last_number(unknown, local_spec)
                ways.append(f"trainer.n_gpus_per_node={last + 1} where the nodes have as many")
            raise _error(
                f"{key}.{name}",
                f"the node's own device numbers, 0 to {topology.devices_per_node - 1}",
                _join(unknown),
                ", or ".join(ways),
            )
        numbers += [node * topology.devices_per_node + number for number in local]
    return numbers


def _numbers_on(name: Any, spec: Mapping[Any, Any], num_devices: int, key: str) -> list[int]:
    """The numbers that a per-node map has for one node; what to type instead of them is a whole map."""
    try:
        return _flatten(spec[name], num_devices, f"{key}.{name}")
    except PlacementError as error:
        meant = error.remedy.partition("=")[2].strip("\"'")
        error.remedy = f"{key}=null" if meant == "null" else f"'{key}={_format_map({**spec, name: meant})}'"
        raise


def _node_index(name: str, spec: Mapping[Any, Any], topology: Topology, key: str) -> int:
    known = [f"node{i}" for i in range(topology.num_nodes)]
    named = topology.node_names or ("a node's address",)
    match = _NODE.fullmatch(name)
    if match and int(match[1]) < topology.num_nodes:
        return int(match[1])
    if topology.node_names.count(name) == 1:
        return topology.node_names.index(name)
    raise _error(
        key,
        f"one of {', '.join([*known, *named])}, in the order of their addresses",
        name,
        ", or ".join(_right_nodes(name, spec, known, key)),
    )


def _right_nodes(name: str, spec: Mapping[Any, Any], known: Sequence[str], key: str) -> list[str]:
    """What to write for a node that the job has not: one of its nodes in the map, or a job that has the node."""
    written = re.fullmatch(r"\D*(\d+)", name)
    free = [node for node in known if node not in map(str, spec)]
    close = f"node{int(written[1])}" if written else ""
    ways = []
    if free:
        node = close if close in free else free[0]
        renamed = {node if str(other) == name else str(other): devices for other, devices in spec.items()}
        ways.append(f"'{key}={_format_map(renamed)}'")
    if written and name == close:
        ways.append(f"trainer.nnodes={int(written[1]) + 1} where there are as many nodes")
    return ways or [f"trainer.nnodes={len(spec)} where there are as many nodes"]


def _format_map(spec: Mapping[Any, Any]) -> str:
    """A per-node map as Hydra reads it."""

    def text(devices: Any) -> str:
        if isinstance(devices, str):
            return devices if devices in WORDS or _LIST.fullmatch(devices) else f'"{devices}"'
        return f"[{','.join(map(text, devices))}]" if isinstance(devices, Sequence) else str(devices)

    return "{" + ",".join(f"{name}:{text(devices)}" for name, devices in spec.items()) + "}"


def _check_known(numbers: Sequence[int], topology: Topology, key: str, spec: Any) -> None:
    unknown = sorted({n for n in numbers if not 0 <= n < topology.num_devices})
    if not unknown:
        return
    known = sorted(set(numbers) - set(unknown))
    ways = [f"{key}={format_devices(known) if known else 'all'}"]
    if unknown[0] >= 0:
        last = _last_number(unknown, spec)
        ways.append(f"trainer.n_gpus_per_node={last // topology.num_nodes + 1} where the nodes have as many")
    raise _error(
        key,
        f"devices 0 to {topology.num_devices - 1} (trainer.nnodes={topology.num_nodes} x "
        f"trainer.n_gpus_per_node={topology.devices_per_node})",
        f"device {_join(unknown)} in {spec}",
        ", or ".join(ways),
    )


def _last_number(unknown: Sequence[int], spec: Any) -> int:
    """The largest number of a list; of a long range only the first unknown device is among those read."""
    return max(unknown[-1], *map(int, re.findall(r"\d+", str(spec))))


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _unreadable(spec: Any, key: str) -> PlacementError:
    return _error(
        key,
        f'a list [2,3], a range "2-3", "cuda:2", {", ".join(WORDS)} or a map {{node0: [0]}}',
        str(spec) or "an empty text",
        f"{key}={_likely(spec)}",
    )


def _likely(spec: Any) -> str:
    """What seems to be meant by what can't be read."""
    text = str(spec).strip("\"' ").lower()
    if on_node := _ON_NODE.fullmatch(text):
        return f'{{{on_node[1]}:"{on_node[2]}"}}'
    words = re.sub(r"[\s-]+", "_", text)
    if word := _ALIASES.get(words) or did_you_mean(words, WORDS):
        return word
    numbers = sorted({int(float(number)) for number in re.findall(r"\d+(?:\.\d+)?", text)})
    return format_devices(numbers) if numbers else "null"


def _error(key: str, expected: str, found: str, remedy: str) -> PlacementError:
    return PlacementError(key, expected=expected, found=found, consequence="the run does not start", remedy=remedy)
