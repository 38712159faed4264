"""A model's weights with its adapters merged as PEFT merges them, a few tensors at a time; the model is as before after each.

What a weight is without its adapters, PEFT knows: each of its layers merges itself (DoRA, biases, embeddings, trained tokens,
experts and every other kind), and modules that are trained whole stand for the original ones. Tied weights are merged for
all of their names.

PEFT gives a weight new data where it does not add to it in place, which a shard takes no notice of: of sharded models
the parameters of a few layers are gathered, and merged as those of any other.
"""

from __future__ import annotations

from collections.abc import Container, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import fsdp_version, offload_fsdp_model_to_cpu
from verl.utils.model import convert_weight_keys
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from verl_ext_sharding.errors import ConfigError, first_line
from verl_ext_sharding.training.layers import input_embedding


class MergedExportMixin:
    """Added in front of one of verl's FSDP engines: what it sends of a merged model is what the rollout's loader takes.

    verl's FSDP2 merges the layers below its units and none that the root holds itself, such as those between a vision tower
    and its language model; of DoRA, trained tokens and modules that are trained whole it sends the weights of before, or
    under PEFT's own names; and it sends fused experts as they are, where for a model without adapters it sends one
    tensor an expert, as checkpoints have them: loaders pass over what they don't know, and keep old experts.
    """

    role: str
    module: nn.Module
    model_config: Any
    _is_offload_param: bool

    def _build_lora_module(self, module: nn.Module) -> nn.Module:
        """As verl's; what an adapter of the user's holds is known now, and not merged for the first time in a weight sync."""
        module = super()._build_lora_module(module)  # type: ignore[misc]
        merged = self.role == "actor" and self.model_config.lora.get("merge", False)
        if merged and (obstacle := merge_obstacle(module)):
            raise ConfigError(
                "actor_rollout_ref.model.lora.merge=True",
                expected="adapters that can be merged into the weights",
                found=obstacle,
                consequence="the run stops before training",
                remedy="actor_rollout_ref.model.lora.merge=False, or other adapters",
            )
        return module

    def _merged_lora_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As verl's, complete; the model is bit for bit as before once all is sent, or sending has failed."""
        try:
            with closing(self._merged()) as merged:
                yield from unfuse_moe_params(merged, self.model_config.hf_config.model_type)
        finally:
            if self._is_offload_param:  # verl has brought them to the device
                offload_fsdp_model_to_cpu(self.module)

    def _merged(self) -> Generator[tuple[str, torch.Tensor]]:
        """Copies of the merged tensors on the device; verl sends in bfloat16 what was sharded, and the rest as it is."""
        device, version = get_device_id(), fsdp_version(self.module)
        model = getattr(self.module, "_fsdp_wrapped_module", self.module)
        is_sharded = version == 2 or (version == 1 and torch.distributed.get_world_size() > 1)
        with _readable(self.module), closing(merged_weights(model, device)) as weights:
            for name, tensor in weights:
                dtype = torch.bfloat16 if is_sharded and isinstance(tensor, nn.Parameter) else tensor.dtype
                copied = tensor.detach().to(device, dtype, copy=True)  # there when the layer goes back to what it was
                yield from convert_weight_keys({name: copied}, model).items()


def merged_weights(model: Any, device: Any = None) -> Generator[tuple[str, torch.Tensor]]:
    """Names and tensors of the model that `merge_and_unload` would leave.

    Args:
        model: A `PeftModel`; its weights may be on several devices, or shards of FSDP2.
        device: Where shards are gathered; None: where they are.

    Yields:
        Name in the model without adapters, and its tensor, a parameter where it is one: a merged one is valid until the
        next is asked for.
    """
    tensors, layers = _unwrapped(model)
    groups = _sharing_weights(layers)
    owned = {id(weight) for group in groups for weight in _weights(group)}
    for name, tensor in tensors.items():
        if id(tensor) not in owned:
            yield name, _whole(tensor, device)
    for group in groups:
        changed = {id(weight) for weight in _weights(group)}
        with _gathered(group, device) as whole, _merged(group):
            for name, tensor in tensors.items():
                if id(tensor) in changed:
                    yield name, whole.get(id(tensor), tensor)


def merge_obstacle(model: Any) -> str | None:
    """Why the adapters of a model can't be merged, or None: one layer of each kind is merged to see.

    Args:
        model: A `PeftModel`.
    """
    from peft.tuners.tuners_utils import BaseTuner

    config = model.active_peft_config
    if not isinstance(model.base_model, BaseTuner):
        return f"adapters of type {config.peft_type}, which are no part of any weight"
    if _differ_of_one_weight(model.get_base_model()):
        return (
            "adapters of the embedding or the output head, which are one weight in this model (tie_word_embeddings), so that "
            "merging changes both; PEFT's ensure_weight_tying=True with modules_to_save trains both"
        )
    _, layers = _unwrapped(model)
    kinds: dict[Any, Any] = {}
    for layer in layers:
        base = layer.get_base_layer()
        kinds.setdefault((type(layer), type(base), getattr(base, "bias", None) is None), layer)
    for layer in kinds.values():
        try:
            with _merged([layer]):
                pass
        except (RuntimeError, NotImplementedError, ValueError) as error:
            return f"adapters that PEFT does not merge: {first_line(error)}"
    return None


def _differ_of_one_weight(base: Any) -> bool:
    """Whether embedding and head have one weight, and with their adapters do not compute with one."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    ends: list[Any] = [input_embedding(base), head]
    below = [_below(end).weight for end in ends if hasattr(_below(end), "weight")]
    if len(below) < 2 or below[0] is not below[1]:
        return False
    if all(isinstance(end, TrainableTokensWrapper) for end in ends):
        return False
    if all(isinstance(end, ModulesToSaveWrapper) for end in ends):
        first, second = (end.modules_to_save[end.active_adapters[0]].weight for end in ends)
        return first is not second
    return any(isinstance(end, (BaseTunerLayer, ModulesToSaveWrapper, TrainableTokensWrapper)) for end in ends)


def _below(module: Any) -> Any:
    """What PEFT has wrapped."""
    module = getattr(module, "original_module", module)
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def _unwrapped(model: Any) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The tensors of the model without adapters by name, not merged yet, and PEFT's layers that are to be merged."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    base = model.get_base_model()
    finals: dict[str, nn.Module] = {}
    layers: list[Any] = []
    for path, module in base.named_modules():
        if _is_inside(path, finals):
            continue
        if isinstance(module, ModulesToSaveWrapper):
            active = module.active_adapters
            finals[path] = module.modules_to_save[active[0]] if active else module.original_module
            module = finals[path]
        elif isinstance(module, TrainableTokensWrapper):
            module = module.token_adapter
        while isinstance(module, BaseTunerLayer):  # those of a module's parameters are around one another
            layers.append(module)
            module = module.base_layer  # type: ignore[attr-defined]
            finals[path] = module
    tensors = {name: tensor for name, tensor in _state(base).items() if not _is_inside(name, finals)}
    for path, final in finals.items():
        tensors |= {f"{path}.{name}": tensor for name, tensor in _state(final).items()}
    return {name.replace("_fsdp_wrapped_module.", ""): tensor for name, tensor in tensors.items()}, layers


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    """What its state dict has, which FSDP1 would make anew for one."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, owner in module.named_modules(remove_duplicate=False)
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items())
        if tensor is not None and name not in owner._non_persistent_buffers_set
    }


def _is_inside(name: str, paths: Container[str]) -> bool:
    """Whether something lies below one of some modules."""
    parts = name.split(".")
    return any(".".join(parts[:length]) in paths for length in range(1, len(parts)))


def _sharing_weights(layers: Sequence[Any]) -> list[list[Any]]:
    """The layers in groups, so that no two groups have a weight in common."""
    group_of: dict[int, list[Any]] = {}
    for layer in layers:
        joined = {id(group): group for weight in _weights([layer]) if (group := group_of.get(id(weight))) is not None}
        whole = [one for group in joined.values() for one in group] + [layer]
        group_of |= {id(weight): whole for weight in _weights(whole)}
    return list({id(group): group for group in group_of.values()}.values())


def _weights(layers: Sequence[Any]) -> list[nn.Parameter]:
    """The parameters below the adapters, each once."""
    return list({id(weight): weight for layer in layers for weight in layer.get_base_layer().parameters()}.values())


@contextmanager
def _merged(layers: Sequence[Any]) -> Iterator[None]:
    """Layers are merged inside the block, and bit for bit as before after it."""
    before = [(weight, weight.data, weight.data.clone()) for weight in _weights(layers)]
    try:
        with torch.no_grad():
            for layer in layers:
                layer.merge()
        yield
    finally:
        with torch.no_grad():
            for layer in layers:
                if layer.merged:
                    layer.unmerge()  # which also drops what the layer noted of the merge
            for weight, data, copy in before:
                weight.data = data.copy_(copy)


def _readable(module: nn.Module) -> AbstractContextManager[Any]:
    """A block in which a sharded model has each parameter in its place: whole with FSDP1, as a shard with FSDP2."""
    if fsdp_version(module) == 1:
        return FullyShardedDataParallel.summon_full_params(module, writeback=False)  # of all units, as verl does
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
    return nullcontext()


@contextmanager
def _gathered(layers: Sequence[Any], device: Any) -> Iterator[dict[int, nn.Parameter]]:
    """Inside the block, whole parameters are in the place of shards, of which the ids are the keys."""
    owners = {id(module): module for layer in layers for module in layer.modules()}.values()
    places = [
        (owner, name, shard)
        for owner in owners
        for name, shard in owner._parameters.items()
        if isinstance(shard, DTensor)
    ]
    whole = {id(shard): _whole(shard, device) for shard in {id(shard): shard for *_, shard in places}.values()}
    try:
        for owner, name, shard in places:
            owner._parameters[name] = whole[id(shard)]
        yield whole
    finally:
        for owner, name, shard in places:
            owner._parameters[name] = shard


def _whole(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """A tensor of all ranks, which is gathered from those that hold it if need be."""
    if not isinstance(tensor, DTensor):
        return tensor
    return nn.Parameter(tensor.detach().to(device).full_tensor(), requires_grad=False)
