"""Environment variables that this package reads or sets. All names live here."""

from __future__ import annotations

import os

DISABLE = "VERL_SHARDING_DISABLE"
"""Set to 1 (true, yes, on) to keep the plugin out of a process entirely."""

SPEC = "VERL_SHARDING_SPEC"
"""JSON of the run's `RunSpec`. Set by the driver for every Ray process of a run that asked for the plugin."""

BUNDLE = "VERL_SHARDING_BUNDLE"
"""JSON of the device that a worker was promised, see `placement.bundles.Promise`. Set per worker."""

EVENTS = "VERL_SHARDING_EVENTS"
"""Set to 1 to have `monitor.events` written to standard output, for tools that follow a run."""

COUNT_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Set to 1, torch asks NVML whether there is a GPU, and CUDA, which reads its visible devices once, starts later."""

PRESTART = "RAY_prestart_worker_first_driver"
"""Set to 0, Ray starts no process for each CPU ahead of the job: verl's have environments of their own, and use none of those."""

SHOW_ALL = tuple(f"RAY_EXPERIMENTAL_NOSET_{kind}_VISIBLE_DEVICES" for kind in ("CUDA", "HIP", "ROCR", "ASCEND_RT"))
"""Set to 1, Ray shows a process all devices of its node instead of its own alone. An empty value means what none does."""

VERL_PLATFORM = "VERL_PLATFORM"
"""verl's own: the accelerator that it takes instead of the one that it finds."""

VERL_PLUGINS = "VERL_USE_EXTERNAL_PLUGINS"
"""verl's own: `auto`, `none`, or the names of the plugins that it loads."""

FORWARDED = (DISABLE, EVENTS, VERL_PLATFORM, VERL_PLUGINS)
"""Forwarded from the driver to every Ray process when set, since verl itself does not."""

_TRUE = frozenset({"1", "true", "yes", "on"})


def disabled() -> bool:
    """Whether the off switch is set in this process."""
    return os.environ.get(DISABLE, "").strip().lower() in _TRUE


def keeping_out() -> dict[str, str]:
    """What keeps the plugin out of this process, as `{variable: why}`: with these variables unset, verl loads it."""
    reasons = {}
    if disabled():
        reasons[DISABLE] = f"{DISABLE} is set, so the plugin stays out"
    allowed = os.environ.get(VERL_PLUGINS, "auto").strip().lower()
    if allowed != "auto" and "sharding" not in [name.strip() for name in allowed.split(",")]:
        reasons[VERL_PLUGINS] = f"{VERL_PLUGINS}={allowed} keeps verl from loading the plugin"
    return reasons


def forwarded() -> dict[str, str]:
    """The variables of this process that every Ray process of the run must see."""
    return {name: os.environ[name] for name in FORWARDED if name in os.environ}
