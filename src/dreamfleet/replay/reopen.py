"""A replay's own chunk files become a table again."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from dreamfleet.replay.chunkfile import StreamId
from dreamfleet.replay.directory import Found
from dreamfleet.replay.links import linked, newest_missing, oldest_kept, valid
from dreamfleet.replay.table import Table

log = logging.getLogger(__name__)


def restore(table: Table, found: Sequence[Found]) -> dict[str, str]:
    """Take in the chunks of the table's own directory, and clear what was never committed.

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
    if journal.is_new and slots:
        log.warning("The replay's journal is lost: every step found in its chunks is kept.")
        journal.begin(max(int(store.ticks[slot].max()) for slot in slots.values()))
    for slot in slots.values():
        ticks = store.ticks[slot]
        store.lengths[slot] = count = valid(ticks, journal.committed)
        if ticks[count:].any():
            ticks[count:] = 0
    store.release([slot for slot in slots.values() if not store.lengths[slot]])
    journal.forget_uncommitted()
    sizes = {c: int(store.lengths[s]) for c, s in slots.items() if store.lengths[s]}
    chains = linked({c: chunks[c].previous for c in sizes}, sizes, store.steps)
    ticks_of = [
        np.concatenate([store.ticks[slots[c], : sizes[c]] for c in chain]) for chain in chains
    ]
    # Ticks are given out without gaps, and what was evicted is older than the oldest item. Should
    # later ones be missing, then so are somebody's last steps: only streams that wrote after them
    # go on, for a sequence with a hole in it would look like any other.
    hole = newest_missing(ticks_of, journal.committed)
    if hole <= oldest_kept(ticks_of, table.length, table.items.capacity):
        hole = 0
    # A stream goes on where its newest step is; older chains of it only lost their continuation.
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
    return skipped
