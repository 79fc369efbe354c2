"""What the servers of a run accept: the checks of every method's arguments.

A client with a key may send anything. What does not fit what the run itself knows is refused here
with an `ArgumentError`, before it joins a batch or touches anything, so that it costs its sender an
error and no other client anything.

    ObservationCheck   `act` of the actor and of the evaluator, with the `Owners` of environments
    ReplayChecks       the methods of the replay
    CheckedLogger      the methods of the logger
    ReportCheck        what actors of other processes tell the learner

The run knows its spaces, which environments it has and what they are for (`check_ids`), which
joined machine acts in which (`nodes.json`), how many steps it has stored (`StepBound`), which
checkpoints it has, and how far counts may be ahead of what is stored (`steps_ahead`).
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy import vdot
from numpy.typing import NDArray

from dreamfleet.checkpoint import Checkpoint, step_of
from dreamfleet.config import JOINED, JOINED_EVAL, RunConfig
from dreamfleet.positions import POSITIONS_FILE, read_steps
from dreamfleet.replay.schema import PRIORITY, STEPID, STEPID_BYTES
from dreamfleet.roles.addresses import server_name
from dreamfleet.roles.fences import FenceReader, ids_of, incarnations_of
from dreamfleet.roles.spaces_file import read_spaces
from dreamfleet.spaces import (
    FLAGS,
    LOG_PREFIX,
    RESET,
    Space,
    is_image,
    without_logs,
)
from dreamfleet.transport import ArgumentError, Caller, Occupied
from dreamfleet.transport.address import AUTO
from dreamfleet.transport.batching import Request, Signature
from dreamfleet.transport.server import Origin

if TYPE_CHECKING:
    from dreamfleet.roles.logger import Logger

log = logging.getLogger(__name__)

MOST_IDS = 1 << 17
"""Environments of machines that have joined, of one actor, in all."""
_MAGNITUDE = 1e18  # numbers beyond it are nobody's, and their squares overflow a float32
_SLACK = 1e3  # environments leave their bounds a little; this many times their width is absurd
_MOST_LOGS = 1024  # distinct keys that are only logged
_MOST_PLANS = 256
_LONGEST_KEY, _LONGEST_TEXT = 200, 100_000
_MOST_METRICS = 20_000
_MOST_ROWS = 1 << 16  # in a message from the actor
_MOST_STEPS = 10**11
_MOST_FAILURES = 10**9  # of an environment
_FASTEST, _HEAD_START = 10**5, 10**6  # steps a second, and at once, where no step count is known
_ROW_BYTES = 1 << 20  # of what is only logged
_FOREVER = float("inf")


# --- values --------------------------------------------------------------------------------------


def require(condition: bool, text: str) -> None:
    if not condition:
        raise ArgumentError(text)


def _is_whole(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def check_floats(key: str, value: NDArray[Any], low: float, high: float) -> None:
    """Refuse NaN, infinity and numbers outside of the bounds. Minus infinity may mark a missing
    value, except in a reward. Called where numpy does not warn of them."""
    # One product of all values is far quicker than a look at each. It is large, or NaN, if one is.
    most = _squares(value.dtype, low, high)
    if most and vdot(value, value) <= most:
        return
    flat = value.reshape(-1)
    wrong = ~((flat >= low) & (flat <= high))
    if key != "reward":
        wrong &= flat != -np.inf
    if wrong.any():
        example = float(flat[wrong][0])
        raise ArgumentError(f"{key!r} holds {example:g}, which is outside of {low:g} to {high:g}.")


def _squares(dtype: np.dtype[Any], low: float, high: float) -> float:
    """A sum of squares that only numbers within the bounds have; 0 if there is none."""
    near = min(-low, high, 1e9)
    return near * near if near > 0 and dtype.itemsize >= 4 else 0.0


def _float_bounds(space: Space) -> tuple[float, float]:
    """What is not absurd for a space."""
    low, high = float(space.low.min()), float(space.high.max())
    slack = _SLACK * (1 + high - low)
    return max(low - slack, -_MAGNITUDE), min(high + slack, _MAGNITUDE)


def observed(agent: object, args: RunConfig) -> Mapping[str, Space] | None:
    """What an agent observes, as it says itself or as the run's directory has it."""
    spaces: Mapping[str, Space] | None = getattr(agent, "obs_space", None)
    known = None if spaces else read_spaces(args, args.logdir)
    return known[0] if known else spaces


def check_ids(
    args: RunConfig, ids: NDArray[np.int64], is_eval: NDArray[np.bool_] | bool | None
) -> None:
    """Refuse what are not environments that the actors serve, and training or evaluation that is
    not what an environment is for, which follows from its number."""
    joined = bool(args.bind) & (ids >= JOINED) & (ids < 2 * JOINED)
    evaluates = np.where(joined, ids >= JOINED_EVAL, ids >= args.envs)
    fits = (ids >= 0) & (ids < args.all_envs) | joined
    if args.eval_every:  # the evaluator serves them
        fits &= ~evaluates
    if not fits.all():
        raise ArgumentError(f"This run has no environment {ids[~fits][0]} for you.")
    wrong = evaluates != (evaluates if is_eval is None else is_eval)
    if wrong.any():
        what = "evaluation" if evaluates[wrong][0] else "training"
        raise ArgumentError(f"Environment {ids[wrong][0]} is for {what}.")


def check_acting(args: RunConfig) -> CheckEnvs:
    """The check of the environments that call an actor: a machine that was invited has those that
    the supervisor gave to its invitation, and all others are the run's own."""
    fences = FenceReader(args.logdir)

    def check(sent: NDArray[np.int64], is_eval: NDArray[np.bool_], invitation: str) -> None:
        ids, incarnations = ids_of(sent), incarnations_of(sent)
        if not invitation:
            own = (ids < JOINED) & (incarnations == 0)
            require(bool(own.all()), "Environments from there need an invitation.")
        check_ids(args, ids, is_eval)
        if invitation:
            for envid, incarnation in zip(ids.tolist(), incarnations.tolist(), strict=True):
                fence = fences.of(envid)
                given = fence and (fence.invitation, fence.incarnation)
                if given != (invitation, incarnation):
                    # The file may be older here, so it may be tried again.
                    raise Occupied(f"Environment {envid} is not given to {invitation!r}.")

    return check


def _check_column_of_ids(args: RunConfig, envids: Any, is_eval: Any = None) -> int:
    """Refuse what are not the ids of the rows of a message; returns how many rows it has."""
    fits = isinstance(envids, np.ndarray) and envids.dtype == np.int64 and envids.ndim == 1
    require(
        fits and len(envids) <= _MOST_ROWS,
        f"A message has an int64 for each row, which tells its environment, and {_MOST_ROWS} rows "
        "at most.",
    )
    require(
        is_eval is None or type(is_eval) is bool or _is_column(is_eval, len(envids), "b"),
        "Whether steps are of evaluation is a bool, of a message or of each row.",
    )
    check_ids(args, envids, is_eval)
    return len(envids)


def _check_number(source: Any, number: Any) -> None:
    """Refuse what does not tell a message that is sent again from another one."""
    require(type(source) is str and len(source) <= _LONGEST_KEY, "A source is a short text.")
    require(_is_whole(number, 0, 2**62), "The messages of a source are counted from 0.")


# --- steps of the run ----------------------------------------------------------------------------


def steps_ahead(args: RunConfig) -> int:
    """Steps that the actors may have counted and the replay has not stored: several times what
    their queues and messages hold."""
    batch = max(args.policy_batch_of(actor) for actor in range(args.actors))
    most = args.limiter_tolerance + batch + args.envs_per_process
    return 1000 + 64 * args.actors * most


def saved_steps(args: RunConfig) -> int:
    """The highest step of a checkpoint; 0 if there is none."""
    return max(map(step_of, Checkpoint(args.checkpoints).all()), default=0)


def shares_no_directory(args: RunConfig) -> bool:
    """Whether the replay may be on a machine that has another directory: others find it at a fixed
    address, and not by what it has published."""
    return args.remote_replay and AUTO not in args.replay_addr


class StepBound:
    """The most steps that the run can have made by now: those that the replay has noted in its
    file, and what the actors may be ahead.

    Several hosts count together, a run without environments counts updates, and what a replay on
    another machine notes is seen late here. Then the most is what would take an impossible speed.

    Args:
        args: The run.
        known: Steps that its owner knows of.
        clock: Seconds, rising.
    """

    def __init__(self, args: RunConfig, known: int, clock: Callable[[], float]) -> None:
        self._clock, self._start = clock, clock()
        self._path = args.logdir / "ckpt" / "replay" / POSITIONS_FILE
        self._known = max(0, known, saved_steps(args))
        elsewhere = args.remote_replay or args.launcher == "ray"
        self._by_time = args.hosts > 1 or bool(args.offline) or elsewhere
        self._ahead = _HEAD_START if self._by_time else steps_ahead(args)
        self._most = -1

    def check(self, step: Any) -> None:
        require(_is_whole(step, -1, _MOST_STEPS), f"A run has made 0 to {_MOST_STEPS} steps.")
        if step <= self._most:
            return
        made = read_steps(self._path)
        if self._by_time:
            made = max(made, self._known + int(_FASTEST * (self._clock() - self._start)))
        self._most = made + self._ahead
        require(step <= self._most, f"The run has made {made} steps so far, and not {step}.")


# --- observations --------------------------------------------------------------------------------


class _Owner:
    """A client that has environments."""

    __slots__ = ("blocks", "caller", "count", "key", "seen")

    def __init__(self, key: bytes, caller: Caller) -> None:
        self.key, self.caller = key, caller
        self.blocks: set[bytes] = set()  # ids of its requests, to recognise the next one
        self.count = 0
        self.seen = 0.0


class Owners:
    """Which client each environment belongs to: one at a time. A client is a connection, or a key
    that only it knows, which it keeps when it connects again.

    It keeps an environment until its connection ends or was silent for `timeout` seconds. The
    successor has to begin a new episode: nothing continues over a change of owner. A process that
    was killed is succeeded at once, because its machine ends its connections. A machine that
    vanished is noticed by libzmq's heartbeats, after 20 s at most.

    Args:
        connected: Whether a connection is still there.
        timeout: Seconds.
        most_each: Environments of one client.
        most: Environments in all.
        clock: Seconds, rising.
    """

    def __init__(
        self,
        connected: Callable[[bytes], bool],
        timeout: float,
        most_each: int,
        most: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connected, self._timeout, self._clock = connected, timeout, clock
        self._most_each, self._most = most_each, most
        self._owner_of: dict[int, _Owner] = {}
        self._owners: dict[bytes, _Owner] = {}
        self._newest: dict[int, int] = {}  # incarnations of environments of joined machines

    def is_known(self, key: bytes, envids: NDArray[np.int64], marks: bytes = b"") -> bool:
        """Whether the client has sent these environments together before, with the same marks, and
        has them still."""
        owner = self._owners.get(key)
        if owner is None or envids.tobytes() + marks not in owner.blocks:
            return False
        owner.seen = self._clock()
        return True

    def claim(
        self,
        caller: Caller,
        envids: NDArray[np.int64],
        is_first: NDArray[np.bool_],
        *,
        marks: bytes = b"",
        key: bytes = b"",
    ) -> None:
        """Give environments to a client, if no other one has them.

        Args:
            caller: Its connection.
            envids: The environments, with their incarnations.
            is_first: Whether an episode begins, of each.
            marks: What `is_known` is asked with.
            key: What only the client knows; empty for its connection.

        Raises:
            Occupied: Another client has one of them, or had it and no new episode begins, or a
                newer incarnation has acted.
            ArgumentError: There are too many, or one occurs twice.
        """
        ids: list[int] = ids_of(envids).tolist()
        incarnations: list[int] = incarnations_of(envids).tolist()
        require(len(set(ids)) == len(ids), "An environment occurs twice in a request.")
        key = key or caller.connection
        owner = self._owners.get(key) or _Owner(key, caller)
        for envid, incarnation, first in zip(ids, incarnations, is_first.tolist(), strict=True):
            newest = self._newest.get(envid, 0)
            if incarnation < newest:
                raise Occupied(f"A newer start of environment {envid} has taken its place.")
            other = self._owner_of.get(envid)
            if other is None or other is owner or other.caller.connection == caller.connection:
                continue
            if incarnation == newest and self._holds(other):
                raise Occupied(
                    f"Environment {envid} belongs to {other.caller}: two processes with the same "
                    "environments would mix up their episodes. End one of them."
                )
            if not first:
                raise Occupied(
                    f"Environment {envid} belonged to {other.caller} before: begin a new episode."
                )
        mine = sum(self._owner_of.get(envid) is owner for envid in ids)
        self._check_room(owner, len(ids) - mine)
        for envid, incarnation in zip(ids, incarnations, strict=True):
            self._give(envid, owner)
            if incarnation:
                self._newest[envid] = incarnation
        if len(owner.blocks) >= _MOST_PLANS:
            owner.blocks.clear()
        owner.blocks.add(envids.tobytes() + marks)
        owner.seen, owner.caller = self._clock(), caller
        self._owners[key] = owner

    def present(self) -> int:
        """How many environments have a connection that is there. They keep their owners, however
        long they have to wait for an answer."""
        count, now = 0, self._clock()
        for owner in self._owners.values():
            if self._connected(owner.caller.connection):
                owner.seen = now
                count += owner.count
        return count

    def gone(self, envids: Iterable[int]) -> list[int]:
        """Those of these environments that have no connection any more."""
        owners = {envid: self._owner_of.get(envid) for envid in envids}
        return [
            envid
            for envid, owner in owners.items()
            if owner is None or not self._connected(owner.caller.connection)
        ]

    def _holds(self, owner: _Owner) -> bool:
        silence = self._clock() - owner.seen
        return silence <= self._timeout and self._connected(owner.caller.connection)

    def _check_room(self, owner: _Owner, more: int) -> None:
        require(
            owner.count + more <= self._most_each,
            f"A client has {self._most_each} environments at most.",
        )
        if len(self._owner_of) + more > self._most:
            for envid, other in list(self._owner_of.items()):
                if other is not owner and not self._holds(other):
                    self._take(envid, other)
            if len(self._owner_of) + more > self._most:
                raise Occupied(f"There are {self._most} environments, which are the most.")

    def _give(self, envid: int, owner: _Owner) -> None:
        other = self._owner_of.get(envid)
        if other is not owner:
            if other is not None:
                self._take(envid, other)
            self._owner_of[envid] = owner
            owner.count += 1

    def _take(self, envid: int, owner: _Owner) -> None:
        del self._owner_of[envid]
        owner.blocks.clear()
        owner.count -= 1
        if not owner.count:
            self._owners.pop(owner.key, None)


CheckEnvs = Callable[[NDArray[np.int64], NDArray[np.bool_], str], None]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What there is to look at in requests of one signature, which fits the run: by the numbers of
    leaves, their keys and their bounds."""

    signature: Signature
    single: list[tuple[int, str, float, float]]  # numbers, whole or not
    floats: list[tuple[int, str, float, float, float]]  # with the largest sum of squares
    ranges: list[tuple[int, str, int, int]]
    envid: int
    is_first: int
    is_eval: int


class ObservationCheck:
    """The check of `act`: blocks of observations of the run's environments.

    Args:
        spaces: The observation; if there is none, the first request tells what it is.
        most_rows: Observations in a block.
        owners: Told who acts in what.
        check_envs: Refuses environments that the caller does not have; told their ids, whether
            they are for evaluation, and the caller's invitation.
    """

    def __init__(
        self,
        spaces: Mapping[str, Space] | None,
        most_rows: int,
        owners: Owners,
        check_envs: CheckEnvs,
    ) -> None:
        self._most_rows, self._owners, self._check_envs = most_rows, owners, check_envs
        self._spaces: dict[str, Space] = {}
        self._logs: set[str] = set()
        self._plans: dict[int, _Plan] = {}  # by the identity of the signature, which they keep
        if spaces:
            self._adopt(without_logs(spaces))

    def _adopt(self, spaces: Mapping[str, Space]) -> None:
        failures = Space(np.int64, (), 0, _MOST_FAILURES)
        fixed = {"envid": Space(np.int64), "is_eval": Space(bool), "failures": failures}
        self._spaces = {**spaces, **fixed}

    def __call__(self, origin: Origin, request: Request) -> None:
        # Requests that are alike have the same signature, so that only values are left to look at.
        plan = self._plans.get(id(request.signature)) or self._make_plan(request)
        for index, key, low, high in plan.single:
            value = request.leaf(index)
            if not low <= value.item() <= high:
                _refuse(key, value, low, high)
        for index, key, low, high, most in plan.floats:
            # One product of all values is far quicker than a look at each. It is large, or NaN, if
            # one of them is.
            value = request.leaf(index)
            if not (most and vdot(value, value) <= most):
                _refuse(key, value, low, high)
        for index, key, low, high in plan.ranges:
            value = request.leaf(index)
            if value.min() < low or value.max() > high:
                _refuse(key, value, low, high)
        # Last, because nothing may be taken by a request that is refused. The environments of a
        # process do not change from step to step.
        envids, is_eval = request.leaf(plan.envid), request.leaf(plan.is_eval)
        marks = is_eval.tobytes()
        if not self._owners.is_known(origin.peer, envids, marks):
            caller = origin.caller
            self._check_envs(envids, is_eval, caller.name)
            self._owners.claim(caller, envids, request.leaf(plan.is_first), marks=marks)

    def _make_plan(self, request: Request) -> _Plan:
        """Check all of a request but its values.

        Raises:
            ArgumentError: It is no block of observations of this run.
        """
        args, rows = request.args, request.rows
        if len(args) != 1 or type(args[0]) is not dict or not rows:
            raise ArgumentError("'act' takes one block of observations.")
        if rows > self._most_rows:
            raise ArgumentError(f"A block holds {self._most_rows} observations at most.")
        obs: dict[str, NDArray[Any]] = args[0]
        if not self._spaces:
            self._adopt(_spaces_of(obs))
        logs = self._check_keys(frozenset(obs))
        for key, space in self._spaces.items():
            value = obs[key]
            if (
                value.__class__ is not np.ndarray
                or value.dtype != space.dtype
                or value.shape[1:] != space.shape
            ):
                needed = f"{space.dtype}{[*space.shape]}"
                raise ArgumentError(f"{key!r} is {_text(value)}, and has to be {needed}.")
        for key in logs:
            _check_loggable(key, obs[key])
        at = {leaf.path[1]: index for index, leaf in enumerate(request.schema.leaves)}
        places = (at["envid"], at["is_first"], at["is_eval"])
        plan = _Plan(request.signature, [], [], [], *places)
        for key, value in obs.items():
            bounds = _bounds(self._spaces.get(key), value.dtype)
            if bounds is None or not value.size:
                continue
            low, high = bounds
            if value.size == 1:
                plan.single.append((at[key], key, low, high))
            elif value.dtype.kind in "iu":
                plan.ranges.append((at[key], key, int(low), int(high)))
            else:
                plan.floats.append((at[key], key, low, high, _squares(value.dtype, low, high)))
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        self._plans[id(request.signature)] = plan
        return plan

    def _check_keys(self, keys: frozenset[str]) -> list[str]:
        """The keys that are only logged."""
        for key in self._spaces:
            if key not in keys:
                raise ArgumentError(f"The observation lacks {key!r}.")
        more = sorted(keys - self._spaces.keys())
        for key in more:
            require(
                key.startswith(LOG_PREFIX) and len(key) <= _LONGEST_KEY,
                f"The observation holds {key!r:.200}, which the run's environments do not have.",
            )
        require(len(self._logs | set(more)) <= _MOST_LOGS, "There are too many logged keys.")
        self._logs |= set(more)
        return more


def _bounds(space: Space | None, dtype: np.dtype[Any]) -> tuple[float, float] | None:
    """What values of a key have to be within, if there is something to look at; a key without a
    space is only logged."""
    if dtype.kind == "b":
        return None
    if space is None:
        return None if dtype.kind in "iu" else (-_MAGNITUDE, _MAGNITUDE)
    if not space.discrete:
        return _float_bounds(space)
    if space == Space(space.dtype, space.shape):
        return None
    return int(space.low.min()), int(space.high.max()) - 1


@np.errstate(all="ignore")
def _refuse(key: str, value: NDArray[Any], low: float, high: float) -> None:
    """Refuse what is not within its bounds after a closer look."""
    if value.dtype.kind in "iu":
        require(
            bool(value.min() >= low and value.max() <= high),
            f"{key!r} is outside of {low} to {high}.",
        )
    else:
        check_floats(key, value, low, high)


def _spaces_of(obs: Mapping[str, Any]) -> dict[str, Space]:
    """The spaces that a first request tells."""
    for key in FLAGS:
        require(isinstance(obs.get(key), np.ndarray), f"The observation lacks {key!r}.")
    try:
        return {
            key: Space(value.dtype, value.shape[1:])
            for key, value in obs.items()
            if not key.startswith(LOG_PREFIX)
        }
    except Exception as problem:
        raise ArgumentError(f"This is no observation: {problem}") from None


def _check_loggable(key: str, value: Any) -> None:
    if value.__class__ is not np.ndarray or value.dtype.kind not in "biuf":
        raise ArgumentError(f"{key!r} is {_text(value)}, which cannot be logged.")
    if value.nbytes > _ROW_BYTES * len(value):
        raise ArgumentError(f"{key!r} is too large to be logged.")


def _check_log(key: str, value: Any) -> None:
    _check_loggable(key, value)
    if value.dtype.kind == "f":
        check_floats(key, value, -_MAGNITUDE, _MAGNITUDE)


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape[1:])}"
    return type(value).__name__


# --- the replay ----------------------------------------------------------------------------------


class ReplayKnowledge(Protocol):
    """What a replay knows of its run."""

    def stored(self) -> int:
        """Steps of the run; of this shard, if it is not the first."""

    def told(self, shard: int) -> int:
        """Steps that another shard has told of; waits until all have."""

    def most_granted(self) -> int:
        """Sequences that the end of the run may ask for at once."""


class ReplayChecks:
    """The checks of the methods of the replay, under their names.

    Args:
        args: The run.
        known: What the replay knows of it.
        connected: Whether a connection is still there.
    """

    takes_caller = ("add_batch",)
    """Methods whose check is told who calls."""

    def __init__(
        self, args: RunConfig, known: ReplayKnowledge, connected: Callable[[bytes], bool]
    ) -> None:
        self._args, self._known = args, known
        obs, act = read_spaces(args, args.logdir) or ({}, {})
        self._spaces = without_logs({**obs, **act})
        self._protected = {*self._spaces, *FLAGS, RESET}
        self._discrete = {
            key: space
            for key, space in self._spaces.items()
            if space.discrete and space != Space(space.dtype, space.shape)
        }
        self._bounds = {
            key: _float_bounds(space) for key, space in self._spaces.items() if not space.discrete
        }
        most = args.all_envs + MOST_IDS
        self._owners = Owners(connected, _FOREVER, most, most)

    def guard(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, which checks its arguments first; the parts of samples share a check."""
        check = getattr(self, "sample_part" if name.startswith("sample_part") else name, None)
        if check is None:  # it takes no arguments
            return method
        skipped = int(name in self.takes_caller)

        @functools.wraps(check)  # with its signature, by which a server counts arguments
        def checked(*args: Any) -> Any:
            with np.errstate(all="ignore"):
                check(*args)
            return method(*args[skipped:])

        return checked

    def add_batch(
        self,
        caller: Caller,
        steps: Any,
        envids: Any,
        is_eval: Any,
        source: Any,
        seq: Any,
    ) -> None:
        require(type(is_eval) is bool, "Whether steps are of evaluation is a bool.")
        rows = _check_column_of_ids(self._args, envids, is_eval)
        require(type(source) is str and 0 < len(source) <= _LONGEST_KEY, "A source is a name.")
        require(_is_whole(seq, 0, 2**62), "The number of a batch counts from 0.")
        require(type(steps) is dict and len(steps) <= _MOST_LOGS, "Steps are a dict of arrays.")
        for key, value in steps.items():
            if value.__class__ is not np.ndarray or value.shape[:1] != (rows,):
                raise ArgumentError(f"{key!r:.200} has not one row for each environment.")
            space = self._spaces.get(key)
            if space is not None and (value.dtype != space.dtype or value.shape[1:] != space.shape):
                raise ArgumentError(
                    f"{key!r} is {_text(value)}, and has to be {space.dtype}{[*space.shape]}."
                )
            if value.dtype.kind == "f":  # policies and environments leave their bounds a little
                check_floats(key, value, *self._bounds.get(key, (-_MAGNITUDE, _MAGNITUDE)))
            elif key in self._discrete:
                low, high = self._discrete[key].low, self._discrete[key].high
                inside = bool(((value >= low) & (value < high)).all())
                require(inside, f"{key!r} is outside of {low.tolist()} to {high.tolist()}.")
        is_first = steps.get("is_first")
        require(_is_column(is_first, rows, "b"), "'is_first' is missing or wrong.")
        # Last, because nothing may be taken by a message that is refused.
        ids, places = np.unique(envids, return_index=True)
        marks = caller.connection  # of a source that connects again it is another one
        if rows and not self._owners.is_known(source.encode(), ids, marks):
            first = is_first[places]
            self._owners.claim(caller, ids, first, marks=marks, key=source.encode())

    def finished(self, read: Any) -> None:
        require(type(read) is dict and set(read) == {"train", "eval"}, "There are two buffers.")
        for each in read.values():
            require(type(each) in (list, tuple) and len(each) == 2, "An epoch has a tick.")
            fits = type(each[0]) is str and _is_whole(each[1], 0, 2**62)
            require(fits, "An epoch is a name, and a tick counts from 0.")

    def update(self, data: Any) -> None:
        require(type(data) is dict and len(data) <= _MOST_LOGS, "An update is a dict of arrays.")
        stepid = data.get(STEPID)
        if stepid.__class__ is not np.ndarray or stepid.shape[-1:] != (STEPID_BYTES,):
            raise ArgumentError(f"An update needs a {STEPID!r}.")
        for key, value in data.items():
            require(value.__class__ is np.ndarray, f"{key!r:.200} is no array.")
            if key in self._protected or (
                key not in (STEPID, PRIORITY) and is_image(value.dtype, value.shape[2:])
            ):
                raise ArgumentError(
                    f"{key!r} is what an environment sent, and is never changed: an update holds "
                    "what the agent stores with a step, and priorities."
                )

    def raise_position(self, steps: Any) -> None:
        most = max(saved_steps(self._args), self._known.stored())
        if shares_no_directory(self._args):  # and so has no checkpoints
            most = self._args.steps or _MOST_STEPS
        require(_is_whole(steps, 0, most), f"No checkpoint is of a step above {most}.")

    def finish(self, sequences: Any) -> None:
        most = self._known.most_granted()
        require(_is_whole(sequences, 0, most), f"{most} sequences at most are asked for at once.")

    def sample_batch_train(self, known: Any = None) -> None:
        if known is not None:
            self.permit(known)

    def permit(self, known: Any) -> None:
        require(_is_whole(known, 0, 2**62), "Samples are counted from 0.")

    def shares(self, mode: Any) -> None:
        fits = type(mode) is str and mode in ("train", "report", "eval")
        require(fits, "There are batches to train, to report and to evaluate on.")

    def sample_part(self, fresh: Any, drawn: Any, everywhere: Any) -> None:
        require(_is_whole(fresh, 0, _MOST_ROWS), "So many fresh sequences are in no batch.")
        require(_is_whole(everywhere, 0, _MOST_STEPS), "Sequences are counted from 0.")
        fits = isinstance(drawn, (list, tuple)) and len(drawn) <= _MOST_LOGS
        require(
            fits and all(_is_whole(count, 0, _MOST_ROWS) for count in drawn),
            "How many sequences a selector draws is a number for each.",
        )

    def opened(self, shard: Any, steps: Any, size: Any) -> None:
        self.inserted(shard, steps)
        most = 2 * self._args.replay.capacity + _MOST_ROWS
        require(_is_whole(size, 0, most), f"A shard holds 0 to {most} steps.")

    def inserted(self, shard: Any, steps: Any) -> None:
        others = self._args.replay_shards - 1
        require(_is_whole(shard, 0, others), f"The other shards are numbered from 1 to {others}.")
        # A shard tells of each message before it takes the next one.
        most = self._known.told(shard) + 2 * _MOST_ROWS
        require(_is_whole(steps, 0, most), f"Shard {shard} has stored {most} steps at most.")


# --- the learner ---------------------------------------------------------------------------------


class ReportCheck:
    """The check of what actors of other processes tell the learner.

    Args:
        args: The run.
        connected: Whether a connection is still there.
    """

    def __init__(self, args: RunConfig, connected: Callable[[bytes], bool]) -> None:
        self._names = {server_name("actor", number): number for number in range(1, args.actors)}
        self._owners = Owners(connected, _FOREVER, 1, args.actors)

    def __call__(self, caller: Caller, message: Any) -> None:
        """Refuse what is no report."""
        require(type(message) is dict, "A report is a dict.")
        for key in ("actor", "source"):
            value = message.get(key)
            require(type(value) is str and len(value) <= _LONGEST_KEY, f"{key!r} is a short text.")
        for key in ("failures", "env_steps", "present"):
            value = message.get(key)
            counts = type(value) in (int, float) and 0 <= value <= _MOST_STEPS
            require(counts and value == int(value), f"{key!r} counts from 0.")
        for key in ("busy", "reached"):
            require(type(message.get(key)) is bool, f"{key!r} is a bool.")
        number = self._names.get(message["actor"])
        require(number is not None and message["source"], "The run has no such actor.")
        which, new_episode = np.array([number]), np.ones(1, bool)
        self._owners.claim(caller, which, new_episode, key=message["source"].encode())


# --- the logger ----------------------------------------------------------------------------------


class CheckedLogger:
    """The methods of the logger, which check their arguments first."""

    def __init__(
        self, logger: Logger, args: RunConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger, self._args = logger, args
        self._names: set[str] = set()
        self._steps = StepBound(args, logger.step, clock)
        self.status = logger.status

    @np.errstate(all="ignore")
    def tran(
        self,
        step: Any,
        envids: Any,
        is_eval: Any,
        transitions: Any,
        frames: Any,
        source: Any = "",
        number: Any = 0,
    ) -> bool:
        _check_number(source, number)
        require(isinstance(is_eval, np.ndarray), "Whether steps are of evaluation is a bool each.")
        rows = _check_column_of_ids(self._args, envids, is_eval)
        require(type(transitions) is dict and len(transitions) <= _MOST_LOGS, "No transitions.")
        for key in FLAGS:
            kind = "f" if key == "reward" else "b"
            require(_is_column(transitions.get(key), rows, kind), f"{key!r} is missing or wrong.")
        check_floats("reward", transitions["reward"], -_MAGNITUDE, _MAGNITUDE)
        self._check_names(key for key in transitions if key not in FLAGS)
        for key, value in transitions.items():
            if key not in FLAGS:
                require(key.startswith(LOG_PREFIX), f"{key!r:.200} is nothing to log.")
                require(np.shape(value)[:1] == (rows,), f"{key!r} has not a row for each step.")
                _check_log(key, value)
        require(type(frames) is dict and len(frames) <= _MOST_LOGS, "Frames are a dict of images.")
        for key, value in frames.items():
            fits = isinstance(value, np.ndarray) and is_image(value.dtype, value.shape[1:])
            require(fits and len(value) == 1, f"{key!r:.200} is not a single image.")
        self._steps.check(step)
        return self._logger.tran(step, envids, is_eval, transitions, frames, source, number)

    def gone(self, envids: Any, source: Any = "", number: Any = 0) -> None:
        _check_number(source, number)
        _check_column_of_ids(self._args, envids)
        self._logger.gone(envids, source, number)

    def add(self, step: Any, metrics: Any, source: Any = "", number: Any = 0) -> None:
        _check_number(source, number)
        self._check_metrics(metrics)
        self._steps.check(step)
        self._logger.add(step, metrics, source, number)

    def evaluated(self, step: Any, metrics: Any, source: Any = "", number: Any = 0) -> None:
        _check_number(source, number)
        self._check_metrics(metrics)
        for key, value in metrics.items():
            require(type(value) is float, f"{key!r} is not a number.")
            require(key.startswith("eval/"), f"{key!r} is not a metric of an evaluation.")
        score = metrics.get("eval/score", 0.0)
        require(-_MAGNITUDE <= score <= _MAGNITUDE, f"A score of {score:g} is none.")
        require(_is_whole(step, 0, _MOST_STEPS), "A round began at a step of the run.")
        self._steps.check(step)
        self._logger.evaluated(step, metrics, source, number)

    def _check_metrics(self, metrics: Any) -> None:
        require(type(metrics) is dict, "Metrics are a dict.")
        self._check_names(metrics)
        for key, value in metrics.items():
            text = isinstance(value, str) and len(value) <= _LONGEST_TEXT
            number = isinstance(value, (bool, int, float, np.ndarray, np.generic))
            require(text or number, f"{key!r} is neither a number, nor a text, nor an array.")

    def _check_names(self, names: Iterable[str]) -> None:
        """Every name costs memory for the rest of the run."""
        new = [name for name in names if name not in self._names]
        require(all(len(name) <= _LONGEST_KEY for name in new), "The name of a metric is too long.")
        require(len(self._names) + len(new) <= _MOST_METRICS, "There are too many metrics.")
        self._names.update(new)


def _is_column(value: Any, rows: int, kind: str) -> bool:
    return isinstance(value, np.ndarray) and value.shape == (rows,) and value.dtype.kind == kind
