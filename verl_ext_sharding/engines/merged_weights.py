"""A model's weights with its adapters merged as PEFT merges them, a few tensors at a time; the model is as before after each.

What a weight is without its adapters, PEFT knows: each of its layers merges itself (DoRA, biases, embeddings, trained tokens and
every other kind), and modules that are trained whole stand for the original ones. Tied weights are merged for all of their names.

Of sharded models verl merges the adapters itself, and `MergedExportMixin` adds what it leaves out.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import nn
from verl.utils.fsdp_utils import fsdp_version
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from verl_ext_sharding.errors import first_line


class MergedExportMixin:
    """Added in front of one of verl's FSDP engines: what verl sends of a merged model is what the rollout's loader takes.

    verl's FSDP2 merges the layers below its units and none that the root holds itself, such as those between a vision tower
    and its language model; and it sends fused experts as they are, where for a model without adapters it sends one
    tensor an expert, as checkpoints have them: loaders pass over what they don't know, and keep old experts.
    """

    module: nn.Module
    model_config: Any

    def _merged_lora_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As verl's, complete; the model is bit for bit as before once all is sent, or sending has failed."""
        merged_by_verl = super()._merged_lora_per_tensor_param  # type: ignore[misc]
        # verl's own undoing comes first: it brings back what it found, which has ours merged
        with _merged_in_place(_outside_of_units(self.module)), closing(merged_by_verl()) as merged:
            yield from unfuse_moe_params(merged, self.model_config.hf_config.model_type)


def merged_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of the model that `merge_and_unload` would leave.

    Args:
        model: A `PeftModel`; its weights may be on several devices.

    Yields:
        Name in the model without adapters, and its tensor: a merged one is valid until the next is asked for.
    """
    tensors, layers = _unwrapped(model)
    groups = _sharing_weights(layers)
    owned = {id(weight) for group in groups for weight in _weights(group)}
    for name, tensor in tensors.items():
        if id(tensor) not in owned:
            yield name, tensor.detach()
    for group in groups:
        changed = {id(weight) for weight in _weights(group)}
        with _merged(group):
            for name, tensor in tensors.items():
                if id(tensor) in changed:
                    yield name, tensor.detach()


def merge_obstacle(model: Any) -> str | None:
    """Why the adapters of a model can't be merged, or None: one layer of each kind is merged to see.

    Args:
        model: A `PeftModel`.
    """
    from peft.tuners.tuners_utils import BaseTuner

    config = model.active_peft_config
    if not isinstance(model.base_model, BaseTuner):
        return f"adapters of type {config.peft_type}, which are no part of any weight"
    _, layers = _unwrapped(model)
    kinds: dict[Any, Any] = {}
    for layer in layers:
        base = layer.get_base_layer()
        kinds.setdefault((type(layer), type(base), getattr(base, "bias", None) is None), layer)
    for layer in kinds.values():
        if hasattr(layer, "unload_and_optionally_merge_module"):
            return f"adapters of parameters inside a module ({type(layer).__name__})"
        try:
            with _merged([layer]):
                pass
        except (RuntimeError, NotImplementedError, ValueError) as error:
            return f"adapters that PEFT does not merge: {first_line(error)}"
    return None


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
        if isinstance(module, BaseTunerLayer):
            layers.append(module)
            finals[path] = module.get_base_layer()
    tensors = {name: tensor for name, tensor in base.state_dict(keep_vars=True).items() if not _is_inside(name, finals)}
    for path, final in finals.items():
        tensors |= {f"{path}.{name}": tensor for name, tensor in final.state_dict(keep_vars=True).items()}
    return tensors, layers


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


def _outside_of_units(module: nn.Module) -> list[Any]:
    """PEFT's layers that no unit of FSDP2 holds but the root, adapters that are merged already left out."""
    from peft.tuners.lora import LoraLayer

    if fsdp_version(module) != 2:
        return []  # FSDP1 gathers all units at once, and merges whatever is in them
    inside = {
        id(layer)
        for name, unit in module.named_modules()
        if name and fsdp_version(unit) == 2
        for layer in unit.modules()
    }
    layers = (layer for layer in module.modules() if isinstance(layer, LoraLayer))
    return [layer for layer in layers if id(layer) not in inside and not layer.merged]


@contextmanager
def _merged_in_place(layers: Sequence[Any]) -> Iterator[None]:
    """As `_merged`, of weights that may be on another device at the end than at the start."""
    before = [(weight, weight.data.clone()) for weight in _weights(layers)]
    try:
        with torch.no_grad():
            for layer in layers:
                layer.merge()
        yield
    finally:
        with torch.no_grad():
            for layer in layers:
                layer.merged_adapters = []
            for weight, copy in before:
                weight.data.copy_(copy.to(weight.device))
