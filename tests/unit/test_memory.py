"""How much memory there is, also in containers and jobs."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from dreamfleet.memory import memory_free, memory_limit

GB = 1_000_000_000


class Room:
    def __init__(self, total: int) -> None:
        self.total = self.free = self.available = total


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has 16 GB, and 2 GB of swap."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Room(16 * GB))
    monkeypatch.setattr(psutil, "swap_memory", lambda: Room(2 * GB))


def test_without_control_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) == 18 * GB


@pytest.mark.parametrize(
    ("group", "content", "expected"),
    [
        # A job inside of a slice: the smallest limit counts, with the swap that it allows.
        ("0::/slice/job", {"slice/job/memory.max": "max", "slice/memory.max": f"{4 * GB}"}, 6),
        ("0::/job", {"job/memory.max": f"{4 * GB}", "job/memory.swap.max": "0"}, 4),
        ("0::/job", {"job/memory.max": f"{4 * GB}", "job/memory.swap.max": f"{GB}"}, 5),
        ("0::/job", {"job/memory.max": f"{64 * GB}"}, 18),
        # A container that sees its own group as the root, and one that sees the path of the host.
        ("0::/", {"memory.max": f"{3 * GB}"}, 5),
        ("0::/docker/abc", {"memory.max": f"{3 * GB}"}, 5),
        # The older version, and no limit in its words.
        ("4:memory:/job", {"memory/job/memory.limit_in_bytes": f"{GB}"}, 3),
        ("4:memory:/job", {"memory/job/memory.limit_in_bytes": "9223372036854771712"}, 18),
        ("3:cpu,cpuacct:/job", {"job/memory.max": f"{GB}"}, 18),
    ],
)
def test_a_control_group_allows_less(
    tmp_path: Path, group: str, content: dict[str, str], expected: int
) -> None:
    for name, text in {"proc/self/cgroup": group}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text + "\n")
    for name, text in content.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert memory_limit(tmp_path) == expected * GB


def test_what_is_free_counts_swap() -> None:
    assert memory_free() <= 18 * GB
    assert memory_free() > 0
