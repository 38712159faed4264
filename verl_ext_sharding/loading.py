"""What the plugin puts in place when verl is imported: hooks that wait for the module they concern.

A process of a run that asked for the plugin carries the run's spec in its environment; every other process is taken for
a driver, whose hooks stay dormant until a config says `trainer.plugin=sharding`.
"""

from __future__ import annotations

import logging
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from verl_ext_sharding import envs, platforms, rollout, versions
from verl_ext_sharding.errors import PatchError
from verl_ext_sharding.patching import install
from verl_ext_sharding.patching.deferred import when_imported
from verl_ext_sharding.patching.ledger import forecast, known_specs

if TYPE_CHECKING:
    from verl_ext_sharding.config.spec import RunSpec

logger = logging.getLogger(__name__)

_SAME_DEVICES = {"HIP_VISIBLE_DEVICES"}
"""Variables that verl compares with CUDA_VISIBLE_DEVICES where they are set (ROCm)."""

_SHOW_ALL = "RAY_EXPERIMENTAL_NOSET_"
"""How the variables begin that keep Ray from showing a process its own devices alone."""


def load() -> None:
    """Registers everything for this process. Importing verl must be under way or done.

    Raises:
        PatchError: A run that asked for the plugin needs a patch that doesn't fit this verl, or verl is out of range.
    """
    platforms.register()
    if not os.environ.get(envs.SPEC):
        _refuse_several_drivers()
        when_imported("hydra.core.plugins", _register_config)
        install(known_specs(), process="driver")
        return
    from verl_ext_sharding.config import spec  # not needed by a driver, which loads fast

    run = spec.current()
    assert run is not None
    show_devices()
    _require_supported_verl()
    logging.getLogger("verl_ext_sharding").setLevel(os.environ.get("VERL_LOGGING_LEVEL", "INFO"))
    when_imported(rollout.BASE_MODULE, rollout.register_adapter)
    when_imported(rollout.REPLICA_MODULE, rollout.register_replica)
    install_for_roles(run)


def install_for_roles(run: RunSpec) -> None:
    """Engines and patches for a process that runs roles: each Ray worker of a run, each process of SFT.

    Args:
        run: The run's spec.

    Raises:
        PatchError: A patch that the run needs does not fit this verl.
    """
    when_imported("verl.workers.engine", _register_engines)
    # A patch that no key of this run needs stays out: null leaves verl alone.
    wanted = [patch for patch in known_specs() if patch.needed_by is None or patch.needed_by in run.needed]
    install(wanted, process="worker", needed=run.needed)


def show_devices() -> None:
    """Lets a process that spreads a model see all devices of its role.

    Ray shows a process the device of its bundle, and counts devices otherwise if the process is started with another
    value. So the value changes here, before CUDA starts: verl has asked whether there is a GPU by now, which goes by NVML
    in such a process (`envs.COUNT_BY_NVML`). The engine then makes sure that it can use each device.

    Where Ray was told to show every device to each process, verl would pick one by its id, which counts all of them.
    """
    promised = os.environ.get(envs.BUNDLE)
    if promised:
        from verl_ext_sharding.placement.bundles import Promise

        promise = Promise.from_json(promised)
        if promise.visible:
            for variable in {promise.visible_variable, *_SAME_DEVICES & os.environ.keys()}:
                os.environ[variable] = ",".join(promise.visible)
            for variable in [name for name in os.environ if name.startswith(_SHOW_ALL)]:
                del os.environ[variable]


def _refuse_several_drivers() -> None:
    """Answers a launcher around the PPO trainer at once, where the command line tells enough."""
    if sys.argv[:1] == ["-m"]:  # Python is still looking for the module that it will run
        from verl_ext_sharding import launchers

        launchers.refuse_at_start(os.environ, sys.argv, sys.orig_argv)


def _register_config(_module: ModuleType) -> None:
    """Makes `trainer.plugin` a key of verl's config, unless a run that asks for it could not be given what it asks."""
    unfit = [patch for patch in forecast(needed=("trainer.plugin",)) if patch.state == "failed"]
    if unfit:
        logger.error(
            "verl-ext-sharding does not fit this verl, and trainer.plugin=sharding will be refused; run `verl-sharding "
            "doctor`. %s",
            "; ".join(f"{patch.id}: {patch.reason}" for patch in unfit),
        )
        return
    from verl_ext_sharding.config import hydra_source

    hydra_source.register()


def _register_engines(_module: ModuleType) -> None:
    from verl_ext_sharding import engines

    engines.register()


def _require_supported_verl() -> None:
    found = versions.installed("verl")
    if found is None or versions.in_range(found):
        return
    raise PatchError(
        "verl",
        expected=f"a release {versions.VERL_RANGE}",
        found=found,
        consequence="the run stops, since roles would not run where they were placed",
        remedy=f"pip install 'verl{versions.VERL_RANGE}', or remove trainer.plugin=sharding",
    )
