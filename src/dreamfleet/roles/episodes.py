"""Complete episodes with one policy, in environments that run in processes of their own.

The environments are those of a run (`parallel_env`); instead of the run's actor they call an
`EpisodeServer`. All of them are stepped together, so that the same seeds give the same episodes,
however fast each environment is. Between two rounds they get no reply and wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.api import Arrays, Mode, Player, take_rows
from dreamfleet.errors import DreamfleetError
from dreamfleet.metrics.episodes import Episode, EpisodeStats
from dreamfleet.metrics.evaluations import Played
from dreamfleet.roles.checks import ObservationCheck, Owners, require
from dreamfleet.roles.fences import ids_of
from dreamfleet.roles.invitations import Invited, hooks_of
from dreamfleet.roles.policy_batches import Carries
from dreamfleet.roles.runtime import ActorFailed
from dreamfleet.spaces import RESET, Space, without_logs
from dreamfleet.transport import ArgumentError, BatchServer, Closed, Keys

Group = tuple[int, ...]
"""The ids of the environments that share a process, and a message."""
_TICK_SECONDS = 1.0
MOST_JOINED = 64
"""Environments of machines that have joined, at most: each process may wait in a thread."""


class RoundInterrupted(DreamfleetError):
    """All environments have left in the middle of a round, which is played again."""


class UnknownEnvironment(DreamfleetError):
    """A client sent observations of an environment that is none of the run's."""


def groups_of(ids: Sequence[int], size: int, actors: int = 1) -> list[Group]:
    """Environments by the process that they are in: so many in each, which call the same actor."""
    shares = [[each for each in ids if each % actors == actor] for actor in range(actors)]
    return sorted(
        tuple(mine[start : start + size]) for mine in shares for start in range(0, len(mine), size)
    )


def no_tick() -> None:
    """Shows nothing."""


class EpisodeServer:
    """Serves environments, and plays rounds of complete episodes with them.

    Args:
        address: Where the environments find it.
        groups: All environments, by the process that they are in.
        max_steps: Steps after which an episode is cut short.
        why: Why an environment of a group has failed.
        keys: The run key, for tcp.
        joined: The environments of machines that have joined, in the same way, and who holds them
            now: another machine may get the same ids. A round is played by those that are there
            when it begins; what one that leaves has not played yet is played by the others. Asked
            at every step.
        invited: Who these machines are.
        spaces: The observation; if there is none, the first request tells what it is.
    """

    def __init__(
        self,
        address: str,
        groups: Sequence[Group],
        *,
        max_steps: int,
        why: Callable[[Group], str],
        keys: Keys | None = None,
        joined: Callable[[], Mapping[Group, str]] | None = None,
        invited: Invited | None = None,
        spaces: Mapping[str, Space] | None = None,
    ) -> None:
        self._own, self._joined_now = list(groups), joined
        self._max_steps, self._why = max_steps, why
        self._groups: list[Group] = []  # of this round
        self._places: dict[int, int] = {}
        self._holders: dict[Group, str] = {}  # of those that have joined, in this round
        self._set_groups(self._own)
        self._round: _Round | None = None
        self._changed = threading.Condition()
        self._waiting: dict[Group, _Request] = {}
        self._failures: deque[tuple[Group, str, bool]] = deque()
        self._gone: set[Group] = set()
        self._closed = False
        self._server = BatchServer(address, "evaluation", keys, **hooks_of(invited))
        # Every message is a batch, on a thread that waits for the others. Twice as many threads:
        # one may still wait for a process that was started again meanwhile.
        most = len(self._own) + (MOST_JOINED if joined else 0)
        largest = max([*map(len, self._own), MOST_JOINED if joined else 1])
        owners = Owners(self._server.connected)
        self._server.bind(
            "act",
            self._act,
            batch=1,
            wait=0.0,
            workers=2 * most,
            roles=("env",),
            check=ObservationCheck(spaces, largest, owners, self._check_envs),
        )

    @property
    def address(self) -> str:
        return self._server.address

    def _check_envs(self, envids: NDArray[np.int64], *_: Any) -> None:
        ids = ids_of(envids).tolist()
        try:
            group = self._group_of(ids[0])
        except UnknownEnvironment as problem:
            raise ArgumentError(str(problem)) from None
        require(set(ids) <= set(group), "These are not the environments of one process.")

    def __enter__(self) -> Self:
        self._server.start(block=False)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._server.close()

    def stop(self) -> None:
        """End a round that is under way; from any thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fail(self, group: Group, error: str, *, for_good: bool = False) -> None:
        """A process has ended: its episodes have failed, and if it is not started again, so have
        all that it should have played."""
        with self._changed:
            self._failures.append((group, error, for_good))
            if (request := self._waiting.pop(group, None)) is not None:
                request.given_up = True
            self._changed.notify_all()

    def play(
        self, agent: Player, mode: Mode, episodes: int, tick: Callable[[], None] = no_tick
    ) -> list[Played]:
        """Play so many episodes, shared out evenly.

        Every environment plays its share one after the other. One that has played its share while
        others of its process have not plays on, which does not count.

        Args:
            agent: Acts; it must not be used elsewhere meanwhile.
            mode: How it acts.
            episodes: How many there are, with those that fail.
            tick: Called now and then, also while nothing happens.

        Raises:
            Closed: `stop` was called.
            RoundInterrupted: All environments have left.
        """
        self._begin_round(tick)
        self._round = current = _Round(agent, mode, len(self._places), episodes, self._max_steps)
        while True:
            tick()
            requests = self._wait_for_all(tick, current)
            while self._failures:
                group, error, for_good = self._failures.popleft()
                if for_good:
                    self._gone.add(group)
                for envid in group:
                    current.fail(self._places[envid], error, for_good=for_good)
            if current.over():
                return current.result()
            if requests:
                obs, there = self._stacked(requests)
                for place in current.interrupted(obs, there):
                    current.fail(place, self._why(self._group_at(place)))
                reply = current.step(obs, there)
                if current.over():  # the replies wait until the next round begins
                    return current.result()
                self._reply(requests, reply)

    @property
    def steps(self) -> int:
        """Steps of this round so far, in all environments."""
        return self._round.steps if self._round else 0

    def played(self, group: Group | None = None) -> list[Played]:
        """The episodes of this round so far; of one process, or of all."""
        if self._round is None:
            return []
        ids = self._places if group is None else group
        return [each for envid in ids for each in self._round.played[self._places[envid]]]

    def _set_groups(self, groups: Sequence[Group]) -> None:
        self._groups = list(groups)
        self._places = {envid: n for n, envid in enumerate(e for group in groups for e in group)}

    def _begin_round(self, tick: Callable[[], None]) -> None:
        """Choose who plays: the own environments, and those of machines that are waiting."""
        if self._joined_now is None:
            return
        while True:
            with self._changed:
                if self._closed:
                    raise Closed("The evaluation was ended.")
                joined = self._joined_now()
                there = {group: joined[group] for group in joined if group in self._waiting}
                for group in set(self._waiting) - {*there, *self._own}:
                    self._waiting.pop(group).given_up = True  # its machine has left
                if self._own or there:
                    self._gone.clear()
                    self._failures.clear()
                    self._set_groups([*self._own, *there])
                    self._holders = there
                    return
                self._changed.wait(_TICK_SECONDS)
            tick()

    def _who_left(self, current: _Round) -> None:
        """Let others play what machines have not played that have left."""
        if self._joined_now is None:
            return
        now = self._joined_now()
        left = {group for group, holder in self._holders.items() if now.get(group) != holder}
        left -= self._gone
        if not left:
            return
        self._gone |= left
        for group in left:
            if (request := self._waiting.pop(group, None)) is not None:
                request.given_up = True
        living = [self._places[e] for g in self._groups if g not in self._gone for e in g]
        if not living:
            raise RoundInterrupted("All machines with evaluation environments have left.")
        for group in left:
            for envid in group:
                current.pass_on(self._places[envid], living)
        self._changed.notify_all()

    def _group_at(self, place: int) -> Group:
        envid = list(self._places)[place]
        return next(group for group in self._groups if envid in group)

    def _group_of(self, envid: int) -> Group:
        for groups in (lambda: self._own, self._joined_now or tuple):
            for group in groups():
                if envid in group:
                    return group
        raise UnknownEnvironment(
            f"Environment {envid} is none of the evaluation environments of this run."
        )

    def _act(self, obs: dict[str, Any]) -> tuple[Arrays, None]:
        """What an environment process calls; returns when it is its turn to step."""
        ids = ids_of(obs.pop("envid")).tolist()
        del obs["is_eval"]
        obs.pop("failures", None)
        group = self._group_of(ids[0])
        request = _Request(ids, obs)
        with self._changed:
            if (before := self._waiting.get(group)) is not None:
                before.given_up = True  # that process is gone; this one has taken its place
            self._waiting[group] = request
            self._changed.notify_all()
            while request.reply is None:
                if self._closed or request.given_up:
                    # Environments of another machine may live on: to them the agent is lost.
                    raise ActorFailed("The evaluation is over.")
                self._changed.wait()
            return request.reply, None

    def _wait_for_all(self, tick: Callable[[], None], current: _Round) -> dict[Group, _Request]:
        """The observations of all environments; none if something failed."""
        while True:
            with self._changed:
                if self._closed:
                    raise Closed("The evaluation was ended.")
                if self._failures:
                    return {}
                self._who_left(current)
                living = [group for group in self._groups if group not in self._gone]
                if all(group in self._waiting for group in living):
                    return {group: self._waiting[group] for group in living}
                self._changed.wait(_TICK_SECONDS)
            tick()

    def _stacked(self, requests: dict[Group, _Request]) -> tuple[Arrays, NDArray[np.bool_]]:
        """A row for each environment, and which of them have sent one. The others, which have
        failed, get another's, so that the policy is compiled for one size only."""
        parts = list(requests.values())
        places = np.concatenate([self._places_of(part) for part in parts])
        source = np.zeros(len(self._places), np.intp)
        source[places] = np.arange(len(places))
        there = np.zeros(len(self._places), bool)
        there[places] = True
        keys = parts[0].obs
        return {k: np.concatenate([part.obs[k] for part in parts])[source] for k in keys}, there

    def _reply(self, requests: dict[Group, _Request], reply: Arrays) -> None:
        with self._changed:
            for group, request in requests.items():
                places = self._places_of(request)
                request.reply = {key: value[places] for key, value in reply.items()}
                if self._waiting.get(group) is request:
                    del self._waiting[group]
            self._changed.notify_all()

    def _places_of(self, request: _Request) -> NDArray[np.intp]:
        return np.array([self._places[envid] for envid in request.ids], np.intp)


class _Request:
    """What a process has observed, in some of its environments, and the reply that it waits for."""

    def __init__(self, ids: Sequence[int], obs: dict[str, Any]) -> None:
        self.ids, self.obs = ids, obs
        self.reply: Arrays | None = None
        self.given_up = False


class _Round:
    """The episodes of a round: who plays how many, and what they scored."""

    def __init__(
        self, agent: Player, mode: Mode, count: int, episodes: int, max_steps: int
    ) -> None:
        self._agent, self._mode, self._max_steps = agent, mode, max_steps
        self._places = np.arange(count)
        self._left = [len(range(place, episodes, count)) for place in range(count)]
        self.played: list[list[Played]] = [[] for _ in range(count)]
        """The episodes of each environment."""
        self.steps = 0
        """Steps of all environments together."""
        self._running = np.zeros(count, bool)
        self._steps = np.zeros(count, np.int64)
        self._stats = EpisodeStats()
        self._carries = Carries(agent, count)

    def over(self) -> bool:
        """Whether every environment has played its share."""
        return not any(self._left)

    def result(self) -> list[Played]:
        """All episodes: the first of each environment, then the second of each, and so on."""
        numbered = [
            (number, place, played)
            for place, mine in enumerate(self.played)
            for number, played in enumerate(mine)
        ]
        return [played for _, _, played in sorted(numbered, key=lambda each: each[:2])]

    def interrupted(self, obs: Arrays, there: NDArray[np.bool_]) -> list[int]:
        """Environments that begin an episode in the middle of another one: they have failed."""
        found: list[int] = np.flatnonzero(there & obs["is_first"] & self._running).tolist()
        return found

    def step(self, obs: Arrays, there: NDArray[np.bool_]) -> Arrays:
        """Take an observation of each environment that is there; returns what each does next."""
        first, last = obs["is_first"] & there, obs["is_last"] & there
        self._running |= first
        self._steps = np.where(first, 0, self._steps + there)
        self.steps += int(there.sum())
        cut = self._running & there & ~last & (self._steps >= self._max_steps)
        over = last | cut
        rows = {key: value[there] for key, value in {**obs, "is_last": over}.items()}
        for episode in self._stats.add(self._places[there], rows):
            self._finish(episode, bool(cut[episode.envid]))
        carry, slots = self._carries.take(self._places, first)
        carry, actions, _ = self._agent.policy(carry, without_logs(obs), self._mode)
        # Lanes that wait for others of their environment are in the middle of an episode.
        self._carries.put(slots[there], take_rows(carry, there))
        # Those that still are in an episode of the round before begin a new one.
        reset: NDArray[np.bool_] = over | ~self._running
        self._running &= ~over
        return {**{key: np.asarray(value) for key, value in actions.items()}, RESET: reset}

    def _finish(self, episode: Episode, cut_short: bool) -> None:
        if self._left[episode.envid]:
            self._left[episode.envid] -= 1
            self.played[episode.envid].append(Played(episode, cut_short))

    def pass_on(self, place: int, living: Sequence[int]) -> None:
        """An environment has left, and others play what it has not played yet."""
        for number in range(self._left[place]):
            self._left[living[number % len(living)]] += 1
        self._left[place] = 0
        self._running[place] = False

    def fail(self, place: int, error: str, *, for_good: bool = False) -> None:
        """The next episode of an environment has failed, or all that it has left."""
        count = self._left[place] if for_good else min(1, self._left[place])
        self._left[place] -= count
        self.played[place] += count * [Played(error=error)]
        self._running[place] = False
