"""Functions compiled ahead of time; JAX keeps compiled programs between runs."""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax

log = logging.getLogger(__name__)

# For CPU programs that run so rarely that compiling is most of what they cost.
COMPILE_QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def enable_cache(folder: str) -> bool:
    """Keep compiled programs between runs; returns whether the folder is fit for it.

    Programs that are found there are executed, so no other user may write to it.
    """
    if not folder:
        return False
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        reason = _not_private(path)
    except OSError as error:  # a home that is read-only, for example
        reason = f"it cannot be made ({error.strerror}): choose another cache_dir"
    if reason:
        log.warning("Compiled programs are not kept in %s, because %s.", path, reason)
        return False
    settings: Any = jax.config
    settings.update("jax_compilation_cache_dir", str(path))
    settings.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return True


def _not_private(path: Path) -> str:
    """Why others may write to a folder; empty if they may not."""
    if not hasattr(os, "getuid"):  # Windows keeps the home directory private in another way
        return ""
    found = path.stat()
    if found.st_uid != os.getuid():
        return "it belongs to another user: choose another cache_dir"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users can write to it: run chmod go-w {path}"
    return ""


class Program:
    """A function compiled ahead of time, once for each combination of argument shapes.

    Arguments lie on the devices that run it already. The first one's memory may be donated to the
    results.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        donate_first: bool = False,
        out_shardings: Any = None,
        mesh: jax.sharding.Mesh | None = None,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._name = name
        self._function = function
        self._donate_first = donate_first
        self._out_shardings = out_shardings
        self._mesh = mesh
        self._options = dict(compiler_options or {})
        self._compiled: dict[Any, Any] = {}
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        return self._find(leaves, tree)(*leaves)

    def compile(self, *args: Any) -> None:
        """Get ready for arguments of these shapes."""
        self._find(*jax.tree.flatten(args))

    @property
    def newest(self) -> jax.stages.Compiled | None:
        """What was compiled last; None before anything was."""
        return [*self._compiled.values()][-1] if self._compiled else None

    def _find(self, leaves: Sequence[Any], tree: Any) -> Any:
        key = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        found = self._compiled.get(key)
        if found is not None:
            return found
        with self._lock:
            if key not in self._compiled:
                log.info("Compiling %s", self._name)
                start = time.perf_counter()
                self._compiled[key] = self._compile(leaves, tree)
                log.info("Compiled %s in %.1f s", self._name, time.perf_counter() - start)
            return self._compiled[key]

    def _compile(self, leaves: Sequence[Any], tree: Any) -> Any:
        """The executable of the flattened arguments."""
        donated = tree.children()[0].num_leaves if self._donate_first else 0

        def flat(*leaves: Any) -> Any:
            return self._function(*jax.tree.unflatten(tree, leaves))

        donate = tuple(range(donated))
        function = jax.jit(flat, donate_argnums=donate, out_shardings=self._out_shardings)
        with jax.set_mesh(self._mesh) if self._mesh is not None else nullcontext():
            return function.lower(*leaves).compile(self._options)
