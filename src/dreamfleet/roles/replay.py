"""The replay role: stores transitions, hands out batches, and holds the two in step.

A replay of several shards has a process for each, which stores the steps of its environments; see
`roles.scaling.coordinator` and `roles.scaling.shards`.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any, TypedDict

import numpy as np

from dreamfleet.clock import LocalClock
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.metrics import Usage
from dreamfleet.offline import copy_steps, nothing_to_learn_from
from dreamfleet.replay import (
    BatchOrderError,
    NotEnoughDataError,
    Replay,
    ReplayClosedError,
    SamplesPerInsert,
    SchemaError,
    Split,
    used_fractions,
)
from dreamfleet.replay.positions import POSITIONS_FILE, Positions
from dreamfleet.replay.replay import Mode
from dreamfleet.roles.addresses import find_server, listen_address, publish_address, server_name
from dreamfleet.roles.checks import Count, ReplayChecks
from dreamfleet.roles.health import Health, health_path
from dreamfleet.roles.logger_client import LoggerClient
from dreamfleet.roles.progress import limiter_for
from dreamfleet.roles.runtime import Factory, stop_event, unpack
from dreamfleet.roles.scaling.coordinator import (
    Coordinator,
    RemoteCoordinator,
    ReplayCoordinator,
    wait_unless,
)
from dreamfleet.transport import (
    ArgumentError,
    Client,
    Future,
    Server,
    TransportError,
    Unanswered,
)

log = logging.getLogger(__name__)

_IN_FLIGHT = 4  # calls of this process to each other one
_ANSWERED = (
    *(SchemaError, BatchOrderError, ConfigError, ReplayClosedError),
    *(ArgumentError, Unanswered),
)
"""Errors that do not end the process: they are not its fault."""
_MODES: tuple[Mode, ...] = ("train", "report", "eval")
_STATS_SECONDS = 2.0
_SCORES_SECONDS, _READ_SECONDS = 2.0, 0.02  # for the last scores, at the end of a run
_FOREVER = float("inf")


def parallel_replay(
    make_replay_train: Factory,
    make_replay_eval: Factory,
    make_stream: Factory,
    args: RunConfig,
    shard: int = 0,
) -> None:
    """Serve the replay until the process is asked to stop.

    When something goes wrong that is not the caller's fault, the process ends at once: what was
    acknowledged is in its files, and callers ask its successor again (`_or_end`).

    Args:
        make_replay_train, make_replay_eval: Return the buffers. Called with the number of the shard
            if that is not 0.
        make_stream: Called with a buffer and "train", "report" or "eval", returns an iterator of
            batches.
        args: The run.
        shard: Which of `replay_shards` this is.
    """
    if not 0 <= shard < args.replay_shards:
        raise ConfigError(
            f"There is no shard {shard} in a replay of replay_shards={args.replay_shards}: they "
            "are numbered from 0."
        )
    stop, name = stop_event(), server_name("replay", shard)
    which = [shard] if shard else []
    with ExitStack() as stack:

        def client(server: Any, called: str, patience: float = 60.0) -> Client:
            made = Client(server, called, _IN_FLIGHT, keys=args.run_keys, patience=patience)
            return stack.enter_context(made)

        lead = None
        if shard:  # which may be away for as long as it takes to start it elsewhere
            first = client(find_server(args, "replay"), f"{name}-lead", _FOREVER)
            lead = RemoteCoordinator(first, stop)
        service = ReplayService(
            unpack(make_replay_train)(*which),
            unpack(make_replay_eval)(*which),
            unpack(make_stream),
            limiter_for(args),
            args,
            stop,
            shard,
            lead,
        )
        server = Server(listen_address(args, "replay", shard), name, keys=args.server_keys)
        bind(server, service, args)
        logger = stack.enter_context(LoggerClient(args, f"{name}-logger", _IN_FLIGHT))
        others = {
            number: client(find_server(args, "replay", number), f"{name}-shard-{number}", _FOREVER)
            for number in range(1, 1 if shard else args.replay_shards)
        }
        should_save = LocalClock(args.save_every)
        stack.enter_context(server)
        publish_address(args, "replay", server.address, shard)
        with suppress(Unanswered):  # it is asked to stop meanwhile
            service.attach(others)
        while not stop.wait(args.log_every):
            try:
                report = service.report(others)
                if not logger.behind:
                    logger.add(-1, report)
            except TransportError as error:
                log.warning("The replay's metrics are lost: %s", error)
            if should_save():
                service.save()
        service.wait_for_reader(_SCORES_SECONDS)
    service.close()


def bind(server: Server, service: ReplayService, args: RunConfig) -> None:
    """Offer the methods of a service: to the agent, and to the other shards.

    Each that may wait for another has a thread of its own; a single one keeps its order.
    """

    def connected(connection: bytes) -> bool:
        return server.between_calls(lambda: server.connected(connection))

    checks = ReplayChecks(args, connected, _or_end(service.add_batch), _or_end(service.update))

    def serve(role: str, workers: int, name: str, method: Callable[..., Any], **more: Any) -> None:
        server.bind(name, method, workers=workers, repeatable=True, roles=(role,), **more)

    def offer(role: str, workers: int, **methods: Callable[..., Any]) -> None:
        for name, method in methods.items():
            serve(role, workers, name, _or_end(method))

    serve("agent", 1, "add_batch", checks.add_batch, pass_caller=True)
    serve("agent", 1, "update", checks.update)
    offer("agent", 1, shares=service.shares)
    for mode in _MODES:
        offer("agent", 1, **{f"sample_{mode}": functools.partial(service.sample, mode)})
    offer("replay", 0, stats=service.stats)
    offer("logger", 1, finished=service.finished)
    if lead := service.lead:
        offer("agent", 0, position=lead.position, raise_position=lead.raise_position)
        offer("agent", 0, finish=lead.finish, grant=lead.grant)
        offer("agent", 1, permit=lead.permit)
        offer("replay", 1, opened=lead.opened)
        # A shard that was killed may leave a call behind, which takes a moment to end.
        offer("replay", 2 * args.replay_shards, inserted=lead.inserted)


def _or_end(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which ends the process when it fails and that is not its caller's fault. The call
    is left to the replay's successor; a client gives one up of which several servers have died.

    In a thread of a larger process the caller is told instead, and nothing ends.
    """
    if threading.current_thread() is not threading.main_thread():
        return method

    @functools.wraps(method)  # with its signature, by which the server counts arguments
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


class Cursors(TypedDict):
    """Of each buffer, epoch and tick of the newest episode that the logger has written."""

    train: tuple[str, Count]
    eval: tuple[str, Count]


class ReplayService:
    """Both buffers, their streams and the run's positions, as methods that others call. Opening it
    recovers all of them.

    Args:
        train, evaluation: The buffers.
        make_stream: Called with a buffer and a mode.
        limiter: Holds samples and inserts in step, in the first shard.
        args: The run.
        stop: Set when the process is asked to stop.
        shard: Which of `replay_shards` this is.
        lead: The first shard, if this is another one.
    """

    def __init__(
        self,
        train: Replay,
        evaluation: Replay,
        make_stream: Callable[[Any, str], Iterator[dict[str, Any]]],
        limiter: SamplesPerInsert,
        args: RunConfig,
        stop: threading.Event,
        shard: int = 0,
        lead: Coordinator | None = None,
    ) -> None:
        self._buffers = {"train": train, "eval": evaluation}
        self._train, self._eval, self._args = train, evaluation, args
        self._shard, self._stop, self._limiter = shard, stop, limiter
        self._usage = Usage()
        self._name = server_name("replay", shard)
        self._health = Health(health_path(args, self._name))
        folder = args.logdir / "ckpt" / self._name
        counted = 1 if shard else args.replay_shards
        self._positions = Positions(folder / POSITIONS_FILE, self._tick, counted)
        for buffer in self._buffers.values():
            buffer.follow_episodes()
        # A later copy would lie between the run's own steps.
        copied = args.offline_fraction and self._positions.own
        if (args.prefill or args.offline) and not copied:
            self._positions.import_steps(self._copy_steps)
        if args.offline_fraction:
            self._mix()
        self.lead = None if lead else ReplayCoordinator(limiter, self._positions, args, stop)
        """What the shards do together, if this is the first of them."""
        self._lead: Coordinator = lead or self.lead  # type: ignore[assignment]  # one of them is there
        self._attached = threading.Event()
        buffers: dict[str, Any] = {"train": train, "report": train, "eval": evaluation}
        self._portions = {mode: _Portion(buffer) for mode, buffer in buffers.items()}
        self._streams = {mode: make_stream(part, mode) for mode, part in self._portions.items()}
        self._newest: dict[int, dict[str, Any]] = {}  # statistics of the other shards
        self._asked: dict[int, Future] = {}

    def attach(self, others: Mapping[int, Client]) -> None:
        """Let the shards know of each other, before the first call is answered. The lead asks the
        others what they hold; another shard asks the lead what it should hold.

        Raises:
            Unanswered: The process is asked to stop before they have answered.
        """
        if self.lead is None:
            steps = self._positions.own
            known = self._lead.opened(self._shard, steps, int(self._train.stats()["steps"]))
            if known > steps:  # with its counts, or its positions would have said so
                log.warning("%s was lost, with %d steps of the run.", self._name, known - steps)
                self._positions.raise_to(known)
        else:
            waiting = [client.call("stats") for client in others.values()]
            for answer in waiting:
                wait_unless(self._stop, answer.wait)
            held = [self.stats(), *(answer.result() for answer in waiting)]
            mixed = self._args.pretrain or self._args.offline_fraction
            needed = self._args.offline or (mixed and not self._positions.steps)
            if needed and not sum(each["replay"]["items"] for each in held):
                raise nothing_to_learn_from(self._args)
            sizes = [int(each["replay"]["steps"]) for each in held]
            self.lead.begin([each["own"] for each in held], sizes)
        self._attached.set()

    def _copy_steps(self) -> int:
        copy_steps(self._train, self._args, self._shard)
        return self._tick

    def _mix(self) -> None:
        """Draw a share of every batch from the steps that were copied in: those before the run's
        first step.

        Raises:
            ConfigError: They would leave before the run ends.
        """
        args, own = self._args, self._positions.own
        needed = len(self._train) + max(0, args.steps - own)
        if needed > self._train.capacity:
            raise ConfigError(
                f"offline_fraction needs the steps of prefill to the end, and replay.capacity="
                f"{args.replay.capacity} holds fewer than {needed}: raise it, or lower steps."
            )
        self._train.mix(args.offline_fraction, self._tick - own)

    def add_batch(
        self,
        steps: Any,
        envids: Any,
        is_eval: bool,
        source: str,
        seq: int,
    ) -> int:
        """Store a step of each environment; then wait while samples are behind."""
        if is_eval:
            return self._eval.add_batch(steps, envids, source, seq)
        if not self.lead:
            # Or steps would be counted before those that were lost.
            wait_unless(self._stop, self._attached.wait)
        added = self._train.add_batch(steps, envids, source, seq)
        if added:
            self._positions.stored(self._tick)
            self._health.progress()
        # Also if it was added before: perhaps by a predecessor that was killed before it could say.
        self._lead.inserted(self._shard, self._positions.own)
        return added

    # --- batches ---------------------------------------------------------------------------------

    def can_sample(self) -> bool:
        """Whether the limiter allows a batch now, and there is a sequence for it."""
        return self._limiter.can_sample() and len(self._train) > 0

    def shares(self, mode: Mode) -> tuple[int, int, list[float]]:
        """What there is to draw from in this shard; see `dreamfleet.replay.Shares`."""
        buffer = self._eval if mode == "eval" else self._train
        items, fresh, weights = buffer.shares(mode)
        return items, fresh, weights

    def sample(
        self,
        mode: Mode,
        fresh: Count = 0,
        drawn: list[Count] | None = None,
        everywhere: Count = 0,
    ) -> dict[str, Any]:
        """A batch, or the part of it that comes from this shard (`dreamfleet.replay.Split`); empty
        if it holds no sequence. The coordinator has permitted it."""
        split = None if drawn is None else Split(fresh, drawn, everywhere)
        if split is not None:
            most = self._args.host_batch
            rules = 1 if mode == "eval" else len(used_fractions(self._args.replay))
            if len(split.drawn) != rules:
                raise ConfigError(f"A part of a batch has {rules} counts, not {len(split.drawn)}.")
            if not 0 < split.batch <= most:
                raise ConfigError(f"A part of a batch has from 1 to {most} sequences.")
        self._portions[mode].split = split
        try:
            return next(self._streams[mode])
        except NotEnoughDataError:
            return {}

    # --- all of them -----------------------------------------------------------------------------

    def update(self, data: dict[str, Any]) -> int:
        """Write a trained batch's states, and priorities if it has any, back."""
        return self._train.update(data)

    def finished(self, read: Cursors) -> dict[str, Any]:
        """The episodes of both buffers that the logger has not read yet: tick, score and length of
        each."""
        found: dict[str, Any] = {"steps": self._positions.own, "tick": self._tick}
        cursors = {"train": read["train"], "eval": read["eval"]}
        for name, buffer in self._buffers.items():
            epoch, episodes = buffer.finished(*cursors[name])
            found[name] = {
                "epoch": epoch,
                "episodes": np.array(episodes, np.float64).reshape(-1, 3),
            }
        return found

    def wait_for_reader(self, timeout: float) -> None:
        """Wait until the logger has all finished episodes; it gets the others after a restart."""
        deadline = time.monotonic() + timeout
        while any(buffer.has_unread_episodes for buffer in self._buffers.values()):
            if time.monotonic() > deadline:
                log.warning("The newest scores are written when the run is resumed.")
                return
            time.sleep(_READ_SECONDS)

    def stats(self) -> dict[str, Any]:
        """How many steps of the run this shard has stored (`own`); sizes and counts of both
        buffers."""
        return {
            "own": self._positions.own,
            "replay": {key: float(value) for key, value in self._train.stats().items()},
            "eval_replay": {key: float(value) for key, value in self._eval.stats().items()},
        }

    def report(self, others: Mapping[int, Client]) -> dict[str, Any]:
        """What this process tells the logger: of the whole replay if it is the first shard."""
        mine = self.stats()
        usage = {f"{self._name}/usage/{k}": value for k, value in self._usage.stats().items()}
        if self.lead is None:
            self._health.waits()
            return {**{f"{self._name}/{k}": value for k, value in mine["replay"].items()}, **usage}
        for shard, client in others.items():
            if shard not in self._asked:  # one that is away is asked once
                self._asked[shard] = client.call("stats")
        for shard, answer in list(self._asked.items()):
            if answer.wait(_STATS_SECONDS):
                self._newest[shard] = self._asked.pop(shard).result()
        found = {
            f"{name}/{key}": value
            for name in ("replay", "eval_replay")
            for key, value in together(
                each[name] for each in (mine, *self._newest.values())
            ).items()
        }
        self._health.waits(self.lead.waits(sequences=int(found["replay/items"])))
        return {
            **found,
            **{f"replay/{key}": value for key, value in self.lead.stats().items()},
            **usage,
        }

    def save(self) -> None:
        """Make steps, values written back and counts survive a power cut."""
        for buffer in self._buffers.values():
            buffer.sync()
        self._positions.flush()

    def close(self) -> None:
        """Save, and let go of all files; also if nothing can be saved because the disk is full."""
        with ExitStack() as stack:
            for buffer in self._buffers.values():
                stack.callback(buffer.close)
            self.save()

    @property
    def _tick(self) -> int:
        return self._train.tick


class _Portion:
    """A buffer that gives out batches, or the part of one that `split` says."""

    def __init__(self, buffer: Replay) -> None:
        self._buffer = buffer
        self.split: Split | None = None

    def sample(self, batch: int, mode: Any = "train") -> dict[str, Any]:
        split = self.split
        return self._buffer.sample(split.batch if split else batch, mode, split)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)


def together(shards: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The statistics of a replay from those of its shards: what is counted is added up."""
    every = list(shards)
    found = {key: sum(each[key] for each in every) for key in every[0]}
    # Counted in sequences that were added to the same shard; others came in between.
    longer = [found["items"] / max(1.0, each["items"]) for each in every]
    pairs = list(zip(every, longer, strict=True))
    found["sample_age_max"] = max(each["sample_age_max"] * factor for each, factor in pairs)
    ages = (each["sample_age_mean"] * factor * each["samples"] for each, factor in pairs)
    found["sample_age_mean"] = sum(ages) / max(1.0, found["samples"])
    return found
