"""The page of a sweep: its trials, and how their settings go with their scores."""

from __future__ import annotations

import json
from pathlib import Path

from view_parts import made_up_sweep

from dreamfleet.view.runs import Runs
from dreamfleet.view.sweep_page import parallel_chart, sweeps, trial_rows

PATHS = ["batch_size", "agent"]


def test_a_trial_is_a_setting_with_all_its_seeds(tmp_path: Path) -> None:
    made_up_sweep(tmp_path / "runs" / "deep" / "sweep")
    found = sweeps(Runs(tmp_path / "runs"))
    rows = trial_rows(PATHS, found["runs/deep/sweep"])
    assert list(found) == ["runs/deep/sweep"]
    assert [(row["set0"], row["set1"], row["seeds"]) for row in rows] == [
        (8, "dreamer", 2),
        (16, "dreamer", 2),
    ]
    assert [(row["score"], row["state"]) for row in rows] == [
        (21.0, "complete"),  # what the sweep recorded
        (19.5, "ended, pruned"),  # one run is not over: its last episodes
    ]
    assert rows[0]["interval"] == "8.294 to 33.71"


def test_the_plot_has_an_axis_for_every_setting_and_the_score(tmp_path: Path) -> None:
    made_up_sweep(tmp_path / "sweep")
    rows = trial_rows(PATHS, sweeps(Runs(tmp_path / "sweep"))["sweep"])
    rows.append({**rows[0], "score": None})  # it has not played an episode
    chart = parallel_chart({"batch_size": "Range(how='log', low=8)", "agent": "('dreamer',)"}, rows)
    axes = [(axis["name"], axis["type"]) for axis in chart["parallelAxis"]]
    assert axes == [("batch_size", "log"), ("agent", "category"), ("score", "value")]
    assert chart["parallelAxis"][1]["data"] == ["dreamer"]
    assert chart["series"][0]["data"] == [[8, "dreamer", 21.0], [16, "dreamer", 19.5]]
    assert (chart["visualMap"]["min"], chart["visualMap"]["max"]) == (19.5, 21.0)
    empty = parallel_chart({"batch_size": ""}, [])
    assert json.loads(json.dumps(empty))["series"][0]["data"] == []


def test_damaged_and_linked_files_make_no_sweep(tmp_path: Path) -> None:
    made_up_sweep(tmp_path / "runs" / "sweep")
    plan = tmp_path / "runs" / "sweep" / "sweep.json"
    runs = Runs(tmp_path / "runs")
    for content in ("{", "[]", '{"values": 3}', "[" * 100_000):
        plan.write_text(content)
        assert sweeps(runs) == {}
    (tmp_path / "outside").write_text('{"values": {"seed": "1"}}')
    plan.unlink()
    plan.symlink_to(tmp_path / "outside")
    assert sweeps(runs) == {}
