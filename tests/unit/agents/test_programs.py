"""Programs are compiled once for the same shapes, and never used where they do not belong."""

import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_worlds import ACTIONS, VECTOR, config, random_batch

from dreamfleet.agents import Dreamer
from dreamfleet.agents.dreamer import actor_critic, world_model
from dreamfleet.agents.dreamer.rssm import State
from dreamfleet.agents.dreamer.runtime import programs
from dreamfleet.agents.dreamer.runtime.agent import give_memory_back
from dreamfleet.agents.dreamer.runtime.programs import Program


def test_a_program_is_traced_once_for_the_same_shapes() -> None:
    traced: list[int] = []

    def double(state: State, scale: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        traced.append(state.deter.size)
        return State(state.deter * scale, state.stoch), {"sum": state.deter.sum()}

    program = Program("double", double, donate_first=True)
    for width in (3, 3, 4, 3):
        state = State(jnp.arange(width, dtype=jnp.float32), jnp.ones(2))
        new, metrics = program(state, jnp.asarray(2.0))
        np.testing.assert_array_equal(new.deter, 2 * np.arange(width))
        np.testing.assert_array_equal(new.stoch, np.ones(2))
        assert float(metrics["sum"]) == np.arange(width).sum()
        assert state.deter.is_deleted(), "donated"
    assert traced == [3, 4]


def test_loss_that_a_script_replaces_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although compiled programs are kept, of which the one of the same settings is there."""

    def losses() -> dict[str, float]:
        agent = Dreamer(VECTOR, ACTIONS, config())
        _, _, metrics = agent.train(agent.init_train(4), random_batch(VECTOR, ACTIONS))
        return {name: float(x) for name, x in metrics.items() if name.startswith("loss/")}

    def replace(module: Any, name: str, change: float) -> None:
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: original(*args) + change)

    before = losses()
    folder = Path(jax.config.values["jax_compilation_cache_dir"])
    assert any("-cache" in path.name for path in folder.iterdir()), "programs are kept"
    replace(world_model, "continue_loss", 1.0)
    replace(actor_critic, "policy_loss", 2.0)
    replace(actor_critic, "replay_value_loss", 8.0)
    row = world_model.TERMS["reward"]
    changed = row._replace(loss=lambda *args: row.loss(*args) + 4.0)
    monkeypatch.setitem(world_model.TERMS, "reward", changed)  # type: ignore[arg-type]
    after = losses()
    apart = {name: after[name] - before[name] for name in before}
    expected = {
        "loss/continue": 1.0,
        "loss/policy": 2.0,
        "loss/reward": 4.0,
        "loss/replay_value": 8.0,
    }
    assert apart == {name: pytest.approx(expected.get(name, 0.0), abs=1e-4) for name in before}


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_programs_are_not_kept_where_others_may_write(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    """They could have their own program executed."""
    folder, before = tmp_path / "cache", jax.config.values["jax_compilation_cache_dir"]
    folder.mkdir()
    folder.chmod(mode)
    assert not programs.enable_cache(str(folder))
    assert "other users can write to it" in caplog.text
    assert jax.config.values["jax_compilation_cache_dir"] == before


def test_a_new_folder_of_programs_is_private(tmp_path: Path) -> None:
    before = jax.config.values["jax_compilation_cache_dir"]
    assert programs.enable_cache(str(tmp_path / "cache"))
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "cache")
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries have no such call")
def test_memory_that_compiling_took_is_given_back() -> None:
    def used() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    parts = [bytes(1000) for _ in range(100_000)]
    last = bytes(1000)  # behind all of them, so that nothing is given back by itself
    del parts
    before = used()
    give_memory_back()
    assert used() < before - 50_000_000
    assert len(last) == 1000
