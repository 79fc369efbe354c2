"""A run's counts survive a kill between any two writes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dreamfleet.positions import Positions
from dreamfleet.replay import SamplesPerInsert


@dataclass(frozen=True)
class Limits:
    ratio: float = 0.5
    tolerance: float = 8.0
    minsize: int = 10
    debt: float = 8.0


class Killed(BaseException):
    """The process ends here."""


class Mortal(Positions):
    """Counts whose process is killed at one of its writes."""

    left: float = float("inf")

    def _store(self, word: int, value: int) -> None:
        self._die()
        super()._store(word, value)

    def _store_float(self, word: int, value: float) -> None:
        self._die()
        super()._store_float(word, value)

    def _die(self) -> None:
        if Mortal.left <= 0:
            raise Killed
        Mortal.left -= 1


class Kills(RuleBasedStateMachine):
    """A replay (a tick and a size that outlive every kill) and its positions, which are killed at
    any write of any operation, also while they recover."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.tick = self.size = 0
        self.made = self.drawn = 0  # what was stored and handed out, by our own count
        self.seen_steps = self.seen_samples = 0
        self.exact = True  # until files are lost
        Mortal.left = float("inf")
        self.open()

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    def open(self) -> None:
        while True:
            try:
                self.positions = Mortal(self.folder / "positions", self.tick)
                self.positions.owed(Limits(), self.size)
                return
            except Killed:
                Mortal.left = float("inf")

    def survive(self, action: Callable[[], object], writes: int) -> bool:
        """Run an action that is killed after so many writes; whether it was completed."""
        Mortal.left = writes
        try:
            action()
        except Killed:
            Mortal.left = writes  # the successor is killed while it recovers, too
            self.open()
            return False
        finally:
            Mortal.left = float("inf")
        return True

    kill_after = st.integers(0, 6)

    @rule(count=st.integers(1, 5), writes=kill_after)
    def store(self, count: int, writes: int) -> None:
        # The journal's commit is one store of its own, before which nothing happens here.
        self.tick += count
        self.size += count
        self.made += count
        self.survive(lambda: self.positions.stored(self.tick), writes)

    @rule(count=st.integers(1, 4), writes=kill_after)
    def sample(self, count: int, writes: int) -> None:
        if self.survive(lambda: self.positions.sampled(count), writes):
            self.drawn += count

    @rule(count=st.integers(1, 9), reached=st.integers(0, 9), writes=kill_after)
    def import_steps(self, count: int, reached: int, writes: int) -> None:
        def copy() -> int:
            self.tick += count
            self.size += count
            if reached < 3:  # killed in the middle of the copy
                raise Killed
            return self.tick

        self.survive(lambda: self.positions.import_steps(copy), writes)

    @rule(writes=kill_after)
    def restart(self, writes: int) -> None:
        Mortal.left = writes
        self.open()
        Mortal.left = float("inf")

    @rule(writes=kill_after)
    def lose_the_files(self, writes: int) -> None:
        self.tick = self.size = 0
        self.exact = False
        Mortal.left = writes
        self.open()
        Mortal.left = float("inf")

    @rule(more=st.integers(0, 5), writes=kill_after)
    def raise_to(self, more: int, writes: int) -> None:
        target = self.positions.steps + more
        if self.survive(lambda: self.positions.raise_to(target), writes):
            assert self.positions.steps == target
        self.exact = self.exact and not more

    @invariant()
    def nothing_is_lost_or_counted_twice(self) -> None:
        if self.exact:
            assert self.positions.steps == self.made
        assert self.positions.samples == self.drawn
        assert self.positions.steps >= self.seen_steps
        assert self.positions.samples >= self.seen_samples
        self.seen_steps, self.seen_samples = self.positions.steps, self.positions.samples

    @invariant()
    def the_limiter_owes_the_same_after_a_restart_and_no_more_than_it_tolerates(self) -> None:
        limits = Limits()
        owed = self.positions.owed(limits, self.size)
        assert -limits.tolerance <= owed <= limits.tolerance * limits.ratio
        if self.size < limits.minsize:
            assert owed == -limits.debt
        assert Positions(self.folder / "positions", self.tick).owed(limits, self.size) == owed


Kills.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestKills = Kills.TestCase


def test_the_limiter_after_a_restart_is_the_limiter_before(tmp_path: Path) -> None:
    """Steps and samples alone tell what a limiter owes."""
    limits = Limits()
    limiter = SamplesPerInsert(limits.ratio, limits.tolerance, limits.minsize, limits.debt)
    tick = 0
    positions = Positions(tmp_path / "positions", tick)
    assert positions.owed(limits, 0) == limiter.avail == -limits.debt
    for turn in range(200):
        if limiter.can_insert():
            limiter.insert(3)
            tick += 3
            positions.stored(tick)
        elif limiter.can_sample():
            limiter.sample(2)
            positions.sampled(2)
        if turn % 7 == 0:
            positions = Positions(tmp_path / "positions", tick)
            least, most = -limits.tolerance, limits.tolerance * limits.ratio
            assert positions.owed(limits, tick) == min(max(limiter.avail, least), most)
    assert positions.samples > 50


def test_a_prefilled_run_may_learn_at_once_and_counts_only_its_own_steps(tmp_path: Path) -> None:
    positions = Positions(tmp_path / "positions", 0)
    positions.import_steps(lambda: 100)
    assert positions.steps == 0
    assert positions.owed(Limits(), 100) == 0.0
    positions.stored(104)
    again = Positions(tmp_path / "positions", 104)
    assert again.steps == 4
    assert again.owed(Limits(), 104) == 2.0


def test_other_settings_forgive_what_the_limiter_would_not_tolerate(tmp_path: Path) -> None:
    positions = Positions(tmp_path / "positions", 0)
    positions.owed(Limits(ratio=0.5), 0)
    positions.stored(1000)
    positions.sampled(490)
    faster = Limits(ratio=4.0)
    assert positions.owed(faster, 1000) == faster.tolerance * faster.ratio
    # From there on the new ratio counts.
    positions.sampled(20)
    assert Positions(tmp_path / "positions", 1000).owed(faster, 1000) == 12.0


def test_a_replay_that_was_removed_is_filled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    positions = Positions(tmp_path / "positions", 0)
    positions.stored(1000)
    positions.sampled(400)
    emptied = Positions(tmp_path / "positions", 0)
    assert emptied.steps == 1000
    assert "1000 steps less" in caplog.text
    assert emptied.owed(Limits(), 0) == -8.0
    emptied.stored(10)
    assert emptied.steps == 1010


def test_steps_that_a_checkpoint_knows_of_earn_nothing(tmp_path: Path) -> None:
    positions = Positions(tmp_path / "positions", 0)
    assert positions.owed(Limits(), 0) == -8.0
    positions.raise_to(10_000)
    positions.stored(20)
    again = Positions(tmp_path / "positions", 20)
    assert again.steps == 10_020
    # As without the steps before: from the tenth new step on, half a sequence for each.
    assert again.owed(Limits(), 20) == -8.0 + 0.5 * 11


def test_without_a_limit_nothing_is_owed() -> None:
    assert Positions(None, 0).owed(Limits(ratio=0.0), 50) == -8.0
