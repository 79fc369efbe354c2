"""Machines that have joined a run: the file `machines.json` in its directory.

The coordinator writes it every few seconds. The evaluator reads which evaluation environments there
are, every display who has joined, and a coordinator that comes after this one whose ids are whose.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from dreamfleet.files import atomic_write

log = logging.getLogger(__name__)

FILE_NAME = "machines.json"

MachineState = Literal["joined", "away", "left"]


@dataclass(frozen=True)
class MachineRecord:
    """One machine that has joined, as the run knows it. Times are those of the run's machine."""

    name: str
    """What it calls itself; several machines of one name get a number."""
    state: MachineState
    """`away`: it is not heard of, and its ids are kept for it for a while."""
    envs: tuple[int, ...]
    """The ids of its training environments."""
    eval_envs: tuple[int, ...]
    """The ids of its evaluation environments."""
    envs_per_process: int
    joined: float
    """Unix time."""
    heard: float
    """Unix time of its last message."""
    steps: int = 0
    """Environment steps that it has made."""
    steps_per_second: float = 0.0
    failures: int = 0
    """How often an environment, or a process, of it has failed."""
    error: str = ""
    """The last of these failures, why it makes no steps, or why it left."""
    invitation: str = ""
    """The name of the invitation that it has joined with."""
    address: str = ""
    """From where it is connected."""
    holder: str = ""
    """A digest of what the machine proves itself with; empty for one that has left."""


def write_machines(logdir: Path, machines: list[MachineRecord]) -> None:
    """Replace what is known of the machines of a run."""
    content = msgspec.json.format(msgspec.json.encode(machines), indent=2)
    atomic_write(logdir / FILE_NAME, content)


def read_machines(logdir: Path) -> list[MachineRecord]:
    """What the coordinator wrote last; empty if there is no such file, or if it is damaged."""
    try:
        return msgspec.json.decode((logdir / FILE_NAME).read_bytes(), type=list[MachineRecord])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        log.debug("The machines of %s cannot be read: %s", logdir, error)
        return []


class Machines:
    """The machines of a run. Cheap to ask: the file is read again only when it was replaced.

    Args:
        logdir: The run's directory.
    """

    def __init__(self, logdir: Path) -> None:
        self._logdir = logdir
        # Both at once: several threads ask.
        self._known: tuple[tuple[int, int] | None, list[MachineRecord]] = (None, [])

    def __call__(self) -> list[MachineRecord]:
        before, machines = self._known
        try:
            status = (self._logdir / FILE_NAME).stat()
            written = status.st_mtime_ns, status.st_ino
        except OSError:
            written = None
        if written is None or written != before:
            machines = read_machines(self._logdir)
            self._known = written, machines
        return machines
