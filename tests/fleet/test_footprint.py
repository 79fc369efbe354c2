"""What the processes of a fleet take: memory that does not grow, and little time to start."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fleet_parts import Halting, note_start, parts, processes_by_title, small_run

from dreamfleet.fleet.launchers import Worker
from dreamfleet.fleet.launchers.local import LocalLauncher
from dreamfleet.parallel import combined, parallel_env, parallel_logger, parallel_replay
from dreamfleet.replay import ReplayConfig

STEPS = 100_000
LOOKS = 5
MEGABYTE = 2**20


def private_memory(process: psutil.Process) -> int:
    """Bytes that are neither pages of a file nor shared: those of the replay's files may come and
    go as the machine likes."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def test_no_process_grows_over_a_hundred_thousand_steps(tmp_path: Path) -> None:
    envs = 16
    config = small_run(
        tmp_path,
        steps=STEPS,
        envs=envs,
        envs_per_process=envs,
        env_timeout=0.0,
        actor_batch=16,
        batch_size=16,
        batch_length=16,
        report_length=16,
        replay=ReplayConfig(capacity=5000),
        log_every=0.25,
        save_every=1.0,
    )
    make = partial(
        Halting, tmp_path, {int(0.6 * STEPS / envs): "early", int(0.95 * STEPS / envs): "late"}
    )
    seen: dict[str, dict[str, list[int]]] = {"early": defaultdict(list), "late": defaultdict(list)}

    def look(line: str) -> None:
        words = line.split()
        if words[0] != "step":
            return
        step = float(words[1].replace(",", ""))
        if step < 0.4 * STEPS:
            return
        when = "early" if step < 0.7 * STEPS else "late"
        for name, process in processes_by_title().items():
            seen[when][name].append(private_memory(process))
        if len(seen[when]["agent"]) == LOOKS:
            (tmp_path / when).touch()

    combined(**parts(config, make_env_train=make), args=config, say=look)
    for when in ("early", "late"):
        assert set(seen[when]) == {"agent", "env-0", "replay", "logger"}
    for name, early in seen["early"].items():
        late = seen["late"][name]
        growth = np.median(late) - np.median(early)
        assert growth < 2 * MEGABYTE, f"{name} grew by {growth / MEGABYTE:.1f} MB: {early} {late}"


@pytest.mark.parametrize(
    ("role", "factory", "args"),
    [
        (parallel_env, "make_env_train", [0]),
        (parallel_replay, "make_replay_train", []),
        (parallel_logger, "make_logger", []),
    ],
    ids=["environment", "replay", "logger"],
)
def test_a_process_starts_within_two_seconds(
    tmp_path: Path, role: Callable[..., Any], factory: str, args: list[int]
) -> None:
    """Seconds of the processor: they do not depend on who else uses the machine."""
    make = partial(parts(small_run(tmp_path))[factory], *args)
    worker = Worker("started", "env", partial(note_start, role, make, tmp_path / "seconds"))
    with LocalLauncher(tmp_path) as launcher:
        launcher.prepare([worker])
        process = launcher.start(worker)
        assert process.wait(200) == 0, process.output()
    assert float((tmp_path / "seconds").read_text()) < 2.0
