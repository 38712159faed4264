"""Fingerprints: what changes them, what does not, and where the source is found."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from verl_ext_sharding.errors import PatchError
from verl_ext_sharding.patching.fingerprint import examine, fingerprint, module_source, signature
from verl_ext_sharding.patching.spec import PatchSpec

SOURCE = '''
import functools

class Base:
    def inherited(self, a):
        return a

class Trainer(Base):
    """A trainer."""

    @functools.cache
    def fit(self, batch: int, *more, lr=0.1, **options):
        """Fits."""
        # one step
        return f"{batch:>{lr}}" + "x"

    class Inner:
        def deep(self): ...
'''

CONDITIONAL = """
try:
    import fast
except ImportError:
    def f(x): return {0}
else:
    def f(x, y): return {1}
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# one step", "# another comment\n\n"),
        ('"""Fits."""', '"""Fits, at length."""'),
        ('        """Fits."""\n', ""),
        ('"x"', "'x'"),
        ('"x"', '"" "x"'),
        ("lr=0.1, **options", "\n        lr = 0.1,\n        **options,\n    "),
        ("import functools", "import functools\n\n\n"),
    ],
)
def test_layout_comments_and_docstrings_do_not_change_a_fingerprint(old, new):
    changed = SOURCE.replace(old, new)
    assert changed != SOURCE
    assert fingerprint(changed, "Trainer.fit") == fingerprint(SOURCE, "Trainer.fit")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("@functools.cache", "@functools.lru_cache"),
        ("    @functools.cache\n", ""),
        ("batch: int", "batch: str"),
        ("lr=0.1", "lr=0.2"),
        ("*more", "more"),
        ('"x"', '"y"'),
        ("{batch:>{lr}}", "{batch!r:>{lr}}"),
        ("    def fit", "    async def fit"),
    ],
)
def test_a_change_of_code_changes_the_fingerprint(old, new):
    changed = SOURCE.replace(old, new)
    assert changed != SOURCE
    assert fingerprint(changed, "Trainer.fit") != fingerprint(SOURCE, "Trainer.fit")


def test_a_change_elsewhere_in_the_module_leaves_the_fingerprint_alone():
    assert fingerprint(SOURCE.replace("return a", "return -a"), "Trainer.fit") == fingerprint(SOURCE, "Trainer.fit")


def test_the_fingerprint_of_a_class_covers_its_methods():
    assert fingerprint(SOURCE.replace("lr=0.1", "lr=0.2"), "Trainer") != fingerprint(SOURCE, "Trainer")


def test_the_fingerprint_is_the_same_on_every_python():
    # recorded on Python 3.11; 3.10, 3.12 and 3.13 give the same
    assert fingerprint(SOURCE, "Trainer.fit") == "e4641416fa4da031"


class CutText(ast.NodeTransformer):
    """Cuts the text of f-strings into characters, with empty text behind; Python 3.12 does a little of that."""

    def visit_JoinedStr(self, node):
        self.generic_visit(node)
        pieces = []
        for value in node.values:
            is_text = isinstance(value, ast.Constant)
            pieces += [ast.Constant(value=text) for text in [*value.value, ""]] if is_text else [value]
        return ast.JoinedStr(values=pieces)


def test_an_f_string_that_another_python_cuts_differently_has_the_same_fingerprint(monkeypatch):
    source = 'def f(x, w): return f"ab{x:>{w}.cd}ef"\n'
    expected, parse = fingerprint(source, "f"), ast.parse
    with monkeypatch.context() as patched:
        patched.setattr(ast, "parse", lambda text: CutText().visit(parse(text)))
        found = fingerprint(source, "f")
    assert found == expected


def test_none_false_and_zero_are_told_apart():
    values = ["None", "False", "0", "0.0", "''", "[]", "()"]
    assert len({fingerprint(f"def f(): return {value}", "f") for value in values}) == len(values)


def test_an_inherited_method_has_the_fingerprint_of_its_definition():
    assert fingerprint(SOURCE, "Trainer.inherited") == fingerprint(SOURCE, "Base.inherited")
    assert signature(SOURCE, "Trainer.inherited") == ("self", "a")


def test_a_base_class_is_one_that_is_defined_earlier():
    source = "from other import A\nclass B(A): ...\nclass A(B):\n    def f(self): ...\n"
    with pytest.raises(PatchError):
        fingerprint(source, "B.f")


@pytest.mark.parametrize("changed", [(1, 3), (3, 2)])
def test_a_name_defined_on_two_branches_is_fingerprinted_over_both(changed):
    assert fingerprint(CONDITIONAL.format(*changed), "f") != fingerprint(CONDITIONAL.format(1, 2), "f")


def test_the_signature_has_every_parameter_in_order_and_no_stars():
    assert signature(SOURCE, "Trainer.fit") == ("self", "batch", "more", "lr", "options")
    assert signature("def f(a, /, b, *, c): ...", "f") == ("a", "b", "c")
    assert signature(CONDITIONAL, "f") == ("x", "y")


def test_the_signature_of_a_class_is_that_of_its_init():
    assert signature("class C:\n    def __init__(self, a): ...\n", "C") == ("self", "a")


@pytest.mark.parametrize("qualname", ["Trainer.fitt", "Trainers", "Trainer.Inner.fit", "fit", "Trainer.fit.inner"])
def test_a_missing_name_is_an_error_that_names_it(qualname):
    with pytest.raises(PatchError, match=f"no def or class {qualname}"):
        fingerprint(SOURCE, qualname)


def test_a_missing_name_is_told_its_neighbour():
    with pytest.raises(PatchError, match="but a fit"):
        fingerprint(SOURCE, "Trainer.fitt")


def test_a_nested_class_is_found():
    assert signature(SOURCE, "Trainer.Inner.deep") == ("self",)


def test_source_that_does_not_parse_is_a_patch_error():
    with pytest.raises(PatchError, match="does not parse"):
        fingerprint("def f(:", "f")


@pytest.fixture
def unpacked(tmp_path):
    package = tmp_path / "unpacked" / "pack"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "sub" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "sub" / "leaf.py").write_bytes("# -*- coding: latin-1 -*-\nNAME = 'é'\n".encode("latin-1"))
    return package.parent


def test_sources_are_read_from_a_folder(unpacked):
    assert "NAME = 'é'" in module_source("pack.sub.leaf", unpacked)
    assert "imported" in module_source("pack.sub", unpacked)


def test_sources_are_read_from_a_wheel(unpacked, tmp_path):
    wheel = tmp_path / "pack-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in unpacked.rglob("*.py"):
            archive.write(file, file.relative_to(unpacked))
    assert "NAME = 'é'" in module_source("pack.sub.leaf", wheel)
    assert "imported" in module_source("pack.sub", wheel)


def test_sources_of_an_installed_package_are_read_without_importing_it(unpacked, monkeypatch):
    monkeypatch.syspath_prepend(unpacked)
    assert "NAME = 'é'" in module_source("pack.sub.leaf")
    assert "pack" not in sys.modules


def test_sources_are_those_of_the_package_that_is_imported_already(unpacked, tmp_path, monkeypatch):
    (unpacked / "pack" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(unpacked)
    other = tmp_path / "other" / "pack"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("OTHER = 1\n")
    try:
        __import__("pack")
        monkeypatch.syspath_prepend(other.parent)
        assert module_source("pack") == ""
    finally:
        sys.modules.pop("pack", None)


@pytest.mark.parametrize("where", ["folder", "wheel", "installed", "nowhere"])
def test_a_missing_module_is_an_error_that_names_it(unpacked, tmp_path, where):
    wheel = tmp_path / "pack-1.0-py3-none-any.whl"
    zipfile.ZipFile(wheel, "w").close()
    root = {"folder": unpacked, "wheel": wheel, "installed": None, "nowhere": Path("/nonexistent")}[where]
    with pytest.raises(PatchError, match=r"pack\.sub\.lea\b"):
        module_source("pack.sub.lea", root)


def replacement(self, batch):
    return None


def make_spec(**changes):
    fields = {
        "id": "test-fit",
        "target": "pack.sub.leaf:Trainer.fit",
        "replacement": replacement,
        "distribution": "pack",
        "range": ">=1.0,<1.1",
        "signature": ("self", "batch", "more", "lr", "options"),
        "fingerprints": {"1.0.0": "0" * 16, "1.0.1": fingerprint(SOURCE, "Trainer.fit")},
        "processes": frozenset({"driver"}),
        "needed_by": "trainer.fit",
        "upstream_issue": "none filed",
        "remove_when": "never",
    }
    return PatchSpec(**(fields | changes))


@pytest.mark.parametrize(
    ("release", "source", "fits", "known"),
    [
        ("1.0.0", SOURCE, True, True),
        ("1.0.7", SOURCE, True, True),
        (None, SOURCE, True, True),
        ("1.1.0", SOURCE, False, True),
        ("1.0.1", SOURCE.replace("lr=0.1", "lr=0.2"), False, False),
        (None, SOURCE.replace("lr=0.1", "lr=0.2"), False, False),
        ("1.0.1", "", False, False),
    ],
)
def test_a_patch_fits_a_known_source_of_a_release_in_range(monkeypatch, release, source, fits, known):
    monkeypatch.setattr("verl_ext_sharding.versions.installed", {"pack": release}.get)
    found = examine(make_spec(), source)
    assert (found.problem is None, found.known, found.release) == (fits, known, release)


def test_a_misfit_names_what_is_known_what_is_found_and_what_to_type(monkeypatch):
    monkeypatch.setattr("verl_ext_sharding.versions.installed", {"pack": "1.0.1"}.get)
    changed = SOURCE.replace("lr=0.1", "lr=0.2")
    problem = examine(make_spec(), changed).problem
    assert "test-fit on pack.sub.leaf:Trainer.fit" in problem.subject
    assert f"1.0.1 ({fingerprint(SOURCE, 'Trainer.fit')})" in problem.expected
    assert f"pack 1.0.1: a source with fingerprint {fingerprint(changed, 'Trainer.fit')}" in problem.found
    assert "pip install 'pack==1.0.1'" in problem.remedy
    assert "trainer.fit" in problem.remedy


def test_the_mechanism_imports_nothing_but_wrapt_and_the_standard_library():
    code = (
        "import sys; before = set(sys.modules); import verl_ext_sharding.patching;"
        "tops = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(top for top in tops if top not in sys.stdlib_module_names))"
    )
    repository = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['verl_ext_sharding', 'wrapt']"
