"""Files that grow are read once, whatever is in them, and kept small."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dreamfleet.view import reading
from dreamfleet.view.reading import Column, MetricsFile, thinned


def scores_of(folder: Path) -> MetricsFile:
    return MetricsFile(folder, "scores.jsonl", "episode/score")


def row(step: int) -> bytes:
    return b'{"step": %d, "episode/score": 1.0}\n' % step


def test_each_line_comes_once_and_half_a_line_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    scores = scores_of(tmp_path)
    for added, steps in (
        (b"", []),
        (row(1) + row(2)[:9], [1]),
        (b"", [1]),
        (row(2)[9:] + row(3), [1, 2, 3]),
    ):
        with path.open("ab") as file:
            file.write(added)
        scores.read()
        found = scores.columns["episode/score"].points[:, 0] if scores.rows else []
        assert list(found) == steps


def test_a_file_that_was_replaced_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    path.write_text('{"step": 1, "episode/score": 1.0}\n' * 3)
    scores = scores_of(tmp_path)
    scores.read()
    assert scores.rows == 3
    path.write_text('{"step": 7, "episode/score": 2.0}\n')
    scores.read()
    assert scores.columns["episode/score"].points[:, 0].tolist() == [7.0]


def test_one_call_reads_a_bounded_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_READ_BYTES", 100)
    (tmp_path / "scores.jsonl").write_bytes(row(1) + b"b" * 350 + b"\n" + row(2))
    scores = scores_of(tmp_path)
    scores.read()
    assert scores.behind
    while scores.behind:
        scores.read()
    # A line that is longer than any of a run is left out, and nothing after it.
    assert scores.columns["episode/score"].points[:, 0].tolist() == [1, 2]


def test_damaged_rows_are_left_out(tmp_path: Path) -> None:
    lines = [
        '{"step": 1, "episode/score": 1.5, "time": 9}',
        "{half",
        '{"step": "x", "episode/score": 2}',
        '{"step": 3, "episode/score": null}',
        "[1, 2]",
        "\ufffd\0",
        '{"step": 4, "episode/score": 4, "more": [1]}',
    ]
    (tmp_path / "scores.jsonl").write_text("\n".join(lines) + "\n")
    scores = scores_of(tmp_path)
    scores.read()
    assert scores.columns["episode/score"].points[:, :2].tolist() == [[1.0, 1.5], [4.0, 4.0]]
    assert scores.hours is None  # the second has no time


def test_metrics_are_columns_with_their_newest_value(tmp_path: Path) -> None:
    rows = [{"step": n, "loss": n / 2, "words": f"state {n}", "flag": True} for n in range(5)]
    rows.append({"step": 5, "loss": None, "odd": [1, 2]})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = MetricsFile(tmp_path, "metrics.jsonl")
    metrics.read()
    assert metrics.columns["loss"].points[:, :2].tolist() == [[n, n / 2] for n in range(5)]
    assert metrics.newest["loss"] is None  # it was not finite
    assert metrics.texts == {"words": "state 4"}
    assert "step" not in metrics.columns
    assert "odd" not in metrics.columns


def test_a_column_stays_small_and_keeps_extremes() -> None:
    column = Column()
    count = 100_000
    for start in range(0, count, 1000):
        steps = range(start, start + 1000)
        column.extend([(float(n), 1000.0 if n == 54_321 else float(n % 2)) for n in steps])
    points = column.points
    assert len(points) <= reading.MAX_POINTS
    assert points[:, 3].max() == 1000.0
    assert points[:, 2].min() == 0.0
    assert points[-1, 0] == count - 1
    assert np.isclose(np.median(points[:, 1]), 0.5)
    assert (np.diff(points[:, 0]) > 0).all()


def test_a_run_cannot_fill_memory_with_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_MAX_METRICS", 10)
    rows = [{"step": n, f"key-{n}": 1.0, "x" * 300: 1.0} for n in range(50)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = MetricsFile(tmp_path, "metrics.jsonl")
    metrics.read()
    assert len(metrics.columns) == 10
    assert len(metrics.newest) == 10
    assert max(map(len, metrics.columns)) < 20


def test_thinned_points_keep_extremes() -> None:
    table = np.arange(24, dtype=np.float64).reshape(6, 4)  # step, mean, minimum, maximum
    assert thinned(table, 3).tolist() == [[4, 3, 2, 7], [12, 11, 10, 15], [20, 19, 18, 23]]
    assert thinned(table, 10) is table
