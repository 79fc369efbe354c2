"""The parts of `make chaos`: faults, connections, the disk, accounts and the report."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chaos import faults
from chaos.audit import Accounts, Findings, left_files
from chaos.faults import ChaosError, Injector, Outcome, Recovery, attack
from chaos.fleet import Fleet, cut
from chaos.report import Report
from chaos.schedule import Fault, Way, schedule

from dreamfleet.config import RunConfig
from dreamfleet.transport import ArgumentError, Client, Keys, Server

LONG = 120.0
WORKERS = ("agent", "env-0", "env-4", "replay", "logger")
SERVERS = {"agent", "replay", "logger"}


def test_a_seed_decides_the_faults_and_a_deck_has_all_of_them() -> None:
    dealt = list(islice(schedule(3, WORKERS), 150))
    assert dealt == list(islice(schedule(3, WORKERS), 150))
    assert dealt != list(islice(schedule(4, WORKERS), 150))
    for kind in ("kill", "terminate", "stop"):
        hit = {fault.targets for fault in dealt if fault.kind == kind}
        assert {(worker,) for worker in WORKERS} <= hit
        assert any(len(targets) == 2 for targets in hit)
    for kind in ("cut", "lose", "attack"):
        assert {f.targets[0] for f in dealt if f.kind == kind} == SERVERS
    assert {fault.moment for fault in dealt} == {"now", "restart", "compile", "save"}
    assert {fault.way for fault in dealt} == {"both", "up", "down"}
    assert {"fill"} <= {fault.kind for fault in dealt}
    assert Fault("kill", ("supervisor",)) in dealt


def test_threads_of_one_process_are_not_killed_one_by_one() -> None:
    for fault in islice(schedule(3, WORKERS, threads=True), 50):
        assert fault.kind == "fill" or fault.targets == ("supervisor",)


TITLED = """
import sys, setproctitle
setproctitle.setproctitle("dreamfleet env-0")
print("titled", flush=True)
sys.stdin.read()
"""


def test_processes_with_a_title_are_known_as_those_of_the_fleet(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "run", tmp_path, [])
    with subprocess.Popen(
        [sys.executable, "-c", TITLED, "x" * 100],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=fleet.environment(),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"titled\n"
        (found,) = fleet.processes()
        assert found.pid == process.pid
        assert found.cmdline()[0].startswith("dreamfleet env-0")
    assert fleet.processes() == []


# --- connections ---------------------------------------------------------------------------------


def cut_here(server: Server, way: Way = "both") -> list[str]:
    """Cut the connections of a server of this process, and return their kinds."""
    try:
        return [kind.name for kind in cut(os.getpid(), server.address, faults._HOW[way])]
    except PermissionError:
        pytest.skip("Sockets of other processes need the right to trace them: run as root")


@pytest.mark.parametrize("encrypted", [False, True])
def test_connections_are_cut_in_the_servers_process_and_calls_go_on(encrypted: bool) -> None:
    keys = Keys.generate() if encrypted else None
    with careful(keys) as (server, _), Client(server.address, keys=keys) as client:
        client.call("act", 0).result(LONG)
        ways: tuple[Way, ...] = ("both", "up", "down")
        for number, way in enumerate(ways, 1):
            assert cut_here(server, way)
            assert client.call("act", number).result(LONG) == number
        assert client.stats()["connects"] == 4


def test_what_users_talk_over_is_cut() -> None:
    """Between processes of one machine that is a socket of packets."""
    with careful(None) as (server, _), Client(server.address) as client:
        kinds: list[str] = []
        while "SOCK_SEQPACKET" not in kinds:  # which a connection has after some calls
            for number in range(50):
                client.call("act", number).result(LONG)
            kinds = cut_here(server)


@contextmanager
def careful(keys: Keys | None) -> Iterator[tuple[Server, list[int]]]:
    """A server that takes numbers, and those that it has taken."""
    done: list[int] = []

    def act(number: Any) -> int:
        if type(number) is not int or not 0 <= number < 100:
            raise ArgumentError("It is no number.")
        done.append(number)
        return number

    server = Server("tcp://127.0.0.1:{auto}" if keys else "ipc://{auto}", "server", keys=keys)
    server.bind("act", act, repeatable=True)
    with server:
        yield server, done


@pytest.mark.parametrize("encrypted", [False, True])
def test_attacks_are_refused_and_other_clients_do_not_notice(encrypted: bool) -> None:
    keys = Keys.generate() if encrypted else None
    with careful(keys) as (server, done), Client(server.address, keys=keys) as client:
        client.call("act", 0).result(LONG)
        sent, accepted = attack(random.Random(0), server.address, keys)
        assert sent > 20
        assert accepted == []
        assert client.call("act", 1).result(LONG) == 1
        assert client.stats()["connects"] == 1
        assert done == [0, 1]


def test_an_attack_that_a_server_accepts_is_told() -> None:
    server = Server("ipc://{auto}", "server")
    server.bind("act", lambda *values: len(values))
    with server:
        _, accepted = attack(random.Random(0), server.address, None)
    assert any(call.startswith("act(") for call in accepted)


# --- the disk ------------------------------------------------------------------------------------

FILLING = """
import sys
from pathlib import Path
import psutil
from chaos.faults import Disk

if sys.argv[2] == "limit":
    Disk._mount = lambda self: False
me = [psutil.Process()]
with Disk(Path(sys.argv[1]), 1 << 20) as disk:
    folder = Path(sys.argv[1])
    (folder / "before").write_bytes(bytes(5000))
    disk.fill(me)
    try:
        (folder / "full").write_bytes(bytes(50_000))
        said = "nothing"
    except OSError as error:
        said = error.strerror
    disk.free(me)
    (folder / "after").write_bytes(bytes(50_000))
print(disk.kind, said)
"""


@pytest.mark.parametrize(
    ("kind", "said"), [("tmpfs", "No space left on device"), ("limit", "File too large")]
)
def test_a_disk_is_filled_and_freed(tmp_path: Path, kind: str, said: str) -> None:
    folder = tmp_path / "run"
    words = [sys.executable, "-c", FILLING, str(folder), kind]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    if kind == "tmpfs" and done.stdout.startswith("limit"):
        pytest.skip("A full disk needs the right to mount a file system: sudo make test")
    assert done.stdout.strip() == f"{kind} {said}"
    # A file system of its own is seen by nobody else, and gone.
    assert bool(list(folder.iterdir())) == (kind == "limit")


# --- accounts and report --------------------------------------------------------------------------


def accounts(**changes: Any) -> Accounts:
    values: dict[str, Any] = {
        "findings": Findings(rows=1000, finished=40),
        "evaluation": None,
        "steps": {"by the replay": 1000, "by the logger": 1000},
        "went_back": 0,
        "samples": 990,
        "due": 1000.0,
        "slack": 20.0,
        "updates": 120,
        "scores": 40,
    }
    return Accounts(**{**values, **changes})


def test_accounts_that_agree_have_no_problems() -> None:
    assert accounts().problems(0) == []
    # What a killed agent had not sent yet is nobody's loss.
    assert accounts(findings=Findings(rows=1000, finished=40, lost_ends=5)).problems(5) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"findings": Findings(rows=1000, finished=40, lost=1)}, "lost"),
        ({"findings": Findings(rows=1000, finished=40, doubled=1)}, "doubled"),
        ({"findings": Findings(rows=1000, finished=40, spliced=1)}, "spliced"),
        ({"findings": Findings(rows=1000, finished=40, wrong_actions=1)}, "wrong_actions"),
        ({"findings": Findings(rows=1000, finished=40, lost_ends=6)}, "killed agents explain 5"),
        ({"evaluation": Findings(rows=10, doubled=1)}, "Evaluation steps are doubled"),
        ({"steps": {"by the replay": 999}}, "by the replay 999"),
        ({"went_back": 2}, "went back 2 times"),
        ({"scores": 39}, "39 scores were written"),
        ({"samples": 900}, "1,000 were due"),
    ],
)
def test_accounts_that_do_not_agree_are_named(change: dict[str, Any], words: str) -> None:
    (problem,) = accounts(**change).problems(5)
    assert words in problem


def test_where_workers_were_is_shown_if_a_fleet_does_not_recover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[str, int]] = []
    fleet: Any = SimpleNamespace(
        ended=False,
        config=RunConfig(),
        workers=lambda: {"agent": 1, "supervisor": 2},
        signal=lambda *args: sent.append(args),
    )
    monkeypatch.setattr(faults, "_RECOVERY_SECONDS", 0.0)
    injector = Injector(fleet, None, 0)  # type: ignore[arg-type]
    with pytest.raises(ChaosError, match="Waited 0 s for every worker to run"):
        injector._await(lambda: False, "every worker to run")
    assert sent == [("agent", signal.SIGABRT)]


def test_files_that_are_left_are_named(tmp_path: Path) -> None:
    run, temporary = tmp_path / "run", tmp_path / "tmp"
    (run / "ckpt" / "agent" / "000001").mkdir(parents=True)
    temporary.mkdir()
    assert left_files(run, temporary) == []
    (run / "ckpt" / "agent" / ".writing-000002").mkdir()
    (temporary / "dreamfleet-1").mkdir()
    assert left_files(run, temporary) == ["ckpt/agent/.writing-000002", "dreamfleet-1"]


def report(**changes: Any) -> Report:
    outcomes = [
        Outcome(Fault("kill", ("agent",)), at=1.0, recoveries=[Recovery("agent", 2.0)]),
        Outcome(Fault("kill", ("agent", "env-0")), at=5.0,
                recoveries=[Recovery("agent", 4.0), Recovery("env", 1.0)]),
        Outcome(Fault("cut", ("actor",)), at=20.0, recoveries=[Recovery("network", 0.1)],
                cut={"SOCK_SEQPACKET": 6}),
        Outcome(Fault("attack", ("actor",)), at=30.0, sent=70),
    ]  # fmt: skip
    values: dict[str, Any] = {
        "minutes": 0.5,
        "outcomes": outcomes,
        "quiet": 100.0,
        "disturbed": 80.0,
        "accounts": accounts(),
    }
    return Report(**{**values, **changes})


def test_a_report_tells_recovery_pauses_and_rows() -> None:
    made = report()
    assert made.recovery.keys() == {"agent", "env", "network"}
    assert made.cut == {"SOCK_SEQPACKET": 6}
    assert made.misses == []
    plain = json.loads(made.to_json())
    assert plain["recovery_seconds"]["agent"] == {"count": 2, "median": 3.0, "worst": 4.0}
    assert plain["accounts"]["findings"]["rows"] == 1000
    assert plain["kinds"] == {"attack": 1, "cut": 1, "kill": 2}
    assert Counter(event["fault"] for event in plain["events"])["kill agent and env-0"] == 1
    assert "Every promise has held." in made.to_text()
    broken = report(problems=["One step is lost."]).to_text()
    assert "BROKEN         One step is lost." in broken
    assert "Every promise" not in broken


def test_goals_of_speed_that_are_missed_are_told() -> None:
    slow = [Outcome(Fault("kill", ("logger",)), recoveries=[Recovery("logger", 11.0)])]
    misses = report(outcomes=slow, disturbed=60.0, minutes=10.0).misses
    assert len(misses) == 3
    assert "logger recovered in 11.0 s" in misses[0]
    assert "60% of the steps" in misses[1]
    assert "1 faults in 10.0 minutes" in misses[2]
