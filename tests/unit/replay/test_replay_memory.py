"""The machinery under a replay: mappings, pages asked for early, threads that end."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

from dreamfleet.replay import Replay
from dreamfleet.replay.storage.memory import _AHEAD, BufferPool

WIDE = 4096
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def fill(replay: Replay, count: int) -> None:
    for tag in range(count):
        replay.add({"tag": np.int64(tag), "wide": np.full(WIDE, tag % 251, np.uint8)})


def helpers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "replay-prefault"}


@pytest.mark.parametrize("how", ["at once", "one by one", "not at all"])
def test_pages_asked_for_early_change_nothing(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the kernel can do, the steps are the same."""
    if how != "at once":
        monkeypatch.setattr(os, "pidfd_open", _refuse, raising=False)
    if how == "not at all":
        monkeypatch.setattr("dreamfleet.replay.storage.memory._MADV_POPULATE_WRITE", 9999)
    with Replay(5, 1000, tmp_path, chunk=3 * _AHEAD) as replay:
        fill(replay, 10 * _AHEAD)
        data = replay.sample(200, "eval")
        assert (data["wide"] == (data["tag"] % 251)[..., None]).all()


def _refuse(pid: int) -> int:
    raise PermissionError


def test_few_pages_are_taken_early() -> None:
    """A chunk of 400 MB, of which a handful of steps are used."""
    before = psutil.Process().memory_info().rss
    with Replay(5, 10**6, chunk=100_000) as replay:
        fill(replay, 10)
        replay._table.store._prefault.stop()  # type: ignore[union-attr]
        assert psutil.Process().memory_info().rss - before < 20 << 20


def test_the_prefault_thread_ends_with_the_replay() -> None:
    others = helpers()
    replay = Replay(5, 1000)
    fill(replay, 10)
    assert len(helpers() - others) == 1
    replay.close()
    assert helpers() <= others


@LINUX
def test_a_forgotten_replay_leaves_nothing_behind(tmp_path: Path) -> None:
    others = helpers()
    replay = Replay(5, 1000, tmp_path)
    fill(replay, 10)
    (thread,) = helpers() - others
    del replay
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    with Replay(5, 1000, tmp_path) as replay:
        assert len(replay) == 6


@LINUX
def test_thousands_of_chunks_need_no_open_files(tmp_path: Path) -> None:
    with Replay(2, 10**6, tmp_path, chunk=1) as replay:
        before = len(list(Path("/proc/self/fd").iterdir()))
        fill(replay, 1500)
        assert replay.stats()["chunks"] == 1500
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


def flags(part: str) -> dict[str, set[str]]:
    """What the kernel was told about each mapping whose line in smaps holds `part`, by line."""
    found, line = {}, ""
    for text in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", text):
            line = text
        elif text.startswith("VmFlags:") and part in line:
            found[line] = set(text.split()[1:])
    return found


@LINUX
def test_nothing_is_read_ahead_into_a_chunk_that_is_being_written(tmp_path: Path) -> None:
    """The kernel would clear megabytes for the first step; a full chunk is there to be read."""
    with Replay(5, 1000, tmp_path, chunk=8) as replay:
        fill(replay, 20)
        told = flags(str(tmp_path / ""))
        chunks = {line: "rr" in flag for line, flag in told.items() if ".chunk" in line}
        assert sorted(chunks.values()) == [False, False, True]
    with Replay(5, 1000, tmp_path) as replay:
        told = flags(str(tmp_path / ""))
        chunks = {line: "rr" in flag for line, flag in told.items() if ".chunk" in line}
        assert set(chunks.values()) == {False}


def test_the_pool_drops_sizes_that_are_not_used_any_more() -> None:
    pool = BufferPool()
    dtype = np.dtype(np.uint8)
    first = pool.take((1 << 20,), dtype).ctypes.data
    for more in range(100):
        pool.take(((1 << 20) + more,), dtype)
        assert pool.take((1 << 20,), dtype).ctypes.data == first, "what is in use stays"
    assert len(pool._buffers) == 32
