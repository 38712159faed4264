"""Resuming with another number of ranks, or another layout, than the run that saved.

verl writes one file for each rank, of FSDP2's DTensors, and reads it back with the same number of ranks only. A DTensor says
how its parts make the whole: here the parts are put together on the host, one tensor at a time, and this rank takes what
its own model needs of it, be that a shard or, with `layout: device_map`, all of it. Files are mapped into memory, not read
whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from verl_ext_sharding.errors import ConfigError

_NAME = re.compile(r"_world_size_(\d+)_rank_(\d+)\.pt$")


_CONTENTS = {"model": "model", "optim": "optimizer", "extra_state": "extra"}
"""Kinds of files, and their names in `load_contents`."""


@dataclass(kw_only=True, frozen=True)
class LastSave:
    """What verl notes beside the files of a run, when all of them are written.

    Args:
        fsdp_version: 1, 2, or 0 for `layout: device_map`.
        world_size: Number of ranks that saved.
    """

    fsdp_version: int
    world_size: int


def last_save(folder: str, kind: str) -> LastSave | None:
    """The run that saved last into a folder, or None: nothing is noted, or not all files of that run are here.

    Args:
        folder: Local folder of a checkpoint.
        kind: "model", "optim" or "extra_state".
    """
    try:
        noted = json.loads((Path(folder) / "fsdp_config.json").read_text())
        last = LastSave(fsdp_version=int(noted["FSDP_version"]), world_size=int(noted["world_size"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return last if last.world_size in _complete(_found(folder, kind)) else None


def saved_files(folder: str, kind: str, world_size: int | None = None) -> list[Path]:
    """The files of one kind that a run saved, by rank.

    Args:
        folder: Local folder of a checkpoint.
        kind: "model", "optim" or "extra_state".
        world_size: Of several complete sets, the one of so many ranks.

    Raises:
        ConfigError: There are none, some are missing, or they are of several runs.
    """
    found = _found(folder, kind)
    complete = _complete(found)
    if len(complete) == 1 or world_size in complete:
        size, files = (world_size, complete[world_size]) if world_size in complete else next(iter(complete.items()))
        return [files[rank] for rank in range(size)]
    words = ", ".join(f"{len(files)} of {size} ranks" for size, files in sorted(found.items()))
    others = [name for other, name in _CONTENTS.items() if other != kind and _complete(_found(folder, other))]
    without = (
        f"<role>.checkpoint.load_contents=[{','.join(others)}] resumes without; or " if others and not found else ""
    )
    raise ConfigError(
        f"checkpoint {folder}",
        expected=f"one {kind} file for each rank of the run that saved",
        found=words or "none",
        consequence="the run stops",
        remedy=f"{without}trainer.resume_mode=resume_path trainer.resume_from_path=<folder>/global_step_<n> with a complete "
        "checkpoint",
    )


def _found(folder: str, kind: str) -> dict[int, dict[int, Path]]:
    """Files of one kind by number of ranks and rank."""
    found: dict[int, dict[int, Path]] = {}
    for path in Path(folder).glob(f"{kind}_world_size_*_rank_*.pt"):
        match = _NAME.search(path.name)
        if match:
            found.setdefault(int(match[1]), {})[int(match[2])] = path
    return found


def _complete(found: Mapping[int, dict[int, Path]]) -> dict[int, dict[int, Path]]:
    return {size: files for size, files in found.items() if sorted(files) == list(range(size))}


def is_model_cut_alike(saved: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Whether a rank's file of a model holds the very shards that this rank has: same mesh, same dimensions.

    Args:
        saved: The rank's saved state dict.
        current: The model's own state dict.
    """
    return _are_cut_alike((value, current[name]) for name, value in saved.items() if name in current)


def is_optimizer_cut_alike(saved: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> bool:
    """The same of an optimizer's file. Formats of an optimizer's own are not looked at.

    Args:
        saved: The rank's saved state dict.
        parameters: The optimizer's parameters, in the order of its groups.
    """
    if "state" not in saved or "param_groups" not in saved:
        return True
    numbers = _numbers(saved)
    return len(numbers) == len(parameters) and _are_cut_alike(_states(saved, numbers, parameters))


def _numbers(saved: Mapping[str, Any]) -> list[int]:
    return [number for group in saved.get("param_groups", ()) for number in group["params"]]


def _states(
    saved: Mapping[str, Any], numbers: Sequence[int], parameters: Sequence[torch.Tensor]
) -> Iterator[tuple[Any, torch.Tensor]]:
    for number, parameter in zip(numbers, parameters, strict=True):
        for value in saved["state"].get(number, {}).values():
            if _is_like(value, parameter):
                yield value, parameter


def _are_cut_alike(pairs: Iterable[tuple[Any, Any]]) -> bool:
    return all(_cut(value) == _cut(like) for value, like in pairs if isinstance(value, torch.Tensor))


def _cut(tensor: Any) -> Any:
    """How a tensor is cut; None: not at all."""
    if not isinstance(tensor, DTensor):
        return None
    return tuple(tensor.device_mesh.mesh.shape), tuple(tensor.placements)


def fitted_model(parts: Sequence[Mapping[str, Any]], current: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """A model's state dict as this rank's model takes it.

    Args:
        parts: Saved state dicts of all ranks, on the host.
        current: The model's own state dict; its DTensors say which shard this rank holds.
        folder: For messages.

    Raises:
        ConfigError: The files are FSDP1's, whose parts don't say how they fit together.
    """
    return {
        name: fit([part[name] for part in parts], current[name], folder) if name in current else value
        for name, value in parts[0].items()
    }


def fitted_optimizer(
    parts: Sequence[Mapping[str, Any]], parameters: Sequence[torch.Tensor], folder: str
) -> dict[str, Any]:
    """An optimizer's state dict as this rank's optimizer takes it.

    Args:
        parts: Saved state dicts of all ranks, on the host.
        parameters: The optimizer's parameters, in the order of its groups.
        folder: For messages.

    Raises:
        ConfigError: The files are FSDP1's, or of another model.
    """
    first = parts[0]
    numbers = _numbers(first)
    if len(numbers) != len(parameters):
        raise ConfigError(
            f"optimizer states of {folder}",
            expected=f"states of {len(parameters)} parameters",
            found=f"{len(numbers)}: FSDP1's flat parameters, or another model",
            consequence="the run stops",
            remedy="resume with strategy=fsdp on as many devices, or without the optimizer: "
            "<role>.checkpoint.load_contents=[model,extra]",
        )
    states = {}
    for number, parameter in zip(numbers, parameters, strict=True):
        saved = [part["state"].get(number, {}) for part in parts]
        states[number] = {
            name: fit([one[name] for one in saved], parameter, folder) if _is_like(value, parameter) else value
            for name, value in saved[0].items()
        }
    return {**first, "state": states}


def fit(parts: Sequence[Any], like: Any, folder: str) -> Any:
    """One saved tensor as this rank needs it.

    Args:
        parts: What each rank saved: DTensors, or whole tensors.
        like: This rank's tensor: a DTensor, or a whole one.
        folder: For messages.
    """
    whole = _whole(parts, folder)
    if not isinstance(like, DTensor) or not isinstance(whole, torch.Tensor):
        return whole
    mesh = like.device_mesh
    local = distribute_tensor(whole.to(mesh.device_type), mesh, like.placements, src_data_rank=None)
    return local.to("cpu") if mesh.device_type != "cpu" else local


def _whole(parts: Sequence[Any], folder: str) -> Any:
    first = parts[0]
    if hasattr(first, "local_shards"):  # FSDP1's ShardedTensor, which is a tensor too
        raise _fsdp1(folder)
    if not isinstance(first, DTensor):
        return first  # whole in every file, or no tensor
    placements, mesh = first.placements, first.device_mesh.mesh
    local = [part._local_tensor for part in parts]
    sharded = [axis for axis, placement in enumerate(placements) if isinstance(placement, Shard)]
    if not all(isinstance(placement, Shard | Replicate) for placement in placements) or len(sharded) > 1:
        raise _fsdp1(folder)
    if not sharded:
        return local[0]
    axis = sharded[0]
    ranks = mesh.select(1 - axis, 0) if mesh.dim() == 2 else mesh  # one replica holds the whole
    dim = placements[axis].dim
    return torch.cat([local[rank] for rank in ranks.flatten().tolist()], dim=dim).narrow(dim, 0, first.shape[dim])


def _is_like(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _fsdp1(folder: str) -> ConfigError:
    return ConfigError(
        f"checkpoint {folder}",
        expected="files of FSDP2 (strategy=fsdp2) or of layout=device_map, to resume with another number of ranks",
        found="files of FSDP1",
        consequence="the run stops",
        remedy="resume on as many devices for this role, or start from merged weights: python -m verl.model_merger merge "
        f"--backend fsdp --local_dir {folder} --target_dir <folder>, then <role>.model.path=<folder>",
    )
