"""Why a run makes no progress, from what its supervisor and its roles report."""

from typing import Any

import pytest

from dreamfleet.config import RunConfig
from dreamfleet.fleet.record import FleetRecord, RunStatus, WorkerStatus
from dreamfleet.fleet.stall import hanging, why_still
from dreamfleet.roles.health import HealthRecord

NOW = 1000.0
UNEXPLAINED = "no progress for 0 s, and no worker says that it waits"
FINE = {"actor/silence": 0.1, "learner/silence": 0.1, "replay/silence": 0.1}
LEARNS = {**FINE, "learner/state": "training"}


def worker(name: str, state: Any = "running", age: float = 500.0, error: str = "") -> WorkerStatus:
    return WorkerStatus(name, name.split("-")[0], state, 7, "here", NOW - age, 0, error)


WORKERS = [worker("agent"), worker("env-0"), worker("replay"), worker("logger", age=501.0)]


def why(metrics: dict[str, Any], *changed: WorkerStatus, log_every: float = 10.0) -> str:
    named = {each.name: each for each in changed}
    workers = [named.pop(each.name, each) for each in WORKERS]
    return reason(metrics, [*workers, *named.values()], log_every)


def reason(metrics: dict[str, Any], workers: list[WorkerStatus], log_every: float = 10.0) -> str:
    record = FleetRecord(
        1, 0.0, "here", "local", 0.0, tuple(workers), written=NOW, responding=True, metrics=metrics
    )
    return why_still(RunStatus.of(record, RunConfig(log_every=log_every)))


def test_a_run_in_which_no_worker_waits_says_so() -> None:
    assert why(LEARNS) == UNEXPLAINED


def test_a_worker_that_is_restarting_is_named_and_what_it_reported_before_is_not_repeated() -> None:
    metrics = {**LEARNS, "replay/waiting/actor": "an old text", "actor/waiting": "no observation"}
    text = why(metrics, worker("replay", "restarting", error="OSError: disk full"))
    assert text == "replay is restarting (OSError: disk full); no observation"
    text = why(metrics, worker("agent", "restarting"))
    assert text == "agent is restarting; an old text"


def test_workers_that_failed_for_the_same_reason_share_a_sentence() -> None:
    failed = [worker(f"env-{n}", "restarting", error="ValueError: pole") for n in range(6)]
    assert why(LEARNS, *failed, worker("env-6", "restarting")) == (
        "env-0, env-1, env-2, env-3 and 2 more are restarting (ValueError: pole); "
        "env-6 is restarting"
    )


def test_roles_speak_for_themselves_while_they_report() -> None:
    metrics = {**LEARNS, "replay/waiting/actor": "the actor waited 3 s.", "actor/waiting": ""}
    assert why(metrics) == "the actor waited 3 s"


def test_each_actor_speaks_for_itself() -> None:
    said = {**LEARNS, "actor-1/silence": 0.1, "actor-1/waiting": "no observation from 1."}
    assert why(said, worker("actor-1")) == "no observation from 1"
    assert why({**said, "actor-1/silence": 32.0}, worker("actor-1")) == (
        "actor-1 has not reported for 32 s"
    )
    assert why(LEARNS, worker("actor-1")) == "actor-1 has not reported for 500 s"
    assert why(LEARNS, worker("actor-1", age=3.0)) == UNEXPLAINED, (
        "it is starting, and the others act"
    )
    assert why(said, worker("actor-1", "restarting")) == "actor-1 is restarting"
    # While there is no agent it waits, and that is said of the agent.
    assert why(said, worker("agent", "restarting"), worker("actor-1")) == "agent is restarting"


def test_a_role_that_has_stopped_reporting_is_named() -> None:
    late = {**LEARNS, "actor/silence": 32.0, "actor/waiting": "an old text"}
    assert why(late) == "the actor has not reported for 32 s"
    assert why({**late, "actor/silence": 31.0}) == "an old text"
    assert why({**LEARNS, "learner/silence": 45.0}) == "the learner has made no update for 45 s"
    assert why({**LEARNS, "replay/silence": 45.0}) == "the replay has not reported for 45 s"


def test_the_replay_speaks_for_a_learner_that_waits_for_it() -> None:
    text = "learner waited 1 s to sample."
    metrics = {**LEARNS, "learner/silence": 99.0, "replay/waiting/learner": text}
    assert why(metrics) == "learner waited 1 s to sample"
    metrics["learner/state"] = "waiting for enough data to train on"
    assert why(metrics) == "learner waited 1 s to sample"


def test_what_the_learner_does_before_it_trains_is_said_however_long_it_takes() -> None:
    """The actor waits for it meanwhile, and has not reported yet."""
    for seconds in (1.0, 200.0):
        metrics = {"learner/silence": seconds, "learner/state": "compiling the agent"}
        assert why({**metrics, "replay/silence": 1.0}) == (
            f"the learner is compiling the agent ({seconds:.0f} s so far)"
        )


def test_an_agent_that_has_not_reported_yet_is_starting() -> None:
    young = worker("agent", age=20.0)
    assert why({"replay/silence": 1.0}, young) == "the agent is starting"
    assert why({"replay/silence": 1.0}, worker("agent", age=45.0)) == (
        "the agent is starting and builds its networks (45 s so far; what it does is in "
        "logs/agent.log)"
    )
    assert why({"replay/silence": 1.0}, worker("agent", age=345.0)) == (
        "the agent has not reported for 345 s"
    )


def test_what_an_agent_reported_before_it_was_restarted_is_not_repeated() -> None:
    metrics = {**LEARNS, "actor/silence": 30.0, "learner/silence": 25.0, "actor/waiting": "old"}
    assert why(metrics, worker("agent", age=20.0)) == "the agent is starting"


def test_a_logger_that_restarted_gives_roles_time_to_report_again() -> None:
    assert why({}, worker("logger", age=20.0)) == UNEXPLAINED
    assert why({}, worker("logger", age=40.0)) == (
        "the agent has not reported for 40 s; the replay has not reported for 40 s"
    )


def test_roles_on_other_machines_are_not_in_the_record() -> None:
    assert reason({}, []) == ("the agent has not reported yet; the replay has not reported yet")
    assert reason(LEARNS, []) == UNEXPLAINED


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


@pytest.mark.parametrize("log_every", [0.5, 100.0])
def test_how_long_is_too_long_depends_on_how_often_roles_report(log_every: float) -> None:
    late = {**LEARNS, "replay/silence": 3 * log_every + 1.5}
    assert "the replay has not reported for" in why(late, log_every=log_every)
    assert why({**late, "replay/silence": 3 * log_every}, log_every=log_every) == UNEXPLAINED


def test_each_shard_of_the_replay_speaks_for_itself() -> None:
    said = {**LEARNS, "replay-1/silence": 0.1}
    assert why(said, worker("replay-1")) == UNEXPLAINED
    late = "replay-1 has not reported for 32 s"
    assert why({**said, "replay-1/silence": 32.0}, worker("replay-1")) == late
    # The first one stands for the replay, whoever of them was started last.
    assert why(said, worker("replay-1", age=1.0), worker("replay", age=400.0)) == UNEXPLAINED
