"""Loading with verl: light and dormant until asked for, loud when it fails, whole in a worker of a run that asked."""

import importlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_ext_sharding import envs, loading, versions
from verl_ext_sharding.config.spec import RunSpec
from verl_ext_sharding.errors import PatchError
from verl_ext_sharding.patching import ledger
from verl_ext_sharding.placement.bundles import place


def start(script, **environment):
    """Starts a process that runs a script; what the tests' own environment says of verl does not reach it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**env, **environment},
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate()
    return process.returncode, out, err


def answer(process):
    """What a script printed as JSON after the word `answer`."""
    code, out, err = finish(process)
    assert code == 0, err
    return json.loads(out.rpartition("answer")[2])


# Installed is not active: the same script, with the plugin and without

_STOCK = """
import contextlib, io, json, sys
import verl
modules = sorted(sys.modules)

import ray
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.trainer import main_ppo
from verl.utils import config as verl_config, device
from verl.workers.rollout.replica import RolloutReplicaRegistry

with initialize_config_module("verl.trainer.config", version_base=None):
    stock = compose("ppo_trainer", overrides=[
        "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1", "critic.ppo_micro_batch_size_per_gpu=1"])
stock = OmegaConf.to_container(stock)
stock.pop("sharding", None)
stock["trainer"].pop("plugin", None)


def outcome(function, *settings):
    config = OmegaConf.create(stock)
    for key, value in settings:
        OmegaConf.update(config, key, value)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            result = repr(function(config))
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
    return [result, printed.getvalue(), OmegaConf.to_yaml(config)]


def validate(config):
    return verl_config.validate_config(config, use_reference_policy=True, use_critic=False)


class Runner:
    @staticmethod
    def remote():
        calls.append("remote")
        return Runner

    class run:
        @staticmethod
        def remote(config):
            calls.append(OmegaConf.to_yaml(config))


calls = []
ray.is_initialized = lambda: True
ray.get = calls.append
outcomes = [
    outcome(device.auto_set_device),
    outcome(device.auto_set_device, ("trainer.device", "cpu")),
    outcome(validate),
    outcome(validate, ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", 1)),
    outcome(validate, ("data.train_batch_size", 1001)),
    outcome(validate, ("data.train_batch_size", 8)),
    outcome(lambda config: main_ppo.run_ppo(config, task_runner_class=Runner)),
]
patched = [name for name in ("run_ppo",) if getattr(main_ppo, name).__module__ != "verl.trainer.main_ppo"]
print("answer", json.dumps({"modules": modules, "outcomes": outcomes, "calls": calls, "patched": patched,
                            "rollouts": sorted(RolloutReplicaRegistry._registry)}))
"""


@pytest.fixture(scope="module")
def stock():
    """What the script found with the plugin installed (first) and kept out (second)."""
    return [answer(process) for process in (start(_STOCK), start(_STOCK, **{envs.VERL_PLUGINS: "none"}))]


def test_import_verl_brings_in_no_more_than_this_package_and_wrapt(stock):
    installed, kept_out = (set(found["modules"]) for found in stock)
    extra = {name.partition(".")[0] for name in installed - kept_out} - set(sys.stdlib_module_names)
    assert extra == {"verl_ext_sharding", "wrapt"}
    assert kept_out - installed == set()


def test_import_verl_leaves_hydra_rich_and_yaml_files_alone(stock):
    installed, kept_out = (set(found["modules"]) for found in stock)
    for name in ("hydra", "omegaconf", "rich", "verl_ext_sharding.driver", "verl_ext_sharding.cli.render"):
        assert name not in installed - kept_out


def test_a_run_that_does_not_ask_behaves_as_if_nothing_were_installed(stock):
    installed, kept_out = stock
    assert installed["outcomes"] == kept_out["outcomes"]
    assert installed["calls"] == kept_out["calls"]
    assert len(installed["calls"]) == 3


def test_what_was_compared_was_patched_in_one_process_and_stock_in_the_other(stock):
    assert [found["patched"] for found in stock] == [["run_ppo"], []]


def test_a_driver_registers_no_rollout_backend(stock):
    assert stock[0]["rollouts"] == stock[1]["rollouts"]


# In a worker of a run that asked

_WORKER = """
import importlib, json
import verl
from verl.plugin.platform import get_platform
import verl.workers.rollout.replica
import verl.workers.rollout.base
from verl.workers.engine import EngineRegistry
from verl_ext_sharding.config import spec
from verl_ext_sharding.patching import status
from verl_ext_sharding.patching.ledger import known_specs
for patch in known_specs():
    if "worker" in patch.processes:
        importlib.import_module(patch.module)
print("answer", json.dumps({
    "states": {line.id: line.state for line in status()},
    "replica": "hf" in verl.workers.rollout.replica.RolloutReplicaRegistry._registry,
    "adapter": verl.workers.rollout.base._ROLLOUT_REGISTRY.get(("hf", "async")),
    "engines": str(EngineRegistry._engines).count("Cpu"),
    "platform": get_platform().device_name,
    "devices": list(spec.current().placement.devices_of("critic")),
}))
"""


NEEDED = ("trainer.plugin", "sharding.roles.*.devices")


@pytest.fixture(scope="module")
def run_spec(job):
    placement = place({"actor": [0, 1], "critic": [2]}, job())
    return RunSpec(placement=placement, bundle_cpus=3, needed=NEEDED)


@pytest.fixture(scope="module")
def worker(run_spec):
    return answer(start(_WORKER, **{envs.SPEC: run_spec.to_json(), envs.VERL_PLATFORM: "cpu"}))


def test_the_patches_that_a_run_needs_are_in_place_once_their_modules_are_imported_and_no_others(worker):
    patches = [spec for spec in ledger.known_specs() if "worker" in spec.processes]
    needed = {spec.id for spec in patches if spec.needed_by is None or spec.needed_by in NEEDED}
    assert worker["states"] == dict.fromkeys(needed, "applied")
    assert len(needed) < len(patches)


def test_a_worker_knows_the_backend_the_engines_and_the_platform(worker):
    assert worker["replica"]
    assert worker["adapter"] == "verl_ext_sharding.rollout.adapter.ServerAdapter"
    assert worker["engines"] >= 2
    assert worker["platform"] == "cpu"


def test_a_worker_reads_the_placement_of_its_run(worker):
    assert worker["devices"] == [2]


# A failure of ours


@pytest.fixture
def broken(tmp_path):
    (tmp_path / "wrapt.py").write_text("raise ImportError('this wrapt is broken')\n")
    return {"PYTHONPATH": str(tmp_path)}


_GO_ON = "import verl; import verl_ext_sharding.plugin as plugin; print('went on with', verl.__name__, plugin.failure)"


def test_a_failure_is_shouted_and_kept_and_stops_only_a_run_that_asked(broken, run_spec):
    without, asked = start(_GO_ON, **broken), start(_GO_ON, **broken, **{envs.SPEC: run_spec.to_json()})
    code, out, err = finish(without)
    assert code == 0, err
    assert "went on with verl" in out
    assert "this wrapt is broken" in out
    assert "verl-ext-sharding failed to load and is inactive" in err
    code, out, err = finish(asked)
    assert code != 0
    assert "went on" not in out
    assert "failed to load in a run that asked for it: this wrapt is broken" in err


def test_a_spec_that_can_not_be_read_stops_the_process():
    code, out, err = finish(start("import verl_ext_sharding.plugin; print('went on')", **{envs.SPEC: "{"}))
    assert code != 0
    assert "went on" not in out
    assert "failed to load in a run that asked for it" in err


def test_the_off_switch_keeps_everything_out(broken):
    script = (
        "import sys, verl_ext_sharding.plugin as plugin\n"
        "print('answer', __import__('json').dumps([plugin.failure, sorted(m for m in sys.modules if 'sharding' in m)]))"
    )
    failure, modules = answer(start(script, **broken, **{envs.DISABLE: "1"}))
    assert failure is None
    ours = [name for name in modules if name.startswith("verl_ext_sharding")]
    assert ours == [
        "verl_ext_sharding",
        "verl_ext_sharding.envs",
        "verl_ext_sharding.plugin",
        "verl_ext_sharding.versions",
    ]


def test_verl_out_of_range_stops_a_run_that_asked(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda name: "0.10.0")
    with pytest.raises(PatchError) as caught:
        loading._require_supported_verl()
    assert (caught.value.subject, caught.value.found) == ("verl", "0.10.0")
    assert "pip install 'verl>=0.9,<0.10'" in caught.value.remedy


@pytest.mark.parametrize("release", [None, "0.9.0", "0.9.1"])
def test_verl_in_range_or_without_metadata_is_taken(release, monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda name: release)
    loading._require_supported_verl()


def test_a_verl_that_the_patches_do_not_fit_gets_no_key_to_ask_by(monkeypatch, caplog):
    from verl_ext_sharding.config import hydra_source

    registered = []
    monkeypatch.setattr(hydra_source, "register", lambda: registered.append(True))
    loading._register_config(importlib)
    assert registered == [True]
    monkeypatch.setattr(versions, "installed", lambda name: "0.11.0")
    with caplog.at_level(logging.ERROR):
        loading._register_config(importlib)
    assert registered == [True]
    assert "trainer.plugin=sharding will be refused" in caplog.text
    assert "driver-plan" in caplog.text


# The environment


@pytest.mark.parametrize("value", ["1", "true", "YES", " on "])
def test_the_off_switch_is_on_for_every_usual_yes(value, monkeypatch):
    monkeypatch.setenv(envs.DISABLE, value)
    assert envs.disabled()


@pytest.mark.parametrize("value", [None, "", "0", "false", "no", "off", "2"])
def test_the_off_switch_is_off_for_everything_else(value, monkeypatch):
    monkeypatch.delenv(envs.DISABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(envs.DISABLE, value)
    assert not envs.disabled()


def test_what_is_set_here_is_forwarded_and_nothing_else(monkeypatch):
    for name in envs.FORWARDED:
        monkeypatch.delenv(name, raising=False)
    assert envs.forwarded() == {}
    monkeypatch.setenv(envs.DISABLE, "0")
    monkeypatch.setenv(envs.VERL_PLUGINS, "sharding")
    monkeypatch.setenv(envs.SPEC, "{}")
    assert envs.forwarded() == {envs.DISABLE: "0", envs.VERL_PLUGINS: "sharding"}


# Versions


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        ("0.9", True),
        ("0.9.0", True),
        ("0.9.1", True),
        ("0.9.99", True),
        ("0.9.1.dev3", True),
        ("0.9.0rc1", True),
        ("0.9.1+cu128", True),
        ("0.9.1.post2", True),
        ("0.8.9", False),
        ("0.10", False),
        ("0.10.0", False),
        ("0.10.0.dev0", False),
        ("1.0.0", False),
        ("0.0.9", False),
    ],
)
def test_the_supported_range_of_verl_compares_numbers_and_not_text(version, inside):
    assert versions.in_range(version) is inside


@pytest.mark.parametrize(
    ("specifier", "inside"),
    [
        ("==1.3", False),
        ("==1.3.2", True),
        (">1.3.2", False),
        (">1.3.1", True),
        ("<=1.3.2", True),
        (" >= 1.3 , < 1.4 ", True),
    ],
)
def test_every_clause_of_a_range_is_understood(specifier, inside):
    assert versions.in_range("1.3.2", specifier) is inside


@pytest.mark.parametrize("specifier", ["", "1.3", "~=1.3", "!=1.3"])
def test_a_clause_that_is_not_understood_is_no_range(specifier):
    with pytest.raises(AssertionError):
        versions.in_range("1.3.2", specifier)


def test_numbers_that_are_left_out_are_zero():
    assert versions.in_range("1.3", "==1.3.0")
    assert versions.in_range("1.3.0", "==1.3")
    assert versions.in_range("1", "==1.0.0")


def test_the_tested_releases_are_in_the_supported_range():
    assert all(versions.in_range(release) for release in versions.VERL_TESTED)


def test_a_distribution_that_is_not_there_has_no_version():
    assert versions.installed("no-such-distribution-anywhere") is None
    assert versions.installed("wrapt")
