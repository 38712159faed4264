"""Questions asked inside Ray processes. Imports no verl and no torch, so that a probing process starts fast."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import util
from typing import Any

import ray

from verl_ext_sharding import versions
from verl_ext_sharding.communication.hygiene import NAMES

logger = logging.getLogger(__name__)

COMPUTE_CAPABILITIES = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")


@dataclass(kw_only=True, frozen=True)
class Packages:
    """What decides which attention a process can run.

    Args:
        torch: Version of torch, or None.
        flash_attn: Whether flash-attn is installed.
        kernels: Whether Hugging Face's kernels is, from which transformers takes flash attention in place of flash-attn.
    """

    torch: str | None
    flash_attn: bool
    kernels: bool


def packages() -> Packages:
    """The packages of this process; none of them is imported."""
    flash_attn, kernels = (util.find_spec(name) is not None for name in ("flash_attn", "kernels"))
    return Packages(torch=versions.installed("torch"), flash_attn=flash_attn, kernels=kernels)


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
        "layers": {role: layers for role, part in roles.items() if (layers := _layers_of(part))},
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


def compute_capabilities(timeout_s: float = 20.0) -> list[tuple[int, int]]:
    """Compute capability of each GPU of this node, from NVML or else `nvidia-smi`, visible to this process or not.

    Args:
        timeout_s: How long `nvidia-smi` may take, in seconds.

    Returns:
        In NVML's order; empty where neither answers.
    """
    try:
        import pynvml

        return _from_nvml(pynvml)
    except Exception as error:  # pynvml is optional, and its error class is known only once it is imported
        logger.debug("NVML has no compute capabilities: %s", error)
    try:
        done = subprocess.run(COMPUTE_CAPABILITIES, capture_output=True, text=True, timeout=timeout_s, check=True)
        lines = [line.strip().split(".") for line in done.stdout.splitlines() if line.strip()]
        return [(int(major), int(minor)) for major, minor in lines]
    except (OSError, subprocess.SubprocessError, ValueError) as error:  # an old driver has no such column
        logger.debug("nvidia-smi has no compute capabilities: %s", error)
        return []


def _from_nvml(nvml: Any) -> list[tuple[int, int]]:
    nvml.nvmlInit()
    try:
        gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        found = [nvml.nvmlDeviceGetCudaComputeCapability(gpu) for gpu in gpus]
        return [(int(major), int(minor)) for major, minor in found]
    finally:
        nvml.nvmlShutdown()


def _engines(worker: Any) -> Iterator[Any]:
    for holder in (worker, getattr(worker, "actor", None), getattr(worker, "ref", None)):
        engine = getattr(holder, "engine", None)
        if engine is not None:
            yield engine


def _engine_of(worker: Any) -> str:
    return next((type(engine).__name__ for engine in _engines(worker)), "n/a")


def _layers_of(worker: Any) -> dict[str, list[dict[str, Any]]]:
    """Of each role of a worker whose layers are spread: module, place, device and bytes."""
    return {
        engine.role: [asdict(row) for row in engine.rows()] for engine in _engines(worker) if hasattr(engine, "rows")
    }
