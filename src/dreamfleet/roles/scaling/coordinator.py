"""What holds the shards of a replay together: the run's counts, and the one limiter.

It lives in the process of the first shard. A shard that has stored steps tells the coordinator and
waits for its reply, so inserts into all shards are held back by one limiter. A learner asks it for
each batch before it draws from the shards. A replay of one shard has one, too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.replay import RateLimitedError, SamplesPerInsert
from dreamfleet.replay.positions import Positions
from dreamfleet.roles.checks import Count, Steps
from dreamfleet.roles.runtime import POLL_SECONDS
from dreamfleet.transport import Client, Unanswered

log = logging.getLogger(__name__)

_LIMITER_TIMEOUT = 1.0


def wait_unless(stop: threading.Event, wait: Callable[[float], bool]) -> None:
    """Wait for something, a moment at a time; a process that is asked to stop answers nothing."""
    while not wait(POLL_SECONDS):
        if stop.is_set():
            raise Unanswered("The replay is being closed.")


class ReplayCoordinator:
    """The counts and the limiter of a run, as methods that shards and the learner call. Before the
    coordinator has heard from every shard, all of them wait."""

    def __init__(
        self,
        limiter: SamplesPerInsert,
        positions: Positions,
        args: RunConfig,
        stop: threading.Event,
    ) -> None:
        self._limiter, self._positions, self._stop = limiter, positions, stop
        self._batch_size, self._window = args.host_batch, args.window
        self._shards = range(args.replay_shards)
        self._complete = threading.Event()
        self._waiting: dict[str, str] = {}
        # What the limiter has counted of each shard. Both change under the limiter's lock.
        self._counted = [0 for _ in self._shards]
        self._sizes = [0 for _ in self._shards]

    def begin(self, steps: Sequence[int], sizes: Sequence[int]) -> None:
        """Every shard has said how many steps of the run it has stored so far, and how many steps
        it holds now, from wherever they came: recover the limiter, and let calls in."""
        with self._limiter.lock:
            self._sizes = list(sizes)
            for shard in self._shards[1:]:
                self._positions.heard(shard, steps[shard])
            self._recover()
        self._complete.set()

    def _recover(self) -> None:
        """What the limiter owes follows from the counts."""
        size = sum(self._sizes)
        self._counted = [self._positions.of(shard) for shard in self._shards]
        self._limiter.start(size, self._positions.owed(self._limiter, size))

    # --- for shards ------------------------------------------------------------------------------

    def opened(self, shard: Count, steps: Steps, size: Count) -> int:
        """A shard that was started again holds this; returns the most steps it was ever heard to
        have. What its predecessor stored and did not tell is known from now on; the limiter counts
        it with the shard's next steps."""
        self._check(shard)
        self._wait_for_all()
        with self._limiter.lock:
            known = self._positions.heard(shard, steps)
            self._sizes[shard] = size
            held = sum(self._sizes)
            if held < self._limiter.minsize <= self._limiter.size:
                log.warning(
                    "Shard %d of the replay came back with %d steps, and all shards together "
                    "hold %d: learning waits until there are %d again.",
                    *(shard, size, held, self._limiter.minsize),
                )
                self._recover()
        return known

    def inserted(self, shard: Count, steps: Steps) -> None:
        """Note how many steps a shard has stored by now, then wait while samples are behind.

        Told again, or by a shard that was killed meanwhile, nothing is counted twice.
        """
        self._check(shard)
        self._wait_for_all()
        if shard:
            self._positions.heard(shard, steps)

        def count() -> None:
            with self._limiter.lock:
                if self._counted[shard] < steps:
                    self._limiter.insert(0, _LIMITER_TIMEOUT, "collecting")  # once it is allowed
                    new = self._positions.of(shard) - self._counted[shard]
                    self._counted[shard] += new
                    self._sizes[shard] += new
                    self._limiter.insert(new)

        self._wait(f"actor/{shard}", count)

    # --- for the learner -------------------------------------------------------------------------

    def permit(self, known: Count) -> int:
        """Wait until a learner that knows of this many samples may have a batch from the shards;
        returns how many samples there are with it.

        A question whose answer was lost is asked again, and counted once. One that knows another
        number is told the right one, and has no batch.
        """
        self._wait_for_all()
        if known == self._positions.samples:
            sample = partial(self._limiter.sample, self._batch_size, _LIMITER_TIMEOUT, "training")
            self._wait("learner", sample)
            self._positions.sampled(self._batch_size)
        return self._positions.samples

    def position(self) -> dict[str, int]:
        """The run's durable counts."""
        self._wait_for_all()
        return {"steps": self._positions.steps, "samples": self._positions.samples}

    def raise_position(self, steps: Steps) -> dict[str, int]:
        """The run has made at least this many steps, as a checkpoint of the agent knows."""
        self._wait_for_all()
        self._limiter.reopen()
        with self._limiter.lock:
            self._counted[0] += self._positions.raise_to(steps)
        return self.position()

    def finish(self, sequences: Count) -> bool:
        """The actor has stopped: take all steps that are left, and let at least this many sequences
        be sampled. May be repeated. Returns whether there are enough steps to sample from."""
        self._wait_for_all()
        self._limiter.finish(sequences)
        return self._limiter.can_sample()

    def grant(self, sequences: Count) -> bool:
        """Let at least this many sequences be sampled before the run acts (`pretrain`), which no
        steps have earned. May be repeated. Returns whether there are enough steps to sample
        from."""
        self._wait_for_all()
        with self._limiter.lock:
            self._positions.granted(self._limiter.grant(sequences))
        return self._limiter.can_sample()

    # --- the rest --------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """What the limiter allows."""
        return {"limiter/avail": self._limiter.avail, "limiter/size": float(self._limiter.size)}

    def waits(self, sequences: int) -> str:
        """Why actors and learner wait, if there are so many sequences; empty if they do not."""
        reasons = [reason.rstrip(".") for reason in list(self._waiting.values())]
        if not sequences and self._limiter.can_sample():
            # Environments that have joined share the steps, and none has made enough of them.
            reasons.append(
                f"training waits for a first sequence: no environment has made {self._window} "
                "steps in a row yet"
            )
        return "; ".join(dict.fromkeys(filter(None, reasons)))

    def _check(self, shard: int) -> None:
        if shard not in self._shards:
            raise ConfigError(
                f"There is no shard {shard} in a replay of {len(self._shards)}: start the process "
                "with the run's config.json."
            )

    def _wait_for_all(self) -> None:
        wait_unless(self._stop, self._complete.wait)

    def _wait(self, who: str, attempt: Callable[[], None]) -> None:
        """Try until the limiter allows it. Each attempt times out, to say why it waits and to
        notice that the process is asked to stop."""
        while True:
            try:
                attempt()
            except RateLimitedError as reason:
                self._waiting[who] = str(reason)
                if self._stop.is_set():
                    raise Unanswered("The replay is being closed.") from None
            else:
                self._waiting[who] = ""
                return


class RemoteCoordinator:
    """The coordinator, as another shard sees it. Calls last as long as it is away."""

    def __init__(self, client: Client, stop: threading.Event) -> None:
        self._client, self._stop = client, stop

    def opened(self, shard: int, steps: int, size: int) -> int:
        return int(self._ask("opened", shard, steps, size))

    def inserted(self, shard: int, steps: int) -> None:
        self._ask("inserted", shard, steps)

    def _ask(self, method: str, *args: int) -> Any:
        answer = self._client.call(method, *args)
        wait_unless(self._stop, answer.wait)
        return answer.result()


Coordinator = ReplayCoordinator | RemoteCoordinator
"""What a shard needs of the coordinator: `opened` and `inserted`."""
