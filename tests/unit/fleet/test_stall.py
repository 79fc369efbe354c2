"""Nobody waits in silence: the words for it."""

from dreamfleet.fleet.stall import why

FINE = {"actor/silence": 0.1, "learner/silence": 0.1, "replay/silence": 0.1}


def test_a_process_that_does_not_run_is_named_and_what_it_said_before_is_not_repeated() -> None:
    status = {**FINE, "replay/waiting": "an old story", "actor/waiting": "no word from 3"}
    text = why(status, ["replay"], 10.0)
    assert "replay has failed and is about to be started again" in text
    assert "an old story" not in text
    assert "no word from 3" in text


def test_roles_speak_for_themselves_while_they_report() -> None:
    status = {**FINE, "replay/waiting": "the learner waits.", "actor/waiting": ""}
    assert why(status, [], 10.0) == "the learner waits"


def test_a_role_that_has_stopped_reporting_is_said_to_hang() -> None:
    late = {**FINE, "actor/silence": 32.0, "actor/waiting": "an old story"}
    assert (
        why(late, [], 10.0) == "the agent does not act: it starts, restores a checkpoint or hangs"
    )
    assert "the learner does not train" in why({}, [], 10.0)
    assert why({**FINE, "actor/silence": 30.0}, [], 10.0) == "nobody says that it waits"


def test_the_replay_speaks_for_a_learner_that_waits_for_it() -> None:
    status = {**FINE, "learner/silence": 99.0, "replay/waiting": "learner waited 1 s to sample."}
    assert why(status, [], 10.0) == "learner waited 1 s to sample"
