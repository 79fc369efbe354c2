"""Episodes of a policy: the policy in this process, environments under an embedded supervisor.

The final evaluation, `dreamfleet eval`, `evaluate()` and the web page play with
`eval_environments`. So does the evaluator, a worker of a run with `eval_every`: it plays a round
for each checkpoint that waits for its score (`Checkpoint.pending`), with its parameters.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dreamfleet.checkpoint import Checkpoint, CheckpointError, step_of
from dreamfleet.config import RunConfig
from dreamfleet.envs.diagnose import trim_traceback
from dreamfleet.files import temporary_folder
from dreamfleet.fleet.launchers import ONE_THREAD, RestartPolicy, Worker, find_launcher
from dreamfleet.fleet.supervisor import Supervisor
from dreamfleet.metrics.evaluations import FILE_NAME as EVALUATIONS
from dreamfleet.metrics.evaluations import (
    evaluation_metrics,
    evaluation_of,
    last_line,
    recorded_round,
)
from dreamfleet.metrics.outputs.jsonl import append_row
from dreamfleet.policy import Policy
from dreamfleet.roles.env import parallel_env
from dreamfleet.roles.episodes import EpisodeServer, Group, groups_of
from dreamfleet.roles.health import Health, HealthRecord, health_path, read_health
from dreamfleet.roles.logger_client import LoggerClient
from dreamfleet.roles.runtime import POLL_SECONDS, Factory, stop_event
from dreamfleet.transport import Client, Closed, TransportError

log = logging.getLogger(__name__)

_MAX_FAILURES = 3  # of a process, without a step in between
_LOGGER_SECONDS = 60.0


@contextmanager
def eval_environments(
    make: Factory, groups: Sequence[Group], config: RunConfig, max_steps: int, folder: Path
) -> Iterator[EpisodeServer]:
    """Environment processes under a supervisor of their own, and the server that they call. One
    that fails again and again without a step in between is given up.

    Args:
        make: Called with an environment's id.
        groups: The ids of each process.
        config: The run, with a temporary directory as its `logdir`.
        max_steps: Steps after which an episode is cut short.
        folder: Where their output goes, below `logs`.
    """
    # The policy is in this process, and its environments are next to it.
    name = "serial" if config.launcher == "serial" else "local"
    # In the temporary directory, which is removed also if this process is killed.
    address = f"ipc://{config.logdir}/server"

    def health(group: Group) -> HealthRecord:
        return read_health(health_path(config, f"env-{group[0]}"))

    def why(group: Group) -> str:
        """Why an environment has failed whose process goes on."""
        found = trim_traceback(health(group).traceback)
        return found or "The environment was started again in the middle of an episode."

    def on_end(name: str, output: str, for_good: bool) -> None:
        """A process has ended: the episodes of its environments have failed."""
        group = next(each for each in groups if name == f"eval-{each[0]}")
        record = health(group)
        error = trim_traceback(record.traceback if record.final else output)
        server.fail(group, error or f"{name} was killed.", for_good=for_good)

    def supervise() -> None:
        try:
            supervisor.run()  # in this thread, so it handles no signals
        except Exception as error:
            log.debug("The environments cannot be run.", exc_info=error)
            for group in groups:
                server.fail(group, f"It cannot be run: {error!r}", for_good=True)

    server = EpisodeServer(address, groups, max_steps=max_steps, why=why)
    policy = RestartPolicy("restart", _MAX_FAILURES - 1)
    run = replace(config, actor_addr=server.address, keys="", actors=1)
    run = replace(run, on_failure=policy.on_failure, max_restarts=policy.max_restarts)
    workers = [
        Worker(
            f"eval-{group[0]}",
            "env",
            partial(parallel_env, make, group, run, True, False),
            ONE_THREAD,
            restart=policy,
            health=health_path(run, f"env-{group[0]}"),
        )
        for group in groups
    ]
    with find_launcher(name)(folder) as launcher, server:
        supervisor = Supervisor(workers, launcher, on_end=on_end)
        thread = threading.Thread(target=supervise, name="eval-supervisor", daemon=True)
        thread.start()
        try:
            yield server
        finally:
            supervisor.stop()
            thread.join()


# --- rounds while a run trains -------------------------------------------------------------------


def parallel_evaluator(make_env_eval: Factory, args: RunConfig) -> None:
    """Play a round for each checkpoint that waits for its score, until asked to stop."""
    stop = stop_event()
    ids = range(args.envs, args.envs + max(1, args.eval_envs))
    groups = groups_of(ids, args.envs_per_process)
    with LoggerClient(args, "evaluator-logger") as logger:
        rounds = _Rounds(args, logger, stop)
        while not stop.is_set():  # again after a failure: a process may have been given up
            with temporary_folder() as private:
                run = replace(args, logdir=private)
                folder = private if args.launcher == "serial" else args.logdir  # has its log
                with eval_environments(
                    make_env_eval, groups, run, args.eval_max_steps, folder
                ) as server:
                    while not stop.wait(POLL_SECONDS) and rounds.poll(server):
                        pass


class _Rounds:
    """The rounds of a run. One that a kill interrupts is played again, unless its result is in
    `evaluations.jsonl`; one that fails is recorded with its error."""

    def __init__(self, args: RunConfig, logger: Client, stop: threading.Event) -> None:
        self._args, self._logger, self._stop = args, logger, stop
        self._checkpoints = Checkpoint(args.checkpoints)
        self._health = Health(health_path(args, "evaluator"))
        self._policy: Policy | None = None
        self._played: Path | None = None
        self._row: dict[str, Any] = {}  # the result of that round

    def poll(self, server: EpisodeServer) -> bool:
        """Play the round that is due, if one is; returns False if something failed in it."""
        path = self._checkpoints.pending()
        if path is None:
            return True
        again = path == self._played  # its result could not be written: the disk was full
        row = recorded_round(self._args.logdir, step_of(path))
        recorded = row is not None
        if row is None and not again:
            try:
                row = self._play(path, server)
            except Closed:
                return True
            except Exception as error:  # a round is not worth a run
                self._policy = None
                log.exception("The round with %s failed", path)
                row = {"error": repr(error)}
        self._played, self._row = path, row or self._row
        try:
            if not recorded:
                about = {"kind": "round", "step": step_of(path)}
                append_row(self._args.logdir / EVALUATIONS, {**about, **self._row})
            self._checkpoints.rate(path, self._row.get("mean"))
        except (OSError, CheckpointError) as error:
            if not again:
                log.warning("The score of %s is not recorded yet: %s", path, error)
        self._health.progress()
        return again or not self._row["error"]

    def _play(self, path: Path, server: EpisodeServer) -> dict[str, Any]:
        """Play a round and tell the logger; returns what there is to record of it."""
        args, start = self._args, time.monotonic()
        # The agent is made once, and then takes the parameters of each round.
        agent = self._policy.agent if self._policy else args.agent_type
        self._policy = policy = Policy.load(path, agent=agent, trust=args.named_code)
        played = server.play(policy.agent, policy.mode, args.eval_episodes, self._check_stop)
        result = evaluation_of(
            played,
            task=args.task,
            step=policy.step,
            protocol=policy.protocol,
            seed=args.seed,
            max_steps=args.eval_max_steps,
        )
        try:
            metrics = evaluation_metrics(played, policy.step)
            self._logger.call("add", policy.step, metrics).result(_LOGGER_SECONDS)
        except TransportError as error:
            log.warning("The logger did not get the result of a round: %s", error)
        if result is None:
            log.warning("Every episode of the round failed: %s", played[0].error)
            return {"failed": len(played), "error": last_line(played[0].error)}
        log.info("Step %d: mean score %s", policy.step, result.summary())
        return {**result.record(), "seconds": round(time.monotonic() - start, 1)}

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise Closed("The run is ending; it plays the round at its end.")
