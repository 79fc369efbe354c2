import pytest

from dreamfleet.formatting import clock, readable


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (3.0, "3"), (-12345, "-12,345"), (1234.5, "1,234"), (0.12345, "0.1235"),
        (12_345_678, "12.3M"), (2.5e9, "2.5G"), (3e12, "3T"), (1e20, "1.00e+20"),
        (0.000123, "1.23e-04"), (float("nan"), "nan"), (float("-inf"), "-inf"),
    ],
)  # fmt: skip
def test_numbers_are_readable(value: float, text: str) -> None:
    assert readable(value) == text


def test_clocks_are_short() -> None:
    assert [clock(s) for s in (7, 187, 3723, 270_000)] == ["0:07", "3:07", "1:02:03", "3 d 3 h"]
