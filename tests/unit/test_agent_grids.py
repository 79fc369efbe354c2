"""What `bench agent --sizes` and `--devices` understand, compare and print: what they measure is
for a quiet machine."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dreamfleet.agents.dreamer.config import PUBLISHED_SIZES
from dreamfleet.benchmarks import agent_devices, agent_sizes, report
from dreamfleet.benchmarks.report import markdown
from dreamfleet.cli import main
from dreamfleet.cli.bench import _grid_line
from dreamfleet.errors import ConfigError

DEVICE = {
    "device": {
        "platform": "gpu", "kind": "Large GPU", "count": 2, "cores": 16,
        "driver": "cuda 12090; NVRM version: 575.1", "system": "Linux-6", "python": "3.12.1",
    },
    "versions": {"jax": "0.10.2", "dreamfleet": "0.1.0"},
}  # fmt: skip
SIZED = {
    **DEVICE,
    "compile_seconds": 61.2, "step_seconds": 0.0224, "step_processor_seconds": 0.003,
    "policy_seconds": {"1": 0.0011, "16": 0.0014},
    "memory": {"parameters": 8e8, "optimizer": 1.6e9, "activations": 7e9, "peak": 11e9},
    "checkpoint": {"seconds": 4.0, "still": 0.02, "slower": 1.1},
    "flops": 2e13, "matmul_flops": 1.5e15, "utilisation": 0.595,
}  # fmt: skip


def test_names_and_numbers_are_understood_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert agent_sizes.sizes_of("1m,400m") == ("1m", "400m")
    assert agent_sizes.sizes_of("all") == PUBLISHED_SIZES
    with pytest.raises(ConfigError, match="no size '3m'"):
        agent_sizes.sizes_of("1m,3m")
    assert agent_devices.counts_of("8,2") == (1, 2, 8), "one is what others are compared with"
    for wrong in ("two", "0,2", ""):
        with pytest.raises(ConfigError, match="--devices"):
            agent_devices.counts_of(wrong)
    assert main(["bench", "replay", "--sizes", "1m"]) == 2
    assert "for the agent, not for replay" in capsys.readouterr().err


def test_a_line_for_each_size_also_for_one_that_did_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(task: agent_sizes.Task) -> dict[str, Any]:
        return SIZED if task.size == "200m" else {"problem": "A training step needs 90.1 GB"}

    monkeypatch.setattr(agent_sizes, "_found", measured)
    path = tmp_path / "sizes.json"
    words = ["--sizes", "200m,400m", "--dtype", "bfloat16", "--kind", "image", "--json", str(path)]
    assert main(["bench", "agent", *words]) == 0
    where, _, names, rule, *rows = capsys.readouterr().out.strip().splitlines()
    assert "2 x Large GPU (gpu, driver cuda 12090; NVRM version: 575.1)" in where
    assert "jax 0.10.2" in where
    assert "image, bfloat16, batches of 16 x 64 steps" in where
    assert len({line.count("|") for line in (names, rule, *rows)}) == 1
    assert "| 200m | 22 ms |" in rows[0]
    assert "| 60 % | 1.1 ms | 1.4 ms | 2.40 GB | 7.00 GB | 11.00 GB | 4.0 s | 0.50 % |" in rows[0]
    assert "| 400m | A training step needs 90.1 GB |" in rows[1]
    saved = json.loads(path.read_text())
    assert [each["size"] for each in saved] == ["200m", "400m"]
    assert saved[0]["device"] == DEVICE["device"]


def test_a_process_that_is_killed_is_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(report, "tied", lambda _: [sys.executable, "-c", program])
    (found,) = agent_sizes.run([agent_sizes.Task("1m", "vector", "float32")])
    assert "too little memory" in found["problem"]


def test_several_devices_are_compared_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(task: agent_devices.Task) -> dict[str, Any]:
        if task.devices == 8:
            return {"problem": "4 devices are here"}
        parameters = {"nets/a": np.ones(4), "nets/b": np.full(2, 3.0)}
        if task.devices > 1:
            parameters["nets/b"] = parameters["nets/b"] + [0.03, 0.04]
        np.savez(Path(task.folder) / "parameters.npz", **parameters)  # type: ignore[arg-type]
        losses = [[1.0, 2.0], [1.0, 2.0 + 0.01 * (task.devices > 1)]]
        memory = {"parameters": 1e6, "optimizer": 2e6, "step": 9e6}
        return {
            **DEVICE, "losses": losses, "way": 10.0, "step_seconds": 1.0 + 0.1 * (task.devices - 1),
            "memory": memory, "collectives_in_imagination": 0, "collectives_in_loops": 3,
        }  # fmt: skip

    monkeypatch.setattr(agent_devices, "_found", trained)
    found = list(agent_devices.run((1, 2, 4, 8), agent_devices.Task(1, "")))
    modes = [(each["devices"], each["mode"]) for each in found]
    sharded = ["data parallel", "fully sharded"]
    assert modes == [
        (1, "data parallel"),
        *[(2, mode) for mode in sharded],
        *[(count, mode) for count in (4, 8) for mode in (*sharded, "both")],
    ]
    assert found[0]["losses_apart"] == found[0]["parameters_apart"] == 0.0
    assert found[1]["losses_apart"] == pytest.approx(0.005)
    assert found[1]["parameters_apart"] == pytest.approx(0.005), "of the way that they have gone"
    assert [found[0]["same"], found[1]["same"]] == [True, False]
    assert found[1]["times_one"] == pytest.approx(1.1)
    json.dumps(found)
    lines = [markdown(agent_devices.COLUMNS), *(_grid_line(agent_devices, each) for each in found)]
    assert len({line.count("|") for line in lines}) == 1
    assert "| 2 | data parallel | 1,100 ms | 1.10 | 5.0e-03 | 5.0e-03 | no | 3.0 MB |" in lines[2]
    assert "4 devices are here" in lines[-1]
    assert asdict(agent_devices.Task(1, ""))["updates"] == 20
