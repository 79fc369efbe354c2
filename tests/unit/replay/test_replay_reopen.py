"""Opening a directory again: what was stored, damaged, lost or mixed, and checkpoints."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_history import CAPACITY, CHUNK, LENGTH, add, open_replay, write_history
from replay_model import InOrder, ModelReplay, all_items, batch, check_sequences, step, tags

from dreamfleet.errors import ConfigError
from dreamfleet.replay import BatchOrderError, DirectoryInUseError, Replay, ReplayError, SchemaError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run" / "replay"


def holding(directory: Path, tag: int) -> Path:
    """The chunk file that holds a step."""
    vector = np.arange(tag, tag + 3, dtype=np.float32).tobytes()
    (path,) = [p for p in directory.glob("*.chunk") if vector in p.read_bytes()[4096:]]
    return path


def add_to_both(replay: Replay, model: ModelReplay, tags: range) -> None:
    for tag in tags:
        replay.add(step(tag, tag % 3), f"env{tag % 3}")
        model.add(tag, tag % 3)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("capacity", [1, 7, 60, 10_000])
@pytest.mark.parametrize("length", [1, 3, LENGTH, 20])
def test_another_capacity_and_another_length(directory: Path, capacity: int, length: int) -> None:
    """Whatever is on disk makes items of the new length; the newest that fit are kept."""
    history = write_history(directory, 60)
    model = ModelReplay(length, 10_000)
    for steps, streams in history.batches:
        for tag, stream in zip(steps["tag"].tolist(), streams, strict=True):
            model.add(tag, stream)
    with Replay(length, capacity, directory, chunk=CHUNK, selector=InOrder()) as replay:
        items = all_items(replay) if len(replay) else []
        # A smaller replay lived here before, so only the newest items are certain to be there.
        sure = min(capacity, CAPACITY // 2)
        assert items[-sure:] == model.items[-sure:]
        assert items == model.items[len(model.items) - len(items) :] or capacity > CAPACITY
        assert len(items) <= capacity


def test_streams_continue_after_a_restart(directory: Path) -> None:
    model = ModelReplay(6, 100)
    for tag in range(50):
        with Replay(6, 100, directory, chunk=4, selector=InOrder()) as replay:
            replay.add(step(tag, tag % 2), tag % 2)
            model.add(tag, tag % 2)
            assert (all_items(replay) if len(replay) else []) == model.items
    assert len(list(directory.glob("*.chunk"))) == 14, "chunks are filled up, not started again"


def test_a_stream_that_paused_continues_after_a_restart(tmp_path: Path) -> None:
    """What others evicted meanwhile is no gap."""
    with Replay(3, 50, tmp_path, chunk=5, selector=InOrder()) as replay:
        replay.add_batch(*tags(range(2)))
        for tag in range(1000, 1200):
            replay.add(step(tag, 1), 1)
    with Replay(3, 50, tmp_path, selector=InOrder()) as replay:
        replay.add(step(2))
        assert all_items(replay)[-1] == (0, 1, 2)


def test_the_size_of_chunks_belongs_to_the_directory(directory: Path) -> None:
    write_history(directory, 30)
    with Replay(LENGTH, 100, directory, chunk=512) as replay:
        assert replay.chunk == CHUNK


def test_many_more_chunks_than_the_capacity_needs(tmp_path: Path) -> None:
    with Replay(1, 5000, tmp_path, chunk=1) as replay:
        replay.add_batch({"tag": np.arange(4500)}, [0] * 4500)
    with Replay(1, 10, tmp_path, selector=InOrder()) as replay:
        assert replay.skipped_files == {}
        assert replay.sample(10, "report")["tag"].ravel().tolist() == list(range(4490, 4500))
    assert len(list(tmp_path.glob("*.chunk"))) == 10


def test_a_second_writer_is_refused(directory: Path) -> None:
    with open_replay(directory):
        with pytest.raises(DirectoryInUseError, match=f"process {os.getpid()}"):
            open_replay(directory)
        code = (
            "import sys; from dreamfleet.replay import *\n"
            "try: Replay(5, 10, sys.argv[1])\n"
            "except DirectoryInUseError: sys.exit(7)"
        )
        done = subprocess.run([sys.executable, "-c", code, str(directory)], check=False)
        assert done.returncode == 7
    open_replay(directory).close()


def test_a_forked_child_does_not_keep_the_directory(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from dreamfleet.replay import Replay
replay = Replay(1, 10, sys.argv[1])
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, b"x")
    os.read(0, 1)
    os._exit(0)
os.read(reader, 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE
    ) as process:
        assert process.wait() == -signal.SIGKILL
        Replay(1, 10, tmp_path).close()
        process.communicate(b"x")


def test_other_keys_need_another_directory(directory: Path) -> None:
    write_history(directory, 10)
    with open_replay(directory) as replay, pytest.raises(SchemaError, match="new directory"):
        replay.add({"something": np.float32(1)})


def test_damaged_and_foreign_files_are_reported_and_skipped(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history = write_history(directory, 40)
    chunks = sorted(directory.glob("*.chunk"))
    complete = len(chunks)
    (directory / "notes.txt").write_text("hello")
    (directory / "folder").mkdir()
    (directory / "empty.chunk").touch()
    (directory / f"{7:032x}.partial").write_bytes(b"x" * 100)
    shutil.copy(chunks[0], directory / "copy.chunk")
    (directory / "short.chunk").write_bytes(chunks[0].read_bytes()[:5000])
    flipped = bytearray(chunks[0].read_bytes())
    flipped[40] ^= 0xFF
    (directory / "flipped.chunk").write_bytes(flipped)
    with Replay(1, 10, directory.parent / "other") as other:
        other.add({"something": np.float32(1)})
    foreign = next((directory.parent / "other").glob("*.chunk"))
    shutil.copy(foreign, directory)
    with caplog.at_level(logging.WARNING), open_replay(directory) as replay:
        assert set(replay.skipped_files) == {
            "notes.txt",
            "folder",
            "empty.chunk",
            "copy.chunk",
            "short.chunk",
            "flipped.chunk",
            foreign.name,
        }
        assert all_items(replay) == history.items(40)
        assert replay.stats()["chunks"] == complete
    for name in replay.skipped_files:
        assert name in caplog.text
    assert not list(directory.glob("*.partial"))
    assert (directory / "notes.txt").exists(), "what is not ours is left alone"


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


def test_only_partial_files_of_the_replay_are_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.partial").write_text("mine")
    with Replay(1, 10, tmp_path) as replay:
        assert set(replay.skipped_files) == {"thesis.partial"}
    assert (tmp_path / "thesis.partial").read_text() == "mine"


def test_a_changed_header_is_detected_by_its_checksum(directory: Path) -> None:
    """A stream's number that became another: sensible to read, and only the checksum knows."""
    write_history(directory, 40)
    chunk = next(p for p in directory.glob("*.chunk") if b'"stream": 0' in p.read_bytes())
    chunk.write_bytes(chunk.read_bytes().replace(b'"stream": 0', b'"stream": 3', 1))
    with open_replay(directory) as replay:
        assert replay.skipped_files == {chunk.name: "has a damaged header"}


def test_a_missing_chunk_breaks_a_sequence_and_mixes_nothing(directory: Path) -> None:
    with Replay(4, 1000, directory, chunk=5) as replay:
        for tag in range(30):
            replay.add(step(tag))
        data = replay.sample(400, "eval")
    ids = dict(zip(data["tag"].flat, data["stepid"].reshape(-1, 20), strict=True))
    (directory / f"{ids[10][:16].tobytes().hex()}.chunk").unlink()
    with Replay(4, 1000, directory, chunk=5, selector=InOrder()) as replay:
        expected = [tuple(range(start, start + 4)) for start in [*range(7), *range(15, 27)]]
        assert all_items(replay) == expected


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


@pytest.mark.parametrize("damage", ["truncated", "missing", "unticked"])
def test_no_stream_continues_where_steps_are_missing(tmp_path: Path, damage: str) -> None:
    with Replay(4, 1000, tmp_path, chunk=5) as replay:
        replay.add_batch(*tags(range(13)))
        if damage == "truncated":
            replay.add(step(1000, 1), 1)
    path = holding(tmp_path, 12)
    data = path.read_bytes()
    if damage == "truncated":
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


@pytest.mark.parametrize("journal", ["kept", "lost"])
def test_lost_chunk_is_noticed_when_other_streams_wrote_later(tmp_path: Path, journal: str) -> None:
    """No file is damaged and the newest tick is there: only the gap in the ticks tells."""
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
            # The other stream continued all the time; the first does where no step is missing.
            assert (after - 2, after - 1, after) in items
            assert ((tag - 2, tag - 1, tag) in items) == (tag == 12)


@pytest.mark.parametrize("damage", ["missing", "zeros", "garbage", "short"])
def test_without_a_journal_every_step_is_kept(directory: Path, damage: str) -> None:
    history = write_history(directory, 40)
    journal = directory / "journal"
    size = journal.stat().st_size
    if damage == "missing":
        journal.unlink()
    else:
        data = {"zeros": bytes(size), "garbage": b"\x5a" * size, "short": b"abc"}[damage]
        journal.write_bytes(data)
    with open_replay(directory) as replay:
        assert all_items(replay) == history.items(40)
        replay.add_batch(*history.batch(40))
        assert all_items(replay) == history.items(41)
    with open_replay(directory) as replay:
        assert all_items(replay) == history.items(41)


def test_a_journal_of_another_version_is_refused_and_kept(tmp_path: Path) -> None:
    with Replay(1, 10, tmp_path) as replay:
        replay.add(step(0))
    journal = tmp_path / "journal"
    data = b"DFJOURN\x01" + bytes(24) + journal.read_bytes()[32:]
    journal.write_bytes(data)
    with pytest.raises(ReplayError, match="another version"):
        Replay(1, 10, tmp_path)
    assert journal.read_bytes() == data


def test_batch_numbers_survive_a_restart(directory: Path) -> None:
    data = batch([step(0)])
    with Replay(1, 5000, directory) as replay:
        for seq in (0, 1, 5, 3):
            assert replay.add_batch(data, [0], "a", seq) == 1
        assert replay.add_batch(data, [0], b"a", 0) == 1, "bytes and text are different sources"
    with Replay(1, 5000, directory) as replay:
        seen = [replay.add_batch(data, [0], "a", seq) for seq in range(7)]
        assert seen == [0, 0, 1, 0, 1, 0, 1]
        assert replay.add_batch(data, [0], "a", 1000) == 1
        assert replay.add_batch(data, [0], "a", 937) == 1
        with pytest.raises(BatchOrderError, match="at most 63 numbers late"):
            replay.add_batch(data, [0], "a", 936)
        with pytest.raises(ConfigError):
            replay.add_batch(data, [0], "a")


def test_more_sources_than_the_journal_remembers(directory: Path) -> None:
    data = batch([step(0)])
    with Replay(1, 10_000, directory) as replay:
        for source in range(4096 + 10):
            assert replay.add_batch(data, [0], source, 0) == 1
    with Replay(1, 10_000, directory) as replay:
        assert replay.add_batch(data, [0], 4096 + 9, 0) == 0
        assert replay.add_batch(data, [0], 10, 0) == 0
        assert replay.add_batch(data, [0], 9, 0) == 1, "the one longest unused gave way"


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


def test_an_error_in_the_middle_of_a_write_leaves_no_trace(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = write_history(directory, 41)
    with open_replay(directory) as replay:
        table = replay._table
        for method in ("stage", "commit"):
            with monkeypatch.context() as patch:
                patch.setattr(table.journal, method, _interrupt)
                with pytest.raises(KeyboardInterrupt):
                    add(replay, history, 41)
        # Others take its ticks; what the interrupted batch wrote must not become valid with them.
        for tag in range(20):
            replay.add(step(tag, 9), 9)
        before = all_items(replay)
    with open_replay(directory) as replay:
        assert all_items(replay) == before
        assert add(replay, history, 41) > 0


def test_only_new_steps_are_fresh_after_a_restart(tmp_path: Path) -> None:
    with Replay(4, 60, tmp_path, chunk=8) as replay:
        add_to_both(replay, ModelReplay(4, 60), range(70))
    with Replay(4, 60, tmp_path, chunk=8) as replay:
        assert replay.stats()["online_queue"] == 0
        add_to_both(replay, ModelReplay(4, 60), range(70, 70 + 12))
        fresh = check_sequences(replay.sample(3), 4)
        assert sorted(tags[0] for tags in fresh) == [70, 71, 72]
