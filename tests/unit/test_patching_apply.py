"""Patches of synthetic packages: put in place, taken away, refused."""

import asyncio
import contextlib
import functools
import importlib
import inspect
import logging
import sys
import threading

import pytest
from patching_synthetic import (
    SOURCE,
    attribute,
    current,
    lookalike,
    replace_and_fail,
    replace_classmethod,
    replace_coroutine,
    replace_function,
    replace_method,
    state_of,
    synthetic_specs,
)

from verl_ext_sharding.errors import PatchError
from verl_ext_sharding.patching import apply, original, remove
from verl_ext_sharding.patching.fingerprint import fingerprint


@pytest.fixture
def make_spec(tmp_path, monkeypatch):
    yield from synthetic_specs(tmp_path, monkeypatch)


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
def test_a_target_that_is_not_defined_is_refused(make_spec, qualname):
    module = make_spec("greet", replace_function).module
    spec = make_spec("greet", replace_function, target=f"{module}:{qualname}")
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


def test_a_second_thread_waits_until_the_first_has_applied_the_patch(make_spec, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    mechanism = sys.modules["verl_ext_sharding.patching.apply"]
    spec, examine, errors = make_spec("greet", replace_function), mechanism.examine, []
    importlib.import_module(spec.module)
    both = threading.Barrier(2)

    def examine_together(*args):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # two threads meet here only if nothing keeps them apart
        return examine(*args)

    def run():
        try:
            apply(spec)
        except AssertionError as error:
            errors.append(error)

    monkeypatch.setattr(mechanism, "examine", examine_together)
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    assert len(caplog.records) == 1


def test_a_patch_that_comes_while_the_original_is_looked_up_is_not_its_own_original(make_spec, monkeypatch):
    spec, import_module = make_spec("greet", replace_function), importlib.import_module
    before = original(spec)

    def import_and_apply(name):
        monkeypatch.setattr(importlib, "import_module", import_module)
        apply(spec)
        return import_module(name)

    monkeypatch.setattr(importlib, "import_module", import_and_apply)
    assert original(spec) is before


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
