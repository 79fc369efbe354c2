"""JAX runs strictly in these tests: no silent change of dtype or rank, shapes as annotated."""

import importlib
import sys

import jax
import pytest
from jaxtyping import install_import_hook

PACKAGE = "dreamfleet.agents.dreamer"
NUMERICAL = (
    "acting",
    "actor_critic",
    "decoder",
    "distributions",
    "dynamics",
    "encoder",
    "forms",
    "heads",
    "images",
    "imagination",
    "layers",
    "networks",
    "optimizer",
    "rssm",
    "runtime.report",
    "train",
    "world_model",
)
CHECKED = [f"{PACKAGE}.{name}" for name in NUMERICAL]

assert f"{PACKAGE}.layers" not in sys.modules, "shapes are checked from the first import on"
with install_import_hook(CHECKED, "beartype.beartype"):
    importlib.import_module(f"{PACKAGE}.runtime.agent")


@pytest.fixture(autouse=True)
def strict_jax():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
