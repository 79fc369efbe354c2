"""Why a run makes no progress, from what its supervisor knows and its workers say."""

from dataclasses import replace
from typing import Any

from dreamfleet.config import RunConfig
from dreamfleet.fleet.record import RunStatus, WorkerStatus
from dreamfleet.fleet.stall import hanging, late_after, waits_for, why_still
from dreamfleet.roles.health import HealthRecord

NOW = 1000.0
LATE = late_after(10.0)


def worker(name: str, state: Any = "running", age: float = 500.0, **more: Any) -> WorkerStatus:
    return replace(WorkerStatus(name, name.split("-")[0], state, 7, "here", NOW - age), **more)


def why(*workers: WorkerStatus, elsewhere: tuple[HealthRecord, ...] = (), **changes: Any) -> str:
    status = RunStatus(1, 0.0, "here", 0.0, workers, written=NOW, steps=600, responding=True)
    config = RunConfig(log_every=10.0, steps=600)
    return why_still(replace(status, **changes), config, 7.0, elsewhere)


def test_a_run_in_which_no_worker_waits_says_so() -> None:
    assert why(worker("agent")) == "no progress for 7 s, and no worker says that it waits"


def test_every_worker_speaks_for_itself() -> None:
    said = [worker("agent", waiting="no observation"), worker("replay", waiting="too few steps")]
    assert why(*said, worker("logger")) == "no observation; too few steps"


def test_a_worker_that_is_restarting_is_named() -> None:
    failed = worker("replay", "restarting", error="OSError: disk full")
    text = why(failed, worker("agent", waiting="no observation"))
    assert text == "replay is restarting (OSError: disk full); no observation"


def test_workers_that_failed_for_the_same_reason_share_a_sentence() -> None:
    failed = [worker(f"env-{n}", "restarting", error="ValueError: pole") for n in range(6)]
    assert why(*failed, worker("env-6", "restarting")) == (
        "env-0, env-1, env-2, env-3 and 2 more are restarting (ValueError: pole); "
        "env-6 is restarting"
    )


def test_a_logger_that_does_not_respond_is_said_and_no_more() -> None:
    text = why(worker("agent", waiting="no observation"), responding=False)
    assert text == "the logger does not respond"


def test_a_run_that_has_made_all_its_steps_is_being_saved() -> None:
    assert why(worker("agent"), step=600) == "the run has made all its steps: it is being saved"
    last = worker("agent", waiting="the learner makes the last 7 updates (train_ratio)")
    assert why(last, step=600) == (
        "the run has made all its steps: the learner makes the last 7 updates (train_ratio)"
    )


def test_roles_that_were_started_by_hand_speak_while_they_report() -> None:
    there = HealthRecord(waiting="too few steps", reported=NOW - LATE + 1)
    assert why(elsewhere=(there,)) == "too few steps"
    assert "too few" not in why(elsewhere=(replace(there, reported=NOW - LATE - 1),))


def test_what_a_worker_waits_for_is_what_it_said_last() -> None:
    said = HealthRecord(waiting="the learner is compiling", reported=NOW - LATE)
    assert waits_for(worker("agent"), said, NOW, LATE) == "the learner is compiling"
    longer = replace(said, reported=NOW - 45.0)
    assert waits_for(worker("agent"), longer, NOW, LATE) == (
        "the learner is compiling (45 s so far)"
    )


def test_a_worker_that_has_stopped_reporting_is_named() -> None:
    fine = HealthRecord(reported=NOW - LATE)
    for name, text in (("replay", "the replay"), ("replay-1", "replay-1"), ("actor-2", "actor-2")):
        assert waits_for(worker(name), fine, NOW, LATE) == ""
        late = replace(fine, reported=NOW - 45.0)
        assert waits_for(worker(name), late, NOW, LATE) == f"{text} has not reported for 45 s"
    assert waits_for(worker("env-0"), late, NOW, LATE) == "", "environments report nothing"
    assert waits_for(worker("replay", "restarting"), late, NOW, LATE) == ""


def test_what_a_predecessor_said_is_not_repeated() -> None:
    old = HealthRecord(waiting="an old text", reported=NOW - 30.0)
    assert waits_for(worker("agent", age=20.0), old, NOW, LATE) == "the agent is starting"
    assert waits_for(worker("agent", age=45.0), replace(old, reported=0.0), NOW, LATE) == (
        "the agent is starting (45 s so far)"
    )
    # The learner says what the actor of its process waits for before it serves.
    assert waits_for(worker("agent", age=20.0), old, NOW, LATE, "actor") == ""


def test_environments_that_take_long_are_named_with_what_follows() -> None:
    noted = [
        HealthRecord(doing="stepping", envid=3, since=NOW - 42),
        HealthRecord(doing="building", envid=9, since=NOW - 11),
        HealthRecord(doing="stepping", envid=4, since=NOW - 9),
        HealthRecord(doing="waiting", envid=5, since=NOW - 99),
    ]
    assert hanging(noted, 300.0, NOW) == (
        "environment 3 is in a step for 42 s, environment 9 is being built for 11 s: after 300 s "
        "(env_timeout) its process is ended and started again"
    )
    assert hanging(noted[:1], 0.0, NOW) == (
        "environment 3 is in a step for 42 s: env_timeout is 0, so its process is not ended"
    )
    assert hanging(noted[2:], 300.0, NOW) == ""
