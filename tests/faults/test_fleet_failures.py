"""Parts of a fleet raise or hang: the promised outcome, and a person who is told."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from fleet_parts import (
    CountingAgent,
    OnceRaising,
    Paced,
    Troubled,
    Witness,
    broken_replay,
    complain,
    left_behind,
    never_let_go_of_the_interpreter,
    parts,
    sleep_for_ever,
    small_run,
    stored_streams,
)

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.fleet.supervisor import FleetError
from dreamfleet.parallel import combined

TARGET = 2.0
"""What every episode of the dummy scores, once the witness lets it: the end of these runs."""


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (complain, "RuntimeError: the pole is broken"),
        (sleep_for_ever, "it hung for 0:00:03.3"),
        (never_let_go_of_the_interpreter, "it hung for 0:00:03.3"),
    ],
    ids=["raises", "sleeps", "hangs in C"],
)
def test_an_environment_in_trouble_is_started_again_and_the_others_go_on(
    tmp_path: Path, trouble: Callable[[], None], words: str
) -> None:
    config = small_run(
        tmp_path,
        on_failure="restart",
        steps=0,
        target_score=TARGET,
        log_every=0.2,
        envs=2,
        envs_per_process=1,
        env_timeout=3.0,  # long enough for a healthy one on a slow machine
    )
    make = partial(Troubled, tmp_path, trouble)
    witness = Witness(tmp_path, "env-1")
    fleet = parts(config, make_agent=CountingAgent, make_env_train=make)
    combined(**fleet, args=config, say=witness)
    assert left_behind() == []
    [restart] = [line for line in witness.lines if "is started again" in line]
    assert restart.startswith(f"env-1 ended with code 1 ({words}")
    found = stored_streams(tmp_path / "replay")
    step = found[1]["vector"][:, 2].astype(int)
    # Fifty steps in, then from the start again: nothing of the first life is lost.
    assert step.tolist() == [*list(range(26)), *list(range(24)), *step[50:].tolist()]
    assert step[50] == 0
    assert len(step) > 50
    assert found[1]["action"].tolist() == (step % 5).tolist()
    other = found[0]["vector"][:, 1] * 26 + found[0]["vector"][:, 2]
    assert other.tolist() == list(range(len(other)))


@pytest.mark.parametrize("method", ["add_batch", "sample"])
def test_a_replay_that_raises_is_started_again_and_the_agent_does_not_notice(
    tmp_path: Path, method: str
) -> None:
    config = small_run(tmp_path, on_failure="restart", steps=0, target_score=TARGET, log_every=0.2)
    witness = Witness(tmp_path, "replay")
    fleet = parts(
        config,
        make_agent=CountingAgent,
        make_env_train=partial(Paced, tmp_path),
        make_replay_train=partial(broken_replay, config, method),
    )
    combined(**fleet, args=config, say=witness)
    assert witness.restarts == ["replay"]
    assert any("(RuntimeError: the disk is broken)" in line for line in witness.lines)
    for stream in stored_streams(tmp_path / "replay").values():
        step = stream["vector"][:, 1] * 26 + stream["vector"][:, 2]
        assert step.tolist() == list(range(len(step)))


def test_a_replay_that_raises_ends_the_run_if_that_is_wished(tmp_path: Path) -> None:
    config = small_run(tmp_path, on_failure="stop", steps=0)
    make = partial(broken_replay, config, "add_batch")
    fleet = parts(config, make_agent=CountingAgent, make_replay_train=make)
    with pytest.raises(FleetError, match="the disk is broken") as error:
        combined(**fleet, args=config)
    assert str(error.value).startswith("replay ended with code 1")
    assert "Traceback" in str(error.value)
    assert left_behind() == []


@pytest.mark.parametrize("method", ["policy", "train"])
def test_an_agent_that_raises_goes_on_from_its_checkpoint(tmp_path: Path, method: str) -> None:
    config = small_run(
        tmp_path, on_failure="restart", steps=0, target_score=TARGET, log_every=0.2, save_every=0.1
    )
    witness = Witness(tmp_path, "agent")
    fleet = parts(
        config,
        make_agent=partial(OnceRaising, tmp_path, method),
        make_env_train=partial(Paced, tmp_path),
    )
    combined(**fleet, args=config, say=witness)
    assert witness.restarts == ["agent"]
    assert any("RuntimeError: the agent is broken" in line for line in witness.lines)
    found = stored_streams(tmp_path / "replay")
    for stream in found.values():
        step = stream["vector"][:, 2].astype(int)
        assert stream["is_first"].tolist() == (step == 0).tolist()
        assert stream["action"].tolist() == (step % 5).tolist()
    snapshot = Checkpoint(tmp_path / "ckpt" / "agent").load()
    assert snapshot is not None
    assert snapshot.step == sum(len(stream["action"]) for stream in found.values())
    assert snapshot.parts["agent"]["updates"] == snapshot.parts["run"]["updates"]
