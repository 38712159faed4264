"""How patches are collected from modules, and what the ledger says of the installed releases."""

import subprocess
import sys
import types
from pathlib import Path

import pytest

from verl_ext_sharding import versions
from verl_ext_sharding.patching import PatchSpec, ledger
from verl_ext_sharding.patching.fingerprint import fingerprint, module_source


def replace_dedent(text):
    return text


def replace_indent(text, prefix, predicate=None):
    return text


def make_spec(id_, target, replacement, **changes):
    fields = {
        "id": id_,
        "target": target,
        "replacement": replacement,
        "distribution": "pytest",
        "range": ">=1.0",
        "signature": ("text",),
        "fingerprints": {},
        "processes": frozenset({"driver"}),
        "needed_by": "some.key",
        "upstream_issue": "none filed",
        "remove_when": "never",
    }
    return PatchSpec(**(fields | changes))


DEDENT = make_spec("text-dedent", "textwrap:dedent", replace_dedent)
INDENT = make_spec("text-a-indent", "textwrap:indent", replace_indent)


def make_module(**names):
    module = types.ModuleType("point")
    vars(module).update(names)
    return module


def test_specs_are_collected_from_both_names_and_sorted_by_id():
    assert ledger.collect([make_module(SPEC=DEDENT), make_module(SPECS=(INDENT,))]) == (INDENT, DEDENT)


def test_a_patch_point_module_without_a_spec_is_a_mistake_of_ours():
    with pytest.raises(AssertionError, match="neither SPEC nor SPECS"):
        ledger.collect([make_module()])


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (make_spec("text-dedent", "textwrap:indent", replace_indent), "id"),
        (make_spec("text-other", "textwrap:dedent", replace_indent), "target"),
        (make_spec("text-other", "textwrap:indent", replace_dedent), "replacement"),
    ],
)
def test_two_patches_share_no_id_target_or_replacement(other, what):
    with pytest.raises(AssertionError, match=f"the same {what}"):
        ledger.collect([make_module(SPEC=DEDENT), make_module(SPEC=other)])


def known(spec):
    """The same spec, checked against the source that is installed here."""
    found = fingerprint(module_source(spec.module), spec.qualname)
    return make_spec(spec.id, spec.target, spec.replacement, fingerprints={"1.0": found})


def test_parity_has_fingerprints_and_releases(monkeypatch):
    missing = make_spec("text-missing", "textwrap:nothing", replace_indent, distribution="no-such-distribution")
    monkeypatch.setattr(ledger, "known_specs", lambda: (DEDENT, missing))
    assert ledger.parity() == {
        "text-dedent": fingerprint(module_source("textwrap"), "dedent"),
        "text-missing": ledger.ABSENT,
        "release:pytest": versions.installed("pytest"),
        "release:no-such-distribution": ledger.ABSENT,
        "release:verl-ext-sharding": versions.__version__,
    }


@pytest.mark.parametrize(
    ("spec", "needed", "state"),
    [
        (known(DEDENT), {"some.key"}, "pending"),
        (DEDENT, {"some.key"}, "failed"),
        (DEDENT, set(), "skipped"),
        (make_spec("text-missing", "textwrap.nothing:dedent", replace_indent), {"some.key"}, "failed"),
    ],
)
def test_the_forecast_tells_what_install_would_come_to(monkeypatch, spec, needed, state):
    monkeypatch.setattr(ledger, "known_specs", lambda: (spec,))
    (line,) = ledger.forecast(needed)
    assert (line.id, line.state, line.fingerprint_known) == (spec.id, state, state == "pending")
    assert bool(line.reason) == (state != "pending")


def test_parity_and_forecast_import_no_target():
    code = (
        "import sys; from verl_ext_sharding.patching import ledger; ledger.parity(); ledger.forecast();"
        "print(sorted({'verl', 'torch', 'ray', 'hydra', 'transformers'} & set(sys.modules)))"
    )
    repository = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
