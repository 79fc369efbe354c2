"""Which environments may act: the run's own, and those of joined machines in `nodes.json`.

Each start of a worker on a joined machine gets an incarnation, a number that is never used again in
the run. Its environments send it with their ids. The actors take those that the
file names, and a newer incarnation of an environment takes the place of an older one. So no two
environments of one id act, after a cut link, a killed supervisor or a reused id, and no clocks are
compared.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dreamfleet.config import RunConfig
from dreamfleet.files import atomic_write

log = logging.getLogger(__name__)

FILE_NAME = "nodes.json"
_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1


def fenced(ids: Sequence[int], incarnation: int) -> list[int]:
    """What environments send as their ids."""
    return [incarnation << _ID_BITS | each for each in ids]


def ids_of(sent: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ids of environments."""
    ids: NDArray[np.int64] = sent & _ID_MASK
    return ids


def incarnations_of(sent: NDArray[np.int64]) -> NDArray[np.int64]:
    """Their incarnations; 0 for the run's own environments."""
    found: NDArray[np.int64] = sent >> _ID_BITS
    return found


@dataclass(frozen=True)
class Fence:
    """A worker, and what it may act in."""

    ids: tuple[int, ...]
    is_eval: bool
    incarnation: int
    invitation: str
    """The name of the invitation that its machine joined with; empty for the run's own."""


def own_fence(args: RunConfig, envid: int) -> Fence | None:
    """What one of the run's own environments may act by."""
    return Fence((envid,), envid >= args.envs, 0, "") if 0 <= envid < args.all_envs else None


@dataclass(frozen=True)
class Fences:
    """All of them, and the newest incarnation that was ever given."""

    newest: int = 0
    workers: tuple[Fence, ...] = ()


def write_fences(logdir: Path, fences: Fences) -> None:
    """Replace the file; what it names may act from then on."""
    atomic_write(logdir / FILE_NAME, msgspec.json.encode(fences))


def read_fences(logdir: Path) -> Fences:
    """What was written last; nothing if there is no such file.

    Raises:
        ValueError: The file is damaged.
    """
    try:
        return msgspec.json.decode((logdir / FILE_NAME).read_bytes(), type=Fences)
    except FileNotFoundError:
        return Fences()
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"{logdir / FILE_NAME} is damaged: {error}") from None


class FenceReader:
    """The fences of a run. Cheap to ask: the file is read again only when it was replaced."""

    def __init__(self, logdir: Path) -> None:
        self._logdir = logdir
        self._known: tuple[Any, dict[int, Fence]] = (None, {})  # all at once: several threads ask

    def of(self, envid: int) -> Fence | None:
        """What an environment may act by."""
        return self._read().get(envid)

    def _read(self) -> dict[int, Fence]:
        try:
            status = (self._logdir / FILE_NAME).stat()
            written = status.st_mtime_ns, status.st_ino
        except OSError:
            written = None
        if written is None or written != self._known[0]:
            try:
                workers = read_fences(self._logdir).workers
            except (OSError, ValueError) as error:
                log.warning("No joined machine acts: %s", error)
                workers = ()
            self._known = written, {envid: each for each in workers for envid in each.ids}
        return self._known[1]
