"""The driver's one way in: `run_ppo` starts Ray and hands the config to the TaskRunner.

There is no hook between verl's composed config and `ray.init`, and none between `ray.init` and the first worker. The
replacement plans, checks and passes the run's spec on, then calls the original.
"""

from __future__ import annotations

from typing import Any

from verl_ext_sharding.errors import PlainErrors
from verl_ext_sharding.patching import original
from verl_ext_sharding.patching.spec import PatchSpec


def run_ppo(config: Any, task_runner_class: Any) -> None:
    """As verl's, with the plugin's plan in front when the config asks for it."""
    from verl_ext_sharding import driver, task_runner

    stock = original(SPEC)
    with PlainErrors():
        if driver.asked_for(config):
            task_runner.launch(stock, config, task_runner_class)
            return
    stock(config, task_runner_class=task_runner_class)


SPEC = PatchSpec(
    id="driver-plan",
    target="verl.trainer.main_ppo:run_ppo",
    replacement=run_ppo,
    signature=("config", "task_runner_class"),
    fingerprints={"0.9.0": "cef92325b3115ecc", "0.9.1": "bbf0d9544c80313f"},
    processes=frozenset({"driver"}),
    needed_by="trainer.plugin",
    upstream_issue="none filed",
    remove_when="verl calls a hook of its plugins with the composed config before ray.init",
)
