"""A server that answers many callers with one computation."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dreamfleet.transport import wire
from dreamfleet.transport.codec import check_sizes
from dreamfleet.transport.errors import MessageError, TransportError
from dreamfleet.transport.loop import Lane, Peer
from dreamfleet.transport.pool import Pool
from dreamfleet.transport.schema import parse_schema
from dreamfleet.transport.security import Keys
from dreamfleet.transport.server import BaseServer, error_frames
from dreamfleet.transport.stacking import (
    Request,
    Signature,
    difference,
    run_batch,
    signature_of,
    split,
)

log = logging.getLogger(__name__)

WorkFn = Callable[..., tuple[Any, Any]]
PostFn = Callable[[Any], None]
_FOREVER = float("inf")


@dataclass
class _Batcher:
    """One method's waiting requests and its workers. Touched under the loop's lock."""

    method: str
    workfn: WorkFn
    postfn: PostFn | None
    batch: int
    wait: float
    lane: Lane
    post_pool: Pool
    backlog: int
    waiting: deque[Request] = field(default_factory=deque)
    rows: int = 0
    next_batch: int = 0  # the number the next batch gets
    next_post: int = 0  # the number of the batch whose postfn is due
    finished: dict[int, Callable[[], None] | None] = field(default_factory=dict)
    unposted: int = 0
    usual: Signature | None = None
    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: {"wait": 0.0, "work": 0.0})

    @property
    def free(self) -> bool:
        return self.lane.running < self.lane.limit and self.unposted < self.backlog

    @property
    def deadline(self) -> float:
        """When the oldest request has waited long enough. While no worker is free a batch goes
        on filling, because closing it would not make it run any sooner."""
        return self.waiting[0].arrived + self.wait if self.waiting and self.free else _FOREVER


class BatchServer(BaseServer):
    """Collects requests into batches and answers each batch with one call of a function.

    Args:
        address: Where to listen; see `dreamfleet.transport.address`.
        name: Shown in errors, logs and thread names.
        keys: The run key. Needed for any `tcp` address but loopback.
        insecure: Listen on the network without keys, for everyone.
    """

    def __init__(
        self,
        address: str,
        name: str = "Server",
        keys: Keys | None = None,
        *,
        insecure: bool = False,
    ) -> None:
        super().__init__(
            address,
            name,
            keys,
            insecure,
            deadline=self._next_deadline,
            on_due=self._dispatch_all,
        )
        self._batchers: dict[str, _Batcher] = {}

    def bind(
        self,
        method: str,
        workfn: WorkFn,
        postfn: PostFn | None = None,
        batch: int = 8,
        wait: float = 0.01,
        workers: int = 1,
        backlog: int = 16,
    ) -> None:
        """Offer a batched function under a name.

        A batch is closed when it holds `batch` items, or when its oldest request has waited `wait`
        seconds. A block of items that one caller sent together is never split; a block larger than
        `batch` is a batch of its own.

        Args:
            method: The name clients call.
            workfn: Gets the call's arguments, every leaf an array with a leading axis n, and
                returns a tree with the same leading axis, and any info for `postfn`.
            postfn: Called with the info after the answers have gone out, on a thread of its own,
                one batch after the other in the order the batches were made.
            batch: Items in a full batch.
            wait: Seconds the oldest request waits for the batch to fill.
            workers: Batches computed at the same time.
            backlog: Batches whose `postfn` may be outstanding before no new one is started.
        """
        self._check_bind(method, self._batchers)
        if batch < 1 or workers < 1 or backlog < 1 or wait < 0:
            raise TransportError(
                f"{self.name}: {method!r} needs batch, workers and backlog of at least 1 and a "
                f"wait of at least 0, got {batch}, {workers}, {backlog} and {wait}."
            )
        self._batchers[method] = _Batcher(
            method,
            workfn,
            postfn,
            batch,
            wait,
            Lane(workers),
            Pool(f"{self.name}-{method}-post", 1 if postfn else 0),
            backlog,
        )

    def start(self, block: bool = True) -> None:
        if not self._started:
            for batcher in self._batchers.values():
                batcher.post_pool.start()
        super().start(block)

    def _shut_down(self) -> None:
        super()._shut_down()
        for batcher in self._batchers.values():
            batcher.post_pool.close()

    def stats(self) -> dict[str, float]:
        """Counts since the start; per method the batches, mean items in one, and mean seconds that
        the oldest request waited and that the work took."""
        stats = super().stats()
        for method, batcher in self._batchers.items():
            batches = batcher.counts["batches"]
            stats[f"{method}/batches"] = float(batches)
            stats[f"{method}/waiting"] = float(batcher.rows)
            stats[f"{method}/items"] = float(batcher.counts["items"])
            stats[f"{method}/post_errors"] = float(batcher.counts["post_errors"])
            stats[f"{method}/fill"] = batcher.counts["items"] / batches if batches else 0.0
            for name, total in batcher.seconds.items():
                stats[f"{method}/{name}"] = total / batches if batches else 0.0
        return stats

    # --- under the loop's lock -------------------------------------------------------------------

    def _lanes(self) -> list[Lane]:
        return [batcher.lane for batcher in self._batchers.values()]

    def _next_deadline(self) -> float:
        return min((b.deadline for b in self._batchers.values()), default=_FOREVER)

    def _dispatch_all(self) -> None:
        for batcher in self._batchers.values():
            self._dispatch(batcher)

    def _on_call(self, peer: Peer, header: wire.Header, frames: list[Any]) -> None:
        batcher = self._batchers.get(header.method)
        if batcher is None:
            known = ", ".join(sorted(self._batchers)) or "none"
            raise MessageError(
                f"{self.name} has no method {header.method!r}; its methods are {known}."
            )
        schema = parse_schema(header.schema)
        check_sizes(schema, header.plain, header.blob, frames)
        request = Request(
            peer,
            header.id,
            header.rows,
            schema,
            header.plain,
            header.blob,
            frames,
            signature_of(schema, header.plain, header.rows),
            time.monotonic(),
        )
        batcher.waiting.append(request)
        batcher.rows += request.items
        if batcher.rows >= batcher.batch:
            self._dispatch(batcher)

    def _dispatch(self, batcher: _Batcher) -> None:
        """Start as many batches as are due and workers are free."""
        while batcher.waiting and batcher.free:
            now = time.monotonic()
            if batcher.rows < batcher.batch and now < batcher.waiting[0].arrived + batcher.wait:
                return
            requests = _take(batcher)
            batcher.seconds["wait"] += now - requests[0].arrived
            requests = self._agreeing(batcher, requests)
            batcher.unposted += batcher.postfn is not None
            number = batcher.next_batch
            batcher.next_batch += 1
            batcher.counts["batches"] += 1
            batcher.counts["items"] += sum(r.items for r in requests)
            self._loop.offer(batcher.lane, partial(self._work, batcher, number, requests))

    def _agreeing(self, batcher: _Batcher, requests: list[Request]) -> list[Request]:
        """The requests that look like the last good batch, or else like most of this one; the
        others are told how they differ."""
        first = requests[0].signature
        if all(r.signature is first or r.signature == first for r in requests):
            return requests
        votes = Counter(r.signature for r in requests)
        usual = batcher.usual
        if usual is None or usual not in votes:
            usual = votes.most_common(1)[0][0]
        for request in requests:
            if request.signature != usual:
                text = difference(request.signature, usual)
                self._loop.counts["errors"] += 1
                self._loop.reply(
                    request.peer, wire.pack_error(request.number, MessageError.__name__, text)
                )
        return [r for r in requests if r.signature == usual]

    def _finish(
        self,
        batcher: _Batcher,
        number: int,
        replies: list[tuple[Peer, list[Any]]],
        post: Callable[[], None] | None,
        seconds: float,
        good: Signature | None,
    ) -> None:
        for peer, frames in replies:
            self._loop.reply(peer, frames)
        batcher.seconds["work"] += seconds
        batcher.usual = good or batcher.usual
        if batcher.postfn:
            # Batches may end in another order than they began; what follows them keeps theirs.
            batcher.finished[number] = post
            while batcher.next_post in batcher.finished:
                due = batcher.finished.pop(batcher.next_post)
                batcher.next_post += 1
                if due:
                    batcher.post_pool.put(due)
                else:
                    batcher.unposted -= 1

    # --- without it ------------------------------------------------------------------------------

    def _work(self, batcher: _Batcher, number: int, requests: list[Request]) -> None:
        start = time.perf_counter()
        post = good = None
        failed = 0
        try:
            result, info = run_batch(batcher.workfn, requests)
            replies = [
                (r.peer, wire.pack(wire.REPLY, r.number, share))
                for r, share in zip(requests, split(result, requests), strict=True)
            ]
            good = requests[0].signature
            if batcher.postfn:
                post = partial(self._post, batcher, batcher.postfn, info)
        except BaseException as error:  # whatever it is, it must not take a thread along
            failed = len(requests)
            replies = [(r.peer, error_frames(r.number, error)) for r in requests]
        seconds = time.perf_counter() - start
        with self._loop.lock:
            self._loop.counts["errors"] += failed
            self._finish(batcher, number, replies, post, seconds, good)

    def _post(self, batcher: _Batcher, postfn: PostFn, info: Any) -> None:
        failed = False
        try:
            postfn(info)
        except BaseException:
            failed = True
            log.exception("%s: what follows a batch of %r failed.", self.name, batcher.method)
        with self._loop.lock:
            batcher.unposted -= 1
            batcher.counts["post_errors"] += failed
            self._dispatch(batcher)
            self._loop.nudge()


def _take(batcher: _Batcher) -> list[Request]:
    """The oldest requests that fill a batch, without splitting a block."""
    taken = [batcher.waiting.popleft()]
    rows = taken[0].items
    while batcher.waiting and rows + batcher.waiting[0].items <= batcher.batch:
        taken.append(batcher.waiting.popleft())
        rows += taken[-1].items
    batcher.rows -= rows
    return taken
