"""Post-import hooks: when they run, and what their failure leaves behind."""

import importlib
import sys
import threading
import types
import uuid

import pytest
import wrapt

from verl_ext_sharding.patching.deferred import when_imported


@pytest.fixture
def make_module(tmp_path, monkeypatch):
    """Writes a module of a new name that is not imported yet, and forgets it in the end."""
    names = []

    def make(text="VALUE = 1\n"):
        name = f"synthetic_{uuid.uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        names.append(name)
        return name

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for name in names:
        sys.modules.pop(name, None)


class HookError(Exception):
    pass


def fail(module):
    raise HookError(module.__name__)


def test_registering_a_hook_does_not_import_the_module(make_module):
    name = make_module()
    when_imported(name, fail)
    assert name not in sys.modules


def test_hooks_run_once_the_module_is_complete_in_order(make_module):
    name, seen = make_module(), []
    when_imported(name, lambda module: seen.append(("first", module.VALUE)))
    when_imported(name, lambda module: seen.append(("second", module.VALUE)))
    importlib.import_module(name)
    importlib.import_module(name)
    assert seen == [("first", 1), ("second", 1)]


def test_a_hook_on_an_imported_module_runs_now(make_module):
    name, seen = make_module(), []
    module = importlib.import_module(name)
    when_imported(name, seen.append)
    assert seen == [module]


def test_a_failing_hook_fails_the_import(make_module):
    name = make_module()
    when_imported(name, fail)
    with pytest.raises(HookError):
        importlib.import_module(name)


def test_a_failing_hook_on_an_imported_module_surfaces_and_leaves_the_module(make_module):
    name = make_module()
    module = importlib.import_module(name)
    with pytest.raises(HookError):
        when_imported(name, fail)
    assert sys.modules[name] is module


def test_a_failing_hook_on_a_module_imported_while_it_was_registered_leaves_the_module(make_module, monkeypatch):
    name, register = make_module(), wrapt.register_post_import_hook

    def import_and_register(hook, module_name):
        importlib.import_module(module_name)
        register(hook, module_name)

    monkeypatch.setattr(wrapt, "register_post_import_hook", import_and_register)
    with pytest.raises(HookError):
        when_imported(name, fail)
    assert name in sys.modules


def test_a_second_import_does_not_get_past_a_hook_that_failed_the_first(make_module):
    name = make_module()
    when_imported(name, fail)
    for _ in range(3):
        with pytest.raises(HookError):
            importlib.import_module(name)
    assert name not in sys.modules


def test_hooks_behind_a_failing_one_run_at_the_next_import(make_module):
    name, seen, failures = make_module(), [], [HookError()]

    def fail_once(module):
        if failures:
            raise failures.pop()

    when_imported(name, fail_once)
    when_imported(name, seen.append)
    with pytest.raises(HookError):
        importlib.import_module(name)
    assert seen == []
    assert importlib.import_module(name) in seen


def test_a_module_that_another_thread_is_importing_is_waited_for(make_module, monkeypatch):
    gate = types.ModuleType("synthetic_gate")
    gate.entered, gate.go_on = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "synthetic_gate", gate)
    name = make_module("import synthetic_gate as g\ng.entered.set()\nassert g.go_on.wait(30)\nVALUE = 1\n")
    seen = []
    importing = threading.Thread(target=importlib.import_module, args=(name,))
    importing.start()
    assert gate.entered.wait(30)
    hooking = threading.Thread(target=when_imported, args=(name, lambda module: seen.append(module.VALUE)))
    hooking.start()
    hooking.join(0.2)  # long enough for a hook that doesn't wait to meet the half-made module
    gate.go_on.set()
    importing.join(30)
    hooking.join(30)
    assert seen == [1]


def test_many_threads_importing_one_module_run_its_hook_once(make_module):
    name, seen = make_module(), []
    when_imported(name, seen.append)
    barrier = threading.Barrier(8)

    def run():
        barrier.wait(30)
        importlib.import_module(name)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == [sys.modules[name]]


def test_a_hook_may_import_the_module_that_it_hooks(make_module):
    name, seen = make_module(), []
    when_imported(name, lambda module: seen.append(importlib.import_module(name) is module))
    importlib.import_module(name)
    assert seen == [True]


def test_a_hook_may_hook_another_module(make_module):
    outer, inner, seen = make_module(), make_module(), []
    when_imported(outer, lambda module: when_imported(inner, seen.append))
    importlib.import_module(outer)
    importlib.import_module(inner)
    assert seen == [sys.modules[inner]]
