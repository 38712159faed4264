"""Runs scripts in processes of their own: what patches must not leak into the tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def run_script():
    """Runs a Python script with this repository and more folders importable, and no plugin loaded by verl itself."""

    def run(script, *arguments, folders=(), limit_s=300):
        path = os.pathsep.join([str(HERE.parents[1]), *map(str, folders)])
        environment = os.environ | {
            "PYTHONPATH": path,
            "VERL_USE_EXTERNAL_PLUGINS": "none",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, str(script), *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s)
        assert done.returncode == 0, f"{script} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    return run


@pytest.fixture(scope="session")
def check_order(run_script, tmp_path_factory):
    """`order_check.py` in a process of its own: the verdict on each patch after the steps given."""

    def check(order, source, folders=()):
        out = tmp_path_factory.mktemp("order") / "verdicts.json"
        run_script(HERE / "order_check.py", out, order, source, folders=folders)
        return json.loads(out.read_text())

    return check
