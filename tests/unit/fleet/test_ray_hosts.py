"""One command starts all hosts on a Ray cluster; the cluster itself is left out here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fleet_parts import small_run

pytest.importorskip("ray")

from dreamfleet.fleet import ray_hosts


class Launcher:
    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize(("asked", "started"), [(0, 4), (2, 2)])
def test_every_node_is_a_host_or_as_many_as_were_asked_for(
    asked: int, started: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    class Supervisor:
        def __init__(self, workers: Any, *_: object, **__: object) -> None:
            done.extend(workers)

        def run(self) -> None: ...

    monkeypatch.setattr(ray_hosts, "Supervisor", Supervisor)
    monkeypatch.setattr(ray_hosts, "RayLauncher", Launcher)
    monkeypatch.setattr(ray_hosts, "nodes", lambda: [{}] * 4)
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
