"""Directories that changed between two openings: shrunk, damaged, mixed, or read while in use."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_history import History, add, open_replay
from replay_model import InOrder, all_items, batch, step

from dreamfleet.replay import Replay, ReplayError, SchemaError, StorageFullError, loading
from dreamfleet.replay.storage.journal import Journal


def tags(numbers: range) -> tuple[dict[str, Any], list[int]]:
    """A batch of steps of stream 0."""
    return batch([step(number) for number in numbers]), [0] * len(numbers)


def holding(directory: Path, tag: int) -> Path:
    """The chunk file that holds a step."""
    vector = np.arange(tag, tag + 3, dtype=np.float32).tobytes()
    (path,) = [p for p in directory.glob("*.chunk") if vector in p.read_bytes()[4096:]]
    return path


def test_many_more_chunks_than_the_capacity_needs(tmp_path: Path) -> None:
    with Replay(1, 5000, tmp_path, chunk=1) as replay:
        replay.add_batch({"tag": np.arange(4500)}, [0] * 4500)
    with Replay(1, 10, tmp_path, selector=InOrder()) as replay:
        assert replay.skipped_files == {}
        assert replay.sample(10, "report")["tag"].ravel().tolist() == list(range(4490, 4500))
    assert len(list(tmp_path.glob("*.chunk"))) == 10


@pytest.mark.parametrize("journal", ["kept", "lost"])
def test_chunks_of_another_replay_are_left_alone(tmp_path: Path, journal: str) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    with Replay(1, 1000, mine, chunk=16) as replay:
        replay.add_batch(*tags(range(40)))
    with Replay(1, 1000, other, chunk=16) as replay:
        replay.add_batch(*tags(range(100, 132)))
    foreign = {p.name for p in other.glob("*.chunk")}
    for name in foreign:
        shutil.copy(other / name, mine)
    if journal == "lost":
        (mine / "journal").unlink()
    for _ in range(2):
        with Replay(1, 1000, mine, chunk=16, selector=InOrder()) as replay:
            assert set(replay.skipped_files) == foreign
            assert all("another replay" in reason for reason in replay.skipped_files.values())
            assert all_items(replay) == [(tag,) for tag in range(40)]
    assert all((mine / n).read_bytes() == (other / n).read_bytes() for n in foreign)


@pytest.mark.parametrize("damage", ["torn", "missing", "unticked"])
def test_no_stream_goes_on_where_steps_are_missing(tmp_path: Path, damage: str) -> None:
    with Replay(4, 1000, tmp_path, chunk=5) as replay:
        replay.add_batch(*tags(range(13)))
        if damage == "torn":
            replay.add(step(1000, 1), 1)
    path = holding(tmp_path, 12)
    data = path.read_bytes()
    if damage == "torn":
        path.write_bytes(data[:5000])
    elif damage == "missing":
        path.unlink()
    else:
        eleventh = data.index(np.int64(11).tobytes(), 4096)
        path.write_bytes(data[:eleventh] + bytes(8) + data[eleventh + 8 :])
    for first in (13, 18):
        with Replay(4, 1000, tmp_path, chunk=5, selector=InOrder()) as replay:
            replay.add_batch(*tags(range(first, first + 5)))
            assert all((np.diff(item) == 1).all() for item in all_items(replay))
            assert all_items(replay)[-1] == tuple(range(first + 1, first + 5))


def test_killed_while_a_lost_journal_is_made_anew(tmp_path: Path) -> None:
    history = History()
    with open_replay(tmp_path) as replay:
        for number in range(40):
            add(replay, history, number)
    (tmp_path / "journal").unlink()
    Journal(tmp_path)
    with open_replay(tmp_path) as replay:
        assert all_items(replay) == history.items(40)


def test_a_journal_of_another_version_is_refused_and_kept(tmp_path: Path) -> None:
    with Replay(1, 10, tmp_path) as replay:
        replay.add(step(0))
    journal = tmp_path / "journal"
    data = journal.read_bytes().replace(b"DFJOURN\x01", b"DFJOURN\x02")
    journal.write_bytes(data)
    with pytest.raises(ReplayError, match="another version"):
        Replay(1, 10, tmp_path)
    assert journal.read_bytes() == data


BYTES = 16384
"""Size of a chunk of sixteen such steps."""


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


def test_extra_data_that_can_never_fit_evicts_nothing(tmp_path: Path) -> None:
    with Replay(4, 10**6, tmp_path, chunk=16) as other:
        other.add_batch(*tags(range(60)))
    with Replay(4, 10**6, chunk=16, max_bytes=4 * BYTES, selector=InOrder()) as replay:
        for tag in range(10):
            replay.add_batch(batch([step(tag, s) for s in range(2)]), [0, 1])
        before = all_items(replay)
        with pytest.raises(StorageFullError, match="no room for 4 more"):
            replay.load_directory(tmp_path)
        assert all_items(replay) == before


def test_a_smaller_max_bytes_than_open_streams_need(tmp_path: Path) -> None:
    with Replay(2, 1000, tmp_path, chunk=16) as replay:
        replay.add_batch(batch([step(s, s) for s in range(6)]), list(range(6)))
    with Replay(2, 1000, tmp_path, max_bytes=3 * BYTES, selector=InOrder()) as replay:
        assert len(list(tmp_path.glob("*.chunk"))) == 3
        replay.add_batch(batch([step(10 + s, s) for s in range(3, 6)]), [3, 4, 5])
        assert all_items(replay) == [(3, 13), (4, 14), (5, 15)]


@pytest.mark.parametrize("moment", ["_read_ticks", "_copy"])
def test_a_run_that_lets_chunks_go_while_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    with Replay(1, 100, tmp_path, chunk=4) as other:
        other.add_batch(*tags(range(40)))
        original = getattr(loading, moment)

        def evict_first(*arguments: Any) -> Any:
            monkeypatch.setattr(loading, moment, original)
            other.add_batch(*tags(range(40, 120)))
            return original(*arguments)

        with Replay(1, 100, selector=InOrder()) as replay:
            monkeypatch.setattr(loading, moment, evict_first)
            replay.load_directory(tmp_path)
            assert all_items(replay) == [(tag,) for tag in range(20, 40)]
            assert replay.stats()["chunks"] == 5


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    with Replay(1, 100, other, chunk=4) as replay:
        replay.add_batch(*tags(range(10)))
    with Replay(1, 100, mine, chunk=4) as replay:
        monkeypatch.setattr(os, "preadv", lambda *_: 0)
        with pytest.raises(ReplayError, match="shorter"):
            replay.load_directory(other)
        assert replay.stats()["chunks"] == 0
        assert not list(mine.glob("*.chunk"))
        monkeypatch.undo()
        assert replay.load_directory(other) == 10


@pytest.mark.parametrize(
    "name",
    [10**4000, 1 << 63, -(1 << 63) - 1, np.uint64(1 << 63), "\U0001f600" * 100],
    ids=range(5),
)
def test_stream_names_that_no_header_could_hold(name: Any) -> None:
    with Replay(1, 10) as replay, pytest.raises(SchemaError, match="cannot name a stream"):
        replay.add(step(0), name)


@pytest.mark.parametrize(
    "name", [(1 << 63) - 1, -(1 << 63), np.uint64(7), "\u00e9" * 100, "\0" * 100], ids=range(5)
)
def test_the_longest_stream_names_survive(tmp_path: Path, name: Any) -> None:
    keys = {f"key{'x' * k}": np.float32(0) for k in range(60)}
    for count in (1, 2):
        with Replay(count, 10, tmp_path) as replay:
            replay.add(keys, name)
            assert replay.skipped_files == {}
            assert len(replay) == 1


def test_streams_that_ended_leave_with_their_items() -> None:
    """Three steps each, in chunks of sixteen: none is ever filled, and all would stay."""
    with Replay(2, 50, chunk=16, selector=InOrder()) as replay:
        for tag in range(0, 9000, 3):
            replay.add_batch(batch([step(tag + k, tag) for k in range(3)]), [tag] * 3)
        assert replay.stats()["chunks"] < 800
        assert replay.stats()["streams"] < 800
        assert all_items(replay)[-1] == (8998, 8999)
        # A stream that comes back starts a chain anew, and mixes with nothing.
        replay.add_batch(batch([step(k, 0) for k in range(3)]), [0] * 3)
        assert all_items(replay)[-3:] == [(8998, 8999), (0, 1), (1, 2)]


@pytest.mark.parametrize("journal", ["kept", "lost"])
def test_the_newest_chunk_of_one_stream_is_gone_and_others_wrote_later(
    tmp_path: Path, journal: str
) -> None:
    """No file is torn and the newest tick is there: only the gap in the ticks tells."""
    with Replay(3, 1000, tmp_path, chunk=5) as replay:
        for tag in range(8):
            replay.add_batch(batch([step(tag, 0), step(100 + tag, 1)]), [0, 1])
        for tag in range(108, 120):
            replay.add(step(tag, 1), 1)
    holding(tmp_path, 7).unlink()
    if journal == "lost":
        (tmp_path / "journal").unlink()
    for tag, after in ((8, 120), (12, 124)):
        with Replay(3, 1000, tmp_path, selector=InOrder()) as replay:
            for more in range(4):
                replay.add_batch(batch([step(tag + more, 0), step(after + more, 1)]), [0, 1])
            items = all_items(replay)
            assert all((np.diff(item) == 1).all() for item in items)
            # The other stream went on all the time, and the first does again where it is whole.
            assert (after - 2, after - 1, after) in items
            assert ((tag - 2, tag - 1, tag) in items) == (tag == 12)


def test_a_stream_that_paused_goes_on_after_a_restart(tmp_path: Path) -> None:
    """What others evicted meanwhile is no gap."""
    with Replay(3, 50, tmp_path, chunk=5, selector=InOrder()) as replay:
        replay.add_batch(*tags(range(2)))
        for tag in range(1000, 1200):
            replay.add(step(tag, 1), 1)
    with Replay(3, 50, tmp_path, selector=InOrder()) as replay:
        replay.add(step(2))
        assert all_items(replay)[-1] == (0, 1, 2)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("on_disk", [False, True])
def test_loading_again_brings_what_is_new(tmp_path: Path, on_disk: bool, restart: bool) -> None:
    """Rows of a chunk that is here already, chunks that continue it, and streams that are new."""
    history, mine = History(), tmp_path / "mine" if on_disk else None
    reader = Replay(5, 1000, mine, chunk=8, selector=InOrder())
    with open_replay(tmp_path / "other") as other:
        for number in range(40):
            steps, streams = history.batch(number)
            added = other.add_batch(steps, streams)
            before = reader.stats()["steps"]
            loaded = reader.load_directory(other.directory or "")
            assert reader.stats()["steps"] == before + loaded
            assert loaded >= added or loaded == 0, "short streams wait until they are an item"
            assert (all_items(reader) if len(reader) else []) == history.items(number + 1)
            assert reader.load_directory(other.directory or "") == 0
            if restart and on_disk:
                reader.close()
                reader = Replay(5, 1000, mine, selector=InOrder())
        assert reader.stats()["chunks"] == other.stats()["chunks"], "none was copied twice"
    assert len(history.items(40)) > 100
    reader.close()


def test_loading_again_when_the_copy_has_left(tmp_path: Path) -> None:
    """The chunk that grew makes room for the ones that continue it, and comes back whole."""
    with (
        Replay(2, 1000, tmp_path, chunk=16) as other,
        Replay(2, 1000, chunk=16, max_bytes=3 * BYTES, selector=InOrder()) as replay,
    ):
        other.add_batch(*tags(range(10)))
        replay.load_directory(tmp_path)
        for tag in range(1000, 1020):
            replay.add(step(tag, 1), 1)
        other.add_batch(*tags(range(10, 20)))
        replay.load_directory(tmp_path)
        assert all_items(replay)[-19:] == [(tag, tag + 1) for tag in range(19)]


def test_loading_again_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Replay(1, 100, tmp_path / "other", chunk=4) as other:
        other.add_batch(*tags(range(6)))
        replay = Replay(1, 100, tmp_path / "mine", chunk=4, selector=InOrder())
        replay.load_directory(tmp_path / "other")
        other.add_batch(*tags(range(6, 10)))
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "commit", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                replay.load_directory(tmp_path / "other")
        assert all_items(replay) == [(tag,) for tag in range(6)]
        for tag in range(1000, 1010):
            replay.add(step(tag, 1), 1)
        replay.close()
    with Replay(1, 100, tmp_path / "mine", selector=InOrder()) as replay:
        mine = [(tag,) for tag in range(1000, 1010)]
        assert all_items(replay) == [*((tag,) for tag in range(6)), *mine]
        assert replay.load_directory(tmp_path / "other") == 4
        assert all_items(replay)[16:] == [(tag,) for tag in range(6, 10)]


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_batch_that_crosses_many_chunks_follows_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice the steps are twice the work, also when all of them are of one stream."""
    work = []
    for count in (4000, 8000):
        with Replay(3, 10**5, chunk=4) as replay:
            replay.add(step(0))
            table = replay._table
            assert table is not None
            follow = _Counted(table.store.next)
            monkeypatch.setattr(table.store, "next", follow)
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


@pytest.mark.parametrize("tick", [0, 2], ids=["cleared", "older"])
def test_a_chunk_that_lost_its_end_is_not_followed_by_the_next(tmp_path: Path, tick: int) -> None:
    with Replay(3, 1000, tmp_path, chunk=5) as replay:
        replay.add_batch(*tags(range(15)))
    path = holding(tmp_path, 6)
    data = path.read_bytes()
    eighth = data.index(np.int64(8).tobytes(), 4096)
    path.write_bytes(data[:eighth] + np.int64(tick).tobytes() + data[eighth + 8 :])
    with Replay(3, 1000, tmp_path, selector=InOrder()) as replay:
        starts = [*range(5), *range(10, 13)]
        assert all_items(replay) == [tuple(range(start, start + 3)) for start in starts]


def test_the_original_of_a_copied_directory_as_extra_data(tmp_path: Path) -> None:
    """Chunks of the same name on both sides, which have gone different ways since."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    with Replay(2, 100, other, chunk=4) as original:
        original.add_batch(*tags(range(6)))
        original.sync()
        shutil.copytree(other, mine)
        original.add_batch(*tags(range(6, 10)))
        with Replay(2, 100, mine, selector=InOrder()) as replay:
            replay.load_directory(other)
            replay.add_batch(*tags(range(1000, 1002)))
            items = all_items(replay)
            assert (5, 1000) in items, "the stream goes on with its own steps"
            assert all(b - a == 1 for a, b in items if (a, b) != (5, 1000))
