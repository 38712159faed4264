"""Subclasses of verl's workers: each verifies its device before a model loads, and sets up what its platform needs.

Made from whatever worker class the trainer (or a recipe) chose, so that verl's methods and their dispatch stay as they are.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch.distributed
from verl.plugin.platform import get_platform
from verl.utils.distributed import initialize_global_process_group_ray

from verl_ext_sharding import envs
from verl_ext_sharding.config import spec
from verl_ext_sharding.errors import PlacementError
from verl_ext_sharding.placement.bundles import Promise
from verl_ext_sharding.workers.probe import node_and_accelerator

logger = logging.getLogger(__name__)


class RoleWorkerMixin:
    """Added in front of a worker class of verl.

    verl's trainer names the actor's worker "actor" when the reference lives elsewhere, and then builds no rollout in it
    (workers/engine_workers.py). In a job whose actor also serves rollout it must be "actor_rollout".
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        verify_device()
        ensure_process_group()
        run = spec.current()
        if kwargs.get("role") == "actor" and run is not None and run.hybrid_rollout:
            kwargs["role"] = "actor_rollout"
        super().__init__(*args, **kwargs)


@functools.cache
def sharding_worker_class(base: type) -> type:
    """The subclass of a worker class of verl that this package runs, or the class itself if it is one already."""
    if issubclass(base, RoleWorkerMixin):
        return base
    return type(f"Sharding{base.__name__}", (RoleWorkerMixin, base), {"__module__": __name__, "__doc__": base.__doc__})


def verify_device() -> None:
    """Compares the device that this worker got with the one that it was promised.

    Raises:
        PlacementError: They differ.
    """
    promised = os.environ.get(envs.BUNDLE)
    if not promised:
        return
    promise = Promise.from_json(promised)
    node_id, accelerator_id = node_and_accelerator(get_platform().ray_resource_name())
    promise.verify(f"device {promise.device} of the job", node_id=node_id, accelerator_id=accelerator_id)
    found = os.environ.get(promise.visible_variable, "") if promise.visible else ""
    if found == ",".join(promise.visible):
        return
    raise PlacementError(
        f"devices of the process on device {promise.device} of the job",
        expected=f"{promise.visible_variable}={','.join(promise.visible)}",
        found=found or "unset",
        consequence="the run stops before the model loads",
        remedy="check that nothing sets this variable in workers",
    )


def ensure_process_group() -> None:
    """Joins the process group on platforms whose device type is the CPU.

    verl asks for `cpu:gloo,<device>:<backend>`, which names the CPU twice there and is refused by torch.
    """
    if get_platform().device_name == "cpu" and not torch.distributed.is_initialized():
        initialize_global_process_group_ray(backend="cpu:gloo")
