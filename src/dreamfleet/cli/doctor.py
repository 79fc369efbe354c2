"""`dreamfleet doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from rich.table import Table
from rich.text import Text

from dreamfleet.cli.console import say
from dreamfleet.errors import DreamfleetError, install_command
from dreamfleet.metrics.video import find_encoder
from dreamfleet.transport import Client, Server

_MARKS = {
    "fine": Text("✓", style="green"),
    "absent": Text("-", style="dim"),
    "hint": Text("!", style="yellow"),
    "problem": Text("✗", style="red"),
}
_LITTLE_MEMORY, _LITTLE_DISK, _FEW_FILES = 4e9, 5e9, 1024
_PATIENCE = 120.0
# Developers' tools, and what shows in JAX's devices.
_NOT_LISTED = ("dev", "bench", "cuda", "tpu")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: Literal["fine", "absent", "hint", "problem"]
    found: str
    fix: str = ""


def doctor(logdir: Path = Path("runs")) -> None:
    """Look over this machine: Python, JAX, memory, disk, rendering, sockets, limits, extras.

    Every problem comes with its fix.

    Args:
        logdir: Where runs will be kept.
    """
    findings: list[Finding] = []
    for check in CHECKS:
        findings += check()
    findings += disk(logdir)
    table = Table.grid(padding=(0, 2))
    for each in findings:
        words = f"{each.found}\n{each.fix}" if each.fix else each.found
        table.add_row(_MARKS[each.state], each.what, words)
    say(table)
    problems = sum(each.state == "problem" for each in findings)
    if problems:
        raise DreamfleetError(
            f"There {'is 1 problem' if problems == 1 else f'are {problems} problems'}, see above."
        )
    say("This machine is fit for training.")


def python() -> Iterator[Finding]:
    """Interpreter and package."""
    yield Finding("Python", "fine", f"{platform.python_version()} in {sys.prefix}")
    yield Finding("Dreamfleet", "fine", importlib.metadata.version("dreamfleet"))


def jax() -> Iterator[Finding]:
    """Devices, asked for in a process of their own: a broken driver may hang or crash."""
    code = (
        "import collections, jax; d = jax.devices(); kinds = collections.Counter("
        "f'{x.platform} ({x.device_kind})' if x.platform != 'cpu' else 'cpu' for x in d); "
        "print(jax.__version__ + ' on ' + ', '.join(f'{n} x {k}' for k, n in kinds.items()))"
    )
    done = _run([sys.executable, "-c", code])
    if isinstance(done, str):
        fix = "Reinstall it (pip install --force-reinstall jax), or set JAX_PLATFORMS=cpu."
        yield Finding("JAX", "problem", done, fix)
        return
    found = done.stdout.strip()
    gpu = shutil.which("nvidia-smi") is not None
    if gpu and "cpu" in found and "gpu" not in found:
        fix = f"There is a GPU that JAX does not use: {install_command('cuda')}"
        yield Finding("JAX", "problem", found, fix)
    else:
        yield Finding("JAX", "fine", found)


def processor_and_memory() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0]
    busy = cores is not None and load > cores
    yield Finding(
        "processor",
        "hint" if busy else "fine",
        f"{cores} cores, load {load:.1f}",
        "Other programs keep it busy; training will be slower." if busy else "",
    )
    memory = psutil.virtual_memory()
    found = f"{memory.available / 1e9:.1f} GB of {memory.total / 1e9:.1f} GB free"
    if memory.available < _LITTLE_MEMORY:
        yield Finding("memory", "hint", found, "Close other programs, or use few environments.")
    else:
        yield Finding("memory", "fine", found)


def disk(logdir: Path) -> Iterator[Finding]:
    """Room where runs will be kept, and whether they can be written there."""
    there = logdir.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    found = f"{free / 1e9:.1f} GB free in {there}"
    if not os.access(there, os.W_OK):
        yield Finding("disk", "problem", f"{there} cannot be written to", "Choose a --logdir.")
    elif free < _LITTLE_DISK:
        yield Finding("disk", "hint", found, "Images fill a replay quickly: lower replay_capacity.")
    else:
        yield Finding("disk", "fine", found)


def sockets() -> Iterator[Finding]:
    """A call to ourselves, over a socket file and over a port."""
    for what, address in (("socket files", "ipc://{auto}"), ("ports", "tcp://127.0.0.1:{auto}")):
        try:
            server = Server(address, "doctor")
            server.bind("double", lambda value: 2 * value)
            with server, Client(server.address, "doctor", patience=5.0) as client:
                assert client.double(21).result(5.0) == 42
        except (DreamfleetError, OSError) as error:
            fix = "Look for a firewall, or set TMPDIR to a short path that you may write to."
            yield Finding(what, "problem", f"no call gets through: {error}", fix)
        else:
            yield Finding(what, "fine", "calls get through")
    if len(tempfile.gettempdir()) > 60:
        fix = "Socket files have at most 107 characters: set TMPDIR to a shorter path."
        yield Finding("temporary files", "hint", tempfile.gettempdir(), fix)


def limits() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < _FEW_FILES:
        fix = "Run 'ulimit -n 4096' in this shell first, if there are to be many environments."
        yield Finding("open files", "hint", f"{files} at most", fix)
    else:
        yield Finding("open files", "fine", f"{files} at most" if files >= 0 else "no limit")


def rendering() -> Iterator[Finding]:
    """What dm_control would render with, tried in a process of its own."""
    if not _installed("dm-control"):
        return
    code = "from dreamfleet.envs.dmc import pick_renderer; print(pick_renderer())"
    done = _run([sys.executable, "-c", code])
    if isinstance(done, str):
        yield Finding("rendering", "hint", "dm_control can show no pixels here", done)
    else:
        yield Finding("rendering", "fine", f"dm_control renders with {done.stdout.strip()}")


def extras() -> Iterator[Finding]:
    """The optional parts of the package, and which of them are there."""
    distribution = importlib.metadata.distribution("dreamfleet")
    names = distribution.metadata.get_all("Provides-Extra") or []
    lines = distribution.requires or []
    for extra in (name for name in names if name not in _NOT_LISTED):
        mine = [line for line in lines if re.search(rf"extra == ['\"]{extra}['\"]", line)]
        needed = dict.fromkeys(re.split(r"[^\w.-]", line)[0] for line in mine)
        if all(map(_installed, needed)):
            versions = (f"{name} {importlib.metadata.version(name)}" for name in needed)
            yield Finding(f"extra {extra}", "fine", ", ".join(versions))
        else:
            fix = f"not installed: {install_command(extra)}"
            yield Finding(f"extra {extra}", "absent", fix)
    if _installed("imageio-ffmpeg") and isinstance(done := _run([find_encoder(), "-version"]), str):
        yield Finding("ffmpeg", "hint", "it does not run", done)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    python,
    jax,
    processor_and_memory,
    sockets,
    limits,
    rendering,
    extras,
)


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _run(command: list[str]) -> subprocess.CompletedProcess[str] | str:
    """What a program said, or in one line why it did not."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"ended with code {done.returncode}"
    return done
