"""What servers of a run accept, beyond the annotations of their methods (`transport.arguments`).

Environments and joined machines are not trusted: an `ObservationCheck` compares what they send
with the run's spaces, before it joins a batch. The run's own roles are trusted once they have shown
their key; `ReplayChecks` only keeps stored steps as they were observed. Each refusal is one
sentence for its sender, and costs other callers nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy import vdot
from numpy.typing import NDArray

from dreamfleet.config import RunConfig
from dreamfleet.replay import SchemaError
from dreamfleet.replay.schema import PRIORITY, STEPID
from dreamfleet.roles.fences import FenceReader, ids_of, incarnations_of, own_fence
from dreamfleet.roles.spaces_file import read_spaces
from dreamfleet.spaces import FLAGS, LOG_PREFIX, RESET, Space, is_image, without_logs
from dreamfleet.transport import ArgumentError, Caller, Occupied
from dreamfleet.transport.batching import Request
from dreamfleet.transport.codec import Schema
from dreamfleet.transport.listening import Origin

Count = Annotated[int, Meta(ge=0, le=2**62)]
Steps = Annotated[int, Meta(ge=0, le=10**11)]
Step = Annotated[int, Meta(ge=-1, le=10**11)]
"""A step of the run; -1 stands for the newest one known."""
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Arrays = dict[str, NDArray[Any]]
CheckEnvs = Callable[[NDArray[np.int64], NDArray[np.bool_], str], None]

_MAGNITUDE = 1e18  # the squares of larger numbers overflow a float32
_SLACK = 1e3  # environments may leave their bounds by this many times their width
_MAX_LOGS, _MAX_KEY, _LOG_BYTES = 1024, 200, 1 << 20  # logged keys, their length, a row
_MAX_PLANS = 256  # kinds of requests, and requests of a client, that are remembered


def require(condition: bool, text: str) -> None:
    if not condition:
        raise ArgumentError(text)


# --- environments --------------------------------------------------------------------------------


def check_acting(args: RunConfig, actor: int = 0) -> CheckEnvs:
    """The check of the environments that call an actor, which are its own: the replay takes the
    steps of an environment from one actor, and another one that sends them ends. A machine that
    was invited has those that the supervisor gave to its invitation, and all others are the run's
    own."""
    fences = FenceReader(args.logdir)

    def check(sent: NDArray[np.int64], is_eval: NDArray[np.bool_], invitation: str) -> None:
        columns = ids_of(sent), incarnations_of(sent), is_eval
        for envid, number, evaluates in zip(*(each.tolist() for each in columns), strict=True):
            require(envid % args.actors == actor, f"Environment {envid} calls another actor.")
            fence = fences.of(envid) if invitation else own_fence(args, envid)
            if fence is None or (fence.invitation, fence.incarnation) != (invitation, number):
                if invitation:  # the file may be older here, so it may be tried again
                    raise Occupied(
                        f"Environment {envid} does not belong to the invitation {invitation!r}."
                    )
                raise ArgumentError(
                    f"Environment {envid} is not one of this run's own, and others need an "
                    "invitation."
                )
            what = "evaluation" if fence.is_eval else "training"
            require(fence.is_eval == evaluates, f"Environment {envid} is for {what}.")
            served = not (evaluates and args.eval_every)
            require(served, f"Environment {envid} calls the evaluator, not the actor.")

    return check


@dataclass(eq=False, slots=True)
class _Owner:
    """A client that has environments."""

    key: bytes
    caller: Caller
    requests: set[bytes] = field(default_factory=set)  # to recognise the next one


class Owners:
    """Which client each environment belongs to: one at a time. A client is a connection, or a key
    that it keeps when it connects again.

    A client keeps an environment until its connection ends: at once if its process was killed,
    after 20 s if its machine vanished. The next owner has to begin a new episode.

    Args:
        connected: Whether a connection is still there.
    """

    def __init__(self, connected: Callable[[bytes], bool]) -> None:
        self._connected = connected
        self._owner_of: dict[int, _Owner] = {}
        self._owners: dict[bytes, _Owner] = {}
        self._newest: dict[int, int] = {}  # incarnations

    def is_known(self, key: bytes, envids: NDArray[np.int64], marks: bytes = b"") -> bool:
        """Whether the client has sent these environments together before, with the same marks, and
        has them still."""
        owner = self._owners.get(key)
        return owner is not None and envids.tobytes() + marks in owner.requests

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
            ArgumentError: One occurs twice.
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
            other = self._owner_of.get(envid, owner)
            if other is owner or other.caller.connection == caller.connection:
                continue
            if incarnation == newest and self._connected(other.caller.connection):
                raise Occupied(
                    f"Environment {envid} belongs to {other.caller}: two processes with the same "
                    "environments would mix up their episodes. End one of them."
                )
            if not first:
                raise Occupied(
                    f"Environment {envid} belonged to {other.caller} before: begin a new episode."
                )
        before = {self._owner_of.get(envid, owner) for envid in ids} - {owner}
        self._owner_of.update(dict.fromkeys(ids, owner))
        self._newest.update(zip(ids, incarnations, strict=True))
        for other in before:
            other.requests.clear()
            if other not in self._owner_of.values():
                del self._owners[other.key]
        if len(owner.requests) >= _MAX_PLANS:
            owner.requests.clear()
        owner.requests.add(envids.tobytes() + marks)
        owner.caller = caller
        self._owners[key] = owner

    def present(self) -> int:
        """How many environments have a connection that is there."""
        owners = self._owner_of.values()
        return sum(self._connected(owner.caller.connection) for owner in owners)

    def gone(self, envids: Iterable[int]) -> list[int]:
        """Those of these environments that have no connection any more."""

        def there(owner: _Owner | None) -> bool:
            return owner is not None and self._connected(owner.caller.connection)

        return [envid for envid in envids if not there(self._owner_of.get(envid))]


# --- observations --------------------------------------------------------------------------------


def observed(agent: object, args: RunConfig) -> Mapping[str, Space] | None:
    """What an agent observes, as it says itself or as the run's directory has it."""
    spaces: Mapping[str, Space] | None = getattr(agent, "obs_space", None)
    known = None if spaces else read_spaces(args, args.logdir)
    return known[0] if known else spaces


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where the values are that have to be looked at, in requests of one schema."""

    bounds: list[tuple[int, str, float, float, Callable[[NDArray[Any]], Any]]]
    """Leaf, key, lowest, highest, and a quick look that finds good values good, or nearly all."""
    envid: int
    is_first: int
    is_eval: int


class ObservationCheck:
    """The check of `act`: blocks of observations of the run's environments.

    Args:
        spaces: The observation; if there is none, the first request tells what it is.
        most_rows: Observations in a block.
        owners: Which client has which environments.
        check_envs: Refuses environments that the caller may not have.
    """

    def __init__(
        self,
        spaces: Mapping[str, Space] | None,
        most_rows: int,
        owners: Owners,
        check_envs: CheckEnvs,
    ) -> None:
        self._most_rows, self._owners, self._check_envs = most_rows, owners, check_envs
        self._spaces = _with_ids(without_logs(spaces)) if spaces else {}
        self._logs: set[str] = set()
        self._plans: dict[Schema, _Plan] = {}

    def __call__(self, origin: Origin, request: Request) -> None:
        # Requests that are alike have the same schema, so only values are left to look at.
        plan = self._plans.get(request.schema) or self._make_plan(request)
        for index, key, low, high, fits in plan.bounds:
            value = request.leaf(index)
            if not (low <= value.item() <= high if value.size == 1 else fits(value)):
                check_values(key, value, low, high)
        # Last, because a request that is refused takes nothing. The environments of a process do
        # not change from step to step.
        envids, is_eval = request.leaf(plan.envid), request.leaf(plan.is_eval)
        marks = is_eval.tobytes()
        if not self._owners.is_known(origin.peer, envids, marks):
            caller = origin.caller
            self._check_envs(envids, is_eval, caller.name)
            self._owners.claim(caller, envids, request.leaf(plan.is_first), marks=marks)

    def _make_plan(self, request: Request) -> _Plan:
        """Check all of a request but its values."""
        args, most = request.args, self._most_rows
        require(len(args) == 1 and type(args[0]) is dict, "'act' takes one block of observations.")
        require(request.rows <= most, f"A block may hold at most {most} observations.")
        obs: dict[str, Any] = args[0]
        self._check_keys(obs)
        at = {leaf.path[1]: index for index, leaf in enumerate(request.schema.leaves)}
        plan = _Plan([], at["envid"], at["is_first"], at["is_eval"])
        for key, value in obs.items():
            space = self._spaces.get(key)
            _check_type(key, value, space)
            bounds = _bounds(space, value.dtype)
            if bounds and value.size:
                plan.bounds.append((at[key], key, *bounds, _quick_look(value.dtype, *bounds)))
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[request.schema] = plan
        return plan

    def _check_keys(self, obs: Mapping[str, Any]) -> None:
        if not self._spaces:
            for key in FLAGS:
                require(key in obs, f"The observation lacks {key!r}.")
            for key, value in obs.items():
                _check_type(key, value, None)
            told = {key: Space(value.dtype, value.shape[1:]) for key, value in obs.items()}
            self._spaces = _with_ids(without_logs(told))
        for key in self._spaces:
            require(key in obs, f"The observation lacks {key!r}.")
        more = obs.keys() - self._spaces.keys()
        for key in more:
            require(
                key.startswith(LOG_PREFIX) and len(key) <= _MAX_KEY,
                f"The observation holds {key!r:.200}, which the run's environments do not have.",
            )
        require(len(self._logs | more) <= _MAX_LOGS, f"At most {_MAX_LOGS} keys may be logged.")
        self._logs |= more


def _with_ids(spaces: Mapping[str, Space]) -> dict[str, Space]:
    return {**spaces, "envid": Space(np.int64), "is_eval": Space(bool)}


def _check_type(key: str, value: Any, space: Space | None) -> None:
    """Refuse what is no array of a space; what has none is only logged."""
    is_array = value.__class__ is np.ndarray
    text = f"{value.dtype}{[*value.shape[1:]]}" if is_array else type(value).__name__
    if space is None:
        fits = is_array and value.dtype.kind in "biuf" and value.nbytes <= _LOG_BYTES * len(value)
        require(fits, f"{key!r} is {text}, which cannot be logged.")
    elif not is_array or value.dtype != space.dtype or value.shape[1:] != space.shape:
        raise ArgumentError(f"{key!r} is {text}, and must be {space.dtype}{[*space.shape]}.")


def _bounds(space: Space | None, dtype: np.dtype[Any]) -> tuple[float, float] | None:
    """What values have to be within, if that is less than all that their dtype holds."""
    if dtype.kind == "f" or (space and not space.discrete):
        low, high = (float(space.low.min()), float(space.high.max())) if space else (0.0, np.inf)
        slack = _SLACK * (1 + high - low)
        return max(low - slack, -_MAGNITUDE), min(high + slack, _MAGNITUDE)
    if space is None or dtype.kind == "b" or space == Space(space.dtype, space.shape):
        return None
    return int(space.low.min()), int(space.high.max()) - 1


def _quick_look(dtype: np.dtype[Any], low: float, high: float) -> Callable[[NDArray[Any]], Any]:
    """Whether values are good, found in one pass where that is possible."""
    near = min(-low, high)
    if dtype.kind == "f" and dtype.itemsize >= 4 and near > 0:  # NaN fits into nothing
        return lambda value: vdot(value, value) <= near * near
    if dtype.kind in "iu" and low == 0:  # those below are large ones without a sign
        unsigned = np.dtype(f"u{dtype.itemsize}")
        return lambda value: value.view(unsigned).max() <= high
    return lambda value: value.min() >= low and value.max() <= high


@np.errstate(all="ignore")
def check_values(key: str, value: NDArray[Any], low: float, high: float) -> None:
    """Refuse NaN, infinity and numbers outside of the bounds. Minus infinity may mark a missing
    value, except in a reward."""
    flat = value.reshape(-1)
    wrong = ~((flat >= low) & (flat <= high))
    if key != "reward" and value.dtype.kind not in "iu":
        wrong &= flat != -np.inf
    if wrong.any():
        example = flat[wrong][0].item()
        raise ArgumentError(f"{key!r} holds {example:g}, which is outside of {low:g} to {high:g}.")


# --- the replay ----------------------------------------------------------------------------------


class ReplayChecks:
    """What keeps stored steps as they were observed: one actor at a time stores the steps of an
    environment, and updates change nothing that it sent."""

    def __init__(
        self,
        args: RunConfig,
        connected: Callable[[bytes], bool],
        add_batch: Callable[..., int],
        update: Callable[..., int],
    ) -> None:
        obs, act = read_spaces(args, args.logdir) or ({}, {})
        self._observed = {*without_logs({**obs, **act}), *FLAGS, RESET}
        self._owners = Owners(connected)
        self._add_batch, self._update = add_batch, update

    def add_batch(
        self,
        caller: Caller,
        steps: Arrays,
        envids: NDArray[np.int64],
        is_eval: bool,
        source: Name,
        seq: Count,
    ) -> int:
        is_first = steps.get("is_first", np.zeros(0))
        if is_first.shape != envids.shape or envids.ndim != 1:
            raise ArgumentError("envids and is_first must have one row for each step.")
        ids, places = np.unique(envids, return_index=True)
        marks = caller.connection  # of a source that connects again it is another one
        if ids.size and not self._owners.is_known(source.encode(), ids, marks):
            first = is_first[places]
            self._owners.claim(caller, ids, first, marks=marks, key=source.encode())
        return _stored(self._add_batch, steps, envids, is_eval, source, seq)

    def update(self, data: Arrays) -> int:
        for key, value in data.items():
            image = key not in (STEPID, PRIORITY) and is_image(value.dtype, value.shape[2:])
            require(
                not image and key not in self._observed,
                f"{key!r} comes from an environment and cannot be updated: send latent states "
                "and priorities only.",
            )
        return _stored(self._update, data)


def _stored(store: Callable[..., int], *args: Any) -> int:
    try:
        return store(*args)
    except SchemaError as problem:
        raise ArgumentError(str(problem)) from None
