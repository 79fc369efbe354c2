"""Copying the steps of other runs: all of them, what is new, and what goes wrong."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_history import CHUNK, LENGTH, History, add, open_replay, write_history
from replay_model import InOrder, all_items, batch, step, tags

from dreamfleet.replay import (
    Replay,
    ReplayError,
    SamplesPerInsert,
    SchemaError,
    StorageFullError,
    loading,
)
from dreamfleet.replay.storage.journal import Journal

BYTES = 16384
"""Size of a chunk of sixteen steps."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run" / "replay"


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_steps_of_another_run_are_copied_in(directory: Path, tmp_path: Path) -> None:
    history = write_history(directory, 60)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    theirs = history.items(60)
    for target in (None, tmp_path / "mine"):
        replay = Replay(LENGTH, 1000, target, chunk=CHUNK, selector=InOrder())
        steps = replay.load_directory(directory)
        assert steps >= len(theirs)
        assert all_items(replay)[-len(theirs) :] == theirs
        assert replay.load_directory(directory) == 0, "loading twice adds nothing"
        # Stream 0 of this run never continues the other run's stream 0.
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


def test_copied_streams_are_not_continued_after_a_restart(directory: Path, tmp_path: Path) -> None:
    write_history(directory, 60)
    with Replay(LENGTH, 1000, tmp_path / "mine", selector=InOrder()) as replay:
        replay.load_directory(directory)
        loaded = all_items(replay)
    with Replay(LENGTH, 1000, tmp_path / "mine", selector=InOrder()) as replay:
        for tag in range(10_000, 10_004):
            replay.add(step(tag, 0), 0)
        assert all_items(replay) == loaded, "four steps of a new chain are no item of five"


def test_steps_of_a_run_that_is_still_writing(directory: Path) -> None:
    history = History()
    with open_replay(directory) as writer, Replay(LENGTH, 1000, selector=InOrder()) as reader:
        for number in range(30):
            add(writer, history, number)
        reader.load_directory(directory)
        assert all_items(reader) == history.items(30)


def test_more_steps_than_the_capacity_keep_the_newest(directory: Path) -> None:
    history = write_history(directory, 60)
    with Replay(LENGTH, 20, chunk=CHUNK, selector=InOrder()) as replay:
        replay.load_directory(directory)
        assert all_items(replay) == history.items(60)[-20:]


def test_more_steps_than_max_bytes_are_refused_and_evict_nothing(directory: Path) -> None:
    write_history(directory, 60)
    with Replay(1, 1000, chunk=CHUNK, max_bytes=3 * 16384) as replay:
        replay.add(step(0))
        with pytest.raises(StorageFullError, match="more than max_bytes=49,152"):
            replay.load_directory(directory)
        assert replay.sample(1)["tag"].item() == 0


def test_steps_that_do_not_fit_next_to_open_streams_evict_nothing(tmp_path: Path) -> None:
    with Replay(4, 10**6, tmp_path, chunk=16) as other:
        other.add_batch(*tags(range(60)))
    with Replay(4, 10**6, chunk=16, max_bytes=4 * BYTES, selector=InOrder()) as replay:
        for tag in range(10):
            replay.add_batch(batch([step(tag, s) for s in range(2)]), [0, 1])
        before = all_items(replay)
        with pytest.raises(StorageFullError, match="no room for 4 more"):
            replay.load_directory(tmp_path)
        assert all_items(replay) == before


def test_directories_that_cannot_be_loaded_are_refused(directory: Path, tmp_path: Path) -> None:
    write_history(directory, 10)
    with Replay(LENGTH, 100) as replay:
        with pytest.raises(ReplayError, match="not a replay directory"):
            replay.load_directory(tmp_path / "nowhere")
        replay.add({"something": np.float32(1)})
        with pytest.raises(SchemaError, match="missing something"):
            replay.load_directory(directory)
    with open_replay(directory) as replay, pytest.raises(ReplayError, match="own directory"):
        replay.load_directory(directory)


def test_training_on_the_steps_of_another_run_alone(directory: Path) -> None:
    write_history(directory, 60)
    replay = Replay(LENGTH, 1000)
    limiter = SamplesPerInsert(0, 1, 50)
    limiter.load({"size": replay.load_directory(directory), "avail": 0.0})

    def batches() -> dict[str, Any]:
        limiter.sample(4, timeout=0)
        return replay.sample(4)

    for _ in range(100):
        data = batches()
        replay.update({"stepid": data["stepid"], "state": data["state"] + 1})
    assert replay.stats()["samples"] == 400


@pytest.mark.parametrize("moment", ["read_ticks", "_copy"])
def test_chunks_that_another_run_removes_while_they_are_loaded(
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


def test_loading_again_after_the_copy_was_evicted(tmp_path: Path) -> None:
    """The chunk that grew makes room for the ones that continue it, and comes back complete."""
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
            patch.setattr(Journal, "commit", _interrupt)
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


def test_loading_the_original_of_a_copied_directory(tmp_path: Path) -> None:
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
            assert (5, 1000) in items, "the stream continues with its own steps"
            assert all(b - a == 1 for a, b in items if (a, b) != (5, 1000))
