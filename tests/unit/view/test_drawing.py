"""Curves, charts and pictures: what is drawn of runs, and that nothing of theirs is markup."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from view_parts import made_up_run

from dreamfleet.config import RunConfig
from dreamfleet.fleet.status import MachineStatus, ProcessUsage, RunStatus, WorkerStatus
from dreamfleet.metrics.glossary import explain
from dreamfleet.view.charts import (
    CurveOptions,
    panel_chart,
    panels,
    smoothed,
    to_csv,
    undrawn,
)
from dreamfleet.view.fleet_page import fleet_picture
from dreamfleet.view.reading import training_hours
from dreamfleet.view.runs import Run

EVIL = "<script>alert(1)</script>\"'`${x}"


def a_run(path: Path, **settings: Any) -> Run:
    run = Run(path.name, made_up_run(path, **settings))
    run.refresh()
    run.read(metrics=True)
    return run


def test_seeds_of_a_setting_are_one_curve_and_others_their_own(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / f"s{n}", seed=n, episodes=30 + n) for n in range(3)]
    runs.append(a_run(tmp_path / "other", batch_size=9))
    (panel,) = panels(runs, CurveOptions())
    assert [group.curve.runs for group in panel.groups] == [3, 1]
    (apart,) = panels(runs, CurveOptions(together=False))
    assert [group.curve.runs for group in apart.groups] == [1, 1, 1, 1]
    options = panel_chart(panel, CurveOptions(), published=True, log=False)
    assert len(options["legend"]["data"]) == 2
    assert "3 seeds" in options["legend"]["data"][0]
    shown = {series["name"] for series in options["series"]}
    assert set(options["legend"]["data"]) <= shown


def test_axes(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", task="dmc:walker_walk", env_options={"repeat": 2})
    ends = {
        axis: panels([run], CurveOptions(axis=axis))[0].end for axis in ("steps", "frames", "hours")
    }
    assert ends["steps"] == 300
    assert ends["frames"] == 600
    assert ends["hours"] == pytest.approx(29 * 5 / 3600)


def test_published_curves_where_there_are_any(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", task="dmc:walker_walk", env_options={"repeat": 2})
    first: dict[str, float] = {}
    for axis, count in (("frames", 1), ("steps", 1), ("hours", 0)):
        wish = CurveOptions(axis=axis)  # type: ignore[arg-type]
        options = panel_chart(panels([run], wish)[0], wish, published=True, log=False)
        assert sum("published" in name for name in options["legend"]["data"]) == count
        for series in options["series"]:
            if "published" in series["name"]:
                first[axis] = series["data"][0][0]
    assert first["frames"] == 2 * first["steps"] > 0  # two frames a step


WEEK = 7 * 86400.0


@pytest.mark.parametrize(
    ("gaps", "steps", "seconds"),
    [
        ([60, 60, WEEK, 60], [10, 10, 10, 10], 180),
        ([7000, 0, 0, 80, 0, 0, 80, 0, 0], [3600, 0, 0, 2000, 0, 0, 2000, 0, 0], 160),
        ([1800, 1800, WEEK, 1800], [100, 100, 100, 100], 5400),  # long episodes
        ([0, 0, 0, 1800] * 5, [1, 1, 1, 4000] * 5, 9000),  # which end together
        ([1000, 0], [0, 5], 0),  # nothing was done meanwhile
    ],
)
def test_a_pause_is_no_training_time(gaps: list[float], steps: list[float], seconds: float) -> None:
    time, step = (np.cumsum([0.0, *each]) for each in (gaps, steps))
    assert training_hours(time, step)[-1] == pytest.approx(seconds / 3600)


def test_hours_of_few_episodes() -> None:
    for count in (0, 1):
        assert training_hours(np.ones(count), np.ones(count)).tolist() == [0.0] * count


def test_a_run_of_minutes_has_a_curve_over_hours(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", episodes=48)  # one every five seconds
    (panel,) = panels([run], CurveOptions(axis="hours"))
    assert len(panel.groups[0].curve.at) > 20


def test_table_and_curve_count_the_same_training_time(tmp_path: Path) -> None:
    path = made_up_run(tmp_path / "a")
    with (path / "scores.jsonl").open("a") as file:  # it was resumed a week later
        for number in (31, 32):
            row = {"step": 10 * number, "episode/score": 1.0, "time": WEEK + 5.0 * number}
            file.write(json.dumps(row) + "\n")
    run = Run("a", path)
    run.refresh()
    assert run.row.hours == pytest.approx(30 * 5 / 3600)
    assert panels([run], CurveOptions(axis="hours"))[0].end == pytest.approx(run.row.hours)


def test_a_run_whose_episodes_do_not_all_have_a_time_is_not_drawn_over_hours(
    tmp_path: Path,
) -> None:
    """Its first hours are unknown: the others would be drawn from a false zero."""
    run = a_run(tmp_path / "a")
    file = made_up_run(tmp_path / "older", seed=1) / "scores.jsonl"
    file.write_text('{"step": 5, "episode/score": 1.0}\n' + file.read_text())
    older = Run("older", file.parent)
    older.refresh()
    wish = CurveOptions(axis="hours")
    (panel,) = panels([run, older], wish)
    assert [each.config.seed for group in panel.groups for each in group.runs] == [0]
    assert undrawn([run, older], wish).endswith("not every episode says when it ended: older.")
    assert older.row.hours is None
    assert undrawn([run, older], CurveOptions()) == ""


def test_runs_of_one_seed_are_not_called_seeds(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / f"s{n}", seed=0) for n in range(3)]
    (panel,) = panels(runs, CurveOptions())
    options = panel_chart(panel, CurveOptions(), published=False, log=False)
    assert options["legend"]["data"] == ["dreamer · 3 runs of 1 seed"]
    (panel,) = panels([*runs, a_run(tmp_path / "b", seed=1)], CurveOptions())
    assert panel.groups[0].size == "4 runs of 2 seeds"


def test_a_mean_is_marked_where_it_is_not_that_of_all_runs(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / f"s{n}", seed=n, episodes=20 + 10 * (n > 0)) for n in range(3)]
    (panel,) = panels(runs, CurveOptions(bins=30))
    options = panel_chart(panel, CurveOptions(), published=False, log=False)
    name = "dreamer · 3 seeds"
    whole, some = (each for each in options["series"] if each["name"] == name)
    assert some["lineStyle"]["type"] == "dotted"
    assert "type" not in whole["lineStyle"]
    assert [x for x, y in whole["data"] if y is not None][-1] == 200
    dotted = [(x, told) for x, y, told in some["data"] if y is not None]
    assert (dotted[0], dotted[1]) == ((200, "3 of 3 runs"), (210, "2 of 3 runs"))
    last = list(csv.DictReader(to_csv([panel], CurveOptions()).splitlines()))[-1]
    assert (last["seeds"], last["runs"]) == ("3", "2")


def test_a_place_shows_what_is_published_and_the_run_s_own_value(tmp_path: Path) -> None:
    """A chart tells the values that have a point at one place."""
    run = a_run(tmp_path / "a", task="dmc:walker_walk", episodes=5000)
    (panel,) = panels([run], CurveOptions(axis="frames"))
    options = panel_chart(panel, CurveOptions(axis="frames"), published=True, log=False)
    published, own = (
        {x for x, y in each["data"]}
        for each in options["series"]
        if not each["name"].startswith(".")
    )
    assert {x for x in own if x >= 10_000} <= published
    assert max(published) > max(own)


def test_smoothing_starts_without_a_pull_to_zero() -> None:
    assert smoothed(np.array([4.0, 4.0, 4.0]), 0.9).tolist() == pytest.approx([4, 4, 4])
    assert smoothed(np.array([0.0, 1.0]), 0.5).tolist() == pytest.approx([0, 2 / 3])


def test_a_logarithmic_axis_leaves_gaps(tmp_path: Path) -> None:
    (panel,) = panels([a_run(tmp_path / "a")], CurveOptions())  # whose first score is 0
    options = panel_chart(panel, CurveOptions(), published=False, log=True)
    values = [point[1] for point in options["series"][-1]["data"]]
    assert None in values
    assert options["yAxis"]["type"] == "log"


def test_csv_holds_the_curves_and_no_formula(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / "a", seed=1), a_run(tmp_path / "b", task="=1+1")]
    rows = list(csv.DictReader(to_csv(panels(runs, CurveOptions()), CurveOptions()).splitlines()))
    assert {row["task"] for row in rows} == {"gym:CartPole-v1", "'=1+1"}
    assert max(float(row["steps"]) for row in rows) == 300


def keys_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from keys_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner)


def test_no_run_chooses_code_that_a_chart_runs(tmp_path: Path) -> None:
    """The library runs what stands under a key that starts with a colon."""
    run = a_run(tmp_path / ":formatter", task=":alert(1)")
    options = panel_chart(
        panels([run], CurveOptions())[0], CurveOptions(), published=True, log=False
    )
    assert {key for key in keys_of(options) if key.startswith(":")} == {":formatter", ":width"}


def worker(name: str, **more: Any) -> WorkerStatus:
    role = name.partition("-")[0]
    plain = WorkerStatus(name, role, "running", 7, "", 60.0, 0, "", ProcessUsage(0.5, 10**8))
    return replace(plain, **more)


def status(*workers: WorkerStatus, **more: Any) -> RunStatus:
    return RunStatus(
        RunConfig(), "running", True, 5, (), {}, 1.0, 60.0, None, "", workers, None, **more
    )


def test_the_picture_has_a_box_a_role_and_colours_for_health() -> None:
    workers = [worker(f"env-{n}") for n in range(30)]
    workers += [worker("agent"), worker("replay", state="restarting"), worker("logger")]
    picture = fleet_picture(status(*workers), {"env": 1e6, "replay": 10.0}, {"env-3"})
    assert picture.count('class="cell running"') == 29
    assert picture.count('class="cell restarting"') == 1
    assert 'class="node restarting" data-role="replay"' in picture
    assert 'class="node restarting" data-role="env"' in picture  # one of them has failed just now
    assert 'class="node running" data-role="agent"' in picture
    assert "1MB/s" in picture
    healed = fleet_picture(status(*workers), {}, ())
    assert 'class="node running" data-role="env"' in healed


def test_text_of_runs_is_no_markup_in_the_picture() -> None:
    machine = MachineStatus(EVIL, "joined", 2, 0, 5.0, 0.0, 5, 1.0, 0, EVIL)
    workers = [worker("agent", error=EVIL, host=EVIL), worker(f"env-{EVIL}")]
    picture = fleet_picture(status(*workers, machines=(machine,)), {}, ())
    assert "<script" not in picture
    assert "&lt;script&gt;" in picture


def test_metrics_are_explained() -> None:
    entry = explain("train/loss/reconstruction/image")
    assert entry is not None
    assert entry.sentence.startswith("reconstruction error")
    exact = explain("actor/policy/updates_behind")
    assert exact is not None
    assert exact.section == "The actor"
    assert explain("my/own") is None
