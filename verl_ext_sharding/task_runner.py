"""From a plan to Ray: what the driver does between verl's `ray.init` and its TaskRunner."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from verl_ext_sharding import envs, launchers
from verl_ext_sharding.cli import render
from verl_ext_sharding.cli.plan import show
from verl_ext_sharding.communication import hygiene
from verl_ext_sharding.config import cpu
from verl_ext_sharding.config.changes import KeyChange, apply_changes, explicit_keys
from verl_ext_sharding.config.dtypes import dtype_uses
from verl_ext_sharding.config.guards import Guards
from verl_ext_sharding.config.spec import RunSpec
from verl_ext_sharding.config.translate import values_of
from verl_ext_sharding.driver import Plan, needed_keys, prepare, uses_hf
from verl_ext_sharding.monitor import events
from verl_ext_sharding.placement import resources

logger = logging.getLogger(__name__)


def launch(original: Callable[..., Any], config: DictConfig, task_runner_class: Any) -> Any:
    """verl's `run_ppo` for a run that asked for the plugin.

    Args:
        original: verl's own `run_ppo`.
        config: The composed config.
        task_runner_class: verl's or a recipe's Ray actor class.
    """
    joins_ray = cpu.finds_ray(config)
    launchers.require_one_driver(joins_ray=joins_ray)
    plan = prepare(config)
    hygiene.check_exports(plan.request.communication, os.environ)
    if cpu.is_cpu(config):
        os.environ[envs.VERL_PLATFORM] = "cpu"
        os.environ.setdefault(envs.PRESTART, "0")
    show(config, plan)
    events.emit("stage", name="ray")
    return original(config, task_runner_class=TaskRunnerGate(task_runner_class, plan, config, joins_ray=joins_ray))


class TaskRunnerGate:
    """Stands for the TaskRunner class: once verl has started Ray, checks the cluster, then lets the runner through.

    verl calls `.remote()` or `.options(...).remote()` on it right after `ray.init` (trainer/main_ppo.py, run_ppo).

    Args:
        task_runner_class: The Ray actor class.
        plan: What the driver decided.
        config: The config that the runner will be given.
        options: As given to a Ray actor class.
        joins_ray: Ray ran before the job.
    """

    def __init__(
        self,
        task_runner_class: Any,
        plan: Plan,
        config: DictConfig,
        options: Mapping[str, Any] | None = None,
        *,
        joins_ray: bool = False,
    ) -> None:
        self._task_runner_class = task_runner_class
        self._plan = plan
        self._config = config
        self._options = dict(options or {})
        self._joins_ray = joins_ray

    def options(self, **options: Any) -> TaskRunnerGate:
        """As on a Ray actor class."""
        options = {**self._options, **options}
        return TaskRunnerGate(self._task_runner_class, self._plan, self._config, options, joins_ray=self._joins_ray)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Checks cluster and nodes, then creates the runner in an environment that carries the run's spec.

        Raises:
            PlacementError: The cluster can't hold the job.
            ClusterError: A node has another version of the plugin or of verl.
        """
        from verl_ext_sharding import cluster

        events.emit("stage", name="nodes")
        nodes = cluster.free_resources()
        self._number_nodes(nodes)
        bundle_cpus = resources.check_cluster(
            self._plan.placement,
            self._plan.facts,
            nodes,
            fixed=self._plan.request.placement.max_colocate_count is not None,
            joins_ray=self._joins_ray,
        )
        self._fit_transfer_queue(nodes, bundle_cpus)
        placement = self._plan.placement
        if bundle_cpus < placement.colocate_count:
            placement = replace(placement, managed=True)  # verl's own pools always take its count of CPUs
        spec = RunSpec(
            placement=placement,
            hybrid_rollout=self._plan.facts.hybrid_rollout,
            bundle_cpus=bundle_cpus,
            timeout_s=self._plan.request.placement.timeout_s,
            reward_workers=self._plan.facts.reward_workers,
            backends=self._plan.facts.backends,
            measures=self._plan.measures,
            guards=Guards.of(self._plan.request.guards),
            reward=self._plan.reward,
            seed=self._plan.seed,
            needed=needed_keys(self._plan, placement),
        )
        env_vars = {envs.SPEC: spec.to_json(), **envs.forwarded()}
        if placement.managed and "sglang" in spec.backends.values():
            # With them SGLang counts devices from the node's first one on (async_sglang_server.py), whatever a role's are.
            if exported := [name for name in envs.SHOW_ALL if os.environ.get(name)]:
                logger.info("%s is off in the run's processes, since SGLang finds placed devices without", exported[0])
            env_vars |= dict.fromkeys(envs.SHOW_ALL, "")
        dtypes = dtype_uses(self._plan.request, values_of(self._config), hf_rollout=uses_hf(self._config))
        settings = cluster.inspect_nodes(
            spec,
            env_vars,
            self._plan.request.communication,
            hygiene.exported(os.environ),
            dtypes,
            self._plan.attention,
        )
        render.show_settings(settings)
        env_vars |= hygiene.as_env(settings)
        os.environ.update(hygiene.as_env(settings))
        events.emit("communication", processes={"driver": {name: os.environ.get(name) for name in hygiene.NAMES}})
        runtime_env = dict(self._options.get("runtime_env", {}))
        runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **env_vars}
        options = {**self._options, "runtime_env": runtime_env}
        return self._task_runner_class.options(**options).remote(*args, **kwargs)

    def _number_nodes(self, nodes: Sequence[resources.NodeResources]) -> None:
        """Plans again where maps name nodes by address and Ray's other nodes give them other numbers."""
        if self._plan.placement.topology.node_names:
            plan = prepare(self._config, node_names=resources.nodes_of_job(self._plan.placement, nodes))
            if plan is not self._plan:
                self._plan = plan
                render.show_changes(plan.changes)
                render.show_placement(plan.table)

    def _fit_transfer_queue(self, nodes: Sequence[resources.NodeResources], bundle_cpus: int) -> None:
        """TransferQueue holds a CPU for each storage unit, before verl reserves devices; too many would hang it."""
        facts = self._plan.facts
        units = resources.storage_units_that_fit(self._plan.placement, facts, nodes, bundle_cpus)
        if units < facts.transfer_queue_units - 1:
            key = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
            change = KeyChange(key=key, new=units, why="CPUs left beside the devices' bundles")
            render.show_changes(apply_changes(self._config, [change], explicit_keys()))
