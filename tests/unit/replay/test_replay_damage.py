"""Files of a replay in which a word or a bit has changed: nothing is removed, little is lost."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from replay_history import History, add, open_replay, write_history
from replay_model import all_items

from dreamfleet.replay.storage.files import header_bytes, read_chunk
from dreamfleet.replay.storage.journal import _HEADER_WORDS, _RECORD_WORDS, SYNCED

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
    for name in SYNCED:
        (directory / name).unlink()
    with caplog.at_level(logging.WARNING), open_replay(directory) as replay:
        assert all_items(replay) == made.items(BATCHES)
        assert replay.skipped_files == {}
    assert (directory / "damaged" / "journal").read_bytes() == garbage
    assert "is kept as" in caplog.text


def first_tick(path: Path) -> int:
    """The word of the file that holds the tick of its first step."""
    return header_bytes(read_chunk(path).schema) // 8


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
