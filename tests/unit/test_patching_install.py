"""Deferred patches of synthetic packages: when they come, when they are refused, and what status says of it."""

import importlib
import itertools
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patching_synthetic import (
    attribute,
    replace_and_fail,
    replace_function,
    replace_method,
    state_of,
    synthetic_specs,
)

from verl_ext_sharding.errors import PatchError
from verl_ext_sharding.patching import apply, install, remove, status
from verl_ext_sharding.patching.fingerprint import fingerprint


@pytest.fixture
def make_spec(tmp_path, monkeypatch):
    yield from synthetic_specs(tmp_path, monkeypatch)


def test_a_needed_patch_that_does_not_fit_fails_the_import_of_its_target(make_spec):
    spec = make_spec("greet", replace_function, fingerprints={"0.9.0": "0" * 16})
    install([spec], process="driver", needed={"some.key"})
    with pytest.raises(PatchError, match=r"some\.key needs this patch"):
        importlib.import_module(spec.module)
    with pytest.raises(PatchError, match=r"some\.key needs this patch"):
        importlib.import_module(spec.module)
    assert state_of(spec).state == "failed"


def test_a_needed_patch_that_does_not_fit_an_imported_target_fails_install(make_spec):
    spec = make_spec("greet", replace_function, range=">=2.0,<2.1")
    importlib.import_module(spec.module)
    with pytest.raises(PatchError, match="out of range"):
        install([spec], process="driver", needed={"some.key"})
    assert (state_of(spec).state, state_of(spec).fingerprint_known) == ("failed", True)


@pytest.mark.parametrize("changes", [{"fingerprints": {"0.9.0": "0" * 16}}, {"range": ">=2.0,<2.1"}])
@pytest.mark.parametrize("needed_by", ["some.key", None])
def test_a_patch_that_does_not_fit_and_is_not_needed_is_skipped_with_one_warning(make_spec, caplog, changes, needed_by):
    spec = make_spec("greet", replace_function, needed_by=needed_by, **changes)
    install([spec], process="driver", needed={"another.key"})
    assert importlib.import_module(spec.module).greet("ann") == "hello ann"
    warnings = [line for line in caplog.records if line.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert spec.id in warnings[0].getMessage()
    assert "\n" not in warnings[0].getMessage()
    assert state_of(spec).state == "skipped"
    assert state_of(spec).reason


def test_one_patch_that_does_not_fit_leaves_the_others_in_place(make_spec):
    good = make_spec("Worker.static", replace_function)
    bad = make_spec("greet", replace_and_fail, id=f"{good.id}-bad", fingerprints={})
    importlib.import_module(bad.module)
    with pytest.raises(PatchError, match=bad.id):
        install([bad, good], process="driver", needed={"some.key"})
    assert (state_of(bad).state, state_of(good).state) == ("failed", "applied")
    remove(good)


def test_installing_waits_for_the_import_and_imports_nothing(make_spec):
    spec = make_spec("greet", replace_function)
    install([spec], process="driver")
    assert (state_of(spec).state, state_of(spec).fingerprint_known) == ("pending", None)
    assert spec.module not in sys.modules
    assert importlib.import_module(spec.module).greet("ann") == "patched hello ann"
    assert (state_of(spec).state, state_of(spec).fingerprint_known) == ("applied", True)


EVERY_ORDER = sorted(set(itertools.permutations(["import", "install", "install", "remove", "remove"])))


@pytest.mark.parametrize("order", EVERY_ORDER, ids="-".join)
def test_the_target_is_what_the_last_step_says_in_every_order(make_spec, order):
    spec = make_spec("Worker.exported", replace_method)
    is_installed = False
    for step in order:
        if step == "import":
            importlib.import_module(spec.module)
        elif step == "install":
            install([spec], process="driver", needed={"some.key"})
            is_installed = True
        else:
            remove(spec)
            is_installed = False
        if spec.module in sys.modules:
            assert (attribute(spec) is replace_method) == is_installed
    assert sys.modules[spec.module].Worker().exported("ann").startswith("patched") == is_installed


def test_a_pending_patch_that_is_removed_never_comes(make_spec):
    spec = make_spec("greet", replace_function)
    install([spec], process="driver")
    remove(spec)
    assert importlib.import_module(spec.module).greet("ann") == "hello ann"
    assert state_of(spec).state == "removed"


def test_a_removed_patch_can_be_installed_again(make_spec):
    spec = make_spec("greet", replace_function)
    install([spec], process="driver")
    remove(spec)
    install([spec], process="driver")
    assert importlib.import_module(spec.module).greet("ann") == "patched hello ann"


def test_a_patch_of_another_process_is_not_installed(make_spec):
    spec = make_spec("greet", replace_function, processes=frozenset({"worker"}))
    install([spec], process="driver", needed={"some.key"})
    assert importlib.import_module(spec.module).greet("ann") == "hello ann"
    assert spec.id not in {line.id for line in status()}


def test_each_patch_is_logged_once_when_it_is_applied(make_spec, caplog):
    caplog.set_level(logging.INFO)
    spec = make_spec("greet", replace_function)
    install([spec], process="driver")
    assert not caplog.records
    importlib.import_module(spec.module)
    apply(spec)
    assert [line.getMessage() for line in caplog.records] == [f"patch {spec.id} on {spec.target}"]


SCRIPT = """
def work():
    return "stock"

def main():
    import synthetic_point
    from verl_ext_sharding.patching.script import apply_to_script

    print(apply_to_script(synthetic_point.SPEC), work())

if __name__ == "__main__":
    main()
"""

POINT = """
from verl_ext_sharding.patching import PatchSpec, original

def work():
    return "patched " + original(SPEC)()

SPEC = PatchSpec(
    id="synthetic-work", target="synthetic_script:work", replacement=work, distribution="synthetic-script",
    signature=(), fingerprints={"1.0": "FINGERPRINT"}, processes=frozenset({"driver"}), needed_by=None,
    upstream_issue="none filed", remove_when="never",
)
"""


@pytest.mark.parametrize(("as_module", "expected"), [(True, "True patched stock"), (False, "False stock")])
def test_a_module_that_runs_as_a_script_is_patched_there_and_another_script_is_not(tmp_path, as_module, expected):
    (tmp_path / "synthetic_script.py").write_text(SCRIPT)
    (tmp_path / "synthetic_point.py").write_text(POINT.replace("FINGERPRINT", fingerprint(SCRIPT, "work")))
    arguments = ["-m", "synthetic_script"] if as_module else [str(tmp_path / "synthetic_script.py")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
