"""How the supervisors of several hosts watch each other, and end a run together.

All hosts share the run's directory. Each says there what becomes of it (`Member`), and beats in its
own directory (`dreamfleet.fleet.claim`). A host that is silent or has failed ends the run on all
hosts, with a sentence that names it. Silence is counted in beats that this host sees of itself, so
a shared directory that is away for a while makes no host look lost.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple

from dreamfleet import __version__
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.fleet.claim import BEAT_SECONDS, BeatWatch, claim_directory, is_claimed
from dreamfleet.fleet.supervisor import FleetError, Say, Supervisor, without_output
from dreamfleet.roles.runtime import sigterm_interrupts
from dreamfleet.roles.scaling.hosts import (
    LOST_SECONDS,
    How,
    Member,
    Rendezvous,
    host_folder,
    read_member,
    served_rendezvous,
    write_member,
)
from dreamfleet.settings import Mark

_SILENCE = f"it has been silent for {LOST_SECONDS:g} s"
_LOST_BEATS = LOST_SECONDS / BEAT_SECONDS
_LOOK_SECONDS = 0.25
_GOODBYE_SECONDS = 30.0


class End(NamedTuple):
    """How the run ends on all hosts, with a sentence that names the host that it is because of."""

    how: How
    sentence: str = ""
    host: int = -1


class Membership:
    """This host among the others. Agents vote in the rendezvous of host 0, and hear there of the
    end. `last_beat` tells when a host was last seen to beat; None to look."""

    def __init__(
        self,
        config: RunConfig,
        rendezvous: Rendezvous | None = None,
        last_beat: Callable[[int], float] | None = None,
    ) -> None:
        self._config, self._rendezvous = config, rendezvous
        indices = range(config.hosts)
        watches = [BeatWatch(host_folder(config, index)) for index in indices]
        self._last_beat = last_beat or (lambda index: watches[index].last())
        self._seen = dict.fromkeys(indices, float("-inf"))  # the last beat of each host
        self._beats = dict.fromkeys(indices, 0)  # how many were seen
        self._silence = dict.fromkeys(indices, 0)  # beats of this host since then
        self._me = Member(os.urandom(8).hex(), socket.gethostname(), shared_settings(config))
        self._members: dict[int, Member] = {}
        self._failure: tuple[int, dict[int, int]] | None = None
        self._end = End("")
        self._lock = threading.RLock()
        self._left = threading.Event()

    def enter(self, say: Say) -> None:
        """Return when all hosts are there, or raise a `ConfigError` if this one does not fit."""
        said, index, count = "", self._config.host_index, self._config.hosts
        while missing := self.missing():
            line = (
                f"Host {index} of {count} waits for host {', '.join(map(str, missing))}: start the "
                "same command there with its --host-index, or end this one and resume with fewer "
                "--hosts"
            )
            if line != said:
                said = line
                say(said)
            time.sleep(_LOOK_SECONDS)
        say(f"All {count} hosts are there; this is host {index}")

    def missing(self) -> list[int]:
        """The hosts that are not there, or have not met all others yet."""
        self._look()
        there = {
            index: member
            for index, member in self._members.items()
            if self._beats[index] and self._silence[index] <= _LOST_BEATS and not member.how
        }
        mine, first = self._me.settings, there[0].settings if 0 in there else self._me.settings
        for name in sorted({*first, *mine}):
            if first.get(name) != mine.get(name):
                raise ConfigError(
                    f"Host {self._config.host_index} has {name}={mine.get(name)}, and host 0 has "
                    f"{name}={first.get(name)}: start all hosts with the same settings."
                )
        met = tuple(there[n].token if n in there else "" for n in range(self._config.hosts))
        if met != self._me.met:
            self._tell(replace(self._me, met=met))
            there[self._config.host_index] = self._me
        return [n for n, token in enumerate(met) if not token or there[n].met != met]

    def watch(self, on_end: Callable[[End], None]) -> None:
        """Call the function, in a thread, when the run ends because of another host."""

        def look() -> None:
            while not self.poll().how:
                if self._left.wait(BEAT_SECONDS):
                    return
            on_end(self._end)

        threading.Thread(target=look, name="hosts", daemon=True).start()

    def poll(self) -> End:
        """How the run ends, if a host is lost, has failed or was asked to stop. A host that is lost
        makes the others fail, so a failure counts when all were heard of since."""
        with self._lock:
            self._look()
            if self._end.how:
                return self._end
            there = [index for index, member in self._members.items() if not member.how]
            for index, member in self._members.items():
                if member.token != self._me.met[index]:
                    return self._ended("failed", index, "was started again meanwhile")
            for index in there:
                if self._silence[index] > _LOST_BEATS:
                    return self._ended("failed", index, f"was lost: {_SILENCE}")
            left = {member.how: index for index, member in reversed(self._members.items())}
            if "failed" in left:
                self._failure = self._failure or (left["failed"], dict(self._beats))
                index, before = self._failure
                # The first one after it may have been made before it.
                if all(self._beats[each] > before[each] + 1 for each in there):
                    why = self._members[index].why
                    return self._ended("failed", index, f"has failed: {why}")
            elif "stopped" in left:
                return self._ended("stopped", left["stopped"], "was asked to stop")
            return self._end

    def fail(self, why: str) -> None:
        """This host has failed, perhaps because of another one, which does not have its log."""
        self._tell(replace(self._me, how="failed", why=without_output(why).rstrip(".")[:300]))

    def leave(self, how: How, why: str = "") -> End:
        """This host ends; returns how the run ends on all hosts, once that is known."""
        self._left.set()
        deadline = time.monotonic() + _GOODBYE_SECONDS
        if not self._me.how:
            self._tell(replace(self._me, how=how, why=without_output(why).rstrip(".")[:300]))
        while self.poll().how != "failed" and time.monotonic() < deadline:
            if all(member.how for member in self._members.values()):
                break
            time.sleep(_LOOK_SECONDS)
        if self._end.how == "failed" and self._me.how != "failed":  # for one that comes back
            self._tell(replace(self._me, how="failed", why=self._end.sentence))
        return self._end

    def _look(self) -> None:
        """See who beats, and read what all say."""
        before, mine = self._seen, self._config.host_index
        self._seen = {index: self._last_beat(index) for index in before}
        for index, last in self._seen.items():
            if last != before[index]:
                self._beats[index] += 1
                self._silence[index] = 0
            elif self._seen[mine] != before[mine]:
                self._silence[index] += 1
            member = self._me if index == mine else read_member(self._config, index)
            if member is not None:  # else the shared directory is away for a moment
                self._members[index] = member

    def _tell(self, member: Member) -> None:
        self._me = member
        with suppress(OSError):  # a full disk
            write_member(self._config, member)

    def _ended(self, how: How, index: int, what: str) -> End:
        self._end = End(how, f"Host {index} ({self._members[index].name}) {what}", index)
        if self._rendezvous is not None:
            self._rendezvous.end(self._end.sentence)
        return self._end


def shared_settings(config: RunConfig) -> dict[str, str]:
    """What has to be the same on all hosts, as texts."""
    shared = {name: str(v) for name, v in config.flat(without=Mark.PER_HOST).items()}
    return {**shared, "version": __version__}


@contextmanager
def host_membership(run: RunConfig, supervisor: Supervisor, say: Say) -> Iterator[None]:
    """Be one of several hosts while the block runs, which ends on all of them together.

    Raises:
        FleetError: Another host was lost, or has failed.
        KeyboardInterrupt: Another host was asked to stop.
    """
    if run.hosts == 1:
        yield
        return
    with ExitStack() as stack:
        if not is_claimed(run.logdir):  # by this process, which beats then
            stack.enter_context(claim_directory(run.logdir))
        rendezvous = None
        if run.host_index == 0:
            rendezvous = stack.enter_context(served_rendezvous(run))
        member = Membership(run, rendezvous)
        with sigterm_interrupts():
            member.enter(say)
        supervisor.on_failure = member.fail
        # After a failure the agent cannot end in order: it waits for that of the other host.
        member.watch(lambda end: supervisor.stop("host", at_once=end.how == "failed"))
        how: How = "done"
        error: BaseException | None = None
        try:
            yield
        except KeyboardInterrupt as raised:
            how, error = "stopped", raised
        except Exception as raised:
            how, error = "failed", raised
        with sigterm_interrupts():
            end = member.leave(how, str(error or ""))
        if end.how == "failed" and (error is None or end.host != run.host_index):
            fewer = max(each for each in range(1, run.hosts) if run.batch_size % each == 0)
            raise FleetError(
                f"{end.sentence}. So the run has ended on all hosts: resume it when that one is "
                f"back, or on those that are left with --hosts {fewer}."
            ) from error
        if end.how == "stopped" and end.host != run.host_index:
            say(f"{end.sentence}, so the run has ended on all hosts.")
            raise KeyboardInterrupt from error
        if error is not None:
            raise error
