"""Resuming needs no more device memory than the run that saved: shards come from the file through the host, into place.

verl's `FSDPCheckpointManager.load_checkpoint` loads without `map_location`, so that each shard comes to life on the
device that it was saved from, beside the parameters and optimizer states that it is for (verl#7286). Here the files are
mapped into host memory and copied tensor by tensor to where the run keeps the values between phases: with parameters or
optimizer states offloaded, nothing of them touches the device.
"""

from __future__ import annotations

import contextlib
import logging
import os
import zipfile
from collections.abc import Mapping
from typing import Any

import torch
from verl.plugin.platform import get_platform
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.device import get_device_id
from verl.utils.fs import copy_to_local, exists, is_non_local
from verl.utils.fsdp_utils import fsdp_version, get_fsdp_state_ctx, offload_fsdp_model_to_cpu

from verl_ext_sharding.config.measures import RoleMeasures
from verl_ext_sharding.engines import reshard
from verl_ext_sharding.engines.optimizer_states import Where, load_optimizer
from verl_ext_sharding.errors import ConfigError

logger = logging.getLogger(__name__)


class HostCheckpointMixin:
    """Added in front of one of verl's FSDP engines: resumes by way of the host."""

    model_config: Any
    checkpoint_config: Any
    checkpoint_manager: Any
    lr_scheduler: Any
    optimizer: torch.optim.Optimizer | None
    module: torch.nn.Module
    measures: RoleMeasures
    _is_offload_param: bool
    _is_offload_optimizer: bool
    _uses_fsdp2_cpu_offload_policy: bool

    def initialize(self) -> None:
        """As verl's, with a checkpoint manager that loads by way of the host."""
        super().initialize()  # type: ignore[misc]
        if type(self.checkpoint_manager) is not FSDPCheckpointManager:
            return  # a recipe's own
        self.checkpoint_manager = HostCheckpointManager(
            model=self.module,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            processing_class=self.model_config.get_processor(),
            checkpoint_config=self.checkpoint_config,
            trust_remote_code=self.model_config.trust_remote_code,
            step_device=self._step_device(),
            state_device=self._state_device(),
        )

    def _step_device(self) -> Where:
        """Where the optimizer steps."""
        return torch.device("cpu") if self._uses_fsdp2_cpu_offload_policy else _device()

    def _state_device(self) -> Where:
        """Where its states are between phases."""
        away = self._is_offload_optimizer or self.measures.optimizer_per_step
        return torch.device("cpu") if away else self._step_device()

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As verl's; parameters that are offloaded with FSDP2 stay on the host. FSDP1 gathers them on the device."""
        if not self._is_offload_param or fsdp_version(self.module) == 1:
            super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
            return
        self._is_offload_param = False  # verl's would bring them to the device and back
        try:
            super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._is_offload_param = True
        offload_fsdp_model_to_cpu(self.module)  # where something had brought them to the device


class HostCheckpointManager(FSDPCheckpointManager):  # type: ignore[misc, unused-ignore]
    """verl's checkpoint manager with another way to load; what it saves is the same.

    Args:
        step_device: Where the optimizer steps, see `load_optimizer`.
        state_device: Where its states are between phases.
    """

    def __init__(self, *args: Any, step_device: Where, state_device: Where, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.step_device = step_device
        self.state_device = state_device

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Loads what `load_contents` names: this rank's shards of model and optimizer, schedule and random states.

        Args:
            local_path: Folder with the files of each rank, local or remote; None: nothing is loaded.
            hdfs_path: Not looked at, as in verl.
            del_local_after_load: Rank 0 removes its files afterwards, where verl would.

        A checkpoint of another number of ranks, or of another layout, is cut anew for this one (`reshard`); of random
        states, every rank then goes on with those of the first.

        Raises:
            ConfigError: Files are missing, or of another number of ranks and of FSDP1 or in a remote folder.
        """
        if local_path is None:
            return
        get_platform().synchronize()  # copies to the host may still be under way, and would come after ours
        files: list[str] = []
        if self.should_load_model:
            assert self.model is not None
            self._load_model(self._read(local_path, "model", files), local_path)
        if self.should_load_optimizer:
            assert self.optimizer is not None
            saved = self._backfill_optimizer_state(self._read(local_path, "optim", files))
            load_optimizer(self.optimizer, saved, step_device=self.step_device, state_device=self.state_device)
        if self.should_load_extra:
            self._load_extra(self._read(local_path, "extra_state", files))
        if self.rank == 0 and del_local_after_load:
            for file in filter(is_non_local, files):
                with contextlib.suppress(OSError):
                    os.remove(file)
        torch.distributed.barrier()

    def _load_model(self, saved: dict[str, Any], folder: str) -> None:
        with get_fsdp_state_ctx(self.model, *_sharded_on_host()):
            adapters_only = self.is_lora_only_state_dict(saved)
            result = self.model.load_state_dict(saved, strict=not adapters_only)
        if adapters_only and result is not None and result.unexpected_keys:
            raise _other_adapters(folder, result.unexpected_keys)

    def _load_extra(self, saved: Mapping[str, Any]) -> None:
        if "rng" in saved:
            self.load_rng_state(saved["rng"])
        if saved["lr_scheduler"] is not None and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(saved["lr_scheduler"])

    def _read(self, folder: str, kind: str, files: list[str]) -> dict[str, Any]:
        """What this rank needs of one kind; the files that were read are added to `files`."""
        own = os.path.join(folder, f"{kind}_world_size_{self.world_size}_rank_{self.rank}.pt")
        if is_non_local(folder) and not exists(own):
            raise _remote_of_other_ranks(folder, own)
        if is_non_local(folder) or os.path.exists(own):
            files.append(copy_to_local(own))
            saved = load_on_host(files[-1])
            # with one rank, every layout writes files of the same name
            version = fsdp_version(self.model)
            as_saved = version == 1 or (version == 2 and reshard.is_sharded(saved))
            if self.world_size > 1 or kind == "extra_state" or as_saved:
                return saved
            parts = [saved]
        else:
            paths = reshard.saved_files(folder, kind)
            if kind == "extra_state":
                return load_on_host(str(paths[0]))
            if fsdp_version(self.model) == 1:
                raise _fsdp1_of_other_ranks(folder, kind, len(paths), self.world_size)
            if self.rank == 0:
                logger.info("%s of %s: saved by %d ranks, cut anew for %d", kind, folder, len(paths), self.world_size)
            parts = [load_on_host(str(path)) for path in paths]
        if kind == "model":
            return reshard.fitted_model(parts, self.model.state_dict(), folder)
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return reshard.fitted_optimizer(parts, parameters, folder)


def load_on_host(file: str) -> dict[str, Any]:
    """Loads a file whose tensors are then on the host, mapped from the file where its format allows.

    Args:
        file: Written by `torch.save`.
    """
    mapped = zipfile.is_zipfile(file)  # not the format before torch 1.6
    loaded: dict[str, Any] = torch.load(file, map_location="cpu", mmap=mapped, weights_only=False)
    return loaded


def _sharded_on_host() -> tuple[Any, Any, Any]:
    """What verl asks of FSDP1 for a checkpoint; FSDP2 does not look at it."""
    from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType

    to_host = get_platform().device_name == "cuda"
    return (
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=to_host),
        ShardedOptimStateDictConfig(offload_to_cpu=to_host),
    )


def _device() -> torch.device:
    current = get_device_id()
    if isinstance(current, torch.device):
        return current  # the CPU platform's
    return torch.device(get_platform().device_name, current)


def _fsdp1_of_other_ranks(folder: str, kind: str, saved_by: int, world_size: int) -> ConfigError:
    return ConfigError(
        f"checkpoint {folder}",
        expected=f"{kind} files of {world_size} ranks: FSDP1 reads no others",
        found=f"files of {saved_by} ranks",
        consequence="the run stops",
        remedy="strategy=fsdp2 for this role reads files of FSDP2 whatever their number; or resume on as many devices",
    )


def _remote_of_other_ranks(folder: str, own: str) -> ConfigError:
    return ConfigError(
        f"checkpoint {folder}",
        expected=f"{os.path.basename(own)}: of a remote folder, each rank reads the file of its own number",
        found="no such file, so that another number of ranks has saved it, or none",
        consequence="the run stops",
        remedy="copy the checkpoint to a folder that all nodes see, where it is cut anew for other ranks, and set "
        "trainer.resume_mode=resume_path trainer.resume_from_path=<folder>/global_step_<n>",
    )


def _other_adapters(folder: str, unexpected: list[str]) -> ConfigError:
    return ConfigError(
        f"checkpoint {folder}",
        expected="adapters that this model has",
        found=f"{len(unexpected)} others, such as {unexpected[0]}",
        consequence="the run stops",
        remedy="set lora_rank, target_modules and exclude_modules as in the run that saved",
    )
