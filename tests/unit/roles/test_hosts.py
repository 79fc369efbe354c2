"""Hosts that learn together: who they are, what they agree on, and who ended the run."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.fleet.claim import BEAT_SECONDS
from dreamfleet.fleet.hosts import End, Membership, host_membership, shared_settings
from dreamfleet.fleet.launchers.local import LocalLauncher
from dreamfleet.fleet.supervisor import FleetError, Supervisor
from dreamfleet.roles.scaling import hosts as module
from dreamfleet.roles.scaling.hosts import LOST_SECONDS, HostError, Member, Rendezvous, this_host
from dreamfleet.roles.scaling.sync import HostSync, Sync
from dreamfleet.transport import Client, Server

SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}


def meeting(count: int) -> Rendezvous:
    """All of them are there."""
    return Rendezvous(count, lambda index: Member(f"token{index}", "", {}))


class Hosts:
    """Supervisors of several hosts in one directory, and when each has beaten."""

    def __init__(self, folder: Path, count: int) -> None:
        self.beats = dict.fromkeys(range(count), 0.0)
        self._folder, self._count = folder, count
        self.members = [self.start(index) for index in range(count)]

    def start(self, index: int, **changes: Any) -> Membership:
        settings = {"batch_size": 12, "hosts": self._count, "host_index": index, **changes}
        run = this_host(RunConfig(logdir=self._folder, **settings), {})
        return Membership(run, None, self.beats.__getitem__)

    def meet(self) -> list[Membership]:
        for _ in range(3):  # all are there, all know it, and all know that
            found = [member.missing() for member in self.members]
        assert not any(found)
        return self.members

    def beat(self, *silent: int) -> None:
        """A second passes, in which some are silent, and the others look."""
        for index in self.beats.keys() - set(silent):
            self.beats[index] += BEAT_SECONDS
        for index in self.beats.keys() - set(silent):
            self.members[index].poll()

    def lose(self, index: int) -> None:
        for _ in range(int(LOST_SECONDS) + 1):
            self.beat(index)


def test_slurm_tells_the_hosts_who_they_are(tmp_path: Path) -> None:
    run = this_host(RunConfig(hosts=0, logdir=tmp_path), SLURM)
    assert (run.hosts, run.host_index) == (4, 2)
    assert (run.logdir, run.run_dir) == (tmp_path / "hosts" / "2", tmp_path)
    alone = this_host(RunConfig(hosts=0), {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"})
    assert (alone.hosts, alone.logdir) == (1, RunConfig().logdir)
    # A task of a job is no host, unless somebody says so.
    assert this_host(RunConfig(), SLURM) == RunConfig()


def test_settings_of_a_host() -> None:
    run = this_host(RunConfig(hosts=2, host_index=1, batch_size=6, eval_every=100), {})
    assert (run.host_batch, run.limiter_tolerance) == (3, 12)
    assert run.checkpoints == RunConfig().checkpoints
    # Host 0 evaluates; environments and samples differ between hosts.
    assert (run.eval_every, run.eval_episodes, run.all_envs) == (0, 0, run.envs)
    assert run.host_seed != RunConfig(hosts=2).host_seed == run.seed


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hosts": 0}, "use srun, or launcher=ray, or set hosts and host_index"),
        (
            {"hosts": 2, "coordinator": "here"},
            "coordinator=here is not an address: write HOST:PORT",
        ),
        ({"hosts": 3}, "multiple of 3"),
        ({"hosts": 2, "host_index": 2}, "numbered from 0"),
        ({"hosts": 2, "launcher": "serial"}, "leave launcher=serial, offline"),
        ({"hosts": 2, "offline": ("run",)}, "leave launcher=serial, offline"),
        ({"hosts": 2, "remote_replay": True, "replay_addr": "tcp://a:1"}, "and remote_replay"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        this_host(RunConfig(**settings), {})


def test_slurm_has_to_start_as_many_tasks_as_there_are_hosts() -> None:
    with pytest.raises(ConfigError, match="hosts=2, and Slurm has started 4 tasks"):
        this_host(RunConfig(hosts=2), SLURM)


def test_hosts_meet_and_have_the_same_settings(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 3)
    first, second, third = hosts.members
    hosts.beats[2] = float("-inf")  # it is not there yet
    assert first.missing() == [1, 2]
    assert second.missing() == [0, 2], "host 0 does not know of it yet"
    assert first.missing() == [2]
    other = hosts.start(2, batch_size=6)
    with pytest.raises(ConfigError, match="Host 2 has batch_size=6, and host 0 has batch_size=12"):
        other.missing()
    hosts.beats[2] = 0.0
    hosts.meet()
    assert [each.missing() for each in (first, second, third)] == [[], [], []]


def test_a_host_that_was_killed_while_it_waited_is_met_anew(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 2)
    hosts.members[1].missing()
    hosts.members[1] = hosts.start(1)
    hosts.meet()
    assert hosts.members[0].poll().how == ""


def test_settings_that_may_differ_between_hosts() -> None:
    mine = shared_settings(RunConfig())
    other = shared_settings(RunConfig(envs=3, host_index=1, logdir=Path("elsewhere")))
    assert mine == other
    assert mine != shared_settings(RunConfig(train_ratio=32.0))
    assert {"batch_size", "steps", "seed", "dreamer.loss.horizon", "version"} <= mine.keys()


def test_settings_of_a_machine_may_differ_between_hosts() -> None:
    mine = shared_settings(RunConfig())
    for path in ("dreamer.execution.policy_devices", "resources.env.cpu", "replay.max_bytes"):
        assert path not in mine
    assert "dreamer.loss.policy_scale" in mine, "it is no setting of a machine"


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [
        threading.Thread(target=run, args=[index], daemon=True) for index in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_all_hear_what_all_have_said() -> None:
    there = meeting(3)
    for number in range(100):  # more than are kept
        key = f"round/{number}"
        calls = [partial(there.gather, key, i, f"token{i}", {"host": i}) for i in range(3)]
        assert in_threads(*calls) == [[{"host": 0}, {"host": 1}, {"host": 2}]] * 3
    # A call that is repeated, because its answer was lost.
    assert there.gather("round/99", 1, "token1", {"host": 1})[2] == {"host": 2}
    assert len(there._rounds) <= module._KEPT + 1


def test_a_host_knows_whom_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    there, waited = meeting(3), list[list[int]]()
    monkeypatch.setattr("dreamfleet.roles.scaling.sync._ON_WAIT_SECONDS", 0.001)
    server = Server("ipc://{auto}", "hosts")
    server.bind("gather", there.gather, workers=6)
    server.bind("missing", there.missing)

    def on_wait(missing: list[int]) -> None:
        if missing not in waited:
            waited.append(missing)
            other = waited[-1][0]  # which now comes
            clients[other].gather("compiled/1", other, f"token{other}", {"host": other})

    with server, ExitStack() as stack:
        clients = [stack.enter_context(Client(server.address)) for _ in range(3)]
        me = HostSync(3, 0, clients[0], "token0")
        said = me.gather("compiled", {"host": 0}, on_wait)
    assert said == [{"host": 0}, {"host": 1}, {"host": 2}]
    assert waited == [[1, 2], [2]]
    assert Sync().gather("compiled", {"host": 0}, on_wait) == [{"host": 0}]


def test_a_host_that_is_not_heard_of_is_lost_and_named(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 3)
    first, _, third = hosts.meet()
    for _ in range(int(LOST_SECONDS)):
        hosts.beat(1)
        assert first.poll() == third.poll() == End("")
    # The others fail because of it, which is not what the run ends because of.
    third.fail("agent ended with code 1")
    assert first.poll() == third.poll() == End("")
    hosts.beat(1)  # for the last time
    name = socket.gethostname()
    lost = End("failed", f"Host 1 ({name}) was lost: it has been silent for 15 s", 1)
    assert first.poll() == third.poll() == lost
    assert first.leave("done") == lost, "it does not wait for a host that is lost"


def test_votes_end_when_a_host_is_lost(tmp_path: Path) -> None:
    rendezvous = meeting(2)
    wait = partial(in_threads, partial(rendezvous.gather, "round/1", 0, "token0", {}))
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.extend(wait()), daemon=True)
    waiting.start()
    hosts = Hosts(tmp_path, 2)
    first, _ = hosts.meet()
    first._rendezvous = rendezvous
    hosts.lose(1)
    assert first.poll().how == "failed"
    waiting.join(60)
    assert "Host 1" in str(found[0])
    assert "was lost" in str(found[0])


def test_the_host_that_failed_first_is_named_once_all_were_heard_of(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 2)
    first, second = hosts.meet()
    second.fail("agent was killed by signal 9. The end of logs/agent.log:\nmore")
    assert first.poll() == End("")
    first.fail("agent ended with code 1")
    sentence = f"Host 1 ({socket.gethostname()}) has failed: agent was killed by signal 9"
    assert first.poll() == first.leave("failed") == End("failed", sentence, 1)
    hosts.beat()
    assert second.leave("failed").how == "failed"


def test_a_failure_counts_when_no_other_host_is_lost(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 3)
    first, second, _ = hosts.meet()
    second.fail("agent was killed by signal 9")
    hosts.beat(2)
    assert first.poll() == End(""), "host 2 may be lost for all that is known"
    hosts.beat()
    hosts.beat()
    assert first.poll().host == 1


def test_a_host_that_was_stopped_for_long_does_not_take_part_in_the_run_that_was_resumed(
    tmp_path: Path,
) -> None:
    hosts = Hosts(tmp_path, 2)
    old = hosts.meet()[1]
    hosts.members[0] = hosts.start(0)
    assert hosts.members[0].missing() == [1], "it does not meet a host of the run before"
    assert old.poll()[:2] == (
        "failed",
        f"Host 0 ({socket.gethostname()}) was started again meanwhile",
    )
    with pytest.raises(HostError, match="Host 1 was away for so long"):
        meeting(2).gather("round/1", 1, "earlier", {})
    with pytest.raises(HostError, match="Host 2 was away for so long"):
        meeting(2).gather("round/1", 2, "token2", {})


def test_a_host_that_is_asked_to_stop_ends_the_run_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(tmp_path, 2)
    first, second = hosts.meet()
    monkeypatch.setattr("dreamfleet.fleet.hosts.time.sleep", lambda _: first.leave("done"))
    end = End("stopped", f"Host 1 ({socket.gethostname()}) was asked to stop", 1)
    assert second.leave("stopped") == end
    assert first.poll() == end


def test_a_host_that_has_left_is_not_missed(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 2)
    first, second = hosts.meet()
    for each in (first, second):
        each._tell(replace(each._me, how="done"))
    hosts.lose(0)
    assert second.leave("done") == End("")


def test_a_directory_that_is_away_makes_no_host_look_lost(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 2)
    first, _ = hosts.meet()
    for _ in range(10 * int(LOST_SECONDS)):
        assert first.poll() == End(""), "its own beats are not seen either"
    hosts.beat(1)
    assert first.poll() == End("")


def test_a_host_that_sees_another_fail_is_told_in_its_thread(tmp_path: Path) -> None:
    hosts, ends = Hosts(tmp_path, 2), list[End]()
    first, _ = hosts.meet()
    heard = threading.Event()
    hosts.lose(1)
    first.watch(lambda end: (ends.append(end), heard.set()))
    assert heard.wait(120)
    assert (ends[0].how, ends[0].host) == ("failed", 1)


@pytest.mark.parametrize("index", [0, 1])
def test_a_host_that_is_lost_ends_the_run_with_an_error_on_all_and_those_left_can_share_a_batch(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on itself, if it comes back while it is told of: without its agent there is no error."""
    end = End("failed", "Host 1 (node1) was lost", 1)

    class Fake:
        def __init__(self, *_: object) -> None: ...

        def enter(self, say: object) -> None: ...

        def watch(self, on_end: object) -> None: ...

        def fail(self, why: str) -> None: ...

        def leave(self, *_: str) -> End:
            return end

    monkeypatch.setattr("dreamfleet.fleet.hosts.Membership", Fake)
    monkeypatch.setattr("dreamfleet.fleet.hosts.served_rendezvous", nullcontext)
    run = RunConfig(hosts=4, host_index=index, batch_size=16)
    supervisor = Supervisor([], LocalLauncher(Path()))
    words = r"Host 1 \(node1\) was lost\..* those that are left with --hosts 2\."
    with pytest.raises(FleetError, match=words), host_membership(run, supervisor, print):
        pass
