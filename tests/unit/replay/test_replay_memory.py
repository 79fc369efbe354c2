"""The machinery under a replay: mappings, pages asked for early, threads that end."""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

from dreamfleet.replay import Replay
from dreamfleet.replay.prefault import AHEAD

WIDE = 4096
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def fill(replay: Replay, count: int) -> None:
    for tag in range(count):
        replay.add({"tag": np.int64(tag), "wide": np.full(WIDE, tag % 251, np.uint8)})


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "replay-prefault"]


@pytest.mark.parametrize("how", ["at once", "one by one", "not at all"])
def test_pages_asked_for_early_change_nothing(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the kernel can do, the steps are the same."""
    if how != "at once":
        monkeypatch.setattr(os, "pidfd_open", _refuse, raising=False)
    if how == "not at all":
        monkeypatch.setattr("dreamfleet.replay.arena._MADV_POPULATE_WRITE", 9999)
    with Replay(5, 1000, tmp_path, chunk=3 * AHEAD) as replay:
        fill(replay, 10 * AHEAD)
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


def test_the_helping_thread_ends_with_the_replay() -> None:
    others = helpers()
    replay = Replay(5, 1000)
    fill(replay, 10)
    assert len(helpers()) == len(others) + 1
    replay.close()
    assert helpers() == others


@LINUX
def test_a_forgotten_replay_leaves_nothing_behind(tmp_path: Path) -> None:
    replay = Replay(5, 1000, tmp_path)
    fill(replay, 10)
    (thread,) = helpers()
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
