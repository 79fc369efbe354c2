"""Programs for accelerators, from a machine that has none: they can be lowered, and their loops
hold few operations, each of which is a kernel to be started."""

from dataclasses import dataclass

import pytest

from benchmarks.lowering import Operations, lower


@dataclass(frozen=True)
class Budget:
    """The most operations, and the products and convolutions among them."""

    outside: int
    outside_products: int
    inside: int
    inside_products: int


# A few percent above what they have. Who adds to them decides whether it is worth the kernels.
BUDGETS = {
    ("vector", "report"): Budget(2150, 58, 360, 24),
    ("vector", "policy"): Budget(260, 20, 0, 0),
    ("vector", "publish"): Budget(0, 0, 0, 0),
    ("image", "train"): Budget(7800, 134, 750, 38),
}


def check(found: Operations, budget: Budget) -> None:
    assert found.outside.total() <= budget.outside, found
    assert found.products(found.outside) <= budget.outside_products, found
    assert found.inside.total() <= budget.inside, found
    assert found.products(found.inside) <= budget.inside_products, found


@pytest.mark.parametrize(
    ("kind", "dtype", "size", "programs"),
    [
        ("vector", "float32", "400m", ("report", "policy", "publish")),
        ("image", "bfloat16", "1m", ("train",)),
    ],
)
def test_programs_lower_for_accelerators_within_their_budget(
    kind: str, dtype: str, size: str, programs: tuple[str, ...]
) -> None:
    """`make bench ARGS=lowering` does all of them."""
    found = lower(kind, dtype, size, programs=programs)
    assert {platform for _, platform in found} == {"cuda", "tpu"}
    for (program, _), operations in found.items():
        check(operations, BUDGETS[kind, program])
