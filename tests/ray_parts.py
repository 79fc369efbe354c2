"""A Ray cluster for tests: several nodes on this machine, each with processes of its own."""

from __future__ import annotations

import fcntl
import importlib
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from fleet_parts import fixed_address

_STORE = 80_000_000  # bytes; about the least that Ray takes
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    # A node that was killed refuses connections, and counts as lost after five checks.
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "200",
    # Ray's client server forks while gRPC's threads run. With gRPC's support for forks the child
    # sometimes ends with a segmentation fault before it executes its program.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}


class Nodes:
    """A cluster whose head has the resource `head`, and further nodes as they are added."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {**_node(head=8), "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.folder = Path(self._cluster.head_node.get_session_dir_path())

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def client(self) -> str:
        """The address for a program outside of the cluster; it is served from now on."""
        port = int(fixed_address().rpartition(":")[2])
        head = self._cluster.head_node
        head._ray_params.ray_client_server_port = port
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # Ray does not close its logs
            head.start_ray_client_server()
        return f"ray://{head.node_ip_address}:{port}"

    def add(self, **resources: float) -> Any:
        return self._cluster.add_node(**_node(**resources))

    def remove(self, node: Any) -> None:
        """As if its machine had lost power."""
        self._cluster.remove_node(node, allow_graceful=False)

    def shutdown(self) -> None:
        self._cluster.shutdown()


def _node(**resources: float) -> dict[str, Any]:
    return {
        "num_cpus": 0,
        "resources": resources,
        "object_store_memory": _STORE,
        # A process less each.
        "include_log_monitor": False,
        "no_monitor": True,
    }


@contextmanager
def cluster(lock: Path) -> Iterator[Nodes]:
    """Nodes that are ended, with all they have started and written, when the block ends.

    There is one at a time for all who name the same lock: two would take the memory of two.
    """
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with _cluster() as nodes:
            yield nodes


@contextmanager
def _cluster() -> Iterator[Nodes]:
    os.environ.update(_SETTINGS)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    nodes = Nodes()
    try:
        yield nodes
    finally:
        nodes.shutdown()
        left = psutil.Process().children(recursive=True)
        psutil.wait_procs([child for child in left if child.pid not in before], timeout=60)
        shutil.rmtree(nodes.folder, ignore_errors=True)
        latest = nodes.folder.parent / "session_latest"
        if latest.is_symlink() and not latest.exists():
            latest.unlink()


def ray_processes() -> list[str]:
    """Actors and workers of this cluster that still run."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            title = " ".join(child.cmdline())
            if title.startswith(("ray::_Host", "dreamfleet ")):
                found.append(title)
    return found


def tell(path: Path, module: str) -> None:
    """Write what a module and a variable say that come with Ray's runtime environment."""
    path.write_text(importlib.import_module(module).WORDS + os.environ["MORE_WORDS"])
