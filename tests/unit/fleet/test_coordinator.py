"""Leases of environment ids, and what the coordinator answers to whom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fleet_parts import small_run

from dreamfleet import __version__
from dreamfleet.config import JOINED, JOINED_EVAL, RunConfig
from dreamfleet.fleet.coordinator import (
    HOLD_SECONDS,
    LEASE_SECONDS,
    Asked,
    Coordinator,
    Leases,
    MachineReport,
    Refused,
    addresses,
    metrics,
)
from dreamfleet.roles.machines import read_machines, write_machines
from dreamfleet.transport import Caller, Keys

CALLER = Caller("env", "first", "127.0.0.1", b"1")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def asks(envs: int, eval_envs: int = 0, host: str = "box") -> Asked:
    return Asked(__version__, host, envs, eval_envs, 4)


def test_ids_are_handed_out_given_back_and_used_again() -> None:
    leases = Leases()
    first, one = leases.join(asks(2), CALLER)
    _, two = leases.join(asks(3, 1), CALLER)
    assert one.machine.envs == (JOINED, JOINED + 1)
    assert two.machine.envs == (JOINED + 2, JOINED + 3, JOINED + 4)
    assert two.machine.eval_envs == (JOINED_EVAL,)
    assert [each.name for each in leases.machines()] == ["box", "box (2)"]
    assert leases.leave(first) is one
    assert leases.leave(first) is None
    _, three = leases.join(asks(3), CALLER)
    assert three.machine.envs == (JOINED, JOINED + 1, JOINED + 5)
    assert three.generation != one.generation  # so its environments get other seeds


def test_a_machine_that_was_cut_off_keeps_its_ids_and_one_that_vanished_loses_them() -> None:
    clock = Clock()
    leases = Leases(clock=clock)
    cut, _ = leases.join(asks(1, host="cut"), CALLER)
    gone, _ = leases.join(asks(1, host="gone"), CALLER)
    clock.now += LEASE_SECONDS - 1
    assert [each.state for each in leases.machines()] == ["away", "away"]
    found = leases.beat(cut, MachineReport())
    assert found is not None
    assert found.machine.envs == (JOINED,)
    clock.now += 2
    assert [(m.name, m.state) for m in leases.machines()] == [("cut", "joined"), ("gone", "left")]
    assert leases.beat(gone, MachineReport()) is None
    _, new = leases.join(asks(1), CALLER)
    assert new.machine.envs == (JOINED + 1,)
    # A machine ends its own environments before others may get their ids.
    assert HOLD_SECONDS < LEASE_SECONDS - 10


def test_steps_a_second_are_those_of_the_last_while() -> None:
    clock = Clock()
    leases = Leases(clock=clock)
    token, _ = leases.join(asks(1), CALLER)
    for second in range(60):
        clock.now = 100.0 + second
        lease = leases.beat(token, MachineReport(steps=10 * second if second < 30 else 40 * second))
    assert lease is not None
    assert lease.machine.steps_per_second == pytest.approx(40.0)
    assert metrics(leases.machines())["machines/steps_per_second"] == pytest.approx(40.0)
    assert metrics(leases.machines())["machines/environments"] == 1
    leases.beat(token, MachineReport(steps=3))  # its processes were started again
    assert lease.machine.steps_per_second == 0


def test_ids_survive_a_resume_of_the_run(tmp_path: Path) -> None:
    before = Leases()
    token, lease = before.join(asks(2), CALLER)
    left, _ = before.join(asks(1), CALLER)
    before.leave(left)
    write_machines(tmp_path, before.machines())
    assert token not in (tmp_path / "machines.json").read_text()
    after = Leases()
    after.restore(read_machines(tmp_path))
    found = after.beat(token, MachineReport())
    assert found is not None
    assert found.machine.envs == lease.machine.envs
    assert after.join(asks(1), CALLER)[1].machine.envs == (JOINED + 2,)
    assert after.beat(left, MachineReport()) is None
    # Environments that get the same ids after it play other episodes.
    assert Leases().join(asks(2), CALLER)[1].generation != lease.generation


def test_the_revoked_lose_their_ids() -> None:
    leases = Leases()
    token, _ = leases.join(asks(2), CALLER)
    other, _ = leases.join(asks(2), CALLER._replace(name="laptop"))
    leases.revoke({"first"})
    assert leases.beat(token, MachineReport()) is None
    assert leases.beat(other, MachineReport()) is not None
    assert "revoked" in leases.machines()[-1].error


def test_there_is_room_for_so_many_only() -> None:
    leases = Leases(most_train=3, most_eval=1)
    leases.join(asks(2), CALLER)
    with pytest.raises(Refused, match="2 have joined, and there is room for 3"):
        leases.join(asks(2), CALLER)
    leases.join(asks(1, 1), CALLER)
    with pytest.raises(Refused, match="evaluation"):
        leases.join(asks(0, 1), CALLER)


def bound(logdir: Path, **changes: Any) -> RunConfig:
    logdir.mkdir(exist_ok=True)
    Keys.generate().save(logdir / "keys")
    settings = {"bind": "127.0.0.1", "actor_addr": "tcp://127.0.0.1:5551", **changes}
    return small_run(logdir, keys=str(logdir / "keys"), **settings)


def coordinator(logdir: Path, **changes: Any) -> Coordinator:
    return Coordinator(bound(logdir, **changes), "tcp://127.0.0.1:{auto}")


def request(**changes: Any) -> dict[str, Any]:
    asked = {"version": __version__, "host": "box", "envs": 1, "eval_envs": 0}
    return {**asked, "envs_per_process": 2, **changes}


def test_a_machine_is_told_what_the_run_is_and_nothing_private(tmp_path: Path) -> None:
    told = coordinator(tmp_path / "secret-place", envs=3).describe(__version__)
    config = RunConfig.from_json(told["config"])
    assert (config.task, config.env_options) == ("bundled:dummy", {"length": 25, "size": (8, 8)})
    assert "secret-place" not in json.dumps(told)
    assert told["addresses"] == {"actor": "tcp://*:5551"}


def test_settings_that_environments_do_not_read_stay_here(tmp_path: Path) -> None:
    private: dict[str, Any] = {
        "ray_runtime_env": {"env_vars": {"TOKEN": "secret"}},
        "ray_address": "ray://secret:10001",
        "outputs": ("secret.module:Output",),
    }
    told = coordinator(tmp_path, **private).describe(__version__)
    assert "secret" not in json.dumps(told)
    # A run that is resumed with another end is the same to a machine.
    longer = coordinator(tmp_path, steps=12_345, duration=5.0).describe(__version__)
    assert longer["digest"] == told["digest"]
    assert coordinator(tmp_path, env_timeout=7.0).describe(__version__)["digest"] != told["digest"]


def test_a_run_with_more_actors_than_environments_can_be_described(tmp_path: Path) -> None:
    told = coordinator(tmp_path, envs=1, actors=3).describe(__version__)
    assert RunConfig.from_json(told["config"]).actors == 3
    assert list(told["addresses"]) == ["actor", "actor-1", "actor-2"]


def test_another_version_is_refused_with_both_named(tmp_path: Path) -> None:
    server = coordinator(tmp_path)
    words = f"has Dreamfleet {__version__} and this machine 0.0.1: install {__version__}"
    with pytest.raises(Refused, match=words):
        server.describe("0.0.1")
    with pytest.raises(Refused, match=words):
        server.join(CALLER, request(version="0.0.1"))


BAD: list[tuple[str, tuple[Any, ...]]] = [
    ("describe", (5,)),
    ("describe", ("x" * 10_000,)),
    ("join", (CALLER, None)),
    ("join", (CALLER, [1, 2])),
    ("join", (CALLER, request(envs=-1))),
    ("join", (CALLER, request(envs=1.5))),
    ("join", (CALLER, request(envs=10**12))),
    ("join", (CALLER, request(envs=0))),
    ("join", (CALLER, request(host=""))),
    ("join", (CALLER, request(envs_per_process=0))),
    ("join", (CALLER, request(envs_per_process=3))),
    ("join", (CALLER, request(more=1))),
    ("beat", (5, {})),
    ("beat", ("token", {"steps": -1})),
    ("beat", ("token", {"steps": "many"})),
    ("beat", ("token", {"error": "x" * 10_000})),
    ("beat", ("token", {"other": 1})),
    ("leave", (None, "")),
    ("leave", ("token", 5)),
    ("leave", ("token", "", "yes")),
]


@pytest.mark.parametrize(("method", "arguments"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_what_is_wrong_costs_the_sender_an_error(
    tmp_path: Path, method: str, arguments: tuple[Any, ...]
) -> None:
    server = coordinator(tmp_path)
    with pytest.raises(Refused):
        getattr(server, method)(*arguments)
    assert server.join(CALLER, request())["envs"] == [JOINED]


def test_machines_hear_that_the_run_is_over(tmp_path: Path) -> None:
    server = coordinator(tmp_path)
    token = server.join(CALLER, request())["token"]
    assert server.beat(token, {})["over"] == ""
    assert server.beat("somebody else", {})["known"] is False
    server._over = "The run is over."
    assert server.beat(token, {})["over"] == "The run is over."
    assert not server._present()
    with pytest.raises(Refused, match="over"):
        server.join(CALLER, request())


def test_a_failure_elsewhere_ends_a_run_that_stops_at_failures(tmp_path: Path) -> None:
    told: list[str] = []
    nan = {"on_failure": "restart", "on_nan": "stop"}
    ways = (({"on_failure": "restart"}, True), (nan, True), (nan, False), ({}, False))
    for number, (settings, not_finite) in enumerate(ways):
        run = bound(tmp_path / str(number), **settings)
        server = Coordinator(run, "tcp://127.0.0.1:{auto}", told.append)
        why = f"pole {number} is broken"
        server.leave(server.join(CALLER, request())["token"], why, not_finite)
        server.leave(server.join(CALLER, request())["token"], "")
        token = server.join(CALLER, request())["token"]
        server._over = "The run is over."
        server.leave(token, "too late to matter", not_finite)
    # Those of `small_run` end at failures unless they are told otherwise.
    assert told == [f"The joined machine box failed: pole {n} is broken" for n in (1, 3)]


def test_addresses_are_those_that_machines_can_reach(tmp_path: Path) -> None:
    # By the host that reached the coordinator, unless the actor is elsewhere.
    run = bound(tmp_path, actor_addr="tcp://0.0.0.0:5551", eval_every=10)
    assert addresses(run, "0.0.0.0") == {"actor": "tcp://*:5551"}  # the evaluator's is a file
    run = bound(tmp_path, actor_addr="tcp://10.0.0.9:5551")
    assert addresses(run, "0.0.0.0") == {"actor": "tcp://10.0.0.9:5551"}
    assert addresses(run, "10.0.0.9") == {"actor": "tcp://*:5551"}
