"""Keeps optimizer states on the host and brings them to the device for the step alone.

verl's own `optimizer_offload` brings the states to the device for the whole update, forward and backward passes
included, where they sit beside the activations. Here they are away then: 8 bytes for each parameter of Adam in fp32.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

_OFFLOADERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, StateOffloader] = weakref.WeakKeyDictionary()


class StateOffloader:
    """The states of one optimizer on the host; one for each application.

    Args:
        min_bytes: Smaller states (step counters, shards of biases) stay on the device.
    """

    def __init__(self, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self.handles: list[Any] = []
        self._homes: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def to_device(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Brings the states to the device of their parameters."""
        for parameter, states in optimizer.state.items():
            for name, value in list(states.items()):
                if not isinstance(value, torch.Tensor):
                    continue
                if self._home(parameter, name) is value:
                    states[name] = _copied(value, parameter.device)
                elif value.dim() > 0 and value.device != parameter.device:
                    # too small to be ours: a checkpoint was loaded to the host, and nobody else brings it to the step
                    states[name] = value.to(parameter.device)

    def to_host(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Moves the states to the host; when it returns, they can be read there."""
        devices = set()
        pin = torch.accelerator.is_available()
        for parameter, name, value in self._states(optimizer):
            home = self._home(parameter, name)
            if home is value:
                continue
            if value.device.type == "cpu" and parameter.device.type != "cpu":
                self._homes.setdefault(parameter, {})[name] = value  # a checkpoint was loaded to the host
                continue
            if not is_dense(value):
                moved = value.to("cpu", copy=True)
                self._homes.setdefault(parameter, {})[name] = optimizer.state[parameter][name] = moved
                continue
            if home is None or home.shape != value.shape or home.dtype != value.dtype:
                home = torch.empty_like(value, device="cpu", pin_memory=pin)
                self._homes.setdefault(parameter, {})[name] = home
            home.copy_(value.detach(), non_blocking=True)
            optimizer.state[parameter][name] = home
            devices.add(value.device)
        for device in devices:
            if device.type != "cpu":
                torch.get_device_module(device.type).current_stream(device).synchronize()

    def host_bytes(self, optimizer: torch.optim.Optimizer) -> int:
        """Bytes of this rank's states that are on the host by this offload."""
        return sum(_num_bytes(v) for p, name, v in self._states(optimizer) if self._home(p, name) is v)

    def device_bytes(self, optimizer: torch.optim.Optimizer) -> int:
        """Bytes of this rank's states, step counters aside, that are with the parameters."""
        return sum(_num_bytes(v) for p, name, v in self._states(optimizer) if self._home(p, name) is not v)

    def _home(self, parameter: torch.Tensor, name: str) -> torch.Tensor | None:
        return self._homes.get(parameter, {}).get(name)

    def _states(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        for parameter, states in optimizer.state.items():
            for name, value in list(states.items()):
                if isinstance(value, torch.Tensor) and _num_bytes(value) >= self.min_bytes:
                    yield parameter, name, value


@dataclass(frozen=True, kw_only=True)
class OptimizerStateOffload:
    """Keeps optimizer states on the host during forward and backward, and on the device for the step.

    Works with every optimizer that runs torch's step hooks (all subclasses of `torch.optim.Optimizer`), with plain,
    DTensor and quantised states. `state_dict` shows the same keys and values, on the host; `load_state_dict` puts what it loads
    on the host. Not together with FSDP2's `offload_policy`, whose states live on the host already.

    Args:
        min_bytes: Smaller states (step counters, shards of biases) stay on the device.
    """

    min_bytes: int = 1024

    def apply(self, optimizer: torch.optim.Optimizer) -> StateOffloader:
        """Moves the states that exist to the host, and each later one after the step that makes it. Twice is once."""
        current = _OFFLOADERS.get(optimizer)
        if current is not None and current.min_bytes == self.min_bytes:
            return current
        self.remove(optimizer)
        offloader = StateOffloader(self.min_bytes)
        offloader.handles = [
            optimizer.register_step_pre_hook(offloader.to_device),
            optimizer.register_step_post_hook(offloader.to_host),
            optimizer.register_load_state_dict_post_hook(offloader.to_host),
        ]
        _OFFLOADERS[optimizer] = offloader
        offloader.to_host(optimizer)
        logger.info("optimizer states of %s stay on the host between steps", type(optimizer).__name__)
        return offloader

    def remove(self, optimizer: torch.optim.Optimizer) -> None:
        """Brings the states back to the device and takes the hooks away. Without an offload, does nothing."""
        offloader = _OFFLOADERS.pop(optimizer, None)
        if offloader is None:
            return
        for handle in offloader.handles:
            handle.remove()
        offloader.to_device(optimizer)


def _copied(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not is_dense(value):
        return value.to(device, copy=True)
    state = torch.empty_like(value, device=device, pin_memory=False)
    return state.copy_(value, non_blocking=True)


def is_dense(value: torch.Tensor) -> bool:
    """Whether a state is a tensor with memory of its own; quantised states (torchao) know how to be moved, and no more."""
    return type(_local(value)) is torch.Tensor


def _num_bytes(value: torch.Tensor) -> int:
    local = _local(value)
    return local.numel() * local.element_size()


def _local(value: torch.Tensor) -> torch.Tensor:
    """Of a DTensor, this rank's part."""
    local: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return local
