"""The chunks of a replay's own directory become sequences again after a restart."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dreamfleet.replay.reading import Ticks, linked, valid_ticks
from dreamfleet.replay.schema import StreamId
from dreamfleet.replay.storage.files import Found
from dreamfleet.replay.storage.journal import Journal, LeftBy, damaged_path
from dreamfleet.replay.storage.store import Store
from dreamfleet.replay.table import Table

log = logging.getLogger(__name__)

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
    full = {c for c, size in sizes.items() if size == store.steps}
    chains = linked({c: chunks[c].previous for c in sizes}, full)
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
        "The newest entry of the replay's journal is incomplete: %d steps after the previous entry "
        "were committed by its chunks, and are kept.",
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
