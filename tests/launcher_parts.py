"""Functions that workers run in the tests of launchers."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

from dreamfleet.roles.runtime import stop_event

LONG = 60.0


def write(path: Path, text: str = "") -> None:
    path.write_text(text)


def fail(message: str) -> None:
    raise RuntimeError(message)


def fail_once(mark: Path) -> None:
    if not mark.exists():
        mark.touch()
        raise RuntimeError("out of coffee")


def save_when_stopped(started: Path, saved: Path) -> None:
    stop = stop_event()
    started.touch()
    stop.wait()
    saved.write_text("saved")


def ignore_the_request(started: Path, over: Path) -> None:
    """Run until the test is over, though it is asked to stop."""
    stop_event()
    started.touch()
    while not over.exists():
        threading.Event().wait(0.01)


def appears(path: Path) -> bool:
    """Whether a file is there; waits for it."""
    waiting = threading.Event()
    for _ in range(int(LONG / 0.01)):
        if path.exists():
            return True
        waiting.wait(0.01)
    return False


def count_starts(counts: Path, go: Path, enough: int) -> None:
    """Return at once, until there were enough starts."""
    with counts.open("a") as file:
        file.write("x")
    if len(counts.read_text()) == enough:
        go.touch()
        stop_event().wait()


def note_end(order: Path, started: Path, name: str) -> None:
    stop = stop_event()
    started.touch()
    stop.wait()
    with order.open("a") as file:
        file.write(f"{name} ")


def note_variable(name: str, path: Path) -> None:
    path.write_text(os.environ[name])


def note_blocked_signals(path: Path) -> None:
    path.write_text(str(signal.pthread_sigmask(signal.SIG_BLOCK, ())))


def note_files(path: Path) -> None:
    """How many files this process may open."""
    path.write_text(str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


def leave_a_child(path: Path) -> None:
    """End with a child that still runs; notes its pid."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    path.write_text(str(child.pid))
    os._exit(1)


def write_much(log: Path) -> None:
    """Write more than a log may hold, and a line after it was moved."""
    sys.stdout.write("a line\n" * 3_000_000)
    sys.stdout.flush()
    while log.stat().st_size > 1000:
        threading.Event().wait(0.01)
    sys.stdout.write("and the end\n")
