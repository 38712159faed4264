"""The script behind the generated tests, on a synthetic patch point: it sees what is right and what is wrong."""

import pytest

from verl_ext_sharding.patching.fingerprint import fingerprint

TARGET = """
class Worker:
    def work(self):
        return "stock"

    def rest(self):
        return "stock"
"""

POINT = """
from verl_ext_sharding.patching import PatchSpec, original

def work(self):
    return "patched " + original(GOOD)(self)

def rest(self):
    return "patched"

def anything():
    pass

def make(id_, target, replacement, fingerprint):
    return PatchSpec(
        id=id_, target=target, replacement=replacement, distribution="synthetic-target", signature=("self",),
        fingerprints={"0.9.0": fingerprint}, processes=frozenset({"worker"}), needed_by="some.key",
        upstream_issue="none filed", remove_when="never",
    )

GOOD = make("synthetic-good", "synthetic_target:Worker.work", work, "GOOD_FINGERPRINT")
UNKNOWN = make("synthetic-unknown", "synthetic_changed:Worker.rest", rest, "0" * 16)
ABSENT = make("synthetic-absent", "synthetic_needy:nothing", anything, "0" * 16)

def specs():
    return [GOOD, UNKNOWN, ABSENT]
"""


@pytest.mark.parametrize(
    "order",
    [
        "install install import install remove remove install",
        "import install install remove remove install remove",
        "install remove import remove install",
    ],
)
def test_a_good_patch_passes_a_misfit_fails_and_a_missing_package_is_told_apart(check_order, tmp_path, order):
    (tmp_path / "synthetic_target.py").write_text(TARGET)
    (tmp_path / "synthetic_changed.py").write_text(TARGET)
    (tmp_path / "synthetic_needy.py").write_text("import a_package_that_nobody_has\n")
    point = POINT.replace("GOOD_FINGERPRINT", fingerprint(TARGET, "Worker.work"))
    (tmp_path / "synthetic_point.py").write_text(point)
    verdicts = check_order(order, "synthetic_point:specs", folders=[tmp_path])
    assert verdicts["synthetic-good"] == "ok"
    assert "some.key needs this patch" in verdicts["synthetic-unknown"]
    assert verdicts["synthetic-absent"].startswith("unavailable: ")
