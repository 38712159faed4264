"""A patched class that Ray would send to a worker arrives patched, though nothing patches it over there."""

import json

import pytest

from verl_ext_sharding.patching.fingerprint import fingerprint

pytest.importorskip("cloudpickle")

TARGET = """
import functools

def register(function):
    @functools.wraps(function)
    def registered(*args):
        return function(*args)
    registered.attrs_3141562937 = {"dispatch_mode": "all"}
    return registered

class Base:
    @register
    def inherited(self):
        return "stock inherited"

class Worker(Base):
    @register
    def own(self):
        return "stock own"

    @staticmethod
    def static():
        return "stock static"

    @classmethod
    def build(cls):
        return f"stock {cls.__name__}"
"""

POINT = """
from verl_ext_sharding.patching import PatchSpec, original

def inherited(self):
    return "patched " + original(INHERITED)(self)

def own(self):
    return "patched " + original(OWN)(self)

def static():
    return "patched " + original(STATIC)()

def build(cls):
    return "patched " + original(BUILD)(cls)

def make(qualname, replacement):
    return PatchSpec(
        id=f"synthetic-{replacement.__name__}", target=f"synthetic_target:{qualname}", replacement=replacement,
        distribution="synthetic-target", signature=(), fingerprints={"1.0": FINGERPRINTS[qualname]},
        processes=frozenset({"worker"}), needed_by=None, upstream_issue="none filed", remove_when="never",
    )

INHERITED = make("Base.inherited", inherited)
OWN = make("Worker.own", own)
STATIC = make("Worker.static", static)
BUILD = make("Worker.build", build)
SPECS = [INHERITED, OWN, STATIC, BUILD]
"""

BY_VALUE = """
import cloudpickle as pickler
import synthetic_target

pickler.register_pickle_by_value(synthetic_target)
sent = synthetic_target.Worker
"""

AS_RAY_ACTOR = """
import ray
from ray import cloudpickle as pickler
from synthetic_target import Worker

sent = ray.remote(Worker).__ray_metadata__.modified_class
"""

SEND = """
import sys
import synthetic_point
from verl_ext_sharding.patching import apply

for spec in synthetic_point.SPECS:
    apply(spec)
{make}
with open(sys.argv[1], "wb") as file:
    file.write(pickler.dumps(sent))
"""

RECEIVE = """
import json, pickle, sys

with open(sys.argv[1], "rb") as file:
    received = pickle.load(file)
from synthetic_target import Worker
from verl_ext_sharding.patching import status

worker = received()
print(json.dumps({
    "arrived": {name: getattr(worker, name)() for name in ("inherited", "own", "static", "build")},
    "stock": {name: getattr(Worker(), name)() for name in ("inherited", "own", "static", "build")},
    "applied here": [line.id for line in status()],
}))
"""


@pytest.fixture
def synthetic(tmp_path):
    """A target and a patch point on it, as files of one folder."""
    names = ["Base.inherited", "Worker.own", "Worker.static", "Worker.build"]
    found = {name: fingerprint(TARGET, name) for name in names}
    (tmp_path / "synthetic_target.py").write_text(TARGET)
    (tmp_path / "synthetic_point.py").write_text(f"FINGERPRINTS = {found!r}\n{POINT}")
    return tmp_path


STOCK = {"inherited": "stock inherited", "own": "stock own", "static": "stock static", "build": "stock Worker"}


@pytest.fixture
def send_and_receive(synthetic, run_script):
    """Pickles the patched class in one process and reports on it from another, where nothing is patched."""

    def run(make):
        (synthetic / "send.py").write_text(SEND.format(make=make))
        (synthetic / "receive.py").write_text(RECEIVE)
        pickled = synthetic / "class.pickle"
        run_script(synthetic / "send.py", pickled, folders=[synthetic])
        received = json.loads(run_script(synthetic / "receive.py", pickled, folders=[synthetic]))
        assert received["applied here"] == []
        assert received["stock"] == STOCK
        return received["arrived"], pickled.read_bytes()

    return run


def test_a_class_pickled_by_value_arrives_patched(send_and_receive):
    arrived, _ = send_and_receive(BY_VALUE)
    assert arrived == {name: f"patched {answer}" for name, answer in STOCK.items()}


def test_a_ray_actor_class_arrives_with_its_methods_patched(send_and_receive):
    pytest.importorskip("ray")
    arrived, _ = send_and_receive(AS_RAY_ACTOR)
    # Ray leaves static and class methods to the class that the worker imports: those need the patch over there.
    assert (arrived["inherited"], arrived["own"]) == ("patched stock inherited", "patched stock own")


def test_the_pickle_names_the_replacement_and_holds_none_of_its_code(send_and_receive):
    _, content = send_and_receive(BY_VALUE)
    assert b"synthetic_point" in content
    assert b"patched " not in content
