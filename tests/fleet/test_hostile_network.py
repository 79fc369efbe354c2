"""Short versions of `make bench ARGS=hostile` and `make soak`, on live fleets."""

from __future__ import annotations

import json
from pathlib import Path

from fleet_parts import left_behind, small_run

from benchmarks.hostile import Plan, measure
from benchmarks.soak import KINDS, soak
from dreamfleet.replay import ReplayConfig

MB_THAT_ARE_NO_GROWTH = 100


def test_a_fleet_goes_on_under_attack(tmp_path: Path) -> None:
    plan = Plan(messages=600, rate=2000, phases=1, warm_up=0.0, log_every=0.5)
    result = measure(tmp_path, plan)
    assert left_behind() == []
    assert result.restarts == 0
    for name in ("actor", "replay", "logger", "nodes"):
        assert result.sent[f"malformed messages, to the {name}"] >= plan.messages
        assert result.sent[f"recorded connections, to the {name}"] >= 1
        assert result.sent[f"messages that stop in the middle, to the {name}"] >= 1
    assert result.loaded[0] > 0
    assert {"agent", "replay", "logger", "env-0", "env-4"} <= result.memory.keys()
    for before, after in result.memory.values():
        assert after - before < MB_THAT_ARE_NO_GROWTH


def test_a_soak_samples_every_process(tmp_path: Path) -> None:
    small = ReplayConfig(chunk=64, capacity=1000)
    config = small_run(tmp_path / "run", steps=0, log_every=0.3, eval_episodes=0, replay=small)
    found = soak(config, 1.0, tmp_path / "soak")
    assert left_behind() == []
    assert found.processes.keys() >= {"supervisor", "agent", "replay", "logger", "env-0", "env-2"}
    told = json.loads((tmp_path / "soak.json").read_text())
    for series in told["processes"].values():
        for kind in KINDS:
            assert len(series[kind]) == len(series["seconds"])
            assert min(series[kind]) > 0 or kind == "sockets"
    assert told["flat"] == (not told["grown"])
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
