"""The processes of a run: a graph, a table, and failures."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

from nicegui import ui

from dreamfleet.fleet.record import Event, RunStatus
from dreamfleet.formatting import clock, readable
from dreamfleet.metrics.timing import Rate
from dreamfleet.view.charts import GREY
from dreamfleet.view.frame import Refresh, card, draw, set_rows, table
from dreamfleet.view.reading import finite
from dreamfleet.view.runs import Run

_MIN_WAIT_SHARE = 0.3
_MAX_FAILURES = 50
_TRAFFIC_SECONDS = 40.0
_COLUMNS = {"env": 0, "eval": 0, "machine": 0, "replay": 2, "logger": 2}
"""Where roles are in the graph; all others are in the middle."""
_TRAFFIC = {"env": "actor/server", "replay": "actor/replay_client", "logger": "actor/logger_client"}
"""Whose byte counters are between the agent and each role."""
_BAD, _WARN, _GOOD = "#d95568", "#c9922a", "#3a9d68"
_STATE_COLORS = dict.fromkeys(("restarting", "away", "failed"), _BAD) | {"starting": _WARN}
_STATE_COLORS |= dict.fromkeys(("running", "joined"), _GOOD)
_LABELS = {"name": "process", "state": "state", "host": "machine", "pid": "PID", "cpu": "cores"}
_LABELS |= {"memory": "memory", "running": "running for", "restarts": "restarts"}
_LABELS |= {"error": "last error"}


def build_fleet(run: Run) -> Refresh:
    """A graph and tables."""
    charts: dict[str, ui.echart] = {}
    traffic = {role: Rate(_TRAFFIC_SECONDS) for role in _TRAFFIC}
    with card("Fleet"):
        sentence, usage = ui.label(), ui.label().classes("muted small")
        place = ui.element("div")
        processes = table(
            _LABELS,
            phone=("name", "state"),
            numbers=("pid", "cpu", "memory", "restarts"),
            formats={"pid": "v => v"},
        )
    with card("Failures", "newest first"):
        count = ui.label().classes("muted small")
        labels = {"time": "when", "worker": "process", "error": "error"}
        failures = table(labels, phone=labels, key="key").props("wrap-cells")

    def refresh() -> None:
        if (status := run.status) is None:
            return
        sentence.text, usage.text = bottleneck(run, status), usage_text(status)
        rows, failed = process_rows(status, run.recently_failed), failure_rows(status.events)
        set_rows(processes, rows)
        for part in (place, processes):
            part.set_visibility(bool(rows))
        set_rows(failures, failed[:_MAX_FAILURES])
        many = "1 failure" if len(failed) == 1 else f"{len(failed):,} failures"
        count.text = many if failed else "No process has failed."
        failures.set_visibility(bool(failed))
        for role, client in _TRAFFIC.items():
            sent = (finite(status.metrics.get(f"{client}/bytes_{way}")) for way in ("in", "out"))
            traffic[role].add(time.monotonic(), sum(each or 0.0 for each in sent))
        graph = fleet_graph(rows, {role: rate.value for role, rate in traffic.items()})
        draw(charts, "graph", graph, place, "chart low")

    return refresh


def bottleneck(run: Run, status: RunStatus) -> str:
    """What the run waits for, in a sentence."""
    if status.message:
        return status.message
    share = run.newest("learner/timer/wait/frac") or 0.0
    if share > _MIN_WAIT_SHARE:
        return f"The learner waits for batches {share:.0%} of its time: collecting is slower."
    waiting = "; ".join(each.waiting for each in status.workers if each.waiting)
    return f"{waiting[:1].upper()}{waiting[1:]}." if waiting else "No process waits for long."


def usage_text(status: RunStatus) -> str:
    """What the processes on this machine use together."""
    usages = [status.supervisor, *(worker.usage for worker in status.workers)]
    used = [each for each in usages if each is not None]
    if not used:
        return ""
    cores, memory = sum(each.cpu for each in used), sum(each.memory for each in used)
    disk = float(status.metrics.get("replay/disk_bytes") or 0.0)
    text = f"{cores:.1f} cores · {readable(memory)}B of memory on this machine"
    return f"{text} · {readable(disk)}B of replay on disk" if disk else text


def process_rows(status: RunStatus, recently_failed: Collection[str]) -> list[dict[str, Any]]:
    """Workers, then machines that have joined, as rows of a table."""
    rows: list[dict[str, Any]] = []
    for worker in status.workers:
        state = "restarting" if worker.name in recently_failed else worker.state
        row = {name: getattr(worker, name) for name in ("name", "role", "host", "pid", "restarts")}
        row |= {"state": state, "error": worker.error}
        row["alert"] = worker.error if state == "restarting" else ""
        row["cpu"] = round(worker.usage.cpu, 1) if worker.usage else None
        row["memory"] = worker.usage.memory if worker.usage else None
        rows.append(row | {"running": clock(worker.seconds) if worker.pid else ""})
    for machine in status.machines:
        away = machine.state == "away"
        envs = f"{machine.envs + machine.eval_envs} envs"
        row = {"name": machine.name, "role": "machine", "state": machine.state}
        row |= {"host": f"{envs}, {machine.steps_per_second:.0f} steps/s", "error": machine.error}
        row |= {"restarts": machine.failures, "alert": machine.error if away else ""}
        row |= {"running": clock(machine.silence if away else machine.seconds)}
        rows += [row] if machine.state != "left" else []
    return rows


def failure_rows(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Failures as rows of a table, the newest first."""
    now = time.time()
    failed = [each for each in events if each.event == "failed"]
    return [
        {
            "key": number,
            "time": f"{clock(max(0.0, now - each.time))} ago",
            "worker": each.worker,
            "error": each.error or "ended",
        }
        for number, each in reversed(list(enumerate(failed)))
    ]


def fleet_graph(rows: Sequence[Mapping[str, Any]], traffic: Mapping[str, float]) -> dict[str, Any]:
    """Roles as nodes, coloured by their worst state; links as wide as their traffic. Text on a
    canvas is never markup."""
    nodes: list[dict[str, Any]] = []
    links: list[dict[str, Any]] = []
    depth = {0: 0, 1: 0, 2: 0}
    order = list(_STATE_COLORS)
    for role, group in groupby(rows, key=lambda row: row["role"]):
        members = list(group)
        states = [str(row["state"]) for row in members]
        state = min(states, key=lambda each: order.index(each) if each in order else len(order))
        column = _COLUMNS.get(role, 1)
        cores = sum(row.get("cpu") or 0.0 for row in members)
        count = f" x {len(members)}" if len(members) > 1 else ""
        color = _STATE_COLORS.get(state, GREY)
        label = {"formatter": f"{role}{count}\n{cores:.1f} cores"}
        node = {"name": role, "value": [column, depth[column]], "label": label}
        nodes.append(node | {"itemStyle": {"color": color}})
        depth[column] += 1
        if role in ("env", "machine", "replay", "logger"):
            rate = traffic.get(role, 0.0)
            width = 1.5 + min(7.0, max(0.0, math.log10(max(rate, 1.0)) - 2) * 1.3)
            style = {"width": round(width, 1), "color": color, "opacity": 0.5}
            text = f"{rate / 1e6:.1f} MB/s" if rate >= 1e6 else f"{rate / 1e3:.0f} kB/s"
            told = {"show": rate > 0, "formatter": text, "color": GREY, "opacity": 1}
            links.append({"source": role, "target": "agent", "lineStyle": style, "label": told})
    for node in nodes:  # centred in its column
        column, place = node["value"]
        node["value"] = [column, (depth[column] - 1) / 2 - place]
    names = {node["name"] for node in nodes}
    high = (max(depth.values()) - 1) / 2 or 1.0
    margin = "innerWidth < 700 ? 42 : 80"
    return {
        "animation": False,
        "grid": {":left": margin, ":right": margin, "top": 34, "bottom": 34},
        "xAxis": {"show": False, "type": "value", "min": 0, "max": 2},
        "yAxis": {"show": False, "type": "value", "min": -high, "max": high},
        "series": [
            {
                "type": "graph",
                "coordinateSystem": "cartesian2d",
                "symbol": "roundRect",
                ":symbolSize": "innerWidth < 700 ? [82, 40] : [130, 46]",
                "label": {"show": True, "color": "#fff", "fontSize": 12, "lineHeight": 16},
                "edgeLabel": {"fontSize": 11},
                "silent": True,
                "data": nodes,
                "links": [link for link in links if link["target"] in names],
            }
        ],
    }
