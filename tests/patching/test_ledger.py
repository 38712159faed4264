"""Tests made from every SPEC: it has its diff, it fits every supported release, and it comes and goes in every order."""

import inspect
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import released_sources

from verl_ext_sharding import patch_points, versions
from verl_ext_sharding.patching.fingerprint import fingerprint, module_source, signature
from verl_ext_sharding.patching.ledger import known_specs

DIFFS = Path(__file__).parents[2] / "patches"
SPECS = known_specs()
ON_RELEASES = [
    pytest.param(spec, release, id=f"{spec.id}-{release}")
    for spec in SPECS
    for release in released_sources.supported_releases(spec)
]

each_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.id)
each_release = pytest.mark.parametrize(("spec", "release"), ON_RELEASES)


def test_no_patch_is_known_only_if_there_is_no_patch_point():
    folder = Path(patch_points.__file__).parent
    points = [file for file in folder.glob("*.py") if not file.name.startswith("_")]
    assert len(SPECS) >= len(points)


def test_every_patch_has_a_diff_and_every_diff_a_patch():
    assert {file.stem for file in DIFFS.glob("*.patch")} == {spec.id for spec in SPECS}


def read_trailers(spec):
    """`{name: text}` of the lines before the diff itself; a line that starts with a space goes on with the last."""
    head = (DIFFS / f"{spec.id}.patch").read_text().partition("diff --git ")[0]
    unfolded = re.sub(r"\n[ \t]+", " ", head)
    return dict(re.findall(r"^([A-Z][A-Za-z]*(?:-[A-Z][A-Za-z]*)+): (.*\S)\s*$", unfolded, flags=re.MULTILINE))


@each_spec
def test_the_trailers_of_a_diff_say_what_the_spec_says(spec):
    expected = {
        "Patch-Id": spec.id,
        f"{spec.distribution.title()}-Range": spec.range,
        "Upstream-Issue": spec.upstream_issue,
        "Remove-When": " ".join(spec.remove_when.split()),
    }
    trailers = read_trailers(spec)
    assert {name: trailers.get(name) for name in expected} == expected


def source_or_skip(spec, release):
    """The source of a release; skips the test where it can't be had."""
    try:
        return released_sources.get(spec.distribution, release)
    except released_sources.SourceUnavailableError as error:
        pytest.skip(str(error))


@each_spec
def test_a_patch_fits_at_least_one_supported_release(spec):
    if versions.installed(spec.distribution) is None and spec.distribution != "verl":
        pytest.skip(f"{spec.distribution} is not installed")
    assert released_sources.supported_releases(spec)


@each_spec
def test_the_fingerprints_are_of_releases_in_range_and_in_order(spec):
    assert all(versions.in_range(release, spec.range) for release in spec.fingerprints)
    numbers = [[int(part) for part in re.findall(r"\d+", release)] for release in spec.fingerprints]
    assert numbers == sorted(numbers)


@each_release
def test_the_fingerprint_of_a_target_is_the_recorded_one(spec, release):
    text = module_source(spec.module, source_or_skip(spec, release).wheel)
    found = fingerprint(text, spec.qualname)
    if spec.distribution == "verl":
        assert spec.fingerprints.get(release) == found
    else:  # any release may be installed; an unchanged function is safe
        assert found in spec.fingerprints.values()


@each_release
def test_the_signature_of_a_target_is_the_recorded_one(spec, release):
    text = module_source(spec.module, source_or_skip(spec, release).wheel)
    assert signature(text, spec.qualname) == spec.signature


@each_spec
def test_a_replacement_takes_what_its_target_takes(spec):
    parameters = inspect.signature(spec.replacement).parameters.values()
    kinds = [parameter.kind for parameter in parameters]
    named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    is_open = inspect.Parameter.VAR_POSITIONAL in kinds and inspect.Parameter.VAR_KEYWORD in kinds
    first = 1 if "." in spec.qualname else 0  # self may have another name
    taken = spec.signature[first : len(named)] if is_open else spec.signature[first:]
    names = named if is_open else [parameter.name for parameter in parameters]
    assert tuple(names[first:]) == taken


def git_apply_check(spec, folder, *options):
    """`git apply --check` of a spec's diff on the files that it touches, copied to a folder outside any repository."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    release = released_sources.supported_releases(spec)[-1]
    source = source_or_skip(spec, release)
    diff = DIFFS / f"{spec.id}.patch"
    paths = re.findall(r"^--- a/(\S+)", diff.read_text(), flags=re.MULTILINE)
    assert paths, f"{diff.name} changes no file"
    for path in paths:
        copy = folder / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source.read(path))
    # Inside a repository `git apply` would skip, without a word, what is not below the current folder.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    command = ["git", "apply", "--check", *options, str(diff)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@each_spec
def test_a_diff_applies_to_the_newest_supported_release(spec, tmp_path):
    done = git_apply_check(spec, tmp_path)
    assert done.returncode == 0, done.stderr


@each_spec
def test_a_diff_is_not_merged_upstream_yet(spec, tmp_path):
    done = git_apply_check(spec, tmp_path, "--reverse")
    assert done.returncode != 0, f"{spec.distribution} has merged {spec.id}: delete the patch"


ORDERS = {
    "before-the-import": "install install import install remove remove install",
    "after-the-import": "import install install remove remove install remove",
}


@pytest.fixture(scope="session")
def verdicts(check_order):
    """Verdicts on all patches in both orders. The real modules take long to import: one process for each order."""
    found = {}

    def verdict(order, spec):
        if order not in found:
            found[order] = check_order(ORDERS[order], "verl_ext_sharding.patching.ledger:known_specs")
        return found[order][spec.id]

    return verdict


@pytest.mark.parametrize("order", ORDERS)
@each_spec
def test_a_patch_comes_and_goes_whatever_the_order_of_import(spec, order, verdicts):
    if versions.installed(spec.distribution) is None:
        pytest.skip(f"{spec.distribution} is not installed")
    verdict = verdicts(order, spec)
    if verdict.startswith("unavailable: "):
        pytest.skip(verdict)
    assert verdict == "ok"
