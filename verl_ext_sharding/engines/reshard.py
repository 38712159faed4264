"""Resuming with another number of ranks, or another layout, than the run that saved.

verl writes one file for each rank, of FSDP2's DTensors, and reads it back with the same number of ranks only. A DTensor says
how its parts make the whole: here the parts are put together on the host, one tensor at a time, and this rank takes what
its own model needs of it, be that a shard or, with `layout: device_map`, all of it. Files are mapped into memory, not read
whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from verl_ext_sharding.errors import ConfigError

_NAME = re.compile(r"_world_size_(\d+)_rank_(\d+)\.pt$")


def saved_files(folder: str, kind: str) -> list[Path]:
    """The files of one kind that a run saved, by rank.

    Args:
        folder: Local folder of a checkpoint.
        kind: "model", "optim" or "extra_state".

    Raises:
        ConfigError: There are none, some are missing, or they are of several runs.
    """
    found: dict[int, dict[int, Path]] = {}
    for path in Path(folder).glob(f"{kind}_world_size_*_rank_*.pt"):
        match = _NAME.search(path.name)
        if match:
            found.setdefault(int(match[1]), {})[int(match[2])] = path
    complete = {size: files for size, files in found.items() if sorted(files) == list(range(size))}
    if len(complete) == 1:
        ((size, files),) = complete.items()
        return [files[rank] for rank in range(size)]
    words = ", ".join(f"{len(files)} of {size} ranks" for size, files in sorted(found.items()))
    raise ConfigError(
        f"checkpoint {folder}",
        expected=f"one {kind} file for each rank of the run that saved",
        found=words or "none",
        consequence="the run stops",
        remedy="trainer.resume_mode=resume_path trainer.resume_from_path=<folder>/global_step_<n> with a complete checkpoint",
    )


def is_sharded(saved: Mapping[str, Any]) -> bool:
    """Whether a rank's state dict of a model or an optimizer holds DTensors."""
    values = saved["state"].values() if "state" in saved and "param_groups" in saved else [saved]
    return any(isinstance(tensor, DTensor) for value in values for tensor in value.values())


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
    numbers = [number for group in first.get("param_groups", ()) for number in group["params"]]
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
