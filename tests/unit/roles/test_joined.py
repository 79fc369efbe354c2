"""Roles of a run whose environments come and go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_parts import EVERY_STEP, small_run
from numpy.typing import NDArray

from dreamfleet.agents import RandomAgent
from dreamfleet.config import RunConfig
from dreamfleet.envs import make_env, noop
from dreamfleet.errors import ConfigError
from dreamfleet.fleet.factories import factories
from dreamfleet.fleet.launchers.local import LocalLauncher
from dreamfleet.parallel import _bound
from dreamfleet.roles import fences as fences_file
from dreamfleet.roles.actor import Actor, Presence
from dreamfleet.roles.checks import ObservationCheck, Owners, check_acting
from dreamfleet.roles.fences import (
    Fence,
    FenceReader,
    Fences,
    fenced,
    read_fences,
    write_fences,
)
from dreamfleet.roles.health import STARTED, health_path, read_health
from dreamfleet.roles.invitations import write_place
from dreamfleet.roles.logger_client import video_env
from dreamfleet.roles.policy_batches import policy_sizes
from dreamfleet.roles.progress import Progress, limiter_for
from dreamfleet.roles.replay import ReplayService, bind
from dreamfleet.roles.scaling.shards import ReplayClient
from dreamfleet.roles.serial import InProcessClient
from dreamfleet.transport import (
    ArgumentError,
    BatchServer,
    Client,
    Disconnected,
)

LONG = 120.0
JOINED = 40
DUMMY = make_env("bundled:dummy", **EVERY_STEP)


def eventually(question: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LONG
    while not (answer := question()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return answer


# --- settings ------------------------------------------------------------------------------------


def test_settings_of_a_run_that_others_join() -> None:
    run = RunConfig(bind="127.0.0.1", remote_envs=True, envs=2, actor_batch=16, expect_envs=40)
    assert run.policy_batch == 16  # though the run itself has two environments only
    assert RunConfig(envs=2, actor_batch=16).policy_batch == 2
    assert run.known_envs == 40
    assert 16 in policy_sizes(run)
    assert run.envs_per_process in policy_sizes(run)
    assert video_env(run) == run.all_envs, "the first one that joins"
    assert video_env(RunConfig(bind="127.0.0.1")) == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"expect_envs": 9}, "expect_envs=9 exceeds the 8"),
        ({"bind": "127.0.0.1", "offline": ("run",)}, "without environments: leave bind"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RunConfig(**settings)


def test_a_resumed_run_listens_where_it_did_before(tmp_path: Path) -> None:
    run = small_run(tmp_path, bind="127.0.0.1")
    bound, place = _bound(run, LocalLauncher(tmp_path))
    assert bound.actor_addr == f"tcp://127.0.0.1:{place.ports['actor']}"
    assert list(place.ports) == ["actor"]
    assert place.port != place.ports["actor"]
    moved = replace(place, port=place.port + 300)
    write_place(tmp_path, moved)
    assert _bound(run, LocalLauncher(tmp_path))[1] == moved
    # Several actors need as many ports.
    several = small_run(tmp_path / "several", bind="127.0.0.1", envs=4, actors=3)
    ports = _bound(several, LocalLauncher(tmp_path))[1].ports
    assert list(ports) == ["actor", "actor-1", "actor-2"]
    assert len({*ports.values()}) == 3
    # An address that the person has chosen stays.
    chosen = small_run(tmp_path, bind="127.0.0.1", actor_addr="tcp://127.0.0.1:7")
    assert _bound(chosen, LocalLauncher(tmp_path))[0].actor_addr == "tcp://127.0.0.1:7"


# --- acting --------------------------------------------------------------------------------------


class Nobody:
    """A client that nobody answers."""

    def __getattr__(self, method: str) -> Any:
        return lambda *_: None

    def stats(self) -> dict[str, float]:
        return {"inflight": 0.0, "connected": 1.0}


def observations(ids: list[int]) -> dict[str, Any]:
    obs = {
        key: np.stack([value] * len(ids))
        for key, value in DUMMY.step(noop(DUMMY.act_space)).items()
    }
    flags = {"envid": np.array(ids), "is_eval": np.zeros(len(ids), bool)}
    return {
        **obs,
        **flags,
        "is_first": np.ones(len(ids), bool),
    }


def an_actor(folder: Path, **changes: Any) -> tuple[Actor, Progress]:
    agent, progress = RandomAgent(DUMMY.obs_space, DUMMY.act_space), Progress()
    nobody: Any = Nobody()
    return Actor(
        agent, small_run(folder, bind="127.0.0.1", **changes), progress, nobody, nobody
    ), progress


def acting(run: RunConfig, progress: Progress, index: int = 0) -> tuple[Presence, Any, list[int]]:
    """A server of `act` that may be held back, and the environments that it has acted in."""
    acted: list[int] = []

    def act(obs: dict[str, Any]) -> tuple[Any, None]:
        acted.extend(obs["envid"].tolist())
        return {"action": obs["envid"]}, None

    server = BatchServer("tcp://127.0.0.1:{auto}", "actor")
    owners = Owners(server.connected)
    check = ObservationCheck(DUMMY.obs_space, 4, owners, lambda *_: None)
    server.bind("act", act, batch=1, wait=0.0, check=check)
    return Presence(run, progress, server, owners, index), server, acted


def test_a_run_begins_when_all_are_there_and_an_agent_that_is_restarted_does_not_wait(
    tmp_path: Path,
) -> None:
    run, progress = small_run(tmp_path, bind="127.0.0.1", expect_envs=3), Progress()
    presence, server, acted = acting(run, progress)

    def present() -> int:
        presence.poll()
        return progress.present

    with server, Client(server.address) as stays, Client(server.address) as last:
        leaves = Client(server.address)
        leaves.call_block("act", observations([JOINED, JOINED + 1]))
        eventually(lambda: present() == 2)
        leaves.close(flush=0.0)
        eventually(lambda: present() == 0)
        # Its ids are used again, and nobody counts them twice.
        first = stays.call_block("act", observations([JOINED, JOINED + 1]))
        eventually(lambda: present() == 2)
        assert (presence.held, acted, first.done()) == (True, [], False)
        second = last.call_block("act", observations([JOINED + 2]))
        eventually(lambda: present() == 3)
        assert not presence.held
        first.result(LONG)
        second.result(LONG)
        assert acted == [JOINED, JOINED + 1, JOINED + 2]  # nothing of the one that has left
    assert health_path(run, STARTED).exists()
    successor, again = acting(run, progress := Progress())[:2]
    assert (successor.held, progress.begun) == (False, True)
    again.close()


def test_a_run_that_is_ended_before_it_has_begun_lets_go(tmp_path: Path) -> None:
    _, server, _ = acting(small_run(tmp_path, bind="127.0.0.1", expect_envs=3), Progress())
    with server, Client(server.address) as client:
        call = client.call_block("act", observations([0]))
        eventually(lambda: server.stats()["act/waiting"])
        server.close()
        with pytest.raises(Disconnected):
            call.result(LONG)


def test_a_batch_that_is_made_smaller_goes_at_once() -> None:
    server = BatchServer("ipc://{auto}")
    server.bind("double", lambda x: (2 * x, None), batch=4, wait=3600.0)
    with server, Client(server.address) as client:
        futures = [client.call_block("double", np.array([value])) for value in (1, 2)]
        eventually(lambda: server.stats()["double/waiting"] == 2)
        server.resize("double", 2)
        assert [future.result(LONG).tolist() for future in futures] == [[2], [4]]


# --- learning ------------------------------------------------------------------------------------


def test_sampling_waits_while_no_environment_has_made_a_sequence(tmp_path: Path) -> None:
    """So many have joined that there are enough steps in all, and in none of them."""
    run = small_run(tmp_path, envs=1, batch_size=1, train_ratio=0.0)
    parts, stop = factories(run), threading.Event()
    buffers = parts.make_replay_train(), parts.make_replay_eval()
    service = ReplayService(*buffers, parts.make_stream, limiter_for(run), run, stop)
    service.attach({})
    shard: Any = InProcessClient("replay")
    bind(shard, service, run)
    ids = np.arange(JOINED, JOINED + 2 * run.window)

    def add(number: int, rows: NDArray[np.int64]) -> None:
        steps = {"vector": np.zeros((len(rows), 2), np.float32)}
        flags = {key: np.zeros(len(rows), bool) for key in ("is_first", "is_last", "is_terminal")}
        service.add_batch({**steps, **flags}, rows, False, "source", number)

    add(1, ids)
    sampled = threading.Event()

    def sample() -> None:
        ReplayClient(run, "learner", 1, [shard]).sample("train")
        sampled.set()

    thread = threading.Thread(target=sample)
    thread.start()
    waits = f"no environment has made {run.window} steps in a row yet"
    service.report({})
    assert waits in read_health(health_path(run, "replay")).waiting
    assert not sampled.is_set()
    for number in range(2, 2 + run.window):
        add(number, ids[:1])
    assert sampled.wait(LONG)
    thread.join()
    service.close()


# --- fences --------------------------------------------------------------------------------------


def test_the_fences_are_read_when_they_were_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []

    def counted(logdir: Path) -> Fences:
        reads.append(logdir)
        return read_fences(logdir)

    monkeypatch.setattr(fences_file, "read_fences", counted)
    of = FenceReader(tmp_path).of
    assert of(JOINED) is None
    reads.clear()
    for incarnation in (1, 2):
        fence = Fence((JOINED, JOINED + 1), False, incarnation, "first")
        write_fences(tmp_path, Fences(2, (fence,)))
        for envid in (JOINED, JOINED + 1, JOINED):
            assert of(envid) == fence
    assert len(reads) == 2


def test_an_environment_acts_with_its_own_actor_only(tmp_path: Path) -> None:
    run = RunConfig(logdir=tmp_path, actors=2, envs=8, bind="127.0.0.1", agent="random")
    write_fences(tmp_path, Fences(1, (Fence((8, 10), False, 1, "first"),)))
    sent, train = np.array(fenced([8, 10], 1)), np.zeros(2, bool)
    check_acting(run, 0)(sent, train, "first")
    check_acting(run, 1)(np.array([1, 3]), train, "")  # the run's own
    with pytest.raises(ArgumentError, match="another actor"):
        check_acting(run, 1)(sent, train, "first")
