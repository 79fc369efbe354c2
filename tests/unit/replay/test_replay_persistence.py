"""Opening a directory: what was stored, what was torn, who may write, what does not fit."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from replay_history import CAPACITY, CHUNK, LENGTH, History, add, open_replay
from replay_model import InOrder, ModelReplay, all_items, batch, check_sequences, step

from dreamfleet.errors import ConfigError
from dreamfleet.replay import (
    BatchOrderError,
    DirectoryInUseError,
    Replay,
    ReplayError,
    SamplesPerInsert,
    SchemaError,
    StorageFullError,
    Stream,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run" / "replay"


def write_history(directory: Path, batches: int) -> History:
    history = History()
    with open_replay(directory) as replay:
        for number in range(batches):
            add(replay, history, number)
    return history


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


def test_streams_go_on_after_a_restart(directory: Path) -> None:
    model = ModelReplay(6, 100)
    for tag in range(50):
        with Replay(6, 100, directory, chunk=4, selector=InOrder()) as replay:
            replay.add(step(tag, tag % 2), tag % 2)
            model.add(tag, tag % 2)
            assert (all_items(replay) if len(replay) else []) == model.items
    assert len(list(directory.glob("*.chunk"))) == 14, "chunks are filled up, not begun anew"


def test_the_size_of_chunks_belongs_to_the_directory(directory: Path) -> None:
    write_history(directory, 30)
    with Replay(LENGTH, 100, directory, chunk=512) as replay:
        assert replay.chunk == CHUNK


def test_two_writers_are_one_too_many(directory: Path) -> None:
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


def test_torn_and_foreign_files_are_reported_and_skipped(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history = write_history(directory, 40)
    chunks = sorted(directory.glob("*.chunk"))
    whole = len(chunks)
    (directory / "notes.txt").write_text("hello")
    (directory / "folder").mkdir()
    (directory / "empty.chunk").touch()
    (directory / f"{7:032x}.partial").write_bytes(b"x" * 100)
    shutil.copy(chunks[0], directory / "copy.chunk")
    (directory / "short.chunk").write_bytes(chunks[0].read_bytes()[:5000])
    torn = bytearray(chunks[0].read_bytes())
    torn[40] ^= 0xFF
    (directory / "flipped.chunk").write_bytes(torn)
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
        assert replay.stats()["chunks"] == whole
    for name in replay.skipped_files:
        assert name in caplog.text
    assert not list(directory.glob("*.partial"))
    assert (directory / "notes.txt").exists(), "what is not ours is left alone"


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


def test_a_header_that_changed_is_not_believed(directory: Path) -> None:
    """A stream's number that became another: sensible to read, and only the checksum knows."""
    write_history(directory, 40)
    chunk = next(p for p in directory.glob("*.chunk") if b'"stream": 0' in p.read_bytes())
    chunk.write_bytes(chunk.read_bytes().replace(b'"stream": 0', b'"stream": 3', 1))
    with open_replay(directory) as replay:
        assert replay.skipped_files == {chunk.name: "has a damaged header"}


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


def test_other_keys_need_another_directory(directory: Path) -> None:
    write_history(directory, 10)
    with open_replay(directory) as replay, pytest.raises(SchemaError, match="new directory"):
        replay.add({"something": np.float32(1)})


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


def test_max_bytes_lets_streams_that_ended_go(directory: Path) -> None:
    """Sixty streams of a few steps each; every chunk is somebody's, and most have ended."""
    with Replay(3, 10**6, directory, chunk=16, max_bytes=10 * 16384) as replay:
        for tag in range(600):
            replay.add(step(tag, tag // 10), tag // 10)
        tags = check_sequences(replay.sample(300, "eval"), 3)
        assert {tag[0] // 10 for tag in tags} == set(range(50, 60))


def test_max_bytes_too_small_says_so(directory: Path) -> None:
    with Replay(3, 100, directory, chunk=16, max_bytes=3 * 16384) as replay:
        replay.add_batch(batch([step(n) for n in range(3)]), [0, 1, 2])
        with pytest.raises(StorageFullError, match=r"max_bytes=49,152 has no room for 1 more"):
            replay.add(step(3), 3)
        replay.add_batch(batch([step(n) for n in range(3)]), [0, 1, 2])


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


def test_an_error_in_the_middle_of_a_write_leaves_no_trace(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = write_history(directory, 41)
    with open_replay(directory) as replay:
        table = replay._table
        assert table is not None
        for method in ("stage", "commit"):
            with monkeypatch.context() as patch:
                patch.setattr(table.journal, method, _interrupt)
                with pytest.raises(KeyboardInterrupt):
                    add(replay, history, 41)
        # Others take its ticks; what the interrupted batch wrote must not come alive with them.
        for tag in range(20):
            replay.add(step(tag, 9), 9)
        before = all_items(replay)
    with open_replay(directory) as replay:
        assert all_items(replay) == before
        assert add(replay, history, 41) > 0


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_another_run_as_extra_data(directory: Path, tmp_path: Path) -> None:
    history = write_history(directory, 60)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    extra = history.items(60)
    for target in (None, tmp_path / "mine"):
        replay = Replay(LENGTH, 1000, target, chunk=CHUNK, selector=InOrder())
        steps = replay.load_directory(directory)
        assert steps >= len(extra)
        assert all_items(replay)[-len(extra) :] == extra
        assert replay.load_directory(directory) == 0, "loading twice adds nothing"
        # The same stream goes on by itself here, and never continues the other run's steps.
        loaded = len(replay)
        for tag in range(10_000, 10_008):
            replay.add(step(tag, 0), 0)
        assert all_items(replay)[loaded:] == [
            tuple(range(tag, tag + LENGTH)) for tag in range(10_000, 10_004)
        ]
        data = replay.sample(5, "eval")
        assert replay.update({"stepid": data["stepid"], "state": data["state"] - 1}) == 5 * LENGTH
        replay.close()
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    with Replay(LENGTH, 1000, tmp_path / "mine", selector=InOrder()) as replay:
        assert len(replay) == loaded + 4
        assert replay.load_directory(directory) == 0


def test_extra_data_is_not_continued_after_a_restart(directory: Path, tmp_path: Path) -> None:
    write_history(directory, 60)
    with Replay(LENGTH, 1000, tmp_path / "mine", selector=InOrder()) as replay:
        replay.load_directory(directory)
        loaded = all_items(replay)
    with Replay(LENGTH, 1000, tmp_path / "mine", selector=InOrder()) as replay:
        for tag in range(10_000, 10_004):
            replay.add(step(tag, 0), 0)
        assert all_items(replay) == loaded, "four steps of a new chain are no item of five"


def test_extra_data_from_a_run_that_is_still_writing(directory: Path) -> None:
    history = History()
    with open_replay(directory) as writer, Replay(LENGTH, 1000, selector=InOrder()) as reader:
        for number in range(30):
            add(writer, history, number)
        reader.load_directory(directory)
        assert all_items(reader) == history.items(30)


def test_extra_data_larger_than_the_capacity(directory: Path) -> None:
    history = write_history(directory, 60)
    with Replay(LENGTH, 20, chunk=CHUNK, selector=InOrder()) as replay:
        replay.load_directory(directory)
        assert all_items(replay) == history.items(60)[-20:]


def test_extra_data_larger_than_max_bytes_evicts_nothing(directory: Path) -> None:
    write_history(directory, 60)
    with Replay(1, 1000, chunk=CHUNK, max_bytes=3 * 16384) as replay:
        replay.add(step(0))
        with pytest.raises(StorageFullError, match="more than max_bytes=49,152"):
            replay.load_directory(directory)
        assert replay.sample(1)["tag"].item() == 0


def test_what_cannot_be_loaded(directory: Path, tmp_path: Path) -> None:
    write_history(directory, 10)
    with Replay(LENGTH, 100) as replay:
        with pytest.raises(ReplayError, match="not a replay directory"):
            replay.load_directory(tmp_path / "nowhere")
        replay.add({"something": np.float32(1)})
        with pytest.raises(SchemaError, match="missing something"):
            replay.load_directory(directory)
    with open_replay(directory) as replay, pytest.raises(ReplayError, match="own directory"):
        replay.load_directory(directory)


def test_training_without_any_environment(directory: Path) -> None:
    write_history(directory, 60)
    replay = Replay(LENGTH, 1000)
    limiter = SamplesPerInsert(0, 1, 50)
    limiter.prefill(replay.load_directory(directory))

    def batches() -> dict[str, Any]:
        limiter.sample(4, timeout=0)
        return replay.sample(4)

    stream = Stream(batches, length=LENGTH)
    for _ in range(100):
        data = next(stream)
        replay.update({"stepid": data["stepid"], "state": data["state"] + 1})
    assert replay.stats()["samples"] == 400


def test_it_warns_when_the_machine_cannot_hold_it(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wide = {"x": np.zeros(10_000, np.float32)}
    with Replay(4, 10**9, chunk=2**16) as replay:
        replay.add(wide)
        expected = replay.size_when_full()
        assert expected is not None
        assert expected.disk == 0
        assert expected.ram > 4 * 10**13
        assert expected.ram > psutil.virtual_memory().total
    assert "of memory when full" in caplog.text
    assert "give it a directory" in caplog.text
    caplog.clear()
    with Replay(4, 10**9, directory, chunk=2**16) as replay:
        replay.add({"x": np.zeros(1000, np.float32)})
        expected = replay.size_when_full()
        assert expected is not None
        assert expected.disk > 4 * 10**12
    assert "of disk when full" in caplog.text
    caplog.clear()
    with Replay(4, 10**9, directory, max_bytes=10**9) as replay:
        assert replay.size_when_full() is not None
        assert replay.size_when_full().disk == 10**9  # type: ignore[union-attr]
    assert "of disk when full" not in caplog.text


@pytest.mark.parametrize(("streams", "capacity", "chunk"), [(3, 100, 16), (16, 1000, 64)])
def test_the_estimated_size_is_right(
    directory: Path, streams: int, capacity: int, chunk: int
) -> None:
    with Replay(3, capacity, directory, chunk=chunk) as replay:
        peak = 0.0
        for tag in range(3 * max(chunk, capacity // streams)):
            replay.add_batch(batch([step(tag, s) for s in range(streams)]), list(range(streams)))
            peak = max(peak, replay.stats()["disk_bytes"])
        expected = replay.size_when_full()
        assert expected is not None
        assert peak <= expected.disk <= 1.5 * peak


@pytest.mark.parametrize(
    "options",
    [{"length": 0}, {"capacity": 0}, {"chunk": 0}, {"max_bytes": 0}],
)
def test_settings_that_cannot_work(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Replay(**({"length": 1, "capacity": 1} | options))
