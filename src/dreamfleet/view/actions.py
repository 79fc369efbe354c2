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
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
from nicegui import ui

from dreamfleet.checkpoint import Checkpoint, step_of
from dreamfleet.fleet.record import read_record, supervisor_process
from dreamfleet.fleet.tied import tied
from dreamfleet.metrics.evaluations import FILE_NAME as EVALUATIONS_FILE
from dreamfleet.roles.saver import SAVE_REQUEST
from dreamfleet.view.frame import card, keep_fresh, show, with_hint
from dreamfleet.view.reading import read_tail
from dreamfleet.view.runs import Run

VIDEO_FOLDER = "on-demand"
"""Below `media`, for videos that a viewer asked for."""
RESUME_LOG = "resume.log"
_MAX_RUNNING, _MAX_KEPT = 2, 20
_NICE = 10
_TAIL_BYTES = 1 << 12
# -P: the current directory may be a run of others, and what it holds is not imported.
_COMMAND = (sys.executable, "-P", "-m", "dreamfleet.cli")
_resumed: dict[Path, subprocess.Popen[bytes]] = {}


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
        return "The run is not running: its last checkpoint holds everything."
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
    known = _resumed.get(run.path)
    if run.row.running or run.row.state == "unknown" or (known and known.poll() is None):
        return "The run is running."
    words = [*_COMMAND, "resume", str(run.path), *(["--trust"] if run.trust else [])]
    try:
        (run.path / "logs").mkdir(exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        log = os.open(run.path / "logs" / RESUME_LOG, flags, 0o644)
    except OSError as error:
        return f"The run's directory cannot be written: {error.strerror}."
    with os.fdopen(log, "wb") as out:
        _resumed[run.path] = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    return "The run is resumed."


def resume_text(run: Run) -> str:
    """How resuming a run goes, until it runs."""
    process = _resumed.get(run.path)
    if process is None or process.poll() == 0 or run.row.running:
        return ""
    if process.returncode is None:
        return "resuming…"
    content, _ = read_tail(run.path, "logs", RESUME_LOG, max_bytes=_TAIL_BYTES)
    lines = content.decode(errors="replace").strip().splitlines()
    return with_hint(f"resuming failed: {(lines or ['see its log'])[-1]}")


class Job:
    """An evaluation of a checkpoint, in a process of its own with low priority. It ends with this
    process."""

    def __init__(self, run: Run, name: str, words: Sequence[str], step: int) -> None:
        self.run, self.name, self.step = run, name, step
        self.code: int | None = None
        self._said = "running"
        self._result = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process ends
        self.process = subprocess.Popen(
            tied([*words, "--json"]),
            stdin=subprocess.PIPE,
            stdout=self._result,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            # Accelerators belong to training.
            env={**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")},
        )
        with suppress(psutil.Error):
            psutil.Process(self.process.pid).nice(_NICE)
        threading.Thread(target=self._follow, name=name, daemon=True).start()

    @property
    def text(self) -> str:
        """Its progress or result in a line."""
        return f"{self.name} · step {self.step:,} · {self._said}"

    def _follow(self) -> None:
        with self._result as result, self.process as process:
            assert process.stderr is not None
            for line in process.stderr:
                self._said = line.strip() or self._said
            if process.wait():
                self._said = with_hint(self._said)
            else:
                result.seek(0)
                with suppress(msgspec.MsgspecError, KeyError, TypeError, ValueError):
                    found = msgspec.json.decode(result.read())
                    self._said = f"mean return {found['mean']:.4g} of {found['episodes']} episodes"
        self.code = process.returncode


_jobs: list[Job] = []


def evaluate(run: Run, checkpoint: Path | None = None, *, video: bool = False) -> str:
    """Evaluate a checkpoint, by default the newest, in the background, or record a video of it;
    returns what was done."""
    path = checkpoint or Checkpoint(run.path / "ckpt" / "agent").latest()
    if path is None:
        return "The run has no checkpoint yet."
    if sum(job.code is None for job in _jobs) >= _MAX_RUNNING:
        return "Two evaluations are running: wait for one of them."
    step = step_of(path)
    words = ["dreamfleet.cli", "eval", str(path), "--episodes", "1" if video else "10"]
    words += ["--trust"] if run.trust else []
    if video:
        words += ["--video", str(run.path / "media" / VIDEO_FOLDER / f"{step:012d}.mp4")]
    if (run.path / EVALUATIONS_FILE).is_symlink():
        words += ["--no-keep"]
    _jobs.append(Job(run, "video" if video else "evaluation", words, step))
    del _jobs[:-_MAX_KEPT]
    return "Recording a video." if video else "Playing ten episodes."


def jobs_of(run: Run) -> list[Job]:
    """Evaluations of a run, the newest first."""
    return [job for job in reversed(_jobs) if job.run is run]


def add_actions(run: Run) -> None:
    """Buttons that act on a run, and the progress of its evaluations."""

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
        unfinished = run.config is not None and not 0 < row.steps <= row.step
        shown = {"Stop": row.running, "Save now": row.running, "Copy command": unfinished}
        for text, visible in (shown | {"Resume": unfinished and not row.running}).items():
            buttons[text].set_visibility(visible)
        told = [resume_text(run), *(job.text for job in jobs_of(run)[:3])]
        show(jobs, "\n".join(filter(None, told)))

    keep_fresh(refresh, 1.0)


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
