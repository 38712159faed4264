"""`layout: device_map` on a GPU: the same numbers as one device, and the memory that the table promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytest.importorskip("verl")

NAMES = [f"{role}_{policy}" for role in ("actor", "critic") for policy in ("none", "full", "share")]
SECOND = ["cpu", "1"] if torch.cuda.device_count() > 1 else ["cpu"]


@pytest.fixture(scope="module", params=SECOND, ids=["the host" if place == "cpu" else "GPU 1" for place in SECOND])
def runs(request, tmp_path_factory):
    file = tmp_path_factory.mktemp("device_map") / "results.json"
    command = [sys.executable, "-m", "tests.gpu.device_map_runs", str(file), request.param]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], timeout=500)  # `pytest -s` shows each case
    assert done.returncode == 0
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["inferred", "gradients", "weights"])
@pytest.mark.parametrize("layout", ["whole", "spread"])
def test_the_numbers_are_those_of_one_device(runs, name, kind, layout):
    assert runs[f"{name}_{layout}"]["difference"][kind] < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_that_of_one_device(runs, name):
    for one, spread in zip(runs[name]["steps"], runs[f"{name}_spread"]["steps"], strict=True):
        assert spread["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert spread["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_lie_where_the_map_says(runs, name):
    places = runs[f"{name}_spread"]["places"]
    assert {place for module, place in places.items() if ".layers.3." in module} == {"cuda:0"}
    assert len({place for module, place in places.items() if ".layers.4." in module} - {"cuda:0"}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_loading_takes_the_bytes_of_the_table(runs, name):
    run = runs[f"{name}_spread"]
    promised = sum(row["num_bytes"] for row in run["rows"] if row["place"] == 0)
    assert run["loaded_bytes"][0] == pytest.approx(promised, rel=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_the_peak_falls_by_what_the_table_promises(runs, name):
    one, run = runs[f"{name}_whole"], runs[f"{name}_spread"]
    promised = sum(row["training_bytes"] for row in run["rows"] if row["place"] != 0)
    assert one["peak_bytes"][0] - run["peak_bytes"][0] == pytest.approx(promised, rel=0.05)
