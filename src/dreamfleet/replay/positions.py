"""Where a run is: what is counted, which counts are durable, and how they are recovered.

Three things are counted:

    steps    training environment steps that the replay has stored
    samples  sequences that were handed out for training
    updates  training updates; saved in the agent's checkpoint with the parameters they made

`Positions` owns the first two; it lives in the replay's process. Steps need no count of their own:
the replay's journal commits a *tick* with every step, so `steps = tick + offset`, and the offset
only changes while the replay is opened. The rate limiter is saved nowhere: what it owes follows
from steps and samples (`Positions.owed`). All other step numbers of a run (the actor's, the
logger's, a checkpoint's) are copies of `steps`.

A replay of several shards has one `Positions` in each process:

    every shard      its own steps, `own = tick + offset`, as above
    the first shard  samples, what the limiter needs, and for each other shard the most steps that
                     it was ever heard of to have; `steps` is its own and all of those

A shard sends its own total, and repeats it until the first shard has answered; it acknowledges
nothing before. So the first shard is one message behind at most, and the next message makes up for
that, whichever process is killed. A shard that opens asks what was heard of it: if it knows of
less, its files were lost together with its counts.

Invariants, wherever any of the processes is killed and however often:

 1. A stored step is counted exactly once: by the very commit that stores it. A shard's commit
    counts in the run's steps at the latest before it is acknowledged.
 2. `steps` and `samples` never decrease, also when files of the replay are lost or removed.
 3. A batch is counted in `samples` before it is handed out. A learner that draws from several
    shards says how many samples it knows of, so a question that is asked again counts once.
 4. Steps that are copied in from other runs are never counted.
 5. With unchanged settings the limiter owes the same after a restart as before it. It never owes
    more than its tolerance allows, whatever the settings were before.

The counts lie in a mapped file (`dreamfleet.files`). One is stored whole or not at all, and its
page stays with the kernel when the process is killed, so the only question is the order of the
stores; each method says why its order is right. A power cut may lose what came after the last
`flush`, which is all that the counts of samples lose; steps follow from the tick that the replay
has after it. A count that is damaged is the one before, or is taken from the others.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dreamfleet.errors import ConfigError
from dreamfleet.files import COUNTER_WORDS, DurableCounters, map_words
from dreamfleet.replay.limiter import SamplesPerInsert

log = logging.getLogger(__name__)

# What is in the file. Of `_START` and `_UNCOUNTED` only the limiter knows: where it began to earn
# samples, and how many samples it does not count. The other shards' steps follow these.
_STEPS, _SAMPLES, _OFFSET, _IMPORTING, _START, _UNCOUNTED, _SHARDS = range(7)
_OTHERS = 7
POSITIONS_FILE = "positions"
"""The name of the file."""


class Positions:
    """The durable counts of a run. Any thread may call the methods.

    Args:
        path: The file; None keeps the counts in memory.
        tick: The replay's committed tick; of this shard, if there are several.
        shards: How many shards are counted here: all of them in the first one, else 1.
    """

    def __init__(self, path: Path | None, tick: int, shards: int = 1) -> None:
        self._lock = threading.Lock()  # a count is read, changed and stored
        self._map = map_words(path, COUNTER_WORDS * (_OTHERS + shards - 1))
        self._numbers = DurableCounters(np.frombuffer(self._map, "<u8"))
        self._tick = tick
        values = self._numbers.values
        if damaged := [values[n] for n, doubt in enumerate(self._numbers.doubtful) if doubt]:
            log.warning(
                "Some of the run's counts are damaged: %d have their previous values, %d are lost.",
                len(damaged) - damaged.count(None),
                damaged.count(None),
            )
        by_tick, noted = tick + self._read(_OFFSET), self._read(_STEPS)
        if values[_SHARDS] is None:
            # New, or killed before: the counts of a first start may be stored again.
            self._store(_SHARDS, shards)
        if (made := self._read(_SHARDS)) != shards:
            raise ConfigError(
                f"This run's replay is spread over {made} shards, and cannot be opened as "
                f"{shards}: set replay_shards={made}."
            )
        if values[_OFFSET] is None:
            self._count_from(tick if values[_STEPS] is None else noted)
        elif self._read(_IMPORTING):
            # Killed while steps of other runs were copied in: some of the ticks are theirs. No
            # step could be stored meanwhile, so the noted count is right.
            self._end_import(noted)
        elif by_tick < noted:
            log.warning(
                "The replay holds %d steps less than the run has made; the run resumes without "
                "them.",
                noted - by_tick,
            )
            self._count_from(noted)
        else:
            self._store(_STEPS, by_tick)
        self.flush()  # before ticks are synced that these counts belong to

    @property
    def steps(self) -> int:
        """Training steps that the run has made and the replay has stored, in all its shards."""
        return self.own + sum(value or 0 for value in self._numbers.values[_OTHERS:])

    @property
    def own(self) -> int:
        """Those of this shard."""
        return self._read(_STEPS)

    def of(self, shard: int) -> int:
        """Those of a shard, as far as they are known here."""
        return self._read(_OTHERS + shard - 1) if shard else self.own

    @property
    def samples(self) -> int:
        """Sequences that were handed out for training."""
        return self._read(_SAMPLES)

    def stored(self, tick: int) -> None:
        """The replay has committed steps up to this tick.

        The commit itself was what counted them. The count that is noted here is only needed when
        the replay's files are lost.
        """
        with self._lock:
            self._tick = tick
            self._store(_STEPS, tick + self._read(_OFFSET))

    def heard(self, shard: int, steps: int) -> int:
        """Another shard says how many steps it has stored; returns the most it ever said."""
        with self._lock:
            most = max(steps, self.of(shard))
            self._store(_OTHERS + shard - 1, most)
            return most

    def sampled(self, count: int) -> None:
        """Sequences are about to be handed out."""
        with self._lock:
            self._store(_SAMPLES, self._read(_SAMPLES) + count)

    def granted(self, count: float) -> None:
        """Samples are allowed that no steps have earned."""
        with self._lock:
            self._store_float(_UNCOUNTED, self._read_float(_UNCOUNTED) + count)

    def raise_to(self, steps: int) -> int:
        """A checkpoint knows of this many steps; if the replay knows of fewer, its files were lost
        together with these counts. Returns how many are missing; this shard counts them."""
        with self._lock:
            missing = max(0, steps - self.steps)
            if missing:
                # The limiter has not seen these steps: it earns nothing for them.
                if start := self._read(_START):
                    self._store(_START, start + missing)
                self._count_from(self.own + missing)
            return missing

    def import_steps(self, import_all: Callable[[], int]) -> None:
        """Let steps of other runs be copied into the replay, without counting them; `import_all`
        returns the tick afterwards."""
        self._store(_IMPORTING, 1)
        self.flush()
        self._tick = import_all()
        self._end_import(self.own)
        self.flush()

    def owed(self, limiter: SamplesPerInsert, size: int) -> float:
        """Samples that learning owes, for a limiter that starts now.

            owed = -debt + ratio * (steps since the start of earning) + granted - samples since

        The start is the step that fills the replay to `minsize`. When steps were lost or copied in,
        or the settings have changed, the difference is forgiven down to what the limiter tolerates.
        """
        if limiter.ratio <= 0:  # no limit
            return -limiter.debt
        steps, samples = self.steps, self.samples
        if size < limiter.minsize:
            # Interrupted between the stores, the next start comes here again.
            self._store(_START, steps + limiter.minsize - size)
            self._store_float(_UNCOUNTED, samples)
            return -limiter.debt
        start = self._read(_START)
        if not start:
            # Full before the run's first step: with steps of other runs, learning may begin.
            start = steps + 1
            self._store_float(_UNCOUNTED, samples + limiter.debt)
            self._store(_START, start)
        earned = limiter.ratio * max(0, steps - start + 1)
        owed = -limiter.debt + earned - samples + self._read_float(_UNCOUNTED)
        least, most = -max(limiter.debt, limiter.tolerance), limiter.tolerance * limiter.ratio
        bounded = min(max(owed, least), most)
        # One message more than tolerated is usual, because a message is let through whole.
        if not least - 2 * limiter.tolerance <= owed <= 2 * most:
            self._store_float(_UNCOUNTED, self._read_float(_UNCOUNTED) + bounded - owed)
        return bounded

    def flush(self) -> None:
        """Make the counts survive a power cut."""
        self._map.flush()

    def _count_from(self, steps: int) -> None:
        # In any order: interrupted in between, the next start takes the larger count, this one.
        self._store(_STEPS, steps)
        self._store(_OFFSET, steps - self._tick)

    def _end_import(self, steps: int) -> None:
        # The mark last: while it is there, only the noted count of steps is valid.
        self._store(_OFFSET, steps - self._tick)
        self._store(_IMPORTING, 0)

    def _read(self, which: int) -> int:
        return self._numbers.values[which] or 0

    def _store(self, which: int, value: int) -> None:
        self._numbers.set(which, value)
        if which not in (_STEPS, _SAMPLES) and which < _OTHERS:
            self._numbers.set(which, value)  # it changes seldom: the one before would be no good

    def _read_float(self, which: int) -> float:
        value: float = _FLOAT.unpack(_WORD.pack(self._read(which)))[0]
        return value

    def _store_float(self, which: int, value: float) -> None:
        self._store(which, _WORD.unpack(_FLOAT.pack(value))[0])


_WORD, _FLOAT = struct.Struct("<q"), struct.Struct("<d")
