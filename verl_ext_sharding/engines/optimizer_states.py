"""Loads optimizer states to the device on which they live between phases, wherever the parameters are meanwhile.

`Optimizer.load_state_dict` moves states to the device of the parameters: all of them at once, also where a run keeps them
on the host; and what is on that device already it keeps as it is, a file that is mapped into memory included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from verl_ext_sharding.training.optimizer_offload import is_dense

Where: TypeAlias = torch.device | Callable[[torch.Tensor], torch.device]
"""A device for all parameters, or for each."""


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    saved: dict[str, Any],
    *,
    step_device: Where,
    state_device: Where,
) -> None:
    """`optimizer.load_state_dict` that puts states on a device of its own choice, not on that of the parameters.

    States that the optimizer has are dropped before, so that there is never a second copy; those that come are copies,
    since the file behind `saved` may go. Hooks of the optimizer run as they do for `load_state_dict`.

    Args:
        optimizer: The optimizer.
        saved: Its `state_dict`, on the host.
        step_device: Where it steps, for all parameters or for each. Step counters of `fused` and `capturable` optimizers are there.
        state_device: Where its states are between phases: the same, or the host.
    """
    plain = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    if not plain or "param_groups" not in saved:
        optimizer.load_state_dict(saved)  # the optimizer's own way, which may know more formats
        move_states(optimizer, state_device, copy=True)
        return
    fill = functools.partial(_fill, saved=saved, step_device=step_device, state_device=state_device)
    handle = optimizer.register_load_state_dict_post_hook(fill, prepend=True)  # before the hook of our offload
    try:
        optimizer.load_state_dict({**saved, "state": {}})
    finally:
        handle.remove()


def _fill(optimizer: torch.optim.Optimizer, *, saved: dict[str, Any], step_device: Where, state_device: Where) -> None:
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        on_device = group.get("fused") or group.get("capturable")
        for parameter, number in zip(group["params"], saved_group["params"], strict=True):
            if number not in saved["state"]:
                continue
            steps_on, lives_on = device_of(step_device, parameter), device_of(state_device, parameter)
            counter = {"step": steps_on if on_device else torch.device("cpu")}
            pin = steps_on != lives_on and torch.accelerator.is_available()  # they travel for each step
            optimizer.state[parameter] = {
                name: _copy(name, value, parameter, counter.get(name, lives_on), pin)
                for name, value in saved["state"][number].items()
            }
    # as load_state_dict ends: optimizers bring states of older versions up to date here
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def _copy(name: str, value: Any, parameter: torch.Tensor, device: torch.device, pin: bool) -> Any:
    """A copy of one state. All but step counters get the parameter's dtype, as with `load_state_dict`."""
    if isinstance(value, dict):
        return {key: _copy(key, item, parameter, device, pin) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copy("", item, parameter, device, pin) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    if name == "step":
        dtype = torch.float32 if device.type != "cpu" else value.dtype
    else:
        dtype = parameter.dtype if parameter.is_floating_point() else value.dtype
    if pin and device.type == "cpu" and name != "step" and is_dense(value):
        return torch.empty_like(value, dtype=dtype, pin_memory=True).copy_(value)
    return value.to(device=device, dtype=dtype, copy=True)


def device_of(where: Where, parameter: torch.Tensor) -> torch.device:
    """The device for one parameter."""
    return where if isinstance(where, torch.device) else where(parameter)


def move_states(optimizer: torch.optim.Optimizer, where: Where, *, counters: bool = False, copy: bool = False) -> None:
    """Moves states to a device.

    Args:
        optimizer: The optimizer.
        where: For all parameters, or for each.
        counters: Step counters too, of optimizers that count where they step (`fused`, `capturable`).
        copy: States that are on the host get memory of their own, and all are there on return; otherwise the devices may
            still be copying.
    """
    for group in optimizer.param_groups:
        with_counters = counters and bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            states, device = optimizer.state.get(parameter, {}), device_of(where, parameter)
            for name, value in states.items():
                if isinstance(value, torch.Tensor) and (value.dim() > 0 or with_counters):
                    own = copy and value.device.type == "cpu"
                    states[name] = value.to(device, non_blocking=not copy, copy=own)
