"""`verl-sharding plan`: composes the config of a command and prints what the run would do. Starts nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext_sharding.cli import render
from verl_ext_sharding.config import sft as sft_config
from verl_ext_sharding.config.changes import parse_overrides
from verl_ext_sharding.config.schema import PLUGIN_NAME
from verl_ext_sharding.config.values import unreadable, whole_number
from verl_ext_sharding.errors import ConfigError, did_you_mean
from verl_ext_sharding.launchers import Program
from verl_ext_sharding.placement.table import PlacementTable, RoleRow

if TYPE_CHECKING:
    from hydra.errors import HydraException
    from omegaconf import DictConfig

    from verl_ext_sharding.driver import Plan

_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer_engine")
"""verl's own primary configs."""

_NODES, _DEVICES = "trainer.nnodes", "trainer.n_gpus_per_node"


def run(*, overrides: Sequence[str], config_name: str, config_path: str | None, as_json: bool) -> int:
    """Prints the placement of a command.

    Args:
        overrides: As given to verl's PPO trainer, or to its SFT trainer with that one's config; `trainer.plugin=sharding`
            may be left out.
        config_name: Primary config.
        config_path: Folder of configs, None: verl's.
        as_json: Print JSON instead of tables.

    Raises:
        ConfigError: The command can't run as written, or switches the plugin off.
    """
    from verl_ext_sharding import driver, layer_plans

    config = compose(overrides, config_name, config_path)
    if not driver.asked_for(config):
        raise _switched_off()
    if sft_config.is_sft(config):
        return _show_sft(config, overrides, as_json=as_json)
    plan = driver.prepare(config, explicit=parse_overrides(overrides))
    if as_json:
        layers = [
            {**layer_map.as_dict(), "rows": [asdict(row) for row in layer_plans.planned_rows(config, layer_map)]}
            for layer_map in plan.maps.values()
        ]
        render.show_json(
            {**plan.table.as_dict(), "layers": layers, "changes": [asdict(change) for change in plan.changes]}
        )
        return 0
    show(config, plan)
    return 0


def show(config: DictConfig, plan: Plan) -> None:
    """Prints the keys that were set, the planned table, and what layers lie where.

    Args:
        config: The config that the plan was made of.
        plan: What the driver decided.
    """
    from verl_ext_sharding import layer_plans

    render.show_changes(plan.changes)
    render.show_placement(plan.table)
    for role, layer_map in plan.maps.items():
        render.show_layers(role, layer_plans.planned_rows(config, layer_map), layer_map.notes)


def _show_sft(config: DictConfig, overrides: Sequence[str], *, as_json: bool) -> int:
    """The plan of `verl.trainer.sft_trainer`, whose one role is on every device that torchrun starts a process for.

    Its config says nothing of devices that SFT reads; the plan counts `trainer.nnodes` of `trainer.n_gpus_per_node`.
    """
    from omegaconf import OmegaConf

    from verl_ext_sharding import sft

    nodes, devices = (whole_number(key, OmegaConf.select(config, key), instead=1) for key in (_NODES, _DEVICES))
    ranks = {"RANK": 0, "WORLD_SIZE": nodes * devices, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": devices}
    environ = {**os.environ, **{name: str(number) for name, number in ranks.items()}}
    program = Program(target=("-m", sft.TRAINER), arguments=tuple(overrides))
    plan = sft.prepare(config, parse_overrides(overrides), environ, program)
    row = RoleRow(
        role=sft_config.ROLE,
        worker_class="TrainingWorker",
        engine=sft_config.engine_name(config),
        devices=plan.spec.placement.devices_of(sft_config.ROLE),
        ranks=f"{nodes * devices} process{'es' if nodes * devices > 1 else ''}",
        nodes=tuple(range(nodes)),
        shares="none",
    )
    note = f"torchrun or accelerate launch starts a process on each device; planned are {_NODES}={nodes} of "
    table = PlacementTable(
        rows=(row,), notes=(f"{note}{_DEVICES}={devices}, which SFT itself does not read", *plan.notes)
    )
    if as_json:
        changes = [asdict(change) for change in plan.changes]
        render.show_json({**table.as_dict(), "layers": [], "changes": changes})
    else:
        render.show_changes(plan.changes)
        render.show_placement(table)
    return 0


def compose(overrides: Sequence[str], config_name: str = "ppo_trainer", config_path: str | None = None) -> Any:
    """verl's config with overrides, composed without importing verl or torch.

    Raises:
        ConfigError: Hydra refuses an override.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from verl_ext_sharding.config import hydra_source
    from verl_ext_sharding.patch_points import hydra_overrides
    from verl_ext_sharding.patching import apply

    hydra_source.register()
    for patch in hydra_overrides.SPECS:
        apply(patch)
    folder = _config_folder(config_path)
    switched_on = any(line.lstrip("+~").partition("=")[0] == "trainer.plugin" for line in overrides)
    lines = list(overrides) if switched_on else [*overrides, f"trainer.plugin={PLUGIN_NAME}"]
    try:
        with initialize_config_dir(str(folder), version_base=None):
            return hydra_compose(config_name, overrides=lines)
    except OmegaConfBaseException as error:
        raise unreadable(error) from error
    except HydraException as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise _refused(config_name, error) from error


def _refused(config_name: str, error: HydraException) -> ConfigError:
    from hydra.errors import MissingConfigException, OverrideParseException

    subject, expected = "the overrides", f"overrides of {config_name}"
    found, remedy = str(error).partition("\nConfig search path")[0], "correct the override named above"
    if isinstance(error, OverrideParseException):
        found = f"{error.override}: {str(error.message).splitlines()[0]}"
        remedy = (
            "write key=value, in single quotes where it has braces, quotes or spaces, which a shell takes for its own"
        )
    elif isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        subject, prefix = (group, f"{group}=") if group else ("--config-name", "--config-name=")
        names = tuple(error.options or _CONFIGS)
        expected, found = ", ".join(names), choice
        remedy = f"{prefix}{did_you_mean(choice, names) or names[0]}"
    return ConfigError(subject, expected=expected, found=found, consequence="nothing is planned", remedy=remedy)


def _switched_off() -> ConfigError:
    return ConfigError(
        "trainer.plugin",
        expected=f"{PLUGIN_NAME}, or left out",
        found="null: the run would be verl's own",
        consequence="nothing is planned",
        remedy=f"trainer.plugin={PLUGIN_NAME}",
    )


def _config_folder(config_path: str | None) -> Path:
    """The folder of configs; one that is relative starts here, or where `verl.trainer.main_ppo` takes it to start."""
    trainer = _verl_trainer()
    if config_path is None:
        return trainer / "config"
    folders = [Path(config_path).resolve(), trainer / config_path]
    found = next((folder for folder in folders if folder.is_dir()), None)
    if found is None:
        raise ConfigError(
            "--config-path",
            expected="a folder of configs",
            found=f"{folders[0]}, which is none",
            consequence="nothing is planned",
            remedy="--config-path <the recipe's folder of configs>, or leave it out for verl's own",
        )
    return found


def _verl_trainer() -> Path:
    found = util.find_spec("verl")  # finds a top-level package without importing it
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            "verl",
            expected="installed in this environment",
            found="not found",
            consequence="there is no config to plan for",
            remedy="pip install 'verl-ext-sharding[verl]'",
        )
    return Path(next(iter(found.submodule_search_locations))) / "trainer"
