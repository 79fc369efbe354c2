"""The logger role: follows episodes and writes metrics."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.checkpoint import above, below
from dreamfleet.config import JOINED, RunConfig
from dreamfleet.metrics import (
    Aggregate,
    Episode,
    EpisodeStats,
    Output,
    Outputs,
    ScoresFile,
    kind_of,
)
from dreamfleet.numbers import NUMBER_WORDS, Numbers, map_words
from dreamfleet.roles.addresses import find_server, listen_address, publish_address
from dreamfleet.roles.checks import CheckedLogger
from dreamfleet.roles.health import Health, health_path
from dreamfleet.roles.outbox import EPISODE
from dreamfleet.roles.runtime import Factory, stop_event, unpack
from dreamfleet.transport import Client, Future, Server

RECENT_EPISODES = 20
"""Episodes whose mean is the score of a run."""
_UNKNOWN = -1
_MOST_SOURCES = 1 << 10
_NUMBERED = ("tran", "gone", "add", "evaluated")


def video_env(args: RunConfig) -> int:
    """The environment whose episodes are recorded as videos; the actor sends no other's frames. It
    is the run's first one, or the first one of those that join."""
    return JOINED if args.bind and args.remote_envs else 0


def parallel_logger(make_logger: Factory, args: RunConfig) -> None:
    """Take metrics and transitions until the process is asked to stop.

    Args:
        make_logger: Returns the output, or outputs, that metrics are written to.
        args: Address, intervals, where `scores.jsonl` lies.
    """
    stop = stop_event()
    logger = Logger(unpack(make_logger)(), args)
    server = Server(listen_address(args, "logger"), "logger", keys=args.server_keys)
    bind(server, logger, args)
    with server:
        publish_address(args, "logger", server.address)
        while not stop.wait(args.log_every):
            logger.write()
    logger.close()


def bind(server: Server, logger: Logger, args: RunConfig) -> None:
    """Offer the methods of a logger."""
    checked = CheckedLogger(logger, args)
    server.bind("tran", checked.tran, repeatable=True, roles=("agent",))
    server.bind("gone", checked.gone, repeatable=True, roles=("agent",))
    server.bind("ended", checked.ended, repeatable=True, roles=("replay",))
    server.bind("add", checked.add, repeatable=True, roles=("agent", "replay"))
    server.bind("evaluated", checked.evaluated, repeatable=True, roles=("evaluator",))
    everybody_else = ("agent", "replay", "evaluator", "watcher")
    server.bind("status", logger.status, repeatable=True, roles=everybody_else)


class LoggerClient(Client):
    """A client of the logger. It numbers its messages: one whose reply was lost is sent again, and
    taken once.

    Args:
        args: The run.
        name: Shown in errors and logs.
        maxinflight: Calls without a reply.
    """

    def __init__(self, args: RunConfig, name: str, maxinflight: int = 16) -> None:
        super().__init__(find_server(args, "logger"), name, maxinflight, keys=args.run_keys)
        self._source, self._messages = uuid.uuid4().hex, 0
        self._in_order = threading.Lock()

    def call(self, method: str, /, *args: Any) -> Future:
        if method not in _NUMBERED:
            return super().call(method, *args)
        with self._in_order:
            self._messages += 1
            return super().call(method, *args, self._source, self._messages)


class Logger:
    """The step counter, episodes and outputs, as methods that others call."""

    def __init__(self, output: Output, args: RunConfig) -> None:
        self._lock = threading.Lock()
        self._output = BackgroundOutput(output)
        self._video = video_env(args)
        self._scores = ScoresFile(args.logdir / "scores.jsonl")
        self._train, self._eval = EpisodeStats(video=self._video), EpisodeStats()
        self._aggregate = Aggregate()
        self._recent: deque[float] = deque(self._scores.last, maxlen=RECENT_EPISODES)
        self._recent_eval: deque[float] = deque(maxlen=RECENT_EPISODES)
        self._target = args.target_score
        self._by_evaluation = bool(args.eval_envs or args.eval_every)
        self._enough = 1 if args.eval_every else RECENT_EPISODES  # a round is one mean
        self._newest: dict[str, float | str] = {}
        self._reported: dict[str, float] = {}  # when each role last reported
        self._taken: dict[str, int] = {}  # the newest message of each source
        # The newest step that metrics were written with: a logger that is started again goes on
        # from there. It goes with the run's other counts.
        self._map = map_words(args.logdir / "ckpt" / "logger" / "step", NUMBER_WORDS)
        self._written = Numbers(np.frombuffer(self._map, "<u8"))
        step = self._written.values[0]
        self._step = _UNKNOWN if step is None else step
        self._health = Health(health_path(args, "logger"))

    @property
    def step(self) -> int:
        """The newest step known; -1 if none is."""
        return self._step

    def tran(
        self,
        step: int,
        envids: NDArray[np.int64],
        is_eval: NDArray[np.bool_],
        transitions: dict[str, NDArray[Any]],
        frames: dict[str, NDArray[Any]],
        source: str = "",
        number: int = 0,
    ) -> bool:
        """Take the transitions of a batch, and how many training steps there are by now.

        `frames` holds the images of the environment whose video is recorded, a single row. Messages
        with a `source` are numbered; see `LoggerClient`. Returns whether the target score is
        reached.
        """
        with self._lock:
            if not self._is_new(source, number):
                return self._target_reached()
            self._advance(step)
            train, recorded = ~is_eval, envids == self._video
            if frames and recorded.any():
                train &= ~recorded
                self._follow(self._train, envids, recorded, transitions, frames)
            if train.any():
                self._follow(self._train, envids, train, transitions)
            if is_eval.any():
                self._follow(self._eval, envids, is_eval, transitions)
            return self._target_reached()

    def _is_new(self, source: str, number: int) -> bool:
        """Whether a message was not taken before."""
        if not source:
            return True
        before = self._taken.pop(source, 0)
        self._taken[source] = max(number, before)  # the sources that sent last are kept
        if len(self._taken) > _MOST_SOURCES:
            del self._taken[next(iter(self._taken))]
        return number > before

    def _advance(self, step: int) -> None:
        if step > self._step:
            self._step = step
            self._written.set(0, step)

    def gone(self, envids: NDArray[np.int64], source: str = "", number: int = 0) -> None:
        """Environments will not go on with their episodes."""
        with self._lock:
            if self._is_new(source, number):
                self._train.forget(envids.tolist())
                self._eval.forget(envids.tolist())

    def ended(self, ids: list[str], episodes: dict[str, NDArray[Any]]) -> None:
        """Take the scores of training episodes, each of which is written once, however often it is
        sent. See `dreamfleet.roles.outbox`."""
        with self._lock:
            rows = zip(ids, *(episodes[key].tolist() for key in EPISODE), strict=True)
            for name, step, score, length, ended in rows:
                self._advance(step)
                if self._scores.add(step, score, length, name, time=ended):
                    self._recent.append(score)

    def _follow(
        self,
        episodes: EpisodeStats,
        envids: NDArray[np.int64],
        rows: NDArray[np.bool_],
        transitions: dict[str, NDArray[Any]],
        frames: dict[str, NDArray[Any]] | None = None,
    ) -> None:
        if not rows.all():
            envids = envids[rows]
            transitions = {key: value[rows] for key, value in transitions.items()}
        for episode in episodes.add(envids, {**transitions, **(frames or {})}):
            self._finish(episode, "eval" if episodes is self._eval else "episode")

    def _finish(self, episode: Episode, prefix: str) -> None:
        self._aggregate.add(episode.metrics(), prefix=prefix)
        if prefix == "eval":
            self._recent_eval.append(episode.score)
        if episode.video:
            videos = {f"{prefix}/video/{key}": video for key, video in episode.video.items()}
            self._output.write(self._step, videos)

    def _target_reached(self) -> bool:
        """Whether recent episodes score enough: evaluation episodes if the run has any."""
        # Evaluation environments may also come with machines that join.
        evaluated = self._by_evaluation or bool(self._recent_eval)
        judged = self._recent_eval if evaluated else self._recent
        if self._target is None or len(judged) < self._enough:
            return False
        return float(np.mean(judged)) >= self._target

    def add(self, step: int, metrics: dict[str, Any], source: str = "", number: int = 0) -> None:
        """Write metrics; a negative step stands for the newest one known."""
        with self._lock:
            if not self._is_new(source, number):
                return
            self._advance(step)
            self._reported |= dict.fromkeys((k.split("/")[0] for k in metrics), time.monotonic())
            self._newest |= {k: v for k, v in metrics.items() if kind_of(v) in ("scalar", "text")}
            if self._step != _UNKNOWN:  # nobody has said yet how far the run is
                self._output.write(self._step, metrics)

    def evaluated(
        self, step: int, metrics: dict[str, float], source: str = "", number: int = 0
    ) -> None:
        """Take the result of a round of evaluation, with the step at which it began."""
        with self._lock:
            if not self._is_new(source, number):
                return
            self._newest |= metrics
            if "eval/score" in metrics:  # else all of its episodes failed
                self._recent_eval.clear()
                self._recent_eval.append(metrics["eval/score"])
            self._output.write(step, metrics)

    def status(self) -> dict[str, Any]:
        """The step, the score of recent episodes, the newest metrics, and for how many seconds each
        role has not reported (`ROLE/silence`)."""
        with self._lock:
            now = time.monotonic()
            return {
                **self._newest,
                "step": max(0, self._step),
                "score": float(np.mean(self._recent)) if self._recent else None,
                "eval_score": float(np.mean(self._recent_eval)) if self._recent_eval else None,
                **self._train.stats(),
                **{f"{role}/silence": now - then for role, then in self._reported.items()},
            }

    def write(self) -> None:
        """Write what was aggregated about episodes."""
        with self._lock:
            if self._step == _UNKNOWN:
                return
            metrics = self._aggregate.result()
            for name, episodes in (("episodes", self._train), ("eval_episodes", self._eval)):
                counts = episodes.stats()
                if name == "episodes" or any(counts.values()):
                    metrics |= {f"{name}/{key}": value for key, value in counts.items()}
            self._output.write(self._step, metrics)
            self._output.flush()
            self._scores.flush()
            self._health.progress()

    def save(self) -> dict[str, Any]:
        """What has come in and is not written yet: episodes under way, and means."""
        with self._lock:
            return {
                "recent_eval": np.array(self._recent_eval, np.float64),
                "aggregate": self._aggregate.save(),
                **above("train", self._train.save()),
                **above("eval", self._eval.save()),
            }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `save` returned."""
        with self._lock:
            self._recent_eval.extend(state["recent_eval"].tolist())
            self._aggregate.load(state["aggregate"])
            self._train.load(below(state, "train"))
            self._eval.load(below(state, "eval"))

    def close(self) -> None:
        self.write()
        self._output.close()
        self._scores.close()


class BackgroundOutput:
    """An output that a thread writes to, in order.

    Encoding a video, a slow disk or a remote service take their time. Those who report metrics do
    not wait for it, unless so much is waiting that it would fill the memory.
    """

    _MOST_WAITING = 256

    def __init__(self, output: Output) -> None:
        self._output = Outputs([output])  # which reports what fails, and goes on
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(self._MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name="logger-output", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._jobs.put(partial(self._output.write, step, metrics))

    def flush(self) -> None:
        self._jobs.put(self._output.flush)

    def close(self) -> None:
        """Write what is waiting, then close the output."""
        self._jobs.put(None)
        self._thread.join()
        self._output.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
