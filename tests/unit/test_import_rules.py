"""Who may import whom, at module level: read from the sources, nothing is imported.

errors, envs, versions  <-  placement  <-  config  <-  driver  <-  task_runner, cli    no torch, ray or verl
                        <-  patching  <-  patch_points                    wrapt alone
                        <-  training                                      torch, but neither ray nor verl
engines, workers, rollout, platforms                                      verl and all of these
"""

import ast
import sys
from pathlib import Path

import pytest

import verl_ext_sharding

ROOT = Path(verl_ext_sharding.__file__).parent
US = ROOT.name
HEAVY = {"torch", "ray", "verl", "transformers", "vllm", "sglang", "tensordict", "transfer_queue"}

PLACEMENT = (
    *("devices", "layer_keys", "device_map", "job", "roles", "bundles"),
    *("batches", "servers", "backends", "resources", "checks", "table"),
)
"""Modules of placement, each may import those to its left."""

AT_LOADING = (
    "plugin",
    "loading",
    "envs",
    "versions",
    "errors",
    "__init__",
    "config.__init__",
    "config.spec",
    "rollout.__init__",
    "platforms.__init__",
)
"""Modules that a plain `import verl` reads, besides placement, patching and patch_points."""


def modules(*patterns):
    """Dotted names below the package, `__init__` written out. Each pattern must match something."""
    found = []
    for pattern in patterns:
        files = sorted(ROOT.glob(pattern))
        assert files, f"no file matches {pattern}"
        found += [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return found


def module_level(body):
    """Statements that run when a module is imported; a block for type checkers does not."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from module_level(node.orelse)
            continue
        yield node
        for block in ("body", "orelse", "finalbody", "handlers"):
            yield from module_level(getattr(node, block, ()))


def imports(module):
    """Full names of what a module imports at module level: `package.module`, or `package.module.name`."""
    file = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    for node in module_level(ast.parse(file.read_text()).body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def packages(module):
    """Top packages that a module imports, without the standard library and this one."""
    return {name.partition(".")[0] for name in imports(module)} - set(sys.stdlib_module_names) - {US}


def rooms(module):
    """Parts of this package that a module imports: `placement.devices`, `errors`, `config`."""
    inside = [name.split(".")[1:] for name in imports(module) if name.split(".")[0] == US]
    return {".".join(parts) for parts in inside}


# Outside packages


@pytest.mark.parametrize(
    "module", modules("placement/*.py", "errors.py", "envs.py", "versions.py", "monitor/events.py")
)
def test_placement_and_what_all_share_need_the_standard_library_alone(module):
    assert packages(module) == set()


@pytest.mark.parametrize("module", modules("patching/*.py"))
def test_patching_needs_wrapt_alone(module):
    assert packages(module) <= {"wrapt"}


@pytest.mark.parametrize("module", modules("patch_points/*.py"))
def test_patch_points_name_their_targets_and_import_them_inside_functions(module):
    assert packages(module) == set()


@pytest.mark.parametrize("module", AT_LOADING)
def test_what_import_verl_reads_needs_the_standard_library_alone(module):
    assert packages(module) == set()


@pytest.mark.parametrize("module", modules("config/*.py"))
def test_config_needs_no_more_than_omegaconf_and_hydra(module):
    allowed = {"omegaconf", "hydra"} if module == "config.hydra_source" else {"omegaconf"}
    assert packages(module) <= allowed


@pytest.mark.parametrize(
    "module", modules("driver.py", "task_runner.py", "sft.py", "launchers.py", "communication/*.py", "demo/*.py")
)
def test_what_runs_before_ray_starts_imports_no_torch_ray_or_verl(module):
    assert not packages(module) & HEAVY


@pytest.mark.parametrize("module", modules("cli/*.py"))
def test_the_command_line_needs_rich_alone(module):
    assert packages(module) <= {"rich"}


@pytest.mark.parametrize("module", modules("training/*.py"))
def test_training_needs_neither_ray_nor_verl(module):
    assert not packages(module) & {"ray", "verl", "vllm", "transfer_queue"}


@pytest.mark.parametrize("module", modules("workers/probe.py"))
def test_the_probe_imports_ray_alone_so_that_it_starts_fast(module):
    assert packages(module) == {"ray"}


# Inside this package


@pytest.mark.parametrize("module", modules("errors.py", "versions.py", "envs.py"))
def test_what_all_share_imports_nothing_of_this_package(module):
    assert rooms(module) == set()


@pytest.mark.parametrize("position", range(len(PLACEMENT)), ids=PLACEMENT)
def test_placement_imports_downwards(position):
    below = {f"placement.{name}" for name in PLACEMENT[:position]} | {"errors"}
    for room in rooms(f"placement.{PLACEMENT[position]}"):
        assert any(room == name or room.startswith(f"{name}.") for name in below), room


def test_every_module_of_placement_has_its_place_in_that_order():
    assert set(modules("placement/*.py")) == {f"placement.{name}" for name in (*PLACEMENT, "__init__")}


@pytest.mark.parametrize("module", modules("patching/*.py"))
def test_patching_knows_of_nothing_but_the_list_of_patch_points(module):
    allowed = ("patching", "errors", "envs", "versions") + (("patch_points",) if module == "patching.ledger" else ())
    for room in rooms(module):
        assert room.partition(".")[0] in allowed, room


@pytest.mark.parametrize("module", modules("patch_points/*.py"))
def test_patch_points_import_the_mechanism_and_the_names_of_variables_alone(module):
    for room in rooms(module):
        assert room.partition(".")[0] in ("patching", "envs", "errors", "versions"), room


@pytest.mark.parametrize("module", modules("training/*.py"))
def test_training_imports_itself_what_all_share_and_the_forms_of_device_maps_and_policies(module):
    for room in rooms(module):
        of_keys = room.startswith(("placement.device_map", "placement.layer_keys", "config.checkpointing_policy"))
        assert of_keys or room.partition(".")[0] in ("training", "errors", "envs", "versions"), room


@pytest.mark.parametrize("module", modules("config/*.py"))
def test_config_imports_no_room_above_it(module):
    for room in rooms(module):
        assert room.partition(".")[0] in ("config", "placement", "errors", "envs", "versions"), room


@pytest.mark.parametrize("module", modules("config/spec.py"))
def test_the_spec_of_a_run_pulls_in_no_config_library(module):
    for room in rooms(module):
        if room.startswith("config."):
            assert "omegaconf" not in packages(".".join(room.split(".")[:2])), room


@pytest.mark.parametrize("module", modules("cli/*.py"))
def test_the_command_line_imports_nothing_that_starts_workers(module):
    for room in rooms(module):
        assert room.partition(".")[0] not in ("workers", "engines", "rollout", "platforms", "cluster"), room


# The reader of this file's own tests


def test_imports_are_found_in_every_place_that_runs_at_import_and_nowhere_else():
    source = """
import a.b
from c.d import e
if True:
    import f
try:
    import g
except ImportError:
    import h
else:
    import i
finally:
    import j
class K:
    import k
    def method(self):
        import never
def function():
    import never
if TYPE_CHECKING:
    import never
else:
    import m
with x:
    import n
"""
    names = [
        alias.name
        for node in module_level(ast.parse(source).body)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    assert sorted(names) == ["a.b", "e", "f", "g", "h", "i", "j", "k", "m", "n"]
