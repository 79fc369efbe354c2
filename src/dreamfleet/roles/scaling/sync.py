"""How the learners of all hosts stay in step: each says what it knows, and all decide alike.

Votes are calls to host 0, not collectives of `jax.experimental.multihost_utils`: a call raises when
a host is lost, and a collective hangs.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from dreamfleet.clock import Gather, Vote
from dreamfleet.config import RunConfig
from dreamfleet.roles.scaling.hosts import LOST_SECONDS, read_member, rendezvous_address, run_key
from dreamfleet.transport import Client
from dreamfleet.transport.address import parse

_ON_WAIT_SECONDS = 2.0


class Sync:
    """A single host, which agrees with itself."""

    count, index = 1, 0

    def gather(
        self, name: str, vote: Vote, on_wait: Callable[[list[int]], object] | None = None
    ) -> list[Vote]:
        """The votes of all hosts in their next round of this name; waits for all of them.

        Args:
            name: Of the round.
            vote: This host's.
            on_wait: Called now and then with the hosts that are missing.
        """
        del name, on_wait
        return [vote]

    def channel(self, name: str) -> Gather:
        """`gather` of one name."""
        return partial(self.gather, name)

    def most(self, name: str, value: int) -> int:
        """The largest value of any host."""
        return max(int(vote["value"]) for vote in self.gather(name, {"value": value}))

    def agree(self, name: str, ready: bool) -> bool:
        """Whether all hosts are ready."""
        return all(vote["ready"] for vote in self.gather(name, {"ready": ready}))

    def known_steps(self, step: int, run: Mapping[str, Any]) -> int | None:
        """Steps in the replay of this host, as a checkpoint of this step knows them; None if it
        knows nothing of this host."""
        del run
        return step


class HostSync(Sync):
    """One of several hosts, which meet at host 0."""

    def __init__(self, count: int, index: int, client: Client, token: str) -> None:
        self.count, self.index = count, index
        self._client, self._token = client, token
        self._rounds: dict[str, int] = {}

    def gather(
        self, name: str, vote: Vote, on_wait: Callable[[list[int]], object] | None = None
    ) -> list[Vote]:
        number = self._rounds[name] = self._rounds.get(name, 0) + 1
        key = f"{name}/{number}"
        asked = self._client.gather(key, self.index, self._token, dict(vote))
        while on_wait and not asked.wait(_ON_WAIT_SECONDS):
            if missing := self._client.missing(key).result():
                on_wait(missing)
        found: list[Vote] = asked.result()
        return found

    def known_steps(self, step: int, run: Mapping[str, Any]) -> int | None:
        del step
        return run.get(f"steps/{self.index}")


@contextmanager
def sync_of(args: RunConfig) -> Iterator[Sync]:
    """The hosts of a run, for an agent whose supervisor has met theirs. Several hosts make one set
    of devices; then a failure leaves the process at once, because JAX would wait for the others at
    its end, and they for this one."""
    if args.hosts <= 1:
        yield Sync()
        return
    address = parse(rendezvous_address(args))
    with Client(address.text, "agent-hosts", keys=run_key(args), patience=LOST_SECONDS) as client:
        member = read_member(args, args.host_index)
        assert member is not None  # its supervisor has met those of the others
        sync = HostSync(args.hosts, args.host_index, client, member.token)
        args.agent_type.join_hosts(sync.index, sync.count, sync.channel("agent"), address.host)
        try:
            yield sync
        except Exception:
            if threading.current_thread() is not threading.main_thread():
                raise
            traceback.print_exc()
            logging.shutdown()
            sys.stderr.flush()
            os._exit(1)
