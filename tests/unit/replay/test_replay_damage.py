"""Files of a replay in which a word or a bit has changed: nothing is removed, little is lost."""

from __future__ import annotations

import logging
import os
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
from replay_history import CAPACITY, LENGTH, History, add, open_replay, write_history
from replay_model import InOrder, all_items, batch, check_sequences, step, tags

from dreamfleet.numbers import NUMBER_WORDS
from dreamfleet.replay import NotEnoughDataError, Replay
from dreamfleet.replay.storage.files import SEAL_BYTES, header_bytes, read_chunk
from dreamfleet.replay.storage.journal import (
    _COMMITTED_WORD,
    _HEADER_WORDS,
    _RECORD_WORDS,
    Journal,
)

BATCHES = 40


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("original") / "replay"
    write_history(directory, BATCHES)
    return directory


@pytest.fixture
def directory(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "replay")
    return tmp_path / "replay"


def chunks(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("*.chunk")}


def history() -> History:
    made = History()
    made.batch(BATCHES)
    return made


def change(path: Path, word: int, bits: int | None) -> None:
    """Flip bits of a word; None makes it zero."""
    with path.open("r+b") as file:
        words = np.frombuffer(file.read(), "<u8").copy()
        words[word] = 0 if bits is None else words[word] ^ np.uint64(bits)
        file.seek(0)
        file.write(words.tobytes())


@pytest.mark.parametrize("bits", [None, 1, 1 << 13, 1 << 63], ids=str)
@pytest.mark.parametrize("word", range(_HEADER_WORDS))
def test_a_damaged_word_of_the_journal_loses_no_step(
    directory: Path, word: int, bits: int | None
) -> None:
    made, before = history(), chunks(directory)
    change(directory / "journal", word, bits)
    for _ in range(2):  # it is mended for good
        with open_replay(directory) as replay:
            assert all_items(replay) == made.items(BATCHES)
            assert replay.tick == sum(len(streams) for _, streams in made.batches[:BATCHES])
            assert add(replay, made, BATCHES - 1) == 0, "a resend is still recognised"
        assert chunks(directory) == before
    with open_replay(directory) as replay:
        assert add(replay, made, BATCHES) > 0
        assert all_items(replay) == made.items(BATCHES + 1)


@pytest.mark.parametrize("batches", [1, 2, 13])
@pytest.mark.parametrize("copy", [0, 1])
def test_a_zeroed_copy_of_the_committed_tick_loses_no_step(
    tmp_path: Path, copy: int, batches: int
) -> None:
    """After a kill, when no synced copy of the journal is newer."""
    made, live, killed = History(), tmp_path / "live", tmp_path / "killed"
    with open_replay(live) as replay:
        for number in range(batches):
            add(replay, made, number)
        shutil.copytree(live, killed)
    half = NUMBER_WORDS // 2
    for word in range(_COMMITTED_WORD + copy * half, _COMMITTED_WORD + (copy + 1) * half):
        change(killed / "journal", word, None)
    with open_replay(killed) as replay:
        assert replay.tick == sum(len(streams) for _, streams in made.batches[:batches])
        assert add(replay, made, batches - 1) == 0, "a resend is still recognised"


@pytest.mark.parametrize("batches", [BATCHES, BATCHES - 1])
@pytest.mark.parametrize("length", [1, 7, 8, 56, 80, 400])
def test_a_journal_that_has_lost_its_end_loses_no_step(
    tmp_path: Path, length: int, batches: int
) -> None:
    """Also if it has lost the newer one of two copies, with no sign of it but its size."""
    write_history(tmp_path, batches)
    made, before = history(), chunks(tmp_path)
    os.truncate(tmp_path / "journal", length)
    for _ in range(2):  # it is mended for good
        with open_replay(tmp_path) as replay:
            assert all_items(replay) == made.items(batches)
        assert chunks(tmp_path) == before
    with open_replay(tmp_path) as replay:
        assert add(replay, made, batches) > 0


@pytest.mark.parametrize("word", range(_RECORD_WORDS))
def test_a_damaged_record_of_a_source_loses_no_step(directory: Path, word: int) -> None:
    made, before = history(), chunks(directory)
    change(directory / "journal", _HEADER_WORDS + word, 1 << 40)
    with open_replay(directory) as replay:
        assert all_items(replay) == made.items(BATCHES)
    assert chunks(directory) == before


def test_a_journal_that_is_beyond_repair_is_kept_beside_the_new_one(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = history()
    garbage = b"\x5a" * (directory / "journal").stat().st_size
    (directory / "journal").write_bytes(garbage)
    with caplog.at_level(logging.WARNING), open_replay(directory) as replay:
        assert all_items(replay) == made.items(BATCHES)
        assert replay.skipped_files == {}
    assert (directory / "damaged" / "journal").read_bytes() == garbage
    assert "is kept as" in caplog.text


def test_a_tick_far_above_the_others_does_not_move_a_journal_that_is_made_anew(
    directory: Path,
) -> None:
    made = history()
    last = sum(len(streams) for _, streams in made.batches[:BATCHES])
    path, row = newest(directory)
    (directory / "journal").unlink()
    change(path, first_tick(path) + row, 1 << 40)
    with open_replay(directory) as replay:
        assert replay.tick == last - 1


def first_tick(path: Path) -> int:
    """The word of the file that holds the tick of its first step."""
    return header_bytes(read_chunk(path).schema) // 8


def newest(directory: Path) -> tuple[Path, int]:
    """The chunk with the newest step, and the row of it."""
    committed, found = Journal(directory).committed, []
    for path in directory.glob("*.chunk"):
        ticks = np.fromfile(path, "<i8")[first_tick(path) :][: read_chunk(path).steps]
        found += [(path, int(row)) for row in np.flatnonzero(ticks == committed)]
    return found[0]


@pytest.mark.parametrize("row", [0, 3, 7])
@pytest.mark.parametrize("bits", [None, 1 << 62, 1 << 63], ids=str)
def test_a_chunk_with_a_damaged_tick_is_kept_as_it_was(
    directory: Path, row: int, bits: int | None
) -> None:
    made = history()
    path = min(p for p in directory.glob("*.chunk") if np.fromfile(p, "<i8")[first_tick(p) + 7])
    change(path, first_tick(path) + row, bits)
    content = path.read_bytes()
    with open_replay(directory) as replay:
        items = all_items(replay)
        assert set(items) < set(made.items(BATCHES)), "no sequence with a hole, none made up"
        assert len(items) >= len(made.items(BATCHES)) - 16
        kept = directory / "damaged" / path.name
        if row == 7 and bits is None:
            # The last row of a chunk that was never filled looks the same.
            assert not kept.exists()
        elif row < 7:
            assert kept.read_bytes() == content
            assert str(kept) in replay.skipped_files[path.name]
    with open_replay(directory) as replay:
        assert all_items(replay) == items


# --- rows ----------------------------------------------------------------------------------------


def full_chunk(directory: Path, tag: int) -> Path:
    """The chunk that holds a step."""
    vector = np.arange(tag, tag + 3, dtype=np.float32).tobytes()
    (path,) = [p for p in directory.glob("*.chunk") if vector in p.read_bytes()[4096:]]
    return path


def flip(path: Path, column: str, row: int, bit: int = 0) -> None:
    """Change a bit of a stored value."""
    info = read_chunk(path)
    starts, _ = info.schema.offsets(info.steps)
    size = next(each.row_bytes for each in info.schema.columns if each.name == column)
    at = header_bytes(info.schema) + starts[column] + row * size + bit // 8
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit % 8
    path.write_bytes(content)


def unseal(directory: Path) -> None:
    """Make the files those of a version without checksums of rows."""
    for path in directory.glob("*.chunk"):
        content = bytearray(path.read_bytes())
        end = header_bytes(read_chunk(path).schema)
        content[end - SEAL_BYTES : end] = bytes(SEAL_BYTES)
        path.write_bytes(content)


def long_chunks(directory: Path, capacity: int = CAPACITY) -> Replay:
    """One whose chunks have blocks of several rows."""
    return Replay(LENGTH, capacity, directory, chunk=32, selector=InOrder())


@pytest.mark.parametrize("column", ["tag", "vector", "state", "is_first", "is_last"])
@pytest.mark.parametrize("row", [0, 13, 31])
def test_a_flipped_bit_of_a_row_is_found_and_not_trained_on(
    tmp_path: Path, column: str, row: int, caplog: pytest.LogCaptureFixture
) -> None:
    with long_chunks(tmp_path) as replay:
        replay.add_batch(*tags(range(80)))
        whole = all_items(replay)
    path = full_chunk(tmp_path, 10)
    flip(path, column, row)
    content = path.read_bytes()
    with long_chunks(tmp_path) as replay:
        items = check_sequences(replay.sample(len(whole) - 40, "report"), LENGTH)
        assert set(items) < set(whole), "no sequence with a hole, none made up"
        kept = tmp_path / "damaged" / path.name
        assert kept.read_bytes() == content
        assert f"{kept}" in replay.skipped_files[path.name]
        assert f"is kept as {kept}" in caplog.text
        assert replay.stats()["damaged_chunks"] == 1
        assert replay.tick == 80, "what was stored is still counted"
        left = all_items(replay)
        block = row // 4 * 4
        assert left == [each for each in whole if each[-1] < block or each[0] >= 32]
        # The run goes on, and refills.
        replay.add_batch(*tags(range(80, 90)))
        assert all_items(replay)[-10:] == [
            tuple(range(t - LENGTH + 1, t + 1)) for t in range(80, 90)
        ]
    caplog.clear()
    with long_chunks(tmp_path) as replay:
        assert all_items(replay)[: len(left)] == left
        assert replay.stats()["damaged_chunks"] == 0
        assert "damaged" not in caplog.text


def test_a_replay_of_which_nothing_is_left_waits_for_steps(tmp_path: Path) -> None:
    with Replay(4, 100, tmp_path, chunk=4) as replay:
        replay.add_batch(*tags(range(5)))
    flip(full_chunk(tmp_path, 0), "tag", 2)
    with Replay(4, 100, tmp_path) as replay:
        with pytest.raises(NotEnoughDataError):
            replay.sample(2)
        replay.add_batch(*tags(range(10, 20)))
        assert (replay.sample(2)["tag"] >= 10).all()


def test_updates_may_change_what_they_write_back(tmp_path: Path) -> None:
    def update(replay: Replay) -> None:
        data = replay.sample(len(replay), "report")
        replay.update({"stepid": data["stepid"], "state": data["state"] + 1})

    with long_chunks(tmp_path) as replay:
        replay.add_batch(*tags(range(40)))
        update(replay)
        replay.add_batch(*tags(range(40, 80)))  # sealed without what changes
    for _ in range(2):
        with long_chunks(tmp_path) as replay:
            items = all_items(replay)
            update(replay)
            assert all_items(replay) == items
            assert replay.stats()["damaged_chunks"] == 0
    flip(full_chunk(tmp_path, 10), "state", 3)  # as an update does
    with long_chunks(tmp_path) as replay:
        assert all_items(replay) == items
    flip(full_chunk(tmp_path, 10), "tag", 3)
    with long_chunks(tmp_path) as replay:
        assert len(replay.sample(len(replay), "report")["tag"]) == len(items)
        assert replay.stats()["damaged_chunks"] == 1, "the rest of the row is covered as before"


def test_an_update_does_not_seal_what_is_damaged(tmp_path: Path) -> None:
    """The learner may have sampled the sequence from the replay before this one."""
    with long_chunks(tmp_path) as replay:
        replay.add_batch(*tags(range(80)))
        data = replay.sample(len(replay), "report")
    flip(full_chunk(tmp_path, 10), "tag", 13)
    with long_chunks(tmp_path) as replay:
        replay.update({"stepid": data["stepid"], "state": data["state"]})
        assert replay.stats()["damaged_chunks"] == 1
        assert {tag for item in all_items(replay) for tag in item} == {*range(12), *range(32, 80)}


def test_an_episode_that_is_cut_short_is_no_damage(tmp_path: Path) -> None:
    """Its last step is marked when the next episode begins, at the latest after a restart."""

    def opened() -> Replay:
        return Replay(4, 100, tmp_path, chunk=16, selector=InOrder())

    for last in range(1, 40):
        with opened() as replay:
            if len(replay):
                replay.sample(len(replay), "report")
                assert replay.stats()["damaged_chunks"] == 0
            replay.add(step(last, first=True))
    with opened() as replay:
        data = replay.sample(len(replay), "report")
        assert data["is_last"][:, :-1].all()
        assert replay.stats()["damaged_chunks"] == 0


def test_a_directory_without_checksums_gets_them_when_it_is_sampled(tmp_path: Path) -> None:
    with long_chunks(tmp_path) as replay:
        replay.add_batch(*tags(range(80)))
        whole = all_items(replay)
    unseal(tmp_path)
    flip(full_chunk(tmp_path, 10), "state", 2)  # nobody can know
    with long_chunks(tmp_path) as replay:
        assert all_items(replay) == whole
    flip(full_chunk(tmp_path, 10), "tag", 2)
    with long_chunks(tmp_path) as replay:
        assert len(replay.sample(30)["tag"]) == 30
        assert replay.stats()["damaged_chunks"] == 1


def test_blocks_are_sealed_while_rows_come_in_and_as_zlib_would(tmp_path: Path) -> None:
    """A process that is killed has sealed nearly all of them, and any version can read them."""
    with long_chunks(tmp_path) as replay:
        for tag in range(100):
            replay.add_batch(*tags([tag]))
        path = full_chunk(tmp_path, 10)
        content = path.read_bytes()
    info = read_chunk(path)
    starts, _ = info.schema.offsets(info.steps)
    header = header_bytes(info.schema)
    seals = np.frombuffer(content[header - SEAL_BYTES : header], "<u8")[1:]
    for block, seal in enumerate(seals.tolist()):
        crc = 0
        for column in info.schema.columns:
            at = header + starts[column.name] + 4 * block * column.row_bytes
            crc = zlib.crc32(content[at : at + 4 * column.row_bytes], crc)
        assert seal & 0xFFFFFFFF == crc


@pytest.mark.parametrize("word", range(SEAL_BYTES // 8))
def test_a_damaged_checksum_is_none(tmp_path: Path, word: int) -> None:
    with long_chunks(tmp_path) as replay:
        replay.add_batch(*tags(range(80)))
        whole = all_items(replay)
    path = full_chunk(tmp_path, 10)
    change(path, first_tick(path) - SEAL_BYTES // 8 + word, 1 << 33)
    with long_chunks(tmp_path) as replay:
        assert all_items(replay) == whole


def test_damaged_rows_of_another_run_are_not_copied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with long_chunks(tmp_path / "other") as replay:
        replay.add_batch(*tags(range(80)))
        whole = all_items(replay)
    flip(full_chunk(tmp_path / "other", 40), "tag", 5)
    with long_chunks(tmp_path / "mine") as replay:
        assert replay.load_directory(tmp_path / "other") == 80 - 28
        assert all_items(replay) == [each for each in whole if each[-1] < 36 or each[0] >= 64]
        assert "steps from 4 on are left out" in caplog.text


def test_streams_go_on_where_a_damaged_chunk_was_left_out(tmp_path: Path) -> None:
    """Several streams, and the queue of fresh sequences."""
    streams = [0, 1, 2]
    with Replay(3, 500, tmp_path, chunk=16, selector=InOrder()) as replay:
        for number in range(60):
            rows = [step(1000 * stream + number, stream) for stream in streams]
            replay.add_batch(batch(rows), streams)
        state = replay.save()
    flip(full_chunk(tmp_path, 1020), "vector", 9)
    with Replay(3, 500, tmp_path, selector=InOrder()) as replay:
        replay.load(state)
        before = replay.stats()["online_queue"]
        assert before > 30
        replay.sample(len(replay), "report")
        assert 0 < replay.stats()["online_queue"] <= before
        for number in range(60, 64):
            rows = [step(1000 * stream + number, stream) for stream in streams]
            replay.add_batch(batch(rows), streams)
        last = [tuple(1000 * stream + n for n in (61, 62, 63)) for stream in streams]
        assert all_items(replay)[-3:] == last
        assert any(item[0] == 59 for item in all_items(replay)), "not cut at the restart"


def test_a_first_start_that_was_interrupted_is_no_damage(tmp_path: Path) -> None:
    """Killed while the journal was begun, before anything could have been stored."""
    open_replay(tmp_path).close()
    words = np.frombuffer((tmp_path / "journal").read_bytes(), "<u8").copy()
    words[0] = 0
    words[4:_HEADER_WORDS] = [0, 1, 0, 0, 0, 0]  # a value and its number, and no checksum yet
    (tmp_path / "journal").write_bytes(words.tobytes())
    with open_replay(tmp_path) as replay:
        assert add(replay, History(), 0)
    assert not (tmp_path / "damaged").exists()
