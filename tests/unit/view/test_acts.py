"""What a page can do to a run."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from view_parts import made_up_run

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.fleet.record import FleetRecord, write_record
from dreamfleet.roles.learner import SAVE_REQUEST, Saver
from dreamfleet.view import acts
from dreamfleet.view.frame import with_hint
from dreamfleet.view.runs import Run, Runs


def test_a_run_is_ended_as_by_a_signal(tmp_path: Path) -> None:
    run = Run("a", made_up_run(tmp_path / "a"))
    assert "not under way" in acts.end_run(run)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        me = FleetRecord.of_this_process()
        created = psutil.Process(process.pid).create_time()
        record = replace(me, pid=process.pid, created=created)
        write_record(run.path, replace(record, created=created - 100))  # another of this number
        assert "not under way" in acts.end_run(run)
        assert process.poll() is None
        write_record(run.path, replace(record, host="elsewhere"))
        assert "elsewhere: end it there" in acts.end_run(run)
        assert process.poll() is None
        write_record(run.path, record)
        assert acts.end_run(run) == "The run saves and ends."
        assert process.wait(60) == -15


def test_a_checkpoint_is_asked_for_with_a_file_that_the_learner_takes(tmp_path: Path) -> None:
    run = Run("a", made_up_run(tmp_path / "a"))
    run.refresh()
    assert "not under way" in acts.ask_to_save(run)
    learner: Any = SimpleNamespace(_may_look=lambda: True, _args=SimpleNamespace(logdir=run.path))
    assert not Saver.asked(learner)
    write_record(run.path, FleetRecord.of_this_process())
    run.refresh()
    acts.ask_to_save(run)
    assert (run.path / SAVE_REQUEST).exists()
    assert Saver.asked(learner)
    assert not Saver.asked(learner)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[acts.Job]:
    found: list[acts.Job] = []
    monkeypatch.setattr(acts, "_jobs", found)
    return found


def wait_for(job: acts.Job) -> None:
    for thread in threading.enumerate():
        if thread.name == job.name:
            thread.join(120)


def test_what_is_started_says_how_it_is_doing(tmp_path: Path, jobs: list[acts.Job]) -> None:
    run = Run("a", made_up_run(tmp_path / "a"))
    for name, words, end in (
        ("good", ["calendar", "2026", "1"], "step 7 · done"),
        ("bad", ["calendar", "--nonsense"], "unrecognized arguments: --nonsense"),
    ):
        job = acts.Job(run, name, words, 7, 10)
        wait_for(job)
        assert not job.running
        assert job.words().endswith(end)
        assert job.share == 1.0


def test_no_evaluation_without_a_checkpoint_and_no_more_than_two(
    tmp_path: Path, jobs: list[acts.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("a", made_up_run(tmp_path / "a"))
    for start in (acts.start_evaluation, acts.start_prediction):
        assert start(run) == "The run has no checkpoint yet."
    Checkpoint(run.path / "ckpt" / "agent").save({"run": {"updates": 1}}, step=5)
    commands: list[list[str]] = []

    class Fake:
        running = True

        def __init__(self, run: Run, name: str, module: list[str], step: int, count: int) -> None:
            self.run = run
            commands.append([name, *module])

    monkeypatch.setattr(acts, "Job", Fake)
    starts: list[Callable[[Run], str]] = [
        lambda run: acts.start_evaluation(run, video=True, episodes=1),
        acts.start_prediction,
    ]
    assert [start(run) for start in starts] == ["", ""]
    assert "wait for one" in acts.start_evaluation(run)
    assert [each[0] for each in commands] == ["video", "prediction"]
    assert not any("trust" in word for each in commands for word in each)
    assert commands[0][-1].endswith("media/on-demand/000000000005.mp4")
    assert len(acts.jobs_of(run)) == 2


def test_code_that_a_run_names_is_imported_where_the_server_was_told_so(
    tmp_path: Path, jobs: list[acts.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up_run(tmp_path / "runs" / "a")
    Checkpoint(tmp_path / "runs" / "a" / "ckpt" / "agent").save({"run": {"updates": 1}}, step=5)
    commands: list[list[str]] = []
    monkeypatch.setattr(acts, "_start_job", lambda run, name, words, *_: commands.append(words))
    with Runs(tmp_path / "runs", trust=True) as runs:
        run = runs.find("a")
        assert run is not None
        acts.start_evaluation(run)
        acts.start_prediction(run)
    assert "--trust" in commands[0]
    assert commands[1][-1] == "trust"


def test_what_an_evaluation_finds_is_kept_and_a_video_is_no_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("a", made_up_run(tmp_path / "a"))
    Checkpoint(run.path / "ckpt" / "agent").save({"run": {"updates": 1}}, step=5)
    commands: list[list[str]] = []
    monkeypatch.setattr(acts, "_start_job", lambda run, name, words, *_: commands.append(words))
    acts.start_evaluation(run)
    acts.start_evaluation(run, video=True)
    before, file = run.drawn, run.path / "evaluations.jsonl"
    file.write_text('{"step": 5, "mean": 1.0}\n')
    assert run.drawn != before  # so pages draw it
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")  # which is not written to
    acts.start_evaluation(run)
    assert ["--keep" in each for each in commands] == [True, False, False]


def test_who_is_refused_is_told_where_to_say_it(tmp_path: Path, jobs: list[acts.Job]) -> None:
    said = "x.pt was trained with mine:Agent, which is not part of Dreamfleet: pass agent=..."
    assert "'dreamfleet view --trust'" in with_hint(said)
    assert with_hint("The run has no checkpoint yet.") == "The run has no checkpoint yet."
    program = f"import sys; sys.exit({said!r})"
    job = acts.Job(Run("a", made_up_run(tmp_path / "a")), "code", ["timeit", program], 7, 0)
    wait_for(job)
    assert job.words().endswith("start 'dreamfleet view --trust'.")


PAGE = """
import sys
from pathlib import Path
from dreamfleet.view import acts
from dreamfleet.view.runs import Run

job = acts.Job(Run("a", Path(sys.argv[1])), "long", ["endless_job"], 7, 0)
print(job._process.pid, flush=True)
sys.stdin.read()
"""


def test_a_job_ends_when_the_server_of_pages_is_killed(tmp_path: Path) -> None:
    (tmp_path / "endless_job.py").write_text("import time\nwhile True:\n    time.sleep(1)\n")
    with subprocess.Popen(
        [sys.executable, "-c", PAGE, str(made_up_run(tmp_path / "a"))],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:
        assert server.stdout is not None
        job = psutil.Process(int(server.stdout.readline()))
        server.kill()
        assert psutil.wait_procs([job], timeout=120)[1] == []
