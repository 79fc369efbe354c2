"""One command starts all hosts on a Ray cluster; the cluster itself is left out here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fleet_parts import small_run

pytest.importorskip("ray")

from dreamfleet import train
from dreamfleet.config import RunConfig
from dreamfleet.fleet import ray_hosts
from dreamfleet.metrics.evaluations import Evaluation, append_evaluation

NODES: list[dict[str, Any]] = [{"NodeID": f"node{n}", "Resources": {"CPU": 8.0}} for n in range(4)]
NODES.insert(1, {"NodeID": "head", "Resources": {}})  # nothing runs there


class Launcher:
    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize(("asked", "started"), [(0, 4), (2, 2)])
def test_every_node_with_room_is_a_host_or_as_many_as_were_asked_for(
    asked: int, started: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    class Supervisor:
        def __init__(self, workers: Any, *_: object, **__: object) -> None:
            done.extend(workers)

        def run(self) -> None: ...

    monkeypatch.setattr(ray_hosts, "Supervisor", Supervisor)
    monkeypatch.setattr(ray_hosts, "RayLauncher", Launcher)
    monkeypatch.setattr(ray_hosts, "nodes", lambda: NODES)
    monkeypatch.setattr(ray_hosts, "connect", lambda *_: lambda: done.append("disconnected"))
    config = small_run(tmp_path, hosts=asked, launcher="ray", batch_size=4)
    ray_hosts.run_hosts(print, config, lambda _: None)
    *workers, last = done
    assert last == "disconnected"
    configs = [worker.function.args[1] for worker in workers]
    assert [each.host_index for each in configs] == list(range(started))
    assert {(each.hosts, each.launcher) for each in configs} == {(started, "local")}
    # Host 0 evaluates after all have learned: the run is over when it is.
    assert [worker.ends_run for worker in workers] == [True] + [False] * (started - 1)
    assert all(worker.apart for worker in workers)


def test_training_on_nodes_returns_the_evaluation_of_host_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluation(step: int) -> Evaluation:
        return Evaluation("gym:CartPole-v1", step, "sampled", 0, [1.0, 3.0], [1, 3], max_steps=9)

    def run(host: object, config: RunConfig, say: object) -> None:
        append_evaluation(config.logdir, evaluation(5), kind="round")
        append_evaluation(config.logdir, evaluation(7), kind="final", seconds=2.0)

    monkeypatch.setattr(ray_hosts, "run_hosts", run)
    config = small_run(tmp_path, hosts=2, launcher="ray", batch_size=4)
    append_evaluation(tmp_path, evaluation(3), kind="final")  # of an earlier start
    assert train(config) == evaluation(7)
    monkeypatch.setattr(ray_hosts, "run_hosts", lambda *_: None)
    assert train(config) is None
