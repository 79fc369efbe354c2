"""A call whose reply is lost is sent again, and counts once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_parts import rows, small_run

from benchmarks.proxy import Proxy
from dreamfleet.config import RunConfig
from dreamfleet.fleet.factories import replay, stream
from dreamfleet.metrics import JsonlOutput
from dreamfleet.roles import logger as logging_role
from dreamfleet.roles import replay as replay_role
from dreamfleet.roles.learner import RemoteStream
from dreamfleet.roles.logger import Logger
from dreamfleet.roles.logger_client import LoggerClient
from dreamfleet.roles.progress import limiter_for
from dreamfleet.roles.replay import ReplayService
from dreamfleet.roles.scaling.shards import replay_client
from dreamfleet.transport import Server

LONG = 60.0


class Lossy:
    """A server behind a network that may lose replies."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.proxy = Proxy(server.address)

    @contextmanager
    def loses_replies(self, calls: int) -> Iterator[None]:
        """Lose the connection when the server has carried out so many more calls, of which no
        reply has come through."""
        before = self._server.stats()["replies"]
        self.proxy.stall(["down"])
        yield
        while self._server.stats()["replies"] < before + calls:
            time.sleep(0.001)
        self.proxy.cut()
        self.proxy.resume()


@pytest.fixture
def lossy() -> Iterator[Any]:
    """Makes a lossy network in front of a server that has its methods."""
    made: list[Any] = []

    def make(server: Server) -> Lossy:
        server.start(block=False)
        made.extend([server, (lossy := Lossy(server)).proxy])
        return lossy

    yield make
    for each in reversed(made):
        each.close()


def row(number: int, last: int) -> dict[str, Any]:
    """A step of an episode whose rewards are its numbers."""
    return {
        "reward": np.array([number], np.float32),
        "is_first": np.array([number == 0]),
        "is_last": np.array([number == last]),
        "is_terminal": np.array([False]),
    }


def test_an_episode_an_evaluation_and_metrics_are_taken_once(tmp_path: Path, lossy: Any) -> None:
    config = small_run(tmp_path, eval_envs=1)
    logger = Logger(JsonlOutput(tmp_path / "metrics.jsonl"), config)
    server = Server("tcp://127.0.0.1:{auto}", "logger")
    logging_role.bind(server, logger)
    network = lossy(server)
    run = small_run(tmp_path, eval_envs=1, logger_addr=network.proxy.address)
    with LoggerClient(run, "actor-logger", 8) as client:
        for number in range(5):
            steps = (number, np.array([4]), np.array([True]), row(number, last=4), {})
            if number != 3:
                client.call("tran", *steps).result(LONG)
                continue
            with network.loses_replies(3):
                calls = [client.call("tran", *steps)]
                calls += [client.add(number, {"loss": 1.0})]
                calls += [client.add(2, {"eval/step": 2.0, "eval/rounds": 1.0})]
            for call in calls:
                call.result(LONG)
            assert client.stats()["resent"] == 3
    logger.close()
    found = rows(tmp_path / "metrics.jsonl")
    assert found[-1]["eval/score"] == 10.0, "0 + 1 + 2 + 3 + 4"
    assert sum("loss" in each for each in found) == 1
    assert sum("eval/rounds" in each for each in found) == 1


def service_of(config: RunConfig) -> ReplayService:
    def make(buffer: Any, mode: str) -> Any:
        return stream(config, buffer, mode)

    buffers = replay(config, "replay"), replay(config, "eval_replay")
    return ReplayService(*buffers, make, limiter_for(config), config, threading.Event())


def test_a_batch_is_counted_once(tmp_path: Path, lossy: Any) -> None:
    config = small_run(tmp_path, train_ratio=0.0)
    service = service_of(config)
    for number in range(14):
        steps = {key: np.repeat(value, 4) for key, value in row(number, last=99).items()}
        service.add_batch(steps, np.arange(4), False, "actor", number)
    server = Server("tcp://127.0.0.1:{auto}", "replay")
    replay_role.bind(server, service, config)
    network = lossy(server)
    run = small_run(tmp_path, replay_addr=network.proxy.address)
    with replay_client(run, "learner-samples", 2) as client:
        batches = RemoteStream(client, "train", known=0, batch=config.host_batch)
        client.connect(LONG)
        thread = threading.Thread(target=batches.take)
        with network.loses_replies(2):
            thread.start()
        thread.join()
        for _ in range(4):
            assert batches.take() is not None
        assert client.stats()["resent"] == 2
        asked = 5 + len(batches._requested)
        batches._requested[-1].result(LONG)
        assert client.call("position").result(LONG)["samples"] == asked * config.host_batch
    service.close()
