"""The environment role: steps environments with the actions that the actor sends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.config import PROGRESS_STEPS, RunConfig
from dreamfleet.envs.base import EnvCrashedError, NotFiniteError, UnknownTaskError, noop
from dreamfleet.roles.addresses import find_server
from dreamfleet.roles.fences import fenced
from dreamfleet.roles.health import Health, health_path
from dreamfleet.roles.runtime import (
    ActorFailed,
    Factory,
    await_server,
    backoff,
    end_process_after,
    stop_event,
    takes,
    unpack,
    user_code,
    when_stopped,
)
from dreamfleet.spaces import RESET, without_reset
from dreamfleet.transport import (
    Block,
    Client,
    Closed,
    Disconnected,
    Future,
    Occupied,
    RemoteError,
    renew,
)
from dreamfleet.transport.slab import Allocate

log = logging.getLogger(__name__)

_PAUSE = 1.0
_REFUSED_SECONDS = 60.0  # a machine that vanished holds its environments for 20 s at most
_TRACEBACKS = 3


def parallel_env(
    make_env: Factory,
    envid: int | Sequence[int],
    args: RunConfig,
    is_eval: bool = False,
    in_run: bool = True,
    incarnation: int = 0,
) -> None:
    """Run one environment, or several together, until the process is asked to stop.

    Environments share a message with their observations, and are stepped together. With `env_lanes`
    they are split into so many groups, each with a message of its own: while the observations of
    one group are on their way to the agent and its actions back, the others are stepped.

    An environment that raises loses its own episode and is built again, while the others go on; see
    `RestartedEnv`. One whose step takes longer than `env_timeout` ends the process, which the
    supervisor restarts.

    When the connection to the agent is lost, environments whose observations are on their way give
    their episodes up and are reset as soon as it is back: it may not have received them.

    Args:
        make_env: Called with an environment's id, returns the environment. If it takes `attempt`,
            it is told how often this environment was built before, so that another seed can be
            used.
        envid: Unique in the run; several share a process.
        args: The run.
        is_eval: Whether the data is for evaluation.
        in_run: Whether it is a part of a run, whose settings can be changed.
        incarnation: On a joined machine: the number of this start, see `roles.fences`.

    Raises:
        EnvCrashedError: An environment failed more often than `max_restarts`, without progress, or
            returned NaN and `on_nan` is `stop`.
        UnknownTaskError: This machine does not have the task.
    """
    ids = [envid] if isinstance(envid, int) else list(envid)
    stop = stop_event(exit_process=True)
    health = Health(health_path(args, f"env-{ids[0]}"))
    with user_code:
        make = unpack(make_env)
    watchdog = Watchdog(args.env_timeout)
    restarted = partial(RestartedEnv, args=args, health=health, watchdog=watchdog, in_run=in_run)
    count = args.env_lanes if in_run else 1  # an evaluation steps all environments together
    lanes = make_lanes(make, ids, restarted, is_eval, count, incarnation)
    envs = [env for lane in lanes for env in lane.envs]
    for env in envs:
        env.build()
    watchdog.pause()
    # `env_workers` puts those of one actor together.
    server = find_server(args, "actor", ids[0] % args.actors)
    with Client(server, f"env-{ids[0]}", len(lanes), keys=args.run_keys) as client:
        when_stopped(partial(client.close, 0.0))  # which ends the wait for a reply
        try:
            await_server(client.connect, "the agent")
            _step_all(lanes, client, stop, watchdog, health)
        except Closed:
            if not stop.is_set():
                raise
        finally:
            watchdog.pause()
            for env in envs:
                env.close()


def _step_all(
    lanes: Sequence[Lane],
    client: Client,
    stop: threading.Event,
    watchdog: Watchdog,
    health: Health,
) -> None:
    envs = [env for lane in lanes for env in lane.envs]
    while not stop.is_set():
        for lane in lanes:
            if lane.may_step():
                health.stepped(lane.step(client))
                health.now("waiting")
        # Those that failed are built while the agent chooses actions for the others.
        for env in envs:
            if not env.built and time.monotonic() >= env.due:
                env.build()
        watchdog.reset()  # from here on it is the agent that takes long, not an environment
        pause = watchdog.interval or _PAUSE
        replies = [lane.reply for lane in lanes if lane.reply is not None]
        if len(replies) < len(lanes):
            due = min(lane.due for lane in lanes if lane.reply is None)
            pause = max(0.0, min(due - time.monotonic(), pause))
        if replies:
            client.wait_any(replies, pause)
        else:
            stop.wait(pause)


def make_lanes(
    make: Callable[..., Any],
    ids: Sequence[int],
    restarted: Callable[..., RestartedEnv],
    is_eval: bool,
    count: int = 1,
    incarnation: int = 0,
) -> list[Lane]:
    """Environments, each `restarted`, in so many groups of nearly the same size; in fewer, if there
    are fewer. If the task is vectorised, each group is one environment."""
    with user_code:
        vectorised = getattr(make, "vectorised", lambda: False)()

    def lane(first: int, end: int) -> Lane:
        mine = ids[first:end]
        if vectorised:
            envs = [restarted(partial(make, lanes=len(mine)), ids[first])]
        else:
            envs = [restarted(make, each) for each in mine]
        return Lane(envs, mine, is_eval, vectorised, incarnation)

    count = min(count, len(ids))
    bounds = [len(ids) * part // count for part in range(count + 1)]
    return [lane(first, end) for first, end in pairwise(bounds)]


class Lane:
    """Environments that are stepped together, and share a message with their observations.

    Args:
        envs: The environments, or a single one that is vectorised.
        ids: Their ids.
        is_eval: Whether the data is for evaluation.
        vectorised: Whether observations and actions of the only environment have an axis of ids.
        incarnation: What they send with their ids.
    """

    def __init__(
        self,
        envs: Sequence[RestartedEnv],
        ids: Sequence[int],
        is_eval: bool,
        vectorised: bool = False,
        incarnation: int = 0,
    ) -> None:
        self.envs, self.ids, self._vectorised = envs, ids, vectorised
        self._block = ObservationBlock(fenced(ids, incarnation), is_eval)
        self.actions: list[Any] = [None] * len(envs)
        """What each environment does next; None resets."""
        self._sent: list[int] = []  # the rows whose observations are on their way
        self.reply: Future | None = None
        """What the agent will answer; None if it was not asked."""
        self.due = 0.0
        """When to step without an answer, on the monotonic clock."""
        self._refused_since: float | None = None

    def may_step(self) -> bool:
        """Whether the answer is here; without a question, whether it is time."""
        return time.monotonic() >= self.due if self.reply is None else self.reply.done()

    def step(self, client: Client) -> int:
        """Take the actions of the answer, if there is one, and send the next observations; returns
        how many."""
        if self.reply is not None and not self.take():
            return 0
        self._block.begin(client.memory)
        obs = self._observe()
        if obs is not None:
            self.reply = client.call_block("act", obs)
        else:
            self.due = min((env.due for env in self.envs if not env.built), default=0.0)
        return len(self._sent)

    def _observe(self) -> dict[str, NDArray[Any]] | None:
        """Step the environments; returns what they observe, None if nothing."""
        self._sent = []
        for row, (env, action) in enumerate(zip(self.envs, self.actions, strict=True)):
            obs = env.step(action)
            if obs is None:
                continue
            self._block.put(slice(None) if self._vectorised else row, obs)
            self._sent += env.present if self._vectorised else [row]
        self.actions = [None] * len(self.envs)
        return self._block.rows(self._sent)

    def _act(self, actions: dict[str, NDArray[Any]]) -> None:
        """Take the actions of the rows whose observations were sent."""
        if not self._vectorised:
            for row, place in enumerate(self._sent):
                self.actions[place] = {key: value[row] for key, value in actions.items()}
            return
        if len(self._sent) < len(self.ids):
            size, given = len(self.ids), actions
            actions = {k: np.zeros((size, *v.shape[1:]), v.dtype) for k, v in given.items()}
            for key, value in actions.items():
                value[self._sent] = given[key]
        self.actions = [actions]

    def take(self) -> bool:
        """Take the answer; returns whether the next step may be made at once."""
        future, self.reply = self.reply, None
        assert future is not None
        self.due = 0.0
        try:
            actions = future.result()
        except Disconnected as error:
            ids = ", ".join(map(str, self.ids))
            log.warning("The agent is lost, environments %s are reset: %s", ids, error)
        except RemoteError as error:
            if error.kind == Occupied.__name__:
                self._on_occupied(error)
            elif error.kind != ActorFailed.__name__:
                raise
            # Else the agent process is about to end, and is restarted.
            self.due = time.monotonic() + _PAUSE
            return False
        else:
            self._refused_since = None
            self._act(actions)
        return True

    def _on_occupied(self, error: RemoteError) -> None:
        """The environments belong to the process before this one, whose connection has not ended
        yet, or to a second one that should not be there."""
        now = time.monotonic()
        if self._refused_since is None:
            log.warning("%s", error)
            self._refused_since = now
        elif now - self._refused_since > _REFUSED_SECONDS:
            raise error


class RestartedEnv:
    """An environment that is built again when it fails.

    The step that failed is not sent. The next observation is the first of a new episode, by which
    the replay knows that the episode before was cut short, and stores it so. After NaN or infinity
    (`on_nan`) the environment is reset; it is built again if the reset fails, too.

    A failure counts as one without progress until the environment has finished an episode or made
    `PROGRESS_STEPS` steps. The second and later ones in a row wait before the next attempt, twice
    as long each time."""

    def __init__(
        self,
        make: Callable[..., Any],
        envid: int,
        args: RunConfig,
        health: Health,
        watchdog: Watchdog,
        in_run: bool = True,
    ) -> None:
        self._in_run = in_run
        self._make, self._envid, self._args = make, envid, args
        self._health, self._watchdog = health, watchdog
        self._takes_attempt = takes(make, "attempt")
        self._attempt = 0
        self._env: Any = None
        self._reset_action: Any = None
        self._vectorised = False
        self._all: Callable[[Any], Any] = bool
        self._any: Callable[[Any], Any] = bool  # of a flag: numpy takes long for a single one
        self._episode_steps = self._steps = 0
        self._in_a_row = 0
        self.due = 0.0
        """When it may be built again, on the monotonic clock."""
        self.failures = 0
        """In the life of this process."""

    @property
    def built(self) -> bool:
        return self._env is not None

    def build(self) -> None:
        """Try to make the environment."""
        again = {"attempt": self._attempt} if self._attempt and self._takes_attempt else {}
        self._attempt += 1
        self._watchdog.reset(now=True)
        self._health.now("building", self._envid)
        try:
            with user_code:
                env = self._make(self._envid, **again)
            self._reset_action = getattr(env, "reset_action", None)  # of lanes
            self._vectorised = self._reset_action is not None
            if self._vectorised:
                self._all, self._any = np.all, np.any  # of the lanes
            else:
                self._reset_action = noop(without_reset(env.act_space))
            self._env = env
        except UnknownTaskError:
            self._health.give_up()  # this machine does not have its package, nor will it in a while
            raise
        except Exception as error:
            self._failed(error)
        finally:
            self._health.now("waiting")

    def step(self, action: Any) -> Any:
        """The next observation; None if there is none because the environment has failed.

        Args:
            action: What to do; None resets.
        """
        if self._env is None:
            return None
        self._watchdog.reset()
        reset = action is None or self._all(action[RESET])
        self._health.now("resetting" if reset else "stepping", self._envid)
        self._episode_steps = 0 if reset else self._episode_steps + 1
        try:
            with user_code:
                obs = self._env.step(self._reset_action if action is None else action)
            last = self._any(obs["is_last"])
        except Exception as error:
            self._failed(error, rebuild=reset or not isinstance(error, NotFiniteError))
            return None
        if self._vectorised and (found := self._env.not_finite):  # in some lanes
            self._failed(found, rebuild=False)
        self._steps += 1
        if last or self._steps % PROGRESS_STEPS == 0:
            self._in_a_row = 0
            self._health.progress()
        return obs

    @property
    def present(self) -> list[int]:
        """The rows of a vectorised environment that have an observation."""
        rows: list[int] = np.flatnonzero(self._env.present).tolist()
        return rows

    def close(self) -> None:
        """Close the environment. An error of it is only logged: it is not needed any more."""
        env, self._env = self._env, None
        if close := getattr(env, "close", None):  # which an environment need not have
            self._health.now("closing", self._envid)
            try:
                close()
            except Exception as error:
                log.warning("Closing environment %d failed: %r", self._envid, error)

    def _failed(self, error: Exception, *, rebuild: bool = True) -> None:
        """Note a failure, after which the environment is built again or only reset. Ends all of
        them if there were too many in a row, or if the run wants it so."""
        args, who = self._args, f"environment {self._envid}"
        not_finite = isinstance(error, NotFiniteError)
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, NotFiniteError):
            what = (
                f"{error.key!r} holds NaN or infinity at step {self._episode_steps} of an episode"
            )
            if args.on_nan == "stop":
                self._health.give_up(not_finite=True)
                raise EnvCrashedError(
                    f"{what} of {who}. The run ends because on_nan is stop: make the environment "
                    "return finite numbers, or set on_nan to end, which ends only the episode."
                ) from error
        elif args.on_failure == "stop":
            raise error
        self.failures += 1
        self._in_a_row += 1
        self._steps = 0
        what = " ".join(what.split())
        text = f"{what} of {who}" if not_finite else f"{who}: {what}"
        self._health.failed(text, error)
        log.warning(
            "%s (failure %d of this environment; its episode is cut short)",
            text,
            self.failures,
            exc_info=error if self.failures <= _TRACEBACKS else None,
        )
        if self._in_a_row > args.max_restarts:
            self._health.give_up()
            more = f", or raise max_restarts (now {args.max_restarts})" if self._in_run else ""
            raise EnvCrashedError(
                f"Environment {self._envid} failed {self._in_a_row} times and neither finished an "
                f"episode nor made {PROGRESS_STEPS} steps in between; the last time it was "
                f"{what.rstrip('.')}. Fix it{more}."
            ) from error
        if rebuild:
            self._watchdog.reset(now=True)
            self.close()
            self.due = time.monotonic() + backoff(max(0, self._in_a_row - 1))


class ObservationBlock:
    """The observations of several environments as arrays with a row for each, allocated once."""

    def __init__(self, ids: Sequence[int], is_eval: bool) -> None:
        self._size = len(ids)
        self._fixed = {
            "envid": np.array(ids, np.int64),
            "is_eval": np.full(self._size, is_eval),
        }
        self._block: Block | None = None
        self._keys: list[str] = []  # of what is observed

    def begin(self, allocate: Allocate) -> None:
        """Have the next observations written where they are sent from, if there is such memory."""
        if self._block is not None:
            renew(self._block, allocate, self._fixed)

    def put(self, row: int | slice, obs: Mapping[str, Any]) -> None:
        """Write the observation of one environment, or all rows of a vectorised one."""
        if self._block is None:
            drop = 0 if isinstance(row, int) else 1
            first = {key: np.asarray(value) for key, value in obs.items()}
            shapes = {key: (self._size, *value.shape[drop:]) for key, value in first.items()}
            arrays = {key: np.zeros(shapes[key], value.dtype) for key, value in first.items()}
            self._block = Block({**self._fixed, **arrays})
            self._keys = list(arrays)
        for key in self._keys:
            self._block[key][row] = obs[key]

    def rows(self, present: Sequence[int]) -> dict[str, NDArray[Any]] | None:
        """The rows that were written, in the order of their ids; None if there are none."""
        if not present or self._block is None:
            return None
        if len(present) == self._size:
            return self._block
        return {key: value[present] for key, value in self._block.items()}


class Watchdog:
    """Ends this process, with its tracebacks in the log, when it was not reset for a while.

    The timer is a thread of the interpreter that needs no lock of it, so that code that hangs in C
    is ended too. Setting the timer costs a thread, so it is set only now and then. Outside of the
    main thread, where the process holds more than what is watched, nothing is done.

    Args:
        seconds: The timeout; 0 for none.
    """

    _PARTS = 10

    def __init__(self, seconds: float) -> None:
        main = threading.current_thread() is threading.main_thread()
        self._seconds = seconds if main else 0.0
        self._next = 0.0

    @property
    def interval(self) -> float | None:
        """Seconds to wait for others at most before the next reset; None for no limit."""
        return self._seconds / self._PARTS if self._seconds else None

    def reset(self, *, now: bool = False) -> None:
        """Start the timeout again; with `now` exactly now, otherwise up to a tenth later."""
        if not self._seconds:
            return
        time_now = time.monotonic()
        if time_now >= self._next or now:
            self._next = time_now + self._seconds / self._PARTS
            # Longer by a part: resets within the interval do not set the timer.
            end_process_after(self._seconds * (1 + 1 / self._PARTS))

    def pause(self) -> None:
        """Stop watching until the next reset."""
        if self._seconds:
            end_process_after(0.0)
            self._next = 0.0
