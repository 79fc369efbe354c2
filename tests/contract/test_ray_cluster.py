"""A run on a Ray cluster of several nodes, which come and go."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from fleet_parts import (
    CountingAgent,
    Paced,
    check_counts,
    check_order,
    parts,
    small_run,
    stored_streams,
)
from launcher_parts import LONG
from ray_parts import Nodes, ray_processes, tell

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.config import Resources, RunConfig
from dreamfleet.fleet.launchers import Worker, find_launcher
from dreamfleet.fleet.record import WorkerStatus, read_record
from dreamfleet.parallel import combined

ray = pytest.importorskip("ray")
# Ray starts its processes by forking, of which JAX warns if it was imported before.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork")

WHERE = {"agent": "agent", "env": "env", "replay": "store", "logger": "head"}
"""The role's processes go to the nodes that have this resource."""
LOST = [("replay",), ("env-0", "env-2"), ("agent",)]
"""The processes on each node that is removed."""


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
        self._store = cluster.add(store=1)
        self._players = cluster.add(env=2)
        self._thinker = cluster.add(agent=1)
        self.lines: list[str] = []
        self.updates: list[int] = []
        self.seen: list[dict[str, WorkerStatus]] = []
        self._since = 0.0  # when all were first seen to run and to step, after a removal

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if not line.startswith("step ") or not self._all_run_and_step():
            return
        self._since = self._since or time.time()
        saved, workers = self._checkpoints.load(), self._workers()
        if saved is None or saved.path.stat().st_mtime < self._since:
            return  # it was saved by an agent that is gone, or while others were
        self._since = 0.0
        self.seen.append(workers)
        self.updates.append(int(saved.parts["agent"]["updates"]))
        if len(self.seen) == 1:
            self._cluster.remove(self._store)
            self._cluster.add(store=1, env=2, agent=1)
        elif len(self.seen) == 2:
            self._cluster.remove(self._players)
        elif len(self.seen) == 3:
            self._cluster.remove(self._thinker)
        elif len(self.seen) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    def _workers(self) -> dict[str, WorkerStatus]:
        record = read_record(self._logdir)
        return {worker.name: worker for worker in record.workers}

    def _all_run_and_step(self) -> bool:
        """Whether every process is another one than when the last node was removed, if it was
        there, and that one has ended, and all environments have made steps."""
        workers = self._workers()
        gone = [(), *LOST, ()][len(self.seen)]
        if any(worker.state != "running" for worker in workers.values()):
            return False
        before = [self.seen[-1][name] for name in gone]
        # Ray tells that a node is lost while processes of it may still be about to save.
        if any(workers[each.name].pid == each.pid or lives(each.pid) for each in before):
            return False
        envs = [worker.pid for worker in workers.values() if worker.role == "env"]
        return all((self._logdir / f"stepped-{pid}").exists() for pid in envs)


def lives(pid: int | None) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_nodes_come_and_go_and_the_run_goes_on(ray_cluster: Nodes, tmp_path: Path) -> None:
    """The replay's node is lost, and another one comes; then the node of the environments, and that
    of the agent. Nothing that was acknowledged is lost, and Ctrl-C leaves nothing behind."""
    config = run_on(ray_cluster, tmp_path)
    fleet = parts(config, make_agent=CountingAgent, make_env_train=partial(Paced, tmp_path))
    removals = Removals(ray_cluster, tmp_path)
    with suppress(KeyboardInterrupt):
        combined(**fleet, args=config, say=removals)
    said = "\n".join(removals.lines)
    assert len(removals.seen) == 4, said
    assert ray_processes() == []
    again = [line.split()[0] for line in removals.lines if "is started again" in line]
    assert [{again[0]}, set(again[1:3])] == [{"replay"}, {"env-0", "env-2"}], said
    assert "agent" in again[3:], said
    assert "its Ray node" in said
    # Workers on other nodes went on undisturbed.
    for before, after, lost in zip(removals.seen, removals.seen[1:], LOST, strict=False):
        kept = {name for name in before if before[name].pid == after[name].pid}
        assert kept == before.keys() - set(lost), said
    assert 0 < removals.updates[0] < removals.updates[1] < removals.updates[2]
    assert removals.updates[2] < removals.updates[3]
    found = stored_streams(tmp_path / "replay")
    check_counts(tmp_path, found)
    for stream in found.values():
        check_order(stream, cuts=len(LOST))  # each loss cuts one episode short
    logs = [path.name for path in (tmp_path / "logs").iterdir()]
    assert sorted(logs) == ["agent.log", "env-0.log", "env-2.log", "logger.log", "replay.log"]
    # What others need to find and to read it is gone, or private.
    assert not (tmp_path / "addresses").exists()
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600


def test_workers_that_stand_apart_have_a_node_each_if_there_are_enough(
    ray_cluster: Nodes, tmp_path: Path
) -> None:
    config = small_run(tmp_path, ray_address=ray_cluster.address)
    asks = Resources(custom={"big": 1})
    hosts = [Worker(f"host-{n}", "agent", int, resources=asks, apart=True) for n in range(3)]
    for _ in range(2):
        ray_cluster.add(big=4)
    for workers, groups in ((hosts[:2], ["CREATED"]), (hosts, ["REMOVED", "REMOVED"])):
        with find_launcher("ray")(tmp_path, config) as launcher:
            launcher.prepare(workers)
            found = [place.node for _, place in launcher._placed.values()]
            states = [each["state"] for each in ray.util.placement_group_table().values()]
        assert len(found) == len(workers)
        assert len(set(found)) == 2
        assert states == groups, "what a run had reserved is free after it"


def test_a_program_outside_of_the_cluster_sends_its_modules_along(
    ray_cluster: Nodes, tmp_path: Path
) -> None:
    """Through Ray's client, with a module that only Ray's runtime environment has."""
    module = tmp_path / "sent" / "only_sent"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text("WORDS = 'from a module '\n")
    config = small_run(
        tmp_path,
        ray_address=ray_cluster.client(),
        ray_runtime_env={
            "py_modules": (str(module),),
            "env_vars": {"MORE_WORDS": "and a variable"},
        },
    )
    tells = partial(tell, tmp_path / "told", "only_sent")
    worker = Worker("env-0", "env", tells, resources=Resources(custom={"head": 1}))
    with find_launcher("ray")(tmp_path, config) as launcher:
        launcher.prepare([worker])
        running = launcher.start(worker)
        assert running.wait(LONG) == 0, running.output()
    assert (tmp_path / "told").read_text() == "from a module and a variable"
    assert ray_processes() == []
