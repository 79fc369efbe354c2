"""A trained policy as files for programs without this package: ONNX or StableHLO.

The graph is one policy call (`PolicyGraph` names its inputs and outputs). No random key enters it:
exporters drop them. What is sampled is sampled from `noise.*` inputs, by the policy's own inverse
CDF, one number for each draw. `policy.json` beside it is the contract: names, shapes, bounds,
versions, checksums, and how far the file is from the policy.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.api import Arrays
from dreamfleet.errors import DreamfleetError, first_line, import_extra
from dreamfleet.files import atomic_write
from dreamfleet.spaces import Space

if TYPE_CHECKING:
    from dreamfleet.agents.dreamer.runtime.exporting import PolicyGraph

Format = Literal["onnx", "stablehlo"]
Run = Callable[[Mapping[str, NDArray[Any]]], Arrays]

TOLERANCE = 1e-4
"""The largest difference between the file and the policy, of numbers larger than 1 as a share."""
STEPS = 200
BATCHES = (1, 8, 64)
_OPSET = 21
_DRAWS = 1000
"""One step in so many may draw another class: its random number lies on the border of two."""


class ExportError(DreamfleetError):
    """A policy that cannot be exported."""


_Built = tuple[dict[str, bytes], Run, tuple[str, ...]]
"""Files, of which the first is the graph; what runs it; and the packages that made it."""


def export(
    graph: PolicyGraph,
    obs_space: Mapping[str, Space],
    out: Path,
    *,
    format: Format = "onnx",  # noqa: A002 - the command's word
    about: Mapping[str, Any] | None = None,
    steps: int = STEPS,
    batches: Sequence[int] = BATCHES,
) -> dict[str, Any]:
    """Write the graph and its contract into a folder, and return the contract.

    Args:
        graph: The policy call.
        obs_space: What is observed, without flags.
        out: The folder.
        format: Of the graph.
        about: Further entries of the contract.
        steps: Of the runs that compare the graph with the policy.
        batches: Of these runs.

    Raises:
        MissingExtraError: The packages that write ONNX are not installed.
        ExportError: The graph cannot be written, or does not compute what the policy does.
    """
    try:
        files, run, packages = _to_onnx(graph) if format == "onnx" else _to_stablehlo(graph)
    except DreamfleetError:
        raise
    except Exception as error:  # of any package that takes part
        raise ExportError(
            f"The policy cannot be written as {format} ({first_line(error)}): use the other format."
        ) from error
    reports = [compare(graph, run, obs_space, batch, steps) for batch in batches]
    for report in reports:
        most = max(2, 2 * report["batch"] * steps // _DRAWS)
        worst = max(report["one_step"], report["free_run"])
        if not worst <= TOLERANCE or report["draws_differ"] > most:
            raise ExportError(
                f"The exported graph differs from the policy by {worst:.2g} in {report['batch']} "
                f"rows (at most {TOLERANCE:g} is allowed) and in {report['draws_differ']} samples "
                f"(at most {most}): nothing was written. Try the other format."
            )
    contract = {
        "format": format,
        "file": next(iter(files)),
        **(about or {}),
        **_arrays(graph, obs_space),
        "parity": {"tolerance": TOLERANCE, "steps": steps, "batches": reports},
        "versions": {name: importlib.metadata.version(name) for name in ("dreamfleet", *packages)},
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }
    for name, data in files.items():
        atomic_write(out / name, data)
    atomic_write(out / "policy.json", json.dumps(contract, indent=2) + "\n")
    return contract


def compare(
    graph: PolicyGraph, run: Run, obs_space: Mapping[str, Space], batch: int, steps: int
) -> dict[str, Any]:
    """How far a graph is from the policy, with the same numbers: one step from the policy's own
    state, and a free run. Every second row starts an episode now and then."""
    rng = np.random.default_rng(batch)
    truth = free = {
        name: np.zeros((batch, *shape), dtype)
        for name, (dtype, shape) in graph.inputs.items()
        if name.startswith("state.")
    }
    report = {"one_step": 0.0, "free_run": 0.0, "draws_differ": 0}
    together = np.ones(batch, bool)  # rows of the free run whose draws were all the same
    seconds: dict[str, list[float]] = {"exported": [], "policy": []}
    for step in range(steps):
        feed = {f"obs.{key}": space.sample(rng, batch) for key, space in obs_space.items()}
        for name, (_, shape) in graph.inputs.items():
            if name.startswith("noise."):
                draw = rng.standard_normal if name in graph.normal_noise else rng.random
                feed[name] = draw((batch, *shape), np.float32)
        restarts = (rng.random(batch) < 0.02) & (np.arange(batch) % 2 == 1)
        feed["is_first"] = restarts | (step == 0)
        together |= feed["is_first"]
        start = time.perf_counter()
        expected = graph.reference({**feed, **truth})
        middle = time.perf_counter()
        forced = run({**feed, **truth})
        seconds["policy"].append(middle - start)
        seconds["exported"].append(time.perf_counter() - middle)
        freely = run({**feed, **free})
        apart, same = _difference(expected, forced)
        report["one_step"] = max(report["one_step"], float(apart[same].max(initial=0.0)))
        report["draws_differ"] += int((~same).sum())
        apart, same = _difference(expected, freely)
        report["draws_differ"] += int((together & ~same).sum())
        together &= same
        report["free_run"] = max(report["free_run"], float(apart[together].max(initial=0.0)))
        truth, free = (
            {name: each[f"state_out.{name.removeprefix('state.')}"] for name in truth}
            for each in (expected, freely)
        )
    medians = {name: round(1e3 * float(np.median(each)), 4) for name, each in seconds.items()}
    return {"batch": batch, "steps": steps, **report, "milliseconds": medians}


def _difference(left: Arrays, right: Arrays) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """The largest difference of each row, and whether the row has the same draws."""
    rows = len(next(iter(left.values())))
    apart, same = np.zeros(rows), np.ones(rows, bool)
    for name, value in left.items():
        other = np.asarray(right[name], np.float64).reshape(rows, -1)
        mine = np.asarray(value, np.float64).reshape(rows, -1)
        difference = (np.abs(mine - other) / np.maximum(1.0, np.abs(mine))).max(-1)
        # Of integers, and of the one-hot entries of a latent state.
        another = difference > 0 if value.dtype.kind in "iu" else difference > 0.4
        same &= ~another
        apart = np.maximum(apart, np.where(np.isnan(difference), np.inf, difference))
    return apart, same


def _arrays(graph: PolicyGraph, obs_space: Mapping[str, Space]) -> dict[str, Any]:
    """What the contract says about inputs and outputs."""

    def bounds(low: NDArray[Any], high: NDArray[Any]) -> dict[str, Any]:
        """As JSON has them: one number where all are the same, null for infinity."""
        found = {}
        for name, bound in (("low", low), ("high", high)):
            values = [float(x) if np.isfinite(x) else None for x in np.ravel(bound)]
            found[name] = values[0] if len(set(values)) == 1 else values
        return found

    def more(name: str) -> dict[str, Any]:
        kind, _, key = name.partition(".")
        if kind == "obs":
            space = obs_space[key]
            layout = {"layout": "BHWC"} if space.image else {}
            return {**layout, **bounds(space.low, space.high - space.discrete)}
        if kind == "state":
            return {"initial": 0.0}
        if kind == "state_out":
            return {"next": f"state.{key}"}
        if kind == "noise":
            normal = name in graph.normal_noise
            return {"distribution": "standard normal" if normal else "uniform in [0, 1)"}
        if name in graph.action_bounds:
            return bounds(*graph.action_bounds[name])
        return {"meaning": "true where an episode starts: the state is reset there"}

    return {
        side: [
            {"name": name, "dtype": dtype.name, "shape": ["B", *shape], **more(name)}
            for name, (dtype, shape) in arrays.items()
        ]
        for side, arrays in (("inputs", graph.inputs), ("outputs", graph.outputs))
    }


# --- formats --------------------------------------------------------------------------------------


def _to_onnx(graph: PolicyGraph) -> _Built:
    converter = import_extra("jax2onnx", "ONNX files", "export")
    runtime = import_extra("onnxruntime", "ONNX files", "export")
    with _quiet():
        model = converter.to_onnx(
            graph.function,
            inputs=_shapes(graph, "B"),
            input_names=list(graph.inputs),
            output_names=list(graph.outputs),
            model_name="policy",
            opset=_OPSET,
            # Some runtimes are wrong about normalisation as one operator.
            normalization_mode="force_decomposed",
        )
        data = model.SerializeToString()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = 1  # a policy call is too short for more
        options.log_severity_level = 3
        session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    def run(given: Mapping[str, NDArray[Any]]) -> Arrays:
        values = session.run(None, {name: given[name] for name in graph.inputs})
        return dict(zip(graph.outputs, values, strict=True))

    return {"policy.onnx": data}, run, ("jax", "jax2onnx", "onnx", "onnxruntime")


def _to_stablehlo(graph: PolicyGraph) -> _Built:
    import jax
    from jax import export as jax_export

    (rows,) = jax_export.symbolic_shape("B")
    lower = jax_export.export(jax.jit(graph.function), platforms=["cpu", "cuda", "tpu"])
    exported: Any = lower(*_shapes(graph, rows))

    def run(given: Mapping[str, NDArray[Any]]) -> Arrays:
        values = jax.device_get(exported.call(*(given[name] for name in graph.inputs)))
        return dict(zip(graph.outputs, values, strict=True))

    files = {
        "policy.stablehlo": exported.mlir_module_serialized,
        "policy.jax": bytes(exported.serialize()),
    }
    return files, run, ("jax", "jaxlib")


def _shapes(graph: PolicyGraph, rows: Any) -> list[Any]:
    import jax

    shape: Any = jax.ShapeDtypeStruct
    return [shape((rows, *dims), dtype) for dtype, dims in graph.inputs.values()]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the converter's remarks about its own work off the terminal."""
    root, noisy, silent = logging.getLogger(), logging.getLogger("onnx_ir"), logging.NullHandler()
    level = noisy.level
    root.addHandler(silent)  # or its first message would have one that prints
    noisy.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        noisy.setLevel(level)
        root.removeHandler(silent)
