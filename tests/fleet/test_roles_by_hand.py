"""A run whose environments and replay are started by hand, over tcp and with the run key."""

from __future__ import annotations

import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fleet_parts import (
    dummy_with_its_id,
    fixed_address,
    left_behind,
    parts,
    small_run,
    stored_streams,
)
from launcher_parts import appears

from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.parallel import combined
from dreamfleet.roles.addresses import find_server
from dreamfleet.transport import Client, Disconnected, Keys

ROLE = [str(Path(sys.executable).with_name("dreamfleet")), "role"]


def role(name: str, *options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*ROLE, name, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def tcp_run(logdir: Path) -> RunConfig:
    """A run for which the environments and the replay are started elsewhere."""
    addresses = {f"{name}_addr": fixed_address() for name in ("actor", "replay", "logger")}
    # A policy call waits for all environments, so that none makes all the steps alone.
    batch = {"actor_batch": 3, "actor_wait": 600.0}
    return small_run(logdir, steps=300, remote_envs=True, remote_replay=True, **batch, **addresses)


def test_roles_started_by_hand_on_another_machine_make_a_whole_run(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    config = tcp_run(here)
    hands: list[subprocess.Popen[bytes]] = []
    ready = threading.Event()

    def start_the_others(line: str) -> None:
        """As a person does who has seen the run start, and has copied two files."""
        if ready.is_set():
            return
        ready.set()
        for name in ("config.json", "keys"):
            (there / name).write_bytes((here / name).read_bytes())
        (there / "keys").chmod(0o600)
        stranger = there / "stranger.key"
        Keys.generate().save(stranger)
        options = ["--config", str(there / "config.json"), "--logdir", str(there)]
        mine = [*options, "--keys", str(there / "keys")]
        # Environment 3 has the wrong key, and so no part in the run.
        hands.append(role("env", *options, "--keys", str(stranger), "--first", "3"))
        hands.append(role("env", *mine, "--first", "0", "--count", "3"))
        hands.append(role("replay", *mine))

    try:
        combined(**parts(config), args=config, say=start_the_others)
        assert appears(there / "logs" / "env-3.log")  # nobody else has waited for the stranger
    finally:
        for process in hands:
            process.terminate()
        said = [process.communicate(timeout=100)[0].decode() for process in hands]
    assert [process.returncode for process in hands] == [130, 130, 0], said
    assert stat.S_IMODE((here / "keys").stat().st_mode) == 0o600
    assert left_behind() == []
    assert not (here / "replay").exists()
    found = stored_streams(there / "replay")
    assert len(found) == 3
    assert sum(len(stream["action"]) for stream in found.values()) >= 300


def test_a_stranger_gets_nothing_from_a_run_with_a_key(tmp_path: Path) -> None:
    config = small_run(tmp_path, steps=0, logger_addr="tcp://127.0.0.1:{auto}")
    seen: list[object] = []

    class Enough(Exception):
        pass

    def ask(line: str) -> None:
        if not line.startswith("step "):
            return
        run = RunConfig.from_json((tmp_path / "config.json").read_text())
        # A stranger never gets a connection, however long it waits.
        for keys, patience in ((None, 1.0), (Keys.generate(), 1.0), (Keys.load(run.keys), 60.0)):
            with Client(find_server(run, "logger"), keys=keys, patience=patience) as client:
                try:
                    seen.append(client.status().result(100)["step"] >= 0)
                except Disconnected as error:
                    seen.append(str(error))
        raise Enough

    with pytest.raises(Enough):
        combined(**parts(config, make_env_train=dummy_with_its_id), args=config, say=ask)
    assert "found no server" in str(seen[0])
    assert "found no server" in str(seen[1])
    assert seen[2] is True


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    from dreamfleet.cli.commands import role as command

    with pytest.raises(ConfigError, match="--logdir DIR, or --config FILE"):
        command("env")
    with pytest.raises(ConfigError, match="holds no run: there is no"):
        command("env", logdir=tmp_path)
    (tmp_path / "config.json").write_text('{"envs": "many"}')
    with pytest.raises(
        ConfigError, match=r"not the configuration of a run: envs=many is not valid"
    ):
        command("env", logdir=tmp_path)
    (tmp_path / "config.json").write_text(small_run(tmp_path).to_json())
    with pytest.raises(ConfigError, match="None of the environments asked for"):
        command("env", logdir=tmp_path, first=4)
    for wrong in ({"name": "replay", "shard": 3}, {"name": "actor"}, {"name": "evaluator"}):
        with pytest.raises(ConfigError, match=f"The run has no {wrong['name']}"):
            command(wrong.pop("name"), logdir=tmp_path, **wrong)  # type: ignore[arg-type]
