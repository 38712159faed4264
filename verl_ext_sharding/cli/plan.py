"""`verl-sharding plan`: composes the config of a command and prints what the run would do. Starts nothing."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext_sharding import envs
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

_YAML = ".yaml"
_YAMLS = (_YAML, ".yml")
_NOTHING = "nothing is planned"
_RIGHT_FOLDER = "--config-path <the recipe's folder of configs>, or leave it out for verl's own"

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
        ConfigError: The command can't run as written, or the plugin is switched off.
    """
    from verl_ext_sharding import driver, layer_plans

    if reasons := envs.keeping_out():
        raise _kept_out(reasons)
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

    from verl_ext_sharding.config import hydra_source, override_syntax
    from verl_ext_sharding.patch_points import hydra_overrides
    from verl_ext_sharding.patching import apply

    hydra_source.register()
    for patch in hydra_overrides.SPECS:
        apply(patch)
    folder = _config_folder(config_path)
    for word in overrides:
        if word.endswith(_YAMLS) and "=" not in word and not word.startswith("~"):
            raise _one_file(word)
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
        raise override_syntax.explain(lines, asked=True) or _refused(config_name, folder, error) from error


def _refused(config_name: str, folder: Path, error: HydraException) -> ConfigError:
    from hydra.errors import MissingConfigException

    found = str(error).partition("\nConfig search path")[0]
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing(config_name, folder, str(error.missing_cfg_file), error.options or ())
    if "'trainer.plugin'" in found:
        return _none_of_verls(config_name)
    return ConfigError(
        "the overrides",
        expected=f"overrides of {config_name}",
        found=found,
        consequence=_NOTHING,
        remedy="correct the override named above",
    )


def _none_of_verls(config_name: str) -> ConfigError:
    """The error for a config that our group does not reach, since it has none of verl's among its defaults."""
    file = f"{config_name.removesuffix(_YAML)}{_YAML}"
    return ConfigError(
        config_name,
        expected="one of verl's configs, or a recipe's, which goes on from one",
        found=f"{file}, which has none of verl's configs in its defaults",
        consequence=_NOTHING,
        remedy=f'write "defaults: [ppo_trainer, _self_]" and "hydra: {{searchpath: [pkg://verl.trainer.config]}}" into {file}',
    )


def _missing(config_name: str, folder: Path, missing: str, options: Sequence[str]) -> ConfigError:
    """The error for a config that is not there: the primary one, a choice of a group, or one of a recipe's `defaults`.

    Args:
        config_name: The primary config that was asked for.
        folder: Where it is looked for.
        missing: What is not there, without its ending.
        options: What the group has, if it is a choice.
    """
    names, stem = _names_in(folder), config_name.removesuffix(_YAML)
    if missing.removesuffix(_YAML).strip("/") == stem.strip("/") or (stem not in names and not options):
        return _no_config(config_name, folder, names)
    group, _, choice = missing.rpartition("/")
    if options:
        return ConfigError(
            group,
            expected=", ".join(options),
            found=choice,
            consequence=_NOTHING,
            remedy=f"{group}={did_you_mean(choice, options) or options[0]}",
        )
    return ConfigError(
        f"the defaults of {config_name}",
        expected="configs of its own folder, or of Hydra's search path",
        found=missing,
        consequence=_NOTHING,
        remedy="hydra.searchpath=[pkg://verl.trainer.config], where it is one of verl's, or correct the name",
    )


def _no_config(config_name: str, folder: Path, names: Sequence[str]) -> ConfigError:
    """The error for a primary config that is not there, which says what is."""
    if "/" in config_name:
        return _one_file(config_name, folder)
    close = did_you_mean(config_name.removesuffix(_YAML), names)
    if close is None and folder == _verl_configs():
        close = _CONFIGS[0]
    ways = [f"--config-name={name}" for name in ([close] if close else names)]
    return ConfigError(
        "--config-name",
        expected=", ".join(names) or f"a config in {folder}, which has none",
        found=config_name,
        consequence=_NOTHING,
        remedy=", or ".join(ways) or _RIGHT_FOLDER,
    )


def _one_file(path: str, folder: Path | None = None) -> ConfigError:
    """The error for a config that is written as a file, from here or from a folder: Hydra takes folder and name apart."""
    file = Path(path).absolute()
    if folder is not None and not file.parent.is_dir():
        file = folder / path
    renamed = f"mv {path} {Path(path).with_suffix(_YAML)}, and " if file.suffix == ".yml" else ""
    where, stem = shlex.quote(str(file.parent)), file.stem if file.suffix in _YAMLS else file.name
    return ConfigError(
        path,
        expected="the folder of a recipe's config, and its name",
        found=f"the file {path}",
        consequence=_NOTHING,
        remedy=f"{renamed}--config-path={where} --config-name={stem}",
    )


def _names_in(folder: Path) -> tuple[str, ...]:
    """The primary configs that a folder may have."""
    return _CONFIGS if folder == _verl_configs() else tuple(sorted(file.stem for file in folder.glob(f"*{_YAML}")))


def _kept_out(reasons: Mapping[str, str]) -> ConfigError:
    return ConfigError(
        "the plugin",
        expected="loaded by verl in the run",
        found=", and ".join(reasons.values()),
        consequence=f"{_NOTHING}: the run would refuse trainer.plugin={PLUGIN_NAME}",
        remedy=f"unset {' '.join(reasons)}",
    )


def _switched_off() -> ConfigError:
    return ConfigError(
        "trainer.plugin",
        expected=f"{PLUGIN_NAME}, or left out",
        found="null: the run would be verl's own",
        consequence=_NOTHING,
        remedy=f"trainer.plugin={PLUGIN_NAME}",
    )


def _config_folder(config_path: str | None) -> Path:
    """The folder of configs; one that is relative starts here, or where `verl.trainer.main_ppo` takes it to start."""
    if config_path is None:
        return _verl_configs()
    if config_path.endswith(_YAMLS):
        raise _one_file(config_path)
    folders = [Path(config_path).resolve(), _verl_trainer() / config_path]
    found = next((folder for folder in folders if folder.is_dir()), None)
    if found is None:
        raise ConfigError(
            "--config-path",
            expected="a folder of configs",
            found=f"{folders[0]}, which is none",
            consequence=_NOTHING,
            remedy=_RIGHT_FOLDER,
        )
    return found


def _verl_configs() -> Path:
    return _verl_trainer() / "config"


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
