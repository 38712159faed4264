"""Applies patches to real modules, step by step, and says after each step whether the targets are as they should be.

    python order_check.py OUT "install import remove" module:callable-that-returns-specs

Runs in a process of its own, since it changes what it imports. Writes `{patch id: "ok" | what went wrong}` to OUT;
"unavailable: ..." if the target's module needs a package that is not installed.
"""

import importlib
import json
import pickle
import sys
from pathlib import Path

import cloudpickle

from verl_ext_sharding.errors import PatchError
from verl_ext_sharding.patching import PatchSpec, install, original, remove

STEPS = ("import", "install", "remove")


class Target:
    """One patch, the object that its target was before anything happened, and what should be there now."""

    def __init__(self, spec: PatchSpec) -> None:
        self.spec = spec
        self.verdict = "ok"
        self.stock: object = None
        self.is_imported = False
        self.is_installed = False

    def step(self, name: str) -> None:
        """Takes one step and compares; a failure is kept and ends the matter for this patch."""
        if self.verdict != "ok":
            return
        try:
            self._take(name)
            if self.is_imported:
                self._compare()
        except ModuleNotFoundError as error:
            own = self.spec.module.partition(".")[0]
            missing = (error.name or "").partition(".")[0]
            self.verdict = f"unavailable: {error}" if missing != own else f"{name}: {error}"
        except (AssertionError, PatchError) as error:
            self.verdict = f"{name}: {error}"

    def _take(self, name: str) -> None:
        if name == "import":
            module = importlib.import_module(self.spec.module)
            self.is_imported = True
            # With the patch in place already, the original is all that tells what was there before.
            self.stock = original(self.spec) if self.is_installed else self._current(module)
        elif name == "install":
            needed = [self.spec.needed_by] if self.spec.needed_by else []
            self.is_installed = True
            install([self.spec], process=min(self.spec.processes), needed=needed)
        else:
            remove(self.spec)
            self.is_installed = False

    def _current(self, module: object) -> object:
        found = module
        for name in self.spec.qualname.split("."):
            found = self._raw(found, name)
        return found

    @staticmethod
    def _raw(owner: object, name: str) -> object:
        holders = owner.__mro__ if isinstance(owner, type) else (owner,)
        raw = next(vars(holder)[name] for holder in holders if name in vars(holder))
        return getattr(raw, "__func__", raw)

    def _compare(self) -> None:
        module = sys.modules[self.spec.module]
        expected = self.spec.replacement if self.is_installed else self.stock
        found = self._current(module)
        assert found is expected, f"{self.spec.target} is {found!r} and should be {expected!r}"
        assert self.stock is not self.spec.replacement, "the original is the replacement"
        assert original(self.spec) is self.stock, f"the original is {original(self.spec)!r}, not {self.stock!r}"
        if self.is_installed:
            self._compare_replacement(found)

    def _compare_replacement(self, found: object) -> None:
        """The replacement carries what the original carried, and travels by reference."""
        lost = set(vars(self.stock)) - {"__wrapped__", "__signature__"} - set(vars(found))
        assert not lost, f"the replacement lacks {sorted(lost)}"
        pickled = cloudpickle.dumps(found)
        assert pickle.loads(pickled) is found, "the replacement is not pickled by reference"


def main() -> None:
    out, order, source = sys.argv[1:]
    steps = order.split()
    assert set(steps) <= set(STEPS), steps
    module, _, name = source.partition(":")
    targets = [Target(spec) for spec in getattr(importlib.import_module(module), name)()]
    for step in steps:
        for target in targets:
            target.step(step)
    Path(out).write_text(json.dumps({target.spec.id: target.verdict for target in targets}))


if __name__ == "__main__":
    main()
