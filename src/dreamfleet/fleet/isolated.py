"""Probe environments, and run other user code, in a child process: it may hang, crash or print.

The child is a worker of the local launcher. It appends JSON lines to a file: each call of user code
before it is made, text to print, and its result or error. A call that takes too long is ended by
faulthandler's timer, which also works while C code holds the GIL, with a traceback in the log.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import cloudpickle
import psutil
from rich.console import Console

import dreamfleet
from dreamfleet.envs import EnvError, MissingExtraError, SpaceError, UnknownTaskError
from dreamfleet.envs.diagnose import (
    ONLY_ONE,
    Call,
    CurrentCall,
    Tell,
    different_spaces,
    own_traceback,
    try_out,
)
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.files import temporary_folder
from dreamfleet.fleet.launchers import ONE_THREAD, RunningWorker, Worker
from dreamfleet.fleet.launchers.local import LocalLauncher
from dreamfleet.formatting import clock
from dreamfleet.metrics.outputs.jsonl import JsonlTail
from dreamfleet.roles.runtime import end_process_after, pickled, stop_event
from dreamfleet.spaces import Space, spaces_from_json, spaces_to_json

_SPACES = ("obs_space", "act_space")
_PACKAGE = str(Path(dreamfleet.__file__).parent)
_SAFE_PATH = "PYTHONSAFEPATH"
_POLL_SECONDS, _SAY_SECONDS = 0.1, 10.0
_SHOWN_LINES, _KEPT_CHARACTERS = 10, 1_000_000
# An error is raised again as the first of these that it is.
_ERRORS: tuple[type[DreamfleetError], ...] = (
    ConfigError, UnknownTaskError, MissingExtraError, SpaceError, EnvError, DreamfleetError
)  # fmt: skip
Say = Callable[[str], None]


class Reporter:
    """What the function in the child tells its parent, through a file."""

    def __init__(self, file: TextIO, timeout: float) -> None:
        self._file, self._timeout = file, timeout
        self.current = CurrentCall()

    def call(self, name: Call | None, done: int = 0, steps: int = 0) -> None:
        """Announce a call of user code, which is timed; None if that was the last one for now."""
        self.current = CurrentCall(name, done, steps)
        self.write({"call": self.current})
        end_process_after(self._timeout if name else 0)

    def say(self, text: str) -> None:
        """Have the parent print text."""
        self.write({"say": text})

    def write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + "\n")


class Result(NamedTuple):
    """What the function returned, as JSON has it, and the start of what user code printed."""

    value: Any
    output: str


def run_isolated(
    function: Callable[[Reporter], Any],
    *,
    timeout: float,
    setting: str,
    say: Say,
    console: Console | None = None,
    show_output: bool = False,
) -> Result:
    """Run a function in a child process.

    Args:
        function: Returns what JSON can hold.
        timeout: Seconds that a call of user code may take; 0 for no timeout.
        setting: The name of the timeout.
        say: Takes lines to print.
        console: Shows the current call if it is a terminal; else `say` gets a line now and then.
        show_output: Show a part of what user code prints even if nothing fails.

    Raises:
        EnvError: A call timed out, raised, or ended the process.
        DreamfleetError: What the function raised.
    """
    with temporary_folder() as folder, LocalLauncher(folder) as launcher:
        events = folder / "events.jsonl"
        task = partial(_run, function, events, timeout)
        # Output is written before a crash; modules of this directory hide none of Python's.
        variables = {**ONE_THREAD, "PYTHONUNBUFFERED": "1", _SAFE_PATH: "1"}
        worker = Worker("probe", "env", task, variables)
        launcher.prepare([worker])
        process = launcher.start(worker)
        try:
            code, call, end = _follow(process, JsonlTail(events), say, console)
        finally:
            process.kill()
            process.wait()
        log = launcher.log_file(worker).read_text(errors="replace")
    # What faulthandler writes comes last.
    output, *dump = re.split(r"^(?=Timeout \(.*\)!\n|Fatal Python error: )", log, flags=re.M)
    if show_output or "value" not in end:
        _print_output(output, say)
    if trace := end.get("trace") or user_frames("".join(dump)):
        say(f"\n{trace}\n")
    if "value" in end:
        return Result(end["value"], output[:_KEPT_CHARACTERS])
    if "error" in end:
        raise next(kind for kind in _ERRORS if kind.__name__ == end["kind"])(end["error"])
    if dump and dump[0].startswith("Timeout"):
        hint = f" {ONLY_ONE}" if call.name == "constructor" and call.done else ""
        raise EnvError(
            f"{call.title} did not return within {timeout:g} s; the traceback above shows where it "
            f"hangs. Fix it, or raise {setting} if it is that slow.{hint}"
        )
    how = f"code {code}" if code >= 0 else signal.Signals(-code).name
    raise EnvError(
        f"The process ended with {how} in {call}: a crash in compiled code, os._exit, or the "
        "machine ran out of memory."
    )


def _follow(
    process: RunningWorker, events: JsonlTail, say: Say, console: Console | None
) -> tuple[int, CurrentCall, dict[str, Any]]:
    """Show progress until the child ends: its exit code, its last call, its result or error."""
    call, end = CurrentCall(), dict[str, Any]()
    begun = changed = said = time.monotonic()
    terminal = console if console and console.is_terminal else None
    with terminal.status("") if terminal else nullcontext() as heading:
        while True:
            code = process.wait(_POLL_SECONDS)  # first: no event follows the end
            now = time.monotonic()
            for event in events.read():
                if "call" in event:
                    call, changed = CurrentCall(*event["call"]), now
                elif "say" in event:
                    say(event["say"])
                else:
                    end = event
            if code is not None:
                return code, call, end
            text = f"Waiting for {call}, {clock(now - begun)}"
            if now - changed >= _SAY_SECONDS / 2:
                text += f" ({now - changed:.0f} s in this call)"
            if heading:
                heading.update(text)
            elif now - said >= _SAY_SECONDS:
                said = now
                say(text)


def _print_output(output: str, say: Say) -> None:
    """The first and the last lines that user code printed."""
    lines = output.splitlines()
    if left_out := max(0, len(lines) - 2 * _SHOWN_LINES):
        lines[_SHOWN_LINES:-_SHOWN_LINES] = [f"... {left_out:,} more lines ..."]
    if lines:
        say("\n".join(["\nThe environment printed:", *(f"  {line[:500]}" for line in lines)]))


def user_frames(trace: str) -> str:
    """What faulthandler wrote (the innermost frame first), without the frames of this package that
    called user code, and without the threads of this package."""
    shown = []
    for thread in re.sub(r"^Timeout .*\n", "", trace).strip().split("\n\n"):
        title, *frames = thread.splitlines() or [""]
        own = list(takewhile(lambda frame: f'File "{_PACKAGE}' not in frame, frames))
        if own == frames or any("/threading.py" not in frame for frame in own):
            shown.append("\n".join([title, *own]))
    return "\n\n".join(shown) or trace.strip()


def _run(function: Callable[[Reporter], Any], events: Path, timeout: float) -> None:
    """What the child does."""
    os.environ.pop(_SAFE_PATH)  # not for programs that user code starts
    stop_event()  # unhandled, the stop signal would end this process and not its children
    with events.open("a", buffering=1) as file:
        reporter = Reporter(file, timeout)
        try:
            end = {"value": function(reporter)}
        except DreamfleetError as error:
            kind = next(kind.__name__ for kind in _ERRORS if isinstance(error, kind))
            end = {"error": str(error), "kind": kind}
            cause = error.__cause__
            if isinstance(error, EnvError) and cause and not isinstance(cause, DreamfleetError):
                end["trace"] = own_traceback(cause)
        except (Exception, SystemExit) as error:
            what = f"{reporter.current.title} raised {type(error).__name__}: {error}".rstrip(".")
            what += ". Fix it; check-env tells more about an environment."
            end = {"error": what, "kind": EnvError.__name__, "trace": own_traceback(error)}
        end_process_after(0)
        reporter.write(end)
    os._exit(0)  # threads of user code must not keep the process


# --- the environment of a run ---------------------------------------------------------------------


class EnvProbe(NamedTuple):
    """What was found when an environment was made."""

    obs_space: Mapping[str, Space]
    act_space: Mapping[str, Space]
    bytes: int = 0
    """Memory that the first one of a process takes, with the code that it loads."""
    further_bytes: int = 0
    """Memory that another one takes."""
    notes: Sequence[str] = ()
    """What was recognised or assumed, a sentence each."""
    log_info: Sequence[str] = ()
    """Names in its `info` that ask to be logged."""
    output: str = ""

    @property
    def spaces(self) -> tuple[Mapping[str, Space], Mapping[str, Space]]:
        return self.obs_space, self.act_space


def probe_env(
    make_env: Callable[[int], Any],
    *,
    both: bool,
    number: int = 0,
    tell: Tell = lambda *_: None,
    second: Callable[[], EnvProbe] | None = None,
) -> EnvProbe:
    """Make the environment of a number, reset it, take one step, and close it. With `both` a second
    one is probed meanwhile, by `second` or here. `tell` is called before each call.

    Raises:
        EnvError: It breaks the contract, or there can be no second one.
        SpaceError: A space and a value disagree, or the two environments have different spaces.
    """
    me = psutil.Process()
    before = me.memory_info().rss
    tell("constructor", number, 0)
    env = make_env(number)
    try:
        try_out(env, tell)
        taken = max(0, me.memory_info().rss - before)
        notes, names = list(getattr(env, "notes", ())), tuple(getattr(env, "unlogged", ()))
        probe = EnvProbe(env.obs_space, env.act_space, taken, 0, notes, names)
        if both:
            here = partial(probe_env, make_env, both=False, number=1, tell=tell)
            probe = probe._replace(further_bytes=_probe_second(probe, second or here).bytes)
    except BaseException:
        with suppress(Exception):  # the first error counts
            env.close()
        raise
    tell("close", number, 0)
    env.close()
    return probe


def _probe_second(first: EnvProbe, probe: Callable[[], EnvProbe]) -> EnvProbe:
    """Probe a second environment while the first one exists."""
    try:
        second = probe()
    except (Exception, SystemExit) as error:
        what = str(error) if isinstance(error, DreamfleetError) else repr(error)
        raise EnvError(
            f"A second environment failed beside the first: {what.rstrip('.')}. {ONLY_ONE}"
        ) from error
    if different := different_spaces(first[:2], second[:2]):
        raise SpaceError(different)
    return second


def probe_in_subprocess(
    make_env: Callable[[int], Any] | bytes,
    *,
    both: bool,
    timeout: float,
    say: Say,
    apart: bool = False,
    number: int = 0,
) -> EnvProbe:
    """Do the same in a child process, in another one for the second environment if `apart`.

    Raises:
        ConfigError: `make_env` cannot be pickled.
        EnvError: The environment raised, hangs, or ended its process.
        DreamfleetError: It cannot be made as configured.
    """
    # Unpickled as a part of the constructor: that imports user code.
    make = make_env if isinstance(make_env, bytes) else pickled("the environment", make_env)

    def child(reporter: Reporter) -> dict[str, Any]:
        def second() -> EnvProbe:
            reporter.call(None)  # that process has timeouts of its own
            found = probe_in_subprocess(
                make, both=False, timeout=timeout, say=reporter.say, number=1
            )
            sys.stdout.write(found.output)
            return found

        reporter.call("constructor", number)
        beside = second if apart else None
        found = probe_env(
            cloudpickle.loads(make), both=both, number=number, tell=reporter.call, second=beside
        )
        return {**found._asdict(), **{key: spaces_to_json(getattr(found, key)) for key in _SPACES}}

    found, output = run_isolated(child, timeout=timeout, setting="env_timeout", say=say)
    spaces = {key: spaces_from_json(found[key]) for key in _SPACES}
    return EnvProbe(**{**found, **spaces, "output": output})
