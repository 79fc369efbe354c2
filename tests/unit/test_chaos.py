"""The parts of `make chaos`: the schedule, accounts and the report. `tests/faults` runs it."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from chaos.audit import Accounts, Findings, left_files
from chaos.faults import Outcome, Recovery, attack
from chaos.report import Report
from chaos.schedule import Fault, schedule

from dreamfleet.transport import Server

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


def test_an_attack_that_a_server_accepts_is_told() -> None:
    server = Server("ipc://{auto}", "server")
    server.bind("act", lambda *values: len(values))
    with server:
        _, accepted = attack(random.Random(0), server.address, None)
    assert any(call.startswith("act(") for call in accepted)


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
    # What a killed agent had not sent yet counts as no loss.
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
