"""Operations are counted as often as they run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.lowering import flops, form_of_accelerators

A, B = jax.ShapeDtypeStruct((3, 4), jnp.float32), jax.ShapeDtypeStruct((4, 5), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((4, 4), jnp.float32)
PRODUCT, SQUARED = 2 * 3 * 4 * 5, 2 * 4**3


def test_a_product_is_two_operations_a_number_that_goes_into_it() -> None:
    assert flops(lambda a, b: a @ b + 1, (A, B)) == PRODUCT
    many = jax.ShapeDtypeStruct((7, 3, 4), jnp.float32)
    assert flops(lambda a, b: jnp.einsum("nij,jk->nik", a, b), (many, B)) == 7 * PRODUCT


def test_loops_count_by_their_length_also_inside_of_each_other() -> None:
    def loop(x: Any, times: int) -> Any:
        return jax.lax.scan(lambda y, _: (y @ x, None), x, None, length=times)[0]

    assert flops(lambda x: loop(x, 5), (SQUARE,)) == 5 * SQUARED
    nested = lambda x: jax.lax.scan(lambda y, _: (loop(y, 3), None), x, None, length=4)[0]  # noqa: E731
    assert flops(jax.jit(nested), (SQUARE,)) == 12 * SQUARED
    assert flops(lambda x: jax.lax.fori_loop(0, 6, lambda _, y: y @ x, x), (SQUARE,)) == 6 * SQUARED


def test_a_loop_of_unknown_length_is_not_guessed() -> None:
    def unknown(x: Any) -> Any:
        return jax.lax.while_loop(lambda y: y.sum() < 9, lambda y: y @ x, x)

    with pytest.raises(ValueError, match="unknown length"):
        flops(unknown, (SQUARE,))


def test_a_convolution_counts_its_kernel_for_every_number_that_it_puts_out() -> None:
    image = jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32)
    kernel = jax.ShapeDtypeStruct((5, 5, 3, 6), jnp.float32)

    def convolve(x: Any, k: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    forward = 2 * (2 * 8 * 8 * 6) * (5 * 5 * 3)
    assert flops(convolve, (image, kernel)) == forward
    both = jax.grad(lambda x, k: convolve(x, k).sum(), argnums=(0, 1))
    assert flops(both, (image, kernel)) == 3 * forward


def test_the_form_is_that_of_accelerators() -> None:
    def counted() -> float:
        def chosen(x: Any) -> Any:  # JAX keeps what it has traced for as long as this is the same
            return jax.lax.platform_dependent(x, cpu=lambda x: x @ x @ x, default=lambda x: x @ x)

        return flops(chosen, (SQUARE,))

    with form_of_accelerators():
        assert counted() == SQUARED
    assert counted() == 2 * SQUARED
