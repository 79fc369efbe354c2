import math

import ml_dtypes
import numpy as np
import pytest

from dreamfleet.metrics import Aggregate


def test_numbers_are_averaged() -> None:
    agg = Aggregate()
    agg.add({"loss": 1.0, "steps": 2})
    agg.add({"loss": np.float32(3.0), "steps": np.array(4)})
    assert agg.result() == {"loss": 2.0, "steps": 3.0}
    assert agg.result() == {}, "a result starts from nothing"


def test_vectors_count_as_many_values() -> None:
    one, many = Aggregate(), Aggregate()
    values = np.random.default_rng(0).normal(1e6, 1, 100)
    for value in values.tolist():
        one.add({"x": value})
    many.add({"x": values[:30]})
    many.add({"x": float(values[30])})
    many.add({"x": values[31:].astype(np.float64)})
    assert one.result()["x"] == pytest.approx(values.mean(), rel=1e-12)
    assert many.result()["x"] == pytest.approx(values.mean(), rel=1e-12)


def test_many_small_numbers_do_not_overflow_their_dtype() -> None:
    agg = Aggregate()
    agg.add({"half": np.full(1000, 1000, np.float16), "byte": np.full(1000, 200, np.uint8)})
    assert agg.result() == {"half": 1000, "byte": 200}


def test_nan_is_not_hidden() -> None:
    agg = Aggregate()
    for value in (1.0, math.nan):
        agg.add({"x": value})
    agg.add({"y": np.array([1.0, math.nan, 2.0])})
    assert all(math.isnan(value) for value in agg.result().values())


def test_images_and_text_are_kept_as_they_are() -> None:
    agg = Aggregate()
    image = np.zeros((4, 4, 3), np.uint8)
    agg.add({"image": image, "note": "old"})
    agg.add({"note": "new"})
    result = agg.result()
    assert result["image"] is image
    assert result["note"] == "new"


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
    assert agg.result(prefix="learner") == {"learner/train/loss": 1.0}
