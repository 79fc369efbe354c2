"""One line now and then that tells how the run is doing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self

from dreamfleet.config import RunConfig
from dreamfleet.fleet.stall import why
from dreamfleet.fleet.supervisor import Say
from dreamfleet.formatting import readable
from dreamfleet.transport import Client, Future, TransportError

_PATIENT_LINES = 2


class StatusLine:
    """Asks the logger without waiting for it, and says what it answered the time before.

    When there were no steps since, or no updates for a while, it also says who waits for whom.

    Args:
        args: The run.
        say: Takes the lines.
        away: Tells which processes do not run at the moment.
        news: Takes what is said once and stays: what the agent starts from. None for `say`.
    """

    def __init__(
        self,
        args: RunConfig,
        say: Say,
        away: Callable[[], list[str]] = list,
        news: Say | None = None,
    ) -> None:
        self._args, self._say, self._away = args, say, away
        self._news = news or say
        self._start = "starting anew"
        self._counts: tuple[float, float] | None = None
        self._without_updates = 0  # lines in a row
        self._client = Client(args.logger_addr, "status", keys=args.run_keys)
        self._asked: Future | None = None
        self._last: tuple[float, float] | None = None
        self._begin = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def show(self) -> None:
        try:
            if self._asked is None:
                self._asked = self._client.status()
            if self._asked.wait(1.0):
                asked, self._asked = self._asked, None
                status = asked.result()
                self._tell_start(status)
                self._say(self._line(status))
                self._explain(status)
            else:
                away = ", ".join(self._away())
                self._say(f"The logger does not answer yet{away and f'; not running: {away}'}.")
        except TransportError as error:
            self._asked = None
            self._say(f"No news of the run: {error}")

    def _tell_start(self, status: dict[str, Any]) -> None:
        """Whoever starts from a part of a checkpoint has to see which part that was."""
        start = str(status.get("learner/start", self._start))
        if start == self._start:
            return
        self._start = start
        name = "serial" if self._args.launcher == "serial" else "agent"
        where = f"; every entry is in {self._args.logdir / 'logs' / f'{name}.log'}"
        self._news(f"The agent is {start}{where if 'entries' in start else ''}")

    def _line(self, status: dict[str, Any]) -> str:
        now, step = time.monotonic(), float(status["step"])
        if self._last is None:
            self._last = now, step
            return f"step {readable(step)}  {status.get('learner/state', 'starting')}"
        rate = (step - self._last[1]) / max(now - self._last[0], 1e-9)
        self._last = now, step
        fields = [f"step {readable(step)}"]
        if self._args.steps:
            fields[0] += f" of {readable(self._args.steps)}"
        if status["score"] is not None:
            fields.append(f"score {readable(status['score'])}")
        if status["eval_score"] is not None:
            fields.append(f"evaluation {readable(status['eval_score'])}")
        if "learner/updates" in status:
            fields.append(f"updates {readable(status['learner/updates'])}")
            fields.append(f"{readable(status['learner/updates_per_second'])} updates/s")
        fields.append(f"{readable(rate)} steps/s")
        if "learner/replay_ratio" in status:
            fields.append(f"replay ratio {readable(status['learner/replay_ratio'])}")
        if (left := self._time_left(now, step, rate)) is not None:
            fields.append(f"{_clock(left)} left")
        return "  ".join(fields)

    def _explain(self, status: dict[str, Any]) -> None:
        counts = float(status["step"]), float(status.get("learner/updates", 0))
        before, self._counts = self._counts, counts
        if before is None:
            return
        self._without_updates = self._without_updates + 1 if counts[1] == before[1] else 0
        # Steps come a while before updates do, and are heard of sooner.
        if counts[0] == before[0] or self._without_updates > _PATIENT_LINES:
            self._say(f"Waiting: {why(status, self._away(), self._args.log_every)}.")

    def _time_left(self, now: float, step: float, rate: float) -> float | None:
        ends = []
        if self._args.duration:
            ends.append(self._args.duration - (now - self._begin))
        if self._args.steps and rate > 0:
            ends.append((self._args.steps - step) / rate)
        return max(0.0, min(ends)) if ends else None


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
