"""`dreamfleet bench NAME --json F`."""

from __future__ import annotations

import importlib
from json import dumps
from pathlib import Path
from typing import Literal

from rich.table import Table

from dreamfleet.benchmarks.report import Row, rows_to_json
from dreamfleet.cli.console import say, write

Name = Literal[
    "transport", "replay", "agent", "fleet", "envs", "metrics", "checkpoint", "network", "scale",
    "view", "lowering", "hostile",
]  # fmt: skip


def bench(
    name: Name,
    /,
    json: Path | None = None,
    quick: bool = False,
) -> None:
    """Measure speed, and peers in the same run where their package is installed.

    Ratios are ours to the peer's within one run; above 1 is better. Measure on a quiet machine.

    Args:
        name: What to measure.
        json: Also write the rows to this file.
        quick: A short run that only shows that the benchmark works.
    """
    run = importlib.import_module(f"dreamfleet.benchmarks.{name}").run
    rows: list[Row] = run(quick=quick)
    say(_table(name, rows))
    if json:
        write(json, dumps(rows_to_json(rows), indent=2) + "\n")


def _table(title: str, rows: list[Row]) -> Table:
    table = Table(title=f"dreamfleet bench {title}", title_justify="left")
    for column in ("name", "value", "unit", "peer", "peer value", "ratio", "note"):
        numeric = column in ("value", "peer value", "ratio")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=column == "name")
    for row in rows:
        table.add_row(
            row.name,
            _number(row.value),
            row.unit,
            row.peer or "",
            _number(row.peer_value),
            _number(row.ratio),
            row.note,
        )
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
