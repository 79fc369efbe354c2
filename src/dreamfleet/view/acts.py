"""What a person can do to a run from a page: end it, save it, evaluate it.

Whoever reaches a page has the token, so the buttons ask for nothing further.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from nicegui import app, ui

from dreamfleet.checkpoint import Checkpoint, step_of
from dreamfleet.fleet.record import read_record, supervisor_process
from dreamfleet.fleet.tied import tied
from dreamfleet.metrics.evaluations import FILE_NAME as EVALUATIONS_FILE
from dreamfleet.roles.learner import SAVE_REQUEST
from dreamfleet.view.frame import card, with_hint
from dreamfleet.view.runs import Run

log = logging.getLogger(__name__)

ASKED = "on-demand"
"""The folder of videos that a person has asked for."""
PREDICTIONS = "predictions"
"""The folder of predictions of numbers."""
_MOST_JOBS, _KEPT_JOBS = 2, 20
_NICE = 10
_NO_CHECKPOINT = "The run has no checkpoint yet."


def end_run(run: Run) -> str:
    """End a run as Ctrl-C does; returns what was done."""
    record = read_record(run.path)
    process = supervisor_process(record) if record else None
    if record is None or process is None:
        where = f" It was started on {record.host}: end it there." if record else ""
        return f"The run is not under way on this machine.{where}"
    try:
        process.send_signal(signal.SIGTERM)
    except psutil.Error as error:
        return f"The run cannot be ended: {error}"
    return "The run saves and ends."


def ask_to_save(run: Run) -> str:
    """Ask for a checkpoint; returns what was done."""
    if not run.row.running:
        return "The run is not under way: its last checkpoint holds everything."
    try:
        (run.path / SAVE_REQUEST).touch()
    except OSError as error:
        return f"The run's directory cannot be written: {error.strerror}."
    return "A checkpoint is saved after the next update."


class Job:
    """Something that is done to a checkpoint by a process of its own."""

    def __init__(
        self, run: Run, name: str, module: Sequence[str], step: int, episodes: int
    ) -> None:
        self.run, self.name, self.step, self.episodes = run, name, step, episodes
        self.done = 0
        self.lines: deque[str] = deque(maxlen=30)
        self.result = ""
        self.code: int | None = None
        self._process = subprocess.Popen(
            tied(module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            # An accelerator is the run's.
            env={**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")},
        )
        with suppress(psutil.Error):  # training comes first
            psutil.Process(self._process.pid).nice(_NICE)
        threading.Thread(target=self._follow, name=name, daemon=True).start()

    @property
    def running(self) -> bool:
        return self.code is None

    @property
    def share(self) -> float:
        """How much of it is done, from 0 to 1."""
        if not self.running:
            return 1.0
        return self.done / self.episodes if self.episodes else 0.0

    def words(self) -> str:
        """How it is doing, in a line."""
        state = "under way" if self.running else self.result or "done"
        if self.running and self.episodes:
            state = f"{self.done} of {self.episodes} episodes"
        elif self.code:
            state = with_hint(self.lines[-1]) if self.lines else "it was ended"
        return f"{self.name} · step {self.step:,} · {state}"

    def stop(self) -> None:
        """End it."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _follow(self) -> None:
        with self._process as process:
            assert process.stdout is not None
            for line in process.stdout:
                self.lines.append(line.strip())
                if match := re.match(r"(\d+) of \d+ episodes", line):
                    self.done = int(match[1])
                elif match := re.match(r"mean return +(.+)", line):
                    self.result = f"mean return {match[1]}"
        self.code = process.returncode


_jobs: list[Job] = []


def start_evaluation(
    run: Run, checkpoint: Path | None = None, *, episodes: int = 10, video: bool = False
) -> str:
    """Evaluate a checkpoint in the background, the newest one unless it is named; returns why not,
    or an empty text."""
    path = checkpoint or Checkpoint(run.path / "ckpt" / "agent").latest()
    if path is None:
        return _NO_CHECKPOINT
    step = step_of(path)
    words = ["dreamfleet.cli", "eval", str(path), "--episodes", str(episodes)]
    words += ["--trust"] if run.trust else []
    if video:
        words += ["--video", str(run.path / "media" / ASKED / f"{step:012d}.mp4")]
    elif not (run.path / EVALUATIONS_FILE).is_symlink():
        words += ["--keep"]
    return _start_job(run, "video" if video else "evaluation", words, step, episodes)


def start_prediction(run: Run) -> str:
    """Predict a stored episode with the newest checkpoint; returns why not, or an empty text."""
    path = Checkpoint(run.path / "ckpt" / "agent").latest()
    if path is None:
        return _NO_CHECKPOINT
    folder = run.path / "media" / PREDICTIONS
    words = ["dreamfleet.view.predict", str(path), str(folder), *(["trust"] if run.trust else [])]
    return _start_job(run, "prediction", words, step_of(path), 0)


def _start_job(run: Run, name: str, module: Sequence[str], step: int, episodes: int) -> str:
    if sum(job.running for job in _jobs) >= _MOST_JOBS:
        return "Two of these are under way: wait for one of them."
    _jobs.append(Job(run, name, module, step, episodes))
    del _jobs[:-_KEPT_JOBS]
    return ""


def jobs_of(run: Run) -> list[Job]:
    """What was started here for a run, the newest first."""
    return [job for job in reversed(_jobs) if job.run is run]


@app.on_shutdown
def _stop_jobs() -> None:
    for job in _jobs:
        job.stop()


def add_acts(run: Run) -> None:
    """Buttons that act on a run, and how far that is."""
    with ui.element("div").classes("acts"):
        end = _button("End run", lambda: _confirm(run))
        save = _button("Save now", lambda: ui.notify(ask_to_save(run)))
        _button("Evaluate", lambda: _start(run, video=False))
        _button("Video", lambda: _start(run, video=True))
    add_jobs(run, lambda: [each.set_visibility(run.row.running) for each in (end, save)])


def add_jobs(run: Run, also: Callable[[], object] = lambda: None) -> None:
    """How far is what was started for a run."""
    place = ui.element("div").classes("jobs")

    def refresh() -> None:
        also()
        shown = jobs_of(run)[:3]
        place.set_visibility(bool(shown))
        place.clear()
        with place:
            for job in shown:
                with ui.element("div").classes("job"):
                    with ui.element("div").classes("bar"):
                        ui.element("div").style(f"width: {max(job.share, 0.02):.0%}")
                    ui.label(job.words()).classes("small muted")

    seen: list[object] = [None]

    def tick() -> None:
        state = (run.row.running, [(job.words(), job.code) for job in jobs_of(run)[:3]])
        if state != seen[0]:
            seen[0] = state
            refresh()

    tick()
    ui.timer(1.0, tick, immediate=False)


def _button(text: str, act: Callable[[], object]) -> ui.button:
    return ui.button(text, on_click=act).props("outline dense no-caps").classes("act")


def _start(run: Run, *, video: bool) -> None:
    problem = start_evaluation(run, episodes=1 if video else 10, video=video)
    ui.notify(problem or ("A video is recorded." if video else "Ten episodes are played."))


def _confirm(run: Run) -> None:
    with ui.dialog() as dialog, card("End this run?"):
        ui.label("It saves a checkpoint and ends in order. 'dreamfleet resume' resumes it.")
        with ui.element("div").classes("row-of"):
            ui.element("div").classes("space")
            ui.button("Cancel", on_click=dialog.close).props("flat no-caps")

            def end() -> None:
                dialog.close()
                ui.notify(end_run(run))

            ui.button("End run", on_click=end).props('no-caps color="negative" unelevated')
    dialog.on("hide", dialog.delete)
    dialog.open()
