import math

import ml_dtypes
import numpy as np
import pytest

from dreamfleet import ConfigError
from dreamfleet.metrics import Aggregate


def test_numbers_are_averaged() -> None:
    agg = Aggregate()
    agg.add({"loss": 1.0, "steps": 2})
    agg.add({"loss": np.float32(3.0), "steps": np.array(4)})
    assert agg.result() == {"loss": 2.0, "steps": 3.0}
    assert agg.result() == {}, "a result begins anew"


def test_each_way_of_reducing() -> None:
    agg = Aggregate()
    for value in (1.0, 5.0, 3.0):
        agg.add({"x": value}, how=("mean", "max", "min", "sum", "last", "std"))
    result = agg.result()
    assert result == {
        "x": 3.0,
        "x/max": 5.0,
        "x/min": 1.0,
        "x/sum": 9.0,
        "x/last": 3.0,
        "x/std": pytest.approx(math.sqrt(8 / 3)),
    }


def test_one_way_alone_keeps_the_name() -> None:
    agg = Aggregate()
    agg.add({"episodes": 2}, how="sum")
    agg.add({"episodes": 3}, how="sum")
    assert agg.result() == {"episodes": 5}


def test_vectors_count_as_many_values() -> None:
    one, many = Aggregate(), Aggregate()
    ways = ("mean", "max", "min", "sum", "last", "std")
    values = np.random.default_rng(0).normal(1e6, 1, 100)
    for value in values.tolist():
        one.add({"x": value}, how=ways)
    many.add({"x": values[:30]}, how=ways)
    many.add({"x": float(values[30])}, how=ways)
    many.add({"x": values[31:].astype(np.float64)}, how=ways)
    a, b = one.result(), many.result()
    for key in a:
        assert a[key] == pytest.approx(b[key], rel=1e-9), key
    assert b["x/std"] == pytest.approx(values.std(), rel=1e-6), "stable far from zero"


def test_nan_is_not_hidden() -> None:
    agg = Aggregate()
    ways = ("mean", "max", "min", "std")
    for value in (1.0, math.nan):
        agg.add({"x": value}, how=ways)
    agg.add({"y": np.array([1.0, math.nan, 2.0])}, how=ways)
    assert all(math.isnan(value) for value in agg.result().values())


def test_pictures_and_text_are_kept_as_they_are() -> None:
    agg = Aggregate()
    image = np.zeros((4, 4, 3), np.uint8)
    agg.add({"image": image, "note": "old"})
    agg.add({"note": "new"})
    agg.keep({"histogram": np.arange(3)}, prefix="report")
    result = agg.result()
    assert result["image"] is image
    assert result["note"] == "new"
    assert result["report/histogram"].tolist() == [0, 1, 2]


def test_bfloat16_is_a_number() -> None:
    agg = Aggregate()
    agg.add({"x": np.ones(2, ml_dtypes.bfloat16), "y": ml_dtypes.bfloat16(2)})
    assert agg.result() == {"x": 1, "y": 2}


def test_empty_vectors_add_nothing() -> None:
    agg = Aggregate()
    agg.add({"x": np.zeros(0)})
    assert agg.result() == {}


def test_prefixes() -> None:
    agg = Aggregate()
    agg.add({"loss": 1.0}, prefix="train")
    assert agg.result(prefix="learner", reset=False) == {"learner/train/loss": 1.0}
    assert agg.result() == {"train/loss": 1.0}


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose from mean, max"):
        Aggregate().add({"x": 1}, how="median")
