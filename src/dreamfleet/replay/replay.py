"""The replay: steps in, sequences out, states back."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dreamfleet.errors import ConfigError
from dreamfleet.files import fsync
from dreamfleet.replay.episodes import Finished, Ledger
from dreamfleet.replay.errors import NotEnoughDataError, ReplayClosedError, ReplayError, SchemaError
from dreamfleet.replay.loading import imported_batches
from dreamfleet.replay.reopening import reopen
from dreamfleet.replay.schema import (
    STEPID,
    STEPID_BYTES,
    Schema,
    StreamId,
    check_flags,
    check_rows,
    check_steps,
    stored_steps,
    stream_names,
    update_values,
)
from dreamfleet.replay.selectors import Draw, Selector, Uniform
from dreamfleet.replay.storage.files import EPISODES, DirectoryLock, remove_partial, scan
from dreamfleet.replay.storage.journal import Journal, LeftBy, Source
from dreamfleet.replay.table import Table
from dreamfleet.spaces import Space

log = logging.getLogger(__name__)

Mode = Literal["train", "report", "eval"]
_MODES: tuple[Mode, ...] = ("train", "report", "eval")
_IMPORTED_STEPS = 1024  # are added at a time
SYNC_SECONDS = 10.0
"""New steps are synced this often: a power cut drops those that came later."""


class Shares(NamedTuple):
    """What there is to draw from, for a caller that draws from several replays."""

    items: int
    """Sequences that can be sampled."""
    fresh: int
    """Those of them that come first in training."""
    weights: list[float]
    """What all sequences weigh together, by each rule of the selector."""


class Split(NamedTuple):
    """The part of a batch that comes from one of several replays."""

    fresh: int
    """Fresh sequences."""
    drawn: list[int]
    """Sequences that each rule of the selector chooses."""
    everywhere: int
    """Sequences that can be sampled in all of the replays."""

    @property
    def batch(self) -> int:
        return self.fresh + sum(self.drawn)


class Replay:
    """A buffer of the newest `capacity` sequences of `length` consecutive steps of a stream.

    Steps lie in chunk files that are mapped into memory, so the buffer may be larger than RAM and
    a killed process loses nothing it acknowledged: `Replay(..., directory)` finds every step again.
    A thread syncs new steps every `SYNC_SECONDS`. Steps after the last sync are dropped after a
    power cut, and when the directory of a killed process is moved to another machine.
    Without a directory the same code runs on plain memory.

    All methods may be called from any thread.

    Args:
        length: Steps in a sequence.
        capacity: Sequences kept; the oldest leave first.
        directory: Where chunk files live. One replay at a time may have it open.
        chunk: Steps in a chunk file. A directory that has chunks already keeps their size.
        online: Whether training samples get each fresh, non-overlapping sequence once, first. Those
            that wait when the replay is closed or killed are then sampled as all others.
        selector: How sequences are chosen otherwise; uniformly if not given. See `make_selector`.
        seed: Seed of the samples.
        max_bytes: Bound on the chunks' bytes; the oldest sequences leave when it is reached.
        mark_cut_short: Whether the last step of a sequence gets `is_last` if a new episode begins
            behind it although the one before had not ended. `sample` marks such a step where it
            returns both, in any case.
    """

    def __init__(
        self,
        length: int,
        capacity: int,
        directory: str | Path | None = None,
        chunk: int = 1024,
        online: bool = True,
        selector: Selector | None = None,
        seed: int = 0,
        max_bytes: int | None = None,
        mark_cut_short: bool = False,
    ) -> None:
        for name, value in (("length", length), ("capacity", capacity), ("chunk", chunk)):
            if value < 1:
                raise ConfigError(f"The replay's {name} must be at least 1, not {value}.")
        if max_bytes is not None and max_bytes < 1:
            raise ConfigError(f"The replay's max_bytes must be positive or None, not {max_bytes}.")
        self.length = length
        self.capacity = capacity
        self.directory = None if directory is None else Path(directory)
        self.chunk = chunk
        self.online = online
        self.max_bytes = max_bytes
        self._mark_cut_short = mark_cut_short
        self.skipped_files: dict[str, str] = {}
        """Files in the directory that are not chunks of this replay, with the reason."""
        self._selector = selector or Uniform()
        self._rngs = {m: np.random.default_rng([seed, n]) for n, m in enumerate(_MODES)}
        self._lock = threading.RLock()
        self._syncing = threading.RLock()  # taken before the other
        self._closing = threading.Event()
        self._statistics = _Statistics()
        self._table: Table | None = None
        self._ledger: Ledger | None = None
        self._old_fraction, self._old_until = 0.0, 0
        self._closed = False
        self._directory_lock = DirectoryLock(self.directory) if self.directory else None
        try:
            self._journal = Journal(self.directory)
            if self.directory:
                if (self.directory / EPISODES).exists():
                    self._ledger = Ledger(self.directory / EPISODES)
                self._open(self.directory)
                dropped = self._journal.left_by in (LeftBy.POWER_CUT, LeftBy.UNKNOWN)
                if self._ledger and (dropped or self._ledger.is_new):
                    self._ledger.begin_epoch(self.tick)
                # Before steps are added, the synced journal names this boot.
                if self._journal.left_by is not LeftBy.KILL:
                    self._sync()
            else:
                self._journal.begin(0)
        except BaseException:
            self._unlock()
            raise
        arguments = weakref.ref(self), self._closing
        self._thread = threading.Thread(
            target=_sync_regularly, args=arguments, name="replay-sync", daemon=True
        )
        if self.directory:
            weakref.finalize(self, self._closing.set)
            self._thread.start()

    def __len__(self) -> int:
        """Sequences that can be sampled."""
        return self._table.items if self._table else 0

    @property
    def tick(self) -> int:
        """All steps that ever came in, by the count that a killed process does not forget."""
        return self._journal.committed

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, step: Mapping[str, Any], stream: StreamId = 0) -> int:
        """Add one step; see `add_batch`."""
        return self.add_batch({k: np.asarray(v)[None] for k, v in step.items()}, [stream])

    def add_batch(
        self,
        steps: Mapping[str, Any],
        streams: Sequence[StreamId] | NDArray[Any],
        source: Source | None = None,
        seq: int | None = None,
    ) -> int:
        """Add N steps, one for each stream named; all are stored when this returns.

        Args:
            steps: Arrays `[N, ...]`. Keys that start with `log/` are not stored.
            streams: Which stream (environment) each step belongs to. A stream may occur several
                times, with its steps in order.
            source: Who sends numbered batches. A sender that restarts its numbers needs a new name.
            seq: Number of the batch. A batch that was added before, also before a restart, is
                acknowledged and not added again.

        Returns:
            How many steps were added: N, or 0 for a batch seen before.

        Raises:
            SchemaError: Keys, dtypes or shapes are not those of the steps before.
            StorageFullError: There is no room; nothing was added and nothing stored is lost.
            BatchOrderError: The batch is too late to tell whether it was seen.
        """
        if (source is None) != (seq is None):
            raise ConfigError("Give a batch both a source and a seq, or neither.")
        if seq is not None and not 0 <= seq < 1 << 63:
            raise ConfigError(f"A batch's seq counts from 0, and cannot be {seq}.")
        arrays = stored_steps(steps)
        names = stream_names(streams)
        with self._lock:
            self._check_open()
            if source is not None and seq is not None and self._journal.seen(source, seq):
                return 0
            table = self._table_for(arrays, names)
            if names:
                table.append(arrays, names, source, seq)
                self._statistics.inserts += len(names)
            return len(names)

    def sample(
        self, batch: int, mode: Mode = "train", split: Split | None = None
    ) -> dict[str, NDArray[Any]]:
        """Copy sequences out: contiguous arrays `[batch, length, ...]`, with their `stepid`.

        The first step of a sequence has `is_first` set; where the next step is a first one,
        `is_last` is set. In train mode fresh sequences come first (see `online`). A `split` says
        how many sequences are chosen by which rule.
        """
        if mode not in _MODES or batch < 1:
            raise ConfigError(f"Sample at least 1 in one of {_MODES}, not {batch} in {mode!r}.")
        with self._lock:
            self._check_open()
            table = self._table
            if table is None or not table.items:
                raise NotEnoughDataError(
                    f"The replay holds no sequence of {self.length} steps of one stream yet: "
                    "wait for the environments, or load recorded steps."
                )
            numbers = self._draw(table, batch, mode, split)
            slots, indices = table.starts(numbers)
            pieces = table.store.pieces(slots, indices, self.length)
            cut = self._mark_cut_short and table.followed_by_first(slots, indices)
            self._statistics.sampled(table.high - numbers)
            # With the lock: no state changes and no chunk leaves while sequences are copied out.
            data = table.store.gather(pieces, batch, self.length)
        _annotate(data, cut)
        return data

    def mix(self, fraction: float, tick: int) -> None:
        """Draw this share of every training batch from sequences that came in up to a tick, and the
        rest from later ones, as long as there are both."""
        with self._lock:
            self._old_fraction = fraction
            self._old_until = self._table.items_until(tick) if self._table else 0

    def shares(self, mode: Mode = "train") -> Shares:
        """What a sample in this mode would be drawn from."""
        with self._lock:
            self._check_open()
            if self._table is None:
                return Shares(0, 0, [0.0 for _ in self._selector.parts])
            table = self._table
            fresh = len(table.online) if mode == "train" and self.online else 0
            weights = [part.weight(table.low, table.high) for part in self._selector.parts]
            return Shares(table.items, fresh, weights)

    def update(self, data: Mapping[str, Any]) -> int:
        """Write values back to the steps that `stepid` names.

        Args:
            data: `stepid` `[..., 20]` and arrays with the same leading axes: stored keys, and
                `priority`, which a prioritised selector follows.

        Returns:
            How many of the steps are still stored; the others are skipped and counted.
        """
        arrays = {key: np.asarray(value) for key, value in data.items()}
        stepid = arrays.pop(STEPID, None)
        if stepid is None or stepid.dtype != np.uint8 or stepid.shape[-1:] != (STEPID_BYTES,):
            raise SchemaError(f"An update needs a uint8 stepid of shape [..., {STEPID_BYTES}].")
        lead = stepid.shape[:-1]
        with self._lock:
            self._check_open()
            count = int(np.prod(lead))
            self._statistics.updates += count
            if self._table is None:
                self._statistics.skipped_updates += count
                return 0
            table = self._table
            values, priority = update_values(table.store.schema, arrays, lead)
            flat = stepid.reshape(-1, STEPID_BYTES)
            runs = table.store.locate(flat)
            here = sum(run.size for run in runs if run.slot >= 0)
            self._statistics.skipped_updates += count - here
            table.store.scatter(runs, values)
            if priority is not None and table.priorities:
                table.priorities.update(runs, priority)
            return here

    def load_directory(
        self,
        directory: str | Path,
        shard: int = 0,
        shards: int = 1,
        *,
        without: Collection[str] = (),
        zeros: Mapping[str, Space] | None = None,
    ) -> int:
        """Add the steps of another run's replay; returns how many.

        The other directory is only read and may be in use. Loading it again adds what is new.

        Args:
            directory: The other replay's.
            shard: Which of `shards` this is.
            shards: Replays that load the directory: each takes some of its streams.
            without: Keys that are left out.
            zeros: Keys that are added, with zeros.
        """
        path, added, more = Path(directory), 0, zeros or {}
        with self._lock:
            self._check_open()
            stored = self._table.store.columns if self._table else more
            if missing := sorted(more.keys() - stored.keys()):
                raise SchemaError(
                    f"The steps in {self.directory} have no {missing[0]!r}: an older version has "
                    "copied them. Use a new directory."
                )
            # So that a batch needs one chunk more for each stream, at most.
            most = min(self.chunk, _IMPORTED_STEPS)
            for batch in imported_batches(path, self._journal, most, without, shard, shards):
                count = len(batch.streams)
                steps = batch.steps | {
                    key: np.zeros((count, *space.shape), space.dtype) for key, space in more.items()
                }
                if self._table:
                    self._table.end_streams(batch.ended)
                added += self.add_batch(steps, batch.streams, batch.source, batch.seq)
                self._statistics.inserts -= count  # which are those of this run
        return added

    def follow_episodes(self) -> None:
        """From now on, keep the score of every finished episode until `finished` was asked for it.

        Scores begin with the steps that come in after the first call for a directory.
        """
        if self._ledger is None and self.tick:
            self.sync()  # a power cut must not drop steps that are not scored
        with self._lock:
            self._check_open()
            if self._ledger is None:
                self._ledger = Ledger(self.directory / EPISODES if self.directory else None)
                self._ledger.begin_epoch(self.tick)
                if self._table:
                    self._table.ledger = self._ledger

    def finished(self, epoch: str = "", tick: int = 0) -> tuple[str, list[Finished]]:
        """The epoch, and the episodes that a reader does not have yet, in the order of their ticks.

        Args:
            epoch: The epoch of the newest episode that the reader has written; empty for none.
            tick: Its tick. What came before it is never asked for again.
        """
        with self._lock:
            self._check_open()
            if self._ledger is None:
                raise ReplayError("Call follow_episodes before you ask for finished episodes.")
            since = min(self._ledger.since(epoch, tick), self.tick)
            self._ledger.mark_read(since)
            return self._ledger.epoch, self._table.finished(since) if self._table else []

    @property
    def has_unread_episodes(self) -> bool:
        """Whether episodes have finished that `finished` was not asked to go beyond."""
        with self._lock:
            if self._closed or self._ledger is None or self._table is None:
                return False
            return bool(self._table.finished(self._ledger.read))

    def stats(self) -> dict[str, float]:
        """Counts since the replay was opened, and sizes now; `ticks` are all steps that ever came
        in, which a killed process does not forget."""
        with self._lock:
            table = self._table
            index = table.index_bytes if table else 0
            data = table.data_bytes if table else 0
            return {
                "items": len(self),
                "steps": table.stored_steps if table else 0,
                "ticks": self._journal.committed,
                "chunks": table.store.chunks if table else 0,
                "streams": len(table.streams) if table else 0,
                "ram_bytes": index + (0 if self.directory else data),
                "disk_bytes": data if self.directory else 0,
                "online_queue": len(table.online) if table else 0,
                **self._statistics.summary(),
            }

    def sync(self) -> None:
        """Write everything to the disk itself, so that it survives a power cut.

        A killed process needs no sync, and new steps are synced every `SYNC_SECONDS` without it.
        Of values that were written back since the last call, a power cut may leave older ones.
        """
        self._sync(everything=True)

    def _sync(self, *, everything: bool = False, closed: bool = False) -> None:
        """Sync the steps that are new, or `everything`; then the journal that counts them."""
        with self._syncing:
            while True:
                with self._lock:
                    self._check_open()
                    table, journal = self._table, self._journal.freeze()
                    slots = table.store.take_changed(everything) if table else []
                if self.directory is None:
                    return
                if not slots and not everything and self._journal.left_by is LeftBy.KILL:
                    return  # nothing is new
                try:
                    # Without the lock, because it may take seconds. Evicting chunks meanwhile does
                    # no harm.
                    if table:
                        table.store.sync(slots)
                    fsync(self.directory)
                    if self._table is table:  # else the directory was opened again meanwhile
                        self._journal.flush(journal, closed=closed)
                        return
                except BaseException:
                    if table:
                        table.store.changed.update(slots)
                    raise

    def close(self) -> None:
        """Sync, unmap and release the directory; closing twice is fine."""
        self._closing.set()
        with self._syncing, self._lock:
            if self._closed:
                return
            try:
                self._sync(everything=True, closed=True)
            finally:
                self._closed = True
                if self._table:
                    self._table.store.close()
                    self._table = None
                self._unlock()
        if self._thread.is_alive():
            self._thread.join()

    def _draw(self, table: Table, batch: int, mode: Mode, split: Split | None) -> NDArray[np.int64]:
        train = mode == "train"
        old, low = 0, table.low
        if train and self._old_fraction and table.low < self._old_until < table.high:
            old, low = int(self._old_fraction * batch + self._rngs[mode].random()), self._old_until
        wanted = batch - old if split is None else split.fresh
        fresh = table.take_online(wanted) if train and self.online else []
        if fresh and table.priorities:
            table.priorities.taken(np.array(fresh, np.int64))
        request = Draw(self._rngs[mode], 0, low, table.high, consume=train)
        numbers = [np.array(fresh, np.int64)] if fresh else []
        if old:
            before = replace(request, count=old, low=table.low, high=low)
            numbers.append(self._selector.draw(before))
        if split is not None:
            request = replace(request, everywhere=split.everywhere)
            for part, count in zip(self._selector.parts, split.drawn, strict=True):
                if count:
                    numbers.append(part.draw(replace(request, count=count)))
        # All that is left; of a split, what was fresh and is so no more.
        if missing := batch - sum(map(len, numbers)):
            numbers.append(self._selector.draw(replace(request, count=missing)))
        return np.concatenate(numbers) if len(numbers) > 1 else numbers[0]

    def _table_for(self, arrays: Mapping[str, NDArray[Any]], names: list[StreamId]) -> Table:
        """The table, made from the first steps; raises if these steps do not fit it."""
        if self._table is not None:
            check_steps(self._table.store.schema, arrays, len(names))
            return self._table
        check_rows(arrays, len(names))
        check_flags(arrays)
        self._table = self._make_table(Schema.of(arrays), self.chunk)
        return self._table

    def _make_table(self, schema: Schema, steps: int, found: int = 0) -> Table:
        return Table(
            schema,
            steps,
            length=self.length,
            capacity=self.capacity,
            max_bytes=self.max_bytes,
            directory=self.directory,
            journal=self._journal,
            selector=self._selector,
            found=found,
            ledger=self._ledger,
        )

    def _open(self, path: Path) -> None:
        journal = self._journal
        remove_partial(path, power_cut=journal.left_by is LeftBy.POWER_CUT)
        found, self.skipped_files = scan(path, None if journal.is_new else journal.id)
        if found:
            info = found[0].info
            self.chunk = info.steps
            if journal.is_new:
                journal.identify(info.run)
            self._table = self._make_table(info.schema, info.steps, len(found))
            self.skipped_files |= reopen(self._table, found)
        if journal.is_new:
            journal.begin(0)

    def _check_open(self) -> None:
        if self._closed:
            raise ReplayClosedError("This replay is closed: open its directory again.")

    def _unlock(self) -> None:
        if self._directory_lock:
            self._directory_lock.release()


def _sync_regularly(find: weakref.ref[Replay], closing: threading.Event) -> None:
    while not closing.wait(SYNC_SECONDS):
        replay = find()
        if replay is None:
            return
        try:
            replay._sync()
        except ReplayClosedError:
            return
        except (ReplayError, OSError) as error:
            log.warning("The replay's new steps are not synced: %s", error)
        # Not kept while waiting: it may go away meanwhile.
        del replay


def _annotate(data: dict[str, NDArray[Any]], cut_short: NDArray[np.bool_] | bool) -> None:
    """A sequence begins with a first step, and an episode cut short ends where the next begins."""
    first, last = data.get("is_first"), data.get("is_last")
    if first is not None:
        if last is not None:
            last[:, :-1] |= first[:, 1:]
            last[:, -1] |= cut_short
        first[:, 0] = True


_RECENT = 1024
_COUNTERS = ("inserts", "samples", "updates", "skipped_updates")


class _Statistics:
    """What happened since the replay was opened."""

    def __init__(self) -> None:
        self.inserts = self.samples = self.updates = self.skipped_updates = 0
        self._ages: deque[int] = deque(maxlen=_RECENT)

    def sampled(self, ages: NDArray[np.int64]) -> None:
        """Sequences were sampled; a sequence's age is counted in sequences added since."""
        self._ages.extend(ages.tolist())
        self.samples += len(ages)

    def summary(self) -> dict[str, float]:
        ages = self._ages
        return {
            **{name: getattr(self, name) for name in _COUNTERS},
            "sample_age_mean": sum(ages) / max(1, len(ages)),
            "sample_age_max": float(max(ages, default=0)),
        }
