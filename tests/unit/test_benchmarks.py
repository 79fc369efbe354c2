"""Benchmarks run and report alike; what they measure is for a quiet machine."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import agent, replay, report
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.report import compare, split_settings
from dreamfleet.agents.dreamer.config import PUBLISHED_SIZES
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError


@pytest.mark.parametrize("name", ["transport", "network", "lanes"])
def test_a_quick_run_writes_its_rows(name: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert main([name, "--quick", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert len(rows) >= 2
    for row in rows:
        if row["note"].endswith("not installed"):
            continue
        assert row.keys() == {"name", "value", "unit", "peer", "peer_value", "ratio", "note"}
        assert math.isfinite(row["value"])
        assert row["value"] > 0


def test_a_benchmark_in_a_process_of_its_own_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(tmp_path)
    with report.program("benchmarks", "--help", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert "transport" in process.stdout.read()
        assert process.wait() == 0


def test_help_lists_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    told = capsys.readouterr().out
    for name, line in BENCHMARKS.items():
        assert f"\n    {name}" in told
        assert line in told


def test_a_ratio_above_one_is_better() -> None:
    assert compare("x", 20.0, "steps/s", "peer", 10.0).ratio == 2.0
    assert compare("x", 20.0, "ms", "peer", 10.0).ratio == 0.5
    assert "2.00x" in str(compare("x", 20.0, "steps/s", "peer", 10.0))


def test_nothing_is_compared_with_what_was_not_measured_in_the_same_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent, "in_process", lambda *_: FOUND)
    rows = [*agent.run(quick=True), *replay._speed("vector", "memory", quick=True)]
    assert {(row.peer, row.peer_value, row.ratio) for row in rows} == {(None, None, None)}


# --- the agent -----------------------------------------------------------------------------------

FOUND = {
    "platform": "gpu", "devices": 2, "device": "Large GPU (gpu), cuda 12090, jax 0.10.2",
    "settings": "bfloat16, batches of 16 x 64 steps", "compile": 61.2, "train": 22.4,
    "train_cpu": 3.0, "policy": [1.0, 1.1, 1.4], "while_training": [(1.0, 2.0)] * 3,
    "checkpoint": (4.0, 0.02), "flops": 2e13, "matmul": 1.5e15, "utilisation": 0.595,
    "memory": {"parameters": 8e8, "optimizer": 1.6e9, "activations": 7e9, "peak": 11e9},
}  # fmt: skip


def test_sizes_are_understood_or_refused() -> None:
    assert agent.sizes_of("1m,400m") == ("1m", "400m")
    assert agent.sizes_of("all") == PUBLISHED_SIZES
    with pytest.raises(ConfigError, match="no size '3m'"):
        agent.sizes_of("1m,3m")


def test_a_size_that_does_not_fit_has_a_row_that_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(_: str, task: dict[str, Any]) -> dict[str, Any]:
        assert (task["kind"], task["dtype"]) == ("image", "bfloat16")
        return FOUND if task["size"] == "200m" else {"problem": "A train step needs 90.1 GB"}

    monkeypatch.setattr(agent, "in_process", measured)
    words = ["--sizes", "200m,400m", "--dtype", "bfloat16", "--kind", "image"]
    assert main(["agent", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Large GPU (gpu), cuda 12090, jax 0.10.2" in lines[1]
    assert lines[2].startswith("image, 200m: train step ")
    assert " 22.4 ms " in lines[2]
    assert "60 % of the fastest matrix product" in "\n".join(lines)
    assert lines[-1].startswith("image, 400m: train step ")
    assert lines[-1].endswith("A train step needs 90.1 GB")


def test_a_process_that_is_killed_has_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(report, "tied", lambda _: [sys.executable, "-c", program])
    (row,) = agent.run(kind="vector")
    assert row.value is None
    assert "too little memory" in row.note


def test_settings_of_the_run_follow_two_dashes() -> None:
    assert split_settings(["runs/x", "--minutes", "60"]) == (["runs/x", "--minutes", "60"], [])
    assert split_settings(["x", "--", "--envs", "8"]) == (["x"], ["--envs", "8"])
    assert split_settings(["--", "--set", "--"]) == ([], ["--set", "--"])


def test_a_soak_of_a_directory_with_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(RunConfig(logdir=tmp_path).to_json())
    assert main(["soak", str(tmp_path), "--minutes", "60"]) == 2
    assert "holds a run already" in capsys.readouterr().err
