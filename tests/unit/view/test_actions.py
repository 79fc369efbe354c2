"""What a page can do to a run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from view_parts import made_up_run

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.fleet.record import RunStatus, write_record
from dreamfleet.fleet.tied import tied
from dreamfleet.roles.saver import SAVE_REQUEST, Saver
from dreamfleet.view import actions
from dreamfleet.view.frame import with_hint
from dreamfleet.view.runs import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run("a", made_up_run(tmp_path / "a"))
    run.refresh()
    return run


def test_a_run_is_stopped_by_a_signal(run: Run) -> None:
    assert "not running" in actions.stop_run(run)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        created = psutil.Process(process.pid).create_time()
        record = replace(RunStatus.of_this_process(), pid=process.pid, created=created)
        write_record(run.path, replace(record, created=created - 100))  # the pid was reused
        assert "not running" in actions.stop_run(run)
        write_record(run.path, replace(record, host="elsewhere"))
        assert "elsewhere: stop it there" in actions.stop_run(run)
        assert process.poll() is None
        write_record(run.path, record)
        assert actions.stop_run(run) == "The run saves and stops."
        assert process.wait(60) == -15


def test_a_save_is_requested_by_a_file_that_the_learner_takes(run: Run) -> None:
    assert "not running" in actions.request_save(run)
    args = SimpleNamespace(logdir=run.path)
    saver: Any = SimpleNamespace(_may_look=lambda: True, _args=args, updates=3, _saved=3)
    assert not Saver.is_due(saver)
    write_record(run.path, RunStatus.of_this_process())
    run.refresh()
    actions.request_save(run)
    assert (run.path / SAVE_REQUEST).exists()
    assert Saver.is_due(saver)
    assert not Saver.is_due(saver)


def job_of(run: Run, *words: str) -> actions.Job:
    """A job that evaluates, when it is over."""
    log = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - closed with the job
    job = actions.Job(run, "test", tied(words), log, stdin=subprocess.PIPE)
    job.process.wait(120)
    return job


def end_of(run: Run) -> tuple[int, str]:
    """How the last job has ended, and what it tells."""
    job = actions.jobs_of(run)[0]
    return job.process.wait(120), job.text


@pytest.fixture(autouse=True)
def no_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "_jobs", [])


def test_a_run_is_resumed_and_code_that_it_names_needs_trust(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo = "import sys; print(sys.argv[1:])"
    monkeypatch.setattr(actions, "_COMMAND", (sys.executable, "-c", echo))
    log = run.path / "logs" / actions.RESUME_LOG
    for trust, words in ((False, ["resume", str(run.path)]), (True, ["--trust"])):
        run.trust = trust
        assert actions.resume_run(run) == "The run is resumed."
        assert end_of(run)[0] == 0
        assert str(words)[1:-1] in log.read_text()
        assert ("--trust" in log.read_text()) == trust
    assert actions.resume_command(run) == f"dreamfleet resume {run.path}"
    outside = run.path.parent / "outside"
    outside.write_text("kept")
    log.unlink()
    log.symlink_to(outside)
    assert "cannot be written" in actions.resume_run(run)
    assert outside.read_text() == "kept"
    log.unlink()
    wait = "import sys; print('starting', flush=True); input(); sys.exit('no such task')"
    monkeypatch.setattr(actions, "_COMMAND", ("sh", "-c", f'echo | {sys.executable} -c "{wait}"'))
    actions.resume_run(run)
    assert end_of(run) == (1, "resume · failed: no such task")
    write_record(run.path, RunStatus.of_this_process())
    run.refresh()
    assert actions.resume_run(run) == "The run is running."


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands of jobs, which are not started."""
    found: list[list[str]] = []

    def job(run: Run, name: str, words: list[str], log: Any, **options: Any) -> Any:
        log.close()
        found.append([name.split()[0], *words])
        return SimpleNamespace(run=run, name=name, runs=True, process=psutil.Process())

    monkeypatch.setattr(actions, "_NICE", psutil.Process().nice())
    monkeypatch.setattr(actions, "Job", job)
    return found


def test_two_evaluations_at_most_and_none_without_a_checkpoint(
    run: Run, commands: list[list[str]]
) -> None:
    assert "no checkpoint yet" in actions.evaluate(run)
    Checkpoint(run.path / "ckpt" / "agent").save({"run": {"updates": 1}}, step=5)
    actions.evaluate(run, video=True)
    run.trust = True
    actions.evaluate(run)
    assert "wait for one" in actions.evaluate(run)
    assert [each[0] for each in commands] == ["video", "evaluation"]
    assert ["--trust" in each for each in commands] == [False, True]
    assert commands[0][-1].endswith("media/on-demand/000000000005.mp4")
    assert len(actions.jobs_of(run)) == 2


def test_the_result_of_an_evaluation_is_kept_but_not_through_a_link(
    run: Run, commands: list[list[str]]
) -> None:
    Checkpoint(run.path / "ckpt" / "agent").save({"run": {"updates": 1}}, step=5)
    actions.evaluate(run)
    (run.path / "evaluations.jsonl").symlink_to(run.path.parent / "elsewhere")
    actions.evaluate(run)
    assert ["--no-keep" in each for each in commands] == [False, True]


def test_a_job_shows_its_result_or_its_error(run: Run, tmp_path: Path) -> None:
    said = "x.pt was trained with mine:Agent, which is not part of Dreamfleet: pass agent=..."
    assert with_hint("The run has no checkpoint yet.") == "The run has no checkpoint yet."
    (tmp_path / "fake_eval.py").write_text(
        'import sys\nprint(\'{"mean": 2.5, "episodes": 10}\')\n'
        f"if 'bad' in sys.argv: sys.exit({said!r})\n"  # such as a video that cannot be written
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        patch.delenv("PYTHONUNBUFFERED", raising=False)
        for word, end in (
            ("good", "test · mean return 2.5 of 10 episodes"),
            ("bad", "start 'dreamfleet view --trust'."),
        ):
            assert job_of(run, "fake_eval", word).text.endswith(end)


PAGE = """
import sys
from pathlib import Path
from dreamfleet.view import actions
from dreamfleet.view.runs import Run

actions.tied = lambda words, tied=actions.tied: tied(["endless_job"])
actions.evaluate(Run("a", Path(sys.argv[1])), Path("x-step-7"))
job = actions._jobs[0]
print(job.process.pid, flush=True)
sys.stdin.read()
"""


def test_a_job_ends_when_the_server_of_pages_is_killed(tmp_path: Path) -> None:
    (tmp_path / "endless_job.py").write_text("import time\nwhile True:\n    time.sleep(1)\n")
    with subprocess.Popen(
        [sys.executable, "-c", PAGE, str(made_up_run(tmp_path / "a"))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:
        assert server.stdout is not None
        job = psutil.Process(int(server.stdout.readline()))
        server.kill()
        assert psutil.wait_procs([job], timeout=120)[1] == []


def test_files_of_the_current_directory_are_not_imported(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a run of others, and `python -m` would import them first."""
    for name in ("dreamfleet", "psutil", "runpy"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'w'); raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert "checkpoint" in job_of(run, "dreamfleet.cli", "eval", str(run.path)).text
    (run.path / "config.json").write_text("{")
    actions.resume_run(run)
    assert end_of(run)[0] == 2
    assert not (tmp_path / "imported").exists()
