"""A run's counts survive a kill between any two writes."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dreamfleet.errors import ConfigError
from dreamfleet.replay import SamplesPerInsert
from dreamfleet.replay.positions import Positions
from dreamfleet.roles.scaling.coordinator import ReplayCoordinator
from dreamfleet.transport import Unanswered


@dataclass(frozen=True)
class Limits:
    ratio: float = 0.5
    tolerance: float = 8.0
    minsize: int = 10
    debt: float = 8.0


class Killed(BaseException):
    """The process of these counts ends here."""

    def __init__(self, positions: object = None) -> None:
        super().__init__()
        self.positions = positions


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
            raise Killed(self)
        Mortal.left -= 1


def test_a_kill_at_any_write_of_an_import_counts_none_of_its_steps(tmp_path: Path) -> None:
    """In the middle of the copy, and while a successor recovers. `ShardKills` has the other
    operations, and `tests/simulation.py` kills a whole replay at each of its writes."""
    limits = Limits()
    for writes, copied, again in itertools.product(range(8), (False, True), range(4)):
        path, tick = tmp_path / f"{writes}-{copied}-{again}", 20
        Mortal.left = float("inf")
        positions = Mortal(path, 0)
        positions.stored(tick)
        positions.sampled(3)
        positions.granted(2.0)
        before = positions.owed(limits, tick)

        def copy(copied: bool = copied) -> int:
            nonlocal tick
            tick = 60
            if not copied:
                raise Killed
            return tick

        Mortal.left = writes
        with suppress(Killed):
            positions.import_steps(copy)
        Mortal.left = again
        with suppress(Killed):
            Mortal(path, tick)
        Mortal.left = float("inf")
        positions = Mortal(path, tick)
        assert (positions.steps, positions.samples) == (20, 3)
        assert positions.owed(limits, tick) == before
        positions.stored(tick + 4)
        assert Mortal(path, tick + 4).steps == 24


class AtOnce(SamplesPerInsert):
    """A limiter that never waits: the machine has one thread, so nothing could end a wait."""

    def insert(self, count: int = 1, timeout: float | None = None, who: str = "writer") -> None:
        del timeout
        super().insert(count, 0.0, who)

    def sample(self, count: int = 1, timeout: float | None = None, who: str = "sampler") -> None:
        del timeout
        super().sample(count, 0.0, who)


class ShardKills(RuleBasedStateMachine):
    """A replay of two shards, each in a process that is killed at any write of any operation, also
    while it recovers. Calls whose answer was lost are made again, as clients do."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.ticks, self.sizes = [0, 0], [0, 0]
        self.made = self.drawn = self.known = 0
        self.unanswered = [False, False]
        Mortal.left = float("inf")
        self.second = Mortal(self.folder / "1", 0)
        self.open_lead()
        self.open_second()

    def teardown(self) -> None:
        Mortal.left = float("inf")
        shutil.rmtree(self.folder)

    def open_lead(self) -> None:
        limits = Limits()
        self.limiter = AtOnce(limits.ratio, limits.tolerance, limits.minsize, limits.debt)
        run: Any = SimpleNamespace(host_batch=BATCH, replay_shards=2, window=1)
        self.first = Mortal(self.folder / "0", self.ticks[0], shards=2)
        self.coordinator = ReplayCoordinator(self.limiter, self.first, run, AT_ONCE)
        self.coordinator.begin([self.first.own, self.second.own], self.sizes)

    def open_second(self) -> None:
        self.second = Mortal(self.folder / "1", self.ticks[1])
        known = self.coordinator.opened(1, self.second.own, self.sizes[1])
        self.second.raise_to(known)

    def survive(self, action: Callable[[], Any], caller: int | None = None) -> Any:
        """The result of an action of one of the processes, or of the learner: made again when
        another process was killed, and not when the caller was."""
        while True:
            try:
                return action()
            except Killed as killed:
                victim = 0 if killed.positions is self.first else 1
                self.restart(victim)
                if victim == caller:
                    return None

    def restart(self, victim: int, writes: int = 3) -> None:
        """Start one again; it and the other may be killed meanwhile."""
        Mortal.left = writes
        opening = (self.open_lead, self.open_second)[victim]
        while True:
            try:
                opening()
                Mortal.left = float("inf")
                return
            except Killed as killed:
                Mortal.left = float("inf")
                if victim == 1 and killed.positions is self.first:
                    self.open_lead()

    shard = st.integers(0, 1)
    kill_after = st.integers(0, 9)

    @rule(shard=shard, count=st.integers(1, 5), writes=kill_after, resent=st.booleans())
    def store(self, shard: int, count: int, writes: int, resent: bool) -> None:
        if self.unanswered[shard]:  # an actor sends nothing new before it is answered
            self.tell(shard)
        self.ticks[shard] += count
        self.sizes[shard] += count
        self.made += count
        self.tell(shard, writes)
        if resent and self.limiter.can_insert():
            self.tell(shard, writes)

    def tell(self, shard: int, writes: float = float("inf")) -> None:
        """A message of an actor, or one that it repeats, from the commit to the answer."""
        while not self.limiter.can_insert():
            self.draw()
        Mortal.left = writes

        def told() -> bool:
            mine = (self.first, self.second)[shard]
            mine.stored(self.ticks[shard])
            self.coordinator.inserted(shard, mine.own)
            return True

        self.unanswered[shard] = not self.survive(told, shard)
        Mortal.left = float("inf")

    @rule(writes=kill_after, lost=st.booleans())
    def sample(self, writes: int, lost: bool) -> None:
        if self.limiter.can_sample():
            self.draw(writes, lost=lost)

    def draw(self, writes: float = float("inf"), *, lost: bool = False) -> None:
        Mortal.left = writes
        with suppress(Unanswered):  # a limiter that was recovered may allow less: it has to wait
            for _ in range(2):  # a learner that knows another number asks once more
                known = self.known

                def ask(known: int = known) -> int:
                    return self.coordinator.permit(known)  # of the coordinator that lives now

                self.known = self.survive(ask)
                if lost and self.known != known:  # with the connection, after it was counted
                    self.known = self.survive(ask)
                if self.known == known + BATCH:
                    self.drawn += BATCH
                    break
            else:
                raise AssertionError("no batch was counted for this question")
        Mortal.left = float("inf")

    @rule(victim=shard, writes=kill_after)
    def kill(self, victim: int, writes: int) -> None:
        self.restart(victim, writes)

    @rule()
    def restart_the_learner(self) -> None:
        self.known = self.coordinator.position()["samples"]

    @rule(shard=shard, counts=st.booleans(), writes=kill_after)
    def lose_the_files(self, shard: int, counts: bool, writes: int) -> None:
        self.ticks[shard] = self.sizes[shard] = 0
        if counts and shard:  # those of the coordinator are lost in another test
            (self.folder / "1").unlink()
        self.restart(shard, writes)

    @rule(more=st.integers(0, 5))
    def raise_to(self, more: int) -> None:
        target = self.first.steps + more
        assert self.coordinator.raise_position(target)["steps"] == target
        self.made += more

    @invariant()
    def nothing_is_lost_or_counted_twice(self) -> None:
        assert self.first.steps == self.made
        assert self.first.own + self.second.own == self.made
        assert self.first.samples == self.drawn

    @invariant()
    def the_limiter_follows_from_the_counts(self) -> None:
        limits = Limits()
        uncounted = self.made - sum(self.coordinator._counted)
        again = Positions(self.folder / "0", self.ticks[0], shards=2)
        owed = again.owed(limits, sum(self.sizes))
        least = -limits.tolerance - BATCH
        assert least <= self.limiter.avail <= (limits.tolerance + 10) * limits.ratio
        # Each shard may have one message that the limiter has yet to count, or that it forgave.
        assert abs(self.limiter.avail + limits.ratio * uncounted - owed) <= 10 * limits.ratio + 1


BATCH = 2
AT_ONCE = threading.Event()  # who would have to wait is told so at once
AT_ONCE.set()
ShardKills.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


TestShardKills = ShardKills.TestCase


def test_another_number_of_shards_is_refused(tmp_path: Path) -> None:
    Positions(tmp_path / "positions", 0, shards=2)
    with pytest.raises(ConfigError, match=r"over 2 shards.*set replay_shards=2"):
        Positions(tmp_path / "positions", 0, shards=3)


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


class Flushed(Positions):
    """Counts of which a power cut leaves those of the last flush."""

    def __init__(self, path: Path, tick: int) -> None:
        self.path = path
        super().__init__(path, tick)

    def flush(self) -> None:
        super().flush()
        shutil.copy(self.path, f"{self.path}.flushed")

    def cut(self, tick: int) -> Flushed:
        """The counts after a power cut that leaves the steps up to this tick."""
        return Flushed(Path(shutil.copy(f"{self.path}.flushed", f"{self.path}.cut")), tick)


def test_a_power_cut_counts_no_step_of_another_run(tmp_path: Path) -> None:
    positions = Flushed(tmp_path / "positions", 0)

    def copied() -> int:
        assert [positions.cut(tick).steps for tick in (0, 50, 100)] == [0, 0, 0]
        return 100

    positions.import_steps(copied)
    positions.stored(110)
    ticks = (0, 50, 100, 101, 110)
    assert [positions.cut(tick).steps for tick in ticks] == [0, 0, 0, 1, 10]


def test_steps_that_a_power_cut_has_dropped_stay_counted(tmp_path: Path) -> None:
    positions = Flushed(tmp_path / "positions", 0)
    positions.stored(150)
    positions.flush()
    again = positions.cut(100)
    again.stored(130)
    assert again.steps == 180
    assert again.cut(120).steps == 170, "also after a second power cut"


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


@pytest.mark.parametrize("bits", [1, 1 << 40, 1 << 63], ids=str)
def test_a_damaged_count_is_the_one_before(tmp_path: Path, bits: int) -> None:
    """Whichever bit of the file changes, steps are right, and samples lag by a batch at most."""
    path, limits = tmp_path / "positions", Limits()
    positions = Positions(path, 0)
    positions.import_steps(lambda: 50)
    positions.owed(limits, 0)
    for batch in range(1, 6):
        positions.stored(50 + 10 * batch)
        positions.sampled(16)
    owed = positions.owed(limits, limits.minsize + 100)
    whole = path.read_bytes()
    for word in range(len(whole) // 8):
        damaged = np.frombuffer(whole, "<u8").copy()
        damaged[word] ^= np.uint64(bits)
        path.write_bytes(damaged.tobytes())
        read = Positions(path, 100)
        assert read.steps == 50
        assert read.samples in (64, 80)
        assert abs(read.owed(limits, limits.minsize + 100) - owed) <= 16
