"""Tables for people. Everything that prints lives in this room; what is printed comes in as data."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from verl_ext_sharding.communication.hygiene import Setting
from verl_ext_sharding.config.arguments import as_argument, as_override
from verl_ext_sharding.config.changes import KeyChange
from verl_ext_sharding.placement.device_map import HOST, LayerRow
from verl_ext_sharding.placement.devices import format_devices
from verl_ext_sharding.placement.table import PlacementTable

LOG_WIDTH = 130
"""Columns where output is no terminal (log files, Ray's forwarding), so that tables there are not folded at 80."""


_WIDEST = 10_000
"""Columns beyond what any table needs: rich measures within a width."""


def console(width: int | None = None) -> Console:
    """A console on standard output.

    Args:
        width: Columns; None: those of the terminal.
    """
    width = width or (None if sys.stdout.isatty() else LOG_WIDTH)
    return Console(file=sys.stdout, width=width, highlight=False, soft_wrap=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A plain table; a value of None reads `n/a`, and a last column in which nothing stands is left out.

    Names are copied from it: only the last column is folded, and that between words.
    """
    cells = [["n/a" if value is None else str(value) for value in row] for row in rows]
    if not any(row[-1] for row in cells):
        columns, cells = columns[:-1], [row[:-1] for row in cells]
    drawn = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for index, column in enumerate(columns):
        texts = [column, *(row[index] for row in cells)]
        folded = index == len(columns) - 1
        pieces = [word for text in texts for word in text.split()] if folded else texts
        drawn.add_column(column, no_wrap=not folded, overflow="fold", min_width=max(map(len, pieces)))
    for row in cells:
        drawn.add_row(*row)
    return drawn


def show(drawn: Table | str) -> None:
    """Prints a table, wider than the console where its words are, or a line as it is: never folded, so that it can be copied."""
    if isinstance(drawn, str):
        console().print(drawn, markup=False, soft_wrap=True)
        return
    least = Console(width=_WIDEST).measure(drawn).minimum
    console(max(console().width, least)).print(drawn, "", sep="\n", markup=False)


def show_json(data: Any) -> None:
    """Prints data for programs."""
    sys.stdout.write(json.dumps(data, indent=2, sort_keys=True) + "\n")


def show_placement(placement: PlacementTable, title: str = "Roles and devices (planned)") -> None:
    """Prints the placement table with its notes."""
    rows = [
        (
            row.role,
            row.worker_class,
            row.engine,
            format_devices(row.devices) if row.devices else "own pool",
            row.ranks,
            ",".join(map(str, row.nodes)) or None,
            row.shares,
        )
        for row in placement.rows
    ]
    show(table(title, ("role", "worker class", "engine", "devices", "ranks", "node", "shares with"), rows))
    show_notes(placement.notes)


def show_notes(notes: Iterable[str]) -> None:
    """Prints what is to be said beside a table, or in the place of one."""
    for note in notes:
        show(f"  - {note}")


def show_layers(role: str, layers: Sequence[LayerRow], notes: Sequence[str] = (), *, loaded: bool = False) -> None:
    """Prints which device holds which layers of a role, with the bytes of each device."""
    cells = [(row.modules, _place(row), _size(row.num_bytes), _size(row.training_bytes)) for row in layers]
    for place in sorted({_place(row) for row in layers}):
        there = [row for row in layers if _place(row) == place]
        stored, training = sum(row.num_bytes for row in there), sum(row.training_bytes for row in there)
        cells.append(("all", place, _size(stored), _size(training)))
    title = f"Layers of {role} ({'as loaded' if loaded else 'planned'})"
    show(table(title, ("module", "device", "stored", "with gradients and optimizer"), cells))
    show_notes(notes)


def _size(num_bytes: int) -> str:
    """Bytes in GiB, or in MiB where that would round to nothing."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**27 else f"{num_bytes / 2**20:.2f} MiB"


def _place(row: LayerRow) -> str:
    return "host" if row.place == HOST else str(row.place if row.device is None else row.device)


def show_changes(changes: Sequence[KeyChange]) -> None:
    """Prints which of verl's keys were set, and why, as overrides that can be copied."""
    reasons: dict[str, list[KeyChange]] = {}
    for change in changes:
        reasons.setdefault(change.why, []).append(change)
    for why, group in reasons.items():
        show(f"set because of {why}:")
        for change in group:
            before = "not there" if change.added else as_override(change.old)
            line = as_argument(f"{'+' * change.added}{change.key}={as_override(change.new)}")
            show(f"  {line}  (was {before})")


def show_settings(settings: Sequence[Setting]) -> None:
    """Prints the communication variables and why each has its value."""
    rows = [(s.name, "left alone" if s.value is None else s.value, s.source, s.reason) for s in settings]
    show(table("Communication", ("variable", "value", "set by", "because"), rows))


def show_read_back(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the devices that the workers really have."""
    columns = ("role", "rank", "devices", "node", "accelerators", "worker", "engine", "pid")
    cells = [
        (
            row["role"],
            row["rank"],
            ",".join(map(str, row["devices"])) or None,
            row["node"],
            row["accelerator"],
            row["worker"],
            row["engine"],
            row["pid"],
        )
        for row in rows
    ]
    show(table("Roles and devices (read back from the workers)", columns, cells))
