"""The machinery under a replay: mappings, and pages that are asked for early."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from dreamfleet.replay import Replay
from dreamfleet.replay.storage.store import _AHEAD

WIDE = 4096
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def fill(replay: Replay, count: int) -> None:
    for tag in range(count):
        replay.add({"tag": np.int64(tag), "wide": np.full(WIDE, tag % 251, np.uint8)})


@pytest.mark.parametrize("can", [True, False], ids=["asked for", "the kernel cannot"])
def test_pages_asked_for_early_change_nothing(
    can: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can:
        monkeypatch.setattr("dreamfleet.replay.storage.memory._MADV_POPULATE_WRITE", 9999)
    with Replay(5, 1000, tmp_path, chunk=3 * _AHEAD + 1) as replay:
        fill(replay, 10 * _AHEAD)
        data = replay.sample(200, "eval")
        assert (data["wide"] == (data["tag"] % 251)[..., None]).all()


def test_few_pages_are_taken_early() -> None:
    """A chunk of 400 MB, of which a handful of steps are used."""
    before = psutil.Process().memory_info().rss
    with Replay(5, 10**6, chunk=100_000) as replay:
        fill(replay, 10)
        assert psutil.Process().memory_info().rss - before < 20 << 20


@LINUX
def test_a_forgotten_replay_leaves_nothing_behind(tmp_path: Path) -> None:
    replay = Replay(5, 1000, tmp_path)
    fill(replay, 10)
    del replay
    gc.collect()
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
