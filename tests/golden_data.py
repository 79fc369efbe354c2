"""Golden files: numbers a correct implementation reproduces, and their names in our terms."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from golden_files import Arrays, part

from dreamfleet import Space
from dreamfleet.agents.dreamer.config import LossConfig, ModelConfig, OptimizerConfig
from dreamfleet.agents.dreamer.runtime.saving import named_leaves, path_name

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
    (r"^actor/outputs/(.+)\.(\w+)/", r"pol/head/\1/\2/"),
    (r"^actor/", "pol/"),
    (r"/mlp/layers/(\d+)/scale$", r"/mlp/norm\1/scale"),
    (r"/mlp/layers/(\d+)/", r"/mlp/linear\1/"),
    (r"^(rew|val|slowval)/out/", r"\1/head/logits/"),
    (r"^con/out/", "con/head/logit/"),
]


# Our settings by the names that the files have for them.
_MODEL = {
    **{name: name for name in ("deter", "hidden", "stoch", "classes", "blocks", "unimix")},
    **{name: name for name in ("units", "depth", "mults", "kernel", "bins")},
    "bspace": "decoder_blocks",
    "imglayers": "prior_layers",
    "obslayers": "posterior_layers",
    "dynlayers": "dynamics_layers",
    "minstd": "min_std",
    "maxstd": "max_std",
}
_LOSS = {
    "contdisc": "continue_discount",
    "horizon": "horizon",
    "slowtar": "slow_target",
    "lam": "return_lambda",
    "actent": "entropy_scale",
    "slowreg": "slow_regularizer",
    "retnorm_rate": "return_rate",
    "retnorm_limit": "return_limit",
    "perclo": "return_low",
    "perchi": "return_high",
    "free_nats": "free_nats",
}
_OPTIMIZER = {
    "lr": "learning_rate",
    "agc": "clip",
    "agc_pmin": "clip_floor",
    "eps": "eps",
    "beta1": "beta1",
    "beta2": "beta2",
    "wd": "weight_decay",
    "warmup": "warmup",
    "anneal": "decay",
}
# Where shapes of parameters show a setting: an axis of one of them, or how many there are.
_AXES = [
    ("deter", r"dyn/dynin0/kernel", 0),
    ("hidden", r"dyn/(dynin|prior|obs)0/kernel", 1),
    ("blocks", r"dyn/dyngru/kernel", 0),
    ("decoder_blocks", r"dec/sp0/kernel", 0),
    ("kernel", r"(enc/cnn0|dec/imgout)/kernel", 0),
    ("units", r"(enc/mlp0|(dec|rew|con|val|pol)/mlp/linear0)/kernel", 1),
    ("bins", r"(rew|val)/head/logits/kernel", 1),
]
_COUNTS = [
    ("encoder_layers", r"enc/mlp\d+/kernel"),
    ("decoder_layers", r"dec/mlp/linear\d+/kernel"),
    ("reward_layers", r"rew/mlp/linear\d+/kernel"),
    ("continue_layers", r"con/mlp/linear\d+/kernel"),
    ("actor_layers", r"pol/mlp/linear\d+/kernel"),
    ("critic_layers", r"val/mlp/linear\d+/kernel"),
    ("dynamics_layers", r"dyn/dynhid\d+/kernel"),
    ("prior_layers", r"dyn/prior\d+/kernel"),
    ("posterior_layers", r"dyn/obs\d+/kernel"),
]


def shapes_of(data: Arrays) -> dict[str, tuple[int, ...]]:
    """The shapes of a file's parameters, by name."""
    return {name: value.shape for name, value in part(data, "param/").items()}


def model_of(data: Arrays, shapes: Mapping[str, tuple[int, ...]] | None = None) -> ModelConfig:
    """The sizes of a file's networks: as it states them, and as its parameters show them."""
    shapes = shapes_of(data) if shapes is None else shapes
    found: dict[str, Any] = {}
    for setting, pattern, axis in _AXES:
        for name, shape in shapes.items():
            if re.fullmatch(pattern, name):
                found[setting] = shape[axis]
    for setting, pattern in _COUNTS:
        if count := sum(bool(re.fullmatch(pattern, name)) for name in shapes):
            found[setting] = count
    if channels := _channels(shapes):
        found |= {"depth": 1, "mults": channels}
    stated = settings(ModelConfig, _MODEL, data)
    return ModelConfig(**(found | stated))


def _channels(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Of every image stage, from the largest image to the smallest."""
    encoder = _in_order(shapes, r"enc/cnn(\d+)/bias")
    decoder = _in_order(shapes, r"dec/conv(\d+)/bias")
    last = [shapes[name][0] for name in ("dec/spnorm/scale",) if name in shapes]
    return tuple(encoder or [*decoder, *last])


def _in_order(shapes: Mapping[str, tuple[int, ...]], pattern: str) -> list[int]:
    found = {
        int(match[1]): shape[0]
        for name, shape in shapes.items()
        if (match := re.match(pattern, name))
    }
    return [found[number] for number in sorted(found)]


def loss_of(data: Arrays) -> LossConfig:
    """The settings of losses that a file states."""
    return LossConfig(**settings(LossConfig, _LOSS, data))


def optimizer_of(data: Arrays) -> OptimizerConfig:
    """The settings of the optimizer that a file states."""
    return OptimizerConfig(**settings(OptimizerConfig, _OPTIMIZER, data))


def settings(group: type, names: Mapping[str, str], data: Arrays) -> dict[str, Any]:
    """Those of a group, in the types of its fields."""
    defaults = group()
    found = {}
    for theirs, ours in names.items():
        if (value := data.get(f"cfg/{theirs}")) is not None:
            kind = type(getattr(defaults, ours))
            found[ours] = tuple(value.tolist()) if kind is tuple else kind(value)
    return found


def spaces_of(arrays: Arrays, choices: Mapping[str, int], axes: int = 2) -> dict[str, Space]:
    """A space for each array, without its first axes; `choices` are those of its integers."""

    def space(name: str, value: np.ndarray) -> Space:
        shape = value.shape[axes:]
        if value.dtype.kind == "i":
            return Space(np.int32, shape, 0, choices[name])
        return Space(value.dtype, shape)

    return {name: space(name, value) for name, value in arrays.items()}


def choices_of(data: Arrays, arrays: Arrays, width: int = 0) -> dict[str, int]:
    """Choices of each integer: as the file states them, as logits show them, or, for a single one,
    what the others leave of the width of the layer that reads all of them."""
    found, unknown = {}, []
    shapes = shapes_of(data)
    for name, value in arrays.items():
        if value.dtype.kind != "i":
            continue
        elements = int(np.prod(value.shape[2:]))
        if f"cfg/classes/{name}" in data:
            found[name] = int(data[f"cfg/classes/{name}"])
        elif f"dec/vec/{name}/logits/bias" in shapes:
            found[name] = shapes[f"dec/vec/{name}/logits/bias"][0] // elements
        else:
            unknown.append((name, elements))
    assert len(unknown) <= 1, f"the file does not tell the choices of {unknown}"
    known = sum(
        int(np.prod(value.shape[2:])) * found.get(name, 1)
        for name, value in arrays.items()
        if name not in dict(unknown)
    )
    for name, elements in unknown:
        found[name] = (width - known) // elements
    return found


def golden_name(ours: str, known: Collection[str]) -> str:
    """The golden files' name of one of our parameters, among those that a file has."""
    for pattern, replacement in _RENAMES:
        ours = re.sub(pattern, replacement, ours)
    if match := re.match(r"^dec/image/(stages|norms)/(\d+)/(\w+)$", ours):
        kind, index, leaf = match.groups()
        stages = sum(bool(re.fullmatch(r"dec/(conv\d+|imgout)/kernel", name)) for name in known)
        number = stages - 2 - int(index)
        if number < 0:
            return f"dec/imgout/{leaf}"
        return f"dec/conv{number}{'norm' if kind == 'norms' else ''}/{leaf}"
    if match := re.match(r"^dec/outputs/(.+)/(\w+)$", ours):
        key, leaf = match.groups()
        logits = f"dec/vec/{key}/logits/{leaf}"
        return logits if logits in known else f"dec/vec/{key}/pred/{leaf}"
    return ours


def fill(module: Any, prefix: str, params: Arrays) -> Any:
    """The module with the golden parameters; all of the module's leaves must be given."""

    def leaf(path: tuple[Any, ...], value: Any) -> jax.Array:
        name = golden_name("/".join(filter(None, [prefix, path_name(path)])), params)
        given = params[name]
        assert given.shape == value.shape, (name, given.shape, value.shape)
        return jnp.asarray(given)

    return jax.tree_util.tree_map_with_path(leaf, module)


def names_of(tree: Any, prefix: str = "", known: Collection[str] = ()) -> dict[str, Any]:
    """Our leaves under the golden files' names."""
    return {
        golden_name("/".join(filter(None, [prefix, name])), known): leaf
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
