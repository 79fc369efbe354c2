"""The power is cut: whatever pages had reached the disk, the replay holds what was synced."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_model import InOrder

from dreamfleet.replay import Replay, replay
from dreamfleet.replay.reading import stored_episodes
from dreamfleet.replay.storage import journal
from dreamfleet.replay.storage.journal import Journal, read_committed
from dreamfleet.replay.storage.memory import Arena

PAGE = 4096
LENGTH, CHUNK = 2, 4
WRITER = "writer"
Boot = Callable[[], None]
Files = dict[str, bytes]


@pytest.fixture
def boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Boot:
    """Starts the machine again, as far as a replay can see."""
    path, count = tmp_path / "boot_id", itertools.count()
    monkeypatch.setattr(journal, "BOOT_ID", path, raising=False)

    def again() -> None:
        path.write_text(f"{next(count)}\n")

    again()
    return again


# --- a history -----------------------------------------------------------------------------------

Batch = list[tuple[int, int, bool]]  # tag, stream, whether an episode begins

CASES: dict[str, tuple[int, list[Batch], list[Batch]]] = {
    "before the first sync": (100, [], [[(1, 0, True), (2, 0, False)], [(101, 1, True)]]),
    "a full chunk": (
        100,
        [[(1, 0, True), (2, 0, False), (3, 0, False), (4, 0, False)]],
        [[(5, 0, True)]],
    ),
    # A second episode begins in a new chunk, and the oldest chunk leaves.
    "one stream": (
        4,
        [[(1, 0, True), (2, 0, False), (3, 0, False), (4, 0, False)], [(5, 0, False)]],
        [[(6, 0, False)], [(7, 0, True), (8, 0, False), (9, 0, False)]],
    ),
    "two streams": (
        100,
        [[(1, 0, True), (101, 1, True)], [(2, 0, False), (102, 1, False)]],
        [[(3, 0, True)], [(103, 1, False)]],
    ),
}
"""Capacity, what is added before the sync, and what after it."""


def row(tag: int, first: bool = False) -> dict[str, Any]:
    """A step whose bytes follow from its tag, and lie in several pages."""
    return {
        "tag": np.int64(tag),
        "image": np.full(2048, tag, np.uint8),
        "state": np.full(2, tag, np.float32),
        "reward": np.float32(tag),
        "is_first": np.bool_(first),
        "is_last": np.bool_(False),
    }


def opened(directory: Path, capacity: int = 100) -> Replay:
    selector = InOrder()
    return Replay(LENGTH, capacity, directory, chunk=CHUNK, selector=selector)


def add(replay: Replay, batches: Sequence[Batch], number: int) -> int:
    rows = [row(tag, first) for tag, _, first in batches[number]]
    steps = {key: np.stack([each[key] for each in rows]) for key in rows[0]}
    return replay.add_batch(steps, [stream for _, stream, _ in batches[number]], WRITER, number)


def update(replay: Replay) -> None:
    """Write other states back to every step."""
    data = replay.sample(len(replay), "report")
    replay.update({"stepid": data["stepid"], "state": -data["state"]})


def stored(replay: Replay) -> list[list[int]]:
    """The tags in each chain. Every row is whole."""
    assert replay.skipped_files == {}
    table = replay._table
    if table is None:
        return []
    found = []
    for head in table.head_slot[table.head_slot >= 0].tolist():
        slots = list(table.store.preceding(head))[::-1]
        rows = {
            key: np.concatenate([column[s, : table.store.lengths[s]] for s in slots])
            for key, column in table.store.columns.items()
        }
        tags = rows["tag"]
        assert (rows["image"] == tags[:, None]).all(), "a row is not whole"
        assert (rows["reward"] == tags).all(), "a row is not whole"
        assert (np.abs(rows["state"]) == tags[:, None]).all(), "a state that never was"
        assert (tags[1:] == tags[:-1] + 1).all(), "steps are spliced"
        found.append(tags.tolist())
    return sorted(found)


def tags_of(batches: Sequence[Batch]) -> set[int]:
    return {tag for batch in batches for tag, _, _ in batch}


# --- the disk ------------------------------------------------------------------------------------


class Disk:
    """Knows which content of which file is on the disk for sure.

    Args:
        directory: Of the replay.
        patch: For calls that sync.
        sure: What was synced before; everything but the journal that changes with every step if
            not given.
    """

    def __init__(
        self, directory: Path, patch: pytest.MonkeyPatch, sure: Files | None = None
    ) -> None:
        self._directory = directory
        self.sure = {**files_of(directory), "journal": b""} if sure is None else sure
        self.names = set(self.sure)
        self.before_sync: Boot = lambda: None
        sync, fsync = Arena.sync, os.fsync

        def synced(arena: Arena, slot: int) -> None:
            self.before_sync()
            sync(arena, slot)
            mapped = f"{arena._address(slot):x}-"
            for line in Path("/proc/self/maps").read_text().splitlines():
                if line.startswith(mapped):
                    self._keep(Path(line.split()[-1]))

        def fsynced(fd: int) -> None:
            self.before_sync()
            fsync(fd)
            self._keep(Path(f"/proc/self/fd/{fd}").readlink())

        patch.setattr(Arena, "sync", synced)
        patch.setattr(os, "fsync", fsynced)

    def _keep(self, path: Path) -> None:
        if path == self._directory:
            self.names = set(files_of(self._directory))
        elif path.parent == self._directory:
            self.sure[path.name] = path.read_bytes()

    def after_a_power_cut(self) -> Iterator[Files]:
        """Every content that the disk may have if the power is cut now."""
        now = files_of(self._directory)
        choices: list[list[tuple[str, bytes | None]]] = []
        for name in sorted(now.keys() | self.names):
            versions: list[bytes | None] = []
            if name not in now or name not in self.names:
                versions.append(None)  # that it was made, or removed, is not synced
            if name not in now:
                versions.append(self.sure[name])
            else:
                new = now[name]
                old = self.sure.get(name, b"").ljust(len(new), b"\0")
                pages = (
                    sorted({old[at : at + PAGE], new[at : at + PAGE]})
                    for at in range(0, len(new), PAGE)
                )
                versions += [b"".join(each) for each in itertools.product(*pages)]
            choices.append([(name, version) for version in versions])
        for state in itertools.product(*choices):
            yield {name: content for name, content in state if content is not None}


def files_of(directory: Path) -> Files:
    """What processes see."""
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.name != "lock"}


def write(directory: Path, files: Files) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content)


@pytest.mark.parametrize("case", list(CASES))
def test_any_pages_behind_the_last_sync_are_lost(case: str, memory_path: Path, boot: Boot) -> None:
    """Between two syncs, and at every moment within the second: each subset of the pages, the new
    names and the removals that are not synced yet."""
    capacity, before, after = CASES[case]
    batches, count = before + after, len(before)
    ticks = np.cumsum([0, *map(len, batches)]).tolist()
    live, cut = memory_path / "live", memory_path / "cut"
    states: dict[tuple[tuple[str, bytes], ...], tuple[int, ...]] = {}

    def note(*held: int) -> None:
        for files in disk.after_a_power_cut():
            states[tuple(sorted(files.items()))] = held

    with opened(live, capacity) as replay, pytest.MonkeyPatch.context() as patch:
        for number in range(count):
            add(replay, batches, number)
        if before:
            replay.sync()
        disk = Disk(live, patch)
        for number in range(count, len(batches)):
            add(replay, batches, number)
        update(replay)
        evicted = disk.names - set(files_of(live))
        disk.before_sync = lambda: note(count, len(batches))
        replay._sync()
        disk.before_sync = lambda: None
        note(len(batches))
    assert bool(evicted) == (case == "one stream")
    assert len(states) > 40
    boot()
    for state, batches_held in states.items():
        write(cut, dict(state))
        with opened(cut) as replay:
            held = ticks.index(replay.tick)
            assert held in batches_held
            here = {tag for chain in stored(replay) for tag in chain}
            lost = tags_of(batches[:held]) - here
            assert here <= tags_of(batches[:held])
            assert lost == (set(range(1, 1 + CHUNK)) if lost and evicted else set())
            if len(replay):
                replay.sample(8, "report")
            replay.add(row(50), 0)  # of an environment that has gone on meanwhile
            assert [50] in stored(replay)
            for number, batch in enumerate(batches):  # a sender repeats what has no answer
                assert add(replay, batches, number) == len(batch) * (number >= held)
        assert not (cut / "damaged").exists()


# --- when steps are dropped, and when not --------------------------------------------------------


@pytest.fixture
def left(memory_path: Path, boot: Boot) -> Path:
    """A directory whose process was killed after some steps had been synced, and some not."""
    del boot  # it is patched
    _, before, after = CASES["two streams"]
    with opened(memory_path / "live") as replay:
        for number in range(4):
            add(replay, before + after, number)
            if number == 1:
                replay.sync()
                shutil.copytree(memory_path / "live", memory_path / "synced")
        shutil.copytree(memory_path / "live", memory_path / "left")
    return memory_path / "left"


SYNCED, ALL = [[1, 2], [101, 102]], [[1, 2, 3], [101, 102, 103]]


def test_a_kill_drops_nothing(left: Path) -> None:
    with opened(left) as replay:
        assert stored(replay) == ALL


def test_another_boot_drops_what_is_not_synced(
    left: Path, boot: Boot, caplog: pytest.LogCaptureFixture
) -> None:
    boot()
    with opened(left) as replay:
        assert stored(replay) == SYNCED
        assert "steps after the last sync are dropped" in caplog.text
    caplog.clear()
    with opened(left) as replay:
        assert stored(replay) == SYNCED
        assert not caplog.text


def test_after_an_orderly_end_another_boot_drops_nothing(
    left: Path, boot: Boot, caplog: pytest.LogCaptureFixture
) -> None:
    opened(left).close()
    boot()
    with opened(left) as replay:
        assert stored(replay) == ALL
        replay.add(row(4), 0)
        assert stored(replay) == [[1, 2, 3, 4], [101, 102, 103]], "streams go on"
    assert not caplog.text


def test_the_power_is_cut_again_and_again(left: Path, boot: Boot) -> None:
    for number in range(3):
        boot()
        replay = opened(left)
        assert stored(replay)[:2] == SYNCED
        for tag in range(3, 6):
            replay.add(row(10 * tag + number), 0)
        shutil.copytree(left, left.with_name(f"left-{number}"))
        replay.close()
        left = left.with_name(f"left-{number}")


@pytest.mark.parametrize("cut", [True, False], ids=["power cut", "kill"])
def test_what_a_successor_has_synced_is_held(
    left: Path, boot: Boot, memory_path: Path, cut: bool
) -> None:
    """Ticks of steps that a power cut has dropped are given to others, and the dropped ones do not
    come back. After a kill the successor syncs what the killed process has not."""
    if cut:
        boot()
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(left, patch, None if cut else files_of(memory_path / "synced"))
        with opened(left) as replay:
            for tag in (201, 202):
                replay.add(row(tag), 2)
            replay._sync()
            states = list(disk.after_a_power_cut())
    boot()
    for number, state in enumerate(states):
        write(memory_path / f"cut-{number}", state)
        with opened(memory_path / f"cut-{number}") as replay:
            assert stored(replay) == [*(SYNCED if cut else ALL), [201, 202]]


@pytest.mark.parametrize("change", ["a bit", "the end"])
def test_a_synced_journal_that_is_not_whole_is_the_one_before(
    left: Path, boot: Boot, change: str
) -> None:
    before = files_of(left)
    with opened(left) as replay:
        replay._sync()
        shutil.copytree(left, left.with_name("killed"))
    (name,) = [n for n, data in files_of(left.with_name("killed")).items()
               if n.startswith("synced") and data != before[n]]  # fmt: skip
    path = left.with_name("killed") / name
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content if change == "a bit" else content[:100])
    boot()
    with opened(left.with_name("killed")) as replay:
        assert stored(replay) == SYNCED


def test_without_the_id_of_the_boot_every_process_is_another_boot(
    left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "BOOT_ID", left / "nothing")
    with opened(left) as replay:
        assert stored(replay) == SYNCED
        replay.add(row(3), 0)
        shutil.copytree(left, left.with_name("killed"))
    monkeypatch.setattr(journal, "_THIS_PROCESS", bytes(16))
    with opened(left.with_name("killed")) as replay:
        assert stored(replay) == SYNCED
    with opened(left) as replay:
        assert stored(replay) == [[1, 2], [3], [101, 102]], "it was closed"


def test_steps_that_are_not_synced_are_not_read_either(
    left: Path, boot: Boot, memory_path: Path
) -> None:
    assert sum(each.length for each in stored_episodes([left])) == 6
    boot()
    assert sum(each.length for each in stored_episodes([left])) == 4
    with opened(memory_path / "other") as replay:
        assert replay.load_directory(left) == 4


# --- syncing -------------------------------------------------------------------------------------


def test_a_thread_syncs_new_steps(
    memory_path: Path, boot: Boot, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, flush = threading.Event(), Journal.flush

    def flushed(*args: Any, **options: Any) -> None:
        flush(*args, **options)
        synced.set()

    monkeypatch.setattr(replay, "SYNC_SECONDS", 0.001)
    with opened(memory_path) as here:
        monkeypatch.setattr(Journal, "flush", flushed)
        here.add(row(1), 0)
        assert synced.wait(60)
        boot()
        committed = read_committed(memory_path)
        assert committed[1] == 1


def test_a_replay_that_is_forgotten_ends_its_thread(memory_path: Path) -> None:
    before = set(threading.enumerate())
    forgotten = opened(memory_path)
    (thread,) = set(threading.enumerate()) - before
    del forgotten
    thread.join(60)
    assert not thread.is_alive()


def test_a_sync_that_fails_is_made_up_for(
    memory_path: Path, boot: Boot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the disk does not answer")

    with opened(memory_path) as here:
        here.add(row(1), 0)
        with monkeypatch.context() as patch:
            patch.setattr(Arena, "sync", fail)
            with pytest.raises(OSError, match="does not answer"):
                here._sync()
        synced: list[int] = []
        monkeypatch.setattr(Arena, "sync", lambda _, slot: synced.append(slot))
        here._sync()
        assert len(synced) == 1
        here._sync()
        assert len(synced) == 1, "nothing is new"
