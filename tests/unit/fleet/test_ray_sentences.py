"""What the Ray launcher says before Ray would wait for ever, or fail in many lines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from fleet_parts import small_run

from dreamfleet.config import Resources
from dreamfleet.errors import ConfigError
from dreamfleet.fleet.launchers import Worker

pytest.importorskip("ray", reason="Ray is not installed: pip install 'dreamfleet[ray]'")

from dreamfleet.fleet.launchers import ray as launcher


def worker(name: str, role: Any, **asks: Any) -> Worker:
    return Worker(name, role, int, resources=Resources(**asks))


@pytest.mark.parametrize(
    ("resources", "words"),
    [
        ({"cpu": 1, "gpu": 2}, r"agent \(1 CPU and 2 GPU\); .* each is 4 CPU and 1 GPU"),
        ({"cpu": 4, "gpu": 1}, r"agent \(4 CPU and 1 GPU\)"),  # on no node together
        ({"memory": int(1e11)}, "100 GB of memory"),
        ({"custom": {"simulator": 1}}, "1 simulator"),
    ],
)
def test_a_worker_that_fits_on_no_node_is_refused_with_what_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resources: dict[str, Any], words: str
) -> None:
    nodes = [{"CPU": 4.0, "memory": 8e9}, {"CPU": 1.0, "GPU": 1.0, "memory": 64e9}]
    there = [{"NodeID": str(n), "Resources": each} for n, each in enumerate(nodes)]
    monkeypatch.setattr(launcher, "connect", lambda *_: lambda: None)
    monkeypatch.setattr(launcher, "nodes", lambda: there)
    with (
        launcher.RayLauncher(tmp_path, small_run(tmp_path)) as ray,
        pytest.raises(ConfigError, match=rf"{words}.* resources\.agent, .* set ray_wait"),
    ):
        ray.prepare([worker("agent", "agent", **resources)])


def test_a_machine_that_cannot_run_a_worker_says_why() -> None:
    here = launcher.Place("box", "10.0.0.7", "id", True, True, launcher.__version__)
    assert launcher._unfit(here) == ""
    assert "box (10.0.0.7) does not see the run's directory" in launcher._unfit(
        here._replace(sees=False)
    )
    assert "cannot write" in launcher._unfit(here._replace(writes=False))
    assert "has Dreamfleet 0.0.1, and this machine has" in launcher._unfit(
        here._replace(version="0.0.1")
    )
    alone = "The actor died because of an error.\nModuleNotFoundError: No module named 'dreamfleet'"
    assert "cannot import dreamfleet" in launcher._why_not_made(RuntimeError(alone))


def test_a_host_that_does_not_find_the_directory_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_SEEN_WITHIN", 0.1)
    monkeypatch.setattr(launcher.ray.util, "get_node_ip_address", lambda: "10.0.0.7")

    class Context:
        def get_node_id(self) -> str:
            return "id"

    monkeypatch.setattr(launcher.ray, "get_runtime_context", Context)
    host = launcher._Host()
    assert not host.place(tmp_path / "elsewhere" / "mark").sees
    (tmp_path / "mark").touch()
    assert launcher._unfit(host.place(tmp_path / "mark")) == ""


def test_amounts_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"resources\.agent\.gpu=-1"):
        small_run(tmp_path).changed({"resources.agent.gpu": -1})
    with pytest.raises(ConfigError, match=r"env\.custom=.* each value a number, above 0"):
        small_run(tmp_path).changed({"resources.env.custom": {"simulator": 0}})
    run = small_run(tmp_path).changed({"resources.replay.memory": 8e9, "resources.agent.gpu": 0.5})
    assert run.resources.replay.amounts() == {"memory": 8e9}
    assert run.resources.agent.amounts() == {"CPU": 1.0, "GPU": 0.5}
    assert type(run).from_json(run.to_json()).resources == run.resources


def test_lists_of_a_runtime_environment_reach_ray_as_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {}
    monkeypatch.setattr(launcher.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(launcher.ray, "init", lambda _, **given: options.update(given))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    given = {"pip": ("minigrid",), "env_vars": {"A": "1"}, "working_dir": "."}
    launcher.connect(small_run(tmp_path, ray_address="local", ray_runtime_env=given), {})
    assert options["runtime_env"] == {**given, "pip": ["minigrid"]}


def test_a_cluster_that_is_not_there_or_does_not_fit_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def init(address: str, **options: Any) -> None:
        asked.append((address, options))
        if address == "old:1":
            raise RuntimeError("Version mismatch:\n  The cluster has Ray 2.1 and Python 3.8.")
        if address != "local":
            raise ConnectionError("Could not find any running Ray instance.")

    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that it is as before when the test is over
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(launcher.ray, "init", init)
    for address, why in (("auto", "Could not find"), ("old:1", "The cluster has Ray 2.1")):
        with pytest.raises(ConfigError, match=f"Ray cluster at {address}: {why}"):
            launcher.connect(small_run(tmp_path, ray_address=address), {})
    # Ray's client is silent about a token that it lacks.
    with pytest.raises(ConfigError, match="set RAY_AUTH_MODE=token if it asks for a token"):
        launcher.connect(small_run(tmp_path, ray_address="ray://there:10001"), {})
    # Without an address a machine without a cluster gets one, with room for the run. Ray's "auto"
    # would join the cluster of another run, which ends with that run.
    asked.clear()
    launcher.connect(small_run(tmp_path), {"CPU": 100.5, "simulator": 2.0})
    ((where, options),) = asked
    assert where == "local"
    assert (options["num_cpus"], options["resources"]) == (101, {"simulator": 2.0})
    assert options["include_dashboard"] is False
    # It has a token, of which nothing is written to the user's home; one of the user's stays.
    assert len(os.environ.pop("RAY_AUTH_TOKEN")) == 64
    # One of `ray start` is joined, or replaced if it is gone.
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:6379")
    asked.clear()
    launcher.connect(small_run(tmp_path), {})
    assert [where for where, _ in asked] == ["auto", "local"]
    del os.environ["RAY_AUTH_TOKEN"]
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").touch()
    launcher.connect(small_run(tmp_path, ray_address="local"), {})
    assert "RAY_AUTH_TOKEN" not in os.environ


def test_a_machine_that_is_too_busy_for_ray_to_start_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray raises a plain Exception then, after a time that it has no setting for."""

    def slow(*_: object, **__: object) -> None:
        raise Exception("The current node timed out during startup. The GCS may be overloaded.")

    monkeypatch.setattr(launcher.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(launcher.ray, "init", slow)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    config = small_run(tmp_path, launcher="ray", ray_address="local")
    with pytest.raises(ConfigError, match=r"timed out during startup.*'ray start --head'"):
        launcher.connect(config, {})
