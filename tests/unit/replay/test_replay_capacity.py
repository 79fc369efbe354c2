"""Bounds: capacity, max_bytes, a full disk, and what a full replay will take."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_history import History, add, open_replay, write_history
from replay_model import InOrder, ModelReplay, all_items, batch, check_sequences, step, tags

from dreamfleet.errors import ConfigError
from dreamfleet.replay import Replay, StorageFullError
from dreamfleet.replay.storage.memory import Arena

BYTES = 16384
"""Size of a chunk of sixteen steps."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run" / "replay"


@pytest.mark.parametrize(
    "options", [{"length": 0}, {"capacity": 0}, {"chunk": 0}, {"max_bytes": 0}]
)
def test_settings_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Replay(**({"length": 1, "capacity": 1} | options))


def test_max_bytes_bounds_the_disk(directory: Path) -> None:
    options: dict[str, Any] = {"chunk": 16, "selector": InOrder()}
    with Replay(3, 10**6, directory, max_bytes=10 * 16384, **options) as replay:
        model = ModelReplay(3, 10**6)
        for tag in range(1000):
            replay.add(step(tag, tag % 2), tag % 2)
            model.add(tag, tag % 2)
            used = sum(file.stat().st_size for file in directory.glob("*.chunk"))
            assert used <= 10 * 16384
        items = all_items(replay)
        assert len(items) > 8 * 16 - 20
        assert items == model.items[-len(items) :]
    with Replay(3, 10**6, directory, max_bytes=4 * 16384, **options) as replay:
        assert len(list(directory.glob("*.chunk"))) <= 4
        assert all_items(replay) == model.items[-len(replay) :]


def test_max_bytes_removes_streams_that_ended(directory: Path) -> None:
    """Sixty streams of a few steps each; every chunk belongs to one, and most have ended."""
    with Replay(3, 10**6, directory, chunk=16, max_bytes=10 * 16384) as replay:
        for tag in range(600):
            replay.add(step(tag, tag // 10), tag // 10)
        tags = check_sequences(replay.sample(300, "eval"), 3)
        assert {tag[0] // 10 for tag in tags} == set(range(50, 60))


def test_max_bytes_that_is_too_small_is_an_error(directory: Path) -> None:
    with Replay(3, 100, directory, chunk=16, max_bytes=3 * 16384) as replay:
        replay.add_batch(batch([step(n) for n in range(3)]), [0, 1, 2])
        with pytest.raises(StorageFullError, match=r"max_bytes=49,152 has no room for 1 more"):
            replay.add(step(3), 3)
        replay.add_batch(batch([step(n) for n in range(3)]), [0, 1, 2])


def test_a_batch_that_can_never_fit_evicts_nothing(tmp_path: Path) -> None:
    with Replay(4, 10**6, chunk=16, max_bytes=4 * BYTES, selector=InOrder()) as replay:
        for tag in range(16):
            replay.add_batch(batch([step(tag, s) for s in range(4)]), list(range(4)))
        before = all_items(replay)
        with pytest.raises(StorageFullError, match="no room for 5 more"):
            replay.add_batch(batch([step(0, s) for s in range(4, 9)]), list(range(4, 9)))
        assert all_items(replay) == before
        # Four new streams fit, once the four before have gone.
        replay.add_batch(batch([step(0, s) for s in range(4, 7)]), list(range(4, 7)))


def test_a_smaller_max_bytes_than_open_streams_need(tmp_path: Path) -> None:
    with Replay(2, 1000, tmp_path, chunk=16) as replay:
        replay.add_batch(batch([step(s, s) for s in range(6)]), list(range(6)))
    with Replay(2, 1000, tmp_path, max_bytes=3 * BYTES, selector=InOrder()) as replay:
        assert len(list(tmp_path.glob("*.chunk"))) == 3
        replay.add_batch(batch([step(10 + s, s) for s in range(3, 6)]), [3, 4, 5])
        assert all_items(replay) == [(3, 13), (4, 14), (5, 15)]


def test_streams_that_ended_are_removed_with_their_items() -> None:
    """Three steps each, in chunks of sixteen: none is ever filled, and all would stay."""
    with Replay(2, 50, chunk=16, selector=InOrder()) as replay:
        for tag in range(0, 9000, 3):
            replay.add_batch(batch([step(tag + k, tag) for k in range(3)]), [tag] * 3)
        assert replay.stats()["chunks"] < 800
        assert replay.stats()["streams"] < 800
        assert all_items(replay)[-1] == (8998, 8999)
        # A stream that comes back starts a new chain, and mixes with nothing.
        replay.add_batch(batch([step(k, 0) for k in range(3)]), [0] * 3)
        assert all_items(replay)[-3:] == [(8998, 8999), (0, 1), (1, 2)]


def test_a_full_disk_is_an_error_to_the_writer_and_harms_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = write_history(directory, 41)
    full = False
    reserve = os.posix_fallocate

    def maybe_full(fd: int, start: int, size: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(fd, start, size)

    monkeypatch.setattr(os, "posix_fallocate", maybe_full)
    with open_replay(directory) as replay:
        full = True
        stored = add_until_full(replay, history, 41)
        assert all_items(replay) == history.items(stored)
        with pytest.raises(StorageFullError, match="No space left on device"):
            add(replay, history, stored)
        full = False
        add(replay, history, stored)
        assert all_items(replay) == history.items(stored + 1)
    assert not list(directory.glob("*.partial"))
    with open_replay(directory) as replay:
        assert all_items(replay) == history.items(stored + 1)


def add_until_full(replay: Replay, history: History, number: int) -> int:
    """Number of the first batch that found no room."""
    while True:
        try:
            add(replay, history, number)
        except StorageFullError:
            return number
        number += 1


def test_a_file_size_limit_is_a_full_disk(directory: Path) -> None:
    """The same without any stand-in: the kernel refuses the reservation."""
    code = """
import resource, sys
import numpy as np
from dreamfleet.replay import Replay, StorageFullError
replay = Replay(2, 100, sys.argv[1], chunk=64)
replay.add({"x": np.zeros(1000)})
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
try:
    replay.add({"x": np.zeros(1000)}, 1)
except StorageFullError:
    replay.add({"x": np.ones(1000)})
    sys.exit(int(replay.sample(1)["x"].sum()) - 1000 + 7)
"""
    done = subprocess.run([sys.executable, "-c", code, str(directory)], check=False)
    assert done.returncode == 7


def test_a_mapping_that_is_refused_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StorageFullError("The operating system refused.")

    with Replay(1, 10, tmp_path, chunk=4) as replay:
        replay.add_batch(*tags(range(4)))
        monkeypatch.setattr(Arena, "map_file", refuse)
        with pytest.raises(StorageFullError):
            replay.add(step(4))
        assert len(list(tmp_path.glob("*.chunk"))) == 1
    with Replay(1, 10, tmp_path) as replay:
        assert list(replay.skipped_files.values()) == [
            "cannot be mapped: The operating system refused."
        ]
    monkeypatch.undo()
    with Replay(1, 10, tmp_path) as replay:
        assert len(replay) == 4


def test_it_warns_of_chunks_that_cut_the_capacity(caplog: pytest.LogCaptureFixture) -> None:
    with Replay(1, 200_000, chunk=2) as replay:
        replay.add(step(0))
    assert "about 120,000 sequences" in caplog.text


def test_batch_that_crosses_many_chunks_follows_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the steps are twice the work, also when all of them are of one stream."""
    work = []
    for count in (4000, 8000):
        with Replay(3, 10**5, chunk=4) as replay:
            replay.add(step(0))
            table = replay._table
            follow = _Counted(table.store.previous)
            monkeypatch.setattr(table.store, "previous", follow)
            replay.add_batch(*tags(range(1, count)))
            work.append(follow.read)
            monkeypatch.undo()
    assert work[1] < 2.2 * work[0]


class _Counted:
    """An array that counts how many of its elements were read."""

    def __init__(self, array: Any) -> None:
        self.array, self.read = array, 0

    def __getitem__(self, key: Any) -> Any:
        found = self.array[key]
        self.read += np.size(found)
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        self.array[key] = value


def test_a_full_disk_leaves_no_lock_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Replay(2, 10, tmp_path).close()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with suppress(OSError):
            Replay(2, 10, tmp_path).close()
    Replay(2, 10, tmp_path).close()
