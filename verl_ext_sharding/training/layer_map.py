"""Device maps from a model on meta: what it is made of, and the map that balances its layers over the devices.

accelerate makes device maps too, and we take its format and its reading of tied weights and buffers. Its choice
(`get_balanced_memory`, `infer_auto_device_map`) we can't take: it counts the weights alone and fills each device up to the
average and a layer, so the last gets what is left (Qwen2-7B with tied weights over 8 devices: nothing, accelerate 1.15),
and what finds no room goes to CPU and disk. A role that trains needs gradients and optimizer states next to the weights,
and no layer on a host that nobody asked for. So the layers are cut here into consecutive groups, one for each device,
whose largest share of its device is the smallest possible.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile, pairwise
from typing import Any

import torch
import transformers
from accelerate.utils import find_tied_parameters
from accelerate.utils.modeling import get_non_persistent_buffers
from torch import nn

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement.device_map import (
    LayerMap,
    Mode,
    ModelLayout,
    TensorInfo,
    check,
    nearest_block,
    parse,
    whole_modules,
)
from verl_ext_sharding.placement.layer_keys import Part, ancestors, key_of, refuse
from verl_ext_sharding.training.layers import decoder_layers, input_embedding
from verl_ext_sharding.versions import in_range

logger = logging.getLogger(__name__)

_MOST_DEVICES = 64
"""How many devices a remedy may ask for."""


@dataclass(kw_only=True, frozen=True)
class DeviceNeeds:
    """What the devices have and the tensors need, besides the bytes of the stored tensors.

    Args:
        memory_bytes: Free for this role on each of its devices, what others need taken off; None: not known, the map is
            balanced and not checked.
        extra_bytes_per_parameter: What a trained parameter needs besides its stored value, 0 or more. fp32 gradients and
            AdamW: 4 + 8.
    """

    memory_bytes: tuple[int, ...] | None = None
    extra_bytes_per_parameter: float = 0.0

    def of(self, names: Sequence[str], layout: ModelLayout) -> int:
        """Bytes that tensors need on their device; tied ones count under their first name."""
        tensors = [layout.tensors[name] for name in set(names) - layout.aliases]
        trained = [
            math.ceil(tensor.num_elements * self.extra_bytes_per_parameter) for tensor in tensors if tensor.trained
        ]
        return sum(tensor.num_bytes for tensor in tensors) + sum(trained)


def plan_layers(
    model: nn.Module,
    device_map: Any,
    *,
    role: str,
    num_devices: int,
    device_numbers: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    needs: DeviceNeeds | None = None,
) -> LayerMap:
    """The checked map of a role: inferred for a mode, as written for a map. Nothing is loaded.

    Args:
        model: The model, on meta or anywhere.
        device_map: `sharding.roles.<role>.device_map` as it is.
        role: For messages.
        num_devices: Devices of the role, 1 or more.
        device_numbers: Their numbers in the job, where known.
        dtype: Of the stored parameters; None: as the model has them.
        needs: What the devices have and training needs; None: nothing is known.

    Raises:
        ConfigError: The map is wrong, or a device has no room for its layers.
    """
    needs = needs or DeviceNeeds()
    parsed = parse(device_map, role=role, num_devices=num_devices, device_numbers=device_numbers)
    layout = describe(model, role=role, dtype=dtype)
    if isinstance(parsed, str):
        layer_map = infer(
            layout, role=role, mode=parsed, num_devices=num_devices, device_numbers=device_numbers, needs=needs
        )
    else:
        layer_map = check(parsed, layout, role=role, num_devices=num_devices, device_numbers=device_numbers)
        _check_room(layer_map, layout, needs)
    for note in layer_map.notes:
        logger.info("%s: %s", role, note)
    return layer_map


def describe(model: nn.Module, *, role: str, dtype: torch.dtype | None = None) -> ModelLayout:
    """Reads what a device map must know of a model.

    Layers that must stay whole are those that the model names in `_no_split_modules`, and its decoder layers, however
    they are found (`training.layers`). Weights are tied where two names have one parameter, and where the model says so
    (`all_tied_weights_keys`, as its config has it) though nothing is tied yet.

    Args:
        model: The model, on meta or anywhere.
        role: For messages.
        dtype: Of the stored floating-point parameters; None: as the model has them.

    Raises:
        ConfigError: The model has no layers that are known to stay whole.
    """
    computed = get_non_persistent_buffers(model, recurse=True, fqns=True)
    tensors = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        itemsize = dtype.itemsize if dtype is not None and parameter.is_floating_point() else parameter.element_size()
        tensors[name] = TensorInfo(
            num_bytes=parameter.numel() * itemsize, num_elements=parameter.numel(), trained=parameter.requires_grad
        )
    for name, buffer in model.named_buffers(remove_duplicate=False):
        tensors[name] = TensorInfo(
            num_bytes=buffer.numel() * buffer.element_size(),
            num_elements=buffer.numel(),
            kind="computed" if name in computed else "buffer",
        )
    modules = tuple(name for name, _ in model.named_modules(remove_duplicate=False) if name)
    position = {name: index for index, name in enumerate(modules)}
    blocks = _blocks(model, role)
    return ModelLayout(
        model_class=type(model).__name__,
        # a buffer runs where its module stands, not behind all parameters
        tensors=dict(sorted(tensors.items(), key=lambda item: position.get(item[0].rpartition(".")[0], -1))),
        modules=modules,
        blocks=blocks,
        tied=_tied(model, tensors),
        parts=_parts(model, blocks),
    )


def infer(
    layout: ModelLayout,
    *,
    role: str,
    mode: Mode,
    num_devices: int,
    device_numbers: Sequence[int] | None = None,
    needs: DeviceNeeds | None = None,
) -> LayerMap:
    """Cuts a model into one group of consecutive layers for each device.

    `auto` and `balanced` make the largest share of a device's free memory as small as it can be. `balanced_low_0` does
    so on all devices but the first, which gets as little as it must. `sequential` fills one device after the other.
    None of them puts anything on the host.

    Args:
        layout: The model.
        role: For messages.
        mode: One of `placement.device_map.MODES`.
        num_devices: Devices of the role, 1 or more.
        device_numbers: Their numbers in the job, where known.
        needs: What the devices have and training needs; None: nothing is known.

    Raises:
        ConfigError: The layers don't fit the devices, or `sequential` without known memory.
    """
    needs = needs or DeviceNeeds()
    groups = _groups(layout)
    costs = [needs.of(names, layout) for _, names in groups]
    used = min(num_devices, len(groups))
    memory = needs.memory_bytes[:used] if needs.memory_bytes is not None else None
    if mode == "sequential":
        if memory is None:
            refuse(
                role,
                "the free memory of each device, which sequential fills",
                "sequential, with no device to ask",
                f"sharding.memory.gpu_gib=80, or {key_of(role)}=auto",
            )
        ends = _fill(costs, memory)
    elif mode == "balanced_low_0" and used > 1:
        ends = _light_first(costs, memory, used)
    else:
        ends = balanced_cuts(costs, memory or (1,) * used)
    places = {
        module: place
        for place, (start, end) in enumerate(pairwise((0, *ends)))
        for modules, _ in groups[start:end]
        for module in modules
    }
    layer_map = check(places, layout, role=role, num_devices=num_devices, device_numbers=device_numbers)
    _check_room(layer_map, layout, needs)
    return layer_map


def balanced_cuts(costs: Sequence[int], free: Sequence[int]) -> tuple[int, ...]:
    """Cuts a sequence into one non-empty group for each device, with the largest share of a device's memory minimal.

    Of the cuts that are equal in that, the one with the smallest sum of squared shares. Dynamic programming over the
    ends of groups, exact, O(devices x layers^2).

    Args:
        costs: Bytes of each element, in order; at least as many as devices.
        free: Bytes of each device, in order.

    Returns:
        The end (exclusive) of each group.
    """
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def share(start: int, end: int, device: int) -> float:
        return (sums[end] - sums[start]) / max(free[device], 1)

    def best(join: Callable[[float, float], float], limit: float) -> tuple[float, tuple[int, ...]]:
        reached: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for device in range(len(free)):
            rest = len(free) - device - 1
            options: dict[int, tuple[float, tuple[int, ...]]] = {}
            for start, (value, ends) in reached.items():
                for end in range(start + 1, len(costs) - rest + 1):
                    part = share(start, end, device)
                    if part > limit:
                        break
                    option = (join(value, part), (*ends, end))
                    options[end] = min(option, options.get(end, option))
            reached = options
        return reached[len(costs)]

    largest, _ = best(max, float("inf"))
    return best(lambda value, part: value + part * part, largest)[1]


def check_transformers(config: Mapping[str, Any] | Any, *, role: str) -> None:
    """Checks that the installed transformers knows a model, before it is built on meta.

    Args:
        config: The checkpoint's `config.json` as a mapping, or a transformers config. One that brings its own code
            (`auto_map`) passes.
        role: For messages.

    Raises:
        ConfigError: The model's type or class is not in the installed transformers.
    """
    values = config if isinstance(config, Mapping) else config.to_dict()
    model_type = values.get("model_type")
    if values.get("auto_map"):
        return
    if model_type not in transformers.CONFIG_MAPPING:
        unknown = f"model type {model_type!r}"
    elif transformers.CONFIG_MAPPING[model_type].__module__.startswith("transformers."):
        absent = sorted(set(values.get("architectures") or ()) - _exported())
        if not absent:
            return
        unknown = f"class {', '.join(absent)}"
    else:  # registered by other code, with its classes
        return
    saved = values.get("transformers_version")
    newer = isinstance(saved, str) and not in_range(transformers.__version__, f">={saved}")
    wanted = f"transformers>={saved}" if newer else "transformers"
    refuse(
        role,
        f"a model that transformers {transformers.__version__} knows",
        unknown + (f", saved with transformers {saved}" if saved else ""),
        f'pip install --upgrade "{wanted}"',
    )


@functools.cache
def _exported() -> frozenset[str]:
    """Names in transformers; listing them takes a third of a second."""
    return frozenset(dir(transformers))


def _blocks(model: nn.Module, role: str) -> tuple[str, ...]:
    """Paths of the modules that must stay whole, outermost ones only."""
    named = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    try:
        layers = set(map(id, decoder_layers(model)))
    except ConfigError:
        layers = set()
    found: dict[str, None] = {}
    for path, module in model.named_modules():
        whole = id(module) in layers or any(base.__name__ in named for base in type(module).__mro__)
        holds_weights = next(module.parameters(), None) is not None
        if path and whole and holds_weights and found.keys().isdisjoint(ancestors(path)):
            found[path] = None
    if not found:
        refuse(
            role,
            "a model that names its layers (_no_split_modules), or a ModuleList of layers of one class",
            f"neither in {type(model).__name__} of transformers {transformers.__version__}",
            f"a newer transformers, or sharding.roles.{role}.layout=fsdp",
        )
    return tuple(found)


def _parts(model: nn.Module, blocks: Sequence[str]) -> dict[Part, str]:
    """Paths of embedding, layers, last norm and head of the decoder, which may be one of several parts of a model."""
    paths = {id(module): path for path, module in model.named_modules()}
    found: dict[Part, str | None] = {"embedding": paths.get(id(input_embedding(model)))}
    lists = Counter(parent for parent, _, number in (block.rpartition(".") for block in blocks) if number.isdecimal())
    near = ancestors(found["embedding"] or "")
    found["layers"] = max(
        lists, key=lambda one: (sum(above in near for above in ancestors(one)), lists[one]), default=None
    )
    if found["layers"] is not None:
        owner, _, name = found["layers"].rpartition(".")
        beside = list(model.get_submodule(owner).named_children())
        behind = dropwhile(lambda child: child[0] != name, beside)
        norms = _norms(behind) or _norms(beside)
        found["norm"] = f"{owner}.{norms[0]}".removeprefix(".") if len(norms) == 1 else None
    heads = [
        name
        for name, child in model.named_children()
        if next(child.parameters(), None) is not None and not any(f"{path}.".startswith(f"{name}.") for path in blocks)
    ]
    output = getattr(model, "get_output_embeddings", lambda: None)()
    found["head"] = paths.get(id(output), heads[0] if len(heads) == 1 else None)
    return {part: path for part, path in found.items() if path}


def _norms(children: Iterable[tuple[str, nn.Module]]) -> list[str]:
    return [name for name, module in children if "norm" in f"{name} {type(module).__name__}".lower()]


def _tied(model: nn.Module, tensors: Mapping[str, TensorInfo]) -> tuple[tuple[str, ...], ...]:
    """Names of each tied tensor, the one that a checkpoint holds first."""
    declared: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    joined: list[set[str]] = []
    for names in (*find_tied_parameters(model), *declared.items()):
        group = set(names) & tensors.keys()
        touching = [other for other in joined if other & group]
        joined = [other for other in joined if other not in touching] + [group.union(*touching)]
    sources, order = set(declared.values()), list(tensors)
    return tuple(
        tuple(sorted(group, key=lambda name: (name not in sources, order.index(name))))
        for group in joined
        if len(group) > 1
    )


def _groups(layout: ModelLayout) -> list[tuple[list[str], list[str]]]:
    """What is placed as one, in order: modules and their tensors.

    Modules with tied weights go together, and those of computed buffers alone with the layer that is nearest.
    """
    entries = whole_modules(layout)
    leader = {entry: entry for entry in entries.values()}
    loaded = {entries[name] for name, tensor in layout.tensors.items() if tensor.kind != "computed"}
    for name, entry in entries.items():
        if entry not in loaded:
            leader[entry] = nearest_block(name, layout) or entry
    for first, *others in layout.tied:
        for name in others:
            old, new = leader[entries[name]], leader[entries[first]]
            leader.update({entry: new for entry, current in leader.items() if current == old})
    groups: dict[str, tuple[dict[str, None], list[str]]] = {
        leader[entry]: ({}, []) for entry in entries.values() if entry in loaded
    }
    for name, entry in entries.items():
        modules, names = groups[leader[entry]]
        modules[entry] = None
        names.append(name)
    return [(list(modules), names) for modules, names in groups.values()]


def _light_first(costs: Sequence[int], memory: Sequence[int] | None, num_devices: int) -> tuple[int, ...]:
    """Cuts with as little on the first device as the others allow; balanced where they don't."""
    free = memory or (1,) * num_devices
    for first in range(1, len(costs) - num_devices + 2):
        if memory is not None and sum(costs[first:]) > sum(memory[1:]):
            continue
        if memory is not None and sum(costs[:first]) > memory[0]:
            break
        ends = (0, *balanced_cuts(costs[first:], free[1:]))
        loads = [sum(costs[first + start : first + end]) for start, end in pairwise(ends)]
        if memory is None or all(load <= size for load, size in zip(loads, memory[1:], strict=True)):
            return tuple(first + end for end in ends)
    return balanced_cuts(costs, free)


def _fill(costs: Sequence[int], memory: Sequence[int]) -> tuple[int, ...]:
    """Cuts that fill one device after the other; what no device has room for goes to the last."""
    ends, end = [], 0
    for size in memory:
        load = 0
        while end < len(costs) and load + costs[end] <= size:
            load += costs[end]
            end += 1
        ends.append(end)
    return (*ends[:-1], len(costs))


def _check_room(layer_map: LayerMap, layout: ModelLayout, needs: DeviceNeeds) -> None:
    """Refuses a map that asks more of a device than it has free."""
    memory = needs.memory_bytes
    if memory is None:
        return
    loads = []
    for device in range(layer_map.num_devices):
        names = [name for name, place in layer_map.tensors.items() if place == device]
        loads.append(needs.of(names, layout))
    if all(load <= size for load, size in zip(loads, memory, strict=True)):
        return
    numbers = layer_map.device_numbers or range(layer_map.num_devices)
    each = [
        f"device {number}: {_gib(load)} of {_gib(size)}"
        for number, load, size in zip(numbers, loads, memory, strict=True)
    ]
    found = f"{', '.join(each)} GiB needed; in all {_gib(sum(loads))} of {_gib(sum(memory))} GiB"
    refuse(layer_map.role, "room on each device for its layers", found, _ways(layer_map, layout, needs, memory))


def _ways(layer_map: LayerMap, layout: ModelLayout, needs: DeviceNeeds, memory: Sequence[int]) -> str:
    """What makes a model fit, the least change first."""
    role = f"sharding.roles.{layer_map.role}"
    costs = [needs.of(names, layout) for _, names in _groups(layout)]
    ways = []
    if _fits(costs, memory):
        ways.append(f"{role}.device_map=auto")
    enough = next((n for n in range(len(memory) + 1, _MOST_DEVICES) if _fits(costs, (max(memory),) * n)), None)
    if enough is not None:
        ways.append(f"{enough} devices with {_gib(max(memory))} GiB free each in {role}.devices")
    parameters = [tensor for tensor in layout.tensors.values() if tensor.kind == "parameter"]
    if sum(tensor.num_bytes for tensor in parameters) > 2 * sum(tensor.num_elements for tensor in parameters):
        ways.append(f"{role}.dtype=bfloat16")
    ways.append("offload.params=true for a role that shares these devices")
    return ", or ".join(ways)


def _fits(costs: Sequence[int], memory: Sequence[int]) -> bool:
    """Whether consecutive groups fit the devices in their order."""
    return _fill(costs, (*memory, 0))[-2] == len(costs)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"
