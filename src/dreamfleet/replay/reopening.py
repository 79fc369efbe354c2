"""The chunks of a replay's own directory become sequences again after a restart."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dreamfleet.replay.errors import StorageFullError
from dreamfleet.replay.reading import Ticks, linked, valid_ticks
from dreamfleet.replay.schema import StreamId
from dreamfleet.replay.storage.files import Found
from dreamfleet.replay.storage.journal import LeftBy, damaged_path
from dreamfleet.replay.storage.store import Store
from dreamfleet.replay.table import Table

log = logging.getLogger(__name__)

_NO_TICKS: Ticks = np.zeros(0, np.int64)


def reopen(table: Table, found: Sequence[Found]) -> dict[str, str]:
    """Take in the chunks of the table's own directory, and clear what was never committed.

    What looks damaged is copied before it is changed; only chunks that were made and never filled
    are removed.

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
    every = np.concatenate([_NO_TICKS, *(store.ticks[s] for s in slots.values())])
    if journal.is_new and slots:
        log.warning("The replay's journal is lost: every step found in its chunks is kept.")
        journal.begin(int(every.max(initial=0)))
    power_cut = journal.left_by is LeftBy.POWER_CUT
    if power_cut:
        log.warning(
            "The machine was restarted, or the run was moved, before the replay was closed: "
            "steps after the last sync are dropped (%d are in the files).",
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
            aside = _keep_damaged(store, name)
            skipped[name] = f"is damaged after {count} steps, and kept as {aside}"
        rest[:] = 0  # never committed, or behind the damage
        store.changed.add(slot)
    store.release([slot for slot in slots.values() if not store.lengths[slot]])
    journal.forget_uncommitted()
    sizes = {c: int(store.lengths[s]) for c, s in slots.items() if store.lengths[s]}
    chains = linked({c: (chunks[c], size) for c, size in sizes.items()})
    ticks_of = [
        np.concatenate([store.ticks[slots[c], : sizes[c]] for c in chain]) for chain in chains
    ]
    # Ticks are given out without gaps, and what was evicted is older than the oldest item. If later
    # ones are missing, the last steps of some stream are lost. Only streams that wrote after them
    # are continued, because a sequence with a hole in it would look like any other. A power cut may
    # have dropped steps of any stream.
    hole = journal.committed if power_cut else _newest_missing(ticks_of, journal.committed)
    if not power_cut and hole <= _oldest_kept(ticks_of, table.length, table.capacity):
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


def _keep_damaged(store: Store, name: str) -> Path:
    """Copy a chunk as it is to the folder of damaged files; returns where the copy is."""
    assert store.directory is not None
    path, aside = store.directory / name, damaged_path(store.directory, name)
    try:
        shutil.copyfile(path, aside)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise StorageFullError(
            f"The replay chunk {path} is damaged and cannot be copied ({error.strerror}): free "
            "disk space, or move it away."
        ) from error
    log.warning("The replay chunk %s is damaged; it is kept as %s.", path, aside)
    return aside


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
