"""Device maps: which device holds which layer of a model that one process spreads by layers. Standard library only.

A map is checked against the model before any weight is loaded. How keys and places are written: `layer_keys`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.devices import format_devices
from verl_ext_sharding.placement.layer_keys import (
    HOST,
    MODES,
    Mode,
    ModelLayout,
    Place,
    TensorInfo,
    ancestors,
    claims,
    key_of,
    override,
    parse,
    parse_places,
    refuse,
)

__all__ = [
    "HOST",
    "LayerMap",
    "LayerRow",
    "MODES",
    "Mode",
    "ModelLayout",
    "Place",
    "TensorInfo",
    "check",
    "nearest_block",
    "override",
    "parse",
    "parse_places",
    "rows",
    "whole_modules",
]


@dataclass(kw_only=True, frozen=True)
class LayerRow:
    """One line of the table.

    Args:
        modules: A module, or consecutive layers: `model.layers.0-13`.
        place: Position in the role's list of devices, or "cpu".
        device: Device number in the job; None for the host and where it is not known.
        num_bytes: Parameters and buffers as stored, tied ones counted once.
        training_bytes: The same with gradients and optimizer states, which the device holds at the optimizer's step.
    """

    modules: str
    place: Place
    device: int | None
    num_bytes: int
    training_bytes: int


@dataclass(kw_only=True, frozen=True)
class LayerMap:
    """A checked map.

    Args:
        role: The role.
        num_devices: Devices of the role.
        device_numbers: Their numbers in the job, where known.
        modules: Place of each module, layer by layer, in the order of execution: what `from_pretrained(device_map=...)`
            and `accelerate.dispatch_model` take. Every tensor lies below exactly one of them.
        tensors: Place of each parameter and buffer.
        num_bytes: Bytes of each of `modules`, tied tensors counted once.
        notes: What the user should know.
    """

    role: str
    num_devices: int
    device_numbers: tuple[int, ...] | None
    modules: Mapping[str, Place]
    tensors: Mapping[str, Place]
    num_bytes: Mapping[str, int]
    notes: tuple[str, ...] = ()

    def place_of(self, path: str) -> Place:
        """Place of a module or tensor; of its first tensor where a module is spread."""
        found = next((p for name, p in self.tensors.items() if name == path or name.startswith(f"{path}.")), None)
        assert found is not None, f"{path} holds no tensor"
        return found

    @property
    def bytes_by_place(self) -> dict[Place, int]:
        """Bytes as stored on each device, 0 for one without a layer, and on the host if it holds any."""
        totals: dict[Place, int] = dict.fromkeys(range(self.num_devices), 0)
        for module, place in self.modules.items():
            totals[place] = totals.get(place, 0) + self.num_bytes[module]
        return totals

    @property
    def override(self) -> str:
        """The map as an override to type, whatever it was made from."""
        return override(self.role, {row.modules: row.place for row in rows(self)})

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "role": self.role,
            "rows": [asdict(row) for row in rows(self)],
            "bytes": {str(place): total for place, total in self.bytes_by_place.items()},
            "notes": list(self.notes),
        }


def check(
    places: Mapping[str, Place],
    layout: ModelLayout,
    *,
    role: str,
    num_devices: int,
    device_numbers: Sequence[int] | None = None,
) -> LayerMap:
    """Checks a map against the model that it is for, before any weight is loaded.

    Tied weights are one tensor: a module that shares the weights of another lies with it, wherever the map puts it, and a
    note says so. Buffers that are computed, not loaded, follow the layers that use them.

    Args:
        places: As `parse_places` returns them.
        layout: The model.
        role: For messages.
        num_devices: Devices of the role, 1 or more.
        device_numbers: Their numbers in the job, where known.

    Raises:
        ConfigError: A key names no module or several, two keys contradict each other, a tensor has no place, or a layer
            is spread.
    """
    complete, moved = _placed(places, layout, role)
    entries = whole_modules(layout, complete)
    modules = {entries[name]: place for name, place in complete.items()}
    sizes = dict.fromkeys(modules, 0)
    for name in complete.keys() - layout.aliases:
        sizes[entries[name]] += layout.tensors[name].num_bytes
    layer_map = LayerMap(
        role=role,
        num_devices=num_devices,
        device_numbers=None if device_numbers is None else tuple(device_numbers),
        modules=modules,
        tensors=complete,
        num_bytes=sizes,
    )
    return replace(layer_map, notes=tuple(_notes(layer_map, layout, moved)))


def rows(layer_map: LayerMap, *, num_states: int = 0) -> tuple[LayerRow, ...]:
    """The map as a table, before the model is loaded as after it: consecutive layers on one place are one line.

    Args:
        layer_map: The map.
        num_states: Tensors beside each parameter, in its dtype: with AdamW 3, gradient and two states; 0 without training.
    """
    numbers = layer_map.device_numbers
    sizes = layer_map.num_bytes
    return tuple(
        LayerRow(
            modules=name,
            place=place,
            device=None if numbers is None or place == HOST else numbers[int(place)],
            num_bytes=sum(sizes[module] for module in modules),
            training_bytes=(1 + num_states) * sum(sizes[module] for module in modules),
        )
        for name, place, modules in _folded(layer_map.modules)
    )


def whole_modules(layout: ModelLayout, places: Mapping[str, Place] | None = None) -> dict[str, str]:
    """The module that each tensor is placed with: its block, else the outermost module without a block that isn't spread.

    Args:
        layout: The model.
        places: Place of each tensor; None: nothing is spread.
    """
    divided = {above for block in layout.blocks for above in ancestors(block)}
    seen: dict[str, Place] = {}
    for name, place in (places or {}).items():
        divided |= {above for above in ancestors(name) if seen.setdefault(above, place) != place}
    return {name: next((above for above in ancestors(name) if above not in divided), name) for name in layout.tensors}


def nearest_block(name: str, layout: ModelLayout) -> str | None:
    """The block that shares most of a tensor's path, the first of those that share as much; None without blocks."""
    above = ancestors(name)
    return max(layout.blocks, key=lambda block: sum(path in above for path in ancestors(block)), default=None)


# Places of tensors


def _placed(places: Mapping[str, Place], layout: ModelLayout, role: str) -> tuple[dict[str, Place], dict[str, str]]:
    """Place of every tensor, and the modules that `_join_tied` moved."""
    claimed, clashes, wrong = claims(places, layout)
    if wrong:
        first, more = next(iter(wrong)), f", and {len(wrong) - 1} more such keys" if len(wrong) > 1 else ""
        remedy = _mended(places, {key: error.instead for key, error in wrong.items()}, layout, role)
        refuse(role, wrong[first].expected, f"{first}: {places[first]}{more}", remedy)
    placed = {name: _longest(name, claimed) for name in layout.tensors}
    if clashes:
        more = f", and {len(clashes) - 1} more" if len(clashes) > 1 else ""
        refuse(role, "one place for each module", clashes[0] + more, override(role, _completed(placed, layout)))
    inside, owned = _by_block(layout), _by_owner(layout)
    if spread := _parted(inside, placed):
        where = " and ".join(dict.fromkeys(str(placed[name]) for name in inside[spread[0]]))
        refuse(
            role,
            f"each layer of {layout.model_class} whole on one place",
            f"{spread[0]} on {where}" + (f", and {len(spread) - 1} more such layers" if len(spread) > 1 else ""),
            override(role, _completed(placed, layout)),
        )
    if apart := _parted(owned, placed):
        where = " and ".join(f"{name} on {placed[name]}" for name in owned[apart[0]])
        refuse(
            role,
            "one place for the tensors that belong to one module",
            where + (f", and {len(apart) - 1} more such modules" if len(apart) > 1 else ""),
            override(role, _completed(placed, layout)),
        )
    moved = _join_tied(placed, layout)
    _place_computed(placed, layout)
    missing = [name for name in placed if placed[name] is None and layout.tensors[name].kind != "computed"]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        wholes = whole_modules(layout)
        lacking = ", ".join(name for name, _, _ in _folded({wholes[name]: 0 for name in missing}))
        refuse(
            role,
            "a place for every parameter and buffer",
            f"none for {len(missing)} of {len(placed)}: {', '.join(missing[:5])}{more}, in {lacking}",
            override(role, _completed(placed, layout)),
        )
    return {name: place for name, place in placed.items() if place is not None}, moved


def _parted(groups: Mapping[str, Sequence[str]], placed: Mapping[str, Place | None]) -> list[str]:
    """Of groups of tensors, those that have more than one place."""
    return [group for group, names in groups.items() if len({placed[name] for name in names} - {None}) > 1]


def _mended(places: Mapping[str, Place], instead: Mapping[str, Sequence[str]], layout: ModelLayout, role: str) -> str:
    """The map to type: the user's with other keys in the place of wrong ones, or the nearest that is right if that is not."""
    mended = {name: place for key, place in places.items() for name in instead.get(key, (key,))}
    if not mended:
        return f"{key_of(role)}=auto"
    try:
        _placed(mended, layout, role)
    except ConfigError as error:
        return error.remedy
    return override(role, mended)


def _longest(name: str, claimed: Mapping[str, Place]) -> Place | None:
    """The place that the longest key gives to a tensor; keys match whole names between dots."""
    for path in (name, *reversed(ancestors(name)), ""):
        if path in claimed:
            return claimed[path]
    return None


def _join_tied(placed: dict[str, Place | None], layout: ModelLayout) -> dict[str, str]:
    """Puts modules that share a tensor on one place. Returns those that were elsewhere, and whom they follow."""
    moved: dict[str, str] = {}
    wholes = whole_modules(layout)
    for group in layout.tied:
        first = next((name for name in group if placed[name] is not None), group[0])
        home = placed[first]
        for name in group:
            if placed[name] not in (home, None):
                owner = wholes[name] if wholes[name] in layout.blocks else _owner(name)
                moved[owner] = _owner(first)
                placed.update((other, home) for other in placed if other == owner or other.startswith(f"{owner}."))
            placed[name] = home
    return moved


def _place_computed(placed: dict[str, Place | None], layout: ModelLayout) -> None:
    """Puts computed buffers without a place where the nearest layer is."""
    computed = [name for name, tensor in layout.tensors.items() if tensor.kind == "computed" and placed[name] is None]
    inside = _by_block(layout)
    for name in computed:
        near = nearest_block(name, layout)
        names = placed if near is None else inside[near]
        placed[name] = next((placed[other] for other in names if placed[other] is not None), None)


def _completed(placed: Mapping[str, Place | None], layout: ModelLayout) -> dict[str, Place]:
    """The nearest map that is right: layers whole, and what has no place on that of what comes before it."""
    whole = dict(placed)
    for names in (*_by_owner(layout).values(), *_by_block(layout).values()):
        whole.update(dict.fromkeys(names, next((whole[name] for name in names if whole[name] is not None), None)))
    _join_tied(whole, layout)
    _place_computed(whole, layout)
    last: Place = next((place for place in whole.values() if place is not None), 0)
    filled: dict[str, Place] = {}
    for name, place in whole.items():
        filled[name] = last if place is None else place
        if layout.tensors[name].kind != "computed":  # which follows the layers, wherever it stands
            last = filled[name]
    entries = whole_modules(layout, filled)
    modules = {entries[name]: place for name, place in filled.items()}
    return {name: place for name, place, _ in _folded(modules)}


def _by_block(layout: ModelLayout) -> dict[str, list[str]]:
    """Names of the tensors of each block."""
    inside: dict[str, list[str]] = {block: [] for block in layout.blocks}
    for name in layout.tensors:
        for block in inside.keys() & set(ancestors(name)):
            inside[block].append(name)
    return inside


def _by_owner(layout: ModelLayout) -> dict[str, list[str]]:
    """Names of the tensors that belong to one module itself, which computes with all of them; not of computed buffers."""
    names: dict[str, list[str]] = {}
    for name, tensor in layout.tensors.items():
        if tensor.kind != "computed":
            names.setdefault(_owner(name), []).append(name)
    return names


def _owner(name: str) -> str:
    """The module of a tensor; the tensor itself where that is the root."""
    return name.rpartition(".")[0] or name


# Table and notes


def _folded(modules: Mapping[str, Place]) -> Iterator[tuple[str, Place, list[str]]]:
    """Modules in order; neighbours `a.3`, `a.4`, `a.5` on one place become `a.3-5`."""
    group: list[str] = []
    for module, place in modules.items():
        if group and modules[group[0]] == place and _is_next(group[-1], module):
            group.append(module)
            continue
        if group:
            yield _spelled(group), modules[group[0]], group
        group = [module]
    if group:
        yield _spelled(group), modules[group[0]], group


def _is_next(module: str, after: str) -> bool:
    (parent, _, number), (other, _, following) = module.rpartition("."), after.rpartition(".")
    return parent == other and number.isdecimal() and following.isdecimal() and int(following) == int(number) + 1


def _spelled(group: list[str]) -> str:
    return group[0] if len(group) == 1 else f"{group[0]}-{group[-1].rpartition('.')[2]}"


def _spelled_place(place: Place) -> str:
    return "the host" if place == HOST else f"place {place}"


def _notes(layer_map: LayerMap, layout: ModelLayout, moved: Mapping[str, str]) -> Iterator[str]:
    for module, home in moved.items():
        where = _spelled_place(layer_map.place_of(home))
        yield f"{module} shares its weights with {home}: it lies with it on {where}, not where the map put it"
    last = layer_map.place_of(layout.blocks[-1]) if layout.blocks else None
    for group in layout.tied:
        home, place = _owner(group[0]), layer_map.tensors[group[0]]
        others = [_owner(name) for name in group[1:] if _owner(name) not in moved]
        if others and last not in (None, place):
            shared = ", ".join([*others, home])
            yield f"{shared} share their weights: they lie on {_spelled_place(place)}, where the last hidden states come back to"
    yield from _order_notes(layer_map, layout)
    on_host = [name for name, place, _ in _folded(layer_map.modules) if place == HOST]
    if on_host:
        yield f"{', '.join(on_host)}: on the host, where it also computes; every pass of the model waits for it"
    yield from _idle_notes(layer_map, layout)


def _order_notes(layer_map: LayerMap, layout: ModelLayout) -> Iterator[str]:
    """Each return to a place that was left already is one more copy of the hidden states in every pass."""
    entries = whole_modules(layout, layer_map.tensors)
    followers = {entries[name] for name in layout.aliases}
    loaded = [entries[name] for name, tensor in layout.tensors.items() if tensor.kind != "computed"]
    path = [(module, layer_map.modules[module]) for module in dict.fromkeys(loaded) if module not in followers]
    left: set[Place] = set()
    returns = []
    for (_, before), (module, place) in pairwise(path):
        left.add(before)
        if place != before and place in left:
            returns.append(module)
    if returns:
        yield (
            f"the map goes back to an earlier place at {', '.join(returns[:5])}"
            f"{' and more' if len(returns) > 5 else ''}: one more copy of the hidden states each, in every pass"
        )


def _idle_notes(layer_map: LayerMap, layout: ModelLayout) -> Iterator[str]:
    used = sorted({place for place in layer_map.modules.values() if place != HOST})
    idle = [place for place in range(layer_map.num_devices) if place not in used]
    if not idle:
        return
    role, numbers = layer_map.role, layer_map.device_numbers
    ways = []
    if used and numbers is not None:
        ways.append(f"sharding.roles.{role}.devices={format_devices([numbers[place] for place in used])}")
        if used[-1] >= len(used):
            closer = {row.modules: row.place if row.place == HOST else used.index(row.place) for row in rows(layer_map)}
            ways[0] += f" {override(role, closer)}"
        ways[0] += " leaves them to others"
    if len(layout.blocks) >= layer_map.num_devices:
        ways.append(f"{key_of(role)}=auto uses all")
    named = idle if numbers is None else [numbers[place] for place in idle]
    kind = "place" if numbers is None else "device"
    text = f"no layer lies on {kind}{'s' if len(idle) > 1 else ''} {format_devices(named)}"
    yield f"{text}: {', '.join(ways)}" if ways else text
