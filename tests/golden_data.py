"""Golden files: numbers a correct implementation reproduces, and their names in our terms."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dreamfleet.agents.dreamer.saving import named_leaves, path_name

FOLDER = Path(__file__).parent / "golden"

_RENAMES = [
    (r"^encoder/mlp/layers/(\d+)/scale$", r"enc/mlp\1norm/scale"),
    (r"^encoder/mlp/layers/(\d+)/", r"enc/mlp\1/"),
    (r"^encoder/cnn/(\d+)/scale$", r"enc/cnn\1norm/scale"),
    (r"^encoder/cnn/(\d+)/", r"enc/cnn\1/"),
    (r"^dynamics/deter_in/", "dyn/dynin0/"),
    (r"^dynamics/stoch_in/", "dyn/dynin1/"),
    (r"^dynamics/action_in/", "dyn/dynin2/"),
    (r"^dynamics/hidden/(\d+)/", r"dyn/dynhid\1/"),
    (r"^dynamics/gates/", "dyn/dyngru/"),
    (r"^dynamics/prior/(\d+)/", r"dyn/prior\1/"),
    (r"^dynamics/prior_logits/", "dyn/priorlogit/"),
    (r"^dynamics/posterior/(\d+)/", r"dyn/obs\1/"),
    (r"^dynamics/posterior_logits/", "dyn/obslogit/"),
    (r"^(dyn/\w+)/scale$", r"\1norm/scale"),
    (r"^decoder/image/from_deter/", "dec/sp0/"),
    (r"^decoder/image/from_stoch/scale$", "dec/sp1norm/scale"),
    (r"^decoder/image/from_stoch/", "dec/sp1/"),
    (r"^decoder/image/from_stoch_out/", "dec/sp2/"),
    (r"^decoder/image/merge/", "dec/spnorm/"),
    (r"^decoder/", "dec/"),
    (r"^reward/", "rew/"),
    (r"^cont/", "con/"),
    (r"^critic/", "val/"),
    (r"^slow_critic/", "slowval/"),
    (r"^actor/outputs/(\w+)\.(\w+)/", r"pol/head/\1/\2/"),
    (r"^actor/", "pol/"),
    (r"/mlp/layers/(\d+)/scale$", r"/mlp/norm\1/scale"),
    (r"/mlp/layers/(\d+)/", r"/mlp/linear\1/"),
    (r"^(rew|val|slowval)/out/", r"\1/head/logits/"),
    (r"^con/out/", "con/head/logit/"),
]


def load(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as data:
        return {key: data[key] for key in data.files}


def part(data: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {
        key.removeprefix(prefix): value for key, value in data.items() if key.startswith(prefix)
    }


def golden_name(ours: str, stages: int = 4, discrete: tuple[str, ...] = ()) -> str:
    """The golden files' name of one of our parameters."""
    for pattern, replacement in _RENAMES:
        ours = re.sub(pattern, replacement, ours)
    if match := re.match(r"^dec/image/(stages|norms)/(\d+)/(\w+)$", ours):
        kind, index, leaf = match.groups()
        number = stages - 2 - int(index)
        if number < 0:
            return f"dec/imgout/{leaf}"
        return f"dec/conv{number}{'norm' if kind == 'norms' else ''}/{leaf}"
    if match := re.match(r"^dec/outputs/(\w+)/(\w+)$", ours):
        key, leaf = match.groups()
        return f"dec/vec/{key}/{'logits' if key in discrete else 'pred'}/{leaf}"
    return ours


def fill(
    module: Any,
    prefix: str,
    params: dict[str, np.ndarray],
    stages: int = 4,
    discrete: tuple[str, ...] = (),
) -> Any:
    """The module with the golden parameters; all of the module's leaves must be given."""

    def leaf(path: tuple[Any, ...], value: Any) -> jax.Array:
        name = golden_name("/".join(filter(None, [prefix, path_name(path)])), stages, discrete)
        given = params[name]
        assert given.shape == value.shape, (name, given.shape, value.shape)
        return jnp.asarray(given)

    return jax.tree_util.tree_map_with_path(leaf, module)


def names_of(
    tree: Any, prefix: str = "", stages: int = 4, discrete: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Our leaves under the golden files' names."""
    return {
        golden_name("/".join(filter(None, [prefix, name])), stages, discrete): leaf
        for name, leaf in named_leaves(tree).items()
    }


def assert_close(
    actual: Any, expected: np.ndarray, relative: float = 1e-5, absolute: float = 1e-6
) -> None:
    """Compared to the largest magnitude of the array, as the golden files suggest."""
    actual = np.asarray(actual)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    limit = relative * np.max(np.abs(expected), initial=0.0) + absolute
    worst = np.max(np.abs(actual.astype(np.float64) - expected), initial=0.0)
    assert worst <= limit, f"differs by {worst}, allowed {limit}"
