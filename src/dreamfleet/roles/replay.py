"""The replay role: keeps transitions, hands out batches, and holds the two in step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.clock import LocalClock
from dreamfleet.config import RunConfig
from dreamfleet.metrics import Usage
from dreamfleet.replay import (
    NotEnoughDataError,
    RateLimitedError,
    Replay,
    ReplayClosedError,
    SamplesPerInsert,
)
from dreamfleet.roles.common import Factory, stop_event, unpack
from dreamfleet.transport import Client, Server, TransportError

log = logging.getLogger(__name__)

_LIMITER_PATIENCE = 1.0


def parallel_replay(
    make_replay_train: Factory, make_replay_eval: Factory, make_stream: Factory, args: RunConfig
) -> None:
    """Serve the replay until the process is asked to end, then save what is not in its files.

    Args:
        make_replay_train: Returns the buffer of training data.
        make_replay_eval: Returns the buffer of evaluation data.
        make_stream: Called with a buffer and "train", "report" or "eval", returns an iterator of
            batches.
        args: Address, sizes, `train_ratio`.
    """
    stop = stop_event()
    keeper = ReplayKeeper(
        unpack(make_replay_train)(),
        unpack(make_replay_eval)(),
        unpack(make_stream),
        limiter_for(args),
        args,
        stop,
    )
    keeper.restore()
    server = Server(args.replay_addr, "replay")
    # Each may wait for another, so each has a thread of its own; a single one keeps its order.
    server.bind("add_batch", keeper.add_batch, workers=1, repeatable=True)
    for mode in ("train", "report", "eval"):
        sample = getattr(keeper, f"sample_batch_{mode}")
        server.bind(f"sample_batch_{mode}", sample, workers=1, repeatable=True)
    server.bind("update", keeper.update, workers=1, repeatable=True)
    server.bind("stats", keeper.stats, repeatable=True)
    should_save = LocalClock(args.save_every)
    with Client(args.logger_addr, "replay-logger", maxinflight=4) as logger, server:
        while not stop.wait(args.log_every):
            try:
                logger.add(-1, keeper.stats())
            except TransportError as error:
                log.warning("The replay's metrics are lost: %s", error)
            if should_save():
                keeper.save()
    keeper.close()


def limiter_for(args: RunConfig) -> SamplesPerInsert:
    """The limiter of a run: `train_ratio` replayed steps for each step collected.

    The least size makes sure that there is a sequence to sample: with so many steps in so many
    streams at least one stream is long enough.
    """
    if args.offline:  # nothing is collected that learning could be held in step with
        return SamplesPerInsert(ratio=0.0, tolerance=1.0, minsize=1)
    return SamplesPerInsert(
        ratio=args.train_ratio / args.batch_length,
        tolerance=args.limiter_tolerance,
        minsize=max(args.batch_size, args.envs) * args.window,
        # As much as the learner may be ahead: one that keeps up is exactly where it should be.
        debt=args.limiter_tolerance,
    )


class ReplayKeeper:
    """Both buffers, their streams and the limiter, as methods others call."""

    def __init__(
        self,
        train: Replay,
        evaluation: Replay,
        make_stream: Callable[[Replay, str], Iterator[dict[str, Any]]],
        limiter: SamplesPerInsert,
        args: RunConfig,
        stop: threading.Event,
    ) -> None:
        self._buffers = {"train": train, "eval": evaluation}
        self._train, self._eval, self._limiter = train, evaluation, limiter
        self._batch_size = args.batch_size
        self._streams = {
            "train": make_stream(train, "train"),
            "report": make_stream(train, "report"),
            "eval": make_stream(evaluation, "eval"),
        }
        self._checkpoint = Checkpoint(args.logdir / "ckpt" / "replay", keep=2)
        self._stop = stop
        self._usage = Usage()
        self._waiting: dict[str, str] = {}

    def add_batch(self, steps: Any, envids: Any, is_eval: bool, source: str, seq: int) -> int:
        """Store a step of each environment; then wait while samples are behind."""
        if is_eval:
            return self._eval.add_batch(steps, envids, source, seq)
        added = self._train.add_batch(steps, envids, source, seq)
        if added:
            self._wait("actor", lambda: self._limiter.insert(added, _LIMITER_PATIENCE, "actor"))
        return added

    def sample_batch_train(self) -> dict[str, Any]:
        """A training batch, as soon as there are enough steps for it."""

        def allowed() -> None:
            self._limiter.sample(self._batch_size, _LIMITER_PATIENCE, "learner")

        self._wait("learner", allowed)
        return next(self._streams["train"])

    def sample_batch_report(self) -> dict[str, Any]:
        """A batch to report on; empty if there is too little data."""
        return self._if_there_is_data("report")

    def sample_batch_eval(self) -> dict[str, Any]:
        """A batch of evaluation data; empty if there is too little."""
        return self._if_there_is_data("eval")

    def _if_there_is_data(self, mode: str) -> dict[str, Any]:
        try:
            return next(self._streams[mode])
        except NotEnoughDataError:
            return {}

    def update(self, data: dict[str, Any]) -> int:
        """Write a trained batch's states back."""
        return self._train.update(data)

    def stats(self) -> dict[str, Any]:
        """Sizes, counts, and who waits for what."""
        return {
            **{f"replay/{key}": float(value) for key, value in self._train.stats().items()},
            **{f"eval_replay/{key}": float(value) for key, value in self._eval.stats().items()},
            "replay/limiter/avail": self._limiter.avail,
            "replay/limiter/size": float(self._limiter.size),
            "replay/waiting": " ".join(self._waiting.values()),
            **{f"replay/usage/{key}": value for key, value in self._usage.stats().items()},
        }

    def restore(self) -> None:
        snapshot = self._checkpoint.load()
        if snapshot is None:
            self._limiter.prefill(int(self._train.stats()["steps"]))
            return
        for name, buffer in self._buffers.items():
            buffer.load(snapshot.parts[name])
        self._limiter.load(snapshot.parts["limiter"])

    def save(self) -> None:
        parts = {name: buffer.save() for name, buffer in self._buffers.items()}
        self._checkpoint.save({**parts, "limiter": self._limiter.save()}, step=self._limiter.size)

    def close(self) -> None:
        self.save()
        for buffer in self._buffers.values():
            buffer.close()

    def _wait(self, who: str, attempt: Callable[[], None]) -> None:
        """Try until the limiter allows it. It gives up now and then to say why it waits, and to
        notice that the process ends."""
        while True:
            try:
                attempt()
            except RateLimitedError as reason:
                self._waiting[who] = str(reason)
                if self._stop.is_set():
                    raise ReplayClosedError("The replay is being closed.") from None
            else:
                self._waiting.pop(who, None)
                return
