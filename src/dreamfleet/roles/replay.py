"""The replay role: keeps transitions, hands out batches, and holds the two in step."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.clock import LocalClock
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.metrics import Usage
from dreamfleet.replay import (
    BatchOrderError,
    NotEnoughDataError,
    RateLimitedError,
    Replay,
    ReplayClosedError,
    SamplesPerInsert,
    SchemaError,
)
from dreamfleet.roles.common import Factory, stop_event, unpack
from dreamfleet.roles.tally import Tally
from dreamfleet.transport import Client, Server, TransportError

log = logging.getLogger(__name__)

_LIMITER_PATIENCE = 1.0
_CALLERS_FAULT = (SchemaError, BatchOrderError, ConfigError, ReplayClosedError)


def parallel_replay(
    make_replay_train: Factory, make_replay_eval: Factory, make_stream: Factory, args: RunConfig
) -> None:
    """Serve the replay until the process is asked to end, then save what is not in its files.

    When something goes wrong that is not the caller's fault the process ends at once and without
    an answer: what was acknowledged is in its files, and callers ask its successor again.

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
    server = Server(args.replay_addr, "replay", keys=args.run_keys)
    # Each may wait for another, so each has a thread of its own; a single one keeps its order.
    for name in (
        "add_batch",
        "sample_batch_train",
        "sample_batch_report",
        "sample_batch_eval",
        "update",
    ):
        server.bind(name, _or_end(getattr(keeper, name)), workers=1, repeatable=True)
    for name in ("stats", "position"):
        server.bind(name, _or_end(getattr(keeper, name)), repeatable=True)
    should_save = LocalClock(args.save_every)
    with Client(args.logger_addr, "replay-logger", 4, keys=args.run_keys) as logger, server:
        while not stop.wait(args.log_every):
            try:
                logger.add(-1, keeper.stats())
            except TransportError as error:
                log.warning("The replay's metrics are lost: %s", error)
            if should_save():
                keeper.save()
    keeper.close()


def _or_end(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which ends the process when it fails and that is not its caller's fault.

    In a thread of a larger process, as in the serial mode, the caller is told instead.
    """
    if threading.current_thread() is not threading.main_thread():
        return method

    @functools.wraps(method)
    def guarded(*args: Any) -> Any:
        try:
            return method(*args)
        except _CALLERS_FAULT:
            raise
        except BaseException:
            log.exception("The replay failed.")
            logging.shutdown()
            os._exit(1)

    return guarded


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


class Origin(NamedTuple):
    """Where the counts of this life of the process begin."""

    ticks: int
    """Steps that had ever come into the files."""
    steps: int
    """Steps that the run had made."""
    size: int
    """Steps that the limiter had counted."""


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
        folder = args.logdir / "ckpt" / "replay"
        self._checkpoint = Checkpoint(folder, keep=2)
        self._samples = Tally(folder / "samples")
        self._stop = stop
        self._usage = Usage()
        self._waiting: dict[str, str] = {}
        self._origin = Origin(0, 0, 0)

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
        self._samples.add(self._batch_size)
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
            **{f"replay/waiting/{who}": self._waiting.get(who, "") for who in ("actor", "learner")},
            **{f"replay/usage/{key}": value for key, value in self._usage.stats().items()},
        }

    def position(self) -> dict[str, float]:
        """How far the run is by what lies in the files: training steps, sequences sampled, and the
        limiter."""
        limiter = self._limiter.save()
        return {
            "steps": self._origin.steps + self._ticks - self._origin.ticks,
            "samples": self._samples.value,
            **{f"limiter/{key}": value for key, value in limiter.items()},
        }

    def restore(self) -> None:
        """Go on from the newest save, and count what came after it.

        Steps are counted by the replay's files and samples by the tally, neither of which a killed
        process loses, so limiter and counts are those of the moment it was killed.
        """
        snapshot = self._checkpoint.load()
        if snapshot is None:
            self._limiter.prefill(int(self._train.stats()["steps"]))
            self._origin = Origin(self._ticks, 0, self._limiter.size)
            self.save()
            return
        for name, buffer in self._buffers.items():
            buffer.load(snapshot.parts[name])
        saved = snapshot.parts["position"]
        inserts = self._ticks - int(saved["ticks"])
        if inserts < 0:
            log.warning(
                "The replay holds %d steps less than when it was saved; the run goes on without "
                "them.",
                -inserts,
            )
            inserts = 0
        self._limiter.load(snapshot.parts["limiter"])
        self._limiter.catch_up(inserts, max(0, self._samples.value - int(saved["samples"])))
        steps = int(saved["steps"]) + inserts
        self._origin = Origin(self._ticks, steps, self._limiter.size)

    def save(self) -> None:
        parts = {name: buffer.save() for name, buffer in self._buffers.items()}
        self._samples.flush()
        samples = self._samples.value
        limiter = self._limiter.save()
        # Only steps that the limiter has counted: one may be stored and still wait for it.
        counted = int(limiter["size"]) - self._origin.size
        position = {
            "ticks": self._origin.ticks + counted,
            "steps": self._origin.steps + counted,
            "samples": samples,
        }
        self._checkpoint.save(
            {**parts, "limiter": limiter, "position": position}, step=position["steps"]
        )

    @property
    def _ticks(self) -> int:
        return int(self._train.stats()["ticks"])

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
