"""Curves and charts: what is drawn of runs, and that none of their text is code or markup."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pytest
from view_parts import made_up_run

from dreamfleet.fleet.record import (
    Event,
    MachineStatus,
    ProcessUsage,
    RunStatus,
    Scores,
    WorkerStatus,
)
from dreamfleet.metrics.glossary import explain
from dreamfleet.view.charts import (
    CurveOptions,
    missing_hours,
    panel_chart,
    panels,
    smoothed,
    to_csv,
)
from dreamfleet.view.curves_page import read_options, write_query
from dreamfleet.view.fleet_page import failure_rows, fleet_graph, process_rows, usage_text
from dreamfleet.view.reading import training_hours
from dreamfleet.view.runs import EVALUATION, SCORE, Run

WEEK = 7 * 86400.0


def a_run(path: Path, **settings: Any) -> Run:
    run = Run(path.name, made_up_run(path, **settings))
    run.refresh()
    run.read(metrics=True)
    return run


def chart_of(runs: list[Run], metric: str = SCORE, **options: Any) -> dict[str, Any]:
    (panel,) = panels(runs, metric, CurveOptions(**options))
    return panel_chart(panel, metric, CurveOptions(**options)).options


def legend(chart: dict[str, Any]) -> list[str]:
    """Names of curves, without those of dots; bands have none."""
    lines = [each for each in chart["series"] if each["type"] == "line"]
    return list(dict.fromkeys(each["name"] for each in lines if "name" in each))


def test_seeds_of_a_setting_are_one_curve(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / f"s{n}", seed=n, episodes=30 + n) for n in range(3)]
    runs.append(a_run(tmp_path / "other", batch_size=9))
    for metric in (SCORE, "train/loss/value"):
        (panel,) = panels(runs, metric, CurveOptions())
        assert [group.curve.runs for group in panel.groups] == [3, 1]
        (apart,) = panels(runs, metric, CurveOptions(join_seeds=False))
        assert [group.curve.runs for group in apart.groups] == [1, 1, 1, 1]
    names = legend(chart_of(runs))
    assert len(names) == 2
    assert "3 seeds" in names[0]


def test_any_metric_has_every_axis(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", task="dmc:walker_walk", env_options={"repeat": 2})
    (run.path / "evaluations.jsonl").write_text('{"step": 300, "mean": 7.0, "episodes": 2}\n')
    for metric in (SCORE, "train/loss/value", EVALUATION):
        ends = {
            axis: panels([run], metric, CurveOptions(axis=axis))[0].end
            for axis in ("steps", "frames", "hours")
        }
        assert ends == {"steps": 300, "frames": 600, "hours": pytest.approx(29 * 5 / 3600)}
    assert panels([run], "never/logged", CurveOptions()) == []


def test_a_single_run_keeps_the_range_of_joined_rows(tmp_path: Path) -> None:
    path = made_up_run(tmp_path / "a")
    rows = [{"step": n, "spiky": 100.0 if n == 4321 else 1.0} for n in range(1, 9000)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = Run("a", path)
    run.refresh()
    run.read(metrics=True)
    chart = chart_of([run], "spiky")
    (high,) = (each for each in chart["series"] if "areaStyle" in each)
    assert max(y for _, y in high["data"]) > 20
    assert max(len(each["data"]) for each in chart["series"]) <= 500


def test_published_curves_where_there_are_any(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", task="dmc:walker_walk", env_options={"repeat": 2})
    first: dict[str, float] = {}
    for axis, count in (("frames", 1), ("steps", 1), ("hours", 0)):
        chart = chart_of([run], axis=axis)
        published = [each for each in chart["series"] if "published" in each.get("name", "")]
        assert len(published) == count
        first[axis] = published[0]["data"][0][0] if published else 0.0
    assert first["frames"] == 2 * first["steps"] > 0  # two frames per step
    assert not any("published" in name for name in legend(chart_of([run], published=False)))
    assert legend(chart_of([run], "train/loss/value")) == ["dreamer"]  # scores alone are published


@pytest.mark.parametrize(
    ("gaps", "steps", "seconds"),
    [
        ([60, 60, WEEK, 60], [10, 10, 10, 10], 180),
        ([7000, 0, 0, 80, 0, 0, 80, 0, 0], [3600, 0, 0, 2000, 0, 0, 2000, 0, 0], 160),
        ([1800, 1800, WEEK, 1800], [100, 100, 100, 100], 5400),  # long episodes
        ([0, 0, 0, 1800] * 5, [1, 1, 1, 4000] * 5, 9000),  # which end together
        ([1000, 0], [0, 5], 0),
        ([], [], 0),
    ],
)
def test_a_pause_is_not_training_time(
    gaps: list[float], steps: list[float], seconds: float
) -> None:
    time, step = (np.cumsum([0.0, *each]) for each in (gaps, steps))
    assert training_hours(time, step)[-1] == pytest.approx(seconds / 3600)


def test_table_and_curve_agree_on_training_time(tmp_path: Path) -> None:
    path = made_up_run(tmp_path / "a")
    with (path / "scores.jsonl").open("a") as file:  # resumed a week later
        for number in (31, 32):
            row = {"step": 10 * number, "episode/score": 1.0, "time": WEEK + 5.0 * number}
            file.write(json.dumps(row) + "\n")
    run = Run("a", path)
    run.refresh()
    assert run.row.hours == pytest.approx(30 * 5 / 3600)
    (panel,) = panels([run], SCORE, CurveOptions(axis="hours"))
    assert panel.end == pytest.approx(run.row.hours)
    assert len(panel.groups[0].curve.at) > 20


def test_a_run_without_all_times_is_not_drawn_over_hours(tmp_path: Path) -> None:
    """Its first hours are unknown, so the others have no known start."""
    run = a_run(tmp_path / "a")
    file = made_up_run(tmp_path / "older", seed=1) / "scores.jsonl"
    file.write_text('{"step": 5, "episode/score": 1.0}\n' + file.read_text())
    older = Run("older", file.parent)
    older.refresh()
    (panel,) = panels([run, older], SCORE, CurveOptions(axis="hours"))
    assert [each.config.seed for group in panel.groups for each in group.runs] == [0]
    told = missing_hours([run, older], CurveOptions(axis="hours"))
    assert told.endswith("their episodes have no time: older.")
    assert older.row.hours is None
    assert missing_hours([run, older], CurveOptions()) == ""


def test_runs_of_one_seed_are_not_called_seeds(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / f"s{n}", seed=0) for n in range(3)]
    assert legend(chart_of(runs)) == ["dreamer · 3 runs of 1 seed"]
    (panel,) = panels([*runs, a_run(tmp_path / "b", seed=1)], SCORE, CurveOptions())
    assert panel.groups[0].size == "4 runs of 2 seeds"


def test_a_mean_of_some_runs_is_dotted(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / f"s{n}", seed=n, episodes=20 + 10 * (n > 0)) for n in range(3)]
    (panel,) = panels(runs, SCORE, CurveOptions())
    series = chart_of(runs)["series"]
    whole, some = (each for each in series if each.get("name") == "dreamer · 3 seeds")
    assert some["lineStyle"]["type"] == "dotted"
    assert "type" not in whole["lineStyle"]
    assert [x for x, y in whole["data"] if y is not None][-1] == 200
    dotted = [(x, told) for x, y, told in some["data"] if y is not None]
    assert (dotted[0], dotted[1]) == ((200, "3 of 3 runs"), (205, "2 of 3 runs"))
    last = list(csv.DictReader(to_csv([(SCORE, panel)], CurveOptions()).splitlines()))[-1]
    assert (last["seeds"], last["runs"]) == ("3", "2")


def test_a_tooltip_shows_the_published_and_the_run_s_own_value(tmp_path: Path) -> None:
    """It shows the curves that have a point at one place."""
    run = a_run(tmp_path / "a", task="dmc:walker_walk", episodes=5000)
    series = chart_of([run], axis="frames")["series"]
    published, own = (
        {x for x, y in each["data"]}
        for each in series
        if each.get("name", "").startswith(("published", "dreamer"))
    )
    assert {x for x in own if x >= 10_000} <= published
    assert max(published) > max(own)


def test_the_band_of_seeds_is_their_range_or_the_interval_of_their_mean(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / f"s{n}", seed=n) for n in range(3)]
    for number, run in enumerate(runs):
        rows = [{"step": 10 * n, "episode/score": 3.0 * number} for n in range(1, 31)]
        if number == 2:  # it ends earlier
            rows = rows[:10]
        (run.path / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        run.read(metrics=False)
    for interval, first, last in ((False, (0.0, 6.0), (0.0, 3.0)), (True, 7.453, 19.06)):
        options = CurveOptions(interval=interval)
        (panel,) = panels(runs, SCORE, options)
        text = to_csv([(SCORE, panel)], options)
        ends = [
            (float(row["low"]), float(row["high"])) for row in csv.DictReader(text.splitlines())
        ]
        if interval:  # Student's t for two and one degrees of freedom
            widths = [(high - low) / 2 for low, high in (ends[0], ends[-1])]
            assert widths == pytest.approx([first, last], rel=1e-3)
        else:
            assert (ends[0], ends[-1]) == (first, last)
    one = chart_of(runs[:1], interval=True)
    assert not any("areaStyle" in each for each in one["series"])


def test_smoothing_has_no_bias_towards_zero() -> None:
    assert smoothed(np.array([4.0, 4.0, 4.0]), 0.9).tolist() == pytest.approx([4, 4, 4])
    assert smoothed(np.array([0.0, 1.0]), 0.5).tolist() == pytest.approx([0, 2 / 3])


def test_a_logarithmic_axis_leaves_gaps(tmp_path: Path) -> None:
    chart = chart_of([a_run(tmp_path / "a")], log=True)  # whose first score is 0
    assert None in [point[1] for point in chart["series"][-1]["data"]]
    assert chart["yAxis"]["type"] == "log"


def test_csv_holds_the_curves_and_no_formula(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / "a", seed=1), a_run(tmp_path / "b", task="=1+1")]
    found = [(SCORE, panel) for panel in panels(runs, SCORE, CurveOptions())]
    rows = list(csv.DictReader(to_csv(found, CurveOptions()).splitlines()))
    assert {row["task"] for row in rows} == {"gym:CartPole-v1", "'=1+1"}
    assert max(float(row["steps"]) for row in rows) == 300


def test_the_address_holds_what_is_chosen() -> None:
    options = CurveOptions(axis="hours", smoothing=0.5, log=True, join_seeds=False)
    query = write_query(["a/b", "x'y"], ["train/loss"], options)
    found = parse_qs(query)
    assert (found["run"], found["metric"]) == (["a/b", "x'y"], ["train/loss"])
    assert "'" not in query  # it is part of a script
    assert read_options({key: each[0] for key, each in found.items()}) == options
    assert write_query([], [], CurveOptions()) == ""
    odd = {"axis": "evil", "smoothing": "1e9", "log": "yes", "published": "0"}
    assert read_options(odd) == CurveOptions(published=False)


def keys_of(value: Any) -> Iterator[str]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from [key] if isinstance(key, str) else []
        yield from keys_of(inner) if isinstance(inner, (dict, list)) else []


def test_a_run_chooses_no_code_that_a_chart_runs(tmp_path: Path) -> None:
    """The library runs what stands under a key that starts with a colon."""
    run = a_run(tmp_path / ":formatter", task=":alert(1)")
    found = {key for key in keys_of(chart_of([run])) if key.startswith(":")}
    assert found == {":formatter", ":width"}
    graph = fleet_graph(process_rows(status(worker(":symbol")), ()), {})
    found = {key for key in keys_of(graph) if key.startswith(":")}
    assert found == {":left", ":right", ":symbolSize"}


def worker(name: str, **more: Any) -> WorkerStatus:
    role = name.partition("-")[0]
    plain = WorkerStatus(name, role, "running", 7, "", 0.0, 0, "", ProcessUsage(0.5, 10**8), 60.0)
    return replace(plain, **more)


def status(*workers: WorkerStatus, **more: Any) -> RunStatus:
    return RunStatus(
        pid=1,
        created=0.0,
        host="here",
        started=0.0,
        state="running",
        responding=True,
        step=5,
        scores=Scores(),
        metrics={},
        steps_per_second=1.0,
        seconds=60.0,
        waiting="",
        workers=workers,
        supervisor=None,
        **more,
    )


def test_the_graph_has_a_node_per_role_in_the_colour_of_its_worst_state() -> None:
    workers = [worker(f"env-{n}") for n in range(30)]
    workers += [worker("agent"), worker("replay", state="restarting"), worker("logger")]
    machine = MachineStatus("far", "away", 2, 0, 5.0, 9.0, 5, 1.0, 0, "lost")
    rows = process_rows(status(*workers, machines=(machine,)), {"env-3"})
    assert [row["name"] for row in rows if row["state"] == "restarting"] == ["env-3", "replay"]
    (series,) = fleet_graph(rows, {"env": 1e6, "replay": 10.0})["series"]
    nodes = {node["name"]: node["itemStyle"]["color"] for node in series["data"]}
    assert list(nodes) == ["env", "agent", "replay", "logger", "machine"]
    assert nodes["env"] == nodes["replay"] == nodes["machine"] != nodes["agent"] == nodes["logger"]
    assert series["data"][0]["label"]["formatter"] == "env x 30\n15.0 cores"
    links = {link["source"]: link for link in series["links"]}
    assert links["env"]["label"]["formatter"] == "1.0 MB/s"
    assert links["env"]["lineStyle"]["width"] > links["replay"]["lineStyle"]["width"]
    assert len({tuple(node["value"]) for node in series["data"]}) == 5


def test_usage_is_that_of_all_processes() -> None:
    used = status(worker("agent"), worker("env-0"))
    assert usage_text(used) == "1.0 cores · 200MB of memory on this machine"
    assert usage_text(status()) == ""


def test_failures_are_listed_newest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [Event(5.0, "env-0", "failed", "why"), Event(6.0, "env-0", "started")]
    events.append(Event(65.0, "agent", "failed"))
    monkeypatch.setattr("dreamfleet.view.fleet_page.time.time", lambda: 70.0)
    rows = failure_rows(events)
    assert [(row["worker"], row["time"], row["error"]) for row in rows] == [
        ("agent", "0:05 ago", "ended"),
        ("env-0", "1:05 ago", "why"),
    ]


def test_metrics_are_explained() -> None:
    entry = explain("train/loss/reconstruction/image")
    assert entry is not None
    assert entry.sentence.startswith("squared error")
    exact = explain("actor/policy/updates_behind")
    assert exact is not None
    assert exact.section == "The actor"
    assert explain("my/own") is None
