"""The run key, and mistakes in the command that starts a role by hand."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from fleet_parts import Paced, parts, small_run

from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.parallel import combined
from dreamfleet.roles.addresses import find_server
from dreamfleet.transport import Client, Disconnected, Keys


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
        combined(**parts(config, make_env_train=partial(Paced, tmp_path)), args=config, say=ask)
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
    with pytest.raises(ConfigError, match="The run has no such environments"):
        command("env", logdir=tmp_path, first=4)
    for wrong in ({"name": "replay", "shard": 3}, {"name": "actor"}, {"name": "evaluator"}):
        with pytest.raises(ConfigError, match=f"The run has no {wrong['name']}"):
            command(wrong.pop("name"), logdir=tmp_path, **wrong)  # type: ignore[arg-type]
