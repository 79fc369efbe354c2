"""What a run is doing: how it is found out, and that every display shows the same."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from fleet_parts import small_run
from rich.console import Console

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.cli import main
from dreamfleet.config import RunConfig
from dreamfleet.display import picture
from dreamfleet.files import atomic_write
from dreamfleet.fleet import status_writer
from dreamfleet.fleet.claim import BEAT_NAME
from dreamfleet.fleet.record import (
    FILE_NAME,
    MachineStatus,
    RunStatus,
    Scores,
    WorkerStatus,
    read_record,
    write_record,
)
from dreamfleet.fleet.status import StatusLines, Watcher
from dreamfleet.fleet.status_writer import StatusWriter, _Progress
from dreamfleet.roles.health import Health
from dreamfleet.roles.logger import RECORD

HOST = socket.gethostname()
METRICS: dict[str, Any] = {
    "step": 300,
    "score": 12.5,
    "eval_score": 20.0,
    "learner/updates": 40.0,
    "learner/updates_per_second": 4.0,
    "learner/replay_ratio": 1.5,
}


class Run:
    """A run's directory, with a logger that records `metrics`."""

    def __init__(self, logdir: Path, **settings: Any) -> None:
        self.logdir = logdir
        self.config = small_run(logdir, **{"log_every": 10.0, **settings})
        self.metrics, self._logs = dict(METRICS), False
        self.says("agent")
        self.record = replace(RunStatus.of_this_process(), workers=(self.worker("agent"),))
        (logdir / "config.json").write_text(self.config.to_json())
        self.write()

    def worker(self, name: str, **changes: Any) -> WorkerStatus:
        made = WorkerStatus(name, name.split("-")[0], "running", os.getpid(), HOST, 0.0)
        return replace(made, **changes)

    def write(self, **changes: Any) -> None:
        self.record = replace(self.record, **changes)
        write_record(self.logdir, self.record)

    def says(self, name: str, text: str = "", age: float = 0.0) -> None:
        """A worker says what it waits for, so many seconds ago."""
        health = Health(self.logdir / "workers" / name)
        health.waits(text)
        health._record.reported -= age

    @contextmanager
    def logger(self) -> Iterator[None]:
        self._logs = True
        self.log()
        yield
        self._logs = False

    def log(self) -> None:
        path = self.logdir / "workers" / RECORD
        atomic_write(path, msgspec.json.encode(self.metrics))

    def look(self) -> RunStatus:
        """What a reader finds."""
        return seen(Watcher(self.logdir))

    def supervised(self, *, moves: bool = False) -> RunStatus:
        """What the supervisor finds at its first look, or at the next if the run makes steps."""
        writer = StatusWriter(self.logdir, lambda: self.record)
        if moves:
            self.metrics["step"] -= 1
            self.log()
            writer.look(self.record)
            self.metrics["step"] += 1
        if self._logs:
            self.log()
        status = writer.look(self.record)
        assert status is not None
        return status

    def lines(self, *, moves: bool = False) -> list[str]:
        """What is said of it."""
        said: list[str] = []
        StatusLines(partial(self.supervised, moves=moves), said.append).show()
        return said


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def seen(watcher: Watcher) -> RunStatus:
    status = watcher.look(0.0)
    assert status is not None
    return status


def drawn(status: RunStatus) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(picture(status))
    return console.export_text()


# --- one status, every display --------------------------------------------------------------------


def test_lines_display_and_json_agree(run: Run) -> None:
    """On what the run does, and on why it stands still: a terminal shows no less than lines do."""
    run.metrics["learner/start"] = "starting from there, loaded 2 of 9 entries: nets/encoder (2)"
    run.says("actor", "no observation from environment 2 yet")
    with run.logger():
        lines, status = run.lines(), run.supervised()
    text, plain = drawn(status), json.loads(status.to_json())
    assert plain["workers"][0]["waiting"] == "no observation from environment 2 yet"
    start, numbers, waiting = lines
    assert start == f"Agent: {run.metrics['learner/start']}"
    assert run.metrics["learner/start"] in text
    assert plain["start"] == run.metrics["learner/start"]
    assert waiting == "Waiting: no observation from environment 2 yet."
    assert waiting in text
    assert plain["message"] == waiting
    assert plain["waiting"] == "no observation from environment 2 yet"
    for words, key, value in (
        ("300 of 600", "step", 300),
        ("12.5", "score", 12.5),
        ("evaluation 20", "eval_score", 20.0),
        ("4 updates/s", "updates_per_second", 4.0),
        ("0 steps/s", "steps_per_second", 0.0),
        ("replay ratio 1.5", "replay_ratio", 1.5),
    ):
        assert words in numbers
        assert words in text
        assert plain[key] == value
    assert plain["metrics"] == run.metrics


def box(name: str = "box", **changes: Any) -> MachineStatus:
    return replace(MachineStatus(name, "joined", 2, 1, 100.0, 1.0, 50, 7.5, 0, ""), **changes)


def test_machines_are_those_that_the_supervisor_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_writer, "_WRITE_SECONDS", 0.01)
    run = Run(tmp_path, bind="127.0.0.1", remote_envs=True)
    machines: list[MachineStatus] = []
    watcher = Watcher(tmp_path)
    with written_by(run, lambda: tuple(machines)):
        assert "no machine has joined: 'dreamfleet invite" in seen(watcher).message
        machines += [box(), box("gone", state="left", error="so")]
        while not (status := seen(watcher)).machines:
            time.sleep(0.01)
        assert "no machine has joined" not in status.message
    box_now, gone = json.loads(status.to_json())["machines"]
    assert box_now == {
        "name": "box", "state": "joined", "envs": 2, "eval_envs": 1, "seconds": 100.0,
        "silence": 1.0, "steps": 50, "steps_per_second": 7.5, "failures": 0, "error": "",
    }  # fmt: skip
    assert (gone["name"], gone["state"], gone["error"]) == ("gone", "left", "so")
    record = read_record(tmp_path)
    assert record is not None
    write_record(tmp_path, replace(record, state="ended"))
    assert {each.state for each in run.look().machines} == {"left"}


def test_a_joined_machine_that_makes_no_steps_is_named_with_why_also_while_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_writer, "_WRITE_SECONDS", 0.01)
    idle = box("idle", steps=0, steps_per_second=0.0, error="its port is closed.")
    machines = (idle, box("busy", error="a failure"), replace(idle, name="gone", state="left"))
    run = Run(tmp_path, bind="127.0.0.1")
    with written_by(run, lambda: machines):
        run.metrics["step"] += 1
        run.log()
        while (status := run.look()).waiting:
            time.sleep(0.01)
    assert status.message == "idle makes no steps: its port is closed."


def test_json_holds_numbers_that_are_not_finite_as_null(run: Run) -> None:
    run.metrics["train/loss"] = float("nan")
    with run.logger():
        found = run.supervised()
    plain = json.loads(replace(found, steps_per_second=float("inf")).to_json())
    assert plain["steps_per_second"] is None
    assert "train/loss" not in plain["metrics"]
    assert plain["state"] == "running"
    assert "\n" not in run.look().to_json()


def test_what_an_agent_starts_from_and_its_memory_are_said_when_they_change(run: Run) -> None:
    said: list[str] = []
    told: list[str] = []
    run.metrics["learner/memory"] = "parameters 1MB"
    with run.logger():
        lines = StatusLines(run.supervised, said.append, told.append)
        for start in ("from scratch", "from scratch", "resuming from there", "resuming from there"):
            run.metrics["learner/start"] = start
            lines.show()
    starts = [line for line in said if line.startswith("Agent: ")]
    assert starts == ["Agent: from scratch", "Agent: resuming from there"]
    assert told == ["Memory for training: parameters 1MB"], "beside a display"


def test_a_line_before_the_first_numbers_says_what_there_is(run: Run) -> None:
    run.metrics = {"step": 0, "score": None, "eval_score": None}
    with run.logger():
        status = run.supervised()
    assert status.line() == "step 0 of 600  0 steps/s"
    assert "no episode has ended yet" in drawn(status)


# --- the logger -----------------------------------------------------------------------------------


def test_a_logger_that_does_not_respond_is_said(run: Run) -> None:
    said: list[str] = []
    run.write(workers=(run.worker("logger", state="restarting", pid=None, error="OSError: full"),))
    status = run.supervised()
    assert not status.responding
    assert status.waiting == "logger is restarting (OSError: full); the logger does not respond"
    StatusLines(lambda: status, said.append).show()
    assert said == [status.message], "numbers from files are old"


def test_a_logger_that_has_stopped_recording_does_not_respond(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write(workers=(run.worker("agent"), run.worker("logger")))
    run.says("logger")
    with run.logger():
        assert run.supervised().responding
        monkeypatch.setattr(status_writer, "_SILENT_SECONDS", 0.0)
        status = run.supervised()
    assert status.waiting == "the logger does not respond"
    run.write(workers=(run.worker("agent"),))
    assert run.supervised().responding, "in a serial run it is a part of the agent, which is busy"


def test_a_logger_that_does_not_know_the_step_yet_does_not_set_it_back(run: Run) -> None:
    (run.logdir / "scores.jsonl").write_text('{"step": 250, "episode/score": 1.0}\n')
    run.metrics = {"step": 0, "score": None, "eval_score": None}
    with run.logger():
        assert run.supervised().step == 250


def test_the_age_of_the_newest_checkpoint_is_known_while_the_run_is_under_way(run: Run) -> None:
    assert run.look().checkpoint_age is None
    saved = Checkpoint(run.config.checkpoints)
    path = saved.save({}, step=5)
    age = run.look().checkpoint_age
    assert age is not None
    assert 0 <= age <= time.time() - path.stat().st_mtime + 1
    saved.rate(path, 3.0)
    later = run.look().checkpoint_age
    assert later is not None
    assert later >= age, "a score is no checkpoint"
    assert json.loads(run.look().to_json())["checkpoint_age"] >= later
    (path / "manifest.json").write_text("{")
    assert run.look().checkpoint_age is None
    run.write(state="ended")
    assert run.look().checkpoint_age is None


# --- the supervisor's record ----------------------------------------------------------------------


def test_states_of_a_run(run: Run) -> None:
    gone = run.record.created - 100
    for changes, state, words in (
        ({"state": "running"}, "running", "● running"),
        ({"state": "ending"}, "ending", "● running"),
        ({"state": "evaluating"}, "evaluating", "the agent is being evaluated."),
        ({"state": "ended"}, "ended", "not under way. The same command resumes it."),
        ({"state": "running", "created": gone}, "killed", "was killed. The same command resumes"),
        ({"state": "running", "host": "elsewhere"}, "unknown", "on another machine"),
    ):
        write_record(run.logdir, replace(run.record, **changes))
        status = run.look()
        assert status.state == state
        assert status.running == (state in ("running", "ending", "evaluating"))
        assert words in drawn(status)
        if not status.running:
            assert {worker.state for worker in status.workers} == {"ended"}
            assert status.seconds_left is None


def test_a_health_check_needs_a_run_that_is_under_way_and_responds(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status_writer, "_WRITE_SECONDS", 0.01)
    words = ["status", str(run.logdir), "--check"]
    with written_by(run):
        assert main(words) == 0
        assert capfd.readouterr() == ("", "")
    run.write(written=0.0)
    assert main(words) == 1
    assert "its logger does not respond" in capfd.readouterr().err
    run.write(state="failed")
    assert main(words) == 1
    assert "is failed" in capfd.readouterr().err
    assert main(["status", str(run.logdir / "other"), "--check"]) == 1


def test_a_run_that_failed_says_why(run: Run) -> None:
    failed = run.worker("env-0", state="ended", pid=None, error="ValueError: the pole is broken")
    run.write(state="failed", workers=(run.worker("agent"), failed))
    status = run.look()
    assert status.message == (
        "The run has failed (env-0: ValueError: the pole is broken). The same command resumes it."
    )
    assert json.loads(status.to_json())["message"] == status.message


def test_workers_show_what_their_process_uses(run: Run) -> None:
    other = psutil.Process(os.getppid())
    run.write(workers=(run.worker("agent", pid=other.pid), run.worker("env-0", restarts=2)))
    agent, env = run.supervised().workers
    assert agent.usage is not None
    assert agent.usage.memory > 0
    assert env.restarts == 2


def test_threads_of_the_supervisor_have_no_share_of_their_own(run: Run) -> None:
    status = run.supervised()
    assert status.workers[0].pid == os.getpid()
    assert status.workers[0].usage is None
    assert status.supervisor is not None
    (row,) = (line for line in drawn(status).splitlines() if " supervisor " in line)
    assert "B" in row.split("running")[1]


def test_a_process_that_is_gone_is_not_measured(run: Run) -> None:
    run.write(workers=(run.worker("agent", pid=1 << 80),))
    assert run.supervised().workers[0].usage is None


# --- the file that the supervisor writes ----------------------------------------------------------


@contextmanager
def written_by(
    run: Run, machines: Callable[[], tuple[MachineStatus, ...]] = tuple
) -> Iterator[None]:
    """The run's supervisor writes `status.json` with what the logger told it."""

    def record() -> RunStatus:
        return replace(run.record, machines=machines())

    with StatusWriter(run.logdir, record), run.logger():
        while (record := read_record(run.logdir)) is None or not record.responding:
            time.sleep(0.01)
        yield


def test_a_look_takes_what_the_supervisor_wrote(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_writer, "_WRITE_SECONDS", 0.01)
    with written_by(run):
        written = read_record(run.logdir)
        assert written is not None
        found = run.look()
    assert written.step == 300
    assert (found.step, found.score, found.responding) == (300, 12.5, True)
    assert json.loads(found.to_json())["metrics"] == run.metrics
    assert [worker.name for worker in found.workers] == ["agent"]


def test_the_file_holds_what_json_prints(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_writer, "_WRITE_SECONDS", 0.01)
    with written_by(run):
        written = json.loads((run.logdir / FILE_NAME).read_text())
        printed = json.loads(run.look().to_json())
    assert written.keys() == printed.keys()
    assert (written["task"], written["score"], written["running"]) == (run.config.task, 12.5, True)
    assert written["message"].startswith("Waiting: no progress for ")


def test_a_supervisor_of_an_older_version_leaves_no_gaps(run: Run) -> None:
    """Its file says less of the run; the rest is in the run's directory."""
    run.write(written=time.time(), responding=True)
    with run.logger():
        status = run.look()
    assert (status.task, status.steps, status.step) == (run.config.task, 600, 300)
    assert status.running


@pytest.mark.parametrize("change", ["killed", "stuck", "ended"])
def test_what_a_supervisor_wrote_that_is_gone_or_stuck_is_not_shown(
    run: Run, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The claim alone says whether the file still holds."""
    monkeypatch.setattr(status_writer, "_WRITE_SECONDS", 0.01)
    with written_by(run):
        record = read_record(run.logdir)
    assert record is not None
    changes: dict[str, dict[str, Any]] = {
        "killed": {"created": record.created - 100},
        "stuck": {"written": record.written - 100},
        "ended": {"state": "ended"},
    }
    write_record(run.logdir, replace(record, **changes[change]))
    found = run.look()
    assert found.state == {"stuck": "running"}.get(change, change)
    assert (found.steps_per_second, found.responding) == (0.0, False), "derived from the directory"
    assert found.step == 300, "as the logger recorded it"
    stuck = re.fullmatch(r"the supervisor has not written its status for \d+ s", found.waiting)
    assert bool(stuck) == (change == "stuck")


def test_a_run_on_another_machine_is_followed_by_its_beat(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_writer, "_WRITE_SECONDS", 0.01)
    with written_by(run):
        record = read_record(run.logdir)
    assert record is not None
    # By its own clock, which may be an hour late.
    write_record(run.logdir, replace(record, host="elsewhere", written=5.0, seconds=77.0))
    beat = run.logdir / BEAT_NAME
    watcher = Watcher(run.logdir)
    assert seen(watcher).state == "unknown"
    for count in range(3):
        beat.write_text(f"name {count} 7.0")
        found = seen(watcher)
    assert (found.state, found.step, found.seconds) == ("running", 300, 77.0)


# --- the run's directory --------------------------------------------------------------------------


def test_a_directory_without_a_configuration_holds_no_run(tmp_path: Path) -> None:
    assert Watcher(tmp_path).look(0.0) is None


def test_a_run_that_ended_is_shown_with_its_last_logged_step(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(RunConfig(steps=900, logdir=tmp_path).to_json())
    (tmp_path / "scores.jsonl").write_text('{"step": 700, "episode/score": 1.0}\n')
    (tmp_path / "metrics.jsonl").write_text('{"step": 800}\n{"step": 900}\n{"step": 95')
    status = seen(Watcher(tmp_path))
    assert (status.step, status.scores, status.score) == (900, Scores(1, 1.0, (1.0,), (1.0,)), 1.0)
    assert status.state == "ended"
    assert status.message == "The run has ended: it has made all its steps."


def write_scores(path: Path, scores: Iterable[float]) -> None:
    with path.open("a") as file:
        file.writelines(f'{{"step": {n}, "episode/score": {v}}}\n' for n, v in enumerate(scores))


def test_a_look_reads_a_bounded_part_of_the_scores_and_keeps_a_bounded_number(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(RunConfig(logdir=tmp_path).to_json())
    count, path = 5000, tmp_path / "scores.jsonl"
    write_scores(path, map(float, range(count)))
    watcher = Watcher(tmp_path, score_bytes=path.stat().st_size / 3)
    found = [seen(watcher).scores for _ in range(4)]
    counts = [each.count for each in found]
    assert 0 < counts[0] < counts[1] < count == counts[2] == counts[3]
    last = found[-1]
    with path.open("a") as file:
        file.write('damaged\n{"step": 1, "episode/score": null}\n{"step": 9, "episode/sco')
    assert seen(watcher).scores == last
    assert last.best == count - 1
    assert list(last.recent) == list(range(count - len(last.recent), count))
    assert len(last.recent) < 100
    assert 30 < len(last.curve) < 100
    assert last.curve[0] < 200
    assert list(last.curve) == sorted(last.curve)
    assert seen(Watcher(tmp_path)).scores == last, "read in one piece"


def test_metrics_of_a_damaged_file_do_not_hide_the_run(run: Run) -> None:
    row = {"step": "many", "score": [1], "learner/updates": None, "env/failures": 10**400}
    (run.logdir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    status = run.look()
    assert (status.step, status.score, status.updates, status.env_failures) == (0, None, None, 0)
    assert json.loads(status.to_json())["state"] == "running"


# --- progress -------------------------------------------------------------------------------------


def test_the_rate_is_that_of_the_last_while() -> None:
    progress = _Progress()
    progress.add(0.0, 0, 0)
    assert progress.rate == 0.0
    progress.add(20.0, 0, 0)
    progress.add(30.0, 100, 0)
    assert progress.rate == 10.0, "the time before the first step does not count"
    progress.add(50.0, 500, 0)
    assert progress.rate == 500 / 30
    progress.add(70.0, 900, 0)
    assert progress.rate == 20.0, "nor does what is long ago"
    progress.add(110.0, 900, 0)
    assert progress.rate == 0.0, "there are no steps"
    progress.add(111.0, 100, 0)
    progress.add(121.0, 200, 0)
    assert progress.rate == 10.0, "steps that are counted again do not count backwards"


def test_a_run_that_collects_may_take_a_while_until_it_learns() -> None:
    progress = _Progress()
    progress.add(0.0, 1, 0)
    assert progress.stands_still(10.0), "nothing is known at the first look"
    for now, step in ((10.0, 10), (20.0, 20), (31.0, 30)):
        progress.add(now, step, 0)
        assert not progress.stands_still(10.0)
    progress.add(40.0, 40, 0)
    assert progress.stands_still(10.0)
    assert progress.still_for == 40.0
    progress.add(50.0, 50, 1)
    assert not progress.stands_still(10.0)
    for now in (60.0, 64.0):
        progress.add(now, 50, int(now))
        assert not progress.stands_still(10.0)
    progress.add(66.0, 50, 66)
    assert progress.stands_still(10.0), "there are no steps"


def test_a_run_may_take_a_while_until_it_learns_also_if_its_first_step_was_late() -> None:
    progress = _Progress()
    for now in (0.0, 50.0, 100.0):
        progress.add(now, 0, 0)
        assert progress.stands_still(10.0)
    for now, step in ((110.0, 10), (120.0, 20), (140.0, 30)):
        progress.add(now, step, 0)
        assert not progress.stands_still(10.0)
    progress.add(142.0, 40, 0)
    assert progress.stands_still(10.0)


def test_a_run_without_progress_is_never_silent(run: Run) -> None:
    """Also if no worker says that it waits."""
    with run.logger():
        status = run.supervised()
    assert status.waiting == "no progress for 0 s, and no worker says that it waits"


def test_an_environment_that_hangs_is_named_also_while_others_go_on(run: Run) -> None:
    run.write(workers=(run.worker("agent"), run.worker("env-0"), run.worker("env-8")))
    for name, seconds in (("env-0", 42.0), ("env-8", 3.0)):
        health = Health(run.logdir / "workers" / name)
        health.now("stepping", 3)
        health._record.since = time.time() - seconds
    run.metrics |= {"env/failures": 4.0, "env/failures_per_1000_steps": 13.3}
    with run.logger():
        lines, status = run.lines(moves=True), run.supervised(moves=True)
    assert re.fullmatch(
        r"environment 3 is in a step for 4\d s: after 300 s \(env_timeout\) its process is ended "
        r"and started again\.",
        lines[-1],
    )
    assert status.waiting == ""
    assert lines[-1][:20] in drawn(status)
    assert "4 failures of environments (13.3 in 1,000 steps)" in lines[0]
    assert "4 failures of environments" in drawn(status)
    assert json.loads(status.to_json())["env_failures"] == 4


def test_a_run_that_compiles_says_so_at_the_first_look(run: Run) -> None:
    run.says("agent", "the learner is compiling the agent", age=42.0)
    run.says("actor", "an old text", age=90.0)
    run.write(workers=(run.worker("agent", started=time.time() - 50),))
    with run.logger():
        lines = run.lines()
    assert "  0 steps/s" in lines[0]
    assert re.fullmatch(r"Waiting: the learner is compiling the agent \(4\d s so far\)\.", lines[1])


def left(step: int, rate: float, **ends: Any) -> float | None:
    status = RunStatus(1, 0.0, "here", 0.0, step=step, seconds=10.0, steps_per_second=rate, **ends)
    return status.seconds_left


def test_no_time_is_left_once_all_steps_are_made() -> None:
    assert left(502, 50.0, steps=500) is None
    assert left(450, 50.0, steps=500) == 1.0
    assert left(450, 50.0, steps=500, state="ended") is None


def test_time_left_is_that_of_what_ends_first() -> None:
    assert left(300, 50.0, steps=600, duration=1000.0) == 6.0
    assert left(300, 0.1, steps=600, duration=1000.0) == 990.0


def test_scores_of_a_run_that_was_started_anew_replace_the_old_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(RunConfig(logdir=tmp_path).to_json())
    scores = tmp_path / "scores.jsonl"
    scores.write_text('{"step": 700, "episode/score": 9.0}\n' * 3)
    watcher = Watcher(tmp_path)
    found = watcher.look(0.0)
    assert found is not None
    assert found.scores.count == 3
    anew = tmp_path / "anew"
    anew.write_text('{"step": 5, "episode/score": 1.0}\n')
    anew.replace(scores)
    found = watcher.look(0.0)
    assert found is not None
    assert (found.scores.count, found.scores.best, found.step) == (1, 1.0, 5)
