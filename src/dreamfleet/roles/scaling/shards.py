"""The shards of a replay, used like one replay; most replays have one.

Steps go to the shard of their environment. A batch is drawn in three steps: the coordinator allows
it and counts it, the shards (if they are several) say what they have to draw from, and each is
asked for its part of the batch. Only the first step counts anything, and it may be repeated. So the
death of a shard costs a wait, and neither a batch nor a count.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from dreamfleet.config import RunConfig
from dreamfleet.replay import Shares, Split, used_fractions
from dreamfleet.replay.replay import Mode
from dreamfleet.replay.schema import CHUNK_ID_BYTES, STEPID
from dreamfleet.roles.addresses import find_server, server_name
from dreamfleet.transport import Client, Closed
from dreamfleet.transport.slab import Memory

_EMPTY_SECONDS = 0.2
ROW_BITS = 19
"""Of the 32 bits for the row of a step in its chunk: no `replay.chunk` is longer. The others are
enough for `replay_shards`."""


class Reply(Protocol):
    """The answer to a call; see `dreamfleet.transport.Future`."""

    def done(self) -> bool: ...

    def result(self, timeout: float | None = None) -> Any: ...


class ReplayClient:
    """The replay of a run, as the actor and the learner use it. Any thread may call it; one at a
    time draws training batches. If the shards are in this process, their `clients` are given."""

    def __init__(
        self, args: RunConfig, name: str, maxinflight: int, clients: Sequence[Client] = ()
    ) -> None:
        self._args, self._name = args, name
        self._clients = clients or [
            Client(
                find_server(args, "replay", shard),
                f"{name}-{server_name('replay', shard)}",
                maxinflight,
                keys=args.run_keys,
            )
            for shard in range(args.replay_shards)
        ]
        self._coordinator = self._clients[0]
        self._rng = np.random.default_rng([args.host_seed, args.replay_shards])
        self._known: int | None = None  # samples, as the coordinator counts them
        self._closed = threading.Event()

    # --- like a client ---------------------------------------------------------------------------

    def __getattr__(self, method: str) -> Callable[..., Reply]:
        """Calls that are about no steps go to the coordinator."""
        if method.startswith("_"):
            raise AttributeError(f"A replay has no {method!r}.")
        return partial(self._coordinator.call, method)

    def connect(self, timeout: float | None = None) -> None:
        """Wait until the coordinator answers, which knows of the others."""
        self._coordinator.connect(timeout)

    def stats(self) -> dict[str, float]:
        """Those of all clients: added up, but for the most calls in flight to a shard, and whether
        all of them are connected."""
        every = [client.stats() for client in self._clients]
        stats = {key: sum(each[key] for each in every) for key in every[0]}
        stats["inflight"] = max(each["inflight"] for each in every)
        stats["connected"] = min(each["connected"] for each in every)
        return stats

    def close(self, flush: float = 1.0) -> None:
        """Hang up; calls without an answer fail with `Closed`."""
        self._closed.set()
        for client in self._clients:
            client.close(flush)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(1.0 if kind is None else 0.0)

    # --- methods of a replay ---------------------------------------------------------------------

    def add_batch(
        self,
        steps: Mapping[str, NDArray[Any]],
        envids: NDArray[np.int64],
        is_eval: bool,
        source: str,
        seq: int,
    ) -> Reply:
        """Store steps, each in the shard of its environment. A shard sees some of the numbers."""
        parts = self._parts(steps, lambda: envids % len(self._clients))
        return AllOf([
            client.call("add_batch", part, envids[rows], is_eval, source, seq)
            for client, rows, part in parts
        ])  # fmt: skip

    def update(self, data: Mapping[str, NDArray[Any]]) -> Reply:
        """Write states back to the shards that the steps came from."""
        parts = self._parts(data, lambda: shard_of(data[STEPID]))
        if len(self._clients) > 1:
            parts = ((c, r, {**part, STEPID: unmarked(part[STEPID])}) for c, r, part in parts)
        return AllOf([client.call("update", part) for client, _, part in parts])

    def _parts(
        self, data: Mapping[str, NDArray[Any]], shard_of_rows: Callable[[], NDArray[np.int64]]
    ) -> Iterator[tuple[Client, Any, Mapping[str, NDArray[Any]]]]:
        """The rows of each shard; those of a single one are neither looked up nor copied."""
        if len(self._clients) == 1:
            yield self._coordinator, slice(None), data
            return
        shards = shard_of_rows()
        for shard in np.unique(shards).tolist():
            rows = shards == shard
            yield self._clients[shard], rows, {key: value[rows] for key, value in data.items()}

    def memory(self, size: int) -> Memory | None:
        """Memory whose steps are sent without a copy; None of several shards, which split them."""
        return self._clients[0].memory(size) if len(self._clients) == 1 else None

    def sample(self, mode: Mode) -> dict[str, Any]:
        """A batch, once the replay allows it; without data to report on, an empty one."""
        if mode == "train":
            self._wait_for_permission()
        parts: list[dict[str, Any]] = []
        missing = self._args.host_batch
        while missing > 0:
            asked = [
                (shard, self._clients[shard].call(f"sample_{mode}", *split))
                for shard, split in self._splits(missing, mode).items()
            ]
            # One without a sequence has lost its files: the others make up for it.
            drawn = [(shard, part) for shard, reply in asked if (part := reply.result())]
            if not drawn and mode != "train":
                return {}
            if not drawn and self._closed.wait(_EMPTY_SECONDS):
                raise Closed(f"{self._name} is closed.")
            for shard, part in drawn:
                parts.append({**part, STEPID: marked(part[STEPID], shard)} if shard else part)
                missing -= len(part[STEPID])
        if len(parts) == 1:
            return parts[0]
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}

    def _wait_for_permission(self) -> None:
        """Wait until the coordinator has counted a batch. It counts one more than the number that
        we know, so that a question whose answer was lost may be asked again."""
        while True:
            known = self._known
            if known is None:
                known = int(self._coordinator.call("position").result()["samples"])
            self._known = int(self._coordinator.call("permit", known).result())
            if self._known == known + self._args.host_batch:
                return

    def _splits(self, count: int, mode: Mode) -> dict[int, tuple[Any, ...]]:
        """What each shard is asked for. A single one shares nothing out: it draws a whole batch."""
        if len(self._clients) == 1:
            return {0: ()}
        asked = [client.call("shares", mode) for client in self._clients]
        shares = [Shares(*reply.result()) for reply in asked]
        fractions = [1.0] if mode == "eval" else used_fractions(self._args.replay)
        return {**split_batch(self._rng, count, shares, fractions)}


def split_batch(
    rng: np.random.Generator, count: int, shares: Sequence[Shares], fractions: Sequence[float]
) -> dict[int, Split]:
    """How many sequences of a batch come from each shard, so that all of them together are as
    likely as if they were drawn from one replay; nothing if there is nothing to draw from.

    Fresh sequences come first. Each of the others comes from a shard and by a rule of the selector
    with the probability that one replay would have chosen by that rule a sequence of that shard.
    What a batch takes is not looked at before the next one.
    """
    items = np.array([share.items for share in shares], np.float64)
    everywhere = int(items.sum())
    if not everywhere:
        return {}
    queues = np.array([min(share.fresh, share.items) for share in shares], np.int64)
    fresh = rng.multivariate_hypergeometric(queues, min(count, int(queues.sum())))
    weights = np.array([share.weights for share in shares], np.float64)
    weights[items == 0] = 0.0
    # Where nothing weighs anything, such as priorities that are all zero, all are equally likely.
    weights = np.where(weights.sum(0) > 0, weights, items[:, None])
    chances = weights / weights.sum(0) * np.asarray(fractions) / np.sum(fractions)
    drawn = rng.multinomial(count - int(fresh.sum()), chances.reshape(-1) / chances.sum())
    splits = {
        shard: Split(first, rest, everywhere)
        for shard, (first, rest) in enumerate(
            zip(fresh.tolist(), drawn.reshape(chances.shape).tolist(), strict=True)
        )
    }
    return {shard: split for shard, split in splits.items() if split.batch}


def marked(stepid: NDArray[np.uint8], shard: int) -> NDArray[np.uint8]:
    """The ids of steps, with the shard that they came from in the upper bits of their rows."""
    ids = stepid.copy()
    _rows(ids)[...] |= np.uint32(shard << ROW_BITS)
    return ids


def shard_of(stepid: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The shard that each of these steps came from."""
    shards: NDArray[np.int64] = (_rows(stepid) >> ROW_BITS)[..., 0].astype(np.int64)
    return shards


def unmarked(stepid: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The ids as their shard knows them."""
    ids = stepid.copy()
    _rows(ids)[...] &= np.uint32((1 << ROW_BITS) - 1)
    return ids


def _rows(stepid: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """The rows of steps in their chunks, the last part of their ids."""
    return np.ascontiguousarray(stepid)[..., CHUNK_ID_BYTES:].view(">u4")


class AllOf:
    """The answer to a call that was made to several shards."""

    def __init__(self, replies: Sequence[Any]) -> None:
        self._replies = replies

    def done(self) -> bool:
        return all(reply.done() for reply in self._replies)

    def result(self, timeout: float | None = None) -> int:
        """The sum of what they have answered; each of them is given the `timeout`."""
        return sum(reply.result(timeout) for reply in self._replies)
