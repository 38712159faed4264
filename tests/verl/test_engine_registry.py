"""Our engines beside verl's own: by vendor on accelerators, whoever made them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.verl

_SCRIPT = """
from verl.plugin.platform import PlatformRegistry, set_platform
set_platform(PlatformRegistry.get("{platform}")())
from verl_ext_sharding import engines
engines.register()
from verl.workers.engine import EngineRegistry
for model_type in ("language_model", "value_model"):
    print("ENGINE", EngineRegistry.get_engine_cls(model_type, "fsdp2").__name__)
print("STOCK", EngineRegistry._engines["value_model"]["fsdp2"]["cuda"].__name__)
"""


@pytest.mark.parametrize(("platform", "prefix"), [("nvidia", "Measured"), ("amd", "Measured"), ("cpu", "Cpu")])
def test_every_vendor_gets_the_engines_that_honour_measures(platform, prefix):
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(platform=platform)],
        env={**os.environ, "VERL_PLATFORM": platform},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("ENGINE", "STOCK"))]
    expected = [f"{prefix}EngineWithLMHead", f"{prefix}EngineWithValueHead", "FSDPEngineWithValueHead"]
    assert lines == expected, done.stderr[-2000:]
