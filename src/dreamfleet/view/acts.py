"""What a person can do to a run from a page: end it, save it, evaluate it.

Whoever reaches a page has the token, so the buttons ask for nothing further.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import psutil
from nicegui import app, ui

from dreamfleet.checkpoint import Checkpoint, step_of
from dreamfleet.fleet.record import read_record, supervisor_process
from dreamfleet.roles.learner import SAVE_REQUEST
from dreamfleet.view.frame import card
from dreamfleet.view.runs import Run

log = logging.getLogger(__name__)

ASKED = "on-demand"
"""The folder of videos that a person has asked for."""
_MOST_JOBS = 2
_NICE = 10
_SAVE_SECONDS = 60.0


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
    """An evaluation in a process of its own.

    Args:
        run: The run.
        checkpoint: The checkpoint; None for the newest one.
        episodes: How many.
        video: Whether to record the first one.
    """

    def __init__(self, run: Run, checkpoint: Path | None, episodes: int, *, video: bool) -> None:
        self.run, self.episodes = run, episodes
        self.done = 0
        self.lines: deque[str] = deque(maxlen=30)
        self.result = ""
        self.code: int | None = None
        self.started = time.monotonic()
        newest = Checkpoint(run.path / "ckpt" / "agent").latest()
        path = checkpoint or newest
        self.step = step_of(path) if path is not None else 0
        command = [sys.executable, "-m", "dreamfleet.cli", "eval", str(path or run.path)]
        command += ["--episodes", str(episodes)]
        if video:
            place = run.path / "media" / ASKED / f"{self.step:012d}.mp4"
            command += ["--video", str(place)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")},
        )
        psutil.Process(self._process.pid).nice(_NICE)  # training comes first
        threading.Thread(target=self._follow, name="evaluation", daemon=True).start()

    @property
    def running(self) -> bool:
        return self.code is None

    def words(self) -> str:
        """How it is doing, in a line."""
        if self.running:
            return f"step {self.step:,}: {self.done} of {self.episodes} episodes"
        if self.code == 0:
            return f"step {self.step:,}: mean return {self.result}"
        return f"step {self.step:,}: {self.lines[-1] if self.lines else 'it was ended'}"

    def stop(self) -> None:
        """End it."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.strip())
            if match := re.match(r"(\d+) of \d+ episodes", line):
                self.done = int(match[1])
            elif match := re.match(r"mean return +(.+)", line):
                self.result, self.done = match[1], self.episodes
        self.code = self._process.wait()


_jobs: list[Job] = []


def start_evaluation(
    run: Run, checkpoint: Path | None = None, *, episodes: int = 10, video: bool = False
) -> str:
    """Evaluate a checkpoint in the background; returns why not, or an empty text."""
    if Checkpoint(run.path / "ckpt" / "agent").latest() is None:
        return "The run has no checkpoint yet."
    if sum(job.running for job in _jobs) >= _MOST_JOBS:
        return "Two evaluations are under way: wait for one of them."
    _jobs.append(Job(run, checkpoint, episodes, video=video))
    del _jobs[:-20]
    return ""


def jobs_of(run: Run) -> list[Job]:
    """Evaluations of a run that were started here, the newest first."""
    return [job for job in reversed(_jobs) if job.run is run]


@app.on_shutdown
def _stop_jobs() -> None:
    for job in _jobs:
        job.stop()


def add_acts(run: Run) -> None:
    """Buttons that act on a run, and how far evaluations are."""
    with ui.element("div").classes("acts"):
        end = _button("End run", lambda: _confirm(run))
        save = _button("Save now", lambda: ui.notify(ask_to_save(run)))
        _button("Evaluate", lambda: _start(run, video=False))
        _button("Video", lambda: _start(run, video=True))
    place = ui.element("div").classes("jobs")

    def refresh() -> None:
        for button in (end, save):
            button.set_visibility(run.row.running)
        shown = jobs_of(run)[:3]
        place.set_visibility(bool(shown))
        place.clear()
        with place:
            for job in shown:
                with ui.element("div").classes("job"):
                    with ui.element("div").classes("bar"):
                        share = job.done / job.episodes if job.running else 1.0
                        ui.element("div").style(f"width: {max(share, 0.02):.0%}")
                    ui.label(f"evaluation · {job.words()}").classes("small muted")

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
