"""Steps per second that the transport carries, and the latency of a call.

Client processes send blocks of observations to a batching server and wait for the actions, as
environment processes do. The server computes nothing and passes nothing on. Portal's `BatchServer`
does the same work in the same run if it is installed; its clients send single observations.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from benchmarks.report import Row, compare, helper, rate_of, timed
from dreamfleet.transport import BatchServer, Client, Keys, Server

BATCH = 4

Tree = dict[str, Any]


def observation(*lead: int) -> Tree:
    """What one environment sends, or a block of observations with a leading axis."""
    return {
        "image": np.zeros((*lead, 64, 64, 3), np.uint8),
        "vector": np.zeros((*lead, 7), np.float32),
        "reward": np.zeros(lead, np.float32),
        "is_first": np.zeros(lead, bool),
        "is_last": np.zeros(lead, bool),
        "is_terminal": np.zeros(lead, bool),
    }


class _Counter:
    """A policy that counts its steps."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, obs: Tree) -> tuple[Tree, None]:
        return {"action": self.act(obs)}, None

    def act(self, obs: Tree) -> Any:
        count = len(obs["reward"])
        self.steps += count
        return np.zeros(count, np.int32)


def _environments(address: str, keys: Keys | None, envs: int) -> None:
    client = Client(address, keys=keys)
    obs = observation(envs)
    while True:
        client.call_block("act", obs).result()


def _portal_environment(address: str) -> None:
    import portal

    client = portal.Client(address, logging=False)
    obs = observation()
    while True:
        client.act(obs).result()


def measure_ours(
    address: str, keys: Keys | None, processes: int, envs: int, seconds: float
) -> float:
    """Steps per second with this many client processes of this many environments each."""
    counter = _Counter()
    server = BatchServer(address, "Actor", keys)
    server.bind("act", counter, lambda _: None, batch=BATCH)
    with server:
        clients: list[BaseProcess] = [
            helper(_environments, server.address, keys, envs) for _ in range(processes)
        ]
        return rate_of(lambda: counter.steps, clients, 50 * processes, seconds)


def measure_portal(processes: int, seconds: float) -> float:
    """The same with portal, one environment per client process."""
    import portal

    counter = _Counter()
    port = portal.free_port()
    server = portal.BatchServer(port, "Actor", logging=False)
    server.bind("act", lambda obs: {"action": counter.act(obs)}, batch=BATCH)
    server.start(block=False)
    try:
        clients: list[BaseProcess] = [
            helper(_portal_environment, f"localhost:{port}") for _ in range(processes)
        ]
        return rate_of(lambda: counter.steps, clients, 50 * processes, seconds)
    finally:
        server.close(timeout=1)


def _echo_server(channel: Any) -> None:
    server = Server("ipc://{auto}", "Echo")
    server.bind("echo", lambda value: value)
    with server:
        channel.send(server.address)
        channel.recv()


@contextmanager
def _echo_process() -> Iterator[str]:
    ours, theirs = multiprocessing.Pipe()
    process = helper(_echo_server, theirs)
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send(None)
        process.join(10)
        process.kill()


def measure_latency(calls: int) -> tuple[float, float]:
    """Median and 99th percentile of one small call to another process, in milliseconds."""
    with _echo_process() as address, Client(address) as client:
        timed(lambda: client.echo(0).result(), calls // 10)
        times = [1000 * each for each in timed(lambda: client.echo(0).result(), calls)]
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


def run(quick: bool = False) -> Iterator[Row]:
    """Latency, then blocks of observations over each transport."""
    many, seconds = (BATCH, 0.2) if quick else (8, 5.0)
    median, tail = measure_latency(100 if quick else 5000)
    yield Row("latency of a small call, median", median, "ms", note="ipc, to another process")
    yield Row("latency of a small call, 99th percentile", tail, "ms")
    installed = importlib.util.find_spec("portal") is not None
    peer, theirs = (
        f"portal, {many} processes x 1",
        measure_portal(many, seconds) if installed else 0,
    )
    keys = Keys.generate()
    for processes, envs in ((many, 1), (2, 8)):
        plain = measure_ours("ipc://{auto}", None, processes, envs, seconds)
        curve = measure_ours("tcp://127.0.0.1:{auto}", keys, processes, envs, seconds)
        share = f"{100 * curve / plain:.0f} % of ipc"
        for name, rate, note in (("ipc", plain, ""), ("tcp with CURVE", curve, share)):
            name = f"{processes} processes x {envs} environment{'s' * (envs > 1)}, {name}"
            if installed:
                yield compare(name, rate, "steps/s", peer, theirs, note)
            else:
                yield Row(name, rate, "steps/s", note=f"portal is not installed {note}".strip())
