"""Questions asked inside Ray processes. Imports no verl and no torch, so that a probing process starts fast."""

from __future__ import annotations

import os
from typing import Any

import ray

from verl_ext_sharding.communication.hygiene import NAMES


@ray.remote(num_cpus=0, max_retries=0)
def where(accelerator: str) -> tuple[str, str]:
    """Node id and accelerator id of the bundle that this task runs in."""
    return node_and_accelerator(accelerator)


def node_and_accelerator(accelerator: str) -> tuple[str, str]:
    """Node id and first accelerator id of this process, as Ray keeps them.

    Args:
        accelerator: Ray's resource name, such as "GPU".
    """
    context = ray.get_runtime_context()
    ids = context.get_accelerator_ids().get(accelerator) or ["none"]
    return context.get_node_id(), ids[0]


def read_back(worker: Any, accelerator: str) -> dict[str, Any]:
    """What a worker really has; sent to workers with `__ray_call__`.

    Args:
        worker: The worker instance.
        accelerator: Ray's resource name.
    """
    node_id, accelerator_id = node_and_accelerator(accelerator)
    roles = getattr(worker, "worker_dict", None) or {"": worker}
    return {
        "node_id": node_id,
        "node": ray.util.get_node_ip_address(),
        "accelerator_id": accelerator_id,
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "promise": os.environ.get("VERL_SHARDING_BUNDLE"),
        "pid": os.getpid(),
        "worker_classes": {role: type(part).__name__ for role, part in roles.items()},
        "engines": {role: engine for role, part in roles.items() for engine in [_engine_of(part)]},
    }


def communication_of(actor: Any = None) -> dict[str, str | None]:
    """The communication variables of this process; sent to actors with `__ray_call__`.

    Args:
        actor: The actor instance, not looked at.
    """
    return {name: os.environ.get(name) for name in NAMES}


def _engine_of(worker: Any) -> str:
    for holder in (worker, getattr(worker, "actor", None), getattr(worker, "ref", None)):
        engine = getattr(holder, "engine", None)
        if engine is not None:
            return type(engine).__name__
    return "n/a"
