"""The runs of a folder: found, summarised, and shown as broken if they are."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from view_parts import made_up_run

from dreamfleet.config import RunConfig
from dreamfleet.fleet.record import Event, RunStatus, WorkerStatus, write_record
from dreamfleet.presets import PRESETS
from dreamfleet.view import reading
from dreamfleet.view import runs as runs_module
from dreamfleet.view.records_page import log_rows
from dreamfleet.view.runs import EVALUATION, Annotations, Row, Run, Runs, closest_preset


def rows_of(folder: Path) -> dict[str, Row]:
    return {run.name: run.row for run in Runs(folder).all()}


def test_runs_are_found_below_a_folder_and_links_are_not_followed(tmp_path: Path) -> None:
    outside = made_up_run(tmp_path / "outside")
    folder = tmp_path / "runs"
    made_up_run(folder / "a", seed=3)
    made_up_run(folder / "deep" / "er" / "b")
    made_up_run(folder / "a" / "inner")
    (folder / "link").symlink_to(outside)
    (folder / "empty").mkdir()
    assert set(rows_of(folder)) == {"a", "deep/er/b"}


def test_a_row_says_how_a_run_has_ended(tmp_path: Path) -> None:
    made_up_run(tmp_path / "a", seed=3, task="gym:Pendulum-v1", steps=500)
    row = rows_of(tmp_path)["a"]
    assert (row.task, row.seed, row.state, row.machine) == ("gym:Pendulum-v1", 3, "ended", "there")
    assert (row.step, row.steps) == (300, 500)
    assert row.score == sum(range(10, 30)) / 20
    assert row.hours == pytest.approx(29 * 5 / 3600)
    assert row.rate == pytest.approx(300 / (29 * 5))


def test_a_folder_may_be_a_run_and_a_run_may_come_later(tmp_path: Path) -> None:
    later = tmp_path / "later"
    later.mkdir()
    runs = Runs(later)
    assert not runs.single
    made_up_run(later / "x")
    (later / "config.json").write_text(RunConfig(logdir=later).to_json())
    runs._scan()
    assert runs.single
    assert [run.name for run in runs.all()] == ["later"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"task": 7}', b"\xff\xfe", b'{"steps": -1}', b"[" * 100_000]
)
def test_a_run_with_a_damaged_configuration_is_shown_as_broken(
    tmp_path: Path, content: bytes
) -> None:
    made_up_run(tmp_path / "good")
    (made_up_run(tmp_path / "bad") / "config.json").write_bytes(content)
    rows = rows_of(tmp_path)
    assert rows["bad"].state == "broken"
    assert rows["bad"].alert
    assert rows["good"].state == "ended"


def test_half_written_files_are_no_obstacle(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "a")
    for name, content in {
        "scores.jsonl": b'{"step": 10, "episode/score": 1.0}\n{"step": 2',
        "metrics.jsonl": b"\x00\x00\x00",
        "status.json": b'{"pid": ',
    }.items():
        (run / name).write_bytes(content)
    row = rows_of(tmp_path)["a"]
    assert (row.state, row.step, row.score) == ("ended", 10, 1.0)
    (run / "config.json").unlink()
    assert rows_of(tmp_path)["a"].state == "broken"


@pytest.mark.parametrize("value", ['"x"', "[1]", "{}", "1e999", "1" * 400, "NaN", "null", "-5"])
def test_rows_may_hold_anything(tmp_path: Path, value: str) -> None:
    run = made_up_run(tmp_path / "a")
    line = f'{{"step": {value}, "episode/score": {value}, "time": {value}}}\n'
    for name in (
        "scores.jsonl",
        "metrics.jsonl",
        "evaluations.jsonl",
        "annotations.json",
    ):
        (run / name).write_text(2 * line)
    found = Runs(tmp_path).find("a")
    assert found is not None
    assert found.row.state == "ended"
    found.refresh(live=True)
    found.read(metrics=True)
    assert found.status is not None
    for file in (found.scores, found.metrics):
        for column in file.columns.values():
            assert np.isfinite(column.points).all()
    evaluations = found.points(EVALUATION)
    assert evaluations is None or np.isfinite(evaluations).all()
    assert found.annotations() == Annotations()


def test_a_configuration_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    outside = made_up_run(tmp_path / "outside")
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (run / "config.json").symlink_to(outside / "config.json")
    row = rows_of(tmp_path / "runs")["a"]
    assert row.state == "broken"
    assert "link" in row.alert


def test_names_that_are_no_text_can_be_shown(tmp_path: Path) -> None:
    made_up_run(Path(os.fsdecode(bytes(tmp_path / "runs") + b"/odd-\xff")))
    (name,) = rows_of(tmp_path / "runs")
    assert name.encode().decode().startswith("odd-")


def test_a_run_whose_supervisor_is_gone_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_module, "_LOOK_SECONDS", -1.0)
    path = made_up_run(tmp_path / "a")
    record = RunStatus.of_this_process()
    write_record(path, replace(record, created=1.0))
    run = Run("a", path)
    run.refresh()
    assert run.row.state == "killed"
    write_record(path, record)
    run.refresh()
    assert run.row.state == "running"
    write_record(path, replace(record, state="failed"))
    run.refresh()
    assert run.row.state == "failed"


def test_what_is_new_is_seen(tmp_path: Path) -> None:
    path = made_up_run(tmp_path / "a", episodes=2)
    run = Run("a", path)
    run.refresh()
    before = run.row
    run.refresh()
    assert run.row is before
    with (path / "scores.jsonl").open("a") as file:
        file.write('{"step": 77, "episode/score": 5.0}\n')
    run.refresh()
    assert run.row.step == 300  # of the metrics
    run.read(metrics=True)
    assert run.scores.rows == 3
    assert "train/loss/value" in run.metrics.columns


def test_a_failure_is_shown_for_seconds_and_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = runs_module.time.time()
    failed = [Event(at, name, "failed", "why") for at, name in ((5.0, "env-0"), (now, "env-1"))]
    run = Run("a", made_up_run(tmp_path / "a"))
    assert not run.recently_failed
    run.status = SimpleNamespace(events=[*failed, Event(now, "env-2", "started")])  # type: ignore[assignment]
    monkeypatch.setattr(runs_module.time, "time", lambda: now + 1)
    assert run.recently_failed == {"env-1"}
    monkeypatch.setattr(runs_module.time, "time", lambda: now + 60)
    assert not run.recently_failed


def test_what_is_wrong_is_seen_in_the_table(tmp_path: Path) -> None:
    path = made_up_run(tmp_path / "nan")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 999, "train/loss/value": null, "train/other": null}\n')
    worker = WorkerStatus("env-3", "env", "restarting", None, "", 0.0, error="boom")
    record = replace(RunStatus.of_this_process(), workers=(worker,))
    write_record(made_up_run(tmp_path / "restarting"), record)
    ended = replace(record, workers=(replace(worker, state="ended"),), state="failed")
    write_record(made_up_run(tmp_path / "failed"), ended)
    write_record(made_up_run(tmp_path / "recovered"), replace(ended, state="ended"))
    alerts = {name: row.alert for name, row in rows_of(tmp_path).items()}
    assert alerts == {
        "nan": "train/loss/value is not finite",
        "restarting": "env-3 failed: boom",
        "failed": "env-3 failed: boom",
        "recovered": "",
    }


class _Looks:
    """A watcher that tells how long it may wait. The run stalls, and ends with the third look."""

    def __init__(self, _: Path) -> None:
        self.patience: list[float] = []

    def look(self, patience: float) -> Any:
        self.patience.append(patience)
        ended = len(self.patience) > 2
        status: Any = SimpleNamespace(running=not ended, state="ended" if ended else "running")
        vars(status).update(waiting="w", hanging="", message="Waiting: w.", step=7, score=None)
        vars(status).update(responding=True, steps_per_second=0.0)
        return status


def test_a_run_has_time_to_answer_and_a_rate_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_module, "Watcher", _Looks)
    monkeypatch.setattr(runs_module, "_LOOK_SECONDS", -1.0)
    run = Run("a", made_up_run(tmp_path / "a"))
    run.refresh()
    rate = run.row.rate
    for _ in range(2):
        run.refresh(live=True)
        assert (run.row.rate, run.row.step, run.row.alert) == (0.0, 7, "Waiting: w.")
    run.refresh(live=True)
    assert (run.row.state, run.row.rate, run.row.step) == ("ended", rate, 300)
    watcher: Any = run._watcher
    assert watcher.patience == [runs_module._FIRST_PATIENCE, *2 * [runs_module._PATIENCE]]


def test_notes_and_tags_are_kept_with_the_run(tmp_path: Path) -> None:
    run = Run("a", made_up_run(tmp_path / "a"))
    run.refresh()
    run.annotate(" seems stuck ", ["baseline", " b", "b", ""])
    assert (run.row.note, run.row.tags) == ("seems stuck", "baseline, b")
    again = Run("a", run.path)
    again.refresh()
    assert again.annotations() == Annotations("seems stuck", ("baseline", "b"))
    file = run.path / "annotations.json"
    file.unlink()
    (tmp_path / "outside").write_text('{"note": "other"}')
    file.symlink_to(tmp_path / "outside")
    assert run.annotations() == Annotations()
    run.annotate("mine", [])  # which replaces the link
    assert (tmp_path / "outside").read_text() == '{"note": "other"}'


def test_a_run_that_no_page_shows_frees_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up_run(tmp_path / "a")
    runs = Runs(tmp_path)
    run = runs.find("a")
    assert run is not None
    runs.update(run, metrics=True, live=True)
    runs.forget()  # a page is open
    assert run.status is not None
    assert run.metrics.columns
    monkeypatch.setattr(runs_module, "_SHOWN_SECONDS", -1.0)
    runs.forget()
    assert run.status is None
    assert (run.scores.rows, run.metrics.columns) == (30, {})
    runs.update(run, metrics=True)
    assert run.metrics.rows == 20


def test_a_run_that_cannot_be_read_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        made_up_run(tmp_path / name)
    refresh = Run.refresh

    def fail(run: Run) -> None:
        if run.name == "a":
            raise RuntimeError("what no file should do")
        refresh(run)

    monkeypatch.setattr(Run, "refresh", fail)
    assert {name: row.state for name, row in rows_of(tmp_path).items()} == {
        "a": "broken",
        "b": "ended",
    }


def test_open_pages_choose_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_READ_BYTES", 100)
    for name in "abc":
        made_up_run(tmp_path / name)
    runs = Runs(tmp_path)
    a, b, c = (runs._runs[name] for name in "abc")
    runs.update(a, metrics=True, live=True)
    runs.update(b)
    assert [run.metrics.rows for run in (a, b, c)] == [20, 0, 0]
    assert [run.scores.behind for run in (a, b, c)] == [False, False, True]
    assert [run.status is not None for run in (a, b, c)] == [True, False, False]


def test_several_pages_read_a_file_once(tmp_path: Path) -> None:
    made_up_run(tmp_path / "a", episodes=5000, rows=5000)
    runs = Runs(tmp_path)
    run = runs.find("a")
    assert run is not None
    update = partial(runs.update, run, metrics=True, live=True)
    pages = [threading.Thread(target=update) for _ in range(8)]
    for page in pages:
        page.start()
    for page in pages:
        page.join()
    assert (run.scores.rows, run.metrics.rows) == (5000, 5000)


def test_pages_iterate_over_runs_while_another_one_is_found(tmp_path: Path) -> None:
    for name in "ab":
        made_up_run(tmp_path / name)
    runs = Runs(tmp_path)
    page = iter(runs._runs.values())
    shown = [next(page).name]
    made_up_run(tmp_path / "c")
    runs._scan()
    shown += [run.name for run in page]
    assert sorted(shown) == ["a", "b"]
    assert len(runs.all()) == 3


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_run_is_near_its_preset(name: str) -> None:
    config = PRESETS[name]
    found = closest_preset(config)  # another one may have the same settings for the same suite
    alike = runs_module._settings(config)
    assert found == name or runs_module._settings(PRESETS[found]) == alike
    other = closest_preset(replace(config, seed=5, task="gym:Pendulum-v1"))
    assert runs_module._settings(PRESETS[other]) == alike
    assert closest_preset(replace(config, batch_size=77, train_ratio=1.5)) == f"{found} +2"


def test_a_traceback_belongs_to_its_record() -> None:
    lines = b"2026-01-01 00:00:01,000 INFO x: started\n2026-01-01 00:00:02,000 WARNING x: odd\n"
    lines += b"more\n"
    rows = log_rows("agent", lines + b"Traceback (most recent call last):\n  here\n", "later")
    assert [(row["time"][17:19], row["state"], row["text"]) for row in rows] == [
        ("01", "INFO", "x: started"),
        ("02", "ERROR", "x: odd\nmore\nTraceback (most recent call last):\n  here"),
    ]
    plain = log_rows("resume", b"Resuming\nTraceback:\n  there\n", "later")
    assert [(row["time"], row["state"]) for row in plain] == [("later", "ERROR")]
    assert [row["text"] for row in log_rows("resume", b"one\ntwo\n", "later")] == ["one", "two"]


@pytest.mark.parametrize("name", ["config.json", "status.json", "scores.jsonl"])
def test_a_pipe_in_a_run_does_not_stop_the_page(name: str, tmp_path: Path) -> None:
    run = tmp_path / "bad"
    run.mkdir()
    (run / "config.json").write_text(RunConfig().to_json())
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)

    def look() -> None:
        runs = Runs(tmp_path)
        runs.update(*runs.all(), live=True, metrics=True)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
