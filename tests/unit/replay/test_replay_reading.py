"""Episodes of a replay are read while its owner goes on writing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dreamfleet.replay import Replay, ReplayError, reading
from dreamfleet.replay.reading import stored_episodes
from dreamfleet.replay.storage.files import SUFFIX


def add(replay: Replay, stream: int, start: int, count: int, length: int) -> None:
    """Steps of episodes of this length; each says which step of its stream it is."""
    for number in range(start, start + count):
        place = number % length
        step = {
            "number": np.array([number], np.float32),
            "image": np.full((1, 4, 4, 3), number % 256, np.uint8),
            "reward": np.array([1.0], np.float32),
            "is_first": np.array([place == 0]),
            "is_last": np.array([place == length - 1]),
        }
        replay.add_batch(step, [stream])


def test_episodes_are_found_and_read_while_the_replay_is_open(tmp_path: Path) -> None:
    with Replay(1, 5000, tmp_path) as replay:
        add(replay, 0, 0, 25, 10)
        add(replay, 1, 0, 1100, 400)  # more than a chunk holds
        found = stored_episodes([tmp_path])
        assert [(each.stream, each.length, each.begins, each.ends) for each in found] == [
            (1, 300, True, False),
            (1, 400, True, True),
            (1, 400, True, True),
            (0, 5, True, False),
            (0, 10, True, True),
            (0, 10, True, True),
        ]
        assert [each.score for each in found] == [300, 400, 400, 5, 10, 10]
        assert [each.history for each in found[:3]] == [800, 400, 0]
        assert all(each.complete for each in found)
        across = found[0]  # the first step of the second chunk is its 224th
        rows = across.read(220, 230)
        np.testing.assert_array_equal(rows["number"], np.arange(1020, 1030))
        np.testing.assert_array_equal(rows["image"][:, 3, 3, 2], np.arange(1020, 1030) % 256)
        before = across.read(-3, 2, {"number"})
        assert before["number"].tolist() == [797, 798, 799, 800, 801]
        assert list(before) == ["number"]
        add(replay, 0, 25, 5, 10)
        newer = stored_episodes([tmp_path], newest=1)
        assert [(each.stream, each.length, each.ends) for each in newer] == [(0, 10, True)]
    for path in tmp_path.glob(f"*{SUFFIX}"):
        path.unlink()
    with pytest.raises(ReplayError, match="removed this episode meanwhile"):
        across.read(0, 5)
    assert stored_episodes([tmp_path]) == []


def test_what_is_not_committed_is_not_read(tmp_path: Path) -> None:
    with Replay(1, 5000, tmp_path) as replay:
        add(replay, 0, 0, 12, 10)
        table = replay._table
        [slot] = table.store.slot_of.values()
        table.store.ticks[slot, 12] = table.journal.committed + 1  # written, never acknowledged
        assert [each.length for each in stored_episodes([tmp_path])] == [2, 10]


def test_where_the_beginning_is_gone_it_says_so(tmp_path: Path) -> None:
    with Replay(1, 1100, tmp_path) as replay:
        add(replay, 0, 0, 2300, 1500)
        found = stored_episodes([tmp_path])
        assert [(each.length, each.begins, each.complete) for each in found] == [
            (800, True, False),
            (476, False, False),
        ]
        assert found[1].read(0, 1)["number"] == 1024


def test_a_folder_without_a_replay_holds_nothing(tmp_path: Path) -> None:
    assert stored_episodes([tmp_path, tmp_path / "missing"]) == []
    (tmp_path / "journal").write_bytes(b"not a journal")
    assert stored_episodes([tmp_path]) == []


def test_a_chunk_that_leaves_meanwhile_costs_its_episodes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Replay(2, 1000, tmp_path, chunk=8) as replay:
        add(replay, 0, 0, 160, 4)
        listed = reading.stored_chains

        def evicting(path: Path) -> Any:
            found = listed(path)
            found[1][0].chunks[0].path.unlink()
            return found

        monkeypatch.setattr(reading, "stored_chains", evicting)
        assert len(reading.stored_episodes([tmp_path])) == 38
