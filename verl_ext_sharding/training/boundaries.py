"""Where hooks go that bring inputs to the weights of a model whose layers lie on several devices (`training.alignment`).

For a module that spans devices:

- *A stack of layers* (a decoder) has one home, the device of its first layer: inputs, masks, positions and what the
  embedding returns are there. Each layer's inputs go to that layer, its output to the next layer's device. The output is
  sent rather than fetched because transformers checkpoints around a layer's hooks: what it saves, and the random
  generator that it restores for dropout, are those of the device of the layer's first argument. What comes after the
  layers gets its inputs and passes its output on from where it is.
- *A stack beside the decoder* (a vision tower), or with more than one module after its layers (Gemma's inputs of each layer),
  has a home too, and everything but what goes from layer to layer comes back to it: what it does with its layers' result
  (sorting windows back) it does there. The result of one beside the decoder goes to its caller's home.
- *Any other module* (a layer cut in two, a module with weights of its own) adds results of its children to each other: what
  a child returns comes back to the module's home.
- *A child on one device* gets its inputs there, and nothing below it is touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.training.layers import decoder_layers, input_embedding


@dataclass(frozen=True)
class Boundary:
    """A module to hook: its inputs go to `device`, its outputs to `output`, or stay where that is None."""

    name: str
    module: nn.Module
    device: torch.device
    output: torch.device | None


class Layout:
    """Where a model's weights are.

    Weights are the parameters and the buffers that are saved with the model; other buffers follow them.

    Args:
        model: Its weights are on their devices.

    Raises:
        ConfigError: A weight or buffer is on `meta`, a module's own weights are on several devices, or there are no weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._embedding = input_embedding(model)
        self._devices: dict[int, tuple[torch.device, ...]] = {}
        self._found: list[Boundary] = []
        self._seen: set[int] = set()
        _check(model)
        if not self.devices(model):
            raise ConfigError(
                f"inputs of {type(model).__name__}",
                expected="a model with weights, or the device that it computes on",
                found="no parameter and no buffer that is saved with the model",
                consequence="there is no device to bring inputs to, so nothing was changed",
                remedy="pass input_device to alignment.apply",
            )
        self._layers: set[int] = set() if len(self.devices(model)) == 1 else _layer_ids(model)

    def boundaries(self, output_device: torch.device | None) -> list[Boundary]:
        """The modules to hook, the root first.

        Args:
            output_device: Of the root.
        """
        self._found, self._seen = [], set()
        self._visit("", self.model, self.home(self.model), output_device)
        return self._found

    def stray_buffers(self) -> list[tuple[nn.Module, str, torch.device]]:
        """Buffers that are not saved with the model and not where they are needed: module, name, device."""
        self._seen = set()
        return list(self._strays(self.model, self.home(self.model)))

    def devices(self, module: nn.Module) -> tuple[torch.device, ...]:
        """Devices of the weights in a module, in the model's order."""
        found = self._devices.get(id(module))
        if found is None:
            own = [tensor.device for _, tensor in _own_weights(module)]
            below = [device for child in module.children() for device in self.devices(child)]
            found = self._devices[id(module)] = tuple(dict.fromkeys([*own, *below]))
        return found

    def home(self, module: nn.Module) -> torch.device:
        """The device of a module's own code: of its own weights, its first layer, its embedding, its first weight."""
        devices = self.devices(module)
        if len(devices) == 1:
            return devices[0]
        own = [tensor.device for _, tensor in _direct_weights(module)]
        if own:
            return own[0]
        members = list(_members(module))
        first = next((child for name, child in members if self._is_layer(name, child)), None)
        if first is None and module is not self.model:
            first = self._decoder(members)
        if first is not None:
            return self.home(first)
        embedding = input_embedding(module)
        if embedding is not None and self.devices(embedding):
            return self.devices(embedding)[0]
        return devices[0]

    def _visit(
        self, name: str, module: nn.Module, around: torch.device, output: torch.device | None, *, aside: bool = False
    ) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        devices = self.devices(module)
        home = self.home(module) if devices else around
        if module is not self.model and len(devices) < 2 and output == home:
            output = None
        if devices or next(module.buffers(), None) is not None:
            self._found.append(Boundary(name, module, home, output))
        if len(devices) > 1:
            self._visit_members(name, module, home, aside)

    def _visit_members(self, name: str, module: nn.Module, home: torch.device, aside: bool) -> None:
        """Visits what a module calls; `aside`: it is no part of the decoder, nor does it hold it."""
        members = list(_members(module))
        own = next(_direct_weights(module), None) is not None
        decoder = self._decoder(members)
        aside = aside or self._mixes(members)
        in_stack = isinstance(module, nn.Sequential)
        for index, (child_name, child) in enumerate(members):
            holds = self._holds_layers(child)
            beside = aside or (holds and not self._is_layer(child_name, child) and child is not decoder)
            in_stack = in_stack or (holds and not own and not beside)
            following = None if own and not in_stack else self._next_layer_device(members, index)
            output = following if following is not None or in_stack else home
            self._visit(f"{name}.{child_name}".removeprefix("."), child, home, output, aside=beside)

    def _mixes(self, members: list[tuple[str, nn.Module]]) -> bool:
        """Whether a stack has more than one module after its layers: what it does with their results can't be known."""
        numbers = [index for index, (name, child) in enumerate(members) if self._is_layer(name, child)]
        after = members[numbers[-1] + 1 :] if numbers else []
        return sum(bool(self.devices(child)) for _, child in after) > 1

    def _decoder(self, members: list[tuple[str, nn.Module]]) -> nn.Module | None:
        """The member that holds the decoder's layers without being one: with the model's embedding, else the last."""
        holders = [child for name, child in members if self._holds_layers(child) and not self._is_layer(name, child)]
        reading = (child for child in holders if any(one is self._embedding for one in child.modules()))
        return next(reading, holders[-1] if holders else None)

    def _next_layer_device(self, members: list[tuple[str, nn.Module]], index: int) -> torch.device | None:
        """Home of the layer after a layer; None for what is no layer, and for the last one."""
        pair = members[index : index + 2]
        if len(pair) < 2 or not all(self._is_layer(name, module) for name, module in pair):
            return None
        return self.home(pair[1][1])

    def _holds_layers(self, module: nn.Module) -> bool:
        return any(id(one) in self._layers for one in module.modules())

    def _is_layer(self, name: str, module: nn.Module) -> bool:
        # in a list, a wrapper stands for its layer
        return id(module) in self._layers or ("." in name and self._holds_layers(module))

    def _strays(self, module: nn.Module, around: torch.device) -> Iterator[tuple[nn.Module, str, torch.device]]:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        home = self.home(module) if _is_called(module) and self.devices(module) else around
        for name in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.device != home:
                yield module, name, home
        for child in module.children():
            yield from self._strays(child, home)


def _is_called(module: nn.Module) -> bool:
    """Whether a module has a forward: lists and dicts of modules or parameters have none, hooks on them never run."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _members(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that a module's code calls: its children, and those in its lists and dicts."""
    for name, child in module.named_children():
        if _is_called(child):
            yield prefix + name, child
        else:
            yield from _members(child, f"{prefix}{name}.")


def _own_weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield name, tensor


def _direct_weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that a module's own code works on, those in parameter lists included."""
    yield from _own_weights(module)
    for child_name, child in module.named_children():
        if not _is_called(child):
            yield from ((f"{child_name}.{name}", tensor) for name, tensor in _direct_weights(child))


def _layer_ids(model: nn.Module) -> set[int]:
    try:
        return {id(layer) for layer in decoder_layers(model)}
    except ConfigError:  # no layers: then each module's children return to it
        return set()


def _check(model: nn.Module) -> None:
    """Refuses what can't be aligned."""
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.device.type == "meta":
                raise ConfigError(
                    f"{prefix}{name} of {type(model).__name__}",
                    expected="values on a device",
                    found="no values (device meta)",
                    consequence="inputs can't be brought to it, so nothing was changed",
                    remedy="load the weights before the model is aligned, and name"
                    f" {module_name or 'the model'} in sharding.roles.<role>.device_map",
                )
        own = {f"{prefix}{name}": str(tensor.device) for name, tensor in _direct_weights(module)}
        if _is_called(module) and len(set(own.values())) > 1:
            raise ConfigError(
                f"module {module_name or type(model).__name__}",
                expected="one device for the weights that belong to one module",
                found=", ".join(f"{name} on {device}" for name, device in own.items()),
                consequence="no device is right for its inputs, so nothing was changed",
                remedy="name modules, not single parameters, in sharding.roles.<role>.device_map",
            )
