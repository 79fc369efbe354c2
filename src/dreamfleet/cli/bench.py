"""`dreamfleet bench NAME --json F`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from dreamfleet.benchmarks import agent_devices, agent_sizes
from dreamfleet.benchmarks.agent_sizes import Kind, Precision, sizes_of
from dreamfleet.benchmarks.report import Row, markdown
from dreamfleet.cli.console import say, write
from dreamfleet.errors import ConfigError

Name = Literal[
    "transport", "replay", "agent", "fleet", "envs", "metrics", "checkpoint", "network", "scale",
    "view", "lowering", "hostile",
]  # fmt: skip


def bench(
    name: Name,
    /,
    json: Path | None = None,
    quick: bool = False,
    sizes: str = "",
    dtype: Precision = "bfloat16",
    kind: Kind = "vector",
    devices: str = "",
) -> None:
    """Measure speed, and peers in the same run where their package is installed.

    Ratios are ours to the peer's within one run; above 1 is better. Measure on a quiet machine.

    Args:
        name: What to measure: transport, replay, agent, fleet, envs, metrics, checkpoint, network,
            scale, view, lowering or hostile.
        json: Also write the rows to this file.
        quick: A short run that only shows that the benchmark works.
        sizes: Of the agent: measure these on whatever device is here, such as 1m,12m,25m, or all.
        dtype: Of the agent's sizes: the precision of activations.
        kind: Of the agent's sizes: vector (24 numbers) or image (64 x 64 x 3).
        devices: Of the agent: train on so many devices, such as 1,2,4,8, virtual ones on a
            processor, and compare them with one; in the first of the `sizes`, or in 1m.
    """
    if (sizes or devices) and name != "agent":
        raise ConfigError(f"--sizes and --devices are for the agent, not for {name}.")
    batch = (4, 8) if quick else (16, 64)
    if devices:
        chosen = sizes_of(sizes or "1m")[0]
        sizes_here = (8, 16) if quick else batch
        like = agent_devices.Task(1, "", chosen, *sizes_here, quick=quick)
        _grid(agent_devices, agent_devices.run(agent_devices.counts_of(devices), like), json)
        return
    if sizes:
        tasks = [agent_sizes.Task(size, kind, dtype, *batch) for size in sizes_of(sizes)]
        _grid(agent_sizes, agent_sizes.run(tasks), json)
        return
    run = importlib.import_module(f"dreamfleet.benchmarks.{name}").run
    rows: list[Row] = run(quick=quick)
    say(_table(name, rows))
    if json:
        write(json, dumps([asdict(row) for row in rows], indent=2) + "\n")


def _grid(module: Any, results: Iterable[dict[str, Any]], json: Path | None) -> None:
    """A line in Markdown for each result, as soon as it is there."""
    found: list[dict[str, Any]] = []
    for result in results:
        if not found:
            say(f"{module.where(result) if 'device' in result else result['problem']}\n")
            say(markdown(module.COLUMNS))
            say(f"|{'---|' * len(module.COLUMNS)}")
        say(_grid_line(module, result))
        found.append(result)
        if json:
            write(json, dumps(found, indent=2) + "\n")


def _grid_line(module: Any, found: dict[str, Any]) -> str:
    shown = list(module.COLUMNS.values())
    if "problem" in found:
        rest = [""] * (len(shown) - module.ASKED - 1)
        return markdown([*(show(found) for show in shown[: module.ASKED]), found["problem"], *rest])
    return markdown(show(found) for show in shown)


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
