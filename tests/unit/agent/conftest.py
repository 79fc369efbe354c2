"""JAX runs strictly in these tests: no silent change of dtype or rank, shapes as annotated."""

import sys

import jax
import pytest
from jaxtyping import install_import_hook

PACKAGE = "dreamfleet.agent"
CHECKED = [
    f"{PACKAGE}.{name}"
    for name in (
        "acting", "actor_critic", "codec", "context", "convolution", "distributions", "heads",
        "keys", "learning", "nets", "optimizer", "report", "returns", "rssm", "world_model",
    )
]  # fmt: skip

assert f"{PACKAGE}.nets" not in sys.modules, "shapes are checked from the first import on"
with install_import_hook(CHECKED, "beartype.beartype"):
    pass


@pytest.fixture(autouse=True)
def strict_jax():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
