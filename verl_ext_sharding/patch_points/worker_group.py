"""Workers on any bundles of a placement group: verl knows contiguous ranges that start at bundle 0 of a node.

Both places that turn a rank into a bundle resolve a `BundleView` here; every other pool passes through untouched.
"""

from __future__ import annotations

from typing import Any

from verl_ext_sharding import envs
from verl_ext_sharding.patching import original
from verl_ext_sharding.patching.spec import PatchSpec


def create_worker(
    self: Any,
    rank: int,
    pg_idx: int,
    pg: Any,
    local_rank: int,
    resource_pool: Any,
    ray_cls_with_init: Any,
    worker_env: Any,
    detached: Any,
) -> None:
    """As verl's, on the bundle that the view stands for, with the promised device in the worker's environment."""
    bundles = getattr(pg, "bundles", None)
    if bundles is not None:
        bundle = bundles[local_rank]
        worker_env = {**(worker_env or {}), envs.BUNDLE: bundle.promise.to_json()}
        if bundle.promise.visible:
            worker_env[envs.COUNT_BY_NVML] = "1"
        pg, local_rank = bundle.group, bundle.index
    original(CREATE)(self, rank, pg_idx, pg, local_rank, resource_pool, ray_cls_with_init, worker_env, detached)


def get_master_addr_port(self: Any, pg: Any, bundle_index: int = 0, master_port_range: Any = None) -> None:
    """As verl's, in a bundle of the role itself: bundle 0 of the node may have no CPU left."""
    bundles = getattr(pg, "bundles", None)
    if bundles is not None:
        bundle = bundles[bundle_index]
        pg, bundle_index = bundle.group, bundle.index
    original(MASTER)(self, pg, bundle_index=bundle_index, master_port_range=master_port_range)


CREATE = PatchSpec(
    id="worker-bundle",
    target="verl.single_controller.ray.base:RayWorkerGroup._create_worker",
    replacement=create_worker,
    signature=(
        "self",
        "rank",
        "pg_idx",
        "pg",
        "local_rank",
        "resource_pool",
        "ray_cls_with_init",
        "worker_env",
        "detached",
    ),
    fingerprints={"0.9.0": "3876df028c93ad50", "0.9.1": "bf6f686ed8bad8a9"},
    processes=frozenset({"worker"}),
    needed_by="sharding.roles.*.devices",
    upstream_issue="https://github.com/verl-project/verl/issues/7269",
    remove_when="verl's resource pools take a list of bundle indices",
)

MASTER = PatchSpec(
    id="worker-master-bundle",
    target="verl.single_controller.ray.base:RayWorkerGroup._get_master_addr_port",
    replacement=get_master_addr_port,
    signature=("self", "pg", "bundle_index", "master_port_range"),
    fingerprints={"0.9.0": "c079e9959a40c501", "0.9.1": "c079e9959a40c501"},
    processes=frozenset({"worker"}),
    needed_by="sharding.roles.*.devices",
    upstream_issue="https://github.com/verl-project/verl/issues/7269",
    remove_when="verl's resource pools take a list of bundle indices",
)

SPECS = (CREATE, MASTER)
