"""What the servers of a run accept, and which client has which environments."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fleet_parts import small_run

from dreamfleet.config import RunConfig
from dreamfleet.replay import SchemaError
from dreamfleet.roles.checks import (
    ObservationCheck,
    Owners,
    ReplayChecks,
    check_acting,
    check_values,
    observed,
)
from dreamfleet.roles.episodes import EpisodeServer
from dreamfleet.roles.fences import Fence, Fences, fenced, write_fences
from dreamfleet.roles.spaces_file import write_spaces
from dreamfleet.spaces import Space
from dreamfleet.transport import (
    ArgumentError,
    BatchServer,
    Caller,
    Client,
    Disconnected,
    Identity,
    Keys,
    MessageError,
    Occupied,
    RemoteError,
    wire,
)
from dreamfleet.transport.arguments import Parameters
from dreamfleet.transport.batching import Request, signature_of
from dreamfleet.transport.codec import encode, parse_schema

JOINED = 40
"""Beyond the run's own environments."""
SPACES = {
    "image": Space(np.uint8, (4, 4, 3)),
    "vector": Space(np.float32, (3,)),
    "angle": Space(np.float32, (), -1.0, 1.0),
    "choice": Space(np.int32, (), 0, 5),
    "reward": Space(np.float32),
    "is_first": Space(bool),
    "is_last": Space(bool),
    "is_terminal": Space(bool),
}


def observation(ids: Any = (0, 1), *, first: bool = True, **changes: Any) -> dict[str, Any]:
    rows = len(ids)
    obs: dict[str, Any] = {
        "envid": np.array(ids, np.int64),
        "is_eval": np.zeros(rows, bool),
        **{key: np.zeros((rows, *space.shape), space.dtype) for key, space in SPACES.items()},
        "is_first": np.full(rows, first),
        "log/speed": np.ones(rows, np.float32),
    }
    return {key: value for key, value in {**obs, **changes}.items() if value is not None}


@contextmanager
def acting(
    run: RunConfig, keys: Keys | None = None, *, batch: int = 2, wait: float = 0.0, **options: Any
) -> Iterator[tuple[BatchServer, list[Any]]]:
    """A live server of `act`, and the batches that it got."""
    batches: list[Any] = []

    def act(obs: dict[str, Any]) -> tuple[Any, None]:
        batches.append(obs)
        return {"action": obs["envid"]}, None

    server = BatchServer("tcp://127.0.0.1:{auto}", "actor", keys, **options)
    owners = Owners(server.connected)
    check = ObservationCheck(SPACES, run.envs_per_process, owners, check_acting(run))
    server.bind("act", act, batch=batch, wait=wait, roles=("env",), check=check)
    with server:
        yield server, batches


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    return small_run(tmp_path, envs=6, eval_envs=2, envs_per_process=4, bind="127.0.0.1")


ROWS = np.zeros(2)
WRONG: dict[str, Any] = {
    "a number": 5,
    "a list": [1, 2],
    "nothing": {},
    "a missing key": observation(vector=None),
    "no ids": observation(envid=None),
    "an extra key": observation(more=ROWS),
    "another shape": observation(vector=np.zeros((2, 4), np.float32)),
    "another dtype": observation(vector=np.zeros((2, 3), np.float64)),
    "float ids": observation(envid=np.array([0.0, 1.0])),
    "ids of 32 bits": observation(envid=np.array([0, 1], np.int32)),
    "ids with two axes": observation(envid=np.zeros((2, 2), np.int64)),
    "a tuple": observation(vector=(ROWS, ROWS)),
    "negative ids": observation(envid=np.array([-1, 0])),
    "enormous ids": observation(envid=np.array([2**62, 0])),
    "ids of nobody": observation(ids=(0, 8)),
    "ids of who has joined": observation(ids=(JOINED, JOINED + 1)),
    "training that is evaluation": observation(ids=(0, 6)),
    "evaluation that is training": observation(is_eval=np.array([False, True])),
    "failures below zero": observation(failures=np.array([0, -1])),
    "failures beyond counting": observation(failures=np.array([0, 10**12])),
    "the same id twice": observation(envid=np.array([1, 1])),
    "100,000 ids": observation(ids=range(100_000)),
    "one id too many": observation(ids=range(5)),
    "NaN": observation(vector=np.full((2, 3), np.nan, np.float32)),
    "infinity": observation(vector=np.full((2, 3), np.inf, np.float32)),
    "an absurd number": observation(vector=np.full((2, 3), 1e38, np.float32)),
    "far outside of the bounds": observation(angle=np.full(2, 1e9, np.float32)),
    "a reward of minus infinity": observation(reward=np.full(2, -np.inf, np.float32)),
    "a choice that there is not": observation(choice=np.array([0, 5], np.int32)),
    "NaN to log": observation(**{"log/speed": np.full(2, np.nan, np.float32)}),
    "too much to log": observation(**{"log/speed": np.zeros((2, 2**19), np.float32)}),
    "a long name": observation(**{"log/" + 300 * "x": ROWS}),
    "thousands of names": observation(**{f"log/{n}": ROWS for n in range(2000)}),
    "flags as numbers": observation(is_first=np.zeros(2, np.uint8)),
}


@pytest.mark.parametrize("wrong", list(WRONG))
def test_a_wrong_observation_costs_its_sender_an_error_and_nobody_else(
    run: RunConfig, wrong: str
) -> None:
    """It would have been in a batch with a good one."""
    with (
        acting(run, batch=4, wait=60.0) as (server, batches),
        Client(server.address) as good,
        Client(server.address) as bad,
    ):
        before = good.call_block("act", observation((0, 1)))
        obs = WRONG[wrong]
        rows = len(obs["is_first"]) if isinstance(obs, dict) and obs else 0
        with pytest.raises(RemoteError) as refused:
            bad._send_call("act", rows, encode((obs,))).result(60)
        assert refused.value.kind in ("ArgumentError", "MessageError")
        assert not refused.value.traceback
        after = good.call_block("act", observation((2, 3)))
        assert before.result(60)["action"].tolist() == [0, 1]
        assert after.result(60)["action"].tolist() == [2, 3]
        assert [batch["envid"].tolist() for batch in batches] == [[0, 1, 2, 3]]


def test_who_sends_wrong_observations_again_and_again_loses_the_connection(run: RunConfig) -> None:
    with acting(run) as (server, _), Client(server.address) as bad:
        for _ in range(10):
            with pytest.raises(RemoteError):
                bad.call_block("act", observation(more=ROWS)).result(60)
        with pytest.raises(Disconnected):
            bad.call_block("act", observation()).result(60)
        assert bad.call_block("act", observation()).result(60)["action"].tolist() == [0, 1]


def test_what_environments_really_send_is_taken(run: RunConfig) -> None:
    missing = np.full((2, 3), -np.inf, np.float32)  # the mark of a missing value
    with acting(run) as (server, _), Client(server.address) as client:
        for changes in (
            {"vector": missing},
            {"vector": np.full((2, 3), 1e12, np.float32)},
            {"angle": np.full(2, 1.01, np.float32)},
            {"log/speed": None},
            {"log/more": ROWS, "log/count": np.ones(2, np.int64), "log/wide": np.ones((2, 5))},
        ):
            client.call_block("act", observation(**changes)).result(60)


def test_a_bool_is_0_or_1(run: RunConfig) -> None:
    odd = np.array([0, 255], np.uint8).view(bool)
    with acting(run) as (server, batches), Client(server.address) as client:
        with pytest.raises(RemoteError, match="neither 0 nor 1"):
            client.call_block("act", observation(is_eval=odd)).result(60)
        assert batches == []


def test_without_spaces_the_first_observation_says_what_they_are(run: RunConfig) -> None:
    owners = Owners(lambda _: True)
    check = ObservationCheck(None, 4, owners, lambda *_: None)

    class From:
        peer = b"peer"
        caller = Caller("run", "", "here", b"peer")

    origin: Any = From()
    for wrong in ({"envid": np.zeros(2, np.int64)}, observation(vector=(ROWS, ROWS))):
        with pytest.raises(ArgumentError):
            check(origin, request_of(wrong))
    check(origin, request_of(observation()))
    with pytest.raises(ArgumentError, match="lacks 'vector'"):
        check(origin, request_of(observation(vector=None)))


def request_of(obs: dict[str, Any]) -> Request:
    """A block of two observations, as it comes out of a message."""
    value = encode((obs,))
    schema = parse_schema(value.schema)
    signature = signature_of(schema, 2)
    return Request(b"peer", 1, 2, schema, value.blob, value.frames, signature, 0.0)


def test_what_was_fine_before_is_looked_at_again(run: RunConfig) -> None:
    """Keys and shapes are checked once for all requests that are alike; values each time."""
    owners = Owners(lambda _: True)
    check = ObservationCheck(SPACES, 4, owners, check_acting(run))

    class From:
        peer = b"peer"
        caller = Caller("run", "", "here", b"peer")

    origin: Any = From()
    with pytest.raises(ArgumentError):  # the first of its kind, so there is nothing known of it
        check(origin, request_of(WRONG["NaN"]))
    for _ in range(2):
        check(origin, request_of(observation()))
        check(origin, request_of(observation(vector=np.full((2, 3), -np.inf, np.float32))))
        for wrong in WRONG.values():
            if type(wrong) is dict and np.shape(wrong.get("envid")) == (2,):
                with pytest.raises((ArgumentError, MessageError)):
                    check(origin, request_of(wrong))
    assert len(check._plans) == 1


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numbers_are_compared_exactly(dtype: str) -> None:
    for good in ([0.0, -1.0, 1.0], [3.0, -3.0], [-np.inf, 0.0], []):
        check_values("x", np.array(good, dtype), -3.0, 3.0)
    for bad in ([0.0, 3.01], [-3.01], [np.nan], [np.inf, 0.0], [-np.inf, np.nan]):
        with pytest.raises(ArgumentError, match="outside of -3 to 3"):
            check_values("x", np.array(bad, dtype), -3.0, 3.0)
    with pytest.raises(ArgumentError):
        check_values("reward", np.array([-np.inf], dtype), -3.0, 3.0)


# --- owners of environments ----------------------------------------------------------------------


def test_an_environment_belongs_to_one_connection_at_a_time(run: RunConfig) -> None:
    with acting(run) as (server, batches), Client(server.address) as second:
        with Client(server.address) as first:
            first.call_block("act", observation((0, 1))).result(60)
            for _ in range(12):  # it is not a fault, and costs no connection
                with pytest.raises(RemoteError, match=r"Environment 1 belongs to 127\.0\.0\.1"):
                    second.call_block("act", observation((1, 2))).result(60)
            # Nothing of a request that is refused is taken.
            first.call_block("act", observation((2, 3), first=False)).result(60)
            assert second.stats()["connects"] == 1
            first.call_block("act", observation((0, 1), first=False)).result(60)
        # The first one has ended: the second takes over, with a new episode, at once.
        for _ in range(1000):
            with pytest.raises(RemoteError) as refused:
                second.call_block("act", observation((1, 2), first=False)).result(60)
            if "begin a new episode" in str(refused.value):
                break
        else:
            pytest.fail("the end of the first connection is not noticed")
        second.call_block("act", observation((1, 2))).result(60)
        second.call_block("act", observation((1, 2), first=False)).result(60)
        taken = [batch["envid"].tolist() for batch in batches]
        assert taken == [[0, 1], [2, 3], [0, 1], [1, 2], [1, 2]]


def test_a_vanished_machine_is_succeeded_after_the_heartbeats(
    run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is half open: nobody has ended it."""
    monkeypatch.setattr(wire, "HEARTBEAT", 100)
    monkeypatch.setattr(wire, "HEARTBEAT_TIMEOUT", 400)
    with acting(run) as (server, _):
        port = int(server.address.rpartition(":")[2])
        with socket.create_server(("127.0.0.1", 0)) as listener:
            vanished = threading.Event()
            pumps = []

            def pump(source: socket.socket, target: socket.socket) -> None:
                while (data := source.recv(65536)) and not vanished.is_set():
                    target.sendall(data)

            ours = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
            with Client(ours) as first, Client(server.address) as second:
                future = first.call_block("act", observation((0, 1)))
                inside, _ = listener.accept()
                outside = socket.create_connection(("127.0.0.1", port))
                for pair in ((inside, outside), (outside, inside)):
                    pumps.append(threading.Thread(target=pump, args=pair))
                    pumps[-1].start()
                future.result(60)
                vanished.set()
                with pytest.raises(RemoteError, match="belongs to"):
                    second.call_block("act", observation((0, 1))).result(60)
                end = time.monotonic() + 120
                while time.monotonic() < end:
                    with suppress(RemoteError):
                        second.call_block("act", observation((0, 1))).result(60)
                        break
                    time.sleep(0.05)
                else:
                    pytest.fail("the machine that vanished holds its environments")
                for each in (inside, outside):
                    each.shutdown(socket.SHUT_RDWR)
                for thread in pumps:
                    thread.join()
                inside.close()
                outside.close()
                first.close(flush=0)


class Fake:
    """Connections for `Owners`."""

    def __init__(self) -> None:
        self.gone: set[bytes] = set()
        self.owners = Owners(lambda connection: connection not in self.gone)

    def claim(self, who: str, ids: list[int], *, first: bool = True) -> None:
        envids = np.array(ids, np.int64)
        caller = Caller("env", who, "10.0.0.7", who.encode())
        if not self.owners.is_known(caller.connection, envids):
            self.owners.claim(caller, envids, np.full(len(ids), first))


def test_the_next_owner_begins_a_new_episode() -> None:
    fake = Fake()
    fake.claim("ann", [0, 1])
    with pytest.raises(Occupied, match=r"Environment 0 belongs to 'ann' at 10\.0\.0\.7"):
        fake.claim("bob", [0])
    fake.claim("ann", [0, 1], first=False)
    fake.gone.add(b"ann")
    with pytest.raises(Occupied, match="begin a new episode"):
        fake.claim("bob", [0], first=False)
    fake.claim("bob", [0])
    fake.gone.remove(b"ann")
    # Also ann, who had them before, is refused now, and not recognised by what she sent.
    with pytest.raises(Occupied, match="belongs to 'bob'"):
        fake.claim("ann", [0, 1], first=False)
    fake.claim("ann", [1], first=False)


def test_clients_that_are_there_are_counted_and_others_are_forgotten() -> None:
    fake = Fake()
    fake.claim("ann", [0, 1])
    fake.claim("bob", [2])
    assert fake.owners.present() == 3
    assert fake.owners.gone([0, 2]) == []
    fake.gone.add(b"bob")
    assert fake.owners.present() == 2
    assert fake.owners.gone([0, 2, 7]) == [2, 7]
    fake.claim("cat", [2])
    assert fake.owners.present() == 3
    assert set(fake.owners._owners) == {b"ann", b"cat"}


def test_the_invited_have_only_environments_that_they_were_given(run: RunConfig) -> None:
    keys = Keys.generate()
    people = {keys.invite("env"): name for name in ("ann", "bob")}
    who = {key.public: Identity("env", name) for key, name in people.items()}
    ids = {"ann": (JOINED, JOINED + 1), "bob": (JOINED + 2,)}
    run.logdir.mkdir(exist_ok=True)
    given = [Fence(each, False, 5, name) for name, each in ids.items()]
    write_fences(run.logdir, Fences(5, tuple(given)))
    ann, bob = people
    with (
        acting(run, keys, identify=who.get) as (server, _),
        Client(server.address, keys=ann) as guest,
        Client(server.address, keys=bob) as other,
        Client(server.address, keys=keys.for_role("env")) as own,
    ):
        for wrong in (
            fenced((0, 1), 5), fenced((JOINED + 1, JOINED + 2), 5), fenced((JOINED + 3,), 5),
            fenced((JOINED,), 4), fenced((JOINED,), 6), (JOINED,),
        ):  # fmt: skip
            with pytest.raises(
                RemoteError, match="does not belong to the invitation 'ann'"
            ) as refused:
                guest.call_block("act", observation(tuple(wrong))).result(60)
            assert refused.value.kind == "Occupied"  # so it may be tried again
        guest.call_block("act", observation(tuple(fenced(ids["ann"], 5)))).result(60)
        other.call_block("act", observation(tuple(fenced(ids["bob"], 5)))).result(60)
        own.call_block("act", observation((0, 1))).result(60)
        for wrong in ((JOINED,), fenced((0,), 5)):
            with pytest.raises(RemoteError, match="need an invitation"):
                own.call_block("act", observation(tuple(wrong))).result(60)


def test_whether_an_environment_of_a_machine_evaluates_is_what_the_supervisor_has_said(
    run: RunConfig,
) -> None:
    run.logdir.mkdir(exist_ok=True)
    given = Fence((JOINED,), False, 5, "ann"), Fence((JOINED + 1,), True, 6, "ann")
    write_fences(run.logdir, Fences(6, given))
    check = check_acting(run)
    both = np.array([*fenced((JOINED,), 5), *fenced((JOINED + 1,), 6)])
    check(both, np.array([False, True]), "ann")
    with pytest.raises(ArgumentError, match=f"Environment {JOINED + 1} is for evaluation"):
        check(both, np.array([False, False]), "ann")
    with pytest.raises(ArgumentError, match="calls the evaluator"):
        check_acting(replace(run, eval_every=100))(both[1:], np.array([True]), "ann")


def test_a_newer_start_of_an_environment_takes_its_place_and_an_older_one_never_acts_again(
    run: RunConfig,
) -> None:
    """However long the older one was cut off, and although its connection is there."""
    keys = Keys.generate()
    key = keys.invite("env")
    run.logdir.mkdir(exist_ok=True)

    def give(incarnation: int) -> None:
        fence = Fence((JOINED,), False, incarnation, "ann")
        write_fences(run.logdir, Fences(incarnation, (fence,)))

    def act(client: Client, incarnation: int, is_first: bool) -> None:
        first = np.array([is_first])
        ids = tuple(fenced((JOINED,), incarnation))
        client.call_block("act", observation(ids, is_first=first)).result(60)

    who = {key.public: Identity("env", "ann")}
    with (
        acting(run, keys, identify=who.get) as (server, _),
        Client(server.address, keys=key) as old,
        Client(server.address, keys=key) as new,
    ):
        give(5)
        act(old, 5, True)
        act(old, 5, False)
        give(6)
        with pytest.raises(RemoteError, match="begin a new episode"):
            act(new, 6, False)
        act(new, 6, True)
        for first in (False, True):
            with pytest.raises(
                RemoteError, match=r"does not belong to the invitation 'ann'|newer start"
            ):
                act(old, 5, first)
        act(new, 6, False)


def test_the_evaluation_takes_its_own_environments_only() -> None:
    groups = [(4, 5), (6, 7)]
    server = EpisodeServer("ipc://{auto}", groups, max_steps=10, why=lambda _: "")
    with server, Client(server.address) as env, Client(server.address) as second:
        for ids in ((0, 1), (5, 6), (4, 4), (-1,)):
            with pytest.raises(RemoteError) as refused:
                env.call_block("act", observation(ids)).result(60)
            assert refused.value.kind == "ArgumentError"
        env.call_block("act", observation((4, 5)))
        with pytest.raises(RemoteError, match="lacks 'vector'"):
            env.call_block("act", observation((4, 5), vector=None)).result(60)
        env.call_block("act", observation((6, 7), more=ROWS)).wait(60)  # read after the one before
        with pytest.raises(RemoteError, match="Environment 4 belongs to"):
            second.call_block("act", observation((4, 5))).result(60)


# --- the replay ----------------------------------------------------------------------------------


class Service:
    """Stands for the replay, and notes what reaches it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def add_batch(self, *_: Any) -> int:
        self.calls.append("add_batch")
        return 2

    def update(self, _: Any) -> int:
        self.calls.append("update")
        return 2


def checked_replay(
    run: RunConfig, gone: set[bytes] | None = None, spaces: bool = True
) -> tuple[Service, Any]:
    """The replay's methods, as a server calls them."""
    action = {"action": Space(np.float32, (2,), -1.0, 1.0), "reset": Space(bool)}
    run.logdir.mkdir(exist_ok=True)
    if spaces:
        write_spaces(run, SPACES, action)
    service = Service()
    connected = lambda connection: connection not in (gone or ())  # noqa: E731
    checks = ReplayChecks(run, connected, service.add_batch, service.update)
    add = Parameters("add_batch", checks.add_batch, skipped=1)
    change = Parameters("update", checks.update)
    return service, SimpleNamespace(
        add_batch=lambda *args, caller=ACTOR: checks.add_batch(caller, *add.take(args)),
        update=lambda *args: checks.update(*change.take(args)),
    )


def steps(rows: int = 2, **changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        **{key: np.zeros((rows, *space.shape), space.dtype) for key, space in SPACES.items()},
        "action": np.zeros((rows, 2), np.float32),
        "state": np.zeros((rows, 7), np.float16),
    }
    return {**data, **changes}


IDS = np.array([0, 1])
ACTOR = Caller("agent", "", "10.0.0.1", b"actor")
WRONG_BATCHES: dict[str, tuple[Any, ...]] = {
    "numbers": (5, 5, 5, 5, 5),
    "float ids": (steps(), np.array([0.0, 1.0]), False, "actor", 1),
    "ids with two axes": (steps(), np.zeros((1, 2), np.int64), False, "actor", 1),
    "a list of ids": (steps(), [0, 1], False, "actor", 1),
    "no bool": (steps(), IDS, 1, "actor", 1),
    "an array of bools": (steps(), IDS, np.zeros(2, bool), "actor", 1),
    "no source": (steps(), IDS, False, None, 1),
    "a long source": (steps(), IDS, False, "x" * 1000, 1),
    "a negative number": (steps(), IDS, False, "actor", -1),
    "an enormous number": (steps(), IDS, False, "actor", 2**63),
    "a number that is a bool": (steps(), IDS, False, "actor", True),
    "no dict": ([1], IDS, False, "actor", 1),
    "a value that is no array": (steps(state=1.0), IDS, False, "actor", 1),
    "too few rows": (steps(rows=1), IDS, False, "actor", 1),
    "no name": (steps(), IDS, False, "", 1),
}


@pytest.mark.parametrize("wrong", list(WRONG_BATCHES))
def test_a_wrong_batch_does_not_reach_the_replay(run: RunConfig, wrong: str) -> None:
    service, checked = checked_replay(run)
    checked.add_batch(steps(), IDS, False, "actor", 1)
    with pytest.raises(ArgumentError) as refused:
        checked.add_batch(*WRONG_BATCHES[wrong])
    assert "\n" not in str(refused.value)
    assert service.calls == ["add_batch"]


def test_steps_of_another_schema_are_the_fault_of_their_sender(run: RunConfig) -> None:
    def refuse(*_: Any) -> int:
        raise SchemaError("'x' is missing.")

    checks = ReplayChecks(run, lambda _: True, refuse, refuse)
    with pytest.raises(ArgumentError, match="'x' is missing"):
        checks.add_batch(ACTOR, steps(), IDS, False, "actor", 1)
    with pytest.raises(ArgumentError, match="'x' is missing"):
        checks.update({})


def test_an_update_changes_only_what_the_agent_stores(run: RunConfig) -> None:
    service, checked = checked_replay(run)
    stepid = np.zeros((2, 3, 20), np.uint8)
    checked.update({"stepid": stepid, "state": np.zeros((2, 3, 7)), "priority": np.ones((2, 3))})
    for key in (*SPACES, "action", "reset", "is_first"):
        with pytest.raises(ArgumentError, match="cannot be updated"):
            checked.update({"stepid": stepid, key: np.zeros((2, 3))})
    for wrong in (7, None, {"stepid": 5}, {"stepid": stepid, "state": 1}):
        with pytest.raises(ArgumentError):
            checked.update(wrong)
    assert service.calls == ["update"]


def test_without_spaces_an_update_leaves_flags_and_images_alone(run: RunConfig) -> None:
    service, checked = checked_replay(run, spaces=False)
    stepid = np.zeros((2, 3, 20), np.uint8)
    for key, value in (("reward", np.zeros((2, 3))), ("image", np.zeros((2, 3, 4, 4, 3), "u1"))):
        with pytest.raises(ArgumentError, match="cannot be updated"):
            checked.update({"stepid": stepid, key: value})
    assert service.calls == []


def test_spaces_that_another_task_left_are_not_checked_by(run: RunConfig) -> None:
    run.logdir.mkdir(exist_ok=True)
    write_spaces(run, SPACES, {})
    assert observed(None, run) == SPACES
    write_spaces(small_run(run.logdir, task="gym:CartPole-v1"), SPACES, {})
    assert observed(None, run) is None


def test_rows_of_an_environment_come_from_one_actor_at_a_time(run: RunConfig) -> None:
    gone: set[bytes] = set()
    service, checked = checked_replay(run, gone)
    first = {"is_first": np.ones(2, bool)}
    checked.add_batch(steps(), IDS, False, "actor", 1)
    again = ACTOR._replace(connection=b"again")  # the same actor connects again
    checked.add_batch(steps(), IDS, False, "actor", 2, caller=again)
    thief = ACTOR._replace(connection=b"thief")
    for source in ("thief", "other"):
        with pytest.raises(Occupied, match="Environment 1 belongs to"):
            checked.add_batch(steps(**first), np.array([1, 2]), False, source, 1, caller=thief)
    gone.add(b"actor")  # which is not the one that it has now
    with pytest.raises(Occupied, match="belongs to"):
        checked.add_batch(steps(**first), IDS, False, "thief", 1, caller=thief)
    gone.add(b"again")
    with pytest.raises(Occupied, match="begin a new episode"):
        checked.add_batch(steps(), IDS, False, "successor", 1, caller=thief)
    checked.add_batch(steps(**first), IDS, False, "successor", 1, caller=thief)
    # An actor that begins anew with the same connection has another name.
    checked.add_batch(steps(**first), IDS, False, "later", 1, caller=thief)
    assert len(service.calls) == 4
