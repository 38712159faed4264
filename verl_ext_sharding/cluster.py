"""What the driver asks of a running Ray cluster: free resources per node, the same code everywhere, how nodes communicate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_ext_sharding import envs
from verl_ext_sharding.communication import hygiene
from verl_ext_sharding.config import spec
from verl_ext_sharding.config.dtypes import Capability, DtypeUse, check_dtypes, device_capabilities
from verl_ext_sharding.config.schema import CommunicationConfig
from verl_ext_sharding.config.spec import RunSpec
from verl_ext_sharding.errors import ClusterError, ShardingError
from verl_ext_sharding.model_plans import AttentionUse, check_nodes
from verl_ext_sharding.patching import ledger
from verl_ext_sharding.placement.resources import NodeResources
from verl_ext_sharding.workers.probe import Packages, compute_capabilities, packages

ANSWER_TIMEOUT_S = 120.0
"""The least; `sharding.placement.timeout_s` may ask for more, where processes start slowly."""


def free_resources() -> list[NodeResources]:
    """Free GPUs and CPUs of each live node, in verl's order (by address)."""
    available = _available()
    nodes = []
    for node in _alive():
        free = available.get(node["NodeID"], {})
        cpus = float(free.get("CPU", 0))
        nodes.append(
            NodeResources(
                name=node["NodeManagerAddress"],
                num_devices=_accelerators(free),
                num_cpus=cpus,
                cpus_taken=float(node["Resources"].get("CPU", 0)) - cpus,
            )
        )
    return sorted(nodes, key=lambda node: node.name)


def inspect_nodes(
    run: RunSpec,
    env_vars: Mapping[str, str],
    communication: CommunicationConfig,
    exports: Mapping[str, str],
    dtypes: Sequence[DtypeUse] = (),
    attention: Sequence[AttentionUse] = (),
) -> list[hygiene.Setting]:
    """Asks one process on each node: does it run the driver's code, how can it communicate, what can its cards and packages compute?

    Args:
        run: The run's spec, which each node must have been given.
        env_vars: Environment of the run's processes.
        communication: The `sharding.communication` block.
        exports: Communication variables that the user exported where the driver runs.
        dtypes: What the roles compute in.
        attention: What they compute attention with.

    Returns:
        One setting for each communication variable, which all nodes with devices for the job can live with. A head
        without GPUs, or a node with fewer free ones than the job's smallest group has, takes part in no collective.

    Raises:
        ClusterError: A node differs from the driver, or could not answer in time.
        ConfigError: The user asks for what a node has not, or for a dtype or an attention that a role's device can't run.
    """
    nodes, available = _alive(), _available()
    smallest = min(run.placement.group_sizes)
    joins = [_accelerators(available.get(node["NodeID"], {})) >= smallest for node in nodes]
    if not any(joins):  # Ray says a little late that devices were given back
        joins = [_accelerators(node["Resources"]) >= smallest for node in nodes]
    answers = [
        _answer.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False),
            runtime_env={"env_vars": dict(env_vars)},
        ).remote(communication if joining else None, dict(exports))
        for node, joining in zip(nodes, joins, strict=True)
    ]
    timeout_s = max(ANSWER_TIMEOUT_S, run.timeout_s)
    try:
        found = ray.get(answers, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise _silent_node(len(nodes), timeout_s) from None
    except ray.exceptions.RayError as error:  # the node's own, or a node or process that ended instead of answering
        raise _broken_node(error) from error
    expected = {**ledger.parity(), "spec": run.digest()}
    for node, answer in zip(nodes, found, strict=True):
        different = {
            key: (value, answer.code.get(key, ledger.ABSENT))
            for key, value in expected.items()
            if answer.code.get(key) != value
        }
        if different:
            raise _other_code(node["NodeManagerAddress"], different)
    names = [f"{node['NodeManagerAddress']}/{node['NodeID'][:6]}" for node in nodes]
    by_name = dict(zip(names, found, strict=True))
    _check_devices(run, by_name, dtypes, attention)
    return hygiene.merge({name: answer.settings for name, answer in by_name.items() if answer.settings})


def _check_devices(
    run: RunSpec, answers: Mapping[str, NodeAnswer], dtypes: Sequence[DtypeUse], attention: Sequence[AttentionUse]
) -> None:
    placement = run.placement
    topology = placement.topology
    nodes = sorted(name for name, answer in answers.items() if answer.cards)
    capabilities = device_capabilities(
        [answers[name].cards for name in nodes],
        num_nodes=topology.num_nodes,
        devices_per_node=topology.devices_per_node,
    )
    known = len(nodes) == topology.num_nodes
    names = {device: nodes[topology.node_of(device)] for device in capabilities} if known else {}
    check_dtypes(dtypes, placement.devices_of, capabilities, names)
    check_nodes(attention, placement, capabilities, {name: answers[name].packages for name in nodes})


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _available() -> dict[str, dict[str, float]]:
    """Free resources by node id. Ray's client (`ray://`) can't read them itself, and asks a process of the cluster."""
    if ray.util.client.ray.is_connected():
        found: dict[str, dict[str, float]] = ray.get(_ask_available.remote(), timeout=ANSWER_TIMEOUT_S)
        return found
    return dict(ray._private.state.available_resources_per_node())


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator, unused-ignore]
def _ask_available() -> dict[str, dict[str, float]]:
    return dict(ray._private.state.available_resources_per_node())


def _accelerators(resources: Mapping[str, float]) -> int:
    """Devices among the resources of a node."""
    return int(resources.get("GPU", resources.get("NPU", 0)))


@dataclass(kw_only=True, frozen=True)
class NodeAnswer:
    """What a node says of itself.

    Args:
        code: Versions of plugin and verl, the patch table, the digest of the run's spec.
        settings: Communication variables; empty for a node that takes part in no collective.
        cards: Compute capability of each GPU, in NVML's order.
        packages: What decides which attention its processes can run.
    """

    code: Mapping[str, str]
    settings: Sequence[hygiene.Setting]
    cards: Sequence[Capability]
    packages: Packages


@ray.remote(num_cpus=0, max_retries=1)  # type: ignore[untyped-decorator, unused-ignore]
def _answer(communication: CommunicationConfig | None, exports: dict[str, str]) -> NodeAnswer:
    run = spec.current()
    digest = run.digest() if run is not None and not envs.disabled() else "not loaded"
    settings = [] if communication is None else hygiene.decide_here(communication, exports)
    return NodeAnswer(
        code={**ledger.parity(), "spec": digest}, settings=settings, cards=compute_capabilities(), packages=packages()
    )


def _other_code(node: str, different: Mapping[str, tuple[str, str]]) -> ClusterError:
    lines = "; ".join(f"{key}: driver {ours}, node {theirs}" for key, (ours, theirs) in sorted(different.items()))
    return ClusterError(
        f"node {node}",
        expected="the driver's versions of verl-ext-sharding and verl, and the run's spec",
        found=lines,
        consequence="the run stops before workers start, since roles would run different code",
        remedy=f"install the driver's versions on {node}, see `verl-sharding doctor` on both",
    )


def _silent_node(count: int, timeout_s: float) -> ClusterError:
    return ClusterError(
        "nodes of the Ray cluster",
        expected=f"an answer from each of {count} nodes within {timeout_s:g} s",
        found="none from at least one",
        consequence="the run stops before workers start",
        remedy="look at `ray status` and the raylet log of the node that doesn't answer; where processes start slowly, "
        f"sharding.placement.timeout_s={2 * timeout_s:g}",
    )


def _broken_node(error: Any) -> Exception:
    """The node's own error where it is one of ours, else one that says where to look."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ShardingError):
        return cause
    if cause is None:
        return ClusterError(
            "nodes of the Ray cluster",
            expected="an answer from each",
            found=" ".join(str(error).split()) or type(error).__name__,
            consequence="the run stops before workers start",
            remedy="look at `ray status` and the raylet logs (session_latest/logs)",
        )
    return ClusterError(
        "verl-ext-sharding on the nodes of the Ray cluster",
        expected="the plugin imports on each node",
        found=(str(error).strip() or type(cause).__name__).splitlines()[-1],
        consequence="the run stops before workers start",
        remedy="pip install verl-ext-sharding on each node, then run `verl-sharding doctor` there",
    )
