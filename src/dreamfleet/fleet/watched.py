"""A function in a process of its own, where foreign code may hang, crash or print.

The two processes share a directory: `calls` says which call of the foreign code is under way,
`report` holds what the person is told, `output` what the foreign code wrote itself, `trace` where
it stood when it was asked (also while it hangs in C) or when it crashed, and `end` what the
function returned or raised.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from rich.console import Console

import dreamfleet
from dreamfleet.envs import EnvError, MissingExtraError, SpaceError, UnknownTaskError
from dreamfleet.envs.diagnose import ONLY_ONE, Call
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.files import temporary_folder
from dreamfleet.fleet.launchers import ONE_THREAD
from dreamfleet.formatting import clock

_CALLS: tuple[Call | None, ...] = (None, "constructor", "reset", "step", "render", "close")
_PACKAGE = str(Path(dreamfleet.__file__).parent)
_LOOK_EVERY, _SPEAK_EVERY, _TRACE_SECONDS = 0.1, 10.0, 5.0
_MOST_LINES, _KEPT_CHARACTERS = 10, 1_000_000
# An error is raised again as the first of these that it is.
_KINDS = (ConfigError, UnknownTaskError, MissingExtraError, SpaceError, EnvError, DreamfleetError)
Say = Callable[[str], None]


class Standing(NamedTuple):
    """The call that is under way."""

    call: Call | None
    done: int
    steps: int

    def __str__(self) -> str:
        match self.call:
            case None:
                return "starting Python"
            case "constructor":
                return f"making the environment{' again' if self.done else ''}"
            case "step":
                return f"step {self.done + 1:,} of {self.steps:,}"
            case _:
                return f"{self.call}()"


class Person(NamedTuple):
    """What the function in the other process speaks to."""

    say: Callable[..., None]
    """Prints text, or what lays itself out."""
    tell: Callable[[Call | None, int, int], None]
    """Takes note of a call of foreign code before it is made; None for no such call."""


class Settings(NamedTuple):
    """How the other process is watched."""

    timeout: float
    setting: str
    say: Say
    console: Console | None
    show_output: bool


class Result(NamedTuple):
    """What became of the function."""

    value: Any
    """What it returned, as JSON has it."""
    output: str
    """What the foreign code wrote; the start, if it is much."""


def run_watched(
    function: bytes,
    *,
    timeout: float,
    setting: str,
    say: Say,
    console: Console | None = None,
    show_output: bool = False,
) -> Result:
    """Run a function in another process, and print what it says.

    Args:
        function: Pickled by cloudpickle; is given a `Person`, returns what JSON knows.
        timeout: Seconds that a call of foreign code may take; 0 for no timeout.
        setting: The name of the timeout.
        say: Takes lines for the person.
        console: Where a line that changes tells what is under way, if it is a terminal; None lets
            `say` take one now and then.
        show_output: Show a part of what the foreign code writes, also if nothing fails.

    Raises:
        EnvError: A call took longer, or ended the process.
        DreamfleetError: What the function raised, by its message.
    """
    settings = Settings(timeout, setting, say, console, show_output)
    with temporary_folder() as place:
        calls = _shared(place)
        reader, writer = os.pipe()
        start = {
            "path": sys.path,
            "width": console.width if console else None,
            "bytes": len(function),
        }
        with (place / "output").open("wb") as output:
            process = subprocess.Popen(
                # The directory is no place to import from: -P.
                [sys.executable, "-P", "-m", __spec__.name, str(place), str(reader)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[reader],
                env={**os.environ, **ONE_THREAD},
                start_new_session=True,
            )
        os.close(reader)
        try:
            with suppress(BrokenPipeError), os.fdopen(writer, "wb", closefd=False) as pipe:
                pipe.write(json.dumps(start).encode() + b"\n" + function)
            value = _watch(process, place, calls, settings)
            with (place / "output").open(errors="replace") as file:
                return Result(value, file.read(_KEPT_CHARACTERS))
        finally:
            with suppress(ProcessLookupError):  # nothing that it has started is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(writer)


def _watch(process: subprocess.Popen[bytes], place: Path, calls: Any, settings: Settings) -> Any:
    timeout, _, say, console, show_output = settings
    begun = changed = spoken = time.monotonic()
    count = -1
    heading = console.status("") if console and console.is_terminal else None
    with (place / "report").open() as report:
        if heading:
            heading.start()
        try:
            while process.poll() is None:
                now = time.monotonic()
                if calls[0] != count:
                    count, changed = int(calls[0]), now
                _print_new(report, say)
                waited = now - changed
                if 0 < timeout < waited and (standing := _standing(calls)).call:
                    raise _hangs(process, place, standing, settings)
                text = f"{_standing(calls)}, {clock(now - begun)}"
                if waited >= _SPEAK_EVERY / 2:
                    text += f" ({waited:.0f} s in this call)"
                if heading:
                    heading.update(text)
                elif now - spoken >= _SPEAK_EVERY:
                    spoken = now
                    say(text)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_EVERY)
        finally:
            if heading:
                heading.stop()
            _print_new(report, say)
    end = json.loads((place / "end").read_text()) if (place / "end").exists() else {}
    if show_output or "value" not in end:
        _print_output(place, say)
    if not end:
        raise _ended(process.returncode, place, _standing(calls), say)
    if "error" in end:
        raise next(kind for kind in _KINDS if kind.__name__ == end["kind"])(end["error"])
    return end["value"]


def _print_new(report: Any, say: Say) -> None:
    if text := report.read():
        say(text.removesuffix("\n"))


def _print_output(place: Path, say: Say) -> None:
    """What the foreign code wrote, if it is not too much."""
    with (place / "output").open(errors="replace") as file:  # it may be larger than memory
        first = list(islice(file, _MOST_LINES))
        last: deque[str] = deque(maxlen=_MOST_LINES)
        left_out = -_MOST_LINES
        for line in file:
            last.append(line)
            left_out += 1
    if not first:
        return
    more = [f"... {left_out:,} more lines ..."] if left_out > 0 else []
    shown = [f"  {line.rstrip()[:500]}" for line in (*first, *more, *last)]
    say("\n".join(["\nThe environment wrote:", *shown]))


def _hangs(
    process: subprocess.Popen[bytes], place: Path, standing: Standing, settings: Settings
) -> EnvError:
    trace = place / "trace"
    before, end = trace.stat().st_size, time.monotonic() + _TRACE_SECONDS
    process.send_signal(signal.SIGUSR1)
    while process.poll() is None and time.monotonic() < end:
        size = trace.stat().st_size
        time.sleep(_LOOK_EVERY)
        if before < size == trace.stat().st_size:  # it has been written to the end
            break
    _print_output(place, settings.say)
    shown = _print_trace(place, settings.say)
    second = standing.call == "constructor" and standing.done
    return EnvError(
        f"The environment hangs: {_name(standing)} took more than {settings.timeout:g} s"
        f"{', and stands where the traceback above says' if shown else ''}. Fix it, or raise "
        f"{settings.setting} if it is that slow.{f' {ONLY_ONE}' if second else ''}"
    )


def _ended(code: int, place: Path, standing: Standing, say: Say) -> EnvError:
    _print_trace(place, say)
    how = f"code {code}" if code >= 0 else signal.Signals(-code).name
    return EnvError(
        f"The environment ended its process with {how} in {_name(standing)}: a crash in compiled "
        "code, os._exit, or the machine ran out of memory."
    )


def _name(standing: Standing) -> str:
    match standing.call:
        case None:
            return "its start"
        case "constructor":
            return f"the constructor{' of a second environment' if standing.done else ''}"
        case "step":
            return f"step() number {standing.done + 1:,}"
        case _:
            return f"{standing.call}()"


def _print_trace(place: Path, say: Say) -> bool:
    trace = own_frames((place / "trace").read_text(errors="replace"))
    if trace:
        say(f"\n{trace}\n")
    return bool(trace)


def own_frames(trace: str) -> str:
    """What faulthandler wrote (the innermost frame first), without the frames of this package that
    called the person's own code, and without threads that ran nothing else."""
    shown = []
    for thread in trace.strip().split("\n\n"):
        title, _, frames = thread.partition("\n")
        own, ours, _ = frames.partition(f'  File "{_PACKAGE}')
        if own or not ours:
            shown.append(f"{title}\n{own}".rstrip())
    return "\n\n".join(shown) or trace.strip()


def _shared(place: Path) -> Any:
    """A count of calls, then the call, the steps made and the steps that there will be."""
    for name in ("report", "trace"):
        (place / name).touch()
    return np.memmap(place / "calls", np.int64, "w+", shape=(4,))


def _standing(calls: Any) -> Standing:
    return Standing(_CALLS[int(calls[1])], int(calls[2]), int(calls[3]))


def _end_with_parent(pipe: int) -> None:
    os.read(pipe, 1)
    os.killpg(os.getpid(), signal.SIGKILL)


def main() -> None:
    """What the other process does."""
    place, pipe = Path(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(pipe, "rb", closefd=False) as file:
        start = json.loads(file.readline())
        payload = file.read(start["bytes"])
    threading.Thread(target=_end_with_parent, args=[pipe], daemon=True).start()
    sys.path[:] = start["path"]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what hangs or crashes has said something
    calls = np.memmap(place / "calls", np.int64, "r+", shape=(4,))
    with (place / "trace").open("a") as trace, (place / "report").open("a") as report:
        faulthandler.enable(trace)
        faulthandler.register(signal.SIGUSR1, trace)
        console = Console(file=report, highlight=False, width=start["width"])

        def tell(call: Call | None, done: int, steps: int) -> None:
            calls[1:] = _CALLS.index(call), done, steps
            calls[0] += 1

        def speak(message: Any) -> None:
            console.print(message, markup=False, soft_wrap=isinstance(message, str))
            report.flush()

        try:
            end = {"value": cloudpickle.loads(payload)(Person(speak, tell))}
        except DreamfleetError as error:
            kinds = [kind.__name__ for kind in _KINDS if issubclass(type(error), kind)]
            end = {"error": str(error), "kind": kinds[0]}
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        (place / "end").write_text(json.dumps(end))
        os._exit(0)  # threads that the foreign code left behind must not keep the process


if __name__ == "__main__":
    main()
