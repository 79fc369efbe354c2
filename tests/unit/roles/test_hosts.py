"""Hosts that learn together: who they are, what they agree on, and who ended the run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dreamfleet import parallel
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.fleet.launchers.local import LocalLauncher
from dreamfleet.fleet.supervisor import FleetError, Supervisor
from dreamfleet.roles.scaling import hosts
from dreamfleet.roles.scaling.hosts import End, Membership, Rendezvous, this_host
from dreamfleet.roles.scaling.sync import HostSync, Sync
from dreamfleet.transport import Client, Disconnected, Server

SAME = {"batch_size": "16"}
SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def meeting(count: int, time: Time) -> Rendezvous:
    """All of them are there."""
    result = Rendezvous(count, time)
    for index in range(count):
        result.enter(index, f"node{index}", f"token{index}", SAME)
    return result


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
        ({"hosts": 2, "coordinator": "here"}, "coordinator=here is no address: write HOST:PORT"),
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


def test_hosts_meet_and_have_the_same_settings() -> None:
    time = Time()
    there = Rendezvous(3, time)
    assert there.enter(0, "a", "first", SAME) == ("", [1, 2])
    assert there.enter(1, "b", "second", SAME) == ("", [2])
    problem, _ = there.enter(2, "c", "third", {"batch_size": "8"})
    assert problem.startswith("Host 2 has batch_size=8, and host 0 has batch_size=16")
    assert "Host 1 is there already, on b" in there.enter(1, "c", "third", SAME)[0]
    time.now += hosts.LOST_SECONDS + 1  # it was killed while it waited
    assert there.enter(1, "c", "third", SAME) == ("", [2])
    assert there.enter(2, "d", "fourth", SAME) == ("", [])


def test_settings_that_may_differ_between_hosts() -> None:
    mine = hosts._shared_settings(RunConfig())
    other = hosts._shared_settings(RunConfig(envs=3, host_index=1, logdir=Path("elsewhere")))
    assert mine == other
    assert mine != hosts._shared_settings(RunConfig(train_ratio=32.0))
    assert {"batch_size", "steps", "seed", "dreamer.loss.horizon", "version"} <= mine.keys()


def test_settings_of_a_machine_may_differ_between_hosts() -> None:
    mine = hosts._shared_settings(RunConfig())
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
    there = meeting(3, Time())
    for number in range(100):  # more than are kept
        key = f"round/{number}"
        calls = [partial(there.gather, key, i, f"token{i}", {"host": i}) for i in range(3)]
        assert in_threads(*calls) == [[{"host": 0}, {"host": 1}, {"host": 2}]] * 3
    # A call that is repeated, because its answer was lost.
    assert there.gather("round/99", 1, "token1", {"host": 1})[2] == {"host": 2}
    assert len(there._rounds) <= hosts._KEPT + 1


def test_a_host_knows_whom_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    there, waited = meeting(3, Time()), list[list[int]]()
    monkeypatch.setattr("dreamfleet.roles.scaling.sync._ON_WAIT_SECONDS", 0.001)
    server = Server("inproc://{auto}", "hosts")
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


def test_a_host_that_is_not_heard_of_is_lost_and_named() -> None:
    time = Time()
    there = meeting(3, time)
    wait = partial(in_threads, partial(there.gather, "round/1", 0, "token0", {}))
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    for _ in range(int(hosts.LOST_SECONDS) - 1):
        time.now += 1
        assert there.beat(0, "token0") == there.beat(2, "token2") == ([*End("")], False)
    # The others fail because of it, which is not what the run ends because of.
    there.beat(2, "token2", "failed", "agent ended with code 1")
    assert there.beat(0, "token0")[0] == [*End("")]
    time.now += 2
    (how, sentence, host), over = there.beat(0, "token0")
    assert (how, host, over) == ("failed", 1, False)
    assert sentence == f"Host 1 (node1) was lost: {hosts._SILENCE}"
    assert there.beat(2, "token2")[0] == [how, sentence, host]
    waiting.join(60)
    assert not waiting.is_alive(), "nobody waits for a host that is lost"
    assert there.beat(0, "token0", "done")[1], "the lost one has left, too"


def test_the_host_that_failed_first_is_named_once_everybody_was_heard_of() -> None:
    time = Time()
    there = meeting(2, time)
    there.beat(1, "token1", "failed", "agent was killed by signal 9")
    there.beat(0, "token0", "", "")
    assert there.beat(0, "token0")[0] == [*End("")], "host 0 may be lost for all that is known"
    time.now += hosts.BEAT_SECONDS + 0.5
    assert there.beat(0, "token0")[0][:2] == [
        "failed",
        "Host 1 (node1) has failed: agent was killed by signal 9",
    ]


def test_a_host_that_was_stopped_for_long_does_not_take_part_in_the_run_that_was_resumed() -> None:
    there = meeting(2, Time())
    for earlier in (partial(there.beat, 1, "earlier"), partial(there.beat, 2, "token2")):
        (how, sentence, host), over = earlier("failed", "its agent ended with code 1")
        assert (how, over) == ("failed", True)
        assert sentence.startswith(f"Host {host} was away for so long")
    with pytest.raises(hosts.HostError, match="Host 1 was away for so long"):
        there.gather("round/1", 1, "earlier", {})
    assert there.beat(0, "token0") == ([*End("")], False)
    assert not there._rounds


def test_a_host_that_is_asked_to_stop_ends_the_run_on_all() -> None:
    there = meeting(2, Time())
    assert there.beat(1, "token1", "stopped") == (
        ["stopped", "Host 1 (node1) was asked to stop", 1],
        False,
    )
    assert there.beat(0, "token0", "done")[1]
    assert not there.told()
    assert there.beat(1, "token1")[1]
    assert there.told()


def test_a_host_that_hears_nothing_of_host_0_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    time, heard = Time(), threading.Event()
    monkeypatch.setattr(hosts.time, "monotonic", time)
    monkeypatch.setattr(hosts, "BEAT_SECONDS", 0.001)
    ends: list[End] = []

    def beat(*_: object) -> Any:
        time.now += 1
        raise Disconnected("nobody is there")

    member = Membership("10.0.0.1:9000", beat)
    member.watch(lambda end: (ends.append(end), heard.set()))
    assert heard.wait(120)
    assert ends == [End("failed", f"Host 0 (10.0.0.1:9000) was lost: {hosts._SILENCE}", 0)]
    assert member.leave("failed") == ends[0]


def test_a_host_that_has_done_its_work_does_not_mind_that_host_0_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time = Time()
    monkeypatch.setattr(hosts.time, "monotonic", time)
    monkeypatch.setattr(hosts.time, "sleep", lambda _: None)

    def beat(*_: object) -> Any:
        time.now += 1
        raise Disconnected("nobody is there")

    assert Membership("10.0.0.1:9000", beat).leave("done") == End("")


@pytest.mark.parametrize("index", [0, 1])
def test_a_host_that_is_lost_ends_the_run_with_an_error_on_all_and_those_left_can_share_a_batch(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on itself, if it comes back while it is told of: without its agent there is no error."""
    end = End("failed", "Host 1 (node1) was lost", 1)

    class Member:
        def watch(self, on_end: object) -> None: ...

        def fail(self, why: str) -> None: ...

        def leave(self, *_: str) -> End:
            return end

    monkeypatch.setattr(parallel, "joined", lambda *_: nullcontext(Member()))
    run = RunConfig(hosts=4, host_index=index, batch_size=16)
    supervisor = Supervisor([], LocalLauncher(Path()))
    words = r"Host 1 \(node1\) was lost\..* those that are left with --hosts 2\."
    with pytest.raises(FleetError, match=words), parallel.host_membership(run, supervisor, print):
        pass
