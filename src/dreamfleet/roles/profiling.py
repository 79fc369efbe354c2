"""`profile`: where the threads of a role spend their time, looked at again and again.

Looking costs a core about two percent, and sees all of its threads, unlike Python's own profiler,
which follows one and makes every call slower. What is counted is time, busy or waiting; how much of
it was spent on a processor is told for each thread.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import psutil

from dreamfleet.config import RunConfig
from dreamfleet.files import atomic_write

_EVERY_SECONDS = 0.02
_WRITE_SECONDS = 30.0
_MOST_ROWS = 20

Stack = tuple[CodeType, ...]
"""Functions, the innermost first."""


def profile_folder(args: RunConfig) -> Path:
    """Where the profiles of a run are."""
    return args.logdir / "profile"


def how_to_look(args: RunConfig) -> str:
    """For the person, at the end of a run."""
    folder = profile_folder(args)
    words = (
        f"Profiles are in {folder}. {folder}/agent.txt and those of the other workers tell in "
        "which functions their threads were; https://www.speedscope.app draws the .folded files as "
        "flame graphs."
    )
    if not (folder / "jax").is_dir():  # another agent, or too few updates
        return words
    return (
        f"{words} {folder}/jax has a few training steps as JAX saw them: https://ui.perfetto.dev "
        "opens its perfetto_trace.json.gz, and after 'pip install xprof' "
        f"'xprof --logdir {folder}/jax' shows all of it."
    )


def profiled(function: Callable[[], Any], name: str, args: RunConfig) -> None:
    """Run a worker, and write its profile now and then, and when it ends."""
    ended = threading.Event()
    sampler = Sampler(profile_folder(args) / name)
    thread = threading.Thread(target=sampler.run, args=[ended], name="profile", daemon=True)
    thread.start()
    try:
        function()
    finally:
        ended.set()
        thread.join()


class Sampler:
    """Counts where all other threads of this process are.

    Args:
        path: Of the files without their suffixes: `.txt` for people, `.folded` for flame graphs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts: Counter[tuple[str, Stack]] = Counter()
        self._processor: dict[int, tuple[str, float]] = {}

    def run(self, ended: threading.Event) -> None:
        """Look until the event is set, then write."""
        looks = 0
        while not ended.wait(_EVERY_SECONDS):
            self.look()
            looks += 1
            if looks * _EVERY_SECONDS >= _WRITE_SECONDS:
                looks = 0
                self.write()
        self.write()

    def look(self) -> None:
        """Count once."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        me = threading.get_ident()
        for ident, frame in sys._current_frames().items():
            if ident != me:
                self._counts[names.get(ident, "another thread"), _stack(frame)] += 1

    def write(self) -> None:
        """Write what was counted so far; what cannot be written ends no role."""
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        for thread in psutil.Process().threads():
            name = names.get(thread.id, self._processor.get(thread.id, ("", 0.0))[0])
            seconds = thread.user_time + thread.system_time
            self._processor[thread.id] = (name or "threads of libraries", seconds)
        try:
            atomic_write(self._path.with_name(f"{self._path.name}.txt"), self._table())
            atomic_write(self._path.with_name(f"{self._path.name}.folded"), self._folded())
        except OSError:
            return

    def _folded(self) -> str:
        """A line for each stack, the outermost function first, and how often it was seen."""
        lines = [
            f"{thread};{';'.join(_name(code) for code in reversed(stack))} {count}"
            for (thread, stack), count in self._counts.most_common()
        ]
        return "\n".join(lines) + "\n"

    def _table(self) -> str:
        processor = dict.fromkeys((thread for thread, _ in self._counts), 0.0)
        for name, seconds in self._processor.values():
            processor[name] = processor.get(name, 0.0) + seconds
        busiest = sorted(processor, key=processor.__getitem__, reverse=True)
        return "\n".join(self._of_thread(thread, processor[thread]) for thread in busiest)

    def _of_thread(self, thread: str, processor: float) -> str:
        inside: Counter[CodeType] = Counter()
        below: Counter[CodeType] = Counter()
        for (name, stack), count in self._counts.items():
            if name == thread:
                inside[stack[0]] += count
                below.update(dict.fromkeys(stack, count))
        total = max(1, inside.total())
        lines = [f"{thread}: {processor:.1f} s on a processor"]
        if inside:
            lines.append("  in it  below  function (share of the times that somebody looked)")
        for code, count in below.most_common(_MOST_ROWS):
            lines.append(f"{inside[code] / total:7.1%}{count / total:7.1%}  {_name(code)}")
        return "\n".join(lines) + "\n"


def _stack(frame: FrameType | None) -> Stack:
    found = []
    while frame is not None:
        found.append(frame.f_code)
        frame = frame.f_back
    return tuple(found)


def _name(code: CodeType) -> str:
    """A function, and where it is."""
    place = Path(code.co_filename)
    return f"{code.co_qualname} ({place.parent.name}/{place.name}:{code.co_firstlineno})"
