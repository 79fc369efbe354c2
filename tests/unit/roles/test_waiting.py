"""What an actor says that it waits for."""

from dreamfleet.config import RunConfig
from dreamfleet.roles.actor import waits_for

CONFIG = RunConfig(envs=4, actor_batch=3, log_every=10.0, replay_addr="tcp://127.0.0.1:1234")
SEEN = dict.fromkeys(range(4), 0.5)
FREE = {"connected": 1.0, "inflight": 0.0}


def waits(config: RunConfig = CONFIG, idle: object = None, rows: int = 0, **client: float) -> str:
    return waits_for(config, SEEN if idle is None else idle, rows, {**FREE, **client})


def test_nothing_while_every_environment_sends_observations() -> None:
    assert waits() == ""


def test_a_replay_that_holds_the_actor_is_named_before_environments() -> None:
    assert waits(connected=0.0) == "", "a client that has not been used yet has no connection"
    assert waits(idle={}, connected=0.0, inflight=1.0) == (
        "the actor has no connection to the replay at tcp://127.0.0.1:1234"
    )
    anywhere = RunConfig(envs=4)
    assert waits(anywhere, {}, connected=0.0, inflight=1.0) == (
        "the actor has no connection to the replay"
    )
    assert "to take 2 batches" in waits(idle={}, inflight=2.0)


def test_environments_are_named() -> None:
    assert waits(idle={0: 1.0, 1: 1.0, 3: 1.0}) == "no observation from environment 2 yet"
    assert waits(idle={**SEEN, 3: 14.2}) == "no observation from environment 3 for 14 s or more"
    many = RunConfig(envs=20)
    text = waits(many, dict.fromkeys(range(20), 60.0))
    assert (
        text == "no observation from 20 environments (0, 1, 2, 3, 4, 5, 6, 7 ...) for 60 s or more"
    )


def test_observations_in_the_queue_are_not_late() -> None:
    both = {**SEEN, 2: 14.2, 3: 14.2}
    assert waits(idle=both, rows=1) == (
        "no observation from 1 of 2 environments (2, 3) for 14 s or more"
    )
    assert waits(idle={**SEEN, 3: 14.2}, rows=1) == ""


def test_a_batch_that_is_not_full_is_named_if_it_may_wait_for_long() -> None:
    patient = RunConfig(envs=4, actor_batch=3, actor_wait=60.0, log_every=10.0)
    assert waits(patient, rows=2) == (
        "the actor waits for a full batch: it has 2 of 3 observations, and uses a smaller batch "
        "after 60 s"
    )
