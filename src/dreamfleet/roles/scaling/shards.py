"""The shards of a replay, used like one replay.

Steps go to the shard of their environment. A batch is drawn in three steps: the coordinator allows
it and counts it, the shards say what they have to draw from, and each is asked for its part of the
batch. Only the first step counts anything, and it may be repeated. So the death of a shard costs a
wait, and neither a batch nor a count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from dreamfleet.config import RunConfig
from dreamfleet.replay import Shares, Split, used_fractions
from dreamfleet.roles.addresses import find_server, server_name
from dreamfleet.transport import Client, Closed

_EMPTY_SECONDS = 0.2
_CHUNK_ID_BYTES = 16


class Reply(Protocol):
    """The answer to a call; see `dreamfleet.transport.Future`."""

    def done(self) -> bool: ...

    def result(self, timeout: float | None = None) -> Any: ...


def replay_client(
    args: RunConfig, name: str, maxinflight: int, chunk_to_shard: ChunkToShard | None = None
) -> ReplayClient:
    """A client of the run's replay, or of its shards.

    Args:
        args: The run.
        name: Shown in errors and logs.
        maxinflight: Calls without an answer, to each shard.
        chunk_to_shard: Shared by the clients that sample and that update.
    """
    if args.replay_shards > 1:
        return ShardedReplay(args, name, maxinflight, chunk_to_shard)
    return Client(find_server(args, "replay"), name, maxinflight, keys=args.run_keys)


class ShardedReplay:
    """What the actor and the learner need of a client of one replay.

    Batches are put together by a thread, one after the other and in the order of the calls, so that
    they can be requested before they are needed.
    """

    def __init__(
        self, args: RunConfig, name: str, maxinflight: int, chunks: ChunkToShard | None = None
    ) -> None:
        self._args, self._name = args, name
        self._clients = [
            Client(
                find_server(args, "replay", shard),
                f"{name}-{server_name('replay', shard)}",
                maxinflight,
                keys=args.run_keys,
            )
            for shard in range(args.replay_shards)
        ]
        self._coordinator = self._clients[0]
        self._chunk_to_shard = chunks or ChunkToShard()
        self._rng = np.random.default_rng([args.host_seed, args.replay_shards])
        self._known: int | None = None  # samples, as the coordinator counts them
        self._closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, name)

    # --- like a client ---------------------------------------------------------------------------

    def call(self, method: str, /, *args: Any) -> Any:
        """Call a method of the replay by its name."""
        return getattr(self, method)(*args)

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
        self._thread.shutdown()

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
        shards = envids % len(self._clients)
        return AllOf([
            client.call("add_batch", part, envids[rows], is_eval, source, seq)
            for client, rows, part in self._parts(shards, steps)
        ])  # fmt: skip

    def update(self, data: Mapping[str, NDArray[Any]]) -> Reply:
        """Write states back to the shards that the steps came from."""
        parts = self._parts(self._chunk_to_shard.find(data["stepid"]), data)
        return AllOf([client.call("update", part) for client, _, part in parts])

    def _parts(
        self, shards: NDArray[np.int64], data: Mapping[str, NDArray[Any]]
    ) -> Iterator[tuple[Client, NDArray[np.bool_], dict[str, NDArray[Any]]]]:
        """The rows of each shard, of which `shards` tells each row's."""
        for shard in np.unique(shards).tolist():
            rows = shards == shard
            yield self._clients[shard], rows, {key: value[rows] for key, value in data.items()}

    def sample_batch_train(self, known: int | None = None) -> Reply:
        del known  # what the coordinator has permitted is known here
        return self._later("train")

    def sample_batch_report(self) -> Reply:
        return self._later("report")

    def sample_batch_eval(self) -> Reply:
        return self._later("eval")

    # --- sampling --------------------------------------------------------------------------------

    def _later(self, mode: str) -> Reply:
        try:
            return self._thread.submit(self._sample, mode)
        except RuntimeError:  # the thread has ended
            raise Closed(f"{self._name} is closed.") from None

    def _sample(self, mode: str) -> dict[str, Any]:
        """A batch; empty if there is no data to report on."""
        if mode == "train":
            self._wait_for_permission()
        parts: list[dict[str, Any]] = []
        missing = self._args.host_batch
        while missing:
            splits = self._splits(missing, mode)
            if not splits and mode != "train":
                return {}
            if not splits and self._closed.wait(_EMPTY_SECONDS):
                raise Closed(f"{self._name} is closed.")
            asked = [
                (shard, self._clients[shard].call(f"sample_part_{mode}", *split))
                for shard, split in splits.items()
            ]
            for shard, reply in asked:
                if part := reply.result():  # else its files were lost: the others make up for it
                    parts.append(part)
                    missing -= len(part["stepid"])
                    self._chunk_to_shard.note(shard, part["stepid"])
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

    def _splits(self, count: int, mode: str) -> dict[int, Split]:
        asked = [client.call("shares", mode) for client in self._clients]
        shares = [Shares(*reply.result()) for reply in asked]
        fractions = [1.0] if mode == "eval" else used_fractions(self._args.replay)
        return split_batch(self._rng, count, shares, fractions)


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


class ChunkToShard:
    """The shard of each chunk that was sampled lately; it never changes. Any thread may call the
    methods.

    Args:
        most: Chunks that are remembered.
    """

    def __init__(self, most: int = 1 << 16) -> None:
        self._most = most
        self._shards: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def note(self, shard: int, stepid: NDArray[np.uint8]) -> None:
        """Steps were sampled from a shard."""
        chunks, _ = _runs(stepid)
        with self._lock:
            for chunk in chunks:
                self._shards.pop(chunk, None)  # the newest ones come last
                self._shards[chunk] = shard
            while len(self._shards) > self._most:
                del self._shards[next(iter(self._shards))]

    def find(self, stepid: NDArray[np.uint8]) -> NDArray[np.int64]:
        """The shard of each step. Forgotten ones go to the first shard, which counts them as steps
        that are gone."""
        chunks, sizes = _runs(stepid)
        with self._lock:
            shards = [self._shards.get(chunk, 0) for chunk in chunks]
        return np.repeat(np.array(shards, np.int64), sizes).reshape(stepid.shape[:-1])


def _runs(stepid: NDArray[np.uint8]) -> tuple[list[bytes], NDArray[np.int64]]:
    """The chunks of steps that follow each other in the same one, and how many these are."""
    ids = np.ascontiguousarray(stepid[..., :_CHUNK_ID_BYTES]).reshape(-1, _CHUNK_ID_BYTES)
    words = ids.view(np.uint64)
    new = np.ones(len(ids), bool)
    new[1:] = (words[1:] != words[:-1]).any(1)
    starts = np.flatnonzero(new)
    return [ids[start].tobytes() for start in starts], np.diff(np.append(starts, len(ids)))


class AllOf:
    """The answer to a call that was made to several shards."""

    def __init__(self, replies: Sequence[Any]) -> None:
        self._replies = replies

    def done(self) -> bool:
        return all(reply.done() for reply in self._replies)

    def wait(self, timeout: float | None = None) -> bool:
        remaining = _countdown(timeout)
        return all(reply.wait(remaining()) for reply in self._replies)

    def result(self, timeout: float | None = None) -> int:
        remaining = _countdown(timeout)
        return sum(reply.result(remaining()) for reply in self._replies)


def _countdown(timeout: float | None) -> Callable[[], float | None]:
    end = None if timeout is None else time.monotonic() + timeout
    return lambda: None if end is None else max(0.0, end - time.monotonic())


ReplayClient = Client | ShardedReplay
