"""The steps of another run, in batches that a replay adds.

The other directory is only read, and may be in use. Steps come in the order in which they were
stored there, and a batch has the tick of its last step there as its number. So a copy that was
interrupted is continued, and a copy that is made again adds what is new.

A stream of the other run is a stream here, under a name that is not an environment's.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dreamfleet.replay.errors import ReplayError
from dreamfleet.replay.reading import Arrays, StoredChain, stored_chains
from dreamfleet.replay.schema import IMPORTED, StreamId
from dreamfleet.replay.storage.journal import Journal


class ImportedBatch(NamedTuple):
    """Arguments of `Replay.add_batch`."""

    steps: Arrays
    streams: list[StreamId]
    source: bytes
    seq: int
    ended: list[StreamId]
    """Streams that begin anew in this batch, so that it does not continue what they had before."""


def imported_batches(
    path: Path,
    journal: Journal,
    steps: int,
    without: Collection[str] = (),
    shard: int = 0,
    shards: int = 1,
) -> Iterator[ImportedBatch]:
    """What is new of another run's committed steps.

    Args:
        path: The other run's directory.
        journal: Of the replay that the steps are added to; it knows which of them were before.
        steps: In a batch, at most.
        without: Keys that are left out.
        shard: Which of `shards` replays the steps are for: each gets streams of its own.
        shards: How many replays take steps from the directory.
    """
    while True:
        run, chains = stored_chains(path)
        if run is None:
            raise ReplayError(f"{path} is not a replay directory: it has no journal.")
        if run == journal.id:
            raise ReplayError(f"{path} is the replay's own directory, or a copy of it.")
        source = b"load:" + run
        mine = [chain for chain in chains if _number(chain) % shards == shard]
        try:
            yield from _batches(mine, source, journal.newest(source) or 0, steps, without)
        except FileNotFoundError:
            continue  # The other run has evicted a chunk meanwhile: see what it has now.
        return


def _batches(
    chains: list[StoredChain], source: bytes, after: int, steps: int, without: Collection[str]
) -> Iterator[ImportedBatch]:
    chains = [chain for chain in chains if chain.ticks[-1] > after]
    if not chains:
        return
    names = [_name(source, chain) for chain in chains]
    new = np.sort(np.concatenate([chain.ticks for chain in chains]))
    new = new[new > after]
    # Where the step before the first new one is gone, there is a gap.
    first = [int(chain.ticks[0]) for chain in chains]
    begin = {tick: name for tick, name in zip(first, names, strict=True) if tick > after}
    repeated = {name for name, count in Counter(names).items() if count > 1}
    cuts = new.searchsorted([tick for tick, name in begin.items() if name in repeated])
    edges = sorted({*range(0, len(new), steps), len(new), *cuts.tolist()})
    for low, high in pairwise(edges):
        ticks = new[low:high]
        batch: Arrays = {}
        streams = np.empty(len(ticks), object)
        for name, chain in zip(names, chains, strict=True):
            start, stop = chain.ticks.searchsorted([ticks[0], ticks[-1] + 1]).tolist()
            if start == stop:
                continue
            rows = ticks.searchsorted(chain.ticks[start:stop])
            streams[rows] = name
            for key in chain.keys:
                if key in without:
                    continue
                values = chain.read(key, start, stop)
                if key not in batch:
                    batch[key] = np.empty((len(ticks), *values.shape[1:]), values.dtype)
                batch[key][rows] = values
        ended = [name for tick, name in begin.items() if ticks[0] <= tick <= ticks[-1]]
        yield ImportedBatch(batch, streams.tolist(), source, int(ticks[-1]), ended)


def _number(chain: StoredChain) -> int:
    """The number of an environment; some number that stays, for a stream that has none."""
    if isinstance(chain.stream, int):
        return chain.stream
    return zlib.crc32(_label(chain))


def _name(source: bytes, chain: StoredChain) -> StreamId:
    return IMPORTED + hashlib.blake2b(source + _label(chain), digest_size=16).hexdigest()


def _label(chain: StoredChain) -> bytes:
    return chain.chunks[0].info.id if chain.stream is None else repr(chain.stream).encode()
