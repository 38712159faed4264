"""verl's FSDP engine without FSDP: one process, one copy of the model, its layers on several devices.

Everything that is about batches, losses, log-probs, optimizer and schedule is verl's; what is different is where weights
are, and so: building, moving, saving, loading, and handing weights to the rollout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from verl.plugin.platform import get_platform
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import normalize_peft_param_name
from verl.utils.model import convert_weight_keys
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import BaseEngine
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from verl_ext_sharding.config.measures import LayerSpread
from verl_ext_sharding.engines.measured import MeasuredEngineMixin
from verl_ext_sharding.engines.meta_models import meta_model
from verl_ext_sharding.engines.optimizer_states import Where, move_states
from verl_ext_sharding.errors import PlacementError, first_line
from verl_ext_sharding.placement.device_map import HOST, LayerMap, LayerRow, Place, rows
from verl_ext_sharding.training import alignment, compute_dtype, gradient_norm
from verl_ext_sharding.training.layer_map import DeviceNeeds, plan_layers

logger = logging.getLogger(__name__)

_GROWTH_INTERVAL = 400
"""Steps between growths of the loss scale, as verl has them for FSDP."""

_STATES = 2
"""Tensors that AdamW keeps for each parameter, in the parameter's dtype."""


class DeviceMapEngineMixin(MeasuredEngineMixin):
    """In front of one of verl's FSDP engines, in a process group of one rank."""

    optimizer: torch.optim.Optimizer | None
    optimizer_config: Any
    checkpoint_manager: Any
    _is_lora: bool
    layer_map: LayerMap
    homes: dict[str, torch.device]
    """Device of each parameter and buffer while the model is in use."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ranks = torch.distributed.get_world_size()
        if ranks > 1:
            raise PlacementError(
                f"sharding.roles.{self.role}.layout=device_map",
                expected="one process, which holds the whole model",
                found=f"{ranks} ranks",
                consequence="the run stops before the model loads",
                remedy=f"sharding.roles.{self.role}.layout=fsdp shards the model over the ranks",
            )
        self.spread = self.measures.layers or LayerSpread(devices=tuple(range(get_platform().device_count())))
        self.devices = _devices(len(self.spread.devices))

    # Building

    def _build_module(self) -> nn.Module:
        self.layer_map = self._plan_layers()  # a wrong map is an error before any weight is read
        module: nn.Module = super()._build_module()
        self.homes = {name: self.device_of(place) for name, place in self.layer_map.tensors.items()}
        _move(module, self.homes)
        return module

    def _plan_layers(self) -> LayerMap:
        dtype = self._stored_dtype()
        model = meta_model(
            self.model_config.hf_config,
            role=self.role,
            model_type=self.model_config.model_type,
            trust_remote_code=self.model_config.trust_remote_code,
        )
        if self._is_lora:
            model.requires_grad_(False)
        trains = not self.engine_config.forward_only
        return plan_layers(
            model,
            self.spread.device_map,
            role=self.role,
            num_devices=len(self.devices),
            device_numbers=self.spread.devices,
            dtype=dtype,
            needs=DeviceNeeds(
                memory_bytes=_free_bytes(self.devices, self.spread),
                extra_bytes_per_parameter=(1 + _STATES) * dtype.itemsize if trains else 0.0,
            ),
        )

    def _stored_dtype(self) -> torch.dtype:
        """As verl's `_build_module` chooses it."""
        asked = self.engine_config.model_dtype
        if asked is None:
            return torch.bfloat16 if self.engine_config.forward_only else torch.float32
        dtype: torch.dtype = PrecisionType.to_dtype(asked)
        return dtype

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        """The model as it is used: measures, compute dtype and alignment in place of sharding."""
        self._apply_measures(module)
        self._autocast_dtype = self._compute_dtype()
        self.scaler = None
        if self._autocast_dtype == torch.float16:
            self.scaler = torch.amp.GradScaler(get_platform().device_name, growth_interval=_GROWTH_INTERVAL)
        compute_dtype.apply(module, self._autocast_dtype)
        alignment.apply(module, output_device=self.devices[0])
        self.homes = {name: tensor.device for name, tensor in _tensors(module)}  # of adapters and moved buffers too
        self.applied["layers"] = ", ".join(f"{row.modules}: {row.place}" for row in self.rows())
        return module

    def _layers_device_type(self) -> str:
        on_host = HOST in self.layer_map.modules.values()  # compiling for a CPU takes minutes and is asked for by hand
        return "cpu" if on_host else super()._layers_device_type()

    def device_of(self, place: Place) -> torch.device:
        """The device of a place of the map."""
        return torch.device("cpu") if place == HOST else self.devices[int(place)]

    def rows(self) -> tuple[LayerRow, ...]:
        """Module, place and bytes as loaded."""
        return rows(self.layer_map, num_states=0 if self.engine_config.forward_only or self._is_lora else 1 + _STATES)

    # Computing

    def forward_backward_batch(self, *args: Any, **kwargs: Any) -> Any:
        """As verl's, in the compute dtype."""
        with compute_dtype.computing():
            return super().forward_backward_batch(*args, **kwargs)  # type: ignore[misc]

    def train_batch(self, data: Any, loss_function: Callable[..., Any]) -> Any:
        """As verl's; adds the peak of each device, of which verl's own metric knows the first."""
        outputs = super().train_batch(data, loss_function)
        if get_platform().device_name != "cpu":
            for number, device in zip(self.spread.devices, self.devices, strict=True):
                peak_gib = torch.get_device_module(device.type).max_memory_allocated(device) / 2**30
                outputs["metrics"][f"max_memory_allocated_gb/device_{number}"] = [peak_gib]
        return outputs

    def optimizer_step(self) -> float:
        """As verl's; where gradients lie on host and devices, they are clipped before verl finds nothing left to clip."""
        step: Callable[[], float] = super().optimizer_step  # type: ignore[misc]
        scaled = self.scaler is not None  # verl unscales them first
        if scaled or len({home.type for home in self.homes.values()}) == 1:
            return step()
        norm = gradient_norm.clip(self.module.parameters(), self.optimizer_config.clip_grad)
        step()
        return norm

    # Moving

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Moves weights, gradients and optimizer states to the host, or each to its device.

        Args:
            device: "cpu", or the platform's device type for the map's devices.
            model: Parameters and buffers.
            optimizer: Optimizer states, unless they come to the devices for the step alone.
            grad: Gradients.
        """
        BaseEngine.to(self, device=device, model=model, optimizer=optimizer, grad=grad)
        host = torch.device("cpu") if device == "cpu" else None
        if model:
            _move(self.module, {name: host or home for name, home in self.homes.items()}, grad=grad)
        if optimizer and self.optimizer is not None and not self.measures.optimizer_per_step:
            move_states(self.optimizer, host or self._step_device(), counters=True)
        for used in set(self.devices):  # the host may be read as soon as this returns
            if used.type != "cpu":
                torch.get_device_module(used.type).synchronize(used)
        get_platform().empty_cache()

    def _parameter_homes(self) -> Iterator[tuple[nn.Parameter, torch.device]]:
        for name, parameter in self.module.named_parameters():
            yield parameter, self.homes[name]

    # Saving and loading

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Saves the files that verl's engine saves with one rank, from wherever the weights are."""
        self.checkpoint_manager.save_checkpoint(
            local_path=local_path, hdfs_path=hdfs_path, global_step=global_step, max_ckpt_to_keep=max_ckpt_to_keep
        )

    def _step_device(self) -> Where:
        homes = {id(parameter): home for parameter, home in self._parameter_homes()}
        return lambda parameter: homes[id(parameter)]

    # Weights for the rollout

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, Any] | None]:
        """Names and tensors of the weights, each on the first device by the time that it is yielded.

        Args:
            layered_summon: Of FSDP, without effect here: one tensor at a time comes to the device.
            base_sync_done: With LoRA: whether the rollout has the base weights, and wants adapters alone.

        Returns:
            The tensors, and the LoRA config if they are not merged.
        """
        adapters = getattr(self.module, "peft_config", None)
        if adapters is None:
            state = convert_weight_keys(self.module.state_dict(), self.module)
            return unfuse_moe_params(self._on_first_device(state), self.model_config.hf_config.model_type), None
        if self.model_config.lora.get("merge", False):
            return unfuse_moe_params(self._merged(), self.model_config.hf_config.model_type), None
        config = adapters["default"]
        if base_sync_done:
            from peft.utils.save_and_load import get_peft_model_state_dict

            params = get_peft_model_state_dict(self.module)
        else:
            from verl.utils.fsdp_utils import replace_lora_wrapper

            base = normalize_peft_param_name(self.module.state_dict())
            params = {replace_lora_wrapper(name, config): value for name, value in base.items()}
        tensors = self._on_first_device(convert_weight_keys(params, self.module))
        if not base_sync_done:
            tensors = unfuse_moe_params(tensors, self.model_config.hf_config.model_type)
        return tensors, config.to_dict()

    def _on_first_device(self, params: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        device = get_device_id()
        for name, value in params.items():
            yield name, value.detach().to(device, non_blocking=True)


def _devices(count: int) -> tuple[torch.device, ...]:
    """The devices that this process sees, in the order of the role's list."""
    platform = get_platform()
    if platform.device_name == "cpu":
        return (torch.device("cpu"),) * count
    devices = tuple(torch.device(platform.device_name, index) for index in range(count))
    try:
        for device in devices:
            torch.empty(1, device=device)  # counting them does not tell whether CUDA started with all of them
    except (RuntimeError, AssertionError) as error:
        raise PlacementError(
            "layout=device_map",
            expected=f"{count} devices that this process can use",
            found=f"{platform.device_count()} visible; {first_line(error)}",
            consequence="the run stops before the model loads",
            remedy="check that nothing in this environment starts CUDA when Python starts; else report this with the output of "
            "`verl-sharding doctor`",
        ) from error
    return devices


def _free_bytes(devices: tuple[torch.device, ...], spread: LayerSpread) -> tuple[int, ...] | None:
    """What the role may use of each device: what is free now, and of what it may use at all, what others need not keep."""
    reserved = spread.reserved_bytes or (0,) * len(devices)
    if devices[0].type == "cpu":
        whole = spread.device_bytes
        return None if whole is None else tuple(max(0, whole - kept) for kept in reserved)
    found = []
    for device, kept in zip(devices, reserved, strict=True):
        free, total = torch.get_device_module(device.type).mem_get_info(device)
        found.append(max(0, min(free, min(total, spread.device_bytes or total) - kept)))
    return tuple(found)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


@torch.no_grad()
def _move(module: nn.Module, homes: dict[str, torch.device], *, grad: bool = False) -> None:
    """Moves each parameter and buffer; parameters stay the same objects, so that tied ones stay tied."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        parameter.data = _sent(parameter.data, homes[name])
        if grad and parameter.grad is not None:
            parameter.grad = _sent(parameter.grad, homes[name])
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = _sent(buffer, homes[f"{prefix}.{name}".lstrip(".")])


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)
