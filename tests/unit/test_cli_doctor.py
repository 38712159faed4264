"""`verl-sharding doctor`: what is installed, what is active, which patches fit; exit code 1 when something is wrong."""

import json
import os
import subprocess
import sys
import traceback

import pytest

from verl_ext_sharding import envs, versions
from verl_ext_sharding.cli import doctor, main
from verl_ext_sharding.errors import PatchError
from verl_ext_sharding.patching import ledger


@pytest.fixture(autouse=True)
def healthy(monkeypatch):
    """A process in which nothing is wrong; whether the plugin loads with verl is asked in a process of its own."""
    for name in (envs.DISABLE, envs.VERL_PLUGINS, envs.SPEC):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "_load_failure", lambda: None)


def report(capsys, code):
    assert main.main(["doctor", "--json"]) == code
    return json.loads(capsys.readouterr().out)


def problem(capsys):
    (found,) = report(capsys, 1)["problems"]
    return found


def test_where_nothing_is_wrong_the_exit_code_is_0_and_the_next_step_is_shown(capsys):
    assert main.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "ready: add trainer.plugin=sharding" in text
    assert "problem" not in text


def test_every_patch_is_listed_with_where_it_acts_and_whether_it_fits(capsys):
    main.main(["doctor"])
    text = capsys.readouterr().out
    for spec in ledger.known_specs():
        line = next(line for line in text.splitlines() if line.split()[:1] == [spec.id])
        assert f" {spec.target} " in line
        assert " yes " in line
        assert next(iter(spec.processes)) in line


def test_the_column_of_reasons_is_there_only_where_a_patch_does_not_fit(capsys, monkeypatch):
    main.main(["doctor"])
    assert "why not" not in capsys.readouterr().out
    monkeypatch.setattr(doctor.versions, "installed", lambda name: "0.1")
    main.main(["doctor"])
    assert "why not" in capsys.readouterr().out


def test_json_says_the_same_for_programs(capsys):
    found = report(capsys, 0)
    assert found["version"] == versions.__version__
    assert found["problems"] == []
    assert found["installed"]["verl"] == versions.installed("verl")
    assert found["installed"]["vllm"] == versions.installed("vllm")
    assert {patch["id"]: patch["state"] for patch in found["patches"]} == {
        spec.id: "pending" for spec in ledger.known_specs()
    }


def test_what_is_not_installed_reads_not_available(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "DISTRIBUTIONS", ("verl", "no-such-distribution"))
    main.main(["doctor"])
    line = next(line for line in capsys.readouterr().out.splitlines() if "no-such-distribution" in line)
    assert "n/a" in line


def pretend(monkeypatch, **installed):
    real = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: installed[name] if name in installed else real(name))


def test_a_missing_verl_is_a_problem_with_the_command_that_installs_it(capsys, monkeypatch):
    pretend(monkeypatch, verl=None)
    assert any("pip install 'verl-ext-sharding[verl]'" in found for found in report(capsys, 1)["problems"])


def test_a_verl_out_of_range_is_a_problem_with_the_range(capsys, monkeypatch):
    pretend(monkeypatch, verl="0.10.0")
    found = report(capsys, 1)["problems"]
    assert "verl 0.10.0 is outside >=0.9,<0.10: pip install 'verl>=0.9,<0.10'" in found


def test_only_a_verl_out_of_range_is_remarked_on_in_the_table(capsys, monkeypatch):
    main.main(["doctor"])
    assert "supported:" not in capsys.readouterr().out
    pretend(monkeypatch, verl="0.10.0")
    main.main(["doctor"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "supported:" in line]
    assert line.split()[:2] == ["verl", "0.10.0"]


def test_a_patch_that_does_not_fit_is_a_problem_and_says_why(capsys, monkeypatch):
    pretend(monkeypatch, verl="0.10.0")
    found = report(capsys, 1)
    unfit = [patch for patch in found["patches"] if patch["state"] == "failed"]
    assert {patch["id"] for patch in unfit} == {spec.id for spec in ledger.known_specs() if spec.distribution == "verl"}
    for patch in unfit:
        assert any(line.startswith(f"patch {patch['id']} does not fit") for line in found["problems"])


def test_a_patch_that_no_run_needs_is_no_problem(capsys, monkeypatch):
    pretend(monkeypatch, **{"hydra-core": "1.4.0"})
    found = report(capsys, 0)
    states = {patch["id"]: patch["state"] for patch in found["patches"]}
    assert states["hydra-override-hints"] == "skipped"


def test_the_off_switch_is_a_problem(capsys, monkeypatch):
    monkeypatch.setenv(envs.DISABLE, "1")
    assert problem(capsys) == "VERL_SHARDING_DISABLE is set, so the plugin stays out: unset VERL_SHARDING_DISABLE"


@pytest.mark.parametrize("value", ["none", "NONE", "other", "other,more", ""])
def test_a_list_of_plugins_without_ours_is_a_problem(value, capsys, monkeypatch):
    monkeypatch.setenv(envs.VERL_PLUGINS, value)
    assert "unset VERL_USE_EXTERNAL_PLUGINS" in problem(capsys)


@pytest.mark.parametrize("value", ["auto", "AUTO", "sharding", "Sharding", "other, sharding"])
def test_a_list_of_plugins_with_ours_is_none(value, capsys, monkeypatch):
    monkeypatch.setenv(envs.VERL_PLUGINS, value)
    assert report(capsys, 0)["problems"] == []


def test_a_missing_entry_point_is_a_problem(capsys, monkeypatch):
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [])
    assert "the entry point is not registered" in problem(capsys)


def test_a_plugin_that_fails_to_load_is_a_problem_with_the_reason(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_load_failure", lambda: "ImportError: no good")
    assert problem(capsys) == "the plugin fails to load: ImportError: no good"


def test_an_error_of_several_lines_is_told_whole():
    error = PatchError("verl", expected="a release", found="1.0", consequence="it stops", remedy="pip install verl")
    text = "Traceback (most recent call last):\n" + "".join(traceback.format_exception_only(error))
    assert doctor._error_in(text) == (
        "verl_ext_sharding.errors.PatchError: verl expected: a release found: 1.0 now: it stops fix: pip install verl"
    )


_DOCTOR = "import sys; from verl_ext_sharding.cli.main import main; sys.exit(main(['doctor', '--json']))"


def test_a_reader_that_leaves_before_the_output_is_no_traceback():
    script = _DOCTOR.replace("'--json'", "'--env', '--json'")
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    child.stdout.close()
    assert child.stderr.read() == ""
    assert child.wait() == 1
    child.stderr.close()


def test_it_runs_where_verl_does_not_import(tmp_path):
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("raise ImportError('this verl is broken')\n")
    done = subprocess.run(
        [sys.executable, "-c", _DOCTOR],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stderr
    assert "the plugin fails to load: ImportError: this verl is broken" in json.loads(done.stdout)["problems"]
