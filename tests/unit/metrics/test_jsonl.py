import json
import logging
import math
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dreamfleet.metrics import JsonlOutput, ScoresFile, read_jsonl
from dreamfleet.metrics.outputs.jsonl import JsonlFile


def test_rows_hold_the_step_scalars_and_text(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    output = JsonlOutput(path)
    output.write(
        5,
        {
            "loss": np.float32(0.5),
            "n": np.int64(3),
            "note": "hi",
            "yes": True,
            "image": np.zeros((2, 2, 3), np.uint8),
            "histogram": np.arange(4.0),
        },
    )
    output.write(6, {"histogram": np.arange(4.0)})
    output.write(7, {"loss": math.nan, "worse": math.inf})
    output.flush()
    output.close()
    assert list(read_jsonl(path)) == [
        {"step": 5, "loss": 0.5, "n": 3, "note": "hi", "yes": True},
        {"step": 7, "loss": None, "worse": None},
    ]


def test_scores_have_the_published_form(tmp_path: Path) -> None:
    scores = ScoresFile(tmp_path / "scores.jsonl")
    assert scores.add(100, 21.5, 200, "0", "e1", 7)
    scores.close()
    row = json.loads((tmp_path / "scores.jsonl").read_text())
    assert row.pop("time") > 1e9
    assert row == {"step": 100, "episode/score": 21.5, "episode/length": 200, "id": "0/e1/7"}


def test_a_score_is_written_once_also_by_a_process_that_opens_the_file_later(
    tmp_path: Path,
) -> None:
    path = tmp_path / "scores.jsonl"
    path.write_text('{"step":1,"episode/score":1.0,"id":"actor-0/0/1/0"}\n')  # an older version
    scores = ScoresFile(path)
    assert scores.cursor("0") == ("", 0)
    assert scores.add(100, 1.0, 2, "0", "e1", 7)
    assert not scores.add(100, 1.0, 2, "0", "e1", 7)
    assert scores.add(100, 2.0, 2, "1", "e2", 3), "another replay"
    for _ in range(3):
        again = ScoresFile(path)
        assert (again.cursor("0"), again.cursor("1")) == (("e1", 7), ("e2", 3))
        assert not again.add(100, 2.0, 2, "1", "e2", 3)
    assert again.add(50, 3.0, 2, "1", "e3", 2), "after a power cut ticks are given out again"
    assert ScoresFile(path).cursor("1") == ("e3", 2)
    assert ScoresFile(path).last == [1.0, 1.0, 2.0, 3.0]
    assert ScoresFile(tmp_path / "none", "eval", lazy=True).cursor("0") == ("", 0)
    assert not (tmp_path / "none").exists()


def test_opening_again_appends(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    for n in range(3):
        file = JsonlFile(path)
        file.append({"n": n})
        file.close()
        file.close()
    assert [row["n"] for row in read_jsonl(path)] == [0, 1, 2]


@pytest.mark.parametrize("size", [30, 200_000], ids=["short", "longer than one read"])
def test_a_torn_line_is_cut_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    path = tmp_path / "f.jsonl"
    first = b'{"n":1}\n'
    torn = b'{"n":2,"text":"' + b"x" * size
    for length in {1, 5, len(torn)}:
        path.write_bytes(first + torn[:length])
        assert list(read_jsonl(path)) == [{"n": 1}], "a reader does not trip over it"
        with caplog.at_level(logging.WARNING):
            file = JsonlFile(path)
        assert f"cut {length} bytes" in caplog.text
        assert path.read_bytes() == first
        file.append({"n": 3})
        file.close()
        assert [row["n"] for row in read_jsonl(path)] == [1, 3]


def test_a_file_that_is_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'{"n":1')
    JsonlFile(path).close()
    assert path.read_bytes() == b""


def test_a_damaged_line_is_reported_and_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":\n[2]\n{"n":3}\n')
    with caplog.at_level(logging.WARNING):
        assert [row["n"] for row in read_jsonl(path)] == [1, 3]
    assert "line 2 is damaged" in caplog.text
    assert "line 3 is damaged" in caplog.text


WRITER = """
import sys
from dreamfleet.metrics.outputs.jsonl import JsonlFile
file = JsonlFile(sys.argv[1])
n = 0
while True:
    file.append({"n": n, "text": "x" * (n % 500)})
    print(n, flush=True)
    n += 1
"""


def test_a_killed_writer_loses_nothing_it_finished(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True
    )
    last = 0
    while last < 500:
        last = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    last = int((child.stdout.read().splitlines() or [str(last)])[-1])
    child.wait(10)
    child.stdout.close()
    JsonlFile(path).close()
    rows = [row["n"] for row in read_jsonl(path)]
    assert rows == list(range(len(rows)))
    assert len(rows) > last


def test_a_full_disk_leaves_complete_lines(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "f.jsonl"
    file = JsonlFile(path)
    file.append({"n": 1})
    import os

    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:4]))
    with pytest.raises(OSError, match="free disk space"):
        file.append({"n": 2})
    monkeypatch.undo()
    file.append({"n": 3})
    file.close()
    assert [row["n"] for row in read_jsonl(path)] == [1, 3]
