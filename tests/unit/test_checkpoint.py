import json
import logging
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError

from dreamfleet import checkpoint
from dreamfleet.checkpoint import (
    Checkpoint,
    CheckpointError,
    MissingPartError,
    read_checkpoint,
    sliced,
)

DTYPES = [
    np.float64,
    np.float32,
    np.float16,
    ml_dtypes.bfloat16,
    np.int64,
    np.int32,
    np.int16,
    np.int8,
    np.uint64,
    np.uint32,
    np.uint16,
    np.uint8,
    bool,
]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_arrays_come_back_bit_for_bit(tmp_path: Path, dtype: type) -> None:
    rng = np.random.default_rng(0)
    state = {
        "matrix": (rng.normal(size=(3, 4)) * 10).astype(dtype),
        "scalar": np.array(3).astype(dtype),
        "empty": np.zeros((0, 5), dtype),
        "transposed": (rng.normal(size=(3, 4)) * 10).astype(dtype).T,
    }
    ckpt = Checkpoint(tmp_path)
    ckpt.save({"agent": state}, step=1)
    loaded = ckpt.load().parts["agent"]
    assert loaded.keys() == state.keys()
    for key, value in state.items():
        assert loaded[key].dtype == value.dtype, key
        assert loaded[key].shape == value.shape, key
        assert loaded[key].tobytes() == value.tobytes(), key


def test_other_values_come_back(tmp_path: Path) -> None:
    state = {
        "int": 2**60,
        "float": 0.1,
        "inf": -math.inf,
        "text": "two\nlines ä",
        "yes": True,
        "nothing": None,
        "numpy": np.float32(1.5),
    }
    ckpt = Checkpoint(tmp_path)
    ckpt.save({"limiter": {**state, "nan": math.nan}, "empty": {}}, step=3, score=7.5)
    snapshot = ckpt.load()
    loaded = snapshot.parts["limiter"]
    assert math.isnan(loaded.pop("nan"))
    assert loaded == state
    assert loaded["yes"] is True
    assert snapshot.parts["empty"] == {}
    assert (snapshot.step, snapshot.score, snapshot.path) == (3, 7.5, ckpt.latest())


def test_nothing_saved_is_nothing_loaded(tmp_path: Path) -> None:
    ckpt = Checkpoint(tmp_path / "not" / "there")
    assert ckpt.load() is None
    assert ckpt.load("best") is None
    assert ckpt.latest() is None
    assert ckpt.best() is None


def test_the_newest_is_kept(tmp_path: Path) -> None:
    ckpt = Checkpoint(tmp_path, keep=2)
    for step in (10, 20, 30):
        ckpt.save({"agent": {"step": step}}, step=step)
    assert names(tmp_path) == ["000002-step-000000000020", "000003-step-000000000030"]
    assert ckpt.load().parts["agent"] == {"step": 30}


def test_the_best_is_kept_too(tmp_path: Path) -> None:
    ckpt = Checkpoint(tmp_path)
    for step, score in ((1, 5.0), (2, 9.0), (3, 1.0), (4, None), (5, math.nan)):
        ckpt.save({"agent": {}}, step, score)
    assert names(tmp_path) == ["000002-step-000000000002", "000005-step-000000000005"]
    assert ckpt.best().name == "000002-step-000000000002"
    assert (ckpt.load().step, ckpt.load().score) == (5, None)
    assert (ckpt.load("best").step, ckpt.load("best").score) == (2, 9.0)
    ckpt.save({"agent": {}}, 6, score=10.0)
    assert names(tmp_path) == ["000006-step-000000000006"]
    ckpt.save({"agent": {}}, 7, score=10.0)
    assert ckpt.best().name == "000007-step-000000000007", "the newest of equal ones"


def test_without_a_score_there_is_no_best(tmp_path: Path) -> None:
    ckpt = Checkpoint(tmp_path)
    ckpt.save({"agent": {}}, 1)
    assert ckpt.load("best") is None
    assert ckpt.best() is None


def test_a_damaged_best_one_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ckpt = Checkpoint(tmp_path)
    best = ckpt.save({"agent": {"w": np.ones(3)}}, 1, score=9.0)
    ckpt.save({"agent": {"w": np.ones(3)}}, 2, score=5.0)
    flip(best / "agent.safetensors", -1)
    with caplog.at_level(logging.WARNING):
        assert ckpt.load("best").step == 2
    assert best.name in caplog.text


def test_a_run_that_went_back_still_loads_its_newest(tmp_path: Path) -> None:
    ckpt = Checkpoint(tmp_path, keep=5)
    ckpt.save({"agent": {"n": 1}}, step=900)
    ckpt.save({"agent": {"n": 2}}, step=100)
    assert ckpt.load().parts["agent"] == {"n": 2}


def test_leftovers_of_a_killed_process_are_ignored_and_removed(tmp_path: Path) -> None:
    for name in (".writing-000001-step-000000000001", ".discarded-000000-step-000000000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "agent.safetensors").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("not ours")
    ckpt = Checkpoint(tmp_path)
    assert ckpt.load() is None
    ckpt.save({"agent": {}}, step=1)
    assert names(tmp_path) == ["000001-step-000000000001", "notes.txt"]


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


DAMAGE = {
    "a missing file": (
        lambda p: (p / "agent.safetensors").unlink(),
        "agent.safetensors is missing",
    ),
    "a short file": (
        lambda p: (p / "agent.safetensors").write_bytes(
            (p / "agent.safetensors").read_bytes()[:-1]
        ),
        "bytes instead of",
    ),
    "a flipped bit": (lambda p: flip(p / "agent.safetensors", -3), "does not match its checksum"),
    "a missing manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "half a manifest": (
        lambda p: (p / "manifest.json").write_bytes((p / "manifest.json").read_bytes()[:50]),
        "manifest.json cannot be read",
    ),
    "another manifest": (lambda p: (p / "manifest.json").write_text("[1]"), "cannot be read"),
    "a changed manifest": (
        lambda p: (p / "manifest.json").write_text(
            (p / "manifest.json").read_text().replace("weights", "weighty")
        ),
        "manifest.json does not match its checksum",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    harm, words = DAMAGE[damage]
    ckpt = Checkpoint(tmp_path, keep=2)
    state = {"w": np.ones((4, 4)), "name": "weights"}
    ckpt.save({"agent": state}, step=1)
    newest = ckpt.save({"agent": state}, step=2)
    harm(newest)
    with caplog.at_level(logging.WARNING):
        assert ckpt.load().step == 1
    assert words in caplog.text
    assert newest.name in caplog.text


def test_if_all_are_damaged_a_run_does_not_start_from_scratch(tmp_path: Path) -> None:
    ckpt = Checkpoint(tmp_path)
    flip(ckpt.save({"agent": {"w": np.ones(3)}}, step=1) / "agent.safetensors", -1)
    with pytest.raises(CheckpointError, match=r"Every checkpoint.*Remove the directory"):
        ckpt.load()


def test_some_parts_can_be_read_alone(tmp_path: Path) -> None:
    ckpt = Checkpoint(tmp_path)
    path = ckpt.save({"agent": {"w": np.ones(2)}, "limiter": {"size": 3}}, step=1)
    flip(path / "agent.safetensors", -1)
    assert ckpt.load(parts=["limiter"]).parts == {"limiter": {"size": 3}}
    with pytest.raises(MissingPartError, match="no part 'replay', only agent, limiter"):
        ckpt.load(parts=["replay"])


def test_a_reader_is_not_disturbed_by_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The writer removes the checkpoint that is being read, and puts a newer one there."""
    writer, reader = Checkpoint(tmp_path), Checkpoint(tmp_path)
    writer.save({"agent": {"w": np.ones(2)}}, step=1)
    checksum = checkpoint._checksum

    def interrupted(path: Path) -> int:
        monkeypatch.undo()
        writer.save({"agent": {"w": np.full(2, 2.0)}}, step=2)
        return checksum(path)

    monkeypatch.setattr(checkpoint, "_checksum", interrupted)
    with caplog.at_level(logging.WARNING):
        snapshot = reader.load()
    assert snapshot.step == 2
    assert snapshot.parts["agent"]["w"].tolist() == [2, 2]
    assert caplog.text == ""


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    ckpt = Checkpoint(tmp_path)
    path = ckpt.save({"agent": {"w": np.arange(5.0)}, "limiter": {"size": 3}}, step=1)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for length in range(len(whole)):
            file.write_bytes(whole[:length])
            with pytest.raises(CheckpointError):
                read_checkpoint(path)
        file.write_bytes(whole)
    assert read_checkpoint(path).step == 1


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = Checkpoint(tmp_path).save({"agent": {"w": np.arange(5.0), "n": 3}}, step=1)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for position in range(len(whole)):
            flip(file, position)
            with pytest.raises(CheckpointError):
                read_checkpoint(path)
            file.write_bytes(whole)


def test_a_newer_format_is_refused_with_the_fix(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("dreamfleet.checkpoint._FORMAT", 3)
    path = Checkpoint(tmp_path).save({"agent": {}}, step=1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format 3, this version reads 2"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"agent": {"x": object()}}, "agent/x is a object"),
        ({"agent": {"x": np.array(["text"])}}, "agent/x"),
        ({"agent": {"x": {"nested": 1}}}, "agent/x is a dict"),
        ({"../agent": {}}, "cannot name a part"),
    ],
)
def test_what_cannot_be_kept_is_refused(tmp_path: Path, parts: dict, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        Checkpoint(tmp_path).save(parts, step=1)
    assert Checkpoint(tmp_path).load() is None


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    path = Checkpoint(tmp_path).save({"agent": {"w": np.ones(2), "nan": math.nan}}, step=1)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    sealed = json.loads((path / "manifest.json").read_text(), parse_constant=refuse)
    body = json.loads(sealed["body"], parse_constant=refuse)
    assert body["step"] == 1
    assert body["parts"]["agent"]["arrays"] == 1


def test_keep_has_to_keep_something(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="at least 1"):
        Checkpoint(tmp_path, keep=0)


def test_one_that_waits_for_its_score_is_kept_until_it_has_it(tmp_path: Path) -> None:
    ckpt = Checkpoint(tmp_path)
    asked = ckpt.save({"agent": {"x": np.ones(3)}}, step=1, pending=True)
    for step in (2, 3, 4):
        ckpt.save({"agent": {}}, step=step)
    other = Checkpoint(tmp_path)  # another process looks for it, and gives it its score
    assert other.pending() == asked
    assert ckpt.best() is None
    other.rate(asked, 5.0)
    assert ckpt.pending() is None
    loaded = ckpt.load("best")
    assert (loaded.step, loaded.score) == (1, 5.0)
    assert loaded.parts["agent"]["x"].tolist() == [1, 1, 1]
    worse = ckpt.save({"agent": {}}, step=5, pending=True)
    ckpt.rate(worse, 4.0)
    unrated = ckpt.save({"agent": {}}, step=6, pending=True)
    ckpt.rate(unrated, math.nan)
    newest = ckpt.save({"agent": {}}, step=7)
    assert names(tmp_path) == [asked.name, newest.name]


def test_hosts_write_one_checkpoint_in_parts(tmp_path: Path) -> None:
    """A reader gets whole arrays, however many hosts have written it."""
    whole = np.arange(24.0).reshape(2, 12)
    hosts = 3
    said: list[list[Any]] = []
    ready = threading.Barrier(hosts)

    def gather(host: int, mine: Any) -> list[Any]:
        ready.wait()
        if host == 0:
            said.append([None] * hosts)
        ready.wait()
        said[-1][host] = mine
        ready.wait()
        return said[-1]

    def save(host: int) -> Path:
        mine = {sliced("split", 1, 4 * host): whole[:, 4 * host : 4 * host + 4]}
        parts: dict[str, Any] = {"agent": {f"own/{host}": np.array(host), **mine}}
        if host == 0:
            parts["run"] = {"updates": 7}
        return Checkpoint(tmp_path).save(
            parts, step=100 + host, host=host, score=5.0 - host, gather=partial(gather, host)
        )

    with ThreadPoolExecutor(hosts) as pool:
        (path,) = {done.result() for done in [pool.submit(save, host) for host in range(hosts)]}
    found = Checkpoint(tmp_path).load()
    assert (found.path, found.step, found.score) == (path, 303, 5.0)
    assert found.parts["run"] == {"updates": 7}
    np.testing.assert_array_equal(found.parts["agent"].pop("split"), whole)
    assert found.parts["agent"] == {"own/0": 0, "own/1": 1, "own/2": 2}
    files = ["agent-1.safetensors", "agent-2.safetensors", "agent.safetensors"]
    assert names(path) == [*files, "manifest.json", "run.safetensors"]
    assert checkpoint.read_checkpoint(path, ()).bytes == sum(
        file.stat().st_size for file in path.glob("*.safetensors")
    )
    flip(path / "agent-2.safetensors", 30)
    with pytest.raises(CheckpointError, match=r"agent-2\.safetensors"):
        read_checkpoint(path)


def test_a_full_disk_is_said_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    ckpt = Checkpoint(tmp_path)
    before = ckpt.save({"agent": {"a": np.zeros(3)}}, step=1)
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match=r"agent\.safetensors cannot be written \(I/O error"):
        ckpt.save({"agent": {"a": np.zeros(3)}}, step=2)
    assert ckpt.latest() == before
