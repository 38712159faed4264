"""`verl-sharding doctor`: what is installed, what is active, which patches fit. Runs when verl does not import."""

from __future__ import annotations

from dataclasses import asdict
from importlib import metadata

from verl_ext_sharding import envs, versions
from verl_ext_sharding.cli import render
from verl_ext_sharding.communication import hygiene
from verl_ext_sharding.config.schema import CommunicationConfig
from verl_ext_sharding.patching import ledger

DISTRIBUTIONS = ("verl", "torch", "ray", "vllm", "sglang", "transformers", "accelerate", "hydra-core", "TransferQueue")


def run(*, as_json: bool) -> int:
    """Prints versions, the state of the plugin and the table of patches; exit code 1 when something is wrong."""
    found = {name: versions.installed(name) for name in DISTRIBUTIONS}
    patches = ledger.forecast(needed=_every_need())
    problems = [*_problems(found), *(f"patch {p.id} does not fit: {p.reason}" for p in patches if p.state == "failed")]
    if as_json:
        render.show_json(
            {
                "version": versions.__version__,
                "installed": found,
                "problems": problems,
                "patches": [asdict(patch) | {"processes": sorted(patch.processes)} for patch in patches],
            }
        )
        return int(bool(problems))
    rows = [("verl-ext-sharding", versions.__version__, ""), *((n, v, _remark(n, v)) for n, v in found.items())]
    render.show(render.table("Installed", ("distribution", "version", "remark"), rows))
    columns = ("patch", "target", "fits", "applied in", "why not")
    cells = [
        (p.id, p.target, "yes" if p.state == "pending" else "no", ", ".join(sorted(p.processes)), p.reason)
        for p in patches
    ]
    render.show(
        render.table(
            "Patches of a run with trainer.plugin=sharding (others pass through them unchanged)", columns, cells
        )
    )
    for problem in problems:
        render.show(f"problem: {problem}")
    if not problems:
        render.show(
            "ready: add trainer.plugin=sharding to a verl command; VERL_SHARDING_DISABLE=1 keeps the plugin out"
        )
    return int(bool(problems))


def _every_need() -> list[str]:
    """Every key that makes a patch necessary: a patch that some run needs must fit."""
    return [spec.needed_by for spec in ledger.known_specs() if spec.needed_by is not None]


def show_env(*, as_json: bool) -> int:
    """Prints the communication variables that a run would set on this node, and why."""
    settings = hygiene.decide_here(CommunicationConfig())
    if as_json:
        render.show_json([asdict(setting) for setting in settings])
    else:
        render.show_settings(settings)
    return 0


def _remark(name: str, version: str | None) -> str:
    if name == "verl" and version is not None and not versions.in_range(version):
        return f"supported: {versions.VERL_RANGE}"
    return ""


def _load_failure() -> str | None:
    """Loads the plugin as verl does; the error of a load that failed, on one line, or None. Imports verl."""
    from verl_ext_sharding import plugin

    return _error_in(plugin.failure) if plugin.failure is not None else None


def _error_in(traceback: str) -> str:
    """The error that a traceback ends with, on one line; ours have several, and all but the first are indented."""
    lines = traceback.strip().splitlines()
    start = max(index for index, line in enumerate(lines) if line and not line[0].isspace())
    return " ".join(" ".join(lines[start:]).split())


def _problems(found: dict[str, str | None]) -> list[str]:
    problems = []
    if found["verl"] is None:
        problems.append("verl is not installed: pip install 'verl-ext-sharding[verl]'")
    elif not versions.in_range(found["verl"]):
        problems.append(
            f"verl {found['verl']} is outside {versions.VERL_RANGE}: pip install 'verl{versions.VERL_RANGE}'"
        )
    elif (failure := _load_failure()) is not None:
        problems.append(f"the plugin fails to load: {failure}")
    problems += [f"{why}: unset {name}" for name, why in envs.keeping_out().items()]
    if not any(point.name == "sharding" for point in metadata.entry_points(group="verl.plugins")):
        problems.append("the entry point is not registered: pip install --force-reinstall --no-deps verl-ext-sharding")
    return problems
