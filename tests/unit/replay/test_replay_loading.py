"""Copying the steps of other runs: all of them, what is new, and what goes wrong."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_history import CHUNK, LENGTH, History, open_replay, write_history
from replay_model import InOrder, all_items, step, tags

from dreamfleet.replay import Replay, ReplayError, SchemaError
from dreamfleet.replay.reading import StoredChain
from dreamfleet.replay.storage.journal import Journal
from dreamfleet.spaces import Space

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


def test_more_steps_than_the_capacity_keep_the_newest(directory: Path) -> None:
    history = write_history(directory, 60)
    with Replay(LENGTH, 20, chunk=CHUNK, selector=InOrder()) as replay:
        replay.load_directory(directory)
        assert all_items(replay) == history.items(60)[-20:]


def test_more_steps_than_max_bytes_keep_the_newest(tmp_path: Path) -> None:
    with Replay(4, 10**6, tmp_path, chunk=16) as other:
        other.add_batch(*tags(range(200)))
    with Replay(4, 10**6, chunk=16, max_bytes=4 * BYTES, selector=InOrder()) as replay:
        assert replay.load_directory(tmp_path) == 200
        items = all_items(replay)
        assert items == [tuple(range(tag, tag + 4)) for tag in range(197 - len(items), 197)]
        assert len(items) > 32


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


def test_chunks_that_another_run_removes_while_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it stored meanwhile comes too, and nothing is joined across what is missing."""
    with Replay(2, 100, tmp_path, chunk=4) as other:
        other.add_batch(*tags(range(40)))
        read = StoredChain.read

        def evict_first(self: StoredChain, key: str, start: int, stop: int) -> Any:
            if start >= 16:
                monkeypatch.setattr(StoredChain, "read", read)
                other.add_batch(*tags(range(40, 140)))
            return read(self, key, start, stop)

        with Replay(2, 1000, chunk=8, selector=InOrder()) as replay:
            monkeypatch.setattr(StoredChain, "read", evict_first)
            replay.load_directory(tmp_path)
            first = [tag for tag, _ in all_items(replay)]
            assert first == [*range(15), *range(36, 139)]
            assert all(later == tag + 1 for tag, later in all_items(replay))


def test_a_copy_that_fails_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    with Replay(1, 100, other, chunk=4) as replay:
        replay.add_batch(*tags(range(10)))
    with Replay(1, 100, mine, chunk=4, selector=InOrder()) as replay:
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "commit", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                replay.load_directory(other)
        assert replay.stats()["chunks"] == 0
        assert not list(mine.glob("*.chunk"))
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
            assert loaded == added
            assert (all_items(reader) if len(reader) else []) == history.items(number + 1)
            assert reader.load_directory(other.directory or "") == 0
            if restart and on_disk:
                reader.close()
                reader = Replay(5, 1000, mine, selector=InOrder())
    assert len(history.items(40)) > 100
    reader.close()


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


def test_a_stream_that_began_anew_is_not_joined_to_what_it_had(tmp_path: Path) -> None:
    """The other run has lost steps that were never copied."""
    with Replay(2, 20, tmp_path, chunk=4) as other, Replay(2, 1000, selector=InOrder()) as replay:
        other.add_batch(*tags(range(10)))
        replay.load_directory(tmp_path)
        other.add_batch(*tags(range(10, 60)))
        replay.load_directory(tmp_path)
        items = all_items(replay)
        assert items[:9] == [(tag, tag + 1) for tag in range(9)]
        assert all(later == tag + 1 for tag, later in items)
        assert len(items) > 9 + 20 - 4


def test_each_shard_takes_streams_of_its_own(tmp_path: Path) -> None:
    history = write_history(tmp_path / "other", 30)
    found = []
    for shard in range(2):
        with Replay(LENGTH, 1000, selector=InOrder()) as replay:
            replay.load_directory(tmp_path / "other", shard, 2)
            found += all_items(replay)
    assert sorted(found) == sorted(history.items(30))


def test_steps_of_other_runs_are_not_fresh(tmp_path: Path) -> None:
    write_history(tmp_path / "other", 30)
    with Replay(LENGTH, 1000, tmp_path / "mine") as replay:
        replay.load_directory(tmp_path / "other")
        assert replay.stats()["online_queue"] == 0
    with Replay(LENGTH, 1000, tmp_path / "mine") as replay:
        assert replay.stats()["online_queue"] == 0


def test_keys_are_left_out_and_filled_with_zeros(tmp_path: Path) -> None:
    write_history(tmp_path / "other", 10)
    with Replay(LENGTH, 1000) as replay:
        own = {"own": Space(np.float32, (3,))}
        replay.load_directory(tmp_path / "other", without={"state"}, zeros=own)
        data = replay.sample(2)
        assert "state" not in data
        assert data["own"].shape == (2, LENGTH, 3)
        assert not data["own"].any()
        with pytest.raises(SchemaError, match="have no 'more'"):
            replay.load_directory(tmp_path / "other", zeros={"more": Space(np.float32)})


def test_a_copy_of_the_replay_itself_is_refused(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    write_history(other, 10)
    shutil.copytree(other, mine)
    with open_replay(mine) as replay, pytest.raises(ReplayError, match="or a copy of it"):
        replay.load_directory(other)
