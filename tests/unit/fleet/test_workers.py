"""A run as a list of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from fleet_parts import small_run

from dreamfleet.config import RunConfig
from dreamfleet.fleet.launchers import Worker
from dreamfleet.fleet.workers import env_workers, fleet_workers
from dreamfleet.roles.runtime import Factories


def make(*_: Any) -> None: ...


def workers_of(config: RunConfig) -> list[Worker]:
    return fleet_workers(Factories(*(make,) * 7), config)


def test_a_run_has_an_agent_environments_a_replay_and_a_logger(tmp_path: Path) -> None:
    config = small_run(tmp_path, envs=5, envs_per_process=2, eval_envs=1)
    names = ["agent", "env-0", "env-2", "env-4", "env-5", "replay", "logger"]
    assert [worker.name for worker in workers_of(config)] == names
    assert [worker.role for worker in workers_of(config) if worker.ends_run] == ["agent"]


def test_parts_that_run_elsewhere_are_left_out(tmp_path: Path) -> None:
    config = small_run(
        tmp_path,
        remote_envs=True,
        actor_addr="ipc:///x/a",
        remote_replay=True,
        replay_addr="ipc:///x/b",
    )
    assert [worker.name for worker in workers_of(config)] == ["agent", "logger"]


def test_environments_of_a_process_call_one_actor(tmp_path: Path) -> None:
    config = small_run(tmp_path, envs=8, envs_per_process=3, eval_envs=3, actors=2)
    workers = {worker.name: worker for worker in workers_of(config)}
    train, evaluation = ["env-0", "env-1", "env-6", "env-7"], ["env-8", "env-9"]
    names = ["agent", "actor-1", *train, *evaluation, "replay", "logger"]
    assert list(workers) == names
    shares = [workers[name].function.args[1] for name in train + evaluation]
    assert shares == [(0, 2, 4), (1, 3, 5), (6,), (7,), (8, 10), (9,)]
    actor = workers["actor-1"]
    assert (actor.role, actor.function.args[1]) == ("actor", 1)
    assert actor.environment["JAX_PLATFORMS"] == "cpu"
    assert not actor.ends_run
    # The evaluator has those of its rounds.
    rounds = small_run(tmp_path, envs=2, eval_envs=3, envs_per_process=3, eval_every=9, actors=2)
    names = [worker.name for worker in workers_of(rounds)]
    assert names == ["agent", "actor-1", "evaluator", "env-0", "env-1", "replay", "logger"]


def test_environments_of_one_machine_keep_their_numbers(tmp_path: Path) -> None:
    config = small_run(tmp_path, envs=4, envs_per_process=2, eval_envs=2)
    some = env_workers(make, make, config, range(1, 5))
    assert [worker.name for worker in some] == ["env-1", "env-3", "env-4"]
    assert env_workers(make, make, config, range(9, 12)) == []


def test_a_worker_is_data_that_can_be_sent(tmp_path: Path) -> None:
    for worker in workers_of(small_run(tmp_path)):
        again = cloudpickle.loads(cloudpickle.dumps(worker))
        assert (again.name, again.role, again.restart) == (worker.name, worker.role, worker.restart)


def test_the_restart_policy_is_the_runs(tmp_path: Path) -> None:
    config = small_run(tmp_path, on_failure="restart", max_restarts=3)
    for worker in workers_of(config):
        policy = worker.restart
        assert (policy.on_failure, policy.max_restarts) == ("restart", 3)
        assert worker.health == tmp_path / "workers" / worker.name


def test_only_the_agent_keeps_its_memory_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training allocates and frees hundreds of megabytes a step; no other role does."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    added = {w.name: w.environment for w in workers_of(RunConfig(logdir=tmp_path))}
    assert [name for name, each in added.items() if "GLIBC_TUNABLES" in each] == ["agent"]
    assert "mmap_max=0" in added["agent"]["GLIBC_TUNABLES"]
    assert all(each["OMP_NUM_THREADS"] == "1" for n, each in added.items() if n != "agent")
