"""Patches of synthetic packages: put in place, taken away, refused, and what status says of it."""

import asyncio
import functools
import importlib
import inspect
import itertools
import logging
import sys
import threading
import uuid

import pytest

from verl_ext_sharding.errors import PatchError
from verl_ext_sharding.patching import PatchSpec, apply, install, original, remove, status
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


@pytest.fixture
def module_name(tmp_path, monkeypatch):
    """An importable module with SOURCE, of a distribution of the same name and release 1.0.0."""
    name = f"synthetic_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    metadata = tmp_path / f"{name}-1.0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield name
    if "spec" in current:
        if current["spec"].module in sys.modules:
            remove(current["spec"])
        del current["spec"]
    sys.modules.pop(name, None)


@pytest.fixture
def make_spec(module_name):
    def make(qualname, replacement, **changes):
        fields = {
            "id": f"test-{module_name.replace('_', '-')}",
            "target": f"{module_name}:{qualname}",
            "replacement": replacement,
            "distribution": module_name,
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

    return make


def state_of(spec):
    return next(line for line in status() if line.id == spec.id)


def attribute(spec):
    """What the owner's own `__dict__` holds at the target, or None."""
    owner = sys.modules[spec.module]
    *path, name = spec.qualname.split(".")
    for part in path:
        owner = getattr(owner, part)
    return vars(owner).get(name)


TARGETS = [
    ("greet", replace_function, lambda m: m.greet("ann"), "patched hello ann"),
    ("Worker.method", replace_method, lambda m: m.Worker().method("ann"), "patched worker ann, base ann"),
    ("Base.method", replace_method, lambda m: m.Worker().method("ann"), "worker ann, patched base ann"),
    ("Worker.only_base", replace_method, lambda m: m.Worker().only_base("ann"), "patched only base ann"),
    ("Worker.static", replace_function, lambda m: m.Worker().static("ann"), "patched static ann"),
    ("Worker.static", replace_function, lambda m: m.Child.static("ann"), "patched static ann"),
    ("Worker.build", replace_classmethod, lambda m: m.Child.build("ann"), "patched Child ann"),
    ("Child.build", replace_classmethod, lambda m: m.Child.build("ann"), "patched Child ann"),
    ("Worker.exported", replace_method, lambda m: m.Worker().exported("ann"), "patched exported ann"),
]


@pytest.mark.parametrize(("qualname", "replacement", "call", "result"), TARGETS)
def test_a_patched_target_runs_the_replacement_which_reaches_the_original(
    make_spec, qualname, replacement, call, result
):
    spec = make_spec(qualname, replacement)
    module = importlib.import_module(spec.module)
    apply(spec)
    assert call(module) == result


@pytest.mark.parametrize(("qualname", "replacement", "call", "result"), TARGETS)
def test_after_apply_apply_remove_remove_the_target_is_the_original_object(
    make_spec, qualname, replacement, call, result
):
    spec = make_spec(qualname, replacement)
    module = importlib.import_module(spec.module)
    before, answer = attribute(spec), call(module)
    apply(spec)
    patched = attribute(spec)
    apply(spec)
    assert attribute(spec) is patched is not before
    remove(spec)
    remove(spec)
    assert attribute(spec) is before
    assert call(module) == answer


@pytest.mark.parametrize(("qualname", "replacement", "call", "result"), TARGETS)
def test_the_original_is_the_same_callable_before_while_and_after(make_spec, qualname, replacement, call, result):
    spec = make_spec(qualname, replacement)
    before = original(spec)
    apply(spec)
    assert original(spec) is before
    remove(spec)
    assert original(spec) is before


def test_a_patch_of_an_inherited_method_leaves_the_base_class_alone(make_spec):
    spec = make_spec("Worker.only_base", replace_method)
    module = importlib.import_module(spec.module)
    apply(spec)
    assert module.Base().only_base("ann") == "only base ann"
    remove(spec)
    assert "only_base" not in vars(module.Worker)


def test_the_plain_function_itself_takes_the_place(make_spec):
    spec = make_spec("Worker.exported", replace_method)
    apply(spec)
    assert attribute(spec) is replace_method
    assert not hasattr(replace_method, "__wrapped__")


def test_a_static_method_stays_static_and_a_class_method_a_class_method(make_spec):
    spec = make_spec("Worker.static", replace_function)
    apply(spec)
    assert isinstance(attribute(spec), staticmethod)
    remove(spec)
    spec = make_spec("Worker.build", replace_classmethod)
    apply(spec)
    assert isinstance(attribute(spec), classmethod)


def test_a_coroutine_function_stays_one(make_spec):
    spec = make_spec("greet_later", replace_coroutine)
    apply(spec)
    function = importlib.import_module(spec.module).greet_later
    assert inspect.iscoroutinefunction(function)
    assert asyncio.run(function("ann")) == "patched hello ann"


def test_a_sync_replacement_of_a_coroutine_function_is_a_mistake_of_ours(make_spec):
    with pytest.raises(AssertionError, match="async"):
        apply(make_spec("greet_later", replace_function))


def test_the_attributes_of_the_original_are_lent_to_the_replacement(make_spec):
    spec = make_spec("Worker.exported", replace_method)
    apply(spec)
    assert replace_method.attrs_3141562937 == {"dispatch": "all"}
    remove(spec)
    assert vars(replace_method) == {}


def test_an_attribute_that_the_replacement_has_of_its_own_stays(make_spec, monkeypatch):
    monkeypatch.setattr(replace_method, "attrs_3141562937", {"dispatch": "one"}, raising=False)
    spec = make_spec("Worker.exported", replace_method)
    apply(spec)
    assert replace_method.attrs_3141562937 == {"dispatch": "one"}
    remove(spec)
    assert replace_method.attrs_3141562937 == {"dispatch": "one"}


def test_an_error_in_the_replacement_reaches_the_caller_as_it_is(make_spec):
    spec = make_spec("greet", replace_and_fail)
    apply(spec)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(spec.module).greet("ann")


def test_a_name_imported_elsewhere_before_the_patch_keeps_the_original(make_spec):
    spec = make_spec("greet", replace_function)
    greet = importlib.import_module(spec.module).greet
    apply(spec)
    assert greet("ann") == "hello ann"


def test_a_later_patch_by_somebody_else_is_kept(make_spec):
    spec = make_spec("greet", replace_function)
    apply(spec)
    module = sys.modules[spec.module]
    ours = module.greet
    module.greet = theirs = lambda name: f"theirs over {ours(name)}"
    apply(spec)
    assert module.greet is theirs
    assert module.greet("ann") == "theirs over patched hello ann"
    with pytest.raises(PatchError, match="put there afterwards"):
        remove(spec)
    assert module.greet is theirs
    module.greet = ours


def test_an_earlier_patch_by_somebody_else_is_what_the_original_means(make_spec):
    spec = make_spec("greet", replace_function)
    module = importlib.import_module(spec.module)
    module.greet = theirs = lambda name: f"theirs {name}"
    apply(spec)
    assert module.greet("ann") == "patched theirs ann"
    remove(spec)
    assert module.greet is theirs


def test_a_module_imported_afresh_is_patched_afresh(make_spec):
    spec = make_spec("Worker.exported", replace_method)
    apply(spec)
    del sys.modules[spec.module]
    module = importlib.import_module(spec.module)
    apply(spec)
    assert module.Worker().exported("ann") == "patched exported ann"
    remove(spec)
    assert module.Worker().exported("ann") == "exported ann"
    assert vars(replace_method) == {}


def test_a_property_is_refused(make_spec):
    spec = make_spec("Worker.size", replace_method)
    with pytest.raises(PatchError, match="a property, which is no function or method"):
        apply(spec)
    assert state_of(spec).state == "failed"


@pytest.mark.parametrize("qualname", ["Worker.none", "Nobody.method", "LIMIT", "greet.inner"])
def test_a_target_that_is_not_defined_is_refused(make_spec, module_name, qualname):
    spec = make_spec("greet", replace_function, target=f"{module_name}:{qualname}")
    with pytest.raises(PatchError, match=rf"{spec.id} on {spec.target}"):
        apply(spec)
    assert state_of(spec).state == "failed"


def test_an_unknown_source_is_refused_and_the_target_left_alone(make_spec):
    spec = make_spec("greet", replace_function, fingerprints={"0.9.0": "0" * 16})
    before = importlib.import_module(spec.module).greet
    with pytest.raises(PatchError, match=fingerprint(SOURCE, "greet")):
        apply(spec)
    assert attribute(spec) is before
    assert (state_of(spec).state, state_of(spec).fingerprint_known) == ("failed", False)


def test_the_source_that_counts_is_the_file_and_not_the_object(make_spec):
    spec = make_spec("greet", replace_function, fingerprints={"0.9.0": "0" * 16})
    module = importlib.import_module(spec.module)
    module.greet = lookalike
    with pytest.raises(PatchError, match="was not checked against"):
        apply(spec)


def test_a_module_without_a_source_file_is_refused(make_spec):
    spec = make_spec("greet", replace_function)
    module = importlib.import_module(spec.module)
    module.__file__ = module.__file__ + "c"
    with pytest.raises(PatchError, match="no source file"):
        apply(spec)


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


def test_two_patches_with_one_id_are_a_mistake_of_ours(make_spec):
    apply(make_spec("greet", replace_function))
    spec, other = current["spec"], make_spec("greet", replace_and_fail)
    with pytest.raises(AssertionError, match="two patches"):
        apply(other)
    current["spec"] = spec


def test_a_target_that_cannot_be_set_leaves_no_trace(make_spec, monkeypatch):
    spec = make_spec("Worker.exported", replace_method)
    module = importlib.import_module(spec.module)

    class Sealed(type):
        def __setattr__(cls, name, value):
            raise TypeError("sealed")

    module.Worker = Sealed("Worker", (), {"exported": module.Worker.exported})
    with pytest.raises(PatchError, match="sealed"):
        apply(spec)
    assert vars(replace_method) == {}
    assert original(spec) is module.Worker.exported


def test_threads_that_apply_and_remove_and_call_see_the_target_whole(make_spec):
    spec = make_spec("Worker.exported", replace_method)
    module = importlib.import_module(spec.module)
    before, errors, answers = attribute(spec), [], set()
    barrier = threading.Barrier(9)

    def run(action):
        barrier.wait(30)
        try:
            for _ in range(50):
                action()
        except Exception as error:
            errors.append(error)

    actions = [lambda: apply(spec), lambda: remove(spec)] * 3
    actions += [lambda: answers.add(module.Worker().exported("ann"))] * 3
    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    remove(spec)
    assert errors == []
    assert answers <= {"exported ann", "patched exported ann"}
    assert attribute(spec) is before
    assert vars(replace_method) == {}


def make_closure(value):
    def closure(name):
        return value

    closure.__qualname__ = "closure"
    return closure


@functools.wraps(replace_function)
def wrapped(name):
    return replace_function(name)


@pytest.mark.parametrize(
    "replacement",
    [lambda name: name, make_closure(1), wrapped, functools.partial(replace_function), TARGETS.append],
    ids=["lambda", "closure", "wrapped", "partial", "bound"],
)
def test_a_replacement_that_ray_can_not_pickle_by_reference_is_a_mistake_of_ours(make_spec, replacement):
    with pytest.raises(AssertionError, match="replacement must"):
        make_spec("greet", replacement)
