"""Serial runs that are stopped and resumed, and what is different in two of them."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_parts import parts, rows, stored_steps

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.config import RunConfig
from dreamfleet.parallel import combined
from dreamfleet.roles.runtime import stop_event

_STOPS: list[int] = []
# What depends on the machine: seconds, rates, and what the process takes of it.
_CLOCKS = re.compile(r"second|usage|timer|ram_bytes|^time$|^id$|learner/st")


class Stopping:
    """An environment that stops its run, as Ctrl-C does, at steps of its own count."""

    def __init__(self, env: Any) -> None:
        self._env, self._steps = env, 0
        self.obs_space, self.act_space = env.obs_space, env.act_space

    def step(self, action: Mapping[str, Any]) -> Any:
        self._steps += 1
        if _STOPS and self._steps == _STOPS[0]:
            _STOPS.pop()
            os.kill(os.getpid(), signal.SIGINT)
            assert stop_event().wait(120), "the run is asked to stop, before the next turn"
        return self._env.step(action)


def play(config: RunConfig, stops: Sequence[int] = (), **changes: Any) -> list[int]:
    """Run to the end, with stops in between; returns the steps at which it was saved."""
    fleet = parts(config, **changes)
    make = fleet["make_env_train"]

    def made(envid: int, attempt: int = 0) -> Any:
        env = make(envid, attempt)
        return Stopping(env) if envid == 1 else env

    saved = []
    for stop in [*stops, 0]:
        _STOPS[:] = [stop] if stop else []
        with pytest.raises(KeyboardInterrupt) if stop else nullcontext():
            combined(**{**fleet, "make_env_train": made}, args=config)
        snapshot = Checkpoint(config.logdir / "ckpt" / "agent").load()
        saved.append(snapshot.step)
    return saved


def differences(one: Path, two: Path) -> Iterator[str]:
    """What is not the same, bit for bit, in two runs."""
    for name in ("replay", "eval_replay"):
        first, second = ({**stored_steps(run / name), "stepid": 0} for run in (one, two))
        for key in first.keys() | second.keys():
            if np.asarray(first[key]).tobytes() != np.asarray(second[key]).tobytes():
                yield f"{name}: {key}"
    first, second = (Checkpoint(run / "ckpt" / "agent").load().parts for run in (one, two))
    for part in ("agent", "run", "replay"):
        for key in first[part].keys() | second[part].keys():
            if np.asarray(first[part][key]).tobytes() != np.asarray(second[part][key]).tobytes():
                yield f"{part}: {key}"
    for name in ("scores.jsonl", "metrics.jsonl"):
        first, second = (
            {json.dumps(row, sort_keys=True) for row in map(_no_clocks, rows(run / name))}
            for run in (one, two)
        )
        yield from (f"{name}: {row}" for row in sorted(first - second)[:3])
        if name == "scores.jsonl" and len(rows(one / name)) != len(rows(two / name)):
            yield f"{name}: more rows"


def _no_clocks(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not _CLOCKS.search(key)}
