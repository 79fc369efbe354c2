"""A fleet that is attacked by clients with keys goes on as if nothing had happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_parts import (
    EVERY_STEP,
    dummy_with_its_id,
    left_behind,
    parts,
    run_until,
    small_run,
    stored_streams,
)

from dreamfleet.config import RunConfig
from dreamfleet.envs import make_env
from dreamfleet.roles.addresses import published_address
from dreamfleet.roles.invitations import read_place
from dreamfleet.roles.spaces_file import write_spaces
from dreamfleet.transport import Client, Disconnected, Keys, RemoteError
from dreamfleet.transport.codec import encode

ROLES = ("env", "agent", "replay", "logger", "evaluator", "watcher")
MAY: dict[str, dict[str, set[str]]] = {
    "actor": {"act": {"env"}},
    "replay": {
        **{
            name: {"agent"}
            for name in (
                *("add_batch", "update", "position", "raise_position", "finish", "grant"),
                *("sample_train", "sample_report", "sample_eval", "shares", "permit"),
            )
        },
        **{name: {"replay"} for name in ("stats", "opened", "inserted")},
        "finished": {"logger"},
    },
    "logger": {
        "tran": {"agent"},
        "gone": {"agent"},
        "add": {"agent", "replay", "evaluator"},
        "status": {"agent"},
    },
    "nodes": {name: {"env"} for name in ("poll", "leave")},
}
"""Whose keys open what, of every method of every server."""


def test_a_fleet_survives_whatever_clients_with_keys_send(tmp_path: Path) -> None:
    keys = Keys.generate()
    keys.save(tmp_path / "key")
    tcp = "tcp://127.0.0.1:{auto}"
    config = small_run(
        tmp_path,
        steps=0,
        keys=str(tmp_path / "key"),
        bind="127.0.0.1",
        replay_addr=tcp,
        logger_addr=tcp,
    )
    env = make_env("bundled:dummy", **EVERY_STEP)
    write_spaces(config, env.obs_space, env.act_space)
    attack = Attack(config, keys)
    run_until(config, parts(config, make_env_train=dummy_with_its_id), attack.step)
    assert left_behind() == []
    found = stored_streams(tmp_path / "replay")
    assert sorted(found) == [0, 1, 2, 3]
    for stream in found.values():
        for value in stream.values():
            assert np.isfinite(value).all()
        # No other steps stand between those of an environment.
        count, inside = stream["count"], ~stream["is_first"][1:]
        assert (count[1:][inside] == count[:-1][inside] + 1).all()


class Attack:
    """Waits until the fleet trains, attacks it, and sees it go on."""

    def __init__(self, config: RunConfig, keys: Keys) -> None:
        self._config, self._keys = config, keys
        self._friends: dict[str, Client] = {}
        self._after = 0
        self._failed = False

    def step(self) -> bool:
        """Whether all was seen; called again and again while the fleet runs."""
        if self._failed:  # the fleet ends, and still says so
            return False
        self._failed = True
        seen = self._step()
        self._failed = False
        return seen

    def _step(self) -> bool:
        if not self._friends:
            if not all(self._address(name) for name in MAY):
                return False
            self._friends = {name: self._client(name, self._keys) for name in MAY}
        step = self._friends["logger"].status().result(120)["step"]
        if step < 50:
            return False
        if not self._after:
            for name, client in self._friends.items():
                client.connect(120)
                self.keys_open_what_their_role_needs(name)
            self.wrong_calls_are_refused()
            self.a_second_process_is_refused()
            self._after = step + 100
            return False
        if step < self._after:
            return False
        for name, client in self._friends.items():
            assert client.stats()["connects"] == 1, name  # it is still the same server
            client.close()
        assert step < 10**9
        return True

    def _address(self, name: str) -> str:
        logdir = self._config.logdir
        if name == "nodes":
            place = read_place(logdir)
            return f"tcp://127.0.0.1:{place.port}" if place else ""
        if name == "actor":
            place = read_place(logdir)
            ports = place.ports if place else {}
            found = published_address(logdir, "actor")
            return found or (f"tcp://127.0.0.1:{ports['actor']}" if "actor" in ports else "")
        return published_address(logdir, "replay" if name == "replay" else "logger")

    def _client(self, name: str, keys: Any) -> Client:
        return Client(self._address(name), f"attacker of {name}", keys=keys)

    def keys_open_what_their_role_needs(self, name: str) -> None:
        assert methods_of(self._friends[name]) == set(MAY[name]), "every method is looked at"
        for role in ROLES:
            key = self._keys.for_role(role)
            if not any(role in roles for roles in MAY[name].values()):
                with self._client(name, key) as client:
                    assert "refused the key" in why_not_connected(client)
                continue
            for method, roles in MAY[name].items():
                with self._client(name, key) as client:  # ten mistakes would cost a connection
                    kind = kind_of_error(client, method, ("nonsense", "more", "yet more"))
                assert (kind == "SecurityError") == (role not in roles), (name, role, method, kind)
        with self._client(name, Keys.generate()) as stranger:
            assert "handshake failed" in why_not_connected(stranger)

    def wrong_calls_are_refused(self) -> None:
        ids, no = np.array([0, 1]), np.zeros(2, bool)
        good = self._observation([0, 1])
        deadly: list[tuple[str, str, tuple[Any, ...], int]] = [
            ("replay", "add_batch", (5, 5, 5, 5, 5), 0),
            ("replay", "sample_train", (-7,), 0),
            ("replay", "update", ({"stepid": np.zeros((1, 20), "u1"), "count": ids[:1]},), 0),
            ("replay", "raise_position", (-1,), 0),
            ("replay", "finish", ("many",), 0),
            ("replay", "grant", (-1,), 0),
            ("replay", "add_batch", ({}, ids, True, "me", 1), 0),
            ("replay", "add_batch", ({"x": np.full(2, np.nan)}, ids, False, "me", 1), 0),
            ("replay", "add_batch", ({"x": np.ones(2)}, -ids, False, "me", 1), 0),
            ("logger", "add", ("late", {}), 0),
            ("logger", "add", (1, {"eval/step": 1.0, "eval/score": "high"}), 0),
            ("logger", "tran", (10**12, ids, False, {}, {}), 0),
            ("logger", "tran", (1, ids, no, {}, {}), 0),
            ("logger", "tran", (1, 2, 3, 4, 5), 0),
            ("logger", "gone", (ids.astype(float),), 0),
            ("replay", "finished", ({"train": ("me", -1), "eval": 5},), 0),
            ("replay", "finished", ({"train": ("me", 1)},), 0),
            ("actor", "act", (5,), 0),
            ("actor", "act", ({},), 2),
            ("actor", "act", ({k: v for k, v in good.items() if k != "is_first"},), 2),
            ("actor", "act", ({**good, "more": ids},), 2),
            ("actor", "act", ({**good, "envid": ids.astype(float)},), 2),
            ("actor", "act", ({**good, "envid": np.zeros((2, 2), np.int64)},), 2),
            ("actor", "act", ({**good, "reward": np.zeros((2, 2), np.float32)},), 2),
            ("actor", "act", ({**good, "reward": (ids, ids)},), 2),
            ("actor", "act", ({**good, "reward": np.full(2, np.nan, np.float32)},), 2),
            ("actor", "act", ({**good, "reward": np.full(2, 1e38, np.float32)},), 2),
            ("actor", "act", ({**good, "envid": -1 - ids},), 2),
            ("actor", "act", ({**good, "is_eval": ~no},), 2),
            ("actor", "act", (self._observation(range(100_000)),), 100_000),
            ("nodes", "poll", (7, 7, 7), 0),
        ]
        for name, method, args, rows in deadly:
            with self._client(name, self._keys) as client, pytest.raises(RemoteError) as refused:
                client._send_call(method, rows, encode(args)).result(120)
            assert refused.value.kind in ("ArgumentError", "MessageError", "Refused"), method
            assert "\n" not in str(refused.value) or name == "nodes", method

    def a_second_process_is_refused(self) -> None:
        """To act in an environment, and to store its steps."""
        space = make_env("bundled:dummy", **EVERY_STEP)
        row = {
            key: np.zeros((1, *each.shape), each.dtype)
            for key, each in {**space.obs_space, **space.act_space}.items()
            if not key.startswith("log/")
        }
        row |= {"is_first": np.ones(1, bool)}
        with self._client("replay", self._keys.for_role("agent")) as client:
            with pytest.raises(RemoteError, match="Environment 0 belongs to") as seen:
                client.add_batch(row, np.zeros(1, np.int64), False, "me", 1).result(120)
            assert seen.value.kind == "Occupied"
        with self._client("actor", self._keys.for_role("env")) as client:
            with pytest.raises(RemoteError, match=r"Environment 0 belongs to 127\.0\.0\.1") as seen:
                client.call_block("act", self._observation([0, 1])).result(120)
            assert seen.value.kind == "Occupied"

    def _observation(self, ids: Any) -> dict[str, Any]:
        space = make_env("bundled:dummy", **EVERY_STEP).obs_space
        rows = len(ids)
        obs = {key: np.zeros((rows, *each.shape), each.dtype) for key, each in space.items()}
        flags = {"is_eval": np.zeros(rows, bool), "is_first": np.ones(rows, bool)}
        return {**obs, **flags, "envid": np.array(ids, np.int64)}


def methods_of(client: Client) -> set[str]:
    """What a server offers, which it tells the holder of the run key."""
    with pytest.raises(RemoteError, match="its methods are") as told:
        client.call("nothing").result(120)
    return set(str(told.value).rpartition("its methods are ")[2].rstrip(".").split(", "))


def kind_of_error(client: Client, method: str, args: tuple[Any, ...]) -> str:
    with pytest.raises(RemoteError) as refused:
        client.call(method, *args).result(120)
    return refused.value.kind


def why_not_connected(client: Client, seconds: float = 120.0) -> str:
    """Why there is no connection, as soon as that is known."""
    end = time.monotonic() + seconds
    told: Callable[[str], bool] = lambda text: "key" in text  # noqa: E731
    while True:
        with pytest.raises(Disconnected) as failed:
            client.connect(0.1)
        if told(str(failed.value)) or time.monotonic() > end:
            return str(failed.value)
