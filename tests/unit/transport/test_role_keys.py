"""A role's key opens what the role may call, and nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.transport import (
    BatchServer,
    Caller,
    Client,
    Disconnected,
    Identity,
    Keys,
    RemoteError,
    RoleKey,
    SecurityError,
    Server,
    load_key,
    wire,
)
from dreamfleet.transport.connection import Connection, Event, Lost, Message, Welcome
from dreamfleet.transport.remote import RemoteOrigin
from dreamfleet.transport.wire import Waker

KEYS = Keys.generate()


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def serving(**options: Any) -> Iterator[Server]:
    server = Server("tcp://127.0.0.1:{auto}", "shop", keys=KEYS, **options)
    server.bind("open", lambda: "to all", roles=("env", "agent"), repeatable=True)
    server.bind("agents", lambda: "to agents", roles=("agent",), repeatable=True)
    server.bind("own", lambda: "to the run", repeatable=True)
    server.bind("who", str, roles=("env", "agent"), pass_caller=True)
    with server:
        yield server


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [KEYS, KEYS.for_role("env")], ids=["run", "role"])
def test_a_key_is_read_back_as_it_was_written(tmp_path: Path, key: Keys | RoleKey) -> None:
    path = tmp_path / "key"
    key.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_key(path) == key
    assert key.secret.hex() not in repr(key)
    assert repr(key.secret) not in repr(key)
    Keys.generate().save(path)
    assert load_key(path) != key
    assert list(tmp_path.iterdir()) == [path]
    path.chmod(0o640)
    with pytest.raises(SecurityError, match="chmod 600"):
        load_key(path)


def test_a_role_key_tells_nothing_about_other_keys() -> None:
    keys = [KEYS.for_role("env"), KEYS.for_role("agent"), KEYS.invite("env"), KEYS.invite("env")]
    assert RoleKey.from_text(keys[0].text) == keys[0] == KEYS.for_role("env")
    allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_."
    assert set(keys[0].text) <= set(allowed)
    assert len({key.secret for key in keys}) == len({key.public for key in keys}) == 4
    assert len({key.server for key in keys}) == 1
    assert all(KEYS.secret not in (key.secret, key.server) for key in keys)


NO_KEYS = ["", "abc", "zz" * 32, "00" * 31, "env", "env.", "env.abc", "Env.x", "a b.c"]


@pytest.mark.parametrize("text", [*NO_KEYS, f"/.{'A' * 86}", f"env.{'é' * 86}"])
def test_what_is_not_a_key_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SecurityError):
        RoleKey.from_text(text)
    with pytest.raises(SecurityError, match="Cannot read"):
        load_key(tmp_path / "key")
    (tmp_path / "key").write_text(text)
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(SecurityError):
        load_key(tmp_path / "key")


def test_a_run_reads_whichever_key_its_file_holds(tmp_path: Path) -> None:
    run = RunConfig(task="bundled:dummy", keys=str(tmp_path / "key"))
    KEYS.for_role("env").save(tmp_path / "key")
    assert run.run_keys == KEYS.for_role("env")
    with pytest.raises(ConfigError, match=r"'env'.*needs the run key"):
        _ = run.server_keys
    KEYS.save(tmp_path / "run")
    run = RunConfig(task="bundled:dummy", keys=str(tmp_path / "run"))
    assert run.run_keys == KEYS == run.server_keys
    assert RunConfig(task="bundled:dummy").server_keys is None


# --- what they open ------------------------------------------------------------------------------


def test_each_key_opens_what_its_role_may_call() -> None:
    answers = {"open": "to all", "agents": "to agents", "own": "to the run"}
    allowed = {"env": {"open"}, "agent": {"open", "agents"}}
    with serving() as server:
        for role, methods in allowed.items():
            with Client(server.address, keys=KEYS.for_role(role)) as client:
                for method, answer in answers.items():
                    if method in methods:
                        assert client.call(method).result(60) == answer
                        continue
                    with pytest.raises(RemoteError) as refused:
                        client.call(method).result(60)
                    text = str(refused.value)
                    assert f"the role {role!r}" in text
                    assert f"{method!r}" in text
                    assert not refused.value.traceback
        with Client(server.address, keys=KEYS) as client:
            assert {name: client.call(name).result(60) for name in answers} == answers


def test_a_role_does_not_learn_what_it_may_not_call() -> None:
    """Neither which other methods there are, nor from the greeting."""
    with serving() as server, Client(server.address, keys=KEYS.for_role("env")) as client:
        texts = []
        for method in ("agents", "missing"):
            with pytest.raises(RemoteError) as refused:
                client.call(method).result(60)
            texts.append(str(refused.value).replace(method, "METHOD"))
        assert texts[0] == texts[1]
        assert "own" not in texts[0]
        assert client._welcome
        assert client._welcome.repeatable == {"open"}


def test_a_key_of_a_role_that_may_call_nothing_does_not_even_connect() -> None:
    with serving() as server:
        stranger = RoleKey("env", KEYS.for_role("env").server, Keys.generate().secret)
        for key in (KEYS.for_role("replay"), KEYS.invite("env"), stranger):
            with (
                Client(server.address, keys=key) as client,
                pytest.raises(Disconnected, match="the server refused the key"),
            ):
                client.connect(0.5)
        assert server.stats()["requests"] == 0


def test_a_batch_server_refuses_a_role_before_its_call_joins_a_batch() -> None:
    batches = []

    def work(value: Any) -> Any:
        batches.append(value.tolist())
        return value, None

    server = BatchServer("tcp://127.0.0.1:{auto}", keys=KEYS)
    server.bind("act", work, batch=2, wait=60.0, roles=("env",))
    server.bind("own", work, batch=2, wait=60.0)
    with (
        server,
        Client(server.address, keys=KEYS.for_role("env")) as env,
        Client(server.address, keys=KEYS) as run,
    ):
        waiting = run.call_block("own", np.array([1]))
        until(lambda: server.stats()["own/waiting"] == 1)
        with pytest.raises(RemoteError, match="'env' may not call 'own'"):
            env.call_block("own", np.array([2])).result(60)
        second = run.call_block("own", np.array([3]))
        assert (waiting.result(60), second.result(60)) == (1, 3)
        assert batches == [[1, 3]]


def test_without_keys_every_client_may_call_everything(tmp_path: Path) -> None:
    server = Server(f"ipc://{tmp_path}/s")
    server.bind("own", lambda: 1)
    with server, Client(server.address) as client:
        assert client.own().result(60) == 1


# --- invitations ---------------------------------------------------------------------------------


def test_an_invitation_opens_its_role_until_it_is_revoked() -> None:
    guests = {name: KEYS.invite("env") for name in ("ann", "bob")}
    public = {key.public: Identity("env", name) for name, key in guests.items()}
    revoked: set[str] = set()
    with (
        serving(identify=public.get, revoked=lambda: revoked) as server,
        Client(server.address, keys=guests["ann"], patience=0.5) as ann,
        Client(server.address, keys=guests["ann"], patience=0.5) as idle,
        Client(server.address, keys=guests["bob"]) as bob,
    ):
        assert ann.call("open").result(60) == idle.call("open").result(60) == "to all"
        assert bob.who().result(60) == "'bob' at 127.0.0.1"
        with pytest.raises(RemoteError, match="'env' may not call 'agents'"):
            ann.call("agents").result(60)
        revoked.add("ann")
        until(lambda: server._listener.ended == 2)  # though no client sends anything
        for client in (ann, idle):
            with pytest.raises(Disconnected):
                client.call("open").result(60)
        for _ in range(20):
            assert bob.call("open").result(60) == "to all"
        assert bob.stats()["connects"] == 1
        with (
            Client(server.address, keys=guests["ann"]) as again,
            pytest.raises(Disconnected, match="the server refused the key"),
        ):
            again.connect(1.0)


def test_a_late_message_does_not_take_the_descriptor_of_another_peer() -> None:
    guests = [Identity("env", "ann"), Identity("env", "bob")]
    with serving() as server, server._lock:
        listener: Any = server._listener
        ann, bob = (
            RemoteOrigin(Mock(bytes=who.name.encode(), get=lambda _: 7), who) for who in guests
        )
        listener._authenticator.identities = {"7": guests[0]}  # what the frames say
        listener._named[7] = bob
        assert listener._origin(ann._frame).identity.name == "ann"
        assert listener._named == {7: bob}
        listener.connected = lambda peer: peer == b"ann"
        listener._origin(ann._frame)
        assert listener._named[7].peer == b"ann"


def test_an_identity_that_makes_no_sense_is_refused() -> None:
    key = KEYS.invite("env")
    answers: list[Any] = [
        Identity("run", "ann"),
        Identity("env", "a/b"),
        Identity("", "ann"),
        Identity("replay", "ann"),
        "env",
        None,
    ]

    def identify(_public: bytes) -> Any:
        if not answers:
            raise OSError("the directory is gone")
        return answers[0]

    with serving(identify=identify) as server:
        while True:
            with Client(server.address, keys=key) as client, pytest.raises(Disconnected):
                client.connect(0.3)
            if not answers:
                break
            answers.pop(0)
        with Client(server.address, keys=KEYS) as friend:
            assert friend.own().result(60) == "to the run"


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_who_sends_wrong_messages_again_and_again_loses_the_connection(
    tmp_path: Path, kind: str
) -> None:
    address = "tcp://127.0.0.1:{auto}" if kind == "tcp" else f"ipc://{tmp_path}/s"
    server = Server(address, "shop")
    server.bind("own", lambda: 1)
    waker = Waker()
    with server, Client(server.address) as friend:
        assert friend.own().result(60) == 1
        bad = Connection(server.address, None, waker)

        def next_event() -> Event:
            while (event := bad.next()) is None:
                bad.sleep(60.0)
            return event

        assert isinstance(next_event(), Welcome)
        for _ in range(10):
            bad.send([b"nonsense"])
            answer = next_event()
            assert isinstance(answer, Message)
            assert answer.header.kind == wire.ERROR
        bad.greet()
        while isinstance(event := next_event(), Message):  # a server asks whether it is still there
            assert event.header.kind == wire.STALE
        assert isinstance(event, Lost)
        bad.close(0)
        assert friend.own().result(60) == 1
        assert friend.stats()["connects"] == 1
    waker.close()


def test_who_may_not_call_a_method_loses_the_connection_by_trying() -> None:
    with serving() as server, Client(server.address, keys=KEYS.for_role("env")) as client:
        for _ in range(10):
            with pytest.raises(RemoteError, match="may not call 'own'"):
                client.own().result(60)
        with pytest.raises(Disconnected):
            client.own().result(60)  # not repeatable for this role, so it is not sent again
        assert client.call("open").result(60) == "to all"
        assert client.stats()["connects"] == 2


def test_a_caller_is_named_by_its_machine_or_its_process(tmp_path: Path) -> None:
    server = Server(f"ipc://{tmp_path}/s")
    server.bind("who", lambda caller: str(caller), pass_caller=True)
    with server, Client(server.address) as client:
        assert client.who().result(60) == f"process {os.getpid()}"
    assert str(Caller("env", "ann", "10.0.0.7", b"")) == "'ann' at 10.0.0.7"
