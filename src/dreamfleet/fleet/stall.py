"""Why a run makes no progress: what its workers say that they wait for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dreamfleet.config import RunConfig
from dreamfleet.fleet.record import MachineStatus, RunStatus, WorkerStatus
from dreamfleet.roles.health import HealthRecord

_MISSED_REPORTS = 3
_NAMED_WORKERS = 4
_HANGING_SECONDS = 10.0
_DOING = {
    "building": "is being built",
    "resetting": "is in a reset",
    "stepping": "is in a step",
    "closing": "is being closed",
}
_REPORTING = ("agent", "actor", "replay", "logger")


def late_after(log_every: float) -> float:
    """Seconds after which a worker that reports every `log_every` seconds is late."""
    return 1 + _MISSED_REPORTS * log_every


def waits_for(
    worker: WorkerStatus, health: HealthRecord, now: float, late: float, name: str = ""
) -> str:
    """What a running worker waits for, by its health record, or by that of its thread `name`; empty
    if it does not wait. It should have reported again after `late` seconds."""
    if worker.role not in _REPORTING or worker.state != "running":
        return ""
    name = name or worker.name
    text = name if name[-1].isdigit() else f"the {name}"
    age = now - max(health.reported, worker.started)
    so_far = f" ({age:.0f} s so far)" if age > late else ""
    if health.reported <= worker.started:  # what is there is of its predecessor
        return "" if name != worker.name else f"{text} is starting{so_far}"
    if health.waiting:
        return f"{health.waiting}{so_far}"
    return f"{text} has not reported for {age:.0f} s" if so_far else ""


def why_still(
    status: RunStatus,
    config: RunConfig,
    still_for: float = 0.0,
    elsewhere: Iterable[HealthRecord] = (),
) -> str:
    """Why the run stands still, for so many seconds, without a period. `elsewhere` are the health
    records of roles that were started by hand."""
    reasons = restarting(status.workers)
    if not status.responding:
        return "; ".join([*reasons, "the logger does not respond"])
    waiting = {each.name: each.waiting for each in status.workers if each.waiting}
    if status.complete:
        learner = waiting.get("agent", "it is being saved")
        return f"the run has made all its steps: {learner}"
    present = any(each.state != "left" for each in status.machines)
    if config.bind and config.remote_envs and not present:
        return (
            f"no machine has joined: 'dreamfleet invite {config.logdir}' shows what to type there"
        )
    late = status.written - late_after(config.log_every)
    reasons += [*waiting.values(), *(each.waiting for each in elsewhere if each.reported > late)]
    return "; ".join(filter(None, reasons)) or (
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
