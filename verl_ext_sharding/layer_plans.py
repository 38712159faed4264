"""Device maps of a run, checked in the driver: the models of roles with `layout: device_map`, built on meta.

Reads config files of models and none of their weights. Where the driver can't read a model's config (a path that only
workers reach), the worker makes the same checks before it loads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext_sharding.config.dtypes import full_dtype, item_bytes, stored_dtype
from verl_ext_sharding.config.facts import uses_lora
from verl_ext_sharding.config.measures import ENGINE_BLOCK, ENGINE_ROLES, MODEL_BLOCK, LayerSpread, RoleMeasures
from verl_ext_sharding.config.schema import ShardingConfig
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.model_configs import meta_model_of
from verl_ext_sharding.placement import layer_keys
from verl_ext_sharding.placement.bundles import Placement
from verl_ext_sharding.placement.device_map import LayerMap, LayerRow, rows
from verl_ext_sharding.placement.job import JobFacts

logger = logging.getLogger(__name__)

_ADAM_STATES = 2


def spread_roles(request: ShardingConfig, placement: Placement) -> dict[str, LayerSpread]:
    """How each role with `layout: device_map` is spread, without what other roles need.

    A reference in the actor's process follows the actor's map, unless it has one of its own.
    """
    found = {}
    for role in ENGINE_ROLES:
        pool = placement.pool_of(role)
        if pool is None or pool.layout != "device_map":
            continue
        asked = getattr(request.roles, role)
        if role == "ref" and "actor" in pool.roles and asked.layout is None:
            asked = request.roles.actor
        device_map = asked.device_map if isinstance(asked.device_map, str) else dict(asked.device_map)
        found[role] = LayerSpread(device_map=device_map, devices=pool.devices, device_bytes=_device_bytes(request))
    return found


def with_spread(measures: Mapping[str, RoleMeasures], spread: Mapping[str, LayerSpread]) -> dict[str, RoleMeasures]:
    """Measures of each role, with how its layers are spread."""
    merged = dict(measures)
    for role, layers in spread.items():
        merged[role] = replace(merged.get(role, RoleMeasures()), layers=layers)
    return merged


def plan_spread(
    config: DictConfig, request: ShardingConfig, placement: Placement, facts: JobFacts
) -> tuple[dict[str, LayerSpread], dict[str, LayerMap]]:
    """Checks the map of each role with `layout: device_map`, and says what other roles keep on its devices.

    Args:
        config: verl's composed config.
        request: The user's request.
        placement: Where the roles run.
        facts: The job.

    Returns:
        The spread of each such role, and the map of each whose model could be read.

    Raises:
        ConfigError: A map is wrong, layers don't fit `sharding.memory.gpu_gib`, or a setting is FSDP's alone.
    """
    spread = spread_roles(request, placement)
    if not spread:
        return {}, {}
    for role in spread:
        _check_settings(role, config, request)
    models = {role: meta_model_of(config, role, valued=role == "critic" and role in spread) for role in facts.engines}
    kept = {role: _kept_bytes(config, role, models[role], placement) for role in facts.engines}
    maps = {}
    for role, layers in spread.items():
        reserved = [
            sum(
                num_bytes
                for other, num_bytes in kept.items()
                if other != role and device in placement.devices_of(other)
            )
            for device in layers.devices
        ]
        spread[role] = replace(layers, reserved_bytes=tuple(reserved))
        if models[role] is None:
            numbers = layers.devices
            layer_keys.parse(layers.device_map, role=role, num_devices=len(numbers), device_numbers=numbers)
            path = OmegaConf.select(config, f"{MODEL_BLOCK[role]}.path")
            logger.warning("device map of %s: checked in the worker, since the driver can't read %s", role, path)
            continue
        maps[role] = _map(config, role, models[role], spread[role])
    return spread, maps


def _check_settings(role: str, config: DictConfig, request: ShardingConfig) -> None:
    """Refuses settings of verl that a model over several devices, sharded by nothing, can't honour."""
    for key, expected, wrong, remedy in _impossible(role, config, request):
        found = OmegaConf.select(config, key, default=None)
        if not wrong(found):
            continue
        raise ConfigError(
            key,
            expected=f"{expected}, and layout: device_map spreads {role} over the devices of one process",
            found=str(found),
            consequence="the run does not start",
            remedy=remedy,
        )


def _impossible(
    role: str, config: DictConfig, request: ShardingConfig
) -> Iterator[tuple[str, str, Callable[[Any], bool], str]]:
    """Such settings: key, what it should be, whether a value is wrong, remedy."""
    ours, engine, model = f"sharding.roles.{role}", ENGINE_BLOCK[role], MODEL_BLOCK[role]
    asked = getattr(request.roles, role)
    key = f"{engine}.offload_policy"
    # a reference in the actor's process has no layout of its own, which our key for it asks for
    offloads = (
        f"{engine}.param_offload=True" if role == "ref" else f"{ours}.offload.params=true {ours}.offload.optimizer=true"
    )
    yield key, "False: it is FSDP2's", bool, f"{key}=False {offloads}"
    key = f"{model}.use_fused_kernels"
    if getattr(asked, "logits", None) is None:
        fused = f"{key}=False" if role == "critic" else f"{key}=False {ours}.logits=fused"
        yield key, "False: verl's fused kernels read the head's weight where the last layer is", bool, fused
    key = f"{engine}.qat.enable"
    yield key, "False: verl trains for quantization with FSDP alone", bool, f"{key}=False"
    if role != "ref":
        key = f"{engine}.model_dtype"
        expected = "fp32 or bf16: gradients of float16 weights can't be scaled"
        stored = f"{key}=fp32" if asked.dtype is None else f"{ours}.dtype=float32"
        yield key, expected, _is_float16, f"{stored} {ours}.compute_dtype=float16"


def _is_float16(dtype: Any) -> bool:
    return bool(full_dtype(dtype) == "float16")


def planned_rows(config: DictConfig, layer_map: LayerMap) -> tuple[LayerRow, ...]:
    """The map as a table; a reference and a base model under LoRA have neither gradients nor optimizer states."""
    role = layer_map.role
    return rows(layer_map, num_states=0 if role == "ref" or uses_lora(config, MODEL_BLOCK[role]) else 1 + _ADAM_STATES)


def _device_bytes(request: ShardingConfig) -> int | None:
    gib = request.memory.gpu_gib
    return None if gib is None else int(gib * (1 - request.memory.headroom) * 2**30)


def _map(config: DictConfig, role: str, model: Any, layers: LayerSpread) -> LayerMap:
    import torch

    from verl_ext_sharding.training.layer_map import DeviceNeeds, plan_layers

    item = _item_bytes(config, role)
    memory = None
    if layers.device_bytes is not None:
        memory = tuple(max(0, layers.device_bytes - reserved) for reserved in layers.reserved_bytes)
    elif layers.device_map == "sequential":
        memory = (2**62,) * len(layers.devices)  # the worker knows its devices; here only the map's form is checked
    trained = 1 + _ADAM_STATES if role != "ref" else 0
    return plan_layers(
        model,
        layers.device_map,
        role=role,
        num_devices=len(layers.devices),
        device_numbers=layers.devices,
        dtype={4: torch.float32, 2: torch.bfloat16}[item],
        needs=DeviceNeeds(memory_bytes=memory, extra_bytes_per_parameter=trained * item),
    )


def _item_bytes(config: DictConfig, role: str) -> int:
    """Bytes of one stored weight of a role."""
    dtype = stored_dtype(role, OmegaConf.select(config, f"{ENGINE_BLOCK[role]}.model_dtype", default=None))
    size = item_bytes(dtype)
    if size is None:
        raise ConfigError(
            f"{ENGINE_BLOCK[role]}.model_dtype",
            expected="fp32, bf16 or fp16",
            found=dtype,
            consequence="the run does not start",
            remedy=f"sharding.roles.{role}.dtype=float32",
        )
    return size


def _kept_bytes(config: DictConfig, role: str, model: Any, placement: Placement) -> int:
    """Bytes that a role keeps on each of its devices while others run: weights and optimizer states, unless offloaded."""
    pool = placement.pool_of(role)
    if model is None or pool is None:
        return 0
    engine = OmegaConf.select(config, ENGINE_BLOCK[role])
    item = _item_bytes(config, role)
    sharded_reference = role == "ref" and pool.layout == "fsdp"  # verl keeps it on the host
    weights = 0 if engine.get("param_offload", False) or sharded_reference else item
    states = 0 if engine.get("optimizer_offload", False) or role == "ref" else _ADAM_STATES * item
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    return (weights * total + states * trained) // len(pool.devices)
