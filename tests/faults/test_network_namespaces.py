"""A fleet on four machines whose network fails in every way that networks do, and a machine that
joins through a firewall.

The machines are network namespaces with a directory that they share. The environments tell where
each observation comes from, and the stored steps are audited afterwards.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos.audit import audit
from chaos.env import TASK
from fleet_parts import rows
from network_parts import Machine, Network, machines

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.roles.health import read_health

__all__ = ["machines"]

LONG = 240.0
LINK_DOWN = float(os.environ.get("DREAMFLEET_LINK_DOWN", "0"))
"""Seconds without a link at least; it is as long as it takes until its loss is noticed."""
LOST = "The agent is lost"


class Fleet:
    """The commands that a person types on four machines, and what comes of them."""

    def __init__(self, logdir: Path) -> None:
        self.logdir = logdir
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, machine: Machine, *words: str) -> None:
        command = [sys.executable, "-m", "dreamfleet.cli", *words, "--logdir", str(self.logdir)]
        with (self.logdir / f"{name}.out").open("ab") as out:
            self.running[name] = machine.start(command, stdout=out, stderr=subprocess.STDOUT)

    def end(self, name: str, how: signal.Signals) -> int:
        process = self.running.pop(name)
        process.send_signal(how)
        return process.wait(LONG)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LONG
        while not condition():
            for name, process in self.running.items():
                code = process.poll()
                assert code is None, (
                    f"{name} has ended: {(self.logdir / f'{name}.out').read_text()}"
                )
            assert time.monotonic() < deadline, f"this never came: {what}"
            time.sleep(0.05)

    def until_all_play(self, what: str) -> None:
        """Wait until each environment process has finished more episodes, and their steps were
        stored and logged."""
        played = {name: self.episodes(name) + 2 for name in ("env-0", "env-2")}
        step = self.step + 100
        for name, wanted in played.items():
            self.until(lambda n=name, w=wanted: self.episodes(n) >= w, f"{name} plays {what}")
        self.until(lambda: self.step >= step, f"steps {what}")

    def episodes(self, worker: str) -> int:
        return read_health(self.logdir / "workers" / worker).progress

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return rows(self.logdir / "metrics.jsonl")

    @property
    def step(self) -> int:
        return max((row["step"] for row in self.metrics), default=0)

    def log(self, worker: str) -> str:
        return (self.logdir / "logs" / f"{worker}.log").read_text()


def test_a_fleet_on_four_machines_survives_its_network(
    tmp_path: Path, machines: tuple[Network, list[Machine]]
) -> None:
    network, (agent, replay, envs_a, envs_b) = machines
    fleet = Fleet(tmp_path)
    for machine in (agent, replay, envs_a):
        network.throttle(machine, "10mbit")
    here, store = (f"tcp://{network.addresses[machine]}:{{auto}}" for machine in (agent, replay))
    settings = {
        "task": TASK, "env-options": "seconds=0.005", "agent": "random", "steps": "0",
        "envs": "4", "envs-per-process": "2", "env-lanes": "2", "batch-size": "2",
        "batch-length": "4", "report-length": "4", "train-ratio": "0.1", "eval-episodes": "0",
        "log-every": "0.5", "save-every": "2", "outputs": "jsonl",
        "actor-addr": here, "logger-addr": here, "replay-addr": store,
    }  # fmt: skip
    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    try:
        fleet.start("train", agent, "train", *flags, "--remote-envs", "--remote-replay")
        fleet.until((tmp_path / "config.json").exists, "the configuration")
        fleet.until((tmp_path / "keys").exists, "the key")
        fleet.start("replay", replay, "role", "replay", "--trust")
        fleet.start("envs-a", envs_a, "role", "env", "--trust", "--first", "0", "--count", "2")
        fleet.start("envs-b", envs_b, "role", "env", "--trust", "--first", "2", "--count", "2")
        fleet.until_all_play("over links of 10 Mbit/s")

        # One machine loses its link; another one, and the replay's, get another address.
        pulled = time.monotonic()
        network.link(envs_a, "down")
        network.change_address(envs_b)
        fleet.end("replay", signal.SIGKILL)
        moved = network.change_address(replay)
        fleet.start(
            "replay",
            replay,
            "role",
            "replay",
            "--trust",
            "--replay-addr",
            f"tcp://{moved}:{{auto}}",
        )
        fleet.until(lambda: LOST in fleet.log("env-0"), "the loss of the link was noticed")
        fleet.until(lambda: LOST in fleet.log("env-2"), "the change of the address was noticed")
        time.sleep(max(0.0, LINK_DOWN - (time.monotonic() - pulled)))
        network.link(envs_a, "up")
        fleet.until_all_play("after a link was down and addresses have changed")

        # What the replay sends to the agent is lost, and what the agent sends arrives.
        count = len(fleet.metrics)
        with network.one_way(to=agent, dropped=replay):
            connected = "actor/replay_client/connected"
            fleet.until(
                lambda: any(row.get(connected) == 0.0 for row in fleet.metrics[count:]),
                "the half-open connection was noticed",
            )
        fleet.until_all_play("after a connection was half open")

        assert fleet.end("train", signal.SIGINT) == 130, (tmp_path / "train.out").read_text()
        for name in list(fleet.running):
            fleet.end(name, signal.SIGTERM)
    finally:
        for process in fleet.running.values():
            process.kill()
            process.wait()
    found = audit([tmp_path / "replay"])
    assert found.faults == {}
    assert found.environments == found.lives == 4, "no environment was built again"
    assert 1 <= found.cut_short <= 12
    snapshot = Checkpoint(tmp_path / "ckpt" / "agent").load()
    assert snapshot.step == snapshot.parts["replay"]["steps"] == found.rows
    assert "is started again" not in (tmp_path / "train.out").read_text()


def test_a_machine_joins_only_if_it_reaches_every_port_and_survives_a_cut_link(
    tmp_path: Path, machines: tuple[Network, list[Machine]]
) -> None:
    network, (agent, _, envs, _) = machines
    fleet, here = Fleet(tmp_path), network.addresses[agent]
    settings = {
        "task": "bundled:dummy", "agent": "random", "steps": "0", "eval-episodes": "0",
        "log-every": "0.5", "outputs": "jsonl", "bind": f"{here}:5550",
    }  # fmt: skip
    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    ports = "5550, 5551"
    join = [sys.executable, "-m", "dreamfleet.cli", "join", str(tmp_path)]

    def joined(out: Path) -> subprocess.Popen[bytes]:
        with out.open("wb") as file:
            return envs.start(join, stdout=file, stderr=subprocess.STDOUT)

    try:
        fleet.start("train", agent, "train", *flags, "--remote-envs")
        said = tmp_path / "train.out"
        fleet.until(lambda: f"to open on {here}: {ports}\n" in said.read_text(), "its ports")
        fleet.until(lambda: fleet.metrics != [], "metrics of the agent")
        with network.dropped_port(agent, 5551):
            refused = joined(tmp_path / "refused")
            assert refused.wait(LONG) == 1
        text = (tmp_path / "refused").read_text()
        assert f"TCP port 5551 of {here} (actor) cannot be reached" in text
        assert f"Ports to open for this machine: {ports} of {here}." in text
        assert "Joined" not in text
        fleet.running["join"] = joined(tmp_path / "join.out")
        fleet.until(lambda: fleet.step > 100, "steps of the machine that has joined")
        # A machine whose link was cut goes on by itself.
        text = tmp_path / "join.out"
        network.link(envs, "down")
        fleet.until(lambda: "The run does not answer" in text.read_text(), "the loss of the link")
        time.sleep(LINK_DOWN)
        network.link(envs, "up")
        fleet.until(lambda: "The run answers again" in text.read_text(), "the link")
        step = fleet.step
        fleet.until(lambda: fleet.step >= step + 100, "steps after the link was cut")
        assert fleet.end("train", signal.SIGINT) == 130, said.read_text()
        assert fleet.running.pop("join").wait(LONG) == 0
    finally:
        for process in fleet.running.values():
            process.kill()
            process.wait()
