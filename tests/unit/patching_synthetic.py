"""A synthetic package to patch, replacements for its functions, and the specs that tests of patches share."""

import importlib
import sys
import uuid

from verl_ext_sharding.patching import PatchSpec, original, remove, status
from verl_ext_sharding.patching.fingerprint import fingerprint, signature

SOURCE = """
import functools

def mark(function):
    @functools.wraps(function)
    def marked(*args):
        return function(*args)
    marked.attrs_3141562937 = {"dispatch": "all"}
    return marked

def greet(name):
    return f"hello {name}"

async def greet_later(name):
    return greet(name)

class Base:
    def method(self, name):
        return f"base {name}"

    def only_base(self, name):
        return f"only base {name}"

class Worker(Base):
    def method(self, name):
        return f"worker {name}, {super().method(name)}"

    @staticmethod
    def static(name):
        return f"static {name}"

    @classmethod
    def build(cls, name):
        return f"{cls.__name__} {name}"

    @mark
    def exported(self, name):
        return f"exported {name}"

    @property
    def size(self):
        return 1

class Child(Worker):
    pass

LIMIT = 3
"""

current = {}
"""The spec of the running test: what a real patch point has as its module-level SPEC."""


def replace_function(name):
    return f"patched {original(current['spec'])(name)}"


def lookalike(name):
    return f"hello {name}"


async def replace_coroutine(name):
    return f"patched {await original(current['spec'])(name)}"


def replace_method(self, name):
    return f"patched {original(current['spec'])(self, name)}"


def replace_classmethod(cls, name):
    return f"patched {original(current['spec'])(cls, name)}"


def replace_and_fail(name):
    raise ZeroDivisionError("in the replacement")


def synthetic_specs(tmp_path, monkeypatch):
    """Yields a function that makes specs for an importable module with SOURCE, and cleans up; body of a fixture.

    The module has a new name each time, and is a distribution of that name, release 1.0.0.
    """
    name = f"synthetic_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    metadata = tmp_path / f"{name}-1.0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()

    def make(qualname, replacement, **changes):
        fields = {
            "id": f"test-{name.replace('_', '-')}",
            "target": f"{name}:{qualname}",
            "replacement": replacement,
            "distribution": name,
            "range": ">=1.0,<1.1",
            "signature": signature(SOURCE, qualname),
            "fingerprints": {"1.0.0": fingerprint(SOURCE, qualname)},
            "processes": frozenset({"driver"}),
            "needed_by": "some.key",
            "upstream_issue": "none filed",
            "remove_when": "the test is over",
        }
        current["spec"] = PatchSpec(**(fields | changes))
        return current["spec"]

    yield make
    if "spec" in current:
        if name in sys.modules:
            remove(current["spec"])
        del current["spec"]
    sys.modules.pop(name, None)


def state_of(spec):
    return next(line for line in status() if line.id == spec.id)


def attribute(spec):
    """What the owner's own `__dict__` holds at the target, or None."""
    owner = sys.modules[spec.module]
    *path, name = spec.qualname.split(".")
    for part in path:
        owner = getattr(owner, part)
    return vars(owner).get(name)
