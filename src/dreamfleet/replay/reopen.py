"""Chunk files become a table again: a replay's own, or those of another run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dreamfleet.replay import chunkfile
from dreamfleet.replay.chunkfile import Stream
from dreamfleet.replay.directory import Found
from dreamfleet.replay.errors import ReplayError, StorageFullError
from dreamfleet.replay.journal import Source
from dreamfleet.replay.store import Store
from dreamfleet.replay.table import Table

log = logging.getLogger(__name__)

Ticks = NDArray[np.int64]


def restore(table: Table, found: Sequence[Found], damaged: bool) -> dict[str, str]:
    """Take in the chunks of the table's own directory, and clear what was never committed.

    Where committed steps are missing (`damaged`, or noticed here) no stream goes on from the steps
    before: a sequence with a hole in it would look like any other. Returns the files that could
    not be used, with the reason.
    """
    store, journal = table.store, table.journal
    chunks = {}
    skipped = {}
    for item in found:
        try:
            store.attach(item.path, item.info)
            chunks[item.info.id] = item
        except OSError as error:
            skipped[item.path.name] = f"cannot be mapped: {error}"
            log.warning("Skipping replay chunk %s: %s.", item.path, error)
    slots = {chunk: store.slot_of[chunk] for chunk in chunks}
    if journal.is_new and slots:
        log.warning("The replay's journal is lost: every step found in its chunks is kept.")
        journal.begin(max(int(store.ticks[slot].max()) for slot in slots.values()))
    damaged |= bool(skipped)
    newest = 0
    for slot in slots.values():
        ticks = store.ticks[slot]
        store.lengths[slot] = count = valid(ticks, journal.committed)
        rest = ticks[count:]
        if rest.any():
            damaged |= bool(((rest > 0) & (rest <= journal.committed)).any())
            rest[:] = 0
        if count:
            newest = max(newest, int(ticks[count - 1]))
    damaged |= newest < journal.committed
    store.release([slot for slot in slots.values() if not store.lengths[slot]])
    journal.forget_uncommitted()
    sizes = {c: int(store.lengths[s]) for c, s in slots.items() if store.lengths[s]}
    chains = linked({c: chunks[c].info.previous for c in sizes}, sizes, store.steps)

    def ends(chain: list[bytes]) -> int:
        return int(store.ticks[slots[chain[-1]], sizes[chain[-1]] - 1])

    # A stream goes on where its newest step is; older chains of it only lost their continuation.
    owners: dict[Stream | None, list[bytes]] = {}
    for chain in sorted(chains, key=ends):
        owners[chunks[chain[-1]].info.stream] = chain
    table.take_in_chains(
        [
            (
                [slots[c] for c in chain],
                stream if owners[stream] is chain and not damaged else None,
            )
            for chain in chains
            for stream in [chunks[chain[-1]].info.stream]
        ]
    )
    return skipped


def adopt(table: Table, found: Sequence[Found], committed: int, source: Source, seq: int) -> int:
    """Copy another run's chunks in, as data that nothing is appended to; how many steps."""
    store, journal = table.store, table.journal
    chunks = _newest(found, committed, table.length, table.items.capacity)
    chunks = [chunk for chunk in chunks if chunk.found.info.id not in store.slot_of]
    if table.max_bytes is not None and len(chunks) * store.chunk_bytes > table.max_bytes:
        raise StorageFullError(
            f"The extra data needs {len(chunks) * store.chunk_bytes:,} bytes, more than "
            f"max_bytes={table.max_bytes:,}: raise max_bytes, or lower the replay's capacity."
        )
    table.make_room(lambda _: len(chunks))
    slots: list[int] = []
    try:
        chunks = [chunk for chunk in chunks if _copied(store, chunk.found, slots)]
        last = journal.committed + sum(len(chunk.ticks) for chunk in chunks)
        # New ticks in the old order: to this replay the steps are as old as their arrival.
        order = np.argsort(np.concatenate([chunk.ticks for chunk in chunks] or [_NO_TICKS]))
        ticks = np.empty(len(order), np.int64)
        ticks[order] = np.arange(journal.committed + 1, last + 1)
        start = 0
        for slot, chunk in zip(slots, chunks, strict=True):
            count = len(chunk.ticks)
            store.ticks[slot, :count] = ticks[start : start + count]
            store.lengths[slot] = count
            start += count
        journal.stage(source, seq, last)
        journal.commit(last)
    except BaseException:
        store.release(slots)
        journal.forget_uncommitted()
        raise
    slot_of = {chunk.found.info.id: slot for chunk, slot in zip(chunks, slots, strict=True)}
    sizes = {c: int(store.lengths[s]) for c, s in slot_of.items()}
    previous = {chunk.found.info.id: chunk.found.info.previous for chunk in chunks}
    table.take_in_chains(
        [([slot_of[c] for c in chain], None) for chain in linked(previous, sizes, store.steps)]
    )
    return len(order)


class _Chunk(NamedTuple):
    found: Found
    ticks: Ticks


_NO_TICKS = np.zeros(0, np.int64)


def _newest(found: Sequence[Found], committed: int, length: int, capacity: int) -> list[_Chunk]:
    """The chunks that the newest `capacity` items lie in; copying more would be for nothing."""
    chunks = {}
    for item in found:
        try:
            ticks = _read_ticks(item)
        except FileNotFoundError:
            continue  # The other run let it go meanwhile, as it is older than all it keeps.
        ticks = ticks[: valid(ticks, committed)]
        if len(ticks):
            chunks[item.info.id] = _Chunk(item, ticks)
    sizes = {c: len(chunk.ticks) for c, chunk in chunks.items()}
    steps = found[0].info.steps
    chains = linked({c: chunk.found.info.previous for c, chunk in chunks.items()}, sizes, steps)
    completed = [np.concatenate([chunks[c].ticks for c in chain])[length - 1 :] for chain in chains]
    every = np.concatenate(completed or [_NO_TICKS])
    oldest = np.partition(every, -capacity)[-capacity] if len(every) > capacity else 0
    wanted = []
    for chain, ticks in zip(chains, completed, strict=True):
        first = int(np.searchsorted(ticks, oldest))
        if first < len(ticks):
            wanted += [chunks[c] for c in chain[first // steps :]]
    return wanted


def _copied(store: Store, found: Found, slots: list[int]) -> bool:
    """Append the slot of the copy, unless the other run has let the chunk go meanwhile."""
    try:
        slots.append(store.copy(found.path, found.info))
    except FileNotFoundError:
        return False
    return True


def _read_ticks(found: Found) -> Ticks:
    with found.path.open("rb") as file:
        file.seek(chunkfile.header_bytes(found.info.schema))
        ticks = np.fromfile(file, np.int64, found.info.steps)
    if len(ticks) < found.info.steps:
        raise ReplayError(f"{found.path} became shorter while it was read: load it again.")
    return ticks


def valid(ticks: Ticks, committed: int) -> int:
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
