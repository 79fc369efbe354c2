"""What a checkpoint keeps of a replay beside its directory.

Items are numbered anew when a directory is opened. The anchor tells how far the numbers moved: the
number that the next item had when a certain tick was the newest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.replay.selectors import Selector
from dreamfleet.replay.table import Table

_WORD = (1 << 64) - 1
_SELECTOR = "selector/"


def save_rng(rng: np.random.Generator) -> NDArray[np.uint64]:
    """The state of a PCG64 generator as six words."""
    state: Any = rng.bit_generator.state
    big, step = state["state"]["state"], state["state"]["inc"]
    words = [big & _WORD, big >> 64, step & _WORD, step >> 64]
    return np.array([*words, state["has_uint32"], state["uinteger"]], np.uint64)


def load_rng(rng: np.random.Generator, words: Any) -> None:
    low, high, step_low, step_high, has_half, half = (int(word) for word in words)
    rng.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": high << 64 | low, "inc": step_high << 64 | step_low},
        "has_uint32": has_half,
        "uinteger": half,
    }


def save_position(table: Table, selector: Selector) -> dict[str, NDArray[Any]]:
    """Anchor, online queue and phases, and the selector's own state."""
    streams = table.chains.streams
    names = json.dumps(list(streams)).encode()
    return {
        "anchor": np.array([table.journal.committed, table.items.high], np.int64),
        "online/queue": np.array(table.items.online, np.int64),
        "online/streams": np.frombuffer(names, np.uint8),
        "online/started": table.chains.started[list(streams.values())],
        **{f"{_SELECTOR}{k}": np.array(v, np.int64) for k, v in selector.save().items()},
    }


def load_position(table: Table, selector: Selector, state: Mapping[str, Any]) -> None:
    """Restore the queue, and extend it by the windows that were completed since."""
    if "anchor" not in state:
        return
    tick, number = (int(value) for value in state["anchor"])
    since = table.items_until(tick)
    shift = since - number
    selector.load(
        {k.removeprefix(_SELECTOR): int(v) for k, v in state.items() if k.startswith(_SELECTOR)},
        shift,
    )
    names = json.loads(np.asarray(state["online/streams"], np.uint8).tobytes())
    started = dict(zip(names, np.asarray(state["online/started"]).tolist(), strict=True))
    queue = [np.asarray(state["online/queue"], np.int64) + shift]
    later = np.arange(since, table.items.high)
    chains = table.chains.owners()[table.items.starts(later)[0]]
    for stream, chain in table.chains.streams.items():
        # A stream that began after the checkpoint is fresh from its first item on.
        mine = later[chains == chain]
        ordinals = started.get(stream, 0) + np.arange(len(mine))
        queue.append(mine[ordinals % table.length == 1 % table.length])
        table.chains.started[chain] = started.get(stream, 0) + len(mine)
    table.items.requeue(np.concatenate(queue))
