"""Finished episodes of a replay: each is told until it was read, whatever happens to its steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dreamfleet.replay import Replay, ReplayError
from dreamfleet.replay.episodes import Finished
from dreamfleet.replay.storage import journal

Boot = Callable[[], None]
Cut = tuple[Replay, str, list[Finished]]
_numbers = itertools.count(1)


@pytest.fixture(autouse=True)
def boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Boot:
    """Starts the machine again, as far as a replay can see."""
    path, count = tmp_path / "boot_id", itertools.count()
    monkeypatch.setattr(journal, "BOOT_ID", path)

    def again() -> None:
        path.write_text(f"{next(count)}\n")

    again()
    return again


def opened(path: Path | None, capacity: int = 1000, *, follow: bool = True) -> Replay:
    replay = Replay(2, capacity, path, chunk=8)
    if follow:
        replay.follow_episodes()
    return replay


def killed(replay: Replay) -> None:
    """Its process is killed: its files stay as they are."""
    replay._closing.set()
    replay._closed = True
    replay._unlock()


def play(
    replay: Replay, *rewards: float, stream: int = 0, first: bool = True, last: bool = True
) -> None:
    """Steps of an episode, from its first to its last one."""
    for index, reward in enumerate(rewards):
        step: dict[str, Any] = {
            "reward": np.float32(reward),
            "is_first": np.bool_(first and index == 0),
            "is_last": np.bool_(last and index == len(rewards) - 1),
        }
        replay.add(step, stream)


def scores(replay: Replay, epoch: str = "", tick: int = 0) -> list[float]:
    return [each.score for each in replay.finished(epoch, tick)[1]]


@pytest.mark.parametrize("on_disk", [False, True])
def test_an_episode_is_told_from_its_first_to_its_last_step(tmp_path: Path, on_disk: bool) -> None:
    with opened(tmp_path / "replay" if on_disk else None) as replay:
        assert replay.finished()[1] == []
        play(replay, 0, 1, 2)
        play(replay, 5, first=False)  # its start is not known
        play(replay, 0, 9, last=False)  # cut short: the next one begins
        play(replay, *range(20), stream=1)  # over three chunks
        play(replay, 0, 4)
        epoch, found = replay.finished()
        assert found == [Finished(3, 3.0, 2), Finished(26, 190.0, 19), Finished(28, 4.0, 1)]
        assert replay.has_unread_episodes
        assert replay.finished(epoch, 3)[1] == found[1:]
        assert scores(replay, epoch, 28) == []
        assert not replay.has_unread_episodes


def test_a_batch_that_comes_again_has_no_second_score(tmp_path: Path) -> None:
    with opened(tmp_path / "replay") as replay:
        rows = {
            "reward": np.array([0, 1, 2, 3], np.float32),
            "is_first": np.array([True, False, True, False]),
            "is_last": np.array([False, True, False, True]),
        }
        for _ in range(2):
            replay.add_batch(rows, [0, 0, 1, 1], "actor", 1)
        assert scores(replay) == [1.0, 5.0]


def test_rows_of_one_batch_may_fill_several_chunks(tmp_path: Path) -> None:
    with opened(tmp_path / "replay") as replay:
        flags = np.zeros(30, bool)
        rows = {"reward": np.ones(30, np.float32), "is_first": flags, "is_last": flags.copy()}
        rows["is_first"] = np.arange(30) == 3
        rows["is_last"] = np.arange(30) == 27
        replay.add_batch(rows, [0] * 30)
        assert replay.finished()[1] == [Finished(28, 25.0, 24)]


def test_an_episode_longer_than_the_replay_has_its_score_after_a_kill(tmp_path: Path) -> None:
    replay = opened(tmp_path / "replay", capacity=10)
    play(replay, *[1.0] * 45, last=False)
    assert replay.stats()["steps"] < 30
    for _ in range(3):
        killed(replay)
        replay = opened(tmp_path / "replay", capacity=10)
        play(replay, *[1.0] * 3, first=False, last=False)
    play(replay, 1.0, first=False)
    assert replay.finished()[1] == [Finished(55, 55.0, 54)]
    killed(replay)


def test_an_episode_that_is_evicted_before_it_is_read_is_kept(tmp_path: Path) -> None:
    """Also if the replay is killed, again and again, and if it is opened with less room."""
    replay = opened(tmp_path / "replay", capacity=1000)
    for number in range(40):
        play(replay, 0, number)
    epoch, found = replay.finished()
    replay.finished(epoch, found[4].tick)  # these are written
    for capacity in (20, 10, 10):
        killed(replay)
        replay = opened(tmp_path / "replay", capacity=capacity)
        assert replay.stats()["steps"] < 60
        assert scores(replay, epoch, found[4].tick) == list(range(5, 40))
    for number in range(40, 60):
        play(replay, 0, number)
    killed(replay)
    replay = opened(tmp_path / "replay", capacity=10)
    assert scores(replay, epoch, found[4].tick) == list(range(5, 60))
    newest = replay.finished(epoch, found[4].tick)[1][-1].tick
    assert scores(replay, epoch, newest) == []
    killed(replay)


def test_what_is_read_in_time_is_not_kept(tmp_path: Path) -> None:
    with opened(tmp_path / "replay", capacity=10) as replay:
        epoch, tick = "", 0
        before = (tmp_path / "replay" / "episodes.json").read_bytes()
        for _ in range(50):
            play(replay, 0, 1)
            epoch, found = replay.finished(epoch, tick)
            tick = found[-1].tick
        assert (tmp_path / "replay" / "episodes.json").read_bytes() == before


@pytest.fixture
def after_a_power_cut(tmp_path: Path, boot: Boot) -> Iterator[Cut]:
    """A replay that has lost steps, and what a reader had of it before."""
    replay = opened(tmp_path / "replay")
    play(replay, 0, 1)
    play(replay, 0, 2)
    replay.sync()
    play(replay, 0, 3)
    epoch, found = replay.finished()
    assert [each.score for each in found] == [1.0, 2.0, 3.0]
    killed(replay)
    boot()
    replay = opened(tmp_path / "replay")
    assert replay.tick == 4
    yield replay, epoch, found
    killed(replay)


def test_ticks_that_a_power_cut_gives_out_again_lose_and_double_no_score(
    after_a_power_cut: Cut, tmp_path: Path
) -> None:
    replay, epoch, found = after_a_power_cut
    play(replay, 0, 4)  # with the ticks of an episode that was read, and dropped
    newer, after = replay.finished(epoch, found[2].tick)
    assert after == [Finished(6, 4.0, 1)]
    assert newer != epoch
    assert scores(replay, newer, 6) == []
    play(replay, 0, 5)
    killed(replay)
    replay = opened(tmp_path / "replay")  # a kill is no power cut
    assert scores(replay, newer, 6) == [5.0]
    assert scores(replay, epoch, 6) == [4.0, 5.0], "a reader that has not written since"
    killed(replay)


def test_a_reader_that_was_behind_at_a_power_cut_gets_what_is_left(
    after_a_power_cut: Cut, boot: Boot, tmp_path: Path
) -> None:
    replay, epoch, found = after_a_power_cut
    play(replay, 0, 4)
    assert scores(replay, epoch, found[0].tick) == [2.0, 4.0]
    replay.sync()
    killed(replay)
    boot()  # once more, and the reader has written nothing meanwhile
    replay = opened(tmp_path / "replay")
    play(replay, 0, 5)
    assert scores(replay, epoch, found[2].tick) == [4.0, 5.0]
    killed(replay)


def test_steps_of_other_runs_have_no_score_here(tmp_path: Path) -> None:
    with opened(tmp_path / "other") as other:
        play(other, *range(20))
        play(other, 0, 7)
    replay = opened(tmp_path / "replay")
    replay.load_directory(tmp_path / "other")
    play(replay, 0, 1)
    killed(replay)
    with opened(tmp_path / "replay") as again:
        assert again.stats()["steps"] == 24
        assert scores(again) == [1.0]


def test_a_run_of_an_older_version_goes_on_from_where_it_is(tmp_path: Path) -> None:
    """Its scores were written; only an episode whose first steps are there goes on."""
    with opened(tmp_path / "replay", follow=False) as before:
        play(before, 0, 1)
        play(before, 0, 2, last=False)
    (tmp_path / "replay" / "episodes.json").unlink(missing_ok=True)
    replay = opened(tmp_path / "replay")
    play(replay, 3, first=False)
    killed(replay)
    with opened(tmp_path / "replay") as again:
        assert scores(again) == [5.0]


def test_a_replay_that_was_made_anew_is_read_from_its_start(tmp_path: Path) -> None:
    with opened(None) as before:
        play(before, *range(20))
        epoch, _ = before.finished()
    with opened(tmp_path / "replay") as replay:
        play(replay, 0, 1)
        assert scores(replay, epoch, 20) == [1.0]


def test_a_damaged_ledger_costs_what_was_not_read_at_most(tmp_path: Path) -> None:
    with opened(tmp_path / "replay") as replay:
        play(replay, 0, 1)
        epoch, found = replay.finished()
    (tmp_path / "replay" / "episodes.json").write_text('{"epochs": 5')
    with opened(tmp_path / "replay") as again:
        assert again.skipped_files == {}
        play(again, 0, 2)
        assert scores(again, epoch, found[0].tick) == [2.0]


def test_a_replay_without_a_reader_keeps_no_scores(tmp_path: Path) -> None:
    with opened(tmp_path / "replay", capacity=10, follow=False) as replay:
        play(replay, *range(40))
        with pytest.raises(ReplayError, match="follow_episodes"):
            replay.finished()
    assert not (tmp_path / "replay" / "episodes.json").exists()


def test_steps_without_rewards_have_no_scores() -> None:
    with opened(None) as replay:
        replay.add({"is_last": np.bool_(True)})
        assert replay.finished()[1] == []


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_score_that_is_not_finite_costs_no_other(tmp_path: Path, odd: float) -> None:
    with opened(tmp_path, 10) as replay:
        for n in range(30):
            play(replay, 0, odd if n == 3 else n)
        epoch, _ = replay.finished()
    with opened(tmp_path, 10) as replay:
        again, found = replay.finished()
    assert again == epoch
    assert [each.score for each in found if math.isfinite(each.score)] == [*range(3), *range(4, 30)]
