"""One rank reads the weights of a model, tied or not; the others build it without memory and get their shards.

verl does this for all models but those with `tie_word_embeddings`, which each rank loads whole, so that host memory
grows with the ranks of a node (verl#1550, verl#7834). Two things stand in the way there: parameters that go to the meta
device one by one lose what they share, in `from_pretrained` and, with FSDP1, again when they are given memory, after which
ranks disagree about what to broadcast and wait for ever; and transformers compares the values of both names
where a checkpoint holds both. Here the rank that reads the weights says which names share a parameter, and every other
rank follows it.

Of untied models too, verl's other ranks hold up to a whole copy for a while, which the threads of transformers have read
ahead; here they read one tensor after the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.overrides import TorchFunctionMode

Groups = list[tuple[str, ...]]
"""Names that share one parameter, for each such parameter; the first name is where a module's walk meets it first."""

_SYNC_LOADING = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}
"""Of transformers: read one tensor after the other. Its threads read ahead, up to the whole model."""


class MetaInitMixin:
    """Added in front of one of verl's FSDP engines."""

    engine_config: Any
    device_mesh: Any
    rank: int

    def _build_module(self) -> nn.Module:
        alone = torch.distributed.get_world_size() == 1
        empty = not alone and not self._reads_weights()
        with empty_parameters() if empty else nullcontext():
            module: nn.Module = super()._build_module()  # type: ignore[misc]
        if alone:
            return module
        groups = [shared_names(module)]
        torch.distributed.broadcast_object_list(groups, src=0)
        share(module, groups[0])
        return module

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        if self.engine_config.strategy == "fsdp":  # FSDP2 gives sharded parameters memory in place
            reserve(module, shared_names(module))
        wrapped: nn.Module = super()._build_fsdp_module(module)  # type: ignore[misc]
        return wrapped

    def _reads_weights(self) -> bool:
        """FSDP2 is filled from rank 0. FSDP1 with replicas may broadcast from the first rank of each, as verl has it."""
        if self.engine_config.strategy == "fsdp2":
            return self.rank == 0
        return bool(self.device_mesh.get_coordinate()[-1] == 0)


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Parameters of models that are loaded inside are on the meta device; each is read alone and dropped.

    Buffers are real, since some are in no checkpoint. What shares a parameter afterwards is not to be relied on.
    """
    before = {name: os.environ.get(name) for name in _SYNC_LOADING}
    os.environ.update(_SYNC_LOADING)
    try:
        with _EqualWithoutValues(), init_empty_weights(include_buffers=False):
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _EqualWithoutValues(TorchFunctionMode):
    """Answers `torch.equal` of meta tensors, which has no value to look at: yes, the rank that reads them knows better."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.equal and any(isinstance(value, torch.Tensor) and value.is_meta for value in args):
            return True
        return func(*args, **(kwargs or {}))


def shared_names(module: nn.Module) -> Groups:
    """The names that share a parameter, in the order in which the module's walk meets them."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


def share(module: nn.Module, groups: Groups) -> None:
    """Makes the names of each group one parameter, that of the first name, and all other names separate ones.

    Args:
        module: Where a name is to get a parameter of its own, that is on the meta device.
        groups: As `shared_names` says of the module to follow.
    """
    first = {name: group[0] for group in groups for name in group}
    for names in shared_names(module):
        for name in names[1:]:
            if first.get(name, name) != first.get(names[0], names[0]):
                parameter = module.get_parameter(name)
                assert parameter.is_meta, f"{name} is shared here and not where the weights were read"
                _assign(module, name, nn.Parameter(torch.empty_like(parameter), parameter.requires_grad))
    for name, source in first.items():
        if module.get_parameter(name) is not module.get_parameter(source):
            _assign(module, name, module.get_parameter(source))


def reserve(module: nn.Module, groups: Groups) -> None:
    """Gives shared parameters on the meta device memory that nothing has touched yet, and keeps them shared.

    FSDP1 then moves them to the device without replacing them: `to_empty`, which verl's `init_fn` calls for one module
    after the other, makes a new parameter of each name of a meta parameter, but moves one that has memory in place.

    Args:
        module: The module, before FSDP1 wraps it.
        groups: Its `shared_names`.
    """
    for group in groups:
        parameter = module.get_parameter(group[0])
        if parameter.is_meta:
            # on the host: FSDP1 takes units with parameters on meta and host, not on meta and device
            real = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
            for name in group:
                _assign(module, name, real)


def _assign(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, parameter)
