"""A run on a Ray cluster of several nodes, which come and go."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fleet_parts import CountingAgent, Paced, parts, rows, small_run, stored_streams
from ray_parts import Nodes, ray_processes

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.config import RunConfig
from dreamfleet.fleet.record import WorkerRecord, read_record
from dreamfleet.parallel import combined

LENGTH = 25
WHERE = {"agent": "agent", "env": "env", "replay": "store", "logger": "head"}
"""The role's processes go to the nodes that have this resource."""


def run_on(cluster: Nodes, logdir: Path, **changes: Any) -> RunConfig:
    config = small_run(
        logdir,
        launcher="ray",
        ray_address=cluster.address,
        on_failure="restart",
        steps=0,
        log_every=0.2,
        save_every=0.2,
        train_ratio=0.2,
        **changes,
    )
    asked = {f"resources.{role}.custom": {name: 1} for role, name in WHERE.items()}
    return config.changed({**asked, "resources.agent.cpu": 0, "resources.env.cpu": 0})


class Removals:
    """Removes one node after the other from under a run, and ends it as Ctrl-C does."""

    def __init__(self, cluster: Nodes, logdir: Path) -> None:
        self._cluster, self._logdir = cluster, logdir
        self._checkpoints = Checkpoint(logdir / "ckpt" / "agent")
        self._players, self._thinker = cluster.add(env=2, store=1), cluster.add(agent=1)
        self.lines: list[str] = []
        self.updates: list[int] = []
        self.seen: list[dict[str, WorkerRecord]] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if not line.startswith("step ") or not self._all_run_and_step():
            return
        saved, workers = self._checkpoints.load(), self._workers()
        newest = max(worker.started for worker in workers.values())
        if saved is None or saved.path.stat().st_mtime < newest:
            return  # it was saved by an agent that is gone, or while others were
        self.seen.append(workers)
        self.updates.append(int(saved.parts["agent"]["updates"]))
        if len(self.seen) == 1:
            self._cluster.remove(self._players)
            self._cluster.add(env=2, store=1, agent=1)
        elif len(self.seen) == 2:
            self._cluster.remove(self._thinker)
        elif len(self.seen) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    def _workers(self) -> dict[str, WorkerRecord]:
        record = read_record(self._logdir)
        assert record is not None
        return {worker.name: worker for worker in record.workers}

    def _all_run_and_step(self) -> bool:
        """Whether every process is another one than when the last node was removed, if it was
        there, and all environments have made steps."""
        workers = self._workers()
        gone = [(), ("env-0", "env-2", "replay"), ("agent",), ()][len(self.seen)]
        if any(worker.state != "running" for worker in workers.values()):
            return False
        if any(workers[name].pid == self.seen[-1][name].pid for name in gone):
            return False
        envs = [worker.pid for worker in workers.values() if worker.role == "env"]
        return all((self._logdir / f"stepped-{pid}").exists() for pid in envs)


def test_nodes_come_and_go_and_the_run_goes_on(ray_cluster: Nodes, tmp_path: Path) -> None:
    """A node with environments and the replay is lost, and another one comes; then the agent's node
    is lost. Nothing that was acknowledged is, and Ctrl-C leaves nothing behind."""
    config = run_on(ray_cluster, tmp_path)
    fleet = parts(config, make_agent=CountingAgent, make_env_train=partial(Paced, tmp_path))
    removals = Removals(ray_cluster, tmp_path)
    with suppress(KeyboardInterrupt):
        combined(**fleet, args=config, say=removals)
    said = "\n".join(removals.lines)
    assert len(removals.seen) == 3, said
    assert ray_processes() == []
    again = [line.split()[0] for line in removals.lines if "is started again" in line]
    assert set(again[:3]) == {"env-0", "env-2", "replay"}, said
    assert "agent" in again[3:], said
    assert "its Ray node" in said
    # Whoever was not on a lost node went on undisturbed.
    first, second, third = removals.seen
    assert first["logger"] == second["logger"] == third["logger"]
    assert first["agent"] == second["agent"]
    assert second["env-0"].pid == third["env-0"].pid
    assert 0 < removals.updates[0] < removals.updates[1] < removals.updates[2]
    everything_stored_is_right(tmp_path)
    logs = [path.name for path in (tmp_path / "logs").iterdir()]
    assert sorted(logs) == ["agent.log", "env-0.log", "env-2.log", "logger.log", "replay.log"]
    # What others need to find and to read it is gone, or private.
    assert not (tmp_path / "addresses").exists()
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600


def everything_stored_is_right(logdir: Path) -> None:
    found = stored_streams(logdir / "replay")
    total = sum(len(stream["action"]) for stream in found.values())
    snapshot = Checkpoint(logdir / "ckpt" / "agent").load()
    assert snapshot is not None
    assert snapshot.step == snapshot.parts["replay"]["steps"] == total
    logged = [row["step"] for row in rows(logdir / "metrics.jsonl")]
    assert logged == sorted(logged)
    for stream in found.values():
        step = stream["vector"][:, 2].astype(int)
        assert stream["is_first"].tolist() == (step == 0).tolist()
        assert stream["action"].tolist() == (step % 5).tolist()
        starts = [n for n in range(1, len(step)) if step[n] != step[n - 1] + 1]
        assert all(step[n] == 0 for n in starts)
        # Each of the two losses cuts one episode short.
        assert sum(step[n - 1] != LENGTH for n in starts) <= 2
