"""Network namespaces as machines: each has a name and an address of its own, and a cable to one
switch. Nothing of this machine's own network is touched, and all of it is gone with the test."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

TOOLS = ("unshare", "nsenter", "ip", "tc", "sh", "cat")


class Machine:
    """A namespace. It lives as long as a process that waits for the end of its input, so a test
    that is killed leaves none behind."""

    def __init__(self, name: str) -> None:
        self.name, self._said = name, ""
        script = f"echo {name} > /proc/sys/kernel/hostname && echo ready && exec cat"
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        if self._holder.stdout.readline() != b"ready\n":
            self.close()
            raise PermissionError(self._said.strip())

    @property
    def pid(self) -> int:
        return self._holder.pid

    def command(self, *words: str) -> list[str]:
        """A command line that runs in this machine, in a process of its own."""
        return ["nsenter", f"--target={self.pid}", "--net", "--uts", "--", *words]

    def run(self, line: str) -> str:
        done = subprocess.run(
            self.command("sh", "-c", line), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}: {done.stderr}"
        return done.stdout

    def start(self, words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self.command(*words), **options)

    def close(self) -> None:
        _, said = self._holder.communicate()
        self._said = said.decode()


class Network:
    """Machines with the addresses 10.77.0.1 and up, joined by a bridge."""

    def __init__(self, *machines: Machine, switch: Machine) -> None:
        self._switch, self._machines = switch, machines
        self.addresses: dict[Machine, str] = {}
        switch.run("ip link add bridge0 type bridge && ip link set bridge0 up")
        for number, machine in enumerate(machines, 1):
            cable = f"ip link add cable{number} type veth peer name eth0 netns {machine.pid}"
            switch.run(f"{cable} && ip link set cable{number} master bridge0 up")
            machine.run("ip link set lo up && ip link set eth0 up")
            self.addresses[machine] = f"10.77.0.{number}"
            machine.run(f"ip address add {self.addresses[machine]}/24 dev eth0")

    def link(self, machine: Machine, state: str) -> None:
        """Pull the cable of a machine out (`down`), or put it in again (`up`)."""
        self._switch.run(f"ip link set cable{self._machines.index(machine) + 1} {state}")

    def change_address(self, machine: Machine) -> str:
        """Give a machine another address, and take its own away; returns the new one."""
        old = self.addresses[machine]
        self.addresses[machine] = new = f"10.77.0.10{old[-1]}"
        machine.run(f"ip address del {old}/24 dev eth0 && ip address add {new}/24 dev eth0")
        return new

    def throttle(self, machine: Machine, rate: str) -> None:
        """Limit what a machine sends, such as to 10mbit."""
        machine.run(f"tc qdisc add dev eth0 root tbf rate {rate} burst 32kbit latency 400ms")

    @contextmanager
    def one_way(self, to: Machine, dropped: Machine) -> Iterator[None]:
        """Drop what one machine sends to another, and nothing of what goes the other way."""
        source = self.addresses[dropped]
        if shutil.which("nft"):
            chain = "'{ type filter hook input priority 0; }'"
            to.run(f"nft add table inet half && nft add chain inet half input {chain}")
            to.run(f"nft add rule inet half input ip saddr {source} drop")
            yield
            to.run("nft delete table inet half")
        else:  # what is sent to a card that no machine has is lost as well
            entry = f"{self.addresses[to]} dev eth0"
            dropped.run(f"ip neigh replace {entry} lladdr 02:00:00:00:00:99 nud permanent")
            yield
            dropped.run(f"ip neigh del {entry}")

    @contextmanager
    def dropped_port(self, machine: Machine, port: int) -> Iterator[None]:
        """Drop what is sent to a port of a machine, as a firewall does."""
        if not shutil.which("nft"):
            pytest.skip("a firewall needs nft, which is not installed")
        chain = "'{ type filter hook input priority 0; }'"
        machine.run(f"nft add table inet wall && nft add chain inet wall input {chain}")
        machine.run(f"nft add rule inet wall input tcp dport {port} drop")
        yield
        machine.run("nft delete table inet wall")


@pytest.fixture
def machines() -> Iterator[tuple[Network, list[Machine]]]:
    """Four machines in a network: agent, replay, and two with environments."""
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        pytest.skip(
            f"Network namespaces need {', '.join(missing)}: apt install iproute2 util-linux"
        )
    if os.geteuid() != 0:
        pytest.skip("Network namespaces need root: sudo make test")
    with ExitStack() as stack:
        try:
            names = ("agent", "replay", "envs-a", "envs-b", "switch")
            made: list[Machine] = []
            for name in names:
                made.append(Machine(name))
                stack.callback(made[-1].close)
            *hosts, switch = made
            network = Network(*hosts, switch=switch)
        except (PermissionError, AssertionError) as error:
            pytest.skip(f"This machine forbids network namespaces: sudo make test ({error})")
        yield network, hosts
