"""The parts of `dreamfleet chaos`: what is done, what is seen, and what is told."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dreamfleet.chaos import faults
from dreamfleet.chaos.accounts import Accounts, Findings, left_files
from dreamfleet.chaos.conductor import fleet_config
from dreamfleet.chaos.faults import ChaosError, Injector, Outcome, Recovery
from dreamfleet.chaos.fleet import Fleet
from dreamfleet.chaos.hostile import attack
from dreamfleet.chaos.network import PARTS, Line, Message, Network, Part, _Frames, read_header
from dreamfleet.chaos.report import Report
from dreamfleet.chaos.schedule import Fault, schedule
from dreamfleet.config import RunConfig
from dreamfleet.roles.addresses import DirectoryBook
from dreamfleet.transport import ArgumentError, Client, Keys, Server
from dreamfleet.transport.codec import encode
from dreamfleet.transport.wire import CALL, pack

LONG = 120.0
WORKERS = ("agent", "env-0", "env-4", "replay", "logger")
SERVERS = ("actor", "replay", "logger")
PADDING = "x" * 100  # observations are not small


def test_a_seed_decides_the_faults_and_a_deck_has_all_of_them() -> None:
    dealt = list(islice(schedule(3, WORKERS, SERVERS), 150))
    assert dealt == list(islice(schedule(3, WORKERS, SERVERS), 150))
    assert dealt != list(islice(schedule(4, WORKERS, SERVERS), 150))
    for kind in ("kill", "terminate", "stop"):
        hit = {fault.targets for fault in dealt if fault.kind == kind}
        assert {(worker,) for worker in WORKERS} <= hit
        assert any(len(targets) == 2 for targets in hit)
    for kind in ("cut", "half-cut", "stall", "attack"):
        assert {f.targets[0] for f in dealt if f.kind == kind} == set(SERVERS)
    assert {fault.moment for fault in dealt} == {"now", "restart", "compile", "save"}
    assert {"fill", "refuse", "lose"} <= {fault.kind for fault in dealt}
    assert Fault("kill", ("supervisor",)) in dealt


def test_threads_of_one_process_are_not_killed_one_by_one() -> None:
    for fault in islice(schedule(3, WORKERS, SERVERS, threads=True), 50):
        assert fault.kind in ("attack", "fill") or fault.targets == ("supervisor",)


TITLED = """
import sys, setproctitle
setproctitle.setproctitle("dreamfleet env-0")
print("titled", flush=True)
sys.stdin.read()
"""


def test_processes_with_a_title_are_known_as_those_of_the_fleet(tmp_path: Path) -> None:
    fleet = Fleet(fleet_config(tmp_path / "run"), {}, tmp_path)
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


# --- the network ---------------------------------------------------------------------------------


def test_headers_are_read_however_the_bytes_come() -> None:
    values: list[Any] = [1, {"x": np.arange(5000)}, "text", {"y": np.zeros((300, 300))}]
    stream = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    stream += b"\x04\x05READY"
    for number, value in enumerate(values, 1):
        frames = pack(CALL, 1000**number, encode((value,)), 1 << 61, f"method_{number}")
        for place, frame in enumerate(frames):
            more = place < len(frames) - 1
            stream += bytes([2 | more]) + len(frame).to_bytes(8, "big") + bytes(frame)
    expected = [Message(CALL, 1000**n, f"method_{n}") for n in range(1, 5)]
    for size in (1, 7, 64, 10**7):
        found, parser = [], _Frames()
        for place in range(0, len(stream), size):
            found += [read_header(head) for head, _ in parser.feed(stream[place : place + size])]
        assert found == expected
        assert parser.encrypted is False
    assert read_header(b"nonsense") is None


@pytest.fixture(params=["file", "port with key"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Network, Client, Any]]:
    """A server behind a proxy, a client of it, and the calls that were carried out."""
    by_port = request.param != "file"
    keys = Keys.generate() if by_port else None
    where = "tcp://127.0.0.1:{auto}" if by_port else "ipc://{auto}"
    done: list[int] = []

    def act(number: Any, padding: Any) -> Any:
        if type(number) is not int or type(padding) is not str or not 0 <= number < 100:
            raise ArgumentError("It is no number.")
        done.append(number)
        return np.zeros(100)

    server = Server(where, "server", keys=keys)
    server.bind("act", act, repeatable=True)
    with server, Network(tmp_path, {"server": by_port}, tmp_path) as network:
        DirectoryBook().publish(tmp_path, "server", server.address)
        with Client(network.addresses["server"], keys=keys) as client:
            client.call("act", 0, PADDING).result(LONG)
            yield network, client, done


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_call_is_lost_with_its_connection(
    served: tuple[Network, Client, list[int]], part: Part
) -> None:
    network, client, done = served
    line = network.lines["server"]
    assert line.methods["act"] >= 1 <= line.replies
    killed: list[bool] = []
    before = line.first_reply(0.0)
    loss = line.lose("act", part, lambda: killed.append(True))
    client.call("act", 7, PADDING).result(LONG)  # it is sent again
    assert loss.happened.is_set()
    # A server that has done its work before the reply was lost does it again.
    assert done == [0, 7] if part == "request" else done == [0, 7, 7]
    assert killed == [True] * (part == "server")
    assert before is not None
    after = line.first_reply(loss.at)
    assert after is not None
    assert after > loss.at > before
    assert client.stats()["connects"] == 2


def call_directly(line: Line, client: Client, number: int) -> None:
    """Call until it goes around libzmq, for which the server has to say first that it reads it."""
    before = line.direct
    while line.direct == before:
        client.call("act", number, PADDING).result(LONG)


@pytest.mark.parametrize("served", ["file"], indirect=True)
def test_calls_go_around_libzmq_as_in_a_run_and_are_lost_there(
    served: tuple[Network, Client, list[int]],
) -> None:
    network, client, done = served
    line = network.lines["server"]

    call_directly(line, client, 1)
    for number, part in enumerate(PARTS, 2):
        call_directly(line, client, number)
        made = len(done)
        loss = line.lose("act", part, lambda: None)
        client.call("act", 50 + number, PADDING).result(LONG)
        assert loss.happened.is_set()
        assert done[made:] == [50 + number] * (1 if part == "request" else 2)
    call_directly(line, client, 9)
    assert client.stats()["connects"] == 4


@pytest.mark.parametrize("served", ["file"], indirect=True)
def test_faults_of_a_network_reach_the_way_around_libzmq(
    served: tuple[Network, Client, list[int]],
) -> None:
    network, client, done = served
    line = network.lines["server"]

    call_directly(line, client, 1)
    line.proxy.stall()
    waiting = client.call("act", 2, PADDING)
    assert not waiting.wait(0.05)
    assert 2 not in done
    line.proxy.resume()
    waiting.result(LONG)
    assert client.stats()["connects"] == 1
    for fault in (line.proxy.cut, line.proxy.half_cut, lambda: line.proxy.half_cut("down")):
        call_directly(line, client, 3)
        before = client.stats()["connects"]
        since = time.monotonic()
        fault()
        client.call("act", 4, PADDING).result(LONG)
        call_directly(line, client, 5)
        assert client.stats()["connects"] == before + 1
        assert line.first_reply(since) is not None
    line.proxy.refuse()
    line.proxy.cut()
    refused = client.call("act", 6, PADDING)
    assert not refused.wait(0.05)
    line.proxy.refuse(False)
    refused.result(LONG)


def test_attacks_are_refused_and_nobody_else_notices(
    served: tuple[Network, Client, list[int]], tmp_path: Path
) -> None:
    _, client, done = served
    address = DirectoryBook().find(tmp_path, "server")
    keys = client._connection._keys
    assert keys is None or isinstance(keys, Keys)
    made = attack(random.Random(0), address, ["act"], keys)
    assert made.sent > 20
    assert made.accepted == []
    assert client.call("act", 1, PADDING).result(LONG).shape == (100,)
    assert client.stats()["connects"] == 1
    assert done == [0, 1]


def test_what_a_server_takes_although_it_should_not_is_told(tmp_path: Path) -> None:
    server = Server("ipc://{auto}", "server")
    server.bind("careless", lambda *values: len(values))
    with server:
        made = attack(random.Random(0), server.address, ["careless"], None)
    assert any(call.startswith("careless(") for call in made.accepted)


# --- the disk ------------------------------------------------------------------------------------

FILLING = """
import sys
from pathlib import Path
import psutil
from dreamfleet.chaos.faults import Disk

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


# --- what is told --------------------------------------------------------------------------------


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
    monkeypatch.setattr(faults, "_LONG", 0.0)
    injector = Injector(fleet, Network(Path(), {}, Path()), None, 0)  # type: ignore[arg-type]
    with pytest.raises(ChaosError, match="This did not come for 0 s: every worker to run"):
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
        Outcome(Fault("cut", ("actor",)), at=20.0, recoveries=[Recovery("network", 0.1)]),
        Outcome(Fault("attack", ("actor",)), at=30.0, sent=70),
    ]  # fmt: skip
    values: dict[str, Any] = {
        "minutes": 0.5,
        "outcomes": outcomes,
        "samples": [(0.0, 0), (1.0, 100), (4.5, 100), (5.0, 150), (30.0, 2000)],
        "quiet": 100.0,
        "disturbed": 80.0,
        "accounts": accounts(),
    }
    return Report(**{**values, **changes})


def test_a_report_tells_recovery_pauses_and_rows() -> None:
    made = report()
    assert made.recovery == {"agent": [2.0, 4.0], "env": [1.0], "network": [0.1]}
    assert made.longest_pause == 3.5
    assert made.misses == []
    plain = json.loads(made.to_json())
    assert plain["recovery_seconds"]["agent"] == {"count": 2, "median": 3.0, "worst": 4.0}
    assert plain["rows"]["audited"] == 1000
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


def test_a_report_is_drawn(tmp_path: Path) -> None:
    report().draw(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"
