"""Why a run makes no progress: which role waits for which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dreamfleet.config import RunConfig
from dreamfleet.fleet.record import MachineStatus, WorkerStatus
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


@dataclass(frozen=True)
class Evidence:
    """What is known of a run that stands still."""

    config: RunConfig
    metrics: Mapping[str, Any]
    """What the logger knows: `ROLE/silence` is the time since a role last reported, `actor/waiting`
    and `replay/waiting/...` say what a role waits for, `learner/state` what the learner does."""
    workers: Sequence[WorkerStatus]
    machines: Sequence[MachineStatus]
    now: float
    """Unix time on the supervisor's machine."""
    still_for: float = 0.0
    """Seconds without progress."""
    complete: bool = False
    """Whether the run has made all its steps."""
    logger: str | None = None
    """Why the logger does not respond, if it does not."""

    @property
    def late(self) -> float:
        return late_after(self.config.log_every)

    def text(self, key: str) -> str:
        return str(self.metrics.get(key, "")).rstrip(".")

    def silence(self, role: str) -> float:
        return float(self.metrics.get(f"{role}/silence", float("inf")))

    def worker(self, role: str) -> WorkerStatus | None:
        """The first worker of a role."""
        return next((each for each in self.workers if each.role == role), None)

    def age(self, role: str) -> float:
        """Seconds since a role was started; a role that runs elsewhere was always there."""
        found = self.worker(role)
        return float("inf") if found is None else self.now - found.started

    def unheard(self, role: str, since: float | None = None) -> float:
        """Seconds in which a role could have reported: a restarted logger forgets reports."""
        return min(self.age(role) if since is None else self.now - since, self.age("logger"))

    def is_restarting(self, role: str) -> bool:
        found = self.worker(role)
        return found is not None and found.state == "restarting"


def why_still(seen: Evidence) -> str:
    """Why the run stands still, without a period."""
    state = seen.text("learner/state")
    if seen.logger is not None:
        reasons = restarting(seen.workers)
        return "; ".join([*reasons, *([seen.logger] if seen.logger else [])])
    if seen.complete:
        if state.startswith("making"):
            return f"the run has made all its steps, and the learner is {state}"
        return "the run has made all its steps and is being saved"
    present = any(each.state != "left" for each in seen.machines)
    if seen.config.bind and seen.config.remote_envs and not present:
        return (
            f"no machine has joined: 'dreamfleet invite {seen.config.logdir}' shows what to type "
            "there"
        )
    reasons = restarting(seen.workers)
    if not seen.is_restarting("agent"):
        reasons += _agent(seen, state)
        reasons += [_actor(seen, each) for each in seen.workers if each.role == "actor"]
    if not seen.is_restarting("replay"):
        reasons += _replay(seen)
    return "; ".join(filter(None, reasons)) or (
        f"no progress for {seen.still_for:.0f} s, and no worker says that it waits"
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


def _agent(seen: Evidence, state: str) -> list[str]:
    """The actor and the learner of the agent's process."""
    acts, learns = (seen.silence(role) < seen.age("agent") for role in ("actor", "learner"))
    if not acts and not learns:
        return _not_reported(seen, "agent")
    reasons = []
    # The actor waits for a learner that prepares, and does not report meanwhile.
    if acts:
        late = seen.silence("actor") > seen.late
        reasons.append(_silent("the actor", seen) if late else seen.text("actor/waiting"))
    silence = seen.silence("learner")
    if text := seen.text("replay/waiting/learner"):  # the replay knows more about it
        reasons.append(text)
    elif learns and state not in ("", "training"):
        so_far = f" ({silence:.0f} s so far)" if state.startswith("compiling") else ""
        reasons.append(f"the learner is {state}{so_far}")
    elif learns and silence > seen.late:
        reasons.append(f"the learner has made no update for {silence:.0f} s")
    return reasons


def _actor(seen: Evidence, worker: WorkerStatus) -> str:
    """An actor in a process of its own, which waits for the agent before it acts."""
    agent_acts = seen.silence("actor") < seen.age("agent")
    if worker.state == "restarting" or not agent_acts:
        return ""
    return _late(seen, worker) or seen.text(f"{worker.name}/waiting")


def _replay(seen: Evidence) -> list[str]:
    if seen.silence("replay") >= seen.age("replay"):
        # It reports only after a while. Meanwhile others know more.
        return _not_reported(seen, "replay") if seen.unheard("replay") > seen.late else []
    if seen.silence("replay") > seen.late:
        return [_silent("the replay", seen)]
    shards = [each for each in seen.workers if each.role == "replay" and each.name != "replay"]
    late = [_late(seen, each) for each in shards if each.state == "running"]
    return [*late, seen.text("replay/waiting/actor")]


def _late(seen: Evidence, worker: WorkerStatus) -> str:
    """One of several workers of a role, if it is late."""
    silence = min(seen.silence(worker.name), seen.unheard(worker.role, worker.started))
    return f"{worker.name} has not reported for {silence:.0f} s" if silence > seen.late else ""


def _silent(role: str, seen: Evidence) -> str:
    return f"{role} has not reported for {seen.silence(role.removeprefix('the ')):.0f} s"


def _not_reported(seen: Evidence, role: str) -> list[str]:
    """A role that has not reported since its worker was started."""
    seconds, age = seen.unheard(role), seen.age(role)
    if seconds == float("inf"):
        return [f"the {role} has not reported yet"]
    if seconds <= seen.late:
        return [f"the {role} is starting"] if seconds >= age else []
    if role == "agent" and age < _BUILDING_SECONDS:
        return [
            f"the agent is starting and builds its networks ({seconds:.0f} s so far; what it does "
            "is in logs/agent.log)"
        ]
    return [f"the {role} has not reported for {seconds:.0f} s"]
