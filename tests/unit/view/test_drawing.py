"""Curves, charts and pictures: what is drawn of runs, and that nothing of theirs is markup."""

from __future__ import annotations

import csv
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
    training_hours,
)
from dreamfleet.view.fleet_page import fleet_picture
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


def test_a_long_pause_is_no_training_time() -> None:
    time = np.array([0.0, 60.0, 120.0, 120.0 + 7 * 86400, 180.0 + 7 * 86400])
    assert training_hours(time)[-1] == pytest.approx(3 / 60)
    assert training_hours(np.array([5.0])).tolist() == [0.0]
    assert training_hours(np.array([])).tolist() == []


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
