"""The logger role: follows episodes and writes metrics."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.config import RunConfig
from dreamfleet.metrics import Aggregate, Episode, EpisodeStats, Output, ScoresFile, kind_of
from dreamfleet.roles.camera import FILMED
from dreamfleet.roles.common import Factory, stop_event, unpack
from dreamfleet.roles.writer import Writer
from dreamfleet.transport import Server

RECENT_EPISODES = 20
"""Episodes whose mean is the score of a run."""
_UNKNOWN = -1


def parallel_logger(make_logger: Factory, args: RunConfig) -> None:
    """Take metrics and transitions until the process is asked to end.

    Args:
        make_logger: Returns the output, or outputs, that metrics are written to.
        args: Address, intervals, where `scores.jsonl` lies.
    """
    stop = stop_event()
    keeper = LogKeeper(unpack(make_logger)(), args)
    server = Server(args.logger_addr, "logger", keys=args.run_keys)
    server.bind("tran", keeper.tran, repeatable=True)
    server.bind("add", keeper.add, repeatable=True)
    server.bind("status", keeper.status, repeatable=True)
    with server:
        while not stop.wait(args.log_every):
            keeper.write()
    keeper.close()


class LogKeeper:
    """Counts, episodes and outputs, as methods others call."""

    def __init__(self, output: Output, args: RunConfig) -> None:
        self._lock = threading.Lock()
        self._output = Writer(output)
        self._scores = ScoresFile(args.logdir / "scores.jsonl")
        self._train = EpisodeStats(timeout=args.episode_timeout, video=FILMED)
        self._eval = EpisodeStats(timeout=args.episode_timeout)
        self._aggregate = Aggregate()
        self._recent: deque[float] = deque(maxlen=RECENT_EPISODES)
        self._recent_eval: deque[float] = deque(maxlen=RECENT_EPISODES)
        self._target = args.target_score
        self._judged = self._recent_eval if args.eval_envs else self._recent
        self._newest: dict[str, float | str] = {}
        self._heard: dict[str, float] = {}  # when each role last reported
        self._step = _UNKNOWN

    def tran(
        self,
        step: int,
        envids: NDArray[np.int64],
        is_eval: NDArray[np.bool_],
        transitions: dict[str, NDArray[Any]],
        frames: dict[str, NDArray[Any]],
    ) -> bool:
        """Take the transitions of a batch, and how many training steps there are by now.

        `frames` holds the images of the filmed environment, a single row, while it is filmed.
        Returns whether the target score is reached.
        """
        with self._lock:
            self._step = max(self._step, step)
            train, filmed = ~is_eval, envids == FILMED
            if frames and filmed.any():
                train &= ~filmed
                self._follow(self._train, envids, filmed, transitions, frames)
            if train.any():
                self._follow(self._train, envids, train, transitions)
            if is_eval.any():
                self._follow(self._eval, envids, is_eval, transitions)
            return self._target_reached()

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
        else:
            self._recent.append(episode.score)
            now = round(time.time(), 1)
            self._scores.add(self._step, episode.score, episode.length, time=now)
        if episode.video:
            videos = {f"{prefix}/video/{key}": video for key, video in episode.video.items()}
            self._output.write(self._step, videos)

    def _target_reached(self) -> bool:
        """Whether recent episodes score enough: evaluation episodes if the run has any."""
        if self._target is None or len(self._judged) < RECENT_EPISODES:
            return False
        return float(np.mean(self._judged)) >= self._target

    def add(self, step: int, metrics: dict[str, Any]) -> None:
        """Write metrics; a negative step stands for the newest one known."""
        with self._lock:
            self._step = max(self._step, step)
            self._heard |= dict.fromkeys((k.split("/")[0] for k in metrics), time.monotonic())
            self._newest |= {k: v for k, v in metrics.items() if kind_of(v) in ("scalar", "text")}
            if self._step != _UNKNOWN:  # a logger that was started again has yet to hear of it
                self._output.write(self._step, metrics)

    def status(self) -> dict[str, Any]:
        """How the run is doing: the step, the score of recent episodes, the newest metrics, and for
        how many seconds each role has said nothing (`ROLE/silence`)."""
        with self._lock:
            now = time.monotonic()
            return {
                **self._newest,
                "step": max(0, self._step),
                "score": float(np.mean(self._recent)) if self._recent else None,
                "eval_score": float(np.mean(self._recent_eval)) if self._recent_eval else None,
                **self._train.stats(),
                **{f"{role}/silence": now - then for role, then in self._heard.items()},
            }

    def write(self) -> None:
        """Write what has come together about episodes."""
        with self._lock:
            self._train.expire()
            self._eval.expire()
            if self._step == _UNKNOWN:
                return
            metrics = self._aggregate.result()
            for name, episodes in (("episodes", self._train), ("eval_episodes", self._eval)):
                episodes.expire()
                counts = episodes.stats()
                if name == "episodes" or any(counts.values()):
                    metrics |= {f"{name}/{key}": value for key, value in counts.items()}
            self._output.write(self._step, metrics)
            self._output.flush()
            self._scores.flush()

    def close(self) -> None:
        self.write()
        self._output.close()
        self._scores.close()
