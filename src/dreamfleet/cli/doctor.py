"""`dreamfleet doctor`: what this machine has for training, and what it lacks.

A finding is `fine` only if it was tried: a function compiled, a file written, a call made, an
environment stepped, a frame rendered. What was only looked up is `untried`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.table import Table
from rich.text import Text

from dreamfleet.cli.check_env import cores
from dreamfleet.cli.console import out, say
from dreamfleet.envs import make_env, noop
from dreamfleet.errors import DreamfleetError, install_command
from dreamfleet.fleet.isolated import Reporter, run_isolated
from dreamfleet.memory import memory_free, memory_limit
from dreamfleet.metrics import TensorBoardOutput
from dreamfleet.metrics.frames import write_mp4
from dreamfleet.plotting import make_figure, save_figure
from dreamfleet.transport import Client, Server

_LITTLE_MEMORY, _LITTLE_DISK, _FEW_FILES = 4e9, 5e9, 1024
_TIMEOUT_SECONDS = 120.0
# Developers' tools, and what shows in JAX's devices.
_NOT_LISTED = ("dev", "bench", "cuda", "tpu")
_MARKS = {
    "fine": Text("✓", "green"),
    "untried": Text("·", "dim"),
    "absent": Text("-", "dim"),
    "hint": Text("!", "yellow"),
    "problem": Text("✗", "red"),
}


@dataclass(frozen=True)
class Check:
    """One thing that was checked."""

    what: str
    state: Literal["fine", "untried", "absent", "hint", "problem"]
    found: str
    fix: str = ""


def doctor(logdir: Path = Path("runs")) -> str:
    """Check this machine: Python, JAX, memory, disk, rendering, sockets, limits, extras.

    A tick means that it was tried (an environment was made and stepped, for example), a dot that it
    was only looked up. Every problem comes with its fix.

    Args:
        logdir: Where runs will be kept.
    """
    with out.status("testing what is installed: about half a minute"):
        findings = [*machine(), *jax(), *disk(logdir), *sockets(), *rendering(), *extras()]
    table = Table.grid(padding=(0, 2))
    for each in findings:
        words = f"{each.found}\n{each.fix}" if each.fix else each.found
        table.add_row(_MARKS[each.state], each.what, words)
    say(table)
    say("\n✓ works (tried)   · looked up, not tried   - not installed   ! hint   ✗ problem")
    if problems := sum(each.state == "problem" for each in findings):
        count = "is 1 problem" if problems == 1 else f"are {problems} problems"
        raise DreamfleetError(f"There {count}, see above.")
    return "This machine is ready for training."


def machine() -> Iterator[Check]:
    """What is only looked up, and whether it is enough."""

    def enough(what: str, is_enough: bool, found: str, fix: str) -> Check:
        return Check(what, "untried", found) if is_enough else Check(what, "hint", found, fix)

    yield Check("Python", "untried", f"{platform.python_version()} in {sys.prefix}")
    yield Check("Dreamfleet", "untried", importlib.metadata.version("dreamfleet"))
    load, free = os.getloadavg()[0], memory_free()
    fix = "Other programs keep it busy; training will be slower."
    yield enough("CPU", load <= cores(), f"{cores()} cores, load {load:.1f}", fix)
    found = f"{free / 1e9:.1f} GB of {memory_limit() / 1e9:.1f} GB free"
    fix = "Close other programs, or use few environments."
    yield enough("memory", free >= _LITTLE_MEMORY, found, fix)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    found = f"{files} at most" if files >= 0 else "no limit"
    fix = "Run 'ulimit -n 4096' in this shell before you start many environments."
    yield enough("open files", not 0 <= files < _FEW_FILES, found, fix)


def jax() -> Iterator[Check]:
    """Devices, and a function compiled for them; a broken driver may hang or crash."""
    found, works = attempt(compile_function)
    fix = ""
    if not works:
        fix = "Reinstall it (pip install --force-reinstall jax), or set JAX_PLATFORMS=cpu."
    elif shutil.which("nvidia-smi") and "cpu" in found and "gpu" not in found:
        fix = f"There is a GPU that JAX does not use: {install_command('cuda')}"
    yield Check("JAX", "problem" if fix else "fine", found, fix)


def disk(logdir: Path) -> Iterator[Check]:
    """Space where runs will be kept, and whether they can be written there."""
    there = next(each for each in (logdir, *logdir.absolute().parents) if each.exists()).absolute()
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        found = f"{there} cannot be written to: {error.strerror}"
        yield Check("disk", "problem", found, "Choose a --logdir that can be written to.")
        return
    free = shutil.disk_usage(there).free
    found = f"a file was written, {free / 1e9:.1f} GB free in {there}"
    fix = "Images fill a replay quickly: lower replay.capacity."
    little = free < _LITTLE_DISK
    yield Check("disk", "hint" if little else "fine", found, fix if little else "")


def sockets() -> Iterator[Check]:
    """A call to this process, over a socket file and over a port."""
    for what, address in (("socket files", "ipc://{auto}"), ("ports", "tcp://127.0.0.1:{auto}")):
        try:
            server = Server(address, "doctor")
            server.bind("double", lambda value: 2 * value)
            with server, Client(server.address, "doctor", patience=5.0) as client:
                assert client.double(21).result(5.0) == 42
        except (DreamfleetError, OSError) as error:
            fix = "Check the firewall, or set TMPDIR to a short path that can be written to."
            yield Check(what, "problem", f"no call gets through: {error}", fix)
        else:
            yield Check(what, "fine", "calls get through")


def rendering() -> Iterator[Check]:
    """A frame of dm_control; a broken driver may crash."""
    if not _installed("dm-control"):
        return
    found, works = attempt(draw)
    if works:
        yield Check("rendering", "fine", f"dm_control renders with {found}")
        return
    fix = "Install EGL (apt install libegl1) or OSMesa (apt install libosmesa6), or use obs=state."
    if chosen := os.environ.get("MUJOCO_GL"):
        fix = f"MUJOCO_GL={chosen} does not work here: unset it, or set it to egl or osmesa."
    elif os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        fix = "The display that DISPLAY names cannot be used: set MUJOCO_GL to egl or osmesa."
    yield Check("rendering", "hint", f"dm_control renders no pixels here: {found}", fix)


def extras() -> Iterator[Check]:
    """The optional parts of the package: which are installed, and whether they work."""
    names = importlib.metadata.metadata("dreamfleet").get_all("Provides-Extra") or []
    for extra in (name for name in names if name not in _NOT_LISTED):
        what, needed = f"extra {extra}", _packages(extra)
        if not all(map(_installed, needed)):
            yield Check(what, "absent", f"not installed: {install_command(extra)}")
            continue
        versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in needed)
        if extra not in TRIES:
            yield Check(what, "untried", f"{versions}, not tried")
            continue
        found, works = attempt(TRIES[extra])
        fix = f"It is installed but does not work; install it again: {install_command(extra)}"
        yield Check(what, "fine" if works else "hint", f"{versions}: {found}", "" if works else fix)


def _packages(extra: str, package: str = "dreamfleet") -> list[str]:
    """What an extra of a package requires."""
    if extra == "classic":  # an extra of gymnasium, which itself is always installed
        return _packages("classic-control", "gymnasium")
    lines = importlib.metadata.requires(package) or []
    own = [line for line in lines if re.search(rf"extra == ['\"]{extra}['\"]", line)]
    return [re.split(r"[^\w.-]", line)[0] for line in own]


def _installed(name: str) -> bool:
    return any(True for _ in importlib.metadata.distributions(name=name))


# --- attempts, each in a child process -----------------------------------------------------------


def attempt(function: Callable[[], str]) -> tuple[str, bool]:
    """What the function returns, or its error in one line; and whether it worked."""

    def run(reporter: Reporter) -> tuple[str, bool]:
        reporter.call("check")
        try:
            return function(), True
        except Exception as error:  # whatever a package raises that does not work
            return f"{type(error).__name__}: {error}", False

    wait: dict[str, Any] = {"timeout": _TIMEOUT_SECONDS, "setting": "the timeout"}
    try:
        found, works = run_isolated(run, say=lambda _: None, **wait).value
    except DreamfleetError as error:
        return str(error), False
    return found, works


def compile_function() -> str:
    """Compile a function for all devices of JAX."""
    import jax

    devices: Any = jax.devices()
    kinds = Counter(
        each.platform if each.platform == "cpu" else f"{each.platform} ({each.device_kind})"
        for each in devices
    )
    assert jax.jit(lambda x: (x @ x).sum())(jax.numpy.ones((8, 8))) == 512
    found = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return f"{jax.__version__} on {found}, a compiled function runs"


def draw() -> str:
    """Render a frame of dm_control as a run does; returns the renderer."""
    step("dmc:cartpole_balance", obs="pixels", size=(16, 16))
    return os.environ["MUJOCO_GL"]


def step(task: str, **options: Any) -> str:
    """Make an environment and step it."""
    env = make_env(task, **options)
    env.step(noop(env.act_space))
    frame = env.render() if options.get("render") else None
    env.close()
    return f"made and stepped {task}" if frame is None else f"rendered a frame of {task}"


def write_file(name: str, write: Callable[[Path], object]) -> str:
    """Write a file into a temporary directory."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / name)
        assert any(each.stat().st_size for each in Path(folder).rglob("*") if each.is_file())
    return f"wrote {name}"


def _write_events(path: Path) -> None:
    output = TensorBoardOutput(path)
    output.write(1, {"metric": 1.0})
    output.close()


TRIES: Mapping[str, Callable[[], str]] = {
    "dmc": partial(step, "dmc:cartpole_balance"),
    "atari": partial(step, "atari:pong"),
    "crafter": partial(step, "crafter:reward"),
    "minigrid": partial(step, "minigrid:Empty-5x5-v0"),
    "classic": partial(step, "gym:CartPole-v1", render=True),
    "video": partial(
        write_file, "video.mp4", partial(write_mp4, frames=[np.zeros((64, 64, 3), np.uint8)] * 3)
    ),
    "tensorboard": partial(write_file, "events", _write_events),
    "plot": partial(write_file, "plot.png", lambda path: save_figure(make_figure(1, 1), path)),
}
"""How extras are tried."""
