"""What the ticks of chunks say: which steps count, which chunk follows which, what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Ticks = NDArray[np.int64]

NO_TICKS: Ticks = np.zeros(0, np.int64)


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


def oldest_kept(chains: Sequence[Ticks], length: int, capacity: int) -> int:
    """The tick that completed the oldest of the newest `capacity` items; 0 if there is none."""
    completed = np.concatenate([NO_TICKS, *(ticks[length - 1 :] for ticks in chains)])
    if len(completed) > capacity:
        return int(np.partition(completed, -capacity)[-capacity])
    return int(completed.min()) if len(completed) else 0


def newest_missing(chains: Sequence[Ticks], committed: int) -> int:
    """The newest committed tick that no step has; 0 if every one is here."""
    every = np.sort(np.concatenate([np.zeros(1, np.int64), *chains]))
    if every[-1] < committed:
        return committed
    gaps = np.flatnonzero(np.diff(every) > 1)
    return int(every[gaps[-1] + 1]) - 1 if len(gaps) else 0
