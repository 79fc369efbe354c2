"""Complete episodes with one policy, in environments that run in processes of their own.

The environments are those of a run (`parallel_env`); instead of the run's actor they call an
`EpisodeServer`. All of them are stepped together, so that the same seeds give the same episodes,
however fast each environment is. Between two rounds they get no reply and wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.api import Arrays, Mode, Player, take_rows
from dreamfleet.metrics.episodes import EpisodeStats
from dreamfleet.metrics.evaluations import Played
from dreamfleet.roles.checks import ObservationCheck, Owners, require
from dreamfleet.roles.fences import ids_of
from dreamfleet.roles.policy_batches import Carries
from dreamfleet.roles.runtime import ActorFailed
from dreamfleet.spaces import RESET, join_observed, without_logs
from dreamfleet.transport import BatchServer

Group = tuple[int, ...]
"""The ids of the environments that share a process, and a message."""
_TICK_SECONDS = 1.0


def groups_of(ids: Sequence[int], size: int, actors: int = 1) -> list[Group]:
    """Environments by the process that they are in: so many in each, which call the same actor."""
    shares = [[each for each in ids if each % actors == actor] for actor in range(actors)]
    return sorted(
        tuple(mine[start : start + size]) for mine in shares for start in range(0, len(mine), size)
    )


class EpisodeServer:
    """Serves environments, and plays rounds of complete episodes with them.

    Args:
        address: Where the environments find it.
        groups: All environments, by the process that they are in.
        max_steps: Steps after which an episode is cut short.
        why: Why an environment of a group has failed.
    """

    def __init__(
        self,
        address: str,
        groups: Sequence[Group],
        *,
        max_steps: int,
        why: Callable[[Group], str],
    ) -> None:
        self._max_steps, self._why = max_steps, why
        self._group_of = {envid: group for group in groups for envid in group}
        self._places = {envid: place for place, envid in enumerate(self._group_of)}
        self._groups, self._gone = list(groups), dict[Group, str]()  # and those that are given up
        self._round: _Round | None = None
        self._changed = threading.Condition()
        self._waiting: dict[Group, _Request] = {}
        self._server = BatchServer(address, "evaluation")
        # Every message is a batch, on a thread that waits for the others. Twice as many threads:
        # one may still wait for a process that was started again meanwhile.
        self._server.bind(
            "act",
            self._act,
            batch=1,
            wait=0.0,
            workers=2 * len(groups),
            check=ObservationCheck(
                None, max(map(len, groups)), Owners(self._server.connected), self._check_envs
            ),
        )

    @property
    def address(self) -> str:
        return self._server.address

    def __enter__(self) -> Self:
        self._server.start(block=False)
        return self

    def __exit__(self, *error: object) -> None:
        for group in self._groups:
            self.fail(group, "The evaluation is over.", for_good=True)
        self._server.close()

    def fail(self, group: Group, error: str, *, for_good: bool = False) -> None:
        """A process has ended: its episodes have failed, and if it is not started again, so have
        all that it should have played."""
        with self._changed:
            self._drop(group)
            if for_good:
                self._gone[group] = error
            if current := self._round:
                for envid in group:
                    current.fail(self._places[envid], error, for_good=for_good)
            self._changed.notify_all()

    def play(
        self, agent: Player, mode: Mode, episodes: int, tick: Callable[[], None] = lambda: None
    ) -> list[Played]:
        """Play so many episodes, shared out evenly.

        Every environment plays its share one after the other. One that has played its share while
        others of its process have not plays on, which does not count.

        Args:
            agent: Acts; it must not be used elsewhere meanwhile.
            mode: How it acts.
            episodes: How many there are, with those that fail.
            tick: Called now and then, also while nothing happens. What it raises ends the round.
        """
        with self._changed:  # which a wait releases
            self._round = current = _Round(
                agent, mode, len(self._places), episodes, self._max_steps
            )
            for group, error in self._gone.items():
                self.fail(group, error, for_good=True)
            while not current.over():
                tick()
                living = [group for group in self._groups if group not in self._gone]
                if all(group in self._waiting for group in living):
                    self._step(current, [self._waiting[group] for group in living])
                else:
                    self._changed.wait(_TICK_SECONDS)
            return current.result()

    def _step(self, current: _Round, requests: Sequence[_Request]) -> None:
        """Answer the observations of all environments; the last ones of a round are answered when
        the next one begins."""
        obs, there = self._stacked(requests)
        for place in current.interrupted(obs, there):
            envid = list(self._places)[place]
            current.fail(place, self._why(self._group_of[envid]))
        reply = current.step(obs, there)
        if current.over():
            return
        self._waiting.clear()
        for request in requests:
            request.reply.set_result({k: value[request.places] for k, value in reply.items()})

    @property
    def steps(self) -> int:
        """Steps of this round so far, in all environments."""
        return self._round.steps if self._round else 0

    def played(self) -> list[Played]:
        """The episodes of this round so far."""
        return self._round.result() if self._round else []

    def _check_envs(self, envids: NDArray[np.int64], *_: Any) -> None:
        ids = ids_of(envids).tolist()
        group = self._group_of.get(ids[0], ())
        require(set(ids) <= set(group), "These are not the environments of one process.")

    def _act(self, obs: dict[str, Any]) -> tuple[Arrays, None]:
        """What an environment process calls; returns when it is its turn to step."""
        ids = ids_of(obs.pop("envid")).tolist()
        del obs["is_eval"]
        group, request = self._group_of[ids[0]], _Request([self._places[each] for each in ids], obs)
        with self._changed:
            self._drop(group)  # that process is gone; this one has taken its place
            self._waiting[group] = request
            if group in self._gone:
                self._drop(group)
            self._changed.notify_all()
        return request.reply.result(), None

    def _drop(self, group: Group) -> None:
        if (request := self._waiting.pop(group, None)) is not None:
            request.reply.set_exception(ActorFailed("The evaluation is over."))

    def _stacked(self, requests: Sequence[_Request]) -> tuple[Arrays, NDArray[np.bool_]]:
        """A row for each environment, and which of them have sent one. The others, which have
        failed, get another's, so that the policy is compiled for one size only."""
        places = np.concatenate([request.places for request in requests])
        source = np.zeros(len(self._places), np.intp)
        source[places] = np.arange(len(places))
        there = np.zeros(len(self._places), bool)
        there[places] = True
        joined = join_observed([request.obs for request in requests])
        return {key: value[source] for key, value in joined.items()}, there


@dataclass(eq=False)
class _Request:
    """What a process has observed, in some of its environments, and the reply that it waits for."""

    places: list[int]
    obs: dict[str, Any]
    reply: Future[Arrays] = field(default_factory=Future)


class _Round:
    """The episodes of a round: who plays how many, and what they scored."""

    def __init__(
        self, agent: Player, mode: Mode, count: int, episodes: int, max_steps: int
    ) -> None:
        self._agent, self._mode, self._max_steps = agent, mode, max_steps
        self._places = np.arange(count)
        self._left = [len(range(place, episodes, count)) for place in range(count)]
        self._played: list[list[Played]] = [[] for _ in range(count)]  # of each environment
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
        most = max(map(len, self._played))
        return [mine[n] for n in range(most) for mine in self._played if n < len(mine)]

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
            if self._left[episode.envid]:
                self._left[episode.envid] -= 1
                played = Played(episode, bool(cut[episode.envid]))
                self._played[episode.envid].append(played)
        carry, slots, _ = self._carries.take(self._places, first)
        carry, actions, _ = self._agent.policy(carry, without_logs(obs), self._mode)
        # Lanes that wait for others of their environment are in the middle of an episode.
        self._carries.put(slots[there], take_rows(carry, there))
        # Those that still are in an episode of the round before begin a new one.
        reset: NDArray[np.bool_] = over | ~self._running
        self._running &= ~over
        return {**{key: np.asarray(value) for key, value in actions.items()}, RESET: reset}

    def fail(self, place: int, error: str, *, for_good: bool = False) -> None:
        """The next episode of an environment has failed, or all that it has left."""
        count = self._left[place] if for_good else min(1, self._left[place])
        self._left[place] -= count
        self._played[place] += count * [Played(error=error)]
        self._running[place] = False
