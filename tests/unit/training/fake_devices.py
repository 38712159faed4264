"""Several accelerators on the CPU build of torch, for tests of models whose layers lie on several devices.

A fake device `fakegpu:N` computes with values on the host and otherwise behaves like a GPU: tensors say that they are on it, an
operation over two devices raises what CUDA raises, each device has a random generator of its own, forward and backward
run, and every copy between devices is noted. So numbers can be compared with a run on one device.

    bench = FakeDevices(4)                       # once, and in a process of its own: torch keeps what is registered
    bench.place(model, {"model.embed_tokens": 0, "model.layers": 1, "model.layers.3": 2, "model": 3, "lm_head": 3})
    with bench:
        model(bench.on(0, input_ids)).logits.sum().backward()
    bench.devices(model), bench.grad_devices(model), bench.copies

It stands on torch's experimental Python backend (`PrivateUse1`). The tensors are wrapper subclasses, so that nothing is
written in C++; a dispatch mode covers what is created on a device or copied to it from the host. Autograd has to stay in
one thread, where the mode is active. What does not work: `Module.to` (place with `place`), `torch.compile`, and what
looks into storages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "fakegpu"
MISMATCH = "Expected all tensors to be on the same device"

aten = torch.ops.aten
# On CUDA an index may be on the host; a copy is between devices by its nature.
_HOST_INDICES = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_COPIES = {aten.copy_.default, aten.copy.default, aten._to_copy.default}


@dataclass(frozen=True)
class Copy:
    """A tensor that went from one device to another."""

    source: torch.device
    target: torch.device
    shape: tuple[int, ...]


class FakeDeviceTensor(torch.Tensor):
    """A tensor that says that it is on a fake device; its values are on the host.

    Args:
        values: A tensor on the CPU.
        device: The fake device.
    """

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, device: torch.device) -> FakeDeviceTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=device,
        )
        tensor.values = values
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"FakeDeviceTensor({self.values}, device={self.device})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Backend:
    """What torch asks of a device's module: `torch.fakegpu`."""

    _initialized = True  # checkpointing restores generators of such devices only

    def __init__(self, num_devices: int) -> None:
        self.num_devices = num_devices
        self.current = 0
        self.rng_states: list[torch.Tensor] = []
        self.copies: list[Copy] = []
        self.manual_seed_all(0)

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return self.num_devices

    def current_device(self) -> int:
        return self.current

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        # other numbers on each device, so that a generator taken for another one shows
        self.rng_states = [
            torch.Generator().manual_seed(seed + 1000 * index).get_state() for index in range(self.num_devices)
        ]

    def get_rng_state(self, index: int | None = None) -> torch.Tensor:
        return self.rng_states[self.current if index is None else index].clone()

    def set_rng_state(self, state: torch.Tensor, index: int | None = None) -> None:
        self.rng_states[self.current if index is None else index] = state.clone()

    @contextlib.contextmanager
    def generator_of(self, device: torch.device) -> Iterator[None]:
        """The host's generator is this device's for a while."""
        host = torch.get_rng_state()
        torch.set_rng_state(self.rng_states[device.index])
        try:
            yield
        finally:
            self.rng_states[device.index] = torch.get_rng_state()
            torch.set_rng_state(host)


_backend: _Backend | None = None


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operation on the values, and puts the results on the device of the inputs or of `device=`."""
    assert _backend is not None
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    target = _computing_device(func, tensors)
    asked = kwargs.get("device")
    if asked is not None:
        asked = torch.device(asked)
        kwargs = {**kwargs, "device": torch.device("cpu") if asked.type == NAME else asked}
        target = _with_index(asked)
    if func in _COPIES and tensors:
        source = tensors[-1].device
        if source != target:
            _backend.copies.append(Copy(source, target, tuple(tensors[-1].shape)))
    wrappers = {id(leaf.values): leaf for leaf in tensors if isinstance(leaf, FakeDeviceTensor)}
    inner_args, inner_kwargs = tree_map(_values, (args, kwargs))
    random = torch.Tag.nondeterministic_seeded in func.tags and target.type == NAME
    with _backend.generator_of(target) if random else contextlib.nullcontext():
        result = func(*inner_args, **inner_kwargs)

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in wrappers:  # in place, or the input itself
            return wrappers[id(value)]
        return FakeDeviceTensor(value, target) if target.type == NAME else value

    return tree_map(wrap, result)


def _with_index(device: torch.device) -> torch.device:
    assert _backend is not None
    return torch.device(NAME, _backend.current) if device.type == NAME and device.index is None else device


def _values(leaf: Any) -> Any:
    return leaf.values if isinstance(leaf, FakeDeviceTensor) else leaf


def _computing_device(func: Any, tensors: list[torch.Tensor]) -> torch.device:
    """The device of an operation's inputs.

    Raises:
        RuntimeError: They are on several, as CUDA says it.
    """
    if func in _COPIES:
        return tensors[0].device if tensors else torch.device("cpu")
    found = dict.fromkeys(tensor.device for tensor in tensors)
    meeting = dict.fromkeys(tensor.device for tensor in tensors if tensor.dim() or tensor.device.type != "cpu")
    if func in _HOST_INDICES and tensors[0].device.type == NAME:
        meeting.pop(torch.device("cpu"), None)
    if len(meeting) > 1:
        first, second = list(meeting)[:2]
        raise RuntimeError(f"{MISMATCH}, but found at least two devices, {first} and {second}! ({func})")
    return next(iter(meeting or found), torch.device("cpu"))


class _OnFakeDevices(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _BuiltOnTheHost(TorchFunctionMode):
    """`torch.tensor(data, device=...)` fills a new tensor below the dispatch mode: built on the host, then copied."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.tolist:  # which no subclass has
            return _values(args[0]).tolist()
        if func not in (torch.tensor, torch.as_tensor):
            return func(*args, **kwargs)
        device = kwargs.pop("device", None)
        built = func(*args, **kwargs)
        if device is None or torch.device(device).type != NAME:
            return built if device is None else built.to(device)
        assert _backend is not None
        placed = FakeDeviceTensor(built.detach(), _with_index(torch.device(device)))
        return placed.requires_grad_(built.requires_grad)


class FakeDevices:
    """The bench; a context manager in which the devices compute.

    Args:
        num_devices: How many there are.
    """

    def __init__(self, num_devices: int) -> None:
        global _backend
        assert _backend is None, "torch takes one Python backend for each process"
        _backend = _Backend(num_devices)
        _setup_privateuseone_for_python_backend(NAME, backend_module=_backend)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> FakeDevices:
        self._stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        self._stack.enter_context(_BuiltOnTheHost())
        self._stack.enter_context(_OnFakeDevices())
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def copies(self) -> list[Copy]:
        """What went from one device to another since the list was cleared, in order."""
        assert _backend is not None
        return _backend.copies

    def seed(self, seed: int) -> None:
        """Sets the random generators of all devices, each to other numbers."""
        assert _backend is not None
        _backend.manual_seed_all(seed)

    def device(self, index: int) -> torch.device:
        return torch.device(NAME, index)

    def on(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """A CPU tensor's values on a device; not noted as a copy."""
        return FakeDeviceTensor(tensor.detach().clone(), self.device(index))

    def place(self, model: nn.Module, devices: Mapping[str, int]) -> None:
        """Puts the parameters and buffers of a model on devices, in place; tied ones stay tied.

        Args:
            model: A model on the CPU.
            devices: Device number by name of a module, parameter or buffer; the longest one that fits counts, "" fits all.
        """
        placed: dict[int, torch.Tensor] = {}
        for module_name, module in model.named_modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in placed:
                        index = devices[_longest_prefix(f"{module_name}.{name}".removeprefix("."), devices)]
                        wrapped = self.on(index, tensor)
                        if tensors is module._parameters:
                            wrapped = nn.Parameter(wrapped, requires_grad=tensor.requires_grad)
                        placed[id(tensor)] = wrapped
                    tensors[name] = placed[id(tensor)]

    def devices(self, model: nn.Module) -> dict[str, int | None]:
        """Device number of each parameter and buffer, None for the host."""
        return {name: tensor.device.index for name, tensor in _named_tensors(model)}

    def grad_devices(self, model: nn.Module) -> dict[str, int | None]:
        """Device number of each gradient that there is."""
        return {name: p.grad.device.index for name, p in model.named_parameters() if p.grad is not None}

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a tensor, on the CPU and outside of any graph."""
        return tensor.detach().values if isinstance(tensor, FakeDeviceTensor) else tensor.detach()


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _longest_prefix(name: str, prefixes: Mapping[str, int]) -> str:
    found = [prefix for prefix in prefixes if f"{name}.".startswith(f"{prefix}." if prefix else "")]
    assert found, f"{name} has no device"
    return max(found, key=len)
