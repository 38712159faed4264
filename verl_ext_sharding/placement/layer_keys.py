"""The keys and places of a device map, as people write them. Standard library only.

A place is a position in the role's own list of devices, 0 to k-1, as its process numbers its GPUs; or "cpu", where a
layer lives and computes on the host. A key is the path of a module, and the longest one that leads to a tensor counts.
Besides whole paths, keys may be `norm` and `embed` where one module is meant, `layers 0-13`, `model.layers[0-13]`,
`layers.3`. What wrappers and other versions of transformers put in front of a name is left out (`base_model.model.`,
`language_model.`), and where a model has no module of a usual name (`embed`, `layers`, `norm`, `lm_head`), its own part is
meant: `wte`, `h`, `ln_f`, `score`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeAlias

from verl_ext_sharding.errors import ConfigError, did_you_mean
from verl_ext_sharding.placement.devices import format_devices

Mode: TypeAlias = Literal["auto", "balanced", "balanced_low_0", "sequential"]
Place: TypeAlias = int | Literal["cpu"]
Part: TypeAlias = Literal["embedding", "layers", "norm", "head"]

MODES: tuple[Mode, ...] = ("auto", "balanced", "balanced_low_0", "sequential")
HOST: Literal["cpu"] = "cpu"

_NUMBER = re.compile(r"(?:(?:cuda|gpu|npu|xpu)\s*:\s*)?(\d+)", re.IGNORECASE)
_LAYERS = re.compile(r"(.+?)(?:\s*\[\s*|\s*\.\s*|\s+)(\d+)(?:\s*(?:[-\u2013\u2014]|\.{2,3}|to)\s*(\d+))?\s*\]?")
_USUAL_NAMES: tuple[tuple[Part, re.Pattern[str]], ...] = (
    ("embedding", re.compile(r"(?:word_|tok(?:en)?_)?embed(?:ding)?s?|embed_(?:tokens|in)|wte")),
    ("layers", re.compile(r"(?:decoder_)?(?:layers?|blocks?)|h")),
    ("norm", re.compile(r"(?:final_)?(?:layer_?|rms_?)?norm|ln_f")),
    ("head", re.compile(r"(?:lm_|value_|v_)?head|output(?:_layer)?|embed_out|score|classifier")),
)
"""How the parts that every decoder has are called, in one model or another."""
_TRANSPARENT = frozenset(
    {"base_model", "model", "language_model", "text_model", "vision_model", "transformer", "module", "_orig_mod"}
)
"""Names that wrappers and versions of transformers put around others, or don't."""
_NEEDS_ESCAPE = re.compile(r"[\\()\[\]{}:=,]")
_SHORTEST_BEGINNING = 3
"""Letters that a key needs to stand for a name that begins with them."""
_LIKE_ENOUGH = 0.6
"""From which likeness (0 to 1, `difflib`) a name counts as misspelt."""


@dataclass(kw_only=True, frozen=True)
class TensorInfo:
    """A parameter or buffer.

    Args:
        num_bytes: Bytes as stored.
        num_elements: Its elements.
        kind: `computed` is a buffer that no checkpoint holds (rotary frequencies): it needs no key of its own.
        trained: Whether it gets a gradient.
    """

    num_bytes: int
    num_elements: int
    kind: Literal["parameter", "buffer", "computed"] = "parameter"
    trained: bool = False


@dataclass(kw_only=True, frozen=True)
class ModelLayout:
    """What a device map must know of a model. `training.layer_map.describe` reads it from a model on meta.

    Args:
        model_class: Name of its class, for messages.
        tensors: Every parameter and buffer by name, in the order of execution; tied ones under each of their names.
        modules: Paths of all modules, without the root.
        blocks: Paths of the modules that must stay whole (decoder layers), in order; none inside another.
        tied: Names of one tensor each; the first is the one that a checkpoint holds (the embedding).
        parts: Paths of the parts that a decoder has, as far as they are known; `layers` is the list of its layers.
    """

    model_class: str
    tensors: Mapping[str, TensorInfo]
    modules: tuple[str, ...]
    blocks: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...] = ()
    parts: Mapping[Part, str] = field(default_factory=dict)

    @property
    def aliases(self) -> frozenset[str]:
        """Names of tied tensors but for the first of each group: their bytes are counted there."""
        return frozenset(name for group in self.tied for name in group[1:])


def parse(
    value: Any, *, role: str, num_devices: int, device_numbers: Sequence[int] | None = None
) -> Mode | dict[str, Place]:
    """Reads `device_map`, before anything is known of the model.

    Args:
        value: One of `MODES`, or a map as `parse_places` takes it.
        role: For messages.
        num_devices: Devices of the role, 1 or more.
        device_numbers: Their numbers in the job, where known.

    Raises:
        ConfigError: Neither a mode nor a map, or a place that the role has not.
    """
    if isinstance(value, Mapping):
        return parse_places(value, role=role, num_devices=num_devices, device_numbers=device_numbers)
    for mode in MODES:
        if value == mode:
            return mode
    close = did_you_mean(str(value).lower(), MODES) or "auto"
    refuse(role, f"{', '.join(MODES)} or a map {{module: place}}", str(value), f"{key_of(role)}={close}")


def parse_places(
    device_map: Mapping[Any, Any], *, role: str, num_devices: int, device_numbers: Sequence[int] | None = None
) -> dict[str, Place]:
    """Reads the places of a map `{module: place}`, before anything is known of the model.

    Args:
        device_map: Keys as YAML and Hydra make them: numbers are text again, nested maps are joined by dots. Places are
            0, "0", "cuda:0" or "cpu".
        role: For messages.
        num_devices: Devices of the role, 1 or more.
        device_numbers: Their numbers in the job, where known: they are what people write by mistake.

    Raises:
        ConfigError: The map is empty, or a place is unreadable or not one of the role's.
    """
    written = list(_flatten(device_map))
    if not written:
        refuse(role, "a place for every module", "an empty map", f"{key_of(role)}=auto")
    expected = f"a position 0 to {num_devices - 1} in {role}'s own list of {_count(num_devices)}, or cpu"
    places: dict[str, Place] = {}
    bad = [(key, value) for key, value in written if _place(value) is None]
    if bad and (turned := _turned(written)):
        refuse(
            role,
            f"{{module: place}}, and {expected} as place",
            _spell(bad),
            override(role, _within(turned, num_devices)),
        )
    for key, value in written:
        place = _place(value)
        if place is None:  # what was probably meant, for the remedy
            place = _meant(value)
        elif places.setdefault(key, place) != place:
            found = f"{key}: {places[key]} and {key}: {place}"
            refuse(role, "one place for each module", found, override(role, _within(places, num_devices)))
        places[key] = place
    if bad:
        refuse(role, expected, _spell(bad), override(role, _within(places, num_devices)))
    unknown = [(key, place) for key, place in places.items() if place != HOST and place >= num_devices]
    if not unknown:
        return places
    numbers = list(device_numbers or ())
    if all(place in (*numbers, HOST) for place in places.values()):
        meant = {key: place if place == HOST else numbers.index(place) for key, place in places.items()}
        expected += f"; places count within devices={format_devices(numbers)}, they are not device numbers"
        refuse(role, expected, _spell(unknown), override(role, meant))
    refuse(role, expected, _spell(unknown), override(role, _within(places, num_devices)))


def override(role: str, places: Mapping[str, Place]) -> str:
    """A map as an override that a shell and Hydra read back; a key for the whole model can't be typed there."""
    if "" in places:
        return f"{key_of(role)}=auto"
    text = ",".join(f"{_typed(key)}:{place}" for key, place in places.items())
    return f"'{key_of(role)}={{{text}}}'"


# Keys


def _flatten(device_map: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in device_map.items():
        path = ".".join(part for part in (above, "null" if key is None else str(key).strip()) if part)
        if isinstance(value, Mapping):
            yield from _flatten(value, path)
        else:
            yield path, value


def _place(value: Any) -> Place | None:
    text = str(value).strip().lower()
    if text == HOST:
        return HOST
    match = _NUMBER.fullmatch(text)
    return int(match[1]) if match else None


class UnclearKeyError(Exception):
    """A key names no module, or several.

    Args:
        expected: What would have been right.
        instead: What was probably meant: one key, or none.
    """

    def __init__(self, expected: str, *instead: str) -> None:
        super().__init__(expected)
        self.expected = expected
        self.instead = instead


def _meant(value: Any) -> Place:
    """The place that an unreadable one was probably meant to be."""
    text = str(value).strip().lower()
    if text in ("disk", "meta"):
        return HOST
    number = re.fullmatch(r"[a-z_:. ]*(\d+)(?:\.0)?", text)
    return int(number[1]) if number else 0


def _turned(written: Sequence[tuple[str, Any]]) -> dict[str, Place]:
    """A map that was written from places to modules, the right way round; empty if it wasn't."""
    turned: dict[str, Place] = {}
    for key, value in written:
        place, modules = _place(key), value if isinstance(value, list | tuple) else [value]
        if place is None or not all(isinstance(module, str) and _place(module) is None for module in modules):
            return {}
        turned |= dict.fromkeys(modules, place)
    return turned


def claims(
    places: Mapping[str, Place], layout: ModelLayout
) -> tuple[dict[str, Place], list[str], dict[str, UnclearKeyError]]:
    """Reads the keys of a map.

    Args:
        places: As `parse_places` returns them.
        layout: The model.

    Returns:
        Place of each module path that the keys name, what two keys say differently of one path (the later one counts), and
        the keys that can't be read, with what is wrong with them.
    """
    claimed: dict[str, Place] = {}
    claimed_by: dict[str, str] = {}
    clashes: list[str] = []
    wrong: dict[str, UnclearKeyError] = {}
    for key, place in places.items():
        try:
            paths = _paths(key, layout)
        except UnclearKeyError as error:
            wrong[key] = error
            continue
        for path in paths:
            if claimed.get(path, place) != place:
                clashes.append(f"{path} on {claimed[path]} by {claimed_by[path]!r} and on {place} by {key!r}")
            claimed[path], claimed_by[path] = place, key
    return claimed, clashes, wrong


def _paths(key: str, layout: ModelLayout) -> list[str]:
    """The module paths that a key names: one, or the layers of a range."""
    if key == "" or key in layout.modules or key in layout.tensors:
        return [key]
    match = _LAYERS.fullmatch(key)
    if match is None:
        return [_path(key, key, layout)]
    parent, first, last = _path(match[1], key, layout), int(match[2]), int(match[3] or match[2])
    layers = [path for path in layout.modules if re.fullmatch(rf"{re.escape(parent)}\.\d+", path)]
    if not layers:
        raise UnclearKeyError(f"numbered layers below {parent}")
    if first > last or last >= len(layers):
        low, high = sorted((first, last))
        instead = [f"{parent}.{low}-{min(high, len(layers) - 1)}"] if low < len(layers) else []
        raise UnclearKeyError(f"layers 0 to {len(layers) - 1} of {parent}, from the lower to the higher", *instead)
    return [f"{parent}.{number}" for number in range(first, last + 1)]


def _path(text: str, key: str, layout: ModelLayout) -> str:
    """The one module that a short name means: a path's end, else the beginning of its last part, else a part's usual name."""
    if text in layout.modules:
        return text
    blocks = set(layout.blocks)
    outside = [path for path in layout.modules if blocks.isdisjoint(ancestors(path))]
    begins = outside if len(text) >= _SHORTEST_BEGINNING else []
    bare = _bare(text)
    part = next(
        (layout.parts[part] for part, names in _USUAL_NAMES if part in layout.parts and names.fullmatch(bare)), None
    )
    for found in (
        [path for path in outside if path.endswith(f".{text}")],
        [path for path in outside if bare and _bare(path) == bare],
        [path for path in begins if path.rpartition(".")[2].startswith(text)],
        [] if part is None else [part],
        [path for path in layout.modules if path.endswith(f".{text}")],
    ):
        found = [path for path in found if not any(path.startswith(f"{other}.") for other in found)]
        found = [part] if part in found else found
        if len(found) == 1:
            return found[0]
        if found:
            some = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
            raise UnclearKeyError(f"one module; {text!r} may be {some}", key.replace(text, found[0]))
    near = sorted(outside, key=lambda path: -_likeness(text, path))[:3]
    meant = [path for path in near[:1] if _likeness(text, path) >= _LIKE_ENOUGH]
    expected = f"a module of {layout.model_class}; the nearest are {', '.join(near)}"
    raise UnclearKeyError(expected, *(key.replace(text, path) for path in meant))


def _bare(path: str) -> str:
    """A path without the names that may stand around others."""
    return ".".join(part for part in path.split(".") if part not in _TRANSPARENT)


def _likeness(text: str, path: str) -> float:
    last = path.rpartition(".")[2]
    names = (path, last, last.partition("_")[0])
    return max(difflib.SequenceMatcher(None, text.lower(), name.lower()).ratio() for name in names)


# Messages


def key_of(role: str) -> str:
    """The key of a role's device map."""
    return f"sharding.roles.{role}.device_map"


def refuse(role: str, expected: str, found: str, remedy: str) -> NoReturn:
    """Refuses a role's device map.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(
        key_of(role),
        expected=expected,
        found=found,
        consequence="the run stops before any weight is loaded",
        remedy=remedy,
    )


def ancestors(path: str) -> list[str]:
    """The modules that hold a module or tensor, from the outside, without the root."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _spell(pairs: Sequence[tuple[str, Any]]) -> str:
    more = f" and {len(pairs) - 5} more" if len(pairs) > 5 else ""
    return ", ".join(f"{key or repr(key)}: {value}" for key, value in pairs[:5]) + more


def _count(num_devices: int) -> str:
    return f"{num_devices} device{'s' if num_devices > 1 else ''}"


def _typed(key: str) -> str:
    """A key as Hydra's command line reads it: unquoted, the layers of a range without brackets."""
    match = _LAYERS.fullmatch(key)
    if match is not None and ("[" in key or not key.isascii()):
        key = f"{match[1]}.{match[2]}" + (f"-{match[3]}" if match[3] else "")
    return _NEEDS_ESCAPE.sub(lambda found: f"\\{found[0]}", key)


def _within(places: Mapping[str, Place], num_devices: int) -> dict[str, Place]:
    """The places with their order kept, spread over the devices that there are, if any place is none of them."""
    used = sorted({place for place in places.values() if place != HOST})
    if not used or used[-1] < num_devices:
        return dict(places)
    share = max(len(used), num_devices)
    nearest = {place: rank * num_devices // share for rank, place in enumerate(used)}
    return {key: place if place == HOST else nearest[place] for key, place in places.items()}
