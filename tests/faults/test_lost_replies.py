"""A call whose reply is lost is sent again, and counts once.

Batches of the replay do so in `test_simulation.py`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from fleet_parts import rows, small_run

from benchmarks.proxy import Proxy
from dreamfleet.metrics import JsonlOutput
from dreamfleet.roles import logger as logging_role
from dreamfleet.roles.logger import Logger
from dreamfleet.roles.logger_client import LoggerClient
from dreamfleet.transport import Server

LONG = 60.0


def row(number: int, last: int) -> dict[str, Any]:
    """A step of an episode whose rewards are its numbers."""
    return {
        "reward": np.array([number], np.float32),
        "is_first": np.array([number == 0]),
        "is_last": np.array([number == last]),
        "is_terminal": np.array([False]),
    }


def test_an_episode_an_evaluation_and_metrics_are_taken_once(tmp_path: Path) -> None:
    logger = Logger(JsonlOutput(tmp_path / "metrics.jsonl"), small_run(tmp_path, eval_envs=1))
    server = Server("tcp://127.0.0.1:{auto}", "logger")
    logging_role.bind(server, logger)
    with server, Proxy(server.address) as proxy:
        run = small_run(tmp_path, eval_envs=1, logger_addr=proxy.address)
        with LoggerClient(run, "actor-logger", 8) as client:
            for number in range(5):
                steps = (number, np.array([4]), True, row(number, last=4), {})
                if number != 3:
                    client.call("tran", *steps).result(LONG)
                    continue
                before = server.stats()["replies"]
                proxy.stall(["down"])
                calls = [client.call("tran", *steps), client.add(number, {"loss": 1.0})]
                calls += [client.add(2, {"eval/step": 2.0, "eval/rounds": 1.0})]
                while server.stats()["replies"] < before + 3:  # none of them comes through
                    time.sleep(0.001)
                proxy.cut()
                proxy.resume()
                for call in calls:
                    call.result(LONG)
                assert client.stats()["resent"] == 3
    logger.close()
    found = rows(tmp_path / "metrics.jsonl")
    assert found[-1]["eval/score"] == 10.0, "0 + 1 + 2 + 3 + 4"
    assert sum("loss" in each for each in found) == 1
    assert sum("eval/rounds" in each for each in found) == 1
