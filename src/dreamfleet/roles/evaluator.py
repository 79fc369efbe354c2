"""The evaluator role: rounds of complete episodes while a run trains.

A round begins when the learner has saved a checkpoint that asks for its score
(`Checkpoint.pending`). It is played with the parameters of that very checkpoint, and ends when the
checkpoint has its score. All that a round is about lies in the run's directory: one that is
interrupted by whatever restart is played again.
"""

from __future__ import annotations

import logging
import time

from dreamfleet.checkpoint import Checkpoint, CheckpointError
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.metrics.evaluations import append_evaluation, evaluation_metrics, evaluation_of
from dreamfleet.policy import Policy
from dreamfleet.roles.addresses import find_server, listen_address, publish_address
from dreamfleet.roles.episodes import EpisodeServer, Group, groups_of
from dreamfleet.roles.notes import Notes, notes_path, read_notes
from dreamfleet.roles.runtime import stop_event
from dreamfleet.transport import Client, Closed, TransportError

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
_LOGGER_SECONDS = 60.0


def parallel_evaluator(args: RunConfig) -> None:
    """Play a round for each checkpoint that asks for one, until the process is asked to stop.

    Args:
        args: The run; its evaluation environments call this role instead of the actor.
    """
    groups = groups_of(range(args.envs, args.all_envs), args.envs_per_process)

    def why(group: Group) -> str:
        name = f"env-{group[0]}"
        noted = read_notes(notes_path(args, name))
        return noted.traceback or f"{name} was started again in the middle of an episode."

    server = EpisodeServer(
        listen_address(args, "evaluator"),
        groups,
        max_steps=args.eval_max_steps,
        why=why,
        keys=args.run_keys,
    )
    stop = stop_event(on_stop=server.stop)
    logs = find_server(args, "logger")
    checkpoints = Checkpoint(args.logdir / "ckpt" / "agent")
    notes = Notes(notes_path(args, "evaluator"))
    policy: Policy | None = None
    with server, Client(logs, "evaluator-logger", keys=args.run_keys) as logger:
        publish_address(args, "evaluator", server.address)
        while not stop.wait(_LOOK_SECONDS):
            path = checkpoints.pending()
            if path is None:
                continue
            try:
                # The agent is made once, and then takes the parameters of each round.
                agent = policy.agent if policy else args.agent_type
                policy = Policy.load(path, agent=agent, trust=args.named_code)
            except (CheckpointError, ConfigError) as error:
                log.warning("There is no round with %s: %s", path, error)
                checkpoints.rate(path, None)
                continue
            start = time.monotonic()
            try:
                played = server.play(policy.agent, policy.mode, args.eval_episodes)
            except Closed:
                return
            result = evaluation_of(
                played,
                task=args.task,
                step=policy.step,
                protocol=policy.protocol,
                seed=args.seed,
                max_steps=args.eval_max_steps,
            )
            if result is None:
                log.warning("Every episode of the round failed: %s", played[0].error)
            else:
                log.info("Step %d: mean score %s", policy.step, result.summary())
                seconds = round(time.monotonic() - start, 1)
                append_evaluation(args.logdir, result, kind="round", seconds=seconds)
            try:
                metrics = evaluation_metrics(played, policy.step)
                logger.call("evaluated", policy.step, metrics).result(_LOGGER_SECONDS)
            except TransportError as error:
                log.warning("The logger was not told of a round: %s", error)
            checkpoints.rate(path, result.mean if result else None)
            notes.progress()
