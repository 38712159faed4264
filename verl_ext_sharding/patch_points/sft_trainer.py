"""SFT's one way in: `run_sft` joins the process group and trains, in each process that torchrun started.

There is no hook between verl's composed config and the trainer. The replacement checks the request, sets verl's keys and
makes the process one that runs a role, then calls the original. The process group is the original's own; it has no config
and names the CPU twice there (`cpu:gloo,cpu:gloo`), which torch refuses.
"""

from __future__ import annotations

from typing import Any

from verl_ext_sharding.errors import PlainErrors
from verl_ext_sharding.patching import original
from verl_ext_sharding.patching.spec import PatchSpec


def run_sft(config: Any) -> None:
    """As verl's, with the plugin's plan in front when the config asks for it."""
    from verl_ext_sharding import driver, sft

    stock = original(PLAN)
    with PlainErrors():
        if driver.asked_for(config):
            sft.launch(stock, config)
            return
    stock(config)


def initialize_global_process_group(timeout_second: int = 36000) -> tuple[int, int, int]:
    """As verl's; in a run that asked for the plugin also on a CPU, and with the run's communication settings."""
    from verl_ext_sharding.config import spec

    stock = original(PROCESS_GROUP)
    if spec.current() is None:
        place: tuple[int, int, int] = stock(timeout_second)
        return place
    from verl_ext_sharding import sft

    return sft.join_process_group(stock, timeout_second)


PLAN = PatchSpec(
    id="sft-plan",
    target="verl.trainer.sft_trainer:run_sft",
    replacement=run_sft,
    signature=("config",),
    fingerprints={"0.9.0": "794fb75c40c42cdd", "0.9.1": "794fb75c40c42cdd"},
    processes=frozenset({"driver"}),
    needed_by="trainer.plugin",
    upstream_issue="none filed",
    remove_when="verl calls a hook of its plugins with the composed config before the process group is made",
)

PROCESS_GROUP = PatchSpec(
    id="sft-process-group",
    target="verl.utils.distributed:initialize_global_process_group",
    replacement=initialize_global_process_group,
    signature=("timeout_second",),
    fingerprints={"0.9.0": "a322c11d1ef6e869", "0.9.1": "34484f11a145c554"},
    processes=frozenset({"driver"}),
    needed_by="trainer.plugin",
    upstream_issue="none filed",
    remove_when="verl names each device once in the backend, and calls a hook of its plugins once the process group is there",
)

SPECS = (PLAN, PROCESS_GROUP)
