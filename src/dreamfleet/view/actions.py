"""What a page can do to a run: stop, resume, save and evaluate it.

Every viewer has the token, so the buttons need no further permission.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil
from nicegui import ui

from dreamfleet.checkpoint import Checkpoint, step_of
from dreamfleet.fleet.record import read_record, supervisor_process
from dreamfleet.fleet.tied import tied
from dreamfleet.metrics.evaluations import FILE_NAME as EVALUATIONS_FILE
from dreamfleet.metrics.outputs.jsonl import decode_rows, last_lines
from dreamfleet.roles.saver import SAVE_REQUEST
from dreamfleet.view.frame import Refresh, card, show, with_hint
from dreamfleet.view.runs import Run

VIDEO_FOLDER = "on-demand"
"""Below `media`, for videos that a viewer asked for."""
RESUME_LOG = "resume.log"
_MAX_RUNNING, _MAX_KEPT = 2, 20
_NICE = 10
_TAIL_BYTES = 1 << 13
# -P: the current directory may be a run of others, and what it holds is not imported.
_COMMAND = (sys.executable, "-uP", "-m", "dreamfleet.cli")


class Job:
    """A command about a run, in a process of its own; the log gets what it prints."""

    def __init__(
        self, run: Run, name: str, words: Sequence[str], log: IO[bytes], **options: Any
    ) -> None:
        self.run, self.name, self._log = run, name, log
        self._said = "running"
        self.process = subprocess.Popen(
            words, stdout=log, stderr=log, start_new_session=True, **options
        )

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    @property
    def text(self) -> str:
        """Its progress, its result or its error in a line."""
        if not self._log.closed:
            code, content = self.process.poll(), last_lines(self._log, _TAIL_BYTES)
            lines = content.decode(errors="replace").strip().splitlines() or [self._said]
            self._said = f"failed: {with_hint(lines[-1])}" if code else lines[-1]
            for found in () if code else decode_rows(content):
                with suppress(KeyError, TypeError, ValueError):
                    mean, count = float(found["mean"]), found["episodes"]
                    self._said = f"mean return {mean:.4g} of {count} episodes"
            if code is not None:
                with self._log, self.process:  # which closes them
                    pass
        return f"{self.name} · {self._said}"


_jobs: list[Job] = []


def jobs_of(run: Run) -> list[Job]:
    """What is done about a run, the newest first."""
    return [job for job in reversed(_jobs) if job.run is run]


def _start(job: Job) -> None:
    _jobs.append(job)
    del _jobs[:-_MAX_KEPT]


def stop_run(run: Run) -> str:
    """Stop a run as Ctrl-C does; returns what was done."""
    record = read_record(run.path)
    process = supervisor_process(record) if record else None
    if record is None or process is None:
        where = f" It was started on {record.host}: stop it there." if record else ""
        return f"The run is not running on this machine.{where}"
    try:
        process.send_signal(signal.SIGTERM)
    except psutil.Error as error:
        return f"The run cannot be stopped: {error}"
    return "The run saves and stops."


def request_save(run: Run) -> str:
    """Ask for a checkpoint; returns what was done."""
    if not run.row.running:
        return "The run is not running: there is nothing to save."
    try:
        (run.path / SAVE_REQUEST).touch()
    except OSError as error:
        return f"The run's directory cannot be written: {error.strerror}."
    return "A checkpoint is saved after the next update."


def resume_command(run: Run) -> str:
    """What to type to resume a run."""
    return shlex.join(["dreamfleet", "resume", str(run.path)])


def resume_run(run: Run) -> str:
    """Resume a run in a process that outlives this server; returns what was done. Its own code is
    imported only if the server trusts it."""
    resumes = any(job.name == "resume" and job.runs for job in jobs_of(run))
    if resumes or run.row.running or run.row.state == "unknown":
        return "The run is running."
    words = [*_COMMAND, "resume", str(run.path), *(["--trust"] if run.trust else [])]
    try:
        (run.path / "logs").mkdir(exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
        log = os.open(run.path / "logs" / RESUME_LOG, flags, 0o644)
    except OSError as error:
        return f"The run's directory cannot be written: {error.strerror}."
    _start(Job(run, "resume", words, os.fdopen(log, "a+b"), stdin=subprocess.DEVNULL))
    return "The run is resumed."


def evaluate(run: Run, checkpoint: Path | None = None, *, video: bool = False) -> str:
    """Evaluate a checkpoint, by default the newest, or record a video of it, in a process of low
    priority that ends with this one; returns what was done."""
    path = checkpoint or Checkpoint(run.path / "ckpt" / "agent").latest()
    if path is None:
        return "The run has no checkpoint yet."
    if sum(job.runs and job.name != "resume" for job in _jobs) >= _MAX_RUNNING:
        return "Two evaluations are running: wait for one of them."
    step = step_of(path)
    words = ["eval", str(path), "--episodes", "1" if video else "10", "--json"]
    words += ["--trust"] if run.trust else []
    if video:
        words += ["--video", str(run.path / "media" / VIDEO_FOLDER / f"{step:012d}.mp4")]
    if (run.path / EVALUATIONS_FILE).is_symlink():
        words += ["--no-keep"]
    name = f"{'video' if video else 'evaluation'} · step {step:,}"
    # Accelerators belong to training.
    variables = {**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}
    log = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - closed with the job
    job = Job(
        run, name, tied(["dreamfleet.cli", *words]), log, stdin=subprocess.PIPE, env=variables
    )
    with suppress(psutil.Error):
        psutil.Process(job.process.pid).nice(_NICE)
    _start(job)
    return "Recording a video." if video else "Playing ten episodes."


def add_actions(run: Run) -> Refresh:
    """Buttons that act on a run, and how its jobs go."""

    def copy_command() -> None:
        ui.clipboard.write(resume_command(run))
        ui.notify(f"Copied: {resume_command(run)}")

    acts: dict[str, Callable[[], object]] = {
        "Stop": lambda: _confirm_stop(run),
        "Save now": lambda: ui.notify(request_save(run)),
        "Resume": lambda: ui.notify(resume_run(run)),
        "Copy command": copy_command,
        "Evaluate": lambda: ui.notify(evaluate(run)),
        "Video": lambda: ui.notify(evaluate(run, video=True)),
    }
    with ui.element("div").classes("acts"):
        buttons = {text: ui.button(text, on_click=act) for text, act in acts.items()}
    for button in buttons.values():
        button.props("outline dense no-caps").classes("act")
    jobs = ui.label().classes("jobs small muted")

    def refresh() -> None:
        row = run.row
        complete = 0 < row.steps <= row.step and row.state not in ("killed", "failed")
        unfinished = run.config is not None and not complete
        shown = {"Stop": row.running, "Save now": row.running, "Copy command": unfinished}
        for text, visible in (shown | {"Resume": unfinished and not row.running}).items():
            buttons[text].set_visibility(visible)
        # A run that was resumed shows itself how it goes.
        told = [j.text for j in jobs_of(run) if j.name != "resume" or not row.running][:3]
        show(jobs, "\n".join(told))

    return refresh


async def _confirm_stop(run: Run) -> None:
    with ui.dialog() as dialog, card("Stop this run?"):
        ui.label("It saves a checkpoint and stops. Resume continues it.")
        with ui.element("div").classes("row-of"):
            ui.element("div").classes("space")
            ui.button("Cancel", on_click=dialog.close).props("flat no-caps")
            stop = ui.button("Stop", on_click=lambda: dialog.submit(True))
            stop.props('no-caps color="negative" unelevated')
    if await dialog:
        ui.notify(stop_run(run))
    dialog.delete()
