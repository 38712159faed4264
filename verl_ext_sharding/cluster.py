"""What the driver asks of a running Ray cluster: free resources per node, and whether each node runs the same code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_ext_sharding.config.spec import RunSpec
from verl_ext_sharding.errors import ClusterError
from verl_ext_sharding.patching import ledger
from verl_ext_sharding.placement.checks import NodeResources

PARITY_TIMEOUT_S = 120.0


def free_resources() -> list[NodeResources]:
    """Free GPUs and CPUs of each live node, in verl's order (by address)."""
    available = ray._private.state.available_resources_per_node()
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            free = available.get(node["NodeID"], {})
            devices = int(free.get("GPU", free.get("NPU", 0)))
            name = node["NodeManagerAddress"]
            nodes.append(NodeResources(name=name, num_devices=devices, num_cpus=float(free.get("CPU", 0))))
    return sorted(nodes, key=lambda node: node.name)


def check_parity(spec: RunSpec, env_vars: Mapping[str, str]) -> None:
    """Compares version, spec and patched sources with one process on each node.

    Raises:
        ClusterError: A node differs, or could not answer in time.
    """
    here = report()
    alive = [node for node in ray.nodes() if node["Alive"]]
    answers = [
        _report_there.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False),
            runtime_env={"env_vars": dict(env_vars)},
        ).remote()
        for node in alive
    ]
    try:
        reports = ray.get(answers, timeout=PARITY_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError:
        raise _silent_node(len(alive)) from None
    except ray.exceptions.RayTaskError as error:
        raise _broken_node(error) from error
    expected = {**here, "spec": spec.digest()}
    for node, found in zip(alive, reports, strict=True):
        different = {
            key: (expected[key], found.get(key, ledger.ABSENT)) for key in expected if found.get(key) != expected[key]
        }
        if different:
            raise _other_code(node["NodeManagerAddress"], different)


def report() -> dict[str, str]:
    """What must be equal everywhere: releases, and the fingerprint of every source that we patch."""
    return ledger.parity()


@ray.remote(num_cpus=0, max_retries=1)
def _report_there() -> dict[str, str]:
    from verl_ext_sharding import envs
    from verl_ext_sharding.config import spec

    run = spec.current()
    return {**report(), "spec": run.digest() if run and not envs.disabled() else "not loaded"}


def _other_code(node: str, different: Mapping[str, tuple[str, str]]) -> ClusterError:
    lines = "; ".join(f"{key}: driver {ours}, node {theirs}" for key, (ours, theirs) in sorted(different.items()))
    return ClusterError(
        f"node {node}",
        expected="the driver's versions of verl-ext-sharding and verl, and the run's spec",
        found=lines,
        consequence="the run stops before workers start, since roles would run different code",
        remedy=f"install the same versions on {node}: pip install verl-ext-sharding=={report()['release:verl-ext-sharding']}",
    )


def _silent_node(count: int) -> ClusterError:
    return ClusterError(
        "nodes of the Ray cluster",
        expected=f"an answer from each of {count} nodes within {PARITY_TIMEOUT_S:g} s",
        found="none from at least one",
        consequence="the run stops before workers start",
        remedy="look at `ray status` and the raylet log of the node that doesn't answer",
    )


def _broken_node(error: Any) -> ClusterError:
    return ClusterError(
        "verl-ext-sharding on the nodes of the Ray cluster",
        expected="the plugin imports on each node",
        found=str(error).strip().splitlines()[-1],
        consequence="the run stops before workers start",
        remedy="pip install verl-ext-sharding on each node, then run `verl-sharding doctor` there",
    )
