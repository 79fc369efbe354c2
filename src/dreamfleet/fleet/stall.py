"""Why a run makes no progress: which role waits for which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf

from dreamfleet.fleet.record import MachineStatus, RunStatus, WorkerStatus
from dreamfleet.roles.health import HealthRecord

_MISSED_REPORTS = 3
_NAMED_WORKERS = 4
_BUILDING_SECONDS = 300.0  # of an agent that has just started
_HANGING_SECONDS = 10.0
_DOING = {
    "building": "is being built",
    "resetting": "is in a reset",
    "stepping": "is in a step",
    "closing": "is being closed",
}


def late_after(log_every: float) -> float:
    """Seconds after which a role that reports every `log_every` seconds is late."""
    return 1 + _MISSED_REPORTS * log_every


def why_still(status: RunStatus, still_for: float = 0.0, logger: str | None = None) -> str:
    """Why the run stands still, without a period.

    Args:
        status: As it was found just now.
        still_for: Seconds without progress.
        logger: Why the logger does not respond, if it does not.
    """
    reasons = restarting(status.workers)
    if logger is not None:
        return "; ".join([*reasons, logger])
    if status.complete:
        state = _text(status, "learner/state")
        if state.startswith("making"):
            return f"the run has made all its steps, and the learner is {state}"
        return "the run has made all its steps and is being saved"
    config, present = status.config, any(each.state != "left" for each in status.machines)
    if config.bind and config.remote_envs and not present:
        return (
            f"no machine has joined: 'dreamfleet invite {config.logdir}' shows what to type there"
        )
    reasons += filter(None, _Reports(status).problems())
    return "; ".join(reasons) or (
        f"no progress for {still_for:.0f} s, and no worker says that it waits"
    )


def hanging(records: Iterable[HealthRecord], env_timeout: float, now: float) -> str:
    """Environments that take long right now, since when, and what follows; empty if none does."""
    follows = (
        f"after {env_timeout:g} s (env_timeout) its process is ended and started again"
        if env_timeout
        else "env_timeout is 0, so its process is not ended"
    )
    slow = [
        f"environment {each.envid} {_DOING[each.doing]} for {now - each.since:.0f} s"
        for each in records
        if each.doing != "waiting" and now - each.since > _HANGING_SECONDS
    ]
    return f"{some_of(slow)}: {follows}" if slow else ""


def idle_machines(machines: Iterable[MachineStatus]) -> list[str]:
    """Joined machines that report why they make no steps."""
    return [
        f"{each.name} makes no steps: {each.error.rstrip('.')}"
        for each in machines
        if each.error and each.state == "joined" and not each.steps_per_second
    ]


def restarting(workers: Iterable[WorkerStatus]) -> list[str]:
    """Which workers are restarting; those with the same error share a sentence."""
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
    text, more = ", ".join(names[:_NAMED_WORKERS]), len(names) - _NAMED_WORKERS
    return f"{text} and {more} more" if more > 0 else text


def _text(status: RunStatus, key: str) -> str:
    return str(status.metrics.get(key, "")).rstrip(".")


class _Reports:
    """What roles have reported: `ROLE/silence` is the time since a role last reported,
    `actor/waiting` and `replay/waiting/...` say what a role waits for, `learner/state` what the
    learner does."""

    def __init__(self, status: RunStatus) -> None:
        self._status, self._now = status, status.written
        self._late = late_after(status.config.log_every)
        self._first = {each.role: each for each in reversed(status.workers)}  # of each role

    def problems(self) -> Iterator[str]:
        """What keeps the run from going on, as its roles say; some are empty."""
        if not self._is_restarting("agent"):
            yield from self._agent()
            for each in self._status.workers:
                if each.role == "actor" and each.state != "restarting" and self._acts("actor"):
                    yield self._late_worker(each) or _text(self._status, f"{each.name}/waiting")
        if not self._is_restarting("replay"):
            yield from self._replay()

    def _agent(self) -> Iterator[str]:
        """The actor and the learner of the agent's process."""
        acts, learns = self._acts("actor"), self._acts("learner")
        if not acts and not learns:
            yield self._not_reported("agent")
            return
        if acts:  # it waits for a learner that prepares, and does not report meanwhile
            yield self._silent("actor") or _text(self._status, "actor/waiting")
        state, silence = _text(self._status, "learner/state"), self._silence("learner")
        if text := _text(self._status, "replay/waiting/learner"):  # the replay knows more about it
            yield text
        elif learns and state not in ("", "training"):
            so_far = f" ({silence:.0f} s so far)" if state.startswith("compiling") else ""
            yield f"the learner is {state}{so_far}"
        elif learns and silence > self._late:
            yield f"the learner has made no update for {silence:.0f} s"

    def _replay(self) -> Iterator[str]:
        if self._silence("replay") >= self._age("replay"):
            # It reports only after a while. Meanwhile others know more.
            yield self._not_reported("replay") if self._unheard("replay") > self._late else ""
        elif text := self._silent("replay"):
            yield text
        else:
            for each in self._status.workers:
                if each.role == "replay" and each.name != "replay" and each.state == "running":
                    yield self._late_worker(each)
            yield _text(self._status, "replay/waiting/actor")

    def _silence(self, name: str) -> float:
        return float(self._status.metrics.get(f"{name}/silence", inf))

    def _age(self, role: str) -> float:
        """Seconds since a role was started; a role that runs elsewhere was always there."""
        return self._now - self._first[role].started if role in self._first else inf

    def _unheard(self, role: str, since: float | None = None) -> float:
        """Seconds in which a role could have reported: a restarted logger forgets reports."""
        return min(self._age(role) if since is None else self._now - since, self._age("logger"))

    def _acts(self, part: str) -> bool:
        """Whether a part of the agent has reported since it was started."""
        return self._silence(part) < self._age("agent")

    def _is_restarting(self, role: str) -> bool:
        return role in self._first and self._first[role].state == "restarting"

    def _late_worker(self, worker: WorkerStatus) -> str:
        """One of several workers of a role, if it is late."""
        silence = min(self._silence(worker.name), self._unheard(worker.role, worker.started))
        return f"{worker.name} has not reported for {silence:.0f} s" if silence > self._late else ""

    def _silent(self, role: str) -> str:
        silence = self._silence(role)
        return f"the {role} has not reported for {silence:.0f} s" if silence > self._late else ""

    def _not_reported(self, role: str) -> str:
        """A role that has not reported since its worker was started."""
        seconds, age = self._unheard(role), self._age(role)
        if seconds == inf:
            return f"the {role} has not reported yet"
        if seconds <= self._late:
            return f"the {role} is starting" if seconds >= age else ""
        if role == "agent" and age < _BUILDING_SECONDS:
            return (
                f"the agent is starting and builds its networks ({seconds:.0f} s so far; what it "
                "does is in logs/agent.log)"
            )
        return f"the {role} has not reported for {seconds:.0f} s"
