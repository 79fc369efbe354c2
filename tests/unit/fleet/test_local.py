"""What the local launcher starts, without starting it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from dreamfleet.config import RunConfig
from dreamfleet.fleet import local


def test_only_the_agent_keeps_its_memory_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training allocates and frees hundreds of megabytes a step; no other role does."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    started: dict[str, dict[str, str]] = {}

    def record(name: str, _function: object, _logs: Path, environment: dict[str, str]) -> None:
        started[name] = environment

    nothing = SimpleNamespace(run=lambda *_: None)
    monkeypatch.setitem(local._MEMBERS, "local", record)
    monkeypatch.setattr(local, "_supervisor", lambda *_: nothing)
    local.combined(*[object] * 7, RunConfig(logdir=tmp_path))
    assert {"agent", "replay", "logger"} <= started.keys()
    assert [name for name, added in started.items() if "GLIBC_TUNABLES" in added] == ["agent"]
    assert "mmap_max=0" in started["agent"]["GLIBC_TUNABLES"]


def test_workers_are_those_of_the_launcher() -> None:
    config = RunConfig(envs=3, eval_envs=2, envs_per_process=2)
    assert local.role_names(config) == ["agent", "replay", "logger", "env-0", "env-2", "env-3"]
