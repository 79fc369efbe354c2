"""Why a run makes no progress: who waits for whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dreamfleet.fleet.record import WorkerRecord
from dreamfleet.roles.notes import Noted

_REPORTS_MISSED = 3
_NAMED = 4
_STARTS_WITHIN = 300.0
_TRAINING = "training"
_COMPILING = "compiling"
_HANGS_AFTER = 10.0
_DOING = {
    "building": "is being built",
    "resetting": "is in a reset",
    "stepping": "is in a step",
    "closing": "is being closed",
}


def late_after(log_every: float) -> float:
    """Seconds after which a role that reports every `log_every` seconds is late."""
    return 1 + _REPORTS_MISSED * log_every


def why_waiting(
    metrics: Mapping[str, Any], workers: Sequence[WorkerRecord], log_every: float, now: float
) -> str:
    """Who waits for whom, as far as is known; empty if nobody says that it waits.

    Args:
        metrics: What the logger knows. `ROLE/silence` are the seconds since a role last reported,
            `actor/waiting`, `replay/waiting/actor` and `replay/waiting/learner` say what somebody
            waits for, and `learner/state` says what the learner does.
        workers: What the supervisor knows.
        log_every: Seconds between two reports of a role.
        now: Unix time.
    """
    return "; ".join(
        [
            *restarting(workers),
            *_Reports(metrics, workers, log_every, now).reasons(),
        ]
    )


def hanging(noted: Iterable[Noted], env_timeout: float, now: float) -> str:
    """Environments that take long right now, since when, and what follows; empty if none does."""
    what_follows = (
        f"after {env_timeout:g} s (env_timeout) its process is ended and started again"
        if env_timeout
        else "nobody ends it, because env_timeout is 0"
    )
    slow = [
        f"environment {each.envid} {_DOING[each.doing]} for {now - each.since:.0f} s"
        for each in noted
        if each.doing != "waiting" and now - each.since > _HANGS_AFTER
    ]
    return f"{some_of(slow)}: {what_follows}" if slow else ""


class _Reports:
    """What the roles of a run reported, and which of them are late."""

    def __init__(
        self,
        metrics: Mapping[str, Any],
        workers: Sequence[WorkerRecord],
        log_every: float,
        now: float,
    ) -> None:
        self._metrics, self._late, self._now = metrics, late_after(log_every), now
        # Of a role with several workers, the first one.
        found = {worker.role: worker for worker in reversed(workers) if worker.role != "actor"}
        self._workers = found
        self._shards = [each for each in workers if each.role == "replay" and each.name != "replay"]
        self._actors = {worker.name: worker for worker in workers if worker.role == "actor"}

    def reasons(self) -> list[str]:
        reasons = []
        if not self._is_restarting("agent"):
            reasons += self._agent()
            reasons += [each for name in self._actors for each in self._actor(name)]
        if not self._is_restarting("replay"):
            reasons += self._replay()
        return reasons

    def _agent(self) -> list[str]:
        acts, learns = self._has_reported("actor", "agent"), self._has_reported("learner", "agent")
        if not acts and not learns:
            return self._starting("agent")
        reasons = []
        # Until the learner is prepared the actor waits for it, and does not report.
        if acts and self._silence("actor") > self._late:
            reasons.append(f"the actor has not reported for {self._silence('actor'):.0f} s")
        elif acts:
            reasons.append(self._text("actor/waiting"))
        state = self._text("learner/state")
        if text := self._text("replay/waiting/learner"):  # the replay knows more about it
            reasons.append(text)
        elif learns and state.startswith(_COMPILING):
            reasons.append(f"the learner is {state} ({self._silence('learner'):.0f} s so far)")
        elif learns and state not in ("", _TRAINING):
            reasons.append(f"the learner is {state}")
        elif learns and self._silence("learner") > self._late:
            reasons.append(f"the learner has made no update for {self._silence('learner'):.0f} s")
        return list(filter(None, reasons))

    def _actor(self, name: str) -> list[str]:
        """An actor in a process of its own, which waits for the agent before it acts."""
        worker = self._actors[name]
        acts = self._silence("actor") < self._age("agent")
        if worker.state == "restarting" or not acts:
            return []
        silence = min(self._silence(name), self._now - worker.started, self._age("logger"))
        if silence > self._late:
            return [f"{name} has not reported for {silence:.0f} s"]
        return list(filter(None, [self._text(f"{name}/waiting")]))

    def _replay(self) -> list[str]:
        if not self._has_reported("replay", "replay"):
            # It reports only after a while. Meanwhile others know more.
            return self._starting("replay") if self._unheard("replay") > self._late else []
        if self._silence("replay") > self._late:
            return [f"the replay has not reported for {self._silence('replay'):.0f} s"]
        shards = [self._shard(worker) for worker in self._shards if worker.state == "running"]
        return list(filter(None, [*shards, self._text("replay/waiting/actor")]))

    def _shard(self, worker: WorkerRecord) -> str:
        """Another shard of the replay, if it is late."""
        silence = min(self._silence(worker.name), self._now - worker.started, self._age("logger"))
        late = silence > self._late
        return f"{worker.name} has not reported for {silence:.0f} s" if late else ""

    def _starting(self, role: str) -> list[str]:
        """A role that has not reported since its worker was started."""
        seconds = self._unheard(role)
        if seconds == float("inf"):
            return [f"the {role} has not reported yet"]
        if seconds <= self._late and seconds >= self._age(role):
            return [f"the {role} is starting"]
        if role == "agent" and self._late < seconds and self._age(role) < _STARTS_WITHIN:
            return [
                f"the agent is starting and builds its networks ({seconds:.0f} s so far; what it "
                "does is in logs/agent.log)"
            ]
        return [f"the {role} has not reported for {seconds:.0f} s"] if seconds > self._late else []

    def _unheard(self, role: str) -> float:
        """Seconds in which it could have reported: a logger that restarted forgets reports."""
        return min(self._age(role), self._age("logger"))

    def _has_reported(self, role: str, worker: str) -> bool:
        return self._silence(role) < self._age(worker)

    def _silence(self, role: str) -> float:
        return float(self._metrics.get(f"{role}/silence", float("inf")))

    def _age(self, worker: str) -> float:
        """Seconds since a worker was started; unknown ones are elsewhere, and were always there."""
        found = self._workers.get(worker)
        return float("inf") if found is None else self._now - found.started

    def _is_restarting(self, role: str) -> bool:
        return role in self._workers and self._workers[role].state == "restarting"

    def _text(self, key: str) -> str:
        return str(self._metrics.get(key, "")).rstrip(".")


def restarting(workers: Sequence[WorkerRecord]) -> list[str]:
    """Which workers are restarting, a sentence for each error: many may fail with the same."""
    names: dict[str, list[str]] = {}
    for worker in workers:
        if worker.state == "restarting":
            names.setdefault(worker.error, []).append(worker.name)
    return [
        f"{some_of(found)} {'is' if len(found) == 1 else 'are'} restarting"
        f"{f' ({error})' if error else ''}"
        for error, found in names.items()
    ]


def some_of(names: Sequence[str]) -> str:
    """Some names, and how many more there are."""
    text = ", ".join(names[:_NAMED])
    return f"{text} and {len(names) - _NAMED} more" if len(names) > _NAMED else text
