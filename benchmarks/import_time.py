"""What the installed plugin adds to `import verl`: medians over alternating processes, with it and without.

    python benchmarks/import_time.py [--runs 15] [--modules 10]

A process without it has VERL_USE_EXTERNAL_PLUGINS=none, verl's own switch. `import verl` takes seconds and varies by
more than the plugin takes, so the last row is what decides: the plugin's own import in a process that has verl already,
in CPU time of the process, which does not see what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys

GOAL_MS = 50.0

_TIMED = """
import time
{before}
wall, cpu = time.perf_counter(), time.process_time()
import {module}
print("ms", (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3)
"""
_CASES = {
    "import verl, with": ("verl", "", "auto"),
    "import verl, without": ("verl", "", "none"),
    "the plugin alone": ("verl_ext_sharding.plugin", "import verl", "none"),
}


def main() -> int:
    """Prints one table, or two with `--modules`; exit code 1 if the plugin takes more than it should."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15, help="processes of each kind (default 15)")
    parser.add_argument("--modules", type=int, default=0, help="also list this many of the plugin's slowest modules")
    options = parser.parse_args()
    for case in _CASES.values():
        import_ms(*case)  # fills caches of bytecode and of the disk
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in _CASES}
    for _ in range(options.runs):
        for name, case in _CASES.items():
            times[name].append(import_ms(*case))
    print(f"{'':<24}{'median ms':>12}{'min ms':>10}{'median CPU ms':>16}{'min CPU ms':>12}{'runs':>6}")
    for name, pairs in times.items():
        columns = [f(values) for values in zip(*pairs, strict=True) for f in (statistics.median, min)]
        print(f"{name:<24}{columns[0]:>12.1f}{columns[1]:>10.1f}{columns[2]:>16.1f}{columns[3]:>12.1f}{len(pairs):>6}")
    median_ms = statistics.median(cpu for _, cpu in times["the plugin alone"])
    print(f"goal: the plugin alone under {GOAL_MS:g} CPU ms; {'met' if median_ms < GOAL_MS else 'missed'}")
    if options.modules:
        show_modules(options.modules)
    return int(median_ms >= GOAL_MS)


def import_ms(module: str, before: str, plugins: str) -> tuple[float, float]:
    """Milliseconds and CPU milliseconds that a fresh process takes to import a module.

    Args:
        module: The module.
        before: Statement that runs before the clock starts.
        plugins: Value of VERL_USE_EXTERNAL_PLUGINS.
    """
    out = _run(["-c", _TIMED.format(module=module, before=before)], plugins).stdout
    wall, cpu = re.findall(r"^ms ([\d.]+) ([\d.]+)$", out, re.MULTILINE)[-1]
    return float(wall), float(cpu)


def show_modules(count: int) -> None:
    """Prints the modules that the plugin brings in and that take longest by themselves.

    Args:
        count: How many.
    """
    found = {}
    for line in _run(["-X", "importtime", "-c", "import verl"], "auto").stderr.splitlines():
        match = re.fullmatch(r"import time:\s+(\d+) \|\s+\d+ \|\s*(\S+)", line)
        if match and match[2].startswith(("verl_ext_sharding", "wrapt")):
            found[match[2]] = int(match[1]) / 1e3
    print(f"\n{'module':<52}{'self ms':>10}")
    for name, self_ms in sorted(found.items(), key=lambda item: -item[1])[:count]:
        print(f"{name:<52}{self_ms:>10.2f}")
    print(f"{'all ' + str(len(found)):<52}{sum(found.values()):>10.2f}")


def _run(arguments: list[str], plugins: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": plugins}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=True)


if __name__ == "__main__":
    sys.exit(main())
