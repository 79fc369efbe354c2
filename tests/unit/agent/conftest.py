"""JAX runs strictly in these tests: no silent change of dtype or rank."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_jax():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
