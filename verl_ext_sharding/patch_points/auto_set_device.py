"""`trainer.device=cpu` is honoured: verl overwrites it with the detected accelerator, "cuda" when there is none.

It is also the first function that verl's mains call, and so where `run_ppo` and `run_sft` are patched in a main that runs as
a script (`python -m verl.trainer.main_ppo`), a module that no import hook ever sees.
"""

from __future__ import annotations

from typing import Any

from verl_ext_sharding.patching import original
from verl_ext_sharding.patching.spec import PatchSpec


def auto_set_device(config: Any) -> None:
    """As verl's, but a run that asked for the plugin and for the CPU gets the CPU."""
    from verl_ext_sharding import driver
    from verl_ext_sharding.config import cpu
    from verl_ext_sharding.patch_points import run_ppo, sft_trainer
    from verl_ext_sharding.patching.script import apply_to_script

    apply_to_script(run_ppo.SPEC)
    apply_to_script(sft_trainer.PLAN)
    if not (config and "trainer" in config and driver.asked_for(config)):
        original(SPEC)(config)
        return
    from verl_ext_sharding import sft

    sft.refuse_ray_trainer()
    cpu.check_device(config)
    if cpu.is_cpu(config):
        driver.select_cpu()
    else:
        original(SPEC)(config)


SPEC = PatchSpec(
    id="device-cpu",
    target="verl.utils.device:auto_set_device",
    replacement=auto_set_device,
    signature=("config",),
    fingerprints={"0.9.0": "6d360d0c10d92f8b", "0.9.1": "6d360d0c10d92f8b"},
    processes=frozenset({"driver"}),
    needed_by="trainer.plugin",
    upstream_issue="none filed",
    remove_when="verl keeps trainer.device=cpu and has a cpu platform",
)
