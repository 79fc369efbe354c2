"""A sweep: its trials, and how their settings go with their scores. A trial is one setting with all
its seeds; what was set comes from the runs' configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
from nicegui import ui

from dreamfleet.metrics.outputs.jsonl import DAMAGED
from dreamfleet.plotting import SWEEP_FILE
from dreamfleet.statistics import mean_interval
from dreamfleet.view.charts import COLORS, GREY
from dreamfleet.view.frame import card, draw, frame, keep_fresh, page, set_rows, table
from dreamfleet.view.reading import read_tail
from dreamfleet.view.runs import Run, Runs

_MAX_BYTES, _MAX_DRAWN, _MAX_COMPARED = 1 << 16, 500, 40
_LABELS = {"score": "score", "interval": "95 % interval", "seeds": "seeds", "state": "state"}


class _File(msgspec.Struct):
    """`sweep.json` of a sweep (what each setting is varied over), or of a run that is over."""

    values: dict[str, str] = {}
    state: str = ""
    score: float | None = None


def _read(folder: Path) -> _File:
    with suppress(*DAMAGED):
        return msgspec.json.decode(read_tail(folder, SWEEP_FILE, max_bytes=_MAX_BYTES), type=_File)
    return _File()


def sweeps(runs: Runs) -> dict[str, list[Run]]:
    """The runs of each sweep, by its path from where the folder is."""
    found: dict[Path, list[Run]] = {}
    for run in runs.all():
        found.setdefault(run.path.parent, []).append(run)
    inside = sorted(each for each in found if each.is_relative_to(runs.root) and _read(each).values)
    return {str(each.relative_to(runs.root.parent)): found[each] for each in inside}


def trial_rows(paths: Sequence[str], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Rows of a table, the best one first; `set0` is the value of the first setting."""
    trials: dict[tuple[Any, ...], list[tuple[Run, _File]]] = {}
    for run in runs:
        flat = run.config.flat() if run.config else {}
        values = (flat.get(path, "") for path in paths)
        key = tuple(v if type(v) in (int, float) else str(v) for v in values)
        trials.setdefault(key, []).append((run, _read(run.path)))
    rows = []
    for key, members in trials.items():
        found = [run.row.score if end.score is None else end.score for run, end in members]
        scores = [score for score in found if score is not None]
        mean = mean_interval(scores) if scores else None
        row = {f"set{number}": value for number, value in enumerate(key)}
        row |= {"name": repr(key), "seeds": len(members), "score": mean.value if mean else None}
        row["interval"] = f"{mean.low:.4g} to {mean.high:.4g}" if mean and len(scores) > 1 else ""
        row["state"] = ", ".join(sorted({end.state or run.row.state for run, end in members}))
        rows.append(row)
    return sorted(rows, key=lambda row: (row["score"] is None, -(row["score"] or 0.0)))


def parallel_chart(values: Mapping[str, str], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """An axis for each setting and the score; a line for each trial, in the colour of its score."""
    drawn = [row for row in rows if row["score"] is not None][:_MAX_DRAWN]
    keys = [*(f"set{number}" for number in range(len(values))), "score"]
    axes: list[dict[str, Any]] = []
    for number, path in enumerate([*values, "score"]):
        found = [row[keys[number]] for row in drawn]
        kind: dict[str, Any] = {"type": "category", "data": [str(v) for v in dict.fromkeys(found)]}
        if all(not isinstance(value, str) for value in found):
            kind = {"type": "log" if "how='log'" in values.get(path, "") else "value"}
        axes.append({"dim": number, "name": path.rpartition(".")[2], "scale": True, **kind})
    scores = [row["score"] for row in drawn] or [0.0]
    grey = {"color": GREY}
    style = {"nameTextStyle": grey, "axisLabel": grey, "axisLine": {"lineStyle": grey}}
    place = {"left": 50, "right": 60, "top": 44, "bottom": 28, "parallelAxisDefault": style}
    color = {"show": False, "dimension": len(values), "inRange": {"color": [GREY, COLORS[0]]}}
    color |= {"min": min(scores), "max": max(*scores, min(scores) + 1e-9)}
    data = [[row[key] for key in keys] for row in drawn]
    series = {"type": "parallel", "lineStyle": {"width": 2, "opacity": 0.7}, "data": data}
    options = {"animation": False, "parallel": place, "parallelAxis": axes, "visualMap": color}
    return {**options, "series": [series]}


def add_links(runs: Runs) -> None:
    """Links to the sweeps of a folder."""
    for name in sweeps(runs):
        ui.link(f"sweep {name}", f"/sweep?{urlencode({'name': name})}").classes("small")


def add(runs: Runs) -> None:
    """Add the page of a sweep."""

    @page("/sweep")
    async def _(name: str = "") -> None:
        members, charts = sweeps(runs).get(name, []), dict[str, ui.echart]()
        values = _read(members[0].path.parent).values if members else {}
        settings = {f"set{n}": path for n, path in enumerate(values)}
        with frame(runs) as head:
            with card(f"Sweep {name}", f"{len(members)} runs") as place:
                compared = [("run", run.name) for run in members[:_MAX_COMPARED]]
                ui.link("curves by setting", f"/curves?{urlencode([*compared, ('interval', 1)])}")
            with card("Trials", "the best one first"):
                phone, numbers = (*settings, "score", "state"), (*settings, "score", "seeds")
                trials = table(settings | _LABELS, phone=phone, numbers=numbers)

        def refresh() -> None:
            set_rows(trials, trial_rows([*values], sweeps(runs).get(name, [])))
            draw(charts, "parallel", parallel_chart(values, trials.rows), place)

        await keep_fresh(runs.update, head, refresh, seconds=3.0)
