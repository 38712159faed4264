"""From verl's config to a plan: what the driver decides before a run that asked for the plugin starts.

Pure: `prepare` turns a composed config into a `Plan` without touching a device, so that `verl-sharding plan`, tests and the
run itself see the same. `task_runner` acts on it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext_sharding import envs, layer_plans, model_plans, reward_plans, rollout
from verl_ext_sharding.config import cpu
from verl_ext_sharding.config.changes import KeyChange, apply_changes, explicit_keys
from verl_ext_sharding.config.distillation import check_teachers
from verl_ext_sharding.config.dtypes import float16_notes
from verl_ext_sharding.config.engine_flags import engine_notes
from verl_ext_sharding.config.facts import job_facts, uses_lora
from verl_ext_sharding.config.idle_keys import idle_notes
from verl_ext_sharding.config.measures import ENGINE_ROLES, RoleMeasures, measures_of
from verl_ext_sharding.config.micro_batches import check_micro_batches
from verl_ext_sharding.config.offload import offload_notes
from verl_ext_sharding.config.recipe_keys import check_recipe_keys, check_words
from verl_ext_sharding.config.reward import RewardServerSettings
from verl_ext_sharding.config.reward_limits import ENABLE, is_discriminative
from verl_ext_sharding.config.run_asserts import check_asserts
from verl_ext_sharding.config.saved_contents import check_saved_contents
from verl_ext_sharding.config.schema import PLUGIN_NAME, ShardingConfig
from verl_ext_sharding.config.token_budget import check_token_budgets
from verl_ext_sharding.config.translate import request_of, translate, values_of
from verl_ext_sharding.config.values import resolving, whole_number
from verl_ext_sharding.errors import ConfigError
from verl_ext_sharding.placement import checks, resources
from verl_ext_sharding.placement.backends import check_backends
from verl_ext_sharding.placement.bundles import Layout, Placement, place
from verl_ext_sharding.placement.device_map import LayerMap
from verl_ext_sharding.placement.job import JobFacts
from verl_ext_sharding.placement.table import PlacementTable, placement_table


@dataclass(kw_only=True, frozen=True)
class Plan:
    """What the driver decided for one run.

    Args:
        request: The user's typed request.
        facts: The job.
        placement: Role -> devices.
        changes: verl's keys that were set.
        table: Role, worker class, engine, devices, ranks, node, for people and programs.
        measures: Memory measures of each role that has any.
        attention: What each role on GPUs computes attention with.
        maps: Where the layers of each role with `layout: device_map` lie.
        reward: How reward servers of `rollout.name=hf` run.
        scores_by_model: verl itself asks a reward model for scores.
        seed: `data.seed`.
        critic_attention: The critic's attention is set by verl's own key, which stock verl ignores.
    """

    request: ShardingConfig
    facts: JobFacts
    placement: Placement
    changes: tuple[KeyChange, ...]
    table: PlacementTable
    measures: Mapping[str, RoleMeasures]
    attention: tuple[model_plans.AttentionUse, ...]
    maps: Mapping[str, LayerMap]
    reward: RewardServerSettings | None = None
    scores_by_model: bool = False
    seed: int | None = None
    critic_attention: bool = False


def asked_for(config: DictConfig) -> bool:
    """Whether a composed config switches the plugin on.

    Raises:
        ConfigError: `trainer.plugin` has an unknown value, or `sharding` settings are there but the plugin is off.
    """
    with resolving(config):
        plugin = OmegaConf.select(config, "trainer.plugin", default=None)
        if plugin == PLUGIN_NAME:
            return True
        if plugin is not None:
            raise _unknown_plugin(plugin)
        changed = request_of(config).changed() if "sharding" in config else {}
        if changed:
            raise _not_switched_on(changed)
    return False


def prepare(config: DictConfig, explicit: Mapping[str, str] | None = None, *, node_names: tuple[str, ...] = ()) -> Plan:
    """Checks a request and sets verl's own keys for it, in place.

    Args:
        config: verl's composed config with `trainer.plugin=sharding`.
        explicit: `{key: value}` that the user wrote; None: read from Hydra.
        node_names: Addresses of the job's nodes in verl's order, once Ray runs.

    Raises:
        ConfigError: Something can't be met as asked; nothing has been started.
    """
    global _prepared
    numbered = _prepared is not None and node_names in ((), _prepared[1].placement.topology.node_names)
    if _prepared is None or _prepared[0] is not config or not numbered:
        with resolving(config):
            _prepared = config, _plan(config, explicit_keys() if explicit is None else explicit, node_names)
    return _prepared[1]


_prepared: tuple[DictConfig, Plan] | None = None
"""The config that was prepared last: verl's main validates it before `run_ppo`, and both must see one plan."""


def _plan(config: DictConfig, explicit: Mapping[str, str], node_names: tuple[str, ...]) -> Plan:
    _require_v1(config)
    cpu.check_device(config)
    check_recipe_keys(config, explicit)
    check_words(config)
    request = request_of(config)
    facts = job_facts(config)
    placement = place(
        {role: getattr(request.roles, role).devices for role in _ROLES},
        facts,
        layouts=_layouts(request),
        colocate_count=request.placement.max_colocate_count,
        node_names=node_names,
    )
    applied: list[KeyChange] = []
    if cpu.is_cpu(config):
        cpu.check(config, explicit)
        applied += apply_changes(config, cpu.changes(config, facts, placement), explicit)
    reward_model = reward_plans.hf_config_of(config)
    changes = translate(request, facts, placement, values_of(config), explicit, reward_model=reward_model)
    applied += apply_changes(config, changes, explicit)
    applied += apply_changes(config, rollout_changes(config), explicit)
    facts = job_facts(config)
    values = values_of(config)
    check_micro_batches(request, facts, values)
    check_asserts(values, facts, placement)
    check_saved_contents(config, facts)
    checks.check_job(placement, facts)
    check_backends(placement, facts)
    check_token_budgets(values, facts, placement)
    check_teachers(values)
    _check_told_cpus(config, request, facts, placement)
    _check_hf_rollout(config)
    reward = reward_plans.check(config, request, facts, reward_model)
    measures = measures_of(request)
    attention = model_plans.check_models(config, facts, measures)
    spread, maps = layer_plans.plan_spread(config, request, placement, facts)
    table = placement_table(placement, facts)
    notes = offload_notes(request, facts, values, explicit)
    notes += engine_notes(values, facts, placement, explicit)
    notes += idle_notes(request, facts, placement, values, explicit)
    notes += float16_notes(values, list(facts.engines))
    notes += reward_plans.notes(request, facts, values, reward_model)
    return Plan(
        request=request,
        facts=facts,
        placement=placement,
        changes=tuple(applied),
        measures=layer_plans.with_spread(measures, spread),
        attention=tuple(attention),
        maps=maps,
        reward=reward,
        scores_by_model=is_discriminative(values),
        seed=OmegaConf.select(config, "data.seed", default=None),
        table=replace(table, notes=(*table.notes, *notes)),
        critic_attention=OmegaConf.select(config, CRITIC_ATTENTION, default=None) is not None,
    )


LOGITS = "sharding.roles.*.logits"

LORA = "actor_rollout_ref.model.lora.rank"

CRITIC_ATTENTION = "critic.model.override_config.attn_implementation"


def _layouts(request: ShardingConfig) -> dict[str, Layout]:
    """The layout of each trained role that asks for one."""
    asked = {role: getattr(request.roles, role).layout for role in ENGINE_ROLES}
    return {role: layout for role, layout in asked.items() if layout is not None}


_ROLES = ("actor", "rollout", "ref", "critic", "reward", "teacher")


def uses_hf(config: DictConfig) -> bool:
    """Whether rollout is served with transformers."""
    name = OmegaConf.select(config, "actor_rollout_ref.rollout.name", throw_on_missing=False)
    return bool(name == rollout.NAME)


def _check_hf_rollout(config: DictConfig) -> None:
    from verl_ext_sharding.rollout.checks import check_rollout
    from verl_ext_sharding.rollout.checks import check_teachers as check_served_teachers

    distillation = OmegaConf.select(config, "distillation", default=None)
    for error in check_served_teachers(OmegaConf.to_container(distillation, resolve=True) if distillation else {}):
        raise error
    if not uses_hf(config):
        return
    block = config.actor_rollout_ref
    nested = {name: OmegaConf.to_container(block[name], resolve=True) for name in ("rollout", "model")}
    for error in check_rollout(nested["rollout"], nested["model"]):
        raise error


def rollout_changes(config: DictConfig) -> list[KeyChange]:
    """What `rollout.name=hf` needs of verl: an agent loop that gives each request its seed, and LoRA merged into the weights."""
    if not uses_hf(config):
        return []
    wanted: dict[str, Any] = {}
    manager = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
    if not OmegaConf.select(config, manager, default=None):  # with a user's own, the server seeds each request itself
        wanted[manager] = rollout.SEEDED_AGENT_LOOP
    if uses_lora(config):
        wanted["actor_rollout_ref.model.lora.merge"] = True
    why = "actor_rollout_ref.rollout.name=hf"
    return [KeyChange(key=key, new=value, why=why, default=True) for key, value in wanted.items()]


def needed_keys(plan: Plan, placement: Placement) -> tuple[str, ...]:
    """Keys of this run that a patch may be needed by, see `PatchSpec.needed_by`."""
    needed = ["trainer.plugin"]
    if placement.managed:
        needed.append("sharding.roles.*.devices")
    measures = plan.measures
    if any(m.logits is not None for m in measures.values()):
        needed.append(LOGITS)
    if plan.critic_attention or measures.get("critic", RoleMeasures()).attention is not None:
        needed.append(CRITIC_ATTENTION)
    if plan.scores_by_model:
        needed.append(ENABLE)
    if plan.facts.ref_in_actor and {"ref", "critic"} <= set(plan.facts.engines):
        needed.append(LORA)
    return tuple(needed)


def _check_told_cpus(config: DictConfig, request: ShardingConfig, facts: JobFacts, placement: Placement) -> None:
    """As the cluster is checked, where the config says how many CPUs the Ray will have that verl starts itself, on one node."""
    num_cpus = OmegaConf.select(config, "ray_kwargs.ray_init.num_cpus", default=None)
    if num_cpus is None or placement.topology.num_nodes > 1 or "RAY_OVERRIDE_RESOURCES" in os.environ:
        return
    count = whole_number("ray_kwargs.ray_init.num_cpus", num_cpus, instead=os.cpu_count() or 1)
    node = resources.NodeResources(name="0", num_devices=sum(placement.group_sizes), num_cpus=count)
    fixed = request.placement.max_colocate_count is not None
    resources.check_cluster(placement, facts, [node], fixed=fixed)


_OWN_TRAINERS = {
    "async_training": "verl.experimental.fully_async_policy",
    "rollout.nnodes": "verl.experimental.one_step_off_policy",
}
"""A key by which the config of a program is known whose trainer is none of v1, and places its roles itself."""


def _require_v1(config: DictConfig) -> None:
    own = next((name for key, name in _OWN_TRAINERS.items() if OmegaConf.select(config, key) is not None), None)
    if own is not None:
        raise ConfigError(
            "trainer.plugin",
            expected="verl.trainer.main_ppo, whose roles can be placed",
            found=f"the config of {own}, which places its roles itself",
            consequence="the run does not start, since nothing of `sharding` would act",
            remedy="python -m verl.trainer.main_ppo with trainer.v1.trainer_mode=separate_async, or trainer.plugin=null",
        )
    if OmegaConf.select(config, "trainer.use_v1", default=True):
        return
    raise ConfigError(
        "trainer.use_v1",
        expected="True: verl's v1 trainer",
        found="False with trainer.plugin=sharding",
        consequence="the run does not start",
        remedy="trainer.use_v1=True, or remove trainer.plugin=sharding",
    )


def _unknown_plugin(plugin: Any) -> ConfigError:
    return ConfigError(
        "trainer.plugin",
        expected=f"{PLUGIN_NAME} or null",
        found=str(plugin),
        consequence="the run does not start",
        remedy=f"trainer.plugin={PLUGIN_NAME}",
    )


def _not_switched_on(changed: Mapping[str, Any]) -> ConfigError:
    written = " ".join(f"{key}={value}" for key, value in list(changed.items())[:3])
    return ConfigError(
        "trainer.plugin",
        expected=f"{PLUGIN_NAME}, since sharding settings are given",
        found=f"null with {written}",
        consequence="the run does not start, since those settings would be skipped",
        remedy=f"trainer.plugin={PLUGIN_NAME}",
    )


def select_cpu() -> None:
    """Makes this process and every Ray process of the run use verl's `cpu` platform."""
    from verl.plugin.platform import get_platform, set_platform

    from verl_ext_sharding.platforms.cpu import PlatformCPU

    os.environ[envs.VERL_PLATFORM] = "cpu"
    if get_platform().device_name != "cpu":  # chosen before, from the environment or by an import
        set_platform(PlatformCPU())


def view_for_validation(config: DictConfig) -> DictConfig:
    """A copy of the config in which the job has the actor's devices, for verl's own checks of batch sizes.

    Raises:
        ConfigError: The request can't be met; the same as `prepare` raises.
    """
    plan = prepare(config)
    view = copy.deepcopy(config)
    view.trainer.nnodes = 1
    view.trainer.n_gpus_per_node = plan.placement.processes_of("actor")
    return view
