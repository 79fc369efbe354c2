"""What a learner starts from, with a small Dreamer, and how it gets its batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from agent_worlds import ACTIONS, VECTOR, random_batch
from agent_worlds import config as agent_config
from fleet_parts import CountingAgent, small_run

from dreamfleet.agents import Dreamer
from dreamfleet.agents.dreamer.acting import Draws
from dreamfleet.agents.dreamer.runtime import player as dreamer_module
from dreamfleet.checkpoint import Checkpoint, read_checkpoint
from dreamfleet.clock import Round
from dreamfleet.errors import ConfigError
from dreamfleet.roles.health import Health, read_health
from dreamfleet.roles.learner import Learner
from dreamfleet.roles.policy_batches import Carries, padded_policy
from dreamfleet.roles.progress import Progress
from dreamfleet.roles.saver import SAVE_REQUEST, Saver
from dreamfleet.roles.scaling.sync import Sync
from dreamfleet.transport import ArgumentError, Client, Closed, RemoteError, Server


class ReplayClient:
    """A client of a replay that has stored so many steps, and the reply to its calls."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    def connect(self, timeout: float) -> None: ...

    def position(self) -> ReplayClient:
        return self

    def raise_position(self, steps: int) -> ReplayClient:
        self.steps = max(self.steps, steps)
        return self

    def result(self, timeout: float | None = None) -> dict[str, float]:
        return {"steps": self.steps, "samples": 0}


class LoggerClient:
    """A client of a logger that knows this evaluation score."""

    def __init__(self, score: float | None) -> None:
        self._score = score

    def status(self) -> LoggerClient:
        return self

    def result(self, timeout: float | None = None) -> dict[str, float | None]:
        return {"eval_score": self._score}


def saver(
    agent: Any, config: Any, progress: Progress, steps: int = 0, score: float | None = None
) -> Saver:
    return Saver(agent, config, progress, ReplayClient(steps), LoggerClient(score))


def make_dreamer(seed: int) -> Dreamer:
    """One whose programs other tests have compiled, perhaps."""
    return Dreamer(VECTOR, ACTIONS, agent_config(), seed=seed)


@pytest.fixture(scope="module")
def trained() -> Dreamer:
    agent = make_dreamer(1)
    carry, batch = agent.init_train(4), random_batch(VECTOR, ACTIONS)
    for _ in range(2):
        carry, _, _ = agent.train(carry, batch)
    return agent


def observe(size: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    obs = {key: np.zeros((size, *space.shape), space.dtype) for key, space in VECTOR.items()}
    obs["vector"] = rng.normal(size=obs["vector"].shape).astype(np.float32)
    return obs


def same(first: Any, second: Any) -> bool:
    return np.asarray(first).tobytes() == np.asarray(second).tobytes()


def test_a_resumed_agent_is_the_same_to_the_last_bit(tmp_path: Path, trained: Dreamer) -> None:
    config = small_run(tmp_path)
    first = saver(trained, config, Progress(), 123)
    first.updates = 7
    first.save()
    successor, later = make_dreamer(99), Progress()
    restored = saver(successor, config, later, 130)
    assert "resuming from" in restored.restore()
    assert restored.updates == 7
    assert later.step == 130  # what came into the replay after the checkpoint counts
    before, after = trained.save(), successor.save()
    assert before.keys() == after.keys()
    assert [key for key in before if not same(before[key], after[key])] == []
    # The random numbers of its actions continue as well.
    obs = observe(4)
    for _ in range(3):
        _, actions, _ = trained.policy(trained.init_policy(4), obs)
        _, again, _ = successor.policy(successor.init_policy(4), obs)
        assert same(actions["button"], again["button"])


@pytest.mark.parametrize("place", ["", "ckpt/agent"])
def test_a_run_may_start_from_a_part_of_another_and_says_which(
    tmp_path: Path, trained: Dreamer, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    other, mine = tmp_path / "other", tmp_path / "mine"
    saver(trained, small_run(other), Progress()).save()
    config = small_run(
        mine,
        from_checkpoint=str(other / place),
        from_checkpoint_regex="nets/(encoder|dynamics)",
    )
    agent, progress = make_dreamer(5), Progress()
    fresh, theirs = agent.save(), trained.save()
    with caplog.at_level("INFO", logger="dreamfleet.roles"):
        told = saver(agent, config, progress).restore()
    state = agent.save()
    taken = {key for key in state if key.startswith(("nets/encoder", "nets/dynamics"))}
    assert all(same(state[key], theirs[key]) for key in taken)
    assert all(same(state[key], fresh[key]) for key in state.keys() - taken)
    assert not all(same(fresh[key], theirs[key]) for key in taken)
    assert progress.step == 0
    assert f"loaded {len(taken)} of {len(state)} entries" in told
    assert "nets/encoder" in told.split("not loaded")[0]
    assert "nets/actor" in told.split("not loaded")[1]
    listed = [record.getMessage() for record in caplog.records]
    assert {text for text in listed if text.startswith("loaded")} == {
        f"loaded: {key}" for key in taken
    }
    assert sum(text.startswith("not loaded: ") for text in listed) == len(state) - len(taken)


def test_its_own_checkpoint_comes_before_what_a_run_started_from(
    tmp_path: Path, trained: Dreamer
) -> None:
    config = small_run(tmp_path, from_checkpoint=str(tmp_path / "nowhere"))
    saver(trained, config, Progress(), 50).save()
    again = Progress()
    second = saver(make_dreamer(3), config, again, 50)
    assert "resuming" in second.restore()
    assert again.step == 50


def test_dreamers_actions_in_a_padded_batch_equal_its_actions_alone(
    trained: Dreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same random numbers for a row wherever it stands; these come from the row's own
    observation here, so that it keeps them in any batch."""
    size = trained.config.model.stoch

    def draws_of(
        seed: Any, count: int, keys: Any, shape: tuple[int, int], *, greedy: bool
    ) -> Draws:
        rngs = [np.random.default_rng(int(n)) for n in numbers]
        actions = {
            key.name: np.stack([rng.random(key.shape, np.float32) for rng in rngs]) for key in keys
        }
        return Draws(np.stack([rng.random(size, np.float32) for rng in rngs]), actions)

    monkeypatch.setattr(dreamer_module, "draw", draws_of)
    together, alone = Carries(trained, 8), Carries(trained, 8)
    chosen = []
    for turn in range(6):
        obs = observe(5, seed=turn)
        numbers = [100 * turn + row for row in (0, 1, 2, 3, 4, 0, 0, 0)]  # three copies are added
        carry, slots, _ = together.take(np.arange(5), obs["is_first"])
        carry, actions, _ = padded_policy(trained, (1, 8), carry, obs, "train")
        together.put(slots, carry)
        for row in range(5):
            one = {key: value[row : row + 1] for key, value in obs.items()}
            numbers = [100 * turn + row]
            carry, slots, _ = alone.take(np.array([row]), one["is_first"])
            carry, action, _ = trained.policy(carry, one)
            alone.put(slots, carry)
            assert action["button"][0] == actions["button"][row]
        chosen.append(actions["button"].tolist())
    assert len({action for turn in chosen for action in turn}) == 3


def test_steps_that_only_the_checkpoint_knows_of_are_counted(
    tmp_path: Path, trained: Dreamer
) -> None:
    """The replay's files and counts were removed; the run resumes where its agent was."""
    config = small_run(tmp_path)
    saver(trained, config, Progress(), 200).save()
    progress = Progress()
    emptied = ReplayClient(0)
    Saver(make_dreamer(3), config, progress, emptied, LoggerClient(None)).restore()
    assert progress.step == emptied.steps == 200


def test_the_best_checkpoint_is_kept_by_evaluation_score(tmp_path: Path) -> None:
    config = small_run(tmp_path, eval_envs=1)
    for steps, score in ((10, 1.0), (20, 5.0), (30, 2.0), (40, None), (50, 3.0)):
        saver(CountingAgent(), config, Progress(), steps, score).save()
    checkpoint = Checkpoint(tmp_path / "ckpt" / "agent")
    best, latest = checkpoint.load(which="best"), checkpoint.load()
    assert best is not None
    assert latest is not None
    assert (best.step, latest.step) == (20, 50)


def test_a_checkpoint_is_written_while_learning_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is saved is what the agent was then. A second one waits for the first, and what goes
    wrong is told."""
    disk, agent = threading.Event(), CountingAgent()
    weights = np.zeros(3)
    monkeypatch.setattr(agent, "save", lambda: {"weights": weights})
    written, save = [], Checkpoint.save

    def slow(self: Checkpoint, parts: Any, step: int, **options: Any) -> Path:
        assert disk.wait(120)
        written.append(step)
        if step == 30:
            raise OSError(28, "No space left on device")
        return save(self, parts, step, **options)

    monkeypatch.setattr(Checkpoint, "save", slow)
    saving = saver(agent, small_run(tmp_path), Progress(), 10)
    saving.save(wait=False)
    saving.finish(wait=False)
    assert written == []
    weights += 1.0  # the agent learns
    disk.set()
    saving._replay.steps = 20  # type: ignore[union-attr]
    saving.save(wait=False)
    saving.finish()
    assert written == [10, 20]
    older, newer = sorted(path for path in (tmp_path / "ckpt" / "agent").iterdir())
    for path, expected in ((older, 0.0), (newer, 1.0)):
        np.testing.assert_array_equal(read_checkpoint(path).parts["agent"]["weights"], expected)
    saving._replay.steps = 30  # type: ignore[union-attr]
    saving.save(wait=False)
    with pytest.raises(OSError, match="No space"):
        saving.save()
    latest = Checkpoint(tmp_path / "ckpt" / "agent").load()
    assert latest is not None
    assert latest.step == 20


def test_rounds_of_evaluation_begin_at_their_steps_one_at_a_time_and_over_restarts(
    tmp_path: Path,
) -> None:
    config = small_run(tmp_path, eval_every=100, eval_episodes=2)
    checkpoint = Checkpoint(tmp_path / "ckpt" / "agent")

    def at(step: int) -> int | None:
        """Restart the agent at a step; returns the step of the round that is due or under way."""
        progress = Progress()
        restarted = saver(CountingAgent(), config, progress, step)
        restarted.restore()
        progress.restore(step)
        if restarted.round_is_due():
            restarted.save(pending=True, wait=False)
        restarted.finish()
        path = checkpoint.pending()
        return None if path is None else read_checkpoint(path).step

    assert at(99) is None
    assert at(130) == 130
    assert at(250) == 130  # which is still under way
    checkpoint.rate(checkpoint.pending() or tmp_path, 1.0)
    assert at(250) == 250
    checkpoint.rate(checkpoint.pending() or tmp_path, 3.0)
    assert at(299) is None
    assert at(300) == 300
    checkpoint.rate(checkpoint.pending() or tmp_path, 2.0)
    saver(CountingAgent(), config, Progress(), 400, 9.0).save()  # a score of no round
    best = checkpoint.load("best")
    assert best is not None
    assert (best.step, best.score) == (250, 3.0)


class Source:
    """Stands for a replay that has these batches."""

    def __init__(self, batches: Sequence[dict[str, Any]] = ()) -> None:
        self._batches = iter(batches)

    def sample(self, mode: str) -> dict[str, Any]:
        return next(self._batches, {})


class Granting:
    """A client of a replay that can give batches or not, and of a logger that takes everything."""

    def __init__(self, *, enough: bool = True) -> None:
        self.granted: list[int] = []
        self._enough = enough

    def finish(self, sequences: int) -> Granting:
        self.granted.append(sequences)
        return self

    grant = finish

    def add(self, step: int, metrics: Any) -> Granting:
        return self

    def wait(self, timeout: float) -> bool:
        return True

    def done(self) -> bool:
        return True

    def result(self) -> bool:
        return self._enough


def test_updates_left_are_those_before_there_was_enough_data_and_no_more(tmp_path: Path) -> None:
    args = small_run(tmp_path, steps=1000, batch_size=16, batch_length=32, train_ratio=64.0, envs=8)

    def left(updates: int, step: int = 1000, client: Any = None, **changes: Any) -> int:
        progress = Progress(1000)
        progress.restore(step)
        progress.stopped = bool(changes.pop("stopped", False))
        config = replace(args, **changes)
        count = SimpleNamespace(updates=updates, health=Health())
        client = client or Granting()
        learner = Learner(None, config, progress, count, client, client)  # type: ignore[arg-type]
        learner.begin_end(progress.step)
        found = learner.updates_left()
        learner.finish_replay()
        assert client.granted == [config.batch_size * found]
        if found:
            count.updates += found - 1
            assert learner.updates_left() == 1, "how many it is, is decided once"
            count.updates += 1
            assert learner.updates_left() == 0
        return found

    assert left(61) == 64  # of 125
    assert left(125) == left(130) == 0
    assert left(0, train_ratio=4096.0) < 4096 * 1000 / 512, "what is owed has a bound"
    many: dict[str, Any] = {"envs": 64, "batch_size": 4, "batch_length": 8, "train_ratio": 32.0}
    assert left(50, **many) == 950, "an update a step; larger messages may all be on their way"
    assert left(61, step=999) == 0, "it ended at its target score"
    assert left(61, stopped=True) == left(61, train_ratio=0.0) == 0


@pytest.mark.parametrize("enough", [True, False])
def test_a_complete_run_does_not_wait_for_batches_that_its_replay_cannot_give(
    tmp_path: Path, enough: bool
) -> None:
    args = small_run(tmp_path, steps=1000, batch_size=16, batch_length=32, train_ratio=64.0, envs=8)
    progress, client = Progress(1000), Granting(enough=enough)
    progress.restore(1000)
    count: Any = SimpleNamespace(updates=61, offset=0, health=Health())
    learner = Learner(None, args, progress, count, client, client)  # type: ignore[arg-type]
    said = {"stop": False, "finished": True, "sent": True, "steps": 1000, "too little": False}
    assert not learner._apply_round(Round([said])), "updates are missing"
    learner.finish_replay()  # takes the reply
    said["too little"] = learner._too_little
    assert learner._apply_round(Round([said])) != enough


def test_updates_before_the_first_step_are_asked_for_until_they_are_made(tmp_path: Path) -> None:
    config = small_run(tmp_path, batch_size=4, prefill=("a",), pretrain=10)
    progress, client, saved = Progress(600), Granting(), list[int]()
    count = SimpleNamespace(
        health=Health(),
        updates=3,
        save=lambda wait: saved.append(count.updates),
    )
    learner = Learner(None, config, progress, count, client, client)  # type: ignore[arg-type]
    assert learner.pretrain()
    assert client.granted == [28]
    assert not progress.may_begin(4, 0)
    count.updates = 10
    assert not learner.pretrain()
    assert saved == [10]
    assert progress.may_begin(4, 0)
    count.updates = 0
    progress.restore(5)
    assert not learner.pretrain(), "the run has begun"
    too_few: Any = Granting(enough=False)
    learner = Learner(None, config, Progress(600), count, too_few, too_few)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs 16 steps in prefill"):
        learner.pretrain()


class Stopping(CountingAgent):
    """An agent that is asked to stop while it trains or reports."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self.done: list[str] = []

    def train(self, carry: Any, batch: Any) -> Any:
        self.done.append("train")
        self._progress.stop()
        return carry, {}, {}

    def report(self, carry: Any, batch: Any) -> Any:
        self.done.append("report")
        self._progress.stop()
        return carry, {}


@pytest.mark.parametrize("what", ["train", "report"])
def test_an_agent_that_is_to_stop_does_not_train_and_report_on(tmp_path: Path, what: str) -> None:
    progress, source = Progress(), Source([{"number": 0}] * 20)
    agent = Stopping(progress)
    config = small_run(tmp_path, report_every=1e-6, report_batches=5)
    client: Any = SimpleNamespace(
        add=lambda *_: None,
        status=lambda: SimpleNamespace(wait=lambda _: None),
        sample=source.sample,
    )
    saves = saver(agent, config, progress)
    learner = Learner(agent, config, progress, saves, client, client)
    if what == "train":
        learner.run()
    else:
        learner.report()
    assert agent.done == [what]


def test_a_refused_metric_is_logged_and_refused_states_end_the_agent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise ArgumentError("this cannot be taken")

    server = Server("ipc://{auto}")
    server.bind("add", refuse)
    server.bind("update", refuse)
    agent, progress, config = CountingAgent(), Progress(), small_run(tmp_path)
    saves = saver(agent, config, progress)
    with server, Client(server.address, timeout=60) as client:
        learner = Learner(agent, config, progress, saves, client, client)

        def twice(work: Callable[[], None]) -> None:
            """And wait for the replies in between, which may also come at once."""
            work()
            assert client._progress(lambda: not client._pending, time.monotonic() + 60)
            work()

        twice(learner.log)
        assert "'add' failed" in caplog.text
        batch = {"stepid": np.zeros((2, 4, 20), np.uint8)}
        with pytest.raises(RemoteError, match="this cannot be taken"):
            twice(lambda: (learner.update(batch), learner.process()))


class Traced(CountingAgent):
    """An agent that says what it needs, keeps its state itself, and writes profiles."""

    def __init__(self) -> None:
        super().__init__()
        self.traced: list[Any] = []
        self.threads: list[str] = []

    def memory(self) -> dict[str, float]:
        return {"parameters": 1e6, "optimizer": 2e6, "activations": 3e9, "step": 4e9, "limit": 8e9}

    @contextmanager
    def trace(self, folder: Path) -> Iterator[None]:
        self.traced.append(folder)
        before = self._updates
        yield
        self.traced.append(self._updates - before)

    def save_later(self) -> Any:
        updates = self._updates

        def state() -> dict[str, Any]:
            self.threads.append(threading.current_thread().name)
            return {"updates": updates}

        return state


class Told(Granting):
    """A logger that remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, Any] = {}

    def add(self, step: int, metrics: Any) -> Told:
        self.metrics |= metrics
        return self

    def update(self, states: Any) -> Told:
        return self

    def done(self) -> bool:
        return True


def learner_of(agent: Any, config: Any) -> tuple[Learner, Saver, Told]:
    saving, told = saver(agent, config, Progress()), Told()
    learner = Learner(agent, config, Progress(), saving, told, told)  # type: ignore[arg-type]
    return learner, saving, told


def test_what_training_needs_is_told_and_a_refusal_is_final(tmp_path: Path) -> None:
    learner, _, told = learner_of(Traced(), small_run(tmp_path))
    learner.compile()
    assert told.metrics["learner/memory"] == (
        "parameters 1MB, optimizer 2MB, activations 3GB; a step 4GB of 8GB on each device, as "
        "compiled"
    )

    class Refused(CountingAgent):
        def compile(self, **_: Any) -> None:
            raise ConfigError("too large")

    learner, _, told = learner_of(Refused(), small_run(tmp_path))
    assert not read_health(tmp_path / "workers" / "agent").final
    with pytest.raises(ConfigError, match="too large"):
        learner.compile()
    assert read_health(tmp_path / "workers" / "agent").final, "it is not started again"
    assert "learner/memory" not in told.metrics


def test_an_agent_that_keeps_its_state_itself_is_asked_for_it_by_the_writer(tmp_path: Path) -> None:
    agent = Traced()
    learner, saving, _ = learner_of(agent, small_run(tmp_path))
    saving.save(wait=False)
    learner.update({"stepid": np.zeros((1, 20), np.uint8)})
    saving.finish()
    assert agent.threads == ["checkpoint_0"]
    latest = Checkpoint(tmp_path / "ckpt" / "agent").load()
    assert latest is not None
    assert latest.parts["agent"] == {"updates": 0}
    saving.save()
    assert len(agent.threads) == 1, "one that is waited for is looked at first"


def test_a_few_updates_are_profiled_once_and_fewer_if_the_run_ends(tmp_path: Path) -> None:
    batch = {"stepid": np.zeros((1, 20), np.uint8)}
    folder = tmp_path / "profile" / "jax"
    for updates, expected in ((3, []), (7, [folder, 2]), (20, [folder, 5])):
        agent = Traced()
        learner, _, _ = learner_of(agent, small_run(tmp_path, profile=True))
        for _ in range(updates):
            learner.update(batch)
        learner.end_trace()
        assert agent.traced == expected
    agent = Traced()
    learner, _, _ = learner_of(agent, small_run(tmp_path))
    for _ in range(20):
        learner.update(batch)
    assert agent.traced == [], "it was not asked for"


def test_a_learner_says_that_it_waits_for_a_host_that_compiles(tmp_path: Path) -> None:
    shown: list[str] = []

    class Others(Sync):
        def gather(self, name: str, said: Any, on_wait: Any = None) -> list[Any]:
            on_wait([1])
            on_wait([1, 3])
            return [said] * 4

    args = small_run(tmp_path, hosts=4, batch_size=4)
    count: Any = SimpleNamespace(updates=0, health=SimpleNamespace(waits=shown.append))
    none: Any = None
    learner = Learner(CountingAgent(), args, Progress(), count, none, none, Others())
    learner._await_hosts()
    assert shown == [
        "the learner waits for host 1, which is compiling",
        "the learner waits for host 1 and host 3, which are compiling",
        "",
    ]


class Withheld(Source):
    """A replay whose batches do not come before they are released, and a logger that counts what
    it is told."""

    def __init__(self) -> None:
        super().__init__([{"stepid": np.zeros((1, 20), np.uint8)}])
        self.go, self.told = threading.Event(), threading.Semaphore(0)

    def sample(self, mode: str) -> dict[str, Any]:
        if batch := super().sample(mode):
            return batch
        self.go.wait()
        raise Closed("The client was closed.")

    def add(self, step: int, metrics: Any) -> None:
        self.told.release()

    def status(self) -> Any:
        return SimpleNamespace(wait=lambda _: None)

    def update(self, states: Any) -> Any:
        return SimpleNamespace(done=lambda: True, result=lambda: None)


def test_a_learner_that_waits_for_a_batch_logs_and_saves(tmp_path: Path) -> None:
    """By the clock, and when it is asked to."""
    source, progress, agent = Withheld(), Progress(), CountingAgent()
    client: Any = source
    config = small_run(tmp_path, log_every=0.01, report_every=0.0, save_every=0.01)
    saves = saver(agent, config, progress)
    learner = Learner(agent, config, progress, saves, client, client)
    thread = threading.Thread(target=learner.run)
    thread.start()
    saved = Checkpoint(tmp_path / "ckpt" / "agent")

    def wait_for(serial: int) -> None:
        while not saved.all() or int(saved.all()[0].name[:6]) < serial:
            assert source.told.acquire(timeout=60)

    try:
        wait_for(1)
        for _ in range(5):
            assert source.told.acquire(timeout=60)
        assert len(saved.all()) == 1, "it has learned nothing since"
        (tmp_path / SAVE_REQUEST).touch()
        wait_for(2)
        health = read_health(tmp_path / "workers" / "agent")
        assert health.waiting == "the learner waits for a batch from the replay"
    finally:
        progress.stop()
        thread.join()
        source.go.set()
    for each in threading.enumerate():
        if each.name.startswith("learner-batches"):
            each.join(60)
            assert not each.is_alive()
