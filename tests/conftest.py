"""What holds for every test: its speed does not matter, and it leaves nothing behind."""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

ENOUGH_MEMORY = 1_200_000_000
CACHE = "DREAMFLEET_TESTS_CACHE"
"""Names the folder of compiled programs that all processes of one test run share."""

LONGEST = [
    *("test_view_in_a_browser", "test_network_namespaces", "test_joining", "test_train_command"),
    *("test_documents_work", "test_devices", "test_hosts", "test_examples"),
    *("test_ray_cluster", "test_chaos", "test_ends", "test_it_learns"),
    *("test_site", "test_dreamer", "test_from_python", "test_masked_policy", "test_networks"),
]
"""Modules whose tests take the longest."""

hypothesis.settings.register_profile(
    "any speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any speed")


# Workers of pytest share the cores: threads of numpy would only wait for each other.
os.environ["OPENBLAS_NUM_THREADS"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # in the process that starts the others
        os.environ[CACHE] = tempfile.mkdtemp(prefix="dreamfleet-tests-")


def keep_bytecode() -> None:
    """Have Python keep what it compiles, as it does unless it is told not to: tests start hundreds
    of processes, and each would compile the package again."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def share_modules() -> None:
    """Let processes that tests start import `benchmarks` and what is beside this file."""
    found = [Path(__file__).parents[1], Path(__file__).parent, os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(str(each) for each in found if each)


def compile_less() -> None:
    """Have programs compiled with less effort, also in the processes that tests start: they compile
    much and compute little."""
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
    # Halves the time of a training step. Newer versions do without it, and a backend that does not
    # know a flag ends its process.
    flags, flag = os.environ.get("XLA_FLAGS", ""), "--xla_cpu_use_fusion_emitters=false"
    older = tuple(int(n) for n in importlib.metadata.version("jax").split(".")[:2]) < (0, 11)
    if older and flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


if "PYTEST_XDIST_WORKER" not in os.environ:  # here, because conftest files below import JAX
    keep_bytecode()
    share_modules()
    compile_less()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(CACHE), ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each worker its share of the longest tests first: one that began last would keep its
    worker busy while the others have nothing left to take over."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for item in items if item.path.stem in LONGEST]
    modules = sorted({item.path.stem for item in long}, key=LONGEST.index)
    others = [item for item in items if item.path.stem not in LONGEST]
    items.clear()
    for worker in range(workers):
        mine = [
            item for name in modules[worker::workers] for item in long if item.path.stem == name
        ]
        rest = (len(long) + len(others)) // workers - len(mine)
        items += mine + others[: max(rest, 0)]
        del others[: max(rest, 0)]
    items += others


def pytest_collection_finish() -> None:
    """What was collected stays, so the garbage collector need not look at it again, which takes a
    third of a second each time."""
    gc.collect()
    gc.freeze()


BY_HAND = (
    "never by make test: Slurm (deploy/slurm/try.sh), containers (deploy/try_containers.py),",
    "  500 ends of runs (python tests/ends.py --ends 500), half an hour of faults (make chaos),",
    "  an hour of growth (make soak), speed (make bench), GPUs and TPUs",
)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say which promises were not tested, and what installs what they need."""
    untested: dict[str, list[str]] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        module, _, name = report.nodeid.partition("::")
        untested.setdefault(reason, []).append(name.replace("_", " ") or module)
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if not untested and not everything:
        return
    terminalreporter.section("not tested here")
    for reason, names in sorted(untested.items()):
        terminalreporter.line(reason)
        for name in sorted(names):
            terminalreporter.line(f"  {name.removeprefix('test ')}")
    if everything:
        for line in BY_HAND:
            terminalreporter.line(line)


def free_programs() -> None:
    """Forget compiled programs that no agent holds, and give their memory back to the system."""
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # the C library of Linux has it
    if trim is not None:
        trim(0)


@pytest.fixture(autouse=True)
def directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test neither resumes a run of the checkout nor leaves one there."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def memory_stays_small() -> Iterator[None]:
    yield
    if psutil.Process().memory_info().rss > ENOUGH_MEMORY:
        free_programs()


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """A Ray cluster whose nodes are all on this machine; it has a head, and takes more of them.

    It is ended with the module, so that another process of the test run may have one.
    """
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'dreamfleet[ray]'")
    from ray_parts import cluster

    with cluster(Path(os.environ[CACHE]) / "ray.lock") as nodes:
        yield nodes
