"""`verl-sharding demo`, as a newcomer runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.verl


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    cache = tmp_path_factory.mktemp("demo")
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.run(
        [sys.executable, "-m", "verl_ext_sharding.cli.main", "demo", "--device", "cpu"],
        env=env,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=600,
    )


def test_the_demo_ends_with_exit_code_zero(demo):
    assert demo.returncode == 0, demo.stdout[-4000:] + demo.stderr[-2000:]


def test_the_demo_shows_progress_for_each_long_stage_and_step(demo):
    stages = ["starting Ray", "comparing versions", "reserving devices", "starting workers", "step 1/3", "step 3/3"]
    positions = [demo.stdout.find(stage) for stage in stages]
    assert -1 not in positions
    assert positions == sorted(positions)


def test_the_final_table_shows_each_role_on_the_device_that_its_workers_reported(demo):
    final = demo.stdout[demo.stdout.index("read back from the workers") :]
    for role, devices in {"actor": "[0,1]", "rollout": "[0,1]", "critic": "[2]", "ref": "[3]"}.items():
        assert re.search(rf"\b{role}\s+{re.escape(devices)}", final), final


def test_the_final_table_has_a_row_for_each_step_with_time_and_reward(demo):
    final = demo.stdout[demo.stdout.index("Steps") :]
    assert len(re.findall(r"^\d\s+[\d.]+\s+[\d.]+\s+\d\.\de-\d+", final, re.MULTILINE)) == 3, final


def test_verl_and_ray_noise_stays_in_the_log(demo):
    assert "transfer_queue" not in demo.stdout
    assert len(demo.stdout.splitlines()) < 80
