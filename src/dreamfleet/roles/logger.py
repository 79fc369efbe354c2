"""The logger role: follows episodes and writes metrics."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dreamfleet.clock import LocalClock
from dreamfleet.config import RunConfig
from dreamfleet.files import COUNTER_WORDS, DurableCounters, atomic_write, map_words
from dreamfleet.metrics import (
    Aggregate,
    EpisodeStats,
    Output,
    Outputs,
    ScoresFile,
    kind_of,
)
from dreamfleet.metrics.evaluations import Evaluation, append_evaluation
from dreamfleet.metrics.outputs.base import EVAL_STEP
from dreamfleet.roles.addresses import find_server, listen_address, publish_address, server_name
from dreamfleet.roles.checks import Count, Step, require
from dreamfleet.roles.health import Health, health_path, read_health
from dreamfleet.roles.logger_client import video_env
from dreamfleet.roles.runtime import Factory, stop_event, unpack
from dreamfleet.transport import Client, Future, Server, TransportError

log = logging.getLogger(__name__)

RECORD, RECORD_SECONDS = "logger.json", 1.0
"""Among the health records: the logger's `status`, and how often it is written."""
RECENT_EPISODES = 20
"""Episodes whose mean is the score of a run."""
_UNKNOWN = -1
_INTERLEAVED = "while training, with the newest parameters"
_MOST_SOURCES = 1 << 10
_POLL_SECONDS, _LAST_POLL_SECONDS = 0.5, 1.0
_PATIENCE = float("inf")  # of clients: a replay may be away for as long as it takes


def parallel_logger(make_logger: Factory, args: RunConfig) -> None:
    """Take metrics and transitions until the process is asked to stop; `make_logger` returns the
    output, or outputs, that metrics are written to."""
    stop = stop_event()
    logger = Logger(unpack(make_logger)(), args)
    server = Server(listen_address(args, "logger"), "logger", keys=args.server_keys)
    bind(server, logger)
    should_write, should_record = LocalClock(args.log_every), LocalClock(RECORD_SECONDS, first=True)
    with ExitStack() as stack:
        replays = {
            shard: stack.enter_context(
                Client(
                    find_server(args, "replay", shard),
                    f"logger-{server_name('replay', shard)}",
                    keys=args.run_keys,
                    patience=_PATIENCE,
                )
            )
            for shard in range(args.replay_shards)
        }
        scores = ScoreReader(logger, replays)
        stack.enter_context(server)
        publish_address(args, "logger", server.address)
        while not stop.wait(min(args.log_every, _POLL_SECONDS)):
            if should_record():
                logger.record()
            scores.poll()
            if should_write():
                logger.write()
        scores.poll(_LAST_POLL_SECONDS)
    logger.close()


def bind(server: Server, logger: Logger) -> None:
    """Offer the methods of a logger."""
    server.bind("tran", logger.tran, repeatable=True, roles=("agent",))
    server.bind("gone", logger.gone, repeatable=True, roles=("agent",))
    server.bind("add", logger.add, repeatable=True, roles=("agent", "replay", "evaluator"))
    server.bind("status", logger.status, repeatable=True, roles=("agent",))


class ScoreReader:
    """Asks every replay for the episodes that have finished, and has the logger write them."""

    def __init__(self, logger: Logger, replays: Mapping[int, Client]) -> None:
        self._logger, self._replays = logger, replays
        self._asked: dict[int, Future] = {}

    def poll(self, timeout: float = 0.0) -> None:
        """Take the answers that are there, and ask again. With a timeout, wait for those of
        replays that are connected, until they have nothing new."""
        deadline = time.monotonic() + timeout
        for shard, client in self._replays.items():
            if timeout and not client.stats()["connected"]:
                continue
            while self._take(shard, client, deadline) and timeout:
                pass

    def _take(self, shard: int, client: Client, deadline: float) -> int:
        """Write what a replay has answered; how many episodes that were."""
        asked = self._asked.pop(shard, None)
        if asked is None:
            asked = client.call("finished", self._logger.read(shard))
        try:
            if not asked.wait(max(0.0, deadline - time.monotonic())):
                self._asked[shard] = asked
                return 0
            return self._logger.scored(shard, asked.result())
        except (TransportError, OSError) as error:  # it is away, or the disk is full
            log.warning("The scores of shard %d are requested again: %s", shard, error)
            return 0


class Logger:
    """The step counter, episodes and outputs, as methods that others call."""

    def __init__(self, output: Output, args: RunConfig) -> None:
        self._lock = threading.Lock()
        self._output = BackgroundOutput(output)
        self._scores = {
            "train": ScoresFile(args.logdir / "scores.jsonl"),
            "eval": ScoresFile(args.logdir / "eval_scores.jsonl", "eval", lazy=True),
        }
        self._steps: dict[int, int] = {}  # of each shard, when it was last asked
        self._interleaved: list[tuple[float, int]] = []  # evaluation episodes since the last line
        self._args = args
        self._train, self._eval = (EpisodeStats(video=video_env(args)) for _ in range(2))
        self._aggregate = Aggregate()
        self._recent: deque[float] = deque(self._scores["train"].last, RECENT_EPISODES)
        self._recent_eval: deque[float] = deque(maxlen=RECENT_EPISODES)
        if args.eval_envs and not args.eval_every:  # else those in the file are of another time
            self._recent_eval.extend(self._scores["eval"].last)
        self._newest: dict[str, float | str] = {}
        self._taken: dict[str, int] = {}  # the newest message of each source
        # The newest step that metrics were written with: a logger that is started again goes on
        # from there. It goes with the run's other counts.
        self._map = map_words(args.logdir / "ckpt" / "logger" / "step", COUNTER_WORDS)
        self._written = DurableCounters(np.frombuffer(self._map, "<u8"))
        step = self._written.values[0]
        self._step = _UNKNOWN if step is None else step
        self.health = Health(health_path(args, "logger"))

    def tran(
        self,
        step: Step,
        envids: NDArray[np.int64],
        is_eval: bool,
        transitions: dict[str, NDArray[Any]],
        frames: dict[str, NDArray[Any]],
        source: str = "",
        number: Count = 0,
    ) -> bool:
        """Take the transitions of a batch, and how many training steps there are by now.

        `frames` holds the images of the environment whose video is recorded. Messages
        with a `source` are numbered; see `LoggerClient`. Returns whether the target score is
        reached.
        """
        with self._lock:
            if self._is_new(source, number):
                self._advance(step)
                stats, prefix = (self._eval, "eval") if is_eval else (self._train, "episode")
                for episode in stats.add(envids, transitions, frames):
                    self._aggregate.add(episode.metrics(), prefix=prefix)
                    if video := episode.video:
                        named = {f"{prefix}/video/{key}": value for key, value in video.items()}
                        self._output.write(self._step, named)
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

    def gone(self, envids: NDArray[np.int64], source: str = "", number: Count = 0) -> None:
        """Environments will not go on with their episodes."""
        with self._lock:
            if self._is_new(source, number):
                self._train.forget(envids.tolist())
                self._eval.forget(envids.tolist())

    def read(self, shard: int) -> dict[str, tuple[str, int]]:
        """Of both buffers of a replay, the newest episode that is written: its epoch and tick."""
        with self._lock:
            return {name: file.cursor(str(shard)) for name, file in self._scores.items()}

    def scored(self, shard: int, found: Mapping[str, Any]) -> int:
        """Write the episodes that have finished in a replay, each once; returns how many are new.

        Args:
            shard: Which of the run's replays it is.
            found: What it has answered; see `ReplayService.finished`.
        """
        with self._lock:
            self._steps[shard] = int(found["steps"])
            steps, written = sum(self._steps.values()), 0
            self._advance(steps)
            if self._args.hosts > 1 or len(self._steps) < self._args.replay_shards:
                steps = self._step  # there are others, which are not heard of here
            for name, file in self._scores.items():
                recent = self._recent if name == "train" else self._recent_eval
                epoch, episodes = found[name]["epoch"], found[name]["episodes"]
                for tick, score, length in episodes.tolist():
                    ago = found["tick"] - int(tick) if name == "train" else 0  # steps since then
                    at = max(0, steps - ago)
                    if file.add(at, score, int(length), str(shard), epoch, int(tick)):
                        recent.append(score)
                        written += 1
                        if name == "eval":
                            self._interleaved.append((score, int(length)))
            if written and len(self._interleaved) >= RECENT_EPISODES:
                self._keep_evaluation(steps)
        # Without the lock, and before the next question, with which the replay may forget them.
        for file in self._scores.values() if written else ():
            file.flush()
        return written

    def _keep_evaluation(self, step: int) -> None:
        """Add what environments that evaluate all the time have played to `evaluations.jsonl`."""
        returns, lengths = map(list, zip(*self._interleaved, strict=True))
        result = Evaluation(self._args.task, step, _INTERLEAVED, self._args.seed, returns, lengths)
        try:
            append_evaluation(self._args.logdir, result, kind="interleaved")
            self._interleaved.clear()
        except OSError as error:
            log.warning("evaluations.jsonl cannot be written: %s", error)

    def _target_reached(self) -> bool:
        """Whether recent episodes score enough: evaluation episodes if the run has any."""
        args = self._args
        # Evaluation environments may also come with machines that join.
        evaluated = args.eval_envs or args.eval_every or self._recent_eval
        judged = self._recent_eval if evaluated else self._recent
        enough = 1 if args.eval_every else RECENT_EPISODES  # a round is one mean
        if args.target_score is None or len(judged) < enough:
            return False
        return float(np.mean(judged)) >= args.target_score

    def add(self, step: Step, metrics: dict[str, Any], source: str = "", number: Count = 0) -> None:
        """Write metrics at the newest step known, which a negative one stands for; those of a round
        of evaluation at the step at which it began."""
        score = metrics.get("eval/score", 0.0)
        require(kind_of(score) == "scalar", "eval/score has to be a number.")
        with self._lock:
            if not self._is_new(source, number):
                return
            self._advance(step)
            self._newest |= {k: v for k, v in metrics.items() if kind_of(v) in ("scalar", "text")}
            if EVAL_STEP in metrics:
                self._output.write(step, metrics)
                if "eval/score" in metrics:  # else all of its episodes failed
                    self._recent_eval = deque([float(metrics["eval/score"])], RECENT_EPISODES)
            elif self._step != _UNKNOWN:  # else it is not known yet how far the run is
                self._output.write(self._step, metrics)

    def status(self) -> dict[str, Any]:
        """The step, the score of recent episodes, and the newest metrics."""
        with self._lock:
            return {
                **self._newest,
                "step": max(0, self._step),
                "score": float(np.mean(self._recent)) if self._recent else None,
                "eval_score": float(np.mean(self._recent_eval)) if self._recent_eval else None,
                **self._train.stats(),
            }

    def record(self) -> None:
        """Write the status to a file that the supervisor and all displays read."""
        self.health.waits()
        status = msgspec.json.encode(self.status(), enc_hook=float)
        try:
            atomic_write(health_path(self._args, RECORD), status)
        except OSError as error:
            log.warning("The status of the logger cannot be written: %s", error)

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
            self._output.write(self._step, metrics | self._env_failures())
            self._output.flush()
            self.health.progress()

    def _env_failures(self) -> dict[str, float]:
        """How often the run's own environments have failed, as they have recorded it."""
        # In a serial run, the agent's record is theirs, too.
        paths = [*health_path(self._args, "").glob("env-*"), health_path(self._args, "agent")]
        count = float(sum(read_health(path).failures for path in paths))
        rate = 1000 * count / max(1, sum(self._steps.values()))
        metrics = {"env/failures": count, "env/failures_per_1000_steps": rate}
        self._newest |= metrics
        return metrics

    def close(self) -> None:
        self.write()
        self.record()
        self._output.close()
        for file in self._scores.values():
            file.close()


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
