"""JAX runs strictly in these tests: no silent change of dtype or rank, shapes as annotated."""

import ctypes
import gc
import importlib
import sys

import jax
import psutil
import pytest
from jaxtyping import install_import_hook

PACKAGE = "dreamfleet.agents.dreamer"
NUMERICAL = (
    "acting",
    "convolution",
    "decoders",
    "distributions",
    "encoders",
    "heads",
    "learning",
    "losses",
    "nets",
    "networks",
    "optimizer",
    "report",
    "rssm",
)
ENOUGH_MEMORY = 1_200_000_000
CHECKED = [f"{PACKAGE}.{name}" for name in NUMERICAL]

# These tests compile much and compute little.
jax.config.update("jax_disable_most_optimizations", True)

assert f"{PACKAGE}.nets" not in sys.modules, "shapes are checked from the first import on"
with install_import_hook(CHECKED, "beartype.beartype"):
    importlib.import_module(f"{PACKAGE}.agent")


def free_programs() -> None:
    """Forget compiled programs that no agent holds, and give their memory back to the system."""
    jax.clear_caches()
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # the C library of Linux has it
    if trim is not None:
        trim(0)


@pytest.fixture(autouse=True, scope="module")
def programs_are_freed_after_a_module():
    yield
    free_programs()


@pytest.fixture(autouse=True)
def memory_stays_small():
    yield
    if psutil.Process().memory_info().rss > ENOUGH_MEMORY:
        free_programs()


@pytest.fixture(autouse=True)
def strict_jax():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
