"""Parts of a fleet raise or hang: the promised outcome, and what the user is told."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from fleet_parts import (
    CountingAgent,
    OnceRaising,
    Paced,
    Raising,
    Troubled,
    Witness,
    broken_replay,
    check_counts,
    check_order,
    left_behind,
    never_let_go_of_the_interpreter,
    parts,
    rows,
    small_run,
    stored_streams,
)

from dreamfleet.fleet.record import read_record
from dreamfleet.fleet.supervisor import FleetError
from dreamfleet.parallel import combined

TARGET = 2.0
"""What every episode of the dummy scores, once the witness lets it: the end of these runs."""


def test_an_environment_that_hangs_is_started_again_and_the_others_go_on(tmp_path: Path) -> None:
    """In C, where no thread of its process gets its turn."""
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
    make = partial(Troubled, tmp_path, never_let_go_of_the_interpreter)
    witness = Witness(tmp_path, ("env-1", None))
    fleet = parts(config, make_agent=CountingAgent, make_env_train=make)
    combined(**fleet, args=config, say=witness)
    assert left_behind() == []
    [restart] = [line for line in witness.lines if "is started again" in line]
    words = "stepping environment 1 hung for 0:00:03.3"
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


def test_an_environment_that_raises_again_and_again_costs_its_own_episodes_only(
    tmp_path: Path,
) -> None:
    """Both share a process, which lives on. With fewer restarts allowed than failures the run still
    ends as it should, because there is progress between them."""
    config = small_run(
        tmp_path, on_failure="restart", max_restarts=1, envs=2, steps=500, envs_per_process=2
    )
    lines: list[str] = []
    make = partial(Raising, after=60, only=1)
    fleet = parts(config, make_agent=CountingAgent, make_env_train=make)
    combined(**fleet, args=config, say=lines.append)
    [line] = [line for line in lines if "failure: " in line]
    assert "environment 1: RuntimeError: the pole is broken" in line
    assert not any("is started again" in line for line in lines)
    assert "Traceback" in (tmp_path / "logs" / "env-0.log").read_text()
    record = read_record(tmp_path)
    assert [worker.restarts for worker in record.workers] == [0] * len(record.workers)
    found = stored_streams(tmp_path / "replay")
    healthy = found[0]["vector"][:, 1] * 26 + found[0]["vector"][:, 2]
    assert healthy.tolist() == list(range(len(healthy)))
    flaky = found[1]
    life = [*range(26), *range(26), *range(8)]  # two episodes, and the beginning of a third
    step = flaky["vector"][:, 2].astype(int).tolist()
    assert step == (life * 9)[: len(step)]
    cut_short = [n % 60 == 59 for n in range(len(step))]
    ended = [number == 25 for number in step]
    assert flaky["is_last"].tolist() == ended, "what was cut short is marked when it is sampled"
    assert flaky["action"].tolist() == [number % 5 for number in step]
    scores = rows(tmp_path / "scores.jsonl")
    assert {row["episode/length"] for row in scores} == {25}
    last = {k: v for row in rows(tmp_path / "metrics.jsonl") for k, v in row.items()}
    assert last["episodes/abandoned"] == sum(cut_short[:-1]) >= 2
    assert last["env/failures"] in (sum(cut_short[:-1]), sum(cut_short)), "the last is not sent"


@pytest.mark.parametrize("methods", [("add_batch", "policy"), ("sample", "train")], ids=str)
def test_a_replay_and_an_agent_that_raise_are_started_again(
    tmp_path: Path, methods: tuple[str, str]
) -> None:
    """Both once. The agent does not notice the replay, and goes on from its checkpoint."""
    config = small_run(
        tmp_path, on_failure="restart", steps=0, target_score=TARGET, log_every=0.2, save_every=0.1
    )
    witness = Witness(tmp_path, ("replay", None), ("agent", None))
    fleet = parts(
        config,
        make_agent=partial(OnceRaising, tmp_path, methods[1]),
        make_env_train=partial(Paced, tmp_path),
        make_replay_train=partial(broken_replay, config, methods[0]),
    )
    combined(**fleet, args=config, say=witness)
    assert sorted(witness.restarts) == ["agent", "replay"]
    said = "\n".join(witness.lines)
    assert "(RuntimeError: the disk is broken)" in said
    assert "RuntimeError: the agent is broken" in said
    found = stored_streams(tmp_path / "replay")
    for stream in found.values():
        check_order(stream, cuts=1)  # only the agent's end cuts one short
    snapshot = check_counts(tmp_path, found)
    assert snapshot.parts["agent"]["updates"] == snapshot.parts["run"]["updates"]


def test_a_run_whose_directory_is_gone_ends_with_a_sentence(tmp_path: Path) -> None:
    """It leaves no half run behind at the old place, and goes on where it is now."""
    logdir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    config = small_run(logdir, on_failure="restart", steps=0, save_every=0.1)

    def on_tick() -> None:
        if elsewhere.exists() or len(list((logdir / "ckpt" / "agent").glob("0*"))) < 2:
            return
        logdir.rename(elsewhere)

    with pytest.raises(FleetError) as error:
        combined(**parts(config), args=config, tick=on_tick)
    assert str(error.value) == (
        f"The run's directory {logdir} was moved or removed while the run was under way, so it has "
        "ended without saving: resume it from where the directory is now."
    )
    assert left_behind() == []
    assert not (logdir / "status.json").exists()
    again = small_run(elsewhere, launcher="serial")
    combined(**parts(again), args=again)
