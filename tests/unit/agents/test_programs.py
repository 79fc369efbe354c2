"""Traced programs are kept between runs, and never used where they do not belong."""

import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_worlds import ACTIONS, VECTOR, config, random_batch

from dreamfleet.agents import Dreamer
from dreamfleet.agents.dreamer import agent as dreamer
from dreamfleet.agents.dreamer import programs
from dreamfleet.agents.dreamer.programs import Program, TraceCache
from dreamfleet.agents.dreamer.rssm import State


class Traced:
    """A small program's function that counts how often it is traced."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, state: State, scale: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        self.count += 1
        return State(state.deter * scale, state.stoch), {"sum": state.deter.sum()}


def run(folder: Path, settings: object = "same", width: int = 3) -> int:
    """Run the program as a new process would; returns how often it was traced."""
    traced = Traced()
    program = Program("double", traced, donate_first=True, traces=TraceCache(str(folder), settings))
    state = State(jnp.arange(width, dtype=jnp.float32), jnp.ones(2))
    new, metrics = program(state, jnp.asarray(2.0))
    np.testing.assert_array_equal(new.deter, 2 * np.arange(width))
    np.testing.assert_array_equal(new.stoch, np.ones(2))
    assert float(metrics["sum"]) == np.arange(width).sum()
    assert state.deter.is_deleted(), "donated"
    return traced.count


def test_a_program_is_traced_once(tmp_path: Path) -> None:
    assert [run(tmp_path) for _ in range(3)] == [1, 0, 0]


def test_whatever_shapes_a_program_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path)
    assert run(tmp_path, settings="others") == 1
    assert run(tmp_path, width=4) == 1
    with monkeypatch.context() as patch:
        patch.setattr(programs.metadata, "version", lambda _: "99")
        assert run(tmp_path) == 1
    with monkeypatch.context() as patch:
        patch.setattr(programs, "_sources", lambda: b"other code")
        assert run(tmp_path) == 1
    before = jax.config.values["jax_default_matmul_precision"]
    jax.config.update("jax_default_matmul_precision", "highest")
    assert run(tmp_path) == 1
    jax.config.update("jax_default_matmul_precision", before)
    assert run(tmp_path) == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content[::-1],
    ],
    ids=["half", "empty", "another"],
)
def test_a_damaged_file_is_ignored_and_replaced(
    tmp_path: Path, damage, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path)
    (path,) = (tmp_path / "traces").iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert run(tmp_path) == 1
    assert "damaged" in caplog.text
    assert run(tmp_path) == 0
    assert list((tmp_path / "traces").iterdir()) == [path]


def test_a_disk_that_refuses_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        assert run(tmp_path) == 1
    assert "could not be kept" in caplog.text
    assert not list((tmp_path / "traces").iterdir())
    assert run(tmp_path) == 1


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_programs_are_not_kept_where_others_may_write(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever may write there could have their own program executed."""
    folder, before = tmp_path / "cache", jax.config.values["jax_compilation_cache_dir"]
    folder.mkdir()
    folder.chmod(mode)
    assert not programs.enable_cache(str(folder))
    assert "others may write to it" in caplog.text
    assert jax.config.values["jax_compilation_cache_dir"] == before


def test_a_new_folder_of_programs_is_private(tmp_path: Path) -> None:
    before = jax.config.values["jax_compilation_cache_dir"]
    assert programs.enable_cache(str(tmp_path / "cache"))
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "cache")
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
    jax.config.update("jax_compilation_cache_dir", before)


def test_a_kept_training_step_computes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is traced anew, and need not be compiled if another test has.
    monkeypatch.setattr(programs, "_sources", lambda: str(tmp_path).encode())

    def train() -> dict[str, np.ndarray]:
        agent = Dreamer(VECTOR, ACTIONS, config())
        carry, batch = agent.init_train(4), random_batch(VECTOR, ACTIONS)
        for _ in range(3):
            carry, _, _ = agent.train(carry, batch)
        return agent.save()

    traced = train()
    monkeypatch.delattr(dreamer, "train_step")
    kept = train()
    assert traced.keys() == kept.keys()
    for name, value in traced.items():
        np.testing.assert_array_equal(value, kept[name], err_msg=name)


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries have no such call")
def test_memory_that_compiling_took_is_given_back() -> None:
    def used() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    parts = [bytes(1000) for _ in range(100_000)]
    last = bytes(1000)  # behind all of them, so that nothing is given back by itself
    del parts
    before = used()
    dreamer.give_memory_back()
    assert used() < before - 50_000_000
    assert len(last) == 1000
