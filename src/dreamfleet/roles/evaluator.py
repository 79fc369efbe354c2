"""The evaluator role: rounds of complete episodes while a run trains.

A round begins when the learner has saved a checkpoint that asks for its score
(`Checkpoint.pending`). It is played with the parameters of that very checkpoint, and ends when the
checkpoint has its score. All that a round is about lies in the run's directory: one that is
interrupted by whatever restart is played again. One that fails is noted, and the next one is tried.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from dreamfleet.checkpoint import Checkpoint, CheckpointError, step_of
from dreamfleet.config import RunConfig
from dreamfleet.metrics.evaluations import FILE_NAME as EVALUATIONS
from dreamfleet.metrics.evaluations import evaluation_metrics, evaluation_of, last_line
from dreamfleet.metrics.outputs.jsonl import append_row
from dreamfleet.policy import Policy
from dreamfleet.roles.addresses import listen_address, publish_address
from dreamfleet.roles.episodes import EpisodeServer, Group, RoundInterrupted, groups_of
from dreamfleet.roles.fences import FenceReader
from dreamfleet.roles.health import Health, health_path, read_health
from dreamfleet.roles.invitations import invited
from dreamfleet.roles.logger_client import LoggerClient
from dreamfleet.roles.runtime import POLL_SECONDS, stop_event
from dreamfleet.roles.spaces_file import read_spaces
from dreamfleet.transport import Client, Closed, TransportError

log = logging.getLogger(__name__)

_LOGGER_SECONDS = 60.0


def parallel_evaluator(args: RunConfig) -> None:
    """Play a round for each checkpoint that asks for one, until the process is asked to stop.

    Args:
        args: The run; its evaluation environments call this role instead of the actor.
    """
    own = range(args.envs, args.envs if args.bind and args.remote_envs else args.all_envs)
    groups = groups_of(own, args.envs_per_process)

    def why(group: Group) -> str:
        name = f"env-{group[0]}"
        health = read_health(health_path(args, name))
        return health.traceback or f"{name} was started again in the middle of an episode."

    spaces = read_spaces(args, args.logdir)
    server = EpisodeServer(
        listen_address(args, "evaluator"),
        groups,
        max_steps=args.eval_max_steps,
        why=why,
        keys=args.server_keys,
        joined=FenceReader(args.logdir).groups if args.bind else None,
        invited=invited(args),
        spaces=spaces[0] if spaces else None,
    )
    stop = stop_event(on_stop=server.stop)
    checkpoints = Checkpoint(args.logdir / "ckpt" / "agent")
    health = Health(health_path(args, "evaluator"))
    policy: Policy | None = None
    rated: Path | None = None
    with server, LoggerClient(args, "evaluator-logger") as logger:
        publish_address(args, "evaluator", server.address)
        while not stop.wait(POLL_SECONDS):
            path = checkpoints.pending()
            if path is None or path == rated:
                continue
            score: float | None = None
            try:
                # The agent is made once, and then takes the parameters of each round.
                agent = policy.agent if policy else args.agent_type
                policy = Policy.load(path, agent=agent, trust=args.named_code)
                score = _play_round(args, server, policy, logger)
            except Closed:
                return
            except RoundInterrupted as error:
                log.warning("The round with %s is played again: %s", path, error)
                continue
            except Exception as error:  # a round is not worth a run
                policy = None
                log.exception("The round with %s failed", path)
                _append(args, {"kind": "round", "step": step_of(path), "error": repr(error)})
            try:
                rated = path  # also if that fails: the end of the run plays the round again
                checkpoints.rate(path, score)
            except (OSError, CheckpointError) as error:
                log.warning("%s does not get its score: %s", path, error)
            health.progress()


def _play_round(
    args: RunConfig, server: EpisodeServer, policy: Policy, logger: Client
) -> float | None:
    """Play a round and tell what it scored; returns the mean, None if every episode failed."""
    start = time.monotonic()
    played = server.play(policy.agent, policy.mode, args.eval_episodes)
    result = evaluation_of(
        played,
        task=args.task,
        step=policy.step,
        protocol=policy.protocol,
        seed=args.seed,
        max_steps=args.eval_max_steps,
    )
    row: dict[str, Any] = {"kind": "round", "step": policy.step}
    if result is None:
        log.warning("Every episode of the round failed: %s", played[0].error)
        row |= {"failed": len(played), "error": last_line(played[0].error)}
    else:
        log.info("Step %d: mean score %s", policy.step, result.summary())
        row |= {**result.record(), "seconds": round(time.monotonic() - start, 1)}
    _append(args, row)
    try:
        metrics = evaluation_metrics(played, policy.step)
        logger.call("evaluated", policy.step, metrics).result(_LOGGER_SECONDS)
    except TransportError as error:
        log.warning("The logger was not told of a round: %s", error)
    return result.mean if result else None


def _append(args: RunConfig, row: dict[str, Any]) -> None:
    try:
        append_row(args.logdir / EVALUATIONS, row)
    except OSError as error:
        log.warning("evaluations.jsonl cannot be written: %s", error)
