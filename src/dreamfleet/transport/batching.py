"""A server that answers many callers with one computation.

Requests wait until there are enough of them for a batch. A batch is stacked leaf by leaf and given
to a function, and the rows of its result are the answers.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.transport import wire
from dreamfleet.transport.codec import (
    ARRAY,
    SCALAR,
    TUPLE,
    Buffer,
    Encoded,
    Schema,
    assemble,
    check_data,
    decode_leaf,
    encode,
    parse_schema,
)
from dreamfleet.transport.errors import MessageError, RemoteError, Timeout, TransportError
from dreamfleet.transport.listening import FOREVER, Origin
from dreamfleet.transport.loop import WorkQueue
from dreamfleet.transport.posting import PostFn, PostQueue
from dreamfleet.transport.server import BaseServer, error_frames

WorkFn = Callable[..., tuple[Any, Any]]

# What all items of a batch share: per leaf its place, dtype and shape.
Signature = tuple[tuple[tuple[str, ...], Any, tuple[int, ...]], ...]


@dataclass(slots=True)
class Request:
    """One caller's block of items along a leading axis. What its message announces has been
    compared with what came."""

    peer: bytes
    number: int
    rows: int
    schema: Schema
    blob: bytes
    frames: Sequence[Buffer]
    signature: Signature
    arrived: float

    def leaf(self, index: int) -> Any:
        """One of the array-like leaves."""
        return decode_leaf(self.schema.leaves[index], self.blob, self.frames)

    @property
    def args(self) -> Any:
        """The arguments of the call."""
        return assemble(self.schema, (), _stack([self]))


Check = Callable[[Origin, Request], None]
"""Gets where a request came from."""


@dataclass
class _Batcher:
    """One method's waiting requests and its workers. Touched under the loop's lock."""

    workfn: WorkFn
    batch: int
    wait: float
    queue: WorkQueue
    repeatable: bool
    roles: frozenset[str]
    check: Check | None
    posts: PostQueue | None = None
    held: bool = False
    waiting: deque[Request] = field(default_factory=deque)
    rows: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: {"wait": 0.0, "work": 0.0})

    @property
    def free(self) -> bool:
        if self.held or self.queue.running >= self.queue.limit:
            return False
        return not (self.posts and self.posts.full)

    @property
    def deadline(self) -> float:
        """When the oldest request has waited long enough. While no worker is free a batch goes
        on filling, because closing it would not make it run any sooner."""
        return self.waiting[0].arrived + self.wait if self.waiting and self.free else FOREVER


class BatchServer(BaseServer):
    """Collects requests into batches and answers each batch with one call of a function."""

    def bind(
        self,
        method: str,
        workfn: WorkFn,
        postfn: PostFn | None = None,
        batch: int = 8,
        wait: float = 0.01,
        workers: int = 1,
        *,
        repeatable: bool = False,
        roles: Collection[str] = (),
        check: Check | None = None,
        gather: float = 0.01,
        post_rows: int = 1024,
        on_post_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Offer a batched function under a name.

        A batch is closed when it holds `batch` items, or when its oldest request has waited `wait`
        seconds. A block of items that one caller sent together is never split; a block larger than
        `batch` is a batch of its own, and so are items with other keys, dtypes or shapes.

        `postfn` passes on what follows a batch. It is called after the answers have gone out, with
        a list of the infos of batches that follow each other, in the order in which the batches
        were made: one call at a time, on a thread of its own. Rows of batches that were started
        and not yet passed on are outstanding; while there are twice `post_rows` of them no batch is
        started and requests wait. An error in `postfn` is logged, counted and given to
        `on_post_error`; the next infos follow all the same.

        Args:
            method: The name clients call.
            workfn: Gets the call's arguments, every leaf an array with a leading axis n, and
                returns an array, or a dict of arrays, with the same leading axis, and any info for
                `postfn`.
            postfn: Gets a list of infos.
            batch: Items in a full batch.
            wait: Seconds the oldest request waits for the batch to fill.
            workers: Batches computed at the same time.
            repeatable: It does no harm to run it twice; see `Server.bind`.
            roles: Whose keys may call it in addition to the run key.
            check: Raises `ArgumentError` or `Occupied` for a request that must not join a batch.
                Called one at a time, on the thread that reads: it must be quick.
            gather: Seconds the oldest info waits for others to share its call of `postfn`.
            post_rows: Rows that end this wait. A call has no more rows, unless one batch has.
            on_post_error: Told every error of `postfn`, on the thread of `postfn`.
        """
        if batch < 1 or workers < 1 or wait < 0:
            raise TransportError(
                f"{self.name}: {method!r} needs batch and workers of at least 1 and a wait of at "
                f"least 0, got {batch}, {workers} and {wait}."
            )
        if gather < 0 or post_rows < 1:
            raise TransportError(
                f"{self.name}: {method!r} needs a gather of at least 0 and post_rows of at least "
                f"1, got {gather} and {post_rows}."
            )
        batcher = _Batcher(
            workfn, batch, wait, WorkQueue(workers), repeatable, frozenset(roles), check
        )
        if postfn:
            batcher.posts = PostQueue(
                f"{self.name}-{method}-post",
                postfn,
                self._lock,
                gather,
                post_rows,
                on_post_error,
                partial(self._dispatch_held_back, batcher),
            )
        self._add(method, batcher)

    def resize(self, method: str, batch: int) -> None:
        """From now on a full batch of this method holds so many items."""
        batcher = self._methods[method]
        with self._lock:
            if batcher.batch != batch:
                batcher.batch = max(1, batch)
                self._dispatch_held_back(batcher)

    def hold(self, method: str, *, held: bool = True) -> None:
        """Let requests of this method wait, until it is not held any more."""
        batcher = self._methods[method]
        with self._lock:
            batcher.held = held
            self._dispatch_held_back(batcher)

    def forget_gone(self, method: str) -> None:
        """Drop waiting requests of connections that have ended, which no answer reaches."""
        batcher = self._methods[method]
        with self._lock:
            peers = {request.peer for request in batcher.waiting}
            there = {peer for peer in peers if self._listener.connected(peer)}
            for _ in range(len(batcher.waiting)):
                request = batcher.waiting.popleft()
                if request.peer in there:
                    batcher.waiting.append(request)
                else:
                    batcher.rows -= request.rows
                    self._forget_call(request.peer)
            self._wake_reader()

    def _start(self) -> None:
        for batcher in self._methods.values():
            if batcher.posts:
                batcher.posts.start()
        super()._start()

    def close(self, flush: float = 5.0) -> None:
        """Stop answering, let running batches finish, and have `postfn` pass on what is left.

        Waiting calls fail with `Disconnected`.

        Args:
            flush: Seconds to wait for a call of `postfn`. They start again whenever one has ended.
                With 0, what waits is dropped, and a call that is running is not waited for.

        Raises:
            Timeout: No call of `postfn` has ended for so many seconds. The server is closed all the
                same, and what was left is dropped.
        """
        self._close(partial(self._shut_down, flush))

    def _is_own(self, thread: threading.Thread) -> bool:
        posts = (batcher.posts for batcher in self._methods.values())
        return super()._is_own(thread) or any(post.thread is thread for post in posts if post)

    def _shut_down(self, flush: float) -> None:
        if flush <= 0:
            self._close_posts(0.0)  # nothing of the batches that are still running either
        self._stop()
        self._close_posts(flush)

    def _close_posts(self, flush: float) -> None:
        late: list[Timeout] = []
        for batcher in self._methods.values():
            if batcher.posts:
                try:
                    batcher.posts.close(flush)
                except Timeout as problem:
                    late.append(problem)
        if late:
            raise late[0]

    def stats(self) -> dict[str, float]:
        """Counts since the start; per method the batches, the items waiting for one, the rows that
        `postfn` has not passed on yet, the mean items in a batch, and the mean seconds that the
        oldest request waited and that the work took."""
        stats = super().stats()
        for method, batcher in self._methods.items():
            batches = batcher.counts["batches"]
            stats[f"{method}/batches"] = float(batches)
            stats[f"{method}/waiting"] = float(batcher.rows)
            stats[f"{method}/items"] = float(batcher.counts["items"])
            stats[f"{method}/posting"] = float(batcher.posts.rows if batcher.posts else 0)
            stats[f"{method}/post_errors"] = float(batcher.posts.errors if batcher.posts else 0)
            stats[f"{method}/fill"] = batcher.counts["items"] / batches if batches else 0.0
            for name, total in batcher.seconds.items():
                stats[f"{method}/{name}"] = total / batches if batches else 0.0
        return stats

    # --- under the loop's lock -------------------------------------------------------------------

    def _deadline(self) -> float:
        return min((b.deadline for b in self._methods.values()), default=FOREVER)

    def _dispatch_held_back(self, batcher: _Batcher) -> None:
        """Start batches that waited until `postfn` had caught up."""
        if not self._stopping:
            self._dispatch(batcher)
            self._wake_reader()

    def _on_due(self) -> None:
        for batcher in self._methods.values():
            self._dispatch(batcher)

    def _on_call(self, origin: Origin, header: wire.Header, frames: Sequence[Any]) -> None:
        batcher: _Batcher = self._method(header.method, origin.identity.role)
        if not header.rows:
            raise MessageError(f"{header.method!r} takes blocks of items: use `call_block`.")
        schema = parse_schema(header.schema)
        check_data(schema, header.plain, header.blob, frames)
        request = Request(
            origin.peer,
            header.id,
            header.rows,
            schema,
            header.blob,
            frames,
            signature_of(schema, header.rows),
            time.monotonic(),
        )
        if batcher.check:
            batcher.check(origin, request)
        batcher.waiting.append(request)
        batcher.rows += request.rows
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
            items = sum(r.rows for r in requests)
            batcher.counts["batches"] += 1
            batcher.counts["items"] += items
            number = batcher.posts.reserve(items) if batcher.posts else 0
            self._submit(batcher.queue, partial(self._work, batcher, number, items, requests))

    # --- without it ------------------------------------------------------------------------------

    def _work(self, batcher: _Batcher, number: int, items: int, requests: list[Request]) -> None:
        start = time.perf_counter()
        infos: list[Any] = []
        failed = 0
        try:
            result, info = run_batch(batcher.workfn, requests)
            replies = [
                (r.peer, wire.pack(wire.REPLY, r.number, share))
                for r, share in zip(requests, split(result, requests), strict=True)
            ]
            infos = [info]
        except BaseException as error:  # whatever it is, it must not take a thread along
            failed = len(requests)
            replies = [(r.peer, error_frames(r.number, error)) for r in requests]
        seconds = time.perf_counter() - start
        with self._lock:
            for peer, frames in replies:
                self._reply(peer, frames)
            self._counts["errors"] += failed
            batcher.seconds["work"] += seconds
            if batcher.posts:
                batcher.posts.put(number, items, infos)


def _take(batcher: _Batcher) -> list[Request]:
    """The oldest request, and those after it that look the same and fill its batch. No block is
    split; what looks different is left for a batch of its own."""
    waiting = batcher.waiting
    taken, others = [waiting.popleft()], list[Request]()
    rows, signature = taken[0].rows, taken[0].signature
    while waiting and rows + waiting[0].rows <= batcher.batch:
        request = waiting.popleft()
        if request.signature == signature:
            taken.append(request)
            rows += request.rows
        else:
            others.append(request)
    waiting.extendleft(reversed(others))
    batcher.rows -= rows
    return taken


# --- stacking requests and splitting results -----------------------------------------------------


def signature_of(schema: Schema, rows: int) -> Signature:
    """What an item of a request looks like.

    Raises:
        MessageError: It holds something that has no place in a batch.
    """
    if schema.node is None or schema.node[0] != TUPLE:
        raise MessageError("The arguments of a call are a tuple.")
    for path in schema.plain_paths:
        raise MessageError(f"{_name(path)} is not an array and cannot be batched.")
    for leaf in schema.leaves:
        if leaf.kind not in (ARRAY, SCALAR):
            raise MessageError(f"{_name(leaf.path)} is text or bytes, which cannot be batched.")
        if leaf.shape[:1] != (rows,):
            raise MessageError(
                f"{_name(leaf.path)} has shape {leaf.shape}, which is not a block of {rows} items."
            )
    return tuple((leaf.path, leaf.dtype, leaf.shape[1:]) for leaf in schema.leaves)


def _name(path: tuple[str, ...]) -> str:
    """A leaf's name without the number of the argument, where there is more to say."""
    return "/".join(path[1:]) or f"argument {path[0]}"


def run_batch(workfn: WorkFn, requests: Sequence[Request]) -> tuple[Any, Any]:
    """Stack the requests and run the function on them.

    Raises:
        RemoteError: The function returned something else than results and info.
    """
    schema = requests[0].schema
    answer: Any = workfn(*assemble(schema, (), _stack(requests)))
    if not (isinstance(answer, tuple) and len(answer) == 2):
        raise RemoteError("A batched function returns two things: the results, and any info.")
    return answer[0], answer[1]


def _stack(requests: Sequence[Request]) -> list[NDArray[Any]]:
    """The leaves of requests, one below the other. Where all have the same schema, their blobs are
    looked at as columns."""
    schema, count, rows = requests[0].schema, len(requests), requests[0].rows
    blobs = None
    if count > 1 and all(r.schema is schema for r in requests):
        joined = np.frombuffer(b"".join([r.blob for r in requests]), np.uint8)
        blobs = joined.reshape(count, schema.blob_size)
    leaves = []
    for index, leaf in enumerate(schema.leaves):
        if count == 1:
            leaves.append(requests[0].leaf(index))
        elif blobs is None or leaf.frame >= 0 or not leaf.count:
            leaves.append(np.concatenate([r.leaf(index) for r in requests]))
        else:
            column = blobs[:, leaf.offset : leaf.offset + leaf.nbytes].view(leaf.dtype)
            leaves.append(column.reshape(count * rows, *leaf.shape[1:]))
    return leaves


def split(result: Any, requests: Sequence[Request]) -> list[Encoded]:
    """Every request's share of the result, ready to be sent.

    Raises:
        RemoteError: The result does not have one row per item.
    """
    named = result if isinstance(result, Mapping) else {"the result": result}
    arrays = {name: np.asarray(value) for name, value in named.items()}
    total, rows = sum(r.rows for r in requests), requests[0].rows
    for name, value in arrays.items():
        if value.shape[:1] != (total,):
            raise RemoteError(
                f"The batched function returned {name} with shape {value.shape} for a batch of "
                f"{total} items; every array needs that leading axis."
            )
    alike = named is result and len(requests) > 1 and all(r.rows == rows for r in requests)
    if alike and (equal := _equal_shares(arrays, rows, len(requests))):
        return equal
    shares, row = [], 0
    for request in requests:
        share = {name: value[row : row + request.rows] for name, value in arrays.items()}
        shares.append(encode(share if named is result else share["the result"]))
        row += request.rows
    return shares


def _equal_shares(
    arrays: Mapping[str, NDArray[Any]], rows: int, count: int
) -> list[Encoded] | None:
    """The shares of so many requests with as many rows each, if shares are small: described once,
    and cut from one piece."""
    share = encode({key: value[:rows] for key, value in arrays.items()})
    schema = parse_schema(share.schema)
    if share.frames or any(arrays[leaf.path[0]].dtype != leaf.dtype for leaf in schema.leaves):
        return None
    blobs = np.zeros((count, schema.blob_size), np.uint8)
    for leaf in schema.leaves:
        if leaf.count:
            column = np.ascontiguousarray(arrays[leaf.path[0]]).reshape(count, -1)
            blobs[:, leaf.offset : leaf.offset + leaf.nbytes] = column.view(np.uint8)
    return [Encoded(share.schema, [], blob.tobytes(), []) for blob in blobs]
