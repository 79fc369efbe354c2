"""The replay role: stores transitions, hands out batches, and holds the two in step."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.clock import LocalClock
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.metrics import Usage
from dreamfleet.offline import copy_steps
from dreamfleet.positions import Positions
from dreamfleet.replay import (
    BatchOrderError,
    NotEnoughDataError,
    RateLimitedError,
    Replay,
    ReplayClosedError,
    SamplesPerInsert,
    SchemaError,
)
from dreamfleet.roles.addresses import find_server, listen_address, publish_address
from dreamfleet.roles.notes import Notes, notes_path
from dreamfleet.roles.runtime import Factory, stop_event, unpack
from dreamfleet.transport import Client, Server, TransportError, Unanswered

log = logging.getLogger(__name__)

_LIMITER_TIMEOUT = 1.0
_NO_SEQUENCE_SECONDS = 0.1
_ANSWERED = (SchemaError, BatchOrderError, ConfigError, ReplayClosedError, Unanswered)
"""Errors that do not end the process: the caller's fault, or nobody's."""


def parallel_replay(
    make_replay_train: Factory, make_replay_eval: Factory, make_stream: Factory, args: RunConfig
) -> None:
    """Serve the replay until the process is asked to stop, then save what is not in its files.

    When something goes wrong that is not the caller's fault, the process ends at once and without a
    reply: what was acknowledged is in its files, and callers ask its successor again.

    Args:
        make_replay_train: Returns the buffer of training data.
        make_replay_eval: Returns the buffer of evaluation data.
        make_stream: Called with a buffer and "train", "report" or "eval", returns an iterator of
            batches.
        args: Address, sizes, `train_ratio`.
    """
    stop = stop_event()
    service = ReplayService(
        unpack(make_replay_train)(),
        unpack(make_replay_eval)(),
        unpack(make_stream),
        limiter_for(args),
        args,
        stop,
    )
    server = Server(listen_address(args, "replay"), "replay", keys=args.server_keys)
    # Each may wait for another, so each has a thread of its own; a single one keeps its order.
    for name in (
        "add_batch",
        "sample_batch_train",
        "sample_batch_report",
        "sample_batch_eval",
        "update",
    ):
        method = _or_end(getattr(service, name))
        server.bind(name, method, workers=1, repeatable=True, roles=("agent",))
    for name in ("stats", "position", "raise_position", "grant"):
        method = _or_end(getattr(service, name))
        server.bind(name, method, repeatable=True, roles=("agent",))
    should_save = LocalClock(args.save_every)
    logger_address = find_server(args, "logger")
    with Client(logger_address, "replay-logger", 4, keys=args.run_keys) as logger, server:
        publish_address(args, "replay", server.address)
        while not stop.wait(args.log_every):
            try:
                logger.add(-1, service.stats())
            except TransportError as error:
                log.warning("The replay's metrics are lost: %s", error)
            if should_save():
                service.save()
    service.close()


def _or_end(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which ends the process when it fails and that is not its caller's fault.

    In a thread of a larger process the caller is told instead.
    """
    if threading.current_thread() is not threading.main_thread():
        return method

    @functools.wraps(method)
    def guarded(*args: Any) -> Any:
        try:
            return method(*args)
        except _ANSWERED:
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


class ReplayService:
    """Both buffers, their streams, the run's positions and the limiter, as methods that others
    call. Opening it recovers all of them."""

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
        self._batch_size, self._window = args.batch_size, args.window
        self._stop = stop
        self._usage = Usage()
        self._notes = Notes(notes_path(args, "replay"))
        self._waiting = {"actor": "", "learner": ""}
        folder = args.logdir / "ckpt" / "replay"
        self._checkpoint = Checkpoint(folder, keep=2)
        self._positions = Positions(folder / "positions", self._tick)
        if args.prefill or args.offline:
            self._positions.import_steps(functools.partial(self._copy_steps, args))
        snapshot = self._checkpoint.load()
        if snapshot is not None:
            for name, buffer in self._buffers.items():
                buffer.load(snapshot.parts[name])
        size = int(train.stats()["steps"])
        limiter.load({"size": size, "avail": self._positions.owed(limiter, size)})
        self._streams = {
            "train": make_stream(train, "train"),
            "report": make_stream(train, "report"),
            "eval": make_stream(evaluation, "eval"),
        }

    def _copy_steps(self, args: RunConfig) -> int:
        copy_steps(self._train, args)
        return self._tick

    def add_batch(self, steps: Any, envids: Any, is_eval: bool, source: str, seq: int) -> int:
        """Store a step of each environment; then wait while samples are behind."""
        if is_eval:
            return self._eval.add_batch(steps, envids, source, seq)
        added = self._train.add_batch(steps, envids, source, seq)
        if added:
            self._positions.stored(self._tick)
            self._notes.progress()
            self._wait("actor", lambda: self._limiter.insert(added, _LIMITER_TIMEOUT, "collecting"))
        return added

    def sample_batch_train(self) -> dict[str, Any]:
        """A training batch, as soon as there are enough steps for it."""

        def allowed() -> None:
            if not len(self._train) and self._limiter.can_sample():
                # Environments that have joined share the steps, and none has made enough of them.
                self._stop.wait(_NO_SEQUENCE_SECONDS)
                raise RateLimitedError(
                    f"training waits for a first sequence: no environment has made "
                    f"{self._window} steps in a row yet.",
                    who="training",
                    missing=1,
                    unit="sequences",
                )
            self._limiter.sample(self._batch_size, _LIMITER_TIMEOUT, "training")

        while True:
            self._wait("learner", allowed)
            if len(self._train):
                break
            self._limiter.give_back(self._batch_size)
        self._positions.sampled(self._batch_size)
        return next(self._streams["train"])

    def sample_batch_report(self) -> dict[str, Any]:
        """A batch to report on; empty if there is too little data."""
        return self._sample_if_possible("report")

    def sample_batch_eval(self) -> dict[str, Any]:
        """A batch of evaluation data; empty if there is too little."""
        return self._sample_if_possible("eval")

    def _sample_if_possible(self, mode: str) -> dict[str, Any]:
        try:
            return next(self._streams[mode])
        except NotEnoughDataError:
            return {}

    def update(self, data: dict[str, Any]) -> int:
        """Write a trained batch's states, and priorities if it has any, back."""
        return self._train.update(data)

    def stats(self) -> dict[str, Any]:
        """Sizes, counts, and who waits for what."""
        return {
            **{f"replay/{key}": float(value) for key, value in self._train.stats().items()},
            **{f"eval_replay/{key}": float(value) for key, value in self._eval.stats().items()},
            "replay/limiter/avail": self._limiter.avail,
            "replay/limiter/size": float(self._limiter.size),
            **{f"replay/waiting/{who}": reason for who, reason in self._waiting.items()},
            **{f"replay/usage/{key}": value for key, value in self._usage.stats().items()},
        }

    def position(self) -> dict[str, int]:
        """The run's durable counts."""
        return {"steps": self._positions.steps, "samples": self._positions.samples}

    def raise_position(self, steps: int) -> dict[str, int]:
        """The run has made at least this many steps, as a checkpoint of the agent knows."""
        self._positions.raise_to(steps)
        return self.position()

    def grant(self, sequences: int) -> bool:
        """Let so many sequences be sampled for which no steps will be collected; returns whether
        there are enough steps to sample from."""
        self._limiter.grant(sequences)
        return self._limiter.can_sample()

    def save(self) -> None:
        """Save what the buffers do not keep in their files, and sync the rest."""
        parts = {name: buffer.save() for name, buffer in self._buffers.items()}
        self._positions.flush()
        self._checkpoint.save(parts, step=self._positions.steps)

    def close(self) -> None:
        self.save()
        for buffer in self._buffers.values():
            buffer.close()

    @property
    def _tick(self) -> int:
        return self._train.tick

    def _wait(self, who: str, attempt: Callable[[], None]) -> None:
        """Try until the limiter allows it. Each attempt times out, to say why it waits and to
        notice that the process is asked to stop."""
        while True:
            try:
                attempt()
            except RateLimitedError as reason:
                self._waiting[who] = str(reason)
                if self._stop.is_set():
                    raise Unanswered("The replay is being closed.") from None
            else:
                self._waiting[who] = ""
                return
