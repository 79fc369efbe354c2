"""Chunk files become sequences: this run's own after a restart, and those of other runs.

`reopen` takes in the chunks of the replay's own directory, whose streams are continued.
`find_new` and `copy_in` copy the chunks of another run, which this run never appends to. The other
run may still be writing. Copying from it again brings what is new: rows of chunks that are here
already, and the chunks that continue them.
"""

from __future__ import annotations

import logging
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dreamfleet.replay.errors import ReplayError, SchemaError, StorageFullError
from dreamfleet.replay.schema import StreamId
from dreamfleet.replay.storage.files import ChunkInfo, Found, header_bytes, scan
from dreamfleet.replay.storage.journal import (
    Journal,
    LeftBy,
    Source,
    damaged_path,
    read_committed,
)
from dreamfleet.replay.storage.store import Store
from dreamfleet.replay.table import Table

log = logging.getLogger(__name__)

Ticks = NDArray[np.int64]

_NO_TICKS: Ticks = np.zeros(0, np.int64)
_FAR, _FEW = 1 << 16, 8


def reopen(table: Table, found: Sequence[Found]) -> dict[str, str]:
    """Take in the chunks of the table's own directory, and clear what was never committed.

    What looks damaged is moved aside, or copied before it is changed; only chunks that were made
    and never filled are removed.

    Returns the files that could not be used, with the reason.
    """
    store, journal = table.store, table.journal
    chunks, skipped = {}, {}
    for item in found:
        try:
            store.attach(item.path, item.info)
            chunks[item.info.id] = item.info
        except OSError as error:
            skipped[item.path.name] = f"cannot be mapped: {error}"
            log.warning("Skipping replay chunk %s: %s.", item.path, error)
    slots = {chunk: store.slot_of[chunk] for chunk in chunks}
    every = np.sort(np.concatenate([_NO_TICKS, *(store.ticks[s] for s in slots.values())]))
    every = every[every > 0]
    if journal.is_new and slots:
        log.warning("The replay's journal is lost: every step found in its chunks is kept.")
        journal.begin(_newest_plausible(every))
    elif journal.in_doubt:
        _settle(journal, every)
    power_cut = journal.left_by is LeftBy.POWER_CUT
    if power_cut:
        log.warning(
            "The replay was not closed before the machine was restarted, or the run was moved: "
            "steps after the last sync are dropped, of which the files hold %d.",
            int((every > journal.committed).sum()),
        )
    for chunk, slot in slots.items():
        ticks = store.ticks[slot]
        store.lengths[slot] = count = valid_ticks(ticks, journal.committed)
        rest = ticks[count:]
        if not rest.any():
            continue
        if ((rest < 0) | ((rest > 0) & (rest <= journal.committed))).any():
            name = chunks[chunk].filename
            path, copied = _keep_damaged(store, name, whole=count > 0)
            skipped[name] = f"is damaged after {count} steps, and kept as {path}"
            if not copied:
                store.lengths[slot] = 0
                continue
        rest[:] = 0  # never committed, or behind the damage
        store.changed.add(slot)
    store.release([slot for slot in slots.values() if not store.lengths[slot]])
    journal.forget_uncommitted()
    sizes = {c: int(store.lengths[s]) for c, s in slots.items() if store.lengths[s]}
    chains = linked({c: chunks[c].previous for c in sizes}, sizes, store.steps)
    ticks_of = [
        np.concatenate([store.ticks[slots[c], : sizes[c]] for c in chain]) for chain in chains
    ]
    # Ticks are given out without gaps, and what was evicted is older than the oldest item. If later
    # ones are missing, the last steps of some stream are lost. Only streams that wrote after them
    # are continued, because a sequence with a hole in it would look like any other. A power cut may
    # have dropped steps of any stream.
    hole = journal.committed if power_cut else _newest_missing(ticks_of, journal.committed)
    if not power_cut and hole <= _oldest_kept(ticks_of, table.length, table.items.capacity):
        hole = 0
    # A stream continues behind its newest step; older chains of it only lost their continuation.
    streams: list[StreamId | None] = [None] * len(chains)
    newest: dict[StreamId | None, int] = {None: journal.committed}
    for which in sorted(range(len(chains)), key=lambda k: -int(ticks_of[k][-1])):
        stream, end = chunks[chains[which][-1]].stream, int(ticks_of[which][-1])
        if stream not in newest and end > hole:
            streams[which] = stream
        newest.setdefault(stream, end)
    table.take_in_chains(
        [([slots[c] for c in chain], stream) for chain, stream in zip(chains, streams, strict=True)]
    )
    if journal.left_by in (LeftBy.KILL, LeftBy.UNKNOWN):
        store.changed.update(store.slot_of.values())  # what the writer before has not synced
    return skipped


def _settle(journal: Journal, every: Ticks) -> None:
    """Find out up to which step a journal in doubt had committed.

    Rows are complete before their ticks are written, and all of them before a commit begins. So if
    the commit was interrupted, or its record is damaged, every tick of the batch is there.
    """
    behind = every[every > journal.committed]
    expected = np.arange(journal.committed + 1, journal.committed + 1 + len(behind))
    same = behind == expected
    complete = journal.committed + (len(same) if same.all() else int(same.argmin()))
    staged = [tick for tick in journal.staged() if tick <= complete]
    tick = staged[-1] if staged else complete
    log.warning(
        "The newest entry of the replay's journal is damaged. Its chunks hold %d more committed "
        "steps than the entry before; they are kept.",
        tick - journal.committed,
    )
    journal.settle(tick)


def _newest_plausible(every: Ticks) -> int:
    """The newest of these ticks, without a few that stand far above the others: they are given out
    without gaps, so those are damaged."""
    gaps = np.flatnonzero(np.diff(every) > max(_FAR, 2 * len(every)))
    while len(gaps) and len(every) - gaps[-1] - 1 <= _FEW:
        every, gaps = every[: gaps[-1] + 1], gaps[:-1]
    return int(every[-1]) if len(every) else 0


def _keep_damaged(store: Store, name: str, *, whole: bool) -> tuple[Path, bool]:
    """Keep a chunk as it is in the folder of damaged files: a copy, or itself if nothing in it is
    `whole`, or if there is no room for a copy. Returns where it is, and whether that is a copy."""
    assert store.directory is not None
    path, aside = store.directory / name, damaged_path(store.directory, name)
    try:
        if whole:
            shutil.copyfile(path, aside)
    except OSError as error:
        log.warning("There is no copy of %s: %s.", path, error)
        whole = False
    if not whole:
        path.rename(aside)
    log.warning("The replay chunk %s is damaged; it is kept as %s.", path, aside)
    return aside, whole


class _Chunk(NamedTuple):
    """A chunk of the other run, with the ticks that its steps have there."""

    found: Found
    ticks: Ticks

    @property
    def id(self) -> bytes:
        return self.found.info.id


class _Copy(NamedTuple):
    """Rows of it, from `first` on, that were copied to a slot here; all of them if it is new."""

    chunk: _Chunk
    slot: int
    first: int


class OtherRun(NamedTuple):
    """What another run's directory holds that may be new here."""

    path: Path
    source: Source
    committed: int
    found: list[Found]
    skipped: dict[str, str]


def find_new(path: Path, journal: Journal) -> OtherRun:
    """The chunks of another run's directory; none if nothing came in since last time."""
    header = read_committed(path) if path.is_dir() else None
    if header is None:
        raise ReplayError(f"{path} is not a replay directory: it has no journal.")
    run, committed = header
    source = b"load:" + run
    newest = journal.newest(source)
    if newest is not None and committed <= newest:
        return OtherRun(path, source, committed, [], {})
    return OtherRun(path, source, committed, *scan(path, run))


def copy_in(table: Table, other: OtherRun, shard: int = 0, shards: int = 1) -> int:
    """Copy what is new of another run's committed steps; how many that is. Of several shards, each
    copies the streams that are its own."""
    store, journal = table.store, table.journal
    _check_fits(store, other)
    wanted = [
        chunk
        for chunk in _newest(other, table.length, table.items.capacity, shard, shards)
        if chunk.id not in store.slot_of or _grew(table, chunk)
    ]
    if table.max_bytes is not None and len(wanted) * store.chunk_bytes > table.max_bytes:
        raise StorageFullError(
            f"The steps of {other.path} need {len(wanted) * store.chunk_bytes:,} bytes, more than "
            f"max_bytes={table.max_bytes:,}: raise max_bytes, or lower the replay's capacity."
        )

    def missing(gone: NDArray[np.bool_] | None) -> int:
        """Chunks to make: those not here, and those that would have to go to make room."""
        slots = [store.slot_of.get(chunk.id) for chunk in wanted]
        return sum(
            slot is None or (gone is not None and bool(gone[table.chains.closed_at(slot)]))
            for slot in slots
        )

    table.make_room(missing)
    copies: list[_Copy] = []
    last = -1
    try:
        for chunk in wanted:
            _copy(table, chunk, copies)
        last = journal.committed + sum(len(c.chunk.ticks) - c.first for c in copies)
        # New ticks in the old order: to this replay the steps are as old as their arrival.
        order = np.argsort(np.concatenate([_NO_TICKS, *(c.chunk.ticks[c.first :] for c in copies)]))
        ticks = np.empty(len(order), np.int64)
        ticks[order] = np.arange(journal.committed + 1, last + 1)
        start = 0
        for copy in copies:
            count = len(copy.chunk.ticks) - copy.first
            store.ticks[copy.slot, copy.first : copy.first + count] = ticks[start : start + count]
            start += count
        journal.stage(other.source, other.committed, last)
        journal.commit(last)
    finally:
        # Also when interrupted: what is committed is taken in, what is not leaves no trace.
        if journal.committed == last:
            _take_in(table, copies)
        else:
            for copy in copies:
                rows = np.arange(copy.first, len(copy.chunk.ticks))
                store.erase(np.full_like(rows, copy.slot), rows)
            store.release(copy.slot for copy in copies if not copy.first)
            journal.forget_uncommitted()
    return len(order)


def _take_in(table: Table, copies: list[_Copy]) -> None:
    """Chunks that continue a chain here lengthen it, the others are chains of their own."""
    store = table.store
    for chunk, slot, _ in copies:
        store.lengths[slot] = len(chunk.ticks)
    new = {chunk.id: (chunk, slot) for chunk, slot, first in copies if not first}
    grown: dict[int, list[int]] = {
        table.chains.closed_at(slot): [] for _, slot, first in copies if first
    }
    sizes = {name: len(chunk.ticks) for name, (chunk, _) in new.items()}
    previous = {name: chunk.found.info.previous for name, (chunk, _) in new.items()}
    chains: list[tuple[list[int], StreamId | None]] = []
    for chain in linked(previous, sizes, store.steps):
        slots = [new[name][1] for name in chain]
        before = store.slot_of.get(previous[chain[0]] or b"", -1)
        longer = table.chains.lengthen(before, slots)
        if longer is None:
            chains.append((slots, None))
        else:
            grown[longer] = slots
    table.take_in_chains(chains, grown)


def _check_fits(store: Store, other: OtherRun) -> None:
    info = other.found[0].info
    if (info.schema, info.steps) != (store.schema, store.steps):
        raise SchemaError(
            f"The steps in {other.path} do not fit: "
            f"{store.schema.describe_difference(info.schema) or 'same keys'}; chunks of "
            f"{info.steps} steps, here {store.steps}. Load it into a new replay, which takes over "
            "its keys and chunks."
        )


def _grew(table: Table, chunk: _Chunk) -> bool:
    """Whether it has more steps than its copy here."""
    slot = table.store.slot_of[chunk.id]
    return len(chunk.ticks) > table.store.lengths[slot] and table.chains.closed_at(slot) >= 0


def _copy(table: Table, chunk: _Chunk, copies: list[_Copy]) -> None:
    """Copy rows, unless the other run has let the chunk go meanwhile."""
    store, stop = table.store, len(chunk.ticks)
    here = store.slot_of.get(chunk.id)
    first = 0 if here is None else int(store.lengths[here])
    path = chunk.found.path
    try:
        slot = store.copy(path, chunk.found.info, first, stop)
    except FileNotFoundError:
        return
    copies.append(_Copy(chunk, slot, first))


def _newest(other: OtherRun, length: int, capacity: int, shard: int, shards: int) -> list[_Chunk]:
    """The chunks that the newest `capacity` items lie in; copying more would be for nothing."""
    chunks = {}
    for item in other.found:
        try:
            ticks = read_ticks(item)
        except FileNotFoundError:
            continue  # The other run let it go meanwhile, as it is older than all it keeps.
        ticks = ticks[: valid_ticks(ticks, other.committed)]
        if len(ticks):
            chunks[item.info.id] = _Chunk(item, ticks)
    steps = other.found[0].info.steps
    sizes = {name: len(chunk.ticks) for name, chunk in chunks.items()}
    chains = linked({name: c.found.info.previous for name, c in chunks.items()}, sizes, steps)
    if shards > 1:
        chains = [c for c in chains if _stream_number(chunks[c[0]].found.info) % shards == shard]
    ticks_of = [np.concatenate([chunks[name].ticks for name in chain]) for chain in chains]
    oldest = _oldest_kept(ticks_of, length, capacity)
    wanted = []
    for chain, ticks in zip(chains, ticks_of, strict=True):
        completed = ticks[length - 1 :]
        first = int(np.searchsorted(completed, oldest))
        if first < len(completed):
            wanted += [chunks[name] for name in chain[first // steps :]]
    return wanted


def _stream_number(info: ChunkInfo) -> int:
    """The number of an environment; some number that stays, for a stream that has none."""
    if isinstance(info.stream, int):
        return info.stream
    return zlib.crc32(info.id if info.stream is None else info.stream.encode())


def read_ticks(found: Found) -> Ticks:
    with found.path.open("rb") as file:
        file.seek(header_bytes(found.info.schema))
        ticks = np.fromfile(file, np.int64, found.info.steps)
    if len(ticks) < found.info.steps:
        raise ReplayError(f"{found.path} became shorter while it was read: load it again.")
    return ticks


def valid_ticks(ticks: Ticks, committed: int) -> int:
    """Length of the leading run of growing ticks up to the committed one."""
    good = (ticks > 0) & (ticks <= committed)
    good[1:] &= ticks[1:] > ticks[:-1]
    return len(good) if good.all() else int(good.argmin())


def linked(
    previous: Mapping[bytes, bytes | None], sizes: Mapping[bytes, int], steps: int
) -> list[list[bytes]]:
    """Chunks in chains: each follows the one it names, if that is here and full."""
    after: dict[bytes, bytes] = {}
    starts = []
    for chunk, before in previous.items():
        if before is None or sizes.get(before) != steps or before in after:
            starts.append(chunk)
        else:
            after[before] = chunk
    chains = []
    for chunk in starts:
        chain = [chunk]
        while chain[-1] in after:
            chain.append(after[chain[-1]])
        chains.append(chain)
    return chains


def _oldest_kept(chains: Sequence[Ticks], length: int, capacity: int) -> int:
    """The tick that completed the oldest of the newest `capacity` items; 0 if there is none."""
    completed = np.concatenate([_NO_TICKS, *(ticks[length - 1 :] for ticks in chains)])
    if len(completed) > capacity:
        return int(np.partition(completed, -capacity)[-capacity])
    return int(completed.min()) if len(completed) else 0


def _newest_missing(chains: Sequence[Ticks], committed: int) -> int:
    """The newest committed tick that no step has; 0 if every one is here."""
    every = np.sort(np.concatenate([np.zeros(1, np.int64), *chains]))
    if every[-1] < committed:
        return committed
    gaps = np.flatnonzero(np.diff(every) > 1)
    return int(every[gaps[-1] + 1]) - 1 if len(gaps) else 0
