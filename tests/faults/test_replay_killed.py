"""A writer is killed anywhere: nothing acknowledged is missing, nothing is there twice."""

from __future__ import annotations

import dis
import functools
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from replay_history import CAPACITY, LENGTH, History, add, audit, open_replay
from replay_model import all_items, step

import dreamfleet.replay

# The modules that change files; stepping through the others would only take longer.
WRITERS = {
    str(Path(dreamfleet.replay.__file__).parent / name)
    for name in (
        "reopening.py",
        "table.py",
        "storage/files.py",
        "storage/journal.py",
        "storage/memory.py",
        "storage/store.py",
    )
}
FILLED = 112
CUT_SHORT = 126  # a batch that begins an episode before the one before it has ended


def test_killed_between_any_two_instructions(memory_path: Path) -> None:
    """What lies in the files after every single bytecode instruction of an insert is opened.

    Files and mappings share their pages, so a copy of the files at that moment is what a SIGKILL at
    that moment leaves behind.
    """
    history = History()
    live, copy = memory_path / "live", memory_path / "copy"
    moments = 0

    def reopen(acknowledged: int) -> None:
        nonlocal moments
        moments += 1
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(live, copy)
        with open_replay(copy) as reopened:
            assert reopened.skipped_files == {}
            audit(reopened, history, acknowledged)
        # What a reopened replay wrote must be just as good when it is opened once more.
        with open_replay(copy) as again:
            audit(again, history, acknowledged + 2)
        shutil.rmtree(copy)
        shutil.copytree(live, copy)
        audit_without_the_writer(copy, history, acknowledged)

    def add_watched(number: int) -> None:
        at_every_change(live, lambda: add(replay, history, number), lambda: reopen(number))

    with open_replay(live) as replay:
        # The first batches of all, and later ones that fill, make and evict chunks.
        for number in range(3):
            add_watched(number)
        for number in range(3, FILLED):
            add(replay, history, number)
        before = set(live.glob("*.chunk"))
        for number in range(FILLED, FILLED + 4):
            add_watched(number)
        after = set(live.glob("*.chunk"))
        for number in range(FILLED + 4, CUT_SHORT):
            add(replay, history, number)
        add_watched(CUT_SHORT)
    assert history.batches[CUT_SHORT][0]["is_first"].any()
    assert before - after, "the batches should have evicted a chunk"
    assert after - before, "the batches should have made a chunk"
    assert moments > 80


@pytest.mark.parametrize("journal", ["kept", "lost", "of another boot"])
def test_killed_while_it_reopens(
    memory_path: Path, journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a batch that was never committed, with a journal that has to be replaced, and with a
    batch that was not synced before the power was cut."""
    history = History()
    live, copy = memory_path / "live", memory_path / "copy"
    moments = 0
    with open_replay(memory_path / "written") as replay:
        for number in range(12):
            add(replay, history, number)
        replay.sync()
        shutil.copy(memory_path / "written" / "journal", memory_path)
        add(replay, history, 12)
        shutil.copytree(memory_path / "written", live)
    held = 12
    if journal == "lost":
        (live / "journal").unlink()
        held = 13
    elif journal == "kept":
        shutil.copy(memory_path / "journal", live)
    else:
        monkeypatch.setattr("dreamfleet.replay.storage.journal.BOOT_ID", memory_path / "boot")
        (memory_path / "boot").write_text("another")

    def check() -> None:
        nonlocal moments
        moments += 1
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(live, copy)
        with open_replay(copy) as reopened:
            assert reopened.skipped_files == {}
            assert all_items(reopened) == history.items(held)

    at_every_change(live, lambda: open_replay(live).close(), check)
    assert moments > 2


@pytest.mark.parametrize("first", [0, 7])
def test_killed_while_it_copies_another_run(memory_path: Path, first: int) -> None:
    """All of it, or the rest: whatever was copied is there once, and the next copy continues."""
    other, live, copy = memory_path / "other", memory_path / "live", memory_path / "copy"
    history = History()
    mine = [tuple(range(tag, tag + LENGTH)) for tag in range(1000, 1003)]
    before = mine + history.items(first)
    loaded = []

    def check() -> None:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(live, copy)
        with open_replay(copy) as reopened:
            assert reopened.skipped_files == {}
            loaded.append(len(reopened))
            assert all_items(reopened) == everything[: len(reopened)]
            reopened.load_directory(other)
            assert all_items(reopened) == everything

    with open_replay(live) as replay, open_replay(other) as source:
        for tag in range(1000, 1003 + LENGTH - 1):
            replay.add(step(tag))
        for number in range(11):
            if number == first > 0:
                replay.load_directory(other)
                assert all_items(replay) == before
            add(source, history, number)
        everything = mine + history.items(11)
        at_every_change(live, lambda: replay.load_directory(other), check)
    assert loaded == sorted(loaded)
    assert len(set(loaded)) > 2, "some copies were interrupted in the middle"
    assert {loaded[0], loaded[-1]} == {len(before), len(everything)}


def audit_without_the_writer(directory: Path, history: History, acknowledged: int) -> None:
    """The writer does not return; what it left unfinished never becomes valid through others."""
    with open_replay(directory) as replay:
        before = all_items(replay) if len(replay) else []
        for tag in range(12):
            replay.add(step(tag, 99), 99)
    with open_replay(directory) as replay:
        items = all_items(replay)
        news = [tuple(range(tag, tag + LENGTH)) for tag in range(8)]
        assert items == (before + news)[-CAPACITY:]
        held = acknowledged + (before == history.items(acknowledged + 1))
        if history.items(acknowledged) != history.items(acknowledged + 1):
            assert bool(add(replay, history, acknowledged)) == (held == acknowledged)


def at_every_change(directory: Path, action: Callable[[], Any], check: Callable[[], None]) -> None:
    """Run the action one instruction at a time, and check whenever the files have changed."""
    seen = digest(directory)
    executed = -1  # the instruction that has been executed since the last look

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen, executed
        if frame.f_code.co_filename not in WRITERS:
            return None
        frame.f_trace_opcodes = True
        if executed not in HARMLESS:
            now = digest(directory)
            if now != seen:
                seen = now
                check()
        if event == "opcode":
            executed = instructions(frame.f_code)[frame.f_lasti]
        return trace

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(None)
    if digest(directory) != seen:
        check()


HARMLESS = {
    dis.opmap[name]
    for name in (
        "CACHE", "COPY", "EXTENDED_ARG", "JUMP_BACKWARD", "JUMP_FORWARD", "KW_NAMES", "LOAD_CONST",
        "LOAD_DEREF", "LOAD_FAST", "LOAD_GLOBAL", "NOP", "PRECALL", "PUSH_NULL", "RESUME", "SWAP",
    )
    if name in dis.opmap
}  # fmt: skip
"""They take values from one place of Python to another, and end the life of none: they cannot
change a file."""


@functools.cache
def instructions(code: CodeType) -> bytes:
    return code.co_code


def digest(directory: Path) -> dict[str, int]:
    return {path.name: zlib.crc32(path.read_bytes()) for path in directory.iterdir()}
