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
import pickle
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from verl.plugin.platform import get_platform
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.device import get_device_id
from verl.utils.fs import copy_to_local, exists, is_non_local
from verl.utils.fsdp_utils import fsdp_version, get_fsdp_state_ctx, offload_fsdp_model_to_cpu

from verl_ext_sharding.config import spec
from verl_ext_sharding.config.measures import RoleMeasures
from verl_ext_sharding.config.saved_contents import CHECKPOINT_BLOCK, SFT_CHECKPOINT_BLOCK, more_than_adapters
from verl_ext_sharding.engines import reshard
from verl_ext_sharding.engines.optimizer_states import Where, load_optimizer
from verl_ext_sharding.errors import ClusterError, ConfigError, first_line

logger = logging.getLogger(__name__)


class HostCheckpointMixin:
    """Added in front of one of verl's FSDP engines: resumes by way of the host."""

    role: str
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
            block=self._checkpoint_block(),
        )

    def _checkpoint_block(self) -> str:
        if spec.is_sft():
            return SFT_CHECKPOINT_BLOCK
        return CHECKPOINT_BLOCK.get(self.role, CHECKPOINT_BLOCK["actor"])

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
    """verl's checkpoint manager with another way to load; what it saves is the same, and if it can't, it says why.

    Args:
        step_device: Where the optimizer steps, see `load_optimizer`.
        state_device: Where its states are between phases.
        block: Block of verl's config that says what is saved.
    """

    def __init__(self, *args: Any, step_device: Where, state_device: Where, block: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.step_device = step_device
        self.state_device = state_device
        self.block = block

    def save_checkpoint(self, local_path: str | None, *args: Any, **kwargs: Any) -> None:
        """As verl's.

        Raises:
            ClusterError: A file could not be written.
            ConfigError: More is trained than what `save_lora_only` saves.
        """
        if self.should_save_model and self.should_save_lora_only and (trained := self._trained_beside_adapters()):
            raise more_than_adapters(
                self.block, f"{len(trained)} more, such as {trained[0]}", consequence="the run stops"
            )
        try:
            super().save_checkpoint(local_path, *args, **kwargs)
        except Exception as error:
            if local_path is None or not _is_of_writing(error):
                raise
            raise _unsaved(local_path, error) from error

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
            ConfigError: Files are missing, cut short, or of another number of ranks and of FSDP1 or in a remote folder.
        """
        if local_path is None:
            return
        if "hf_model" in self.checkpoint_load_contents and not self.should_load_model:
            raise _hf_model_alone(local_path)
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
            if adapters_only and (trained := self._trained_beside_adapters()):
                raise _adapters_alone(folder, trained, self.block)
            result = self.model.load_state_dict(saved, strict=not adapters_only)
        if adapters_only and result is not None and result.unexpected_keys:
            raise _other_adapters(folder, result.unexpected_keys)

    def _trained_beside_adapters(self) -> list[str]:
        """What is trained and not taken for a part of adapters by verl, which goes by names."""
        if not self._has_lora():
            return []
        trained = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        return [name for name in trained if "lora_" not in name and ".adapter_" not in name]

    def _load_extra(self, saved: Mapping[str, Any]) -> None:
        if "rng" in saved:
            self.load_rng_state(saved["rng"])
        if saved["lr_scheduler"] is not None and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(saved["lr_scheduler"])

    def _read(self, folder: str, kind: str, files: list[str]) -> dict[str, Any]:
        """What this rank needs of one kind; the files that were read are added to `files`."""
        own = os.path.join(folder, f"{kind}_world_size_{self.world_size}_rank_{self.rank}.pt")
        remote = is_non_local(folder)
        if remote and not exists(own):
            raise _remote_of_other_ranks(folder, own)
        last = None if remote else reshard.last_save(folder, kind)
        if last is not None and kind != "extra_state":
            self._refuse_other_fsdp(folder, kind, last)
        # a folder that was saved into twice may have files of our own number that are the older ones
        older = last is not None and last.world_size != self.world_size
        if remote or (os.path.exists(own) and not older):
            files.append(copy_to_local(own))
            saved = load_on_host(files[-1])
            if kind == "extra_state" or self._is_cut_alike(kind, saved):
                return saved
            if remote and self.world_size > 1:
                raise _remote_of_other_ranks(folder, own)
            paths = [Path(files[-1])] if remote else reshard.saved_files(folder, kind, self.world_size)
        else:
            paths = reshard.saved_files(folder, kind, last.world_size if last is not None else None)
            if kind == "extra_state":
                return load_on_host(str(paths[0]))
            if fsdp_version(self.model) == 1:
                raise _fsdp1_of_other_ranks(folder, kind, len(paths), self.world_size)
        if self.rank == 0:
            logger.info("%s of %s: saved by %d ranks, cut anew for %d", kind, folder, len(paths), self.world_size)
        parts = [load_on_host(str(path)) for path in paths]
        if kind == "model":
            return reshard.fitted_model(parts, self.model.state_dict(), folder)
        return reshard.fitted_optimizer(parts, self._parameters(), folder)

    def _is_cut_alike(self, kind: str, saved: Mapping[str, Any]) -> bool:
        """Whether this rank's file is for it as it is: files of one name are written by every layout and `fsdp_size`."""
        if fsdp_version(self.model) == 1:
            return True  # it gathers and cuts by itself
        if kind == "model":
            return reshard.is_model_cut_alike(saved, self.model.state_dict())
        return reshard.is_optimizer_cut_alike(saved, self._parameters())

    def _refuse_other_fsdp(self, folder: str, kind: str, last: reshard.LastSave) -> None:
        """FSDP1 keeps optimizer states of flat parameters, which are no one else's, and reads no whole tensors."""
        ours, theirs = fsdp_version(self.model), last.fsdp_version
        if ours == theirs or (1 not in (ours, theirs) if kind == "optim" else (ours, theirs) != (1, 0)):
            return
        raise _other_fsdp(folder, kind, ours=ours, theirs=theirs)

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


def load_on_host(file: str) -> dict[str, Any]:
    """Loads a file whose tensors are then on the host, mapped from the file where its format allows.

    Args:
        file: Written by `torch.save`.

    Raises:
        ConfigError: The file is not whole.
    """
    mapped = zipfile.is_zipfile(file)  # not the format before torch 1.6
    try:
        loaded: dict[str, Any] = torch.load(file, map_location="cpu", mmap=mapped, weights_only=False)
    except (EOFError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        if getattr(error, "filename", None) is not None or "unable to mmap" in str(error):
            raise  # the system's own, which says what it could not do
        raise _cut_short(file, error) from error
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


def _is_of_writing(error: Exception) -> bool:
    """torch and safetensors have errors of their own for a disk that is full."""
    if isinstance(error, RuntimeError):
        return "PytorchStreamWriter" in str(error) or "inline_container" in str(error)
    return isinstance(error, OSError) or type(error).__name__ == "SafetensorError"


def _unsaved(folder: str, error: Exception) -> ClusterError:
    there = Path(folder).absolute()
    while not there.exists():
        there = there.parent
    free_gib = shutil.disk_usage(there).free / 2**30
    return ClusterError(
        f"checkpoint {folder}",
        expected="a folder that can be written to, with room for the checkpoint",
        found=f"{first_line(error)}; {free_gib:.1f} GiB free in {there}",
        consequence="the run stops; trainer.resume_mode=auto goes on from the checkpoint before this one",
        remedy="trainer.default_local_dir=<a folder with room>, or fewer files: <role>.checkpoint.save_contents, "
        "trainer.max_actor_ckpt_to_keep, trainer.max_critic_ckpt_to_keep",
    )


_STRATEGY = {0: "layout=device_map", 1: "strategy=fsdp", 2: "strategy=fsdp2"}


def _other_fsdp(folder: str, kind: str, *, ours: int, theirs: int) -> ConfigError:
    without = (
        "" if ours == 1 and theirs == 0 else "; or without the optimizer: <role>.checkpoint.load_contents=[model,extra]"
    )
    return ConfigError(
        f"checkpoint {folder}",
        expected=f"{kind} files that {_STRATEGY[ours]} can read",
        found=f"files of {_STRATEGY.get(theirs, theirs)}",
        consequence="the run stops",
        remedy=f"{'strategy=fsdp2' if ours == 1 else _STRATEGY[1]} for this role{without}",
    )


def _hf_model_alone(folder: str) -> ConfigError:
    return ConfigError(
        f"checkpoint {folder}",
        expected="`model` in <role>.checkpoint.load_contents, which is what is resumed from",
        found="`hf_model` without it, which verl saves for others and does not load",
        consequence="the run stops, since it would go on from the step with the weights of <role>.model.path",
        remedy=f"trainer.resume_mode=disable <role>.model.path={folder}/huggingface, and save_contents=[model,hf_model] from now on",
    )


def _cut_short(file: str, error: Exception) -> ConfigError:
    size_bytes = os.path.getsize(file)
    return ConfigError(
        f"checkpoint file {file}",
        expected="a whole file",
        found=f"{size_bytes} bytes that end early or are damaged ({first_line(error)})",
        consequence="the run stops",
        remedy="trainer.resume_mode=resume_path trainer.resume_from_path=<folder>/global_step_<n> with an earlier checkpoint",
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


def _adapters_alone(folder: str, trained: list[str], block: str) -> ConfigError:
    return ConfigError(
        f"checkpoint {folder}",
        expected="all that is trained",
        found=f"adapters alone, without {trained[0]}" + (f" and {len(trained) - 1} more" if trained[1:] else ""),
        consequence="the run stops, since these would start again from where the first run started",
        remedy=f"trainer.resume_mode=disable ++{block}.save_lora_only=False",
    )
