"""All roles of a run in one thread, so that a run follows from its seed alone.

The actor, the learner, the replay, the logger and the environments are those of a fleet. Their
order is not that of the clock: the replay's limiter, a function of two counts, decides.

    the learner makes an update, if the limiter allows it
    else the next group of environments takes a step: the actor chooses its actions, and the steps
    are stored and logged before the next turn

Nothing is sampled ahead, and the actor has the parameters of the last update. Metrics and reports
are due after so many steps. What follows the clock (checkpoints, for a run that is killed) changes
nothing. A run that is resumed begins new episodes, like any other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from dreamfleet.agents.api import settle
from dreamfleet.clock import LocalClock
from dreamfleet.config import RunConfig
from dreamfleet.envs.base import Arrays
from dreamfleet.roles import logger as logging_role
from dreamfleet.roles import replay as replay_role
from dreamfleet.roles.actor import Actor
from dreamfleet.roles.addresses import listen_address, publish_address
from dreamfleet.roles.env import Lane, RestartedEnv, Watchdog, make_lanes
from dreamfleet.roles.learner import Learner
from dreamfleet.roles.logger import RECORD_SECONDS, Logger, ScoreReader
from dreamfleet.roles.progress import Progress, limiter_for
from dreamfleet.roles.replay import ReplayService
from dreamfleet.roles.runtime import ActorFailed, Factories, stop_event, unpack
from dreamfleet.roles.saver import Saver
from dreamfleet.roles.scaling.shards import ReplayClient
from dreamfleet.transport import Caller, Server
from dreamfleet.transport.security import RUN

log = logging.getLogger(__name__)

STEPS_PER_SECOND = 100
"""Environment steps that count as a second of `log_every` and `report_every`."""
_LOOK_SECONDS = 0.05


def takes_turns(args: RunConfig) -> bool:
    """Whether the roles of a run take turns in one thread: those of a serial run, if all of them
    are here. Further actors and shards, and others that may join, are threads or processes."""
    here = not (args.remote_envs or args.remote_replay or args.bind)
    return args.launcher == "serial" and here and args.actors == args.replay_shards == 1


def serial_fleet(make: Factories, args: RunConfig) -> None:
    """Run everything but rounds of evaluation, until there were enough steps or until asked to
    stop."""
    progress = Progress(args.steps)
    stop = stop_event(on_stop=progress.stop)

    with ExitStack() as stack:
        logger = Logger(unpack(make.make_logger)(), args)
        stack.callback(logger.close)
        server = Server(listen_address(args, "logger"), "logger", keys=args.server_keys)
        logging_role.bind(server, logger)
        stack.enter_context(server)
        publish_address(args, "logger", server.address)
        # Closed whatever happens: the next attempt is made by the same process.
        train = stack.enter_context(unpack(make.make_replay_train)())
        evaluation = stack.enter_context(unpack(make.make_replay_eval)())
        stream, limiter = unpack(make.make_stream), limiter_for(args)
        service = ReplayService(train, evaluation, stream, limiter, args, stop)
        stack.callback(service.close)
        service.attach({})
        runner = SerialRunner(unpack(make.make_agent)(), args, progress, service, logger)
        stack.callback(runner.close)
        try:
            if runner.begin(unpack(make.make_env_train), unpack(make.make_env_eval)):
                runner.run()
                runner.end()
        except ActorFailed:  # which is for environments of other processes
            pass
        if progress.error is not None:
            raise progress.error


_HERE = Caller(RUN, "", "this process", b"here")


class InProcessClient:
    """A server and its clients in one object: a call is made at once, in the caller's thread."""

    behind = False

    def __init__(self, name: str) -> None:
        self.name = name
        self._methods: dict[str, Callable[..., Any]] = {}

    def bind(
        self,
        method: str,
        function: Callable[..., Any],
        *,
        pass_caller: bool = False,
        **_options: Any,
    ) -> None:
        self._methods[method] = partial(function, _HERE) if pass_caller else function

    def call(self, method: str, *args: Any) -> CompletedFuture:
        return CompletedFuture(self._methods[method](*args))

    call_block = call

    def memory(self, size: int) -> None:
        """What is not sent needs none."""

    def __getattr__(self, method: str) -> Callable[..., CompletedFuture]:
        return partial(self.call, method)

    def connect(self, timeout: float | None = None) -> None:
        """It is."""

    def wait_any(self, futures: Any, timeout: float | None = None) -> bool:  # noqa: ARG002
        return True

    def stats(self) -> dict[str, float]:
        return {"connected": 1.0, "inflight": 0.0}


class CompletedFuture:
    """The answer to a call that was made."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002 - the future's
        return True

    def result(self, timeout: float | None = None) -> Any:  # noqa: ARG002 - the future's
        return self._value


class SerialRunner:
    """The roles of a run, and whose turn it is."""

    def __init__(
        self,
        agent: Any,
        args: RunConfig,
        progress: Progress,
        service: ReplayService,
        logger: Logger,
    ) -> None:
        self._agent, self._args, self._progress = agent, args, progress
        self._service, self._logger = service, logger
        # In place of clients, which the roles have in a fleet.
        shard: Any = InProcessClient("replay")
        logs: Any = InProcessClient("logger")
        acting: Any = InProcessClient("actor")
        acting.bind("act", self._reply)
        replay_role.bind(shard, service, args)
        replay = ReplayClient(args, "serial", 0, [shard])
        logging_role.bind(logs, logger)
        self._replay, self._logs = replay, logs
        self._scores = ScoreReader(logger, {0: shard})
        self._saver = Saver(agent, args, progress, replay, logs)
        self._saver.round_may_begin = lambda: True
        self._learner = Learner(agent, args, progress, self._saver, replay, logs)
        self._actor = Actor(agent, args, progress, replay, logs)
        self._should_record = LocalClock(RECORD_SECONDS)
        self._acting, self._items, self._batches, self._work = acting, 0, 0, 0.0
        self._lanes: list[Lane] = []
        self._turn = 0  # the lane that steps next
        self._acted = False  # since the last update
        self._learned = False  # since the last step

    def begin(self, make_train: Callable[..., Any], make_eval: Callable[..., Any]) -> bool:
        """Restore and compile the agent, and make the environments. Returns False if there is
        nothing to do, and to save: the run has made all its steps before, or was asked to stop
        meanwhile."""
        args = self._args
        self._learner.restore()
        self._logger.record()
        self._learner.compile()
        if self._progress.finished.is_set():
            return False
        train, evaluation = range(args.envs), range(args.envs, args.all_envs)
        restarted = partial(
            RestartedEnv, args=args, health=self._saver.health, watchdog=Watchdog(0)
        )
        for make, ids, is_eval in ((make_train, train, False), (make_eval, evaluation, True)):
            for first in range(0, 0 if args.offline else len(ids), args.policy_batch):
                mine = ids[first : first + args.policy_batch]
                [lane] = make_lanes(make, mine, restarted, is_eval)
                for env in lane.envs:
                    env.build()
                self._lanes.append(lane)
        return not self._progress.stopped

    # --- the turns -------------------------------------------------------------------------------

    def run(self) -> None:
        """Take turns until the run is finished."""
        while self._learner.pretrain():
            self._learn()
        self._await_round()
        while not self._progress.finished.is_set():
            before = self._progress.step
            if self._may_learn():
                self._learn()
            else:
                self._act()
            if self._progress.step > before:
                self._scores.poll()
                self._follow(before)
            if self._should_record():
                self._logger.record()
            if self._saver.is_due():
                self._saver.save()
                self._service.save()
        self._learner.end_trace()

    def _may_learn(self) -> bool:
        if not self._service.can_sample():
            return False
        # Without a limit both take turns.
        return self._args.train_ratio > 0 or self._acted or not self._lanes

    def _learn(self) -> None:
        # Each batch has a stream of its own, which asks for none ahead.
        batches = self._agent.stream(iter([self._replay.sample("train")]))
        self._learner.update(next(batches))
        self._learner.process()
        self._acted, self._learned = False, True

    def _act(self) -> None:
        lane = self._lanes[self._turn]
        for env in lane.envs:
            while not env.built:  # it has failed, and all wait for it
                if self._progress.finished.wait(max(0.0, env.due - time.monotonic())):
                    return
                env.build()
        if self._learned:
            settle(self._agent)
        self._saver.health.stepped(lane.step(self._acting))
        self._saver.health.now("waiting")
        if lane.reply is not None:
            lane.take()
        self._turn = (self._turn + 1) % len(self._lanes)
        self._acted, self._learned = True, False

    def _reply(self, obs: dict[str, Any]) -> Arrays:
        start = time.perf_counter()
        # Environments write their next observations into the same arrays.
        actions, transitions = self._actor.act({k: value.copy() for k, value in obs.items()})
        self._actor.send([transitions])
        self._actor.take_replies(wait=True)
        self._work += time.perf_counter() - start
        self._batches += 1
        self._items += len(obs["is_first"])
        return actions

    def stats(self) -> dict[str, float]:
        """Those of the actor's server, which a fleet has."""
        batches = max(1, self._batches)
        return {
            "act/items": float(self._items),
            "act/batches": float(self._batches),
            "act/fill": self._items / batches,
            "act/work": self._work / batches,
            "act/wait": 0.0,
            "act/waiting": 0.0,
        }

    def _follow(self, before: int) -> None:
        """Do what is due after so many steps."""
        args = self._args
        if self._is_due(args.log_every, before):
            self._log()
        if self._is_due(args.report_every, before):
            self._learner.report()
        if self._saver.round_is_due():
            self._saver.save(pending=True, wait=False)
        self._await_round()

    def _await_round(self) -> None:
        while self._args.eval_every and self._saver.in_round():
            if self._progress.finished.wait(_LOOK_SECONDS):
                return

    def _is_due(self, seconds: float, before: int) -> bool:
        steps = max(1, round(seconds * STEPS_PER_SECOND))
        return seconds > 0 and self._progress.step // steps > before // steps

    def _log(self) -> None:
        self._actor.log_metrics(self)  # type: ignore[arg-type]  # as a server
        self._logs.add(-1, self._service.report({}))
        self._learner.log()
        self._logger.write()

    # --- the end ---------------------------------------------------------------------------------

    def end(self) -> None:
        """Make the updates that are left, and save."""
        self._learner.begin_end(self._progress.step)
        self._learner.finish_replay()
        while self._learner.updates_left() and self._service.can_sample():
            self._learn()
        settle(self._agent)
        self._scores.poll()
        self._log()
        self._saver.save()

    def close(self) -> None:
        for lane in self._lanes:
            for env in lane.envs:
                env.close()
