"""What this machine has for training, and what it lacks; every problem comes with its fix.

A finding is `fine` only if it was tried: a function compiled, a file written, a call made, an
environment stepped, a frame rendered. What was merely read or found installed is `untried`.
"""

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from dreamfleet.errors import DreamfleetError, install_command
from dreamfleet.transport import Client, Server

_LITTLE_MEMORY, _LITTLE_DISK, _FEW_FILES = 4e9, 5e9, 1024
_PATIENCE = 120.0
# Developers' tools, and what shows in JAX's devices.
_NOT_LISTED = ("dev", "bench", "cuda", "tpu")
# Made as an environment with pixels is made, so that MUJOCO_GL means what it means in a run.
_DRAW = """
import os
from dreamfleet.envs import make_env, noop
env = make_env("dmc:cartpole_balance", obs="pixels", size=(16, 16))
env.step(noop(env.act_space))
print(os.environ["MUJOCO_GL"])
"""
_COMPILE = """
import collections, jax
kinds = collections.Counter(
    f"{x.platform} ({x.device_kind})" if x.platform != "cpu" else "cpu" for x in jax.devices())
assert jax.jit(lambda x: (x @ x).sum())(jax.numpy.ones((8, 8))) == 512
found = ", ".join(f"{n} x {kind}" for kind, n in kinds.items())
print(f"{jax.__version__} on {found}, a compiled function runs")
"""
_STEP = """
from dreamfleet.envs import make_env, noop
env = make_env({task!r}, **{options})
env.step(noop(env.act_space))
{further}
env.close()
"""
_INTO_A_DIRECTORY = """
import pathlib, tempfile
import numpy as np
with tempfile.TemporaryDirectory() as place:
    file = pathlib.Path(place) / "file"
    {write}
    assert sum(each.stat().st_size for each in pathlib.Path(place).rglob("*") if each.is_file())
"""


def _step(task: str) -> tuple[str, str]:
    return f"made and stepped {task}", _STEP.format(task=task, options={}, further="")


TRIES: Mapping[str, tuple[str, str]] = {
    "dmc": _step("dmc:cartpole_balance"),
    "atari": _step("atari:pong"),
    "crafter": _step("crafter:reward"),
    "minigrid": _step("minigrid:Empty-5x5-v0"),
    "classic": (
        "rendered a frame of gym:CartPole-v1",
        _STEP.format(
            task="gym:CartPole-v1",
            options={"render": True},
            further="assert env.render().shape[-1] == 3",
        ),
    ),
    "video": (
        "wrote an MP4",
        _INTO_A_DIRECTORY.format(
            write="from dreamfleet.metrics.frames import write_mp4\n"
            "    write_mp4(file.with_suffix('.mp4'), [np.zeros((64, 64, 3), np.uint8)] * 3)"
        ),
    ),
    "tensorboard": (
        "wrote an event file",
        _INTO_A_DIRECTORY.format(
            write="from dreamfleet.metrics import TensorBoardOutput\n"
            "    output = TensorBoardOutput(file)\n"
            "    output.write(1, {'metric': 1.0}); output.close()"
        ),
    ),
    "plot": (
        "drew a PNG",
        _INTO_A_DIRECTORY.format(
            write="import matplotlib; matplotlib.use('Agg')\n"
            "    from matplotlib import pyplot\n"
            "    pyplot.plot([0, 1]); pyplot.savefig(file)"
        ),
    ),
}
"""How extras are tried, each in a process of its own: what it then has done, and the program."""


@dataclass(frozen=True)
class MachineCheck:
    """One thing that was checked."""

    what: str
    state: Literal["fine", "untried", "absent", "hint", "problem"]
    found: str
    fix: str = ""


def inspect_machine(logdir: Path = Path("runs")) -> Iterator[MachineCheck]:
    """Check Python, JAX, memory, sockets, limits, rendering, extras and the disk for runs."""
    for check in CHECKS:
        yield from check()
    yield from disk(logdir)


def python() -> Iterator[MachineCheck]:
    """Interpreter and package."""
    yield MachineCheck("Python", "untried", f"{platform.python_version()} in {sys.prefix}")
    yield MachineCheck("Dreamfleet", "untried", importlib.metadata.version("dreamfleet"))


def jax() -> Iterator[MachineCheck]:
    """Devices, and a function compiled for them, in a process of its own: a broken driver may hang
    or crash."""
    done = _run([sys.executable, "-c", _COMPILE])
    if isinstance(done, str):
        fix = "Reinstall it (pip install --force-reinstall jax), or set JAX_PLATFORMS=cpu."
        yield MachineCheck("JAX", "problem", done, fix)
        return
    found = done.stdout.strip().splitlines()[-1]
    gpu = shutil.which("nvidia-smi") is not None
    if gpu and "cpu" in found and "gpu" not in found:
        fix = f"There is a GPU that JAX does not use: {install_command('cuda')}"
        yield MachineCheck("JAX", "problem", found, fix)
    else:
        yield MachineCheck("JAX", "fine", found)


def processor_and_memory() -> Iterator[MachineCheck]:
    """Cores, memory, and whether they are enough."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0]
    busy = cores is not None and load > cores
    yield MachineCheck(
        "processor",
        "hint" if busy else "untried",
        f"{cores} cores, load {load:.1f}",
        "Other programs keep it busy; training will be slower." if busy else "",
    )
    memory = psutil.virtual_memory()
    found = f"{memory.available / 1e9:.1f} GB of {memory.total / 1e9:.1f} GB free"
    if memory.available < _LITTLE_MEMORY:
        yield MachineCheck(
            "memory", "hint", found, "Close other programs, or use few environments."
        )
    else:
        yield MachineCheck("memory", "untried", found)


def disk(logdir: Path) -> Iterator[MachineCheck]:
    """Room where runs will be kept, and whether they can be written there."""
    there = logdir.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    found = f"a file was written, {free / 1e9:.1f} GB free in {there}"
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        fix = "Choose a --logdir that can be written to."
        yield MachineCheck(
            "disk", "problem", f"{there} cannot be written to: {error.strerror}", fix
        )
        return
    if free < _LITTLE_DISK:
        yield MachineCheck(
            "disk", "hint", found, "Images fill a replay quickly: lower replay.capacity."
        )
    else:
        yield MachineCheck("disk", "fine", found)


def sockets() -> Iterator[MachineCheck]:
    """A call to ourselves, over a socket file and over a port."""
    for what, address in (("socket files", "ipc://{auto}"), ("ports", "tcp://127.0.0.1:{auto}")):
        try:
            server = Server(address, "doctor")
            server.bind("double", lambda value: 2 * value)
            with server, Client(server.address, "doctor", patience=5.0) as client:
                assert client.double(21).result(5.0) == 42
        except (DreamfleetError, OSError) as error:
            fix = "Look for a firewall, or set TMPDIR to a short path that you may write to."
            yield MachineCheck(what, "problem", f"no call gets through: {error}", fix)
        else:
            yield MachineCheck(what, "fine", "calls get through")


def limits() -> Iterator[MachineCheck]:
    """Limits of this shell that a fleet may reach."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < _FEW_FILES:
        fix = "Run 'ulimit -n 4096' in this shell first, if there are to be many environments."
        yield MachineCheck("open files", "hint", f"{files} at most", fix)
    else:
        yield MachineCheck(
            "open files", "untried", f"{files} at most" if files >= 0 else "no limit"
        )


def rendering() -> Iterator[MachineCheck]:
    """A frame of dm_control, drawn in a process of its own: a broken driver may crash it."""
    if not _installed("dm-control"):
        return
    done = _run([sys.executable, "-c", _DRAW])
    if not isinstance(done, str):
        renderer = done.stdout.strip().splitlines()[-1]
        yield MachineCheck("rendering", "fine", f"dm_control draws with {renderer}")
        return
    fix = "Install EGL (apt install libegl1) or OSMesa (apt install libosmesa6), or use obs=state."
    if chosen := os.environ.get("MUJOCO_GL"):
        fix = f"MUJOCO_GL={chosen} does not work here: unset it, or set it to egl or osmesa."
    elif os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        fix = "The screen that DISPLAY names cannot be drawn on: set MUJOCO_GL to egl or osmesa."
    yield MachineCheck("rendering", "hint", f"dm_control can show no pixels here: {done}", fix)


def extras() -> Iterator[MachineCheck]:
    """The optional parts of the package: which are there, and whether they work."""
    names = importlib.metadata.metadata("dreamfleet").get_all("Provides-Extra") or []
    for extra in (name for name in names if name not in _NOT_LISTED):
        what, needed = f"extra {extra}", list(dict.fromkeys(_packages("dreamfleet", extra)))
        if not all(map(_installed, needed)):
            yield MachineCheck(what, "absent", f"not installed: {install_command(extra)}")
            continue
        versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in needed)
        if extra not in TRIES:
            yield MachineCheck(what, "untried", f"{versions}, not tried")
            continue
        made, program = TRIES[extra]
        done = _run([sys.executable, "-c", program])
        if isinstance(done, str):
            fix = "It is installed but does not work; try to install it again: "
            fix += install_command(extra)
            yield MachineCheck(what, "hint", f"{versions}: {done}", fix)
        else:
            yield MachineCheck(what, "fine", f"{versions}: {made}")


CHECKS: tuple[Callable[[], Iterator[MachineCheck]], ...] = (
    python,
    jax,
    processor_and_memory,
    sockets,
    limits,
    rendering,
    extras,
)


def _packages(name: str, extra: str) -> Iterator[str]:
    """What an extra of a package asks for; where that is an extra of another one, that too.

    What every installation has (gymnasium, of which `classic` asks for an extra) is left out.
    """
    for line in importlib.metadata.requires(name) or []:
        found = re.match(r"([\w.-]+)(?:\[([\w,. -]+)\])?", line)
        if found is None or not re.search(rf"extra == ['\"]{extra}['\"]", line):
            continue
        package, extras = found.groups()
        if not extras:
            yield package
        elif _installed(package):
            for inner in extras.split(","):
                yield from _packages(package, inner.strip())
        else:
            yield package


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
            command,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"ended with code {done.returncode}"
    return done
