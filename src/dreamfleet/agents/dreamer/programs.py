"""Functions compiled ahead of time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from dreamfleet.agents.dreamer.traces import TraceCache

logger = logging.getLogger(__name__)

# For CPU programs that run so rarely that compiling is most of what they cost.
COMPILE_QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


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
        compiler_options: Mapping[str, Any] | None = None,
        traces: TraceCache | None = None,
    ) -> None:
        self._name = name
        self._function = function
        self._donate_first = donate_first
        self._out_shardings = out_shardings
        self._options = dict(compiler_options or {})
        self._traces = traces
        self._compiled: dict[Any, Any] = {}
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        return self._find(leaves, tree)(*leaves)

    def compile(self, *args: Any) -> None:
        """Get ready for arguments of these shapes."""
        self._find(*jax.tree.flatten(args))

    def _find(self, leaves: Sequence[Any], tree: Any) -> Any:
        key = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        found = self._compiled.get(key)
        if found is not None:
            return found
        with self._lock:
            if key not in self._compiled:
                logger.info("Compiling %s", self._name)
                start = time.perf_counter()
                self._compiled[key] = self._compile(leaves, tree)
                logger.info("Compiled %s in %.1f s", self._name, time.perf_counter() - start)
            return self._compiled[key]

    def _compile(self, leaves: Sequence[Any], tree: Any) -> Any:
        """The executable of the flattened arguments."""
        donated = tree.children()[0].num_leaves if self._donate_first else 0

        def flat(*leaves: Any) -> Any:
            return self._function(*jax.tree.unflatten(tree, leaves))

        def jit(function: Callable[..., Any]) -> Any:
            donate = tuple(range(donated))
            return jax.jit(function, donate_argnums=donate, out_shardings=self._out_shardings)

        function = jit(flat)
        if self._traces is not None:
            function = jit(self._traces.trace(self._name, function, leaves, tree))
        return function.lower(*leaves).compile(self._options)
