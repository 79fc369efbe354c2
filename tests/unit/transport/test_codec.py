"""Every value survives the trip, and malformed data is refused before anything is allocated."""

import enum
from typing import Any

import hypothesis.extra.numpy as hnp
import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dreamfleet.transport.codec import (
    DTYPES,
    MAX_DEPTH,
    MAX_NODES,
    MAX_SCHEMAS,
    SMALL,
    _known_schema,
    decode,
    encode,
    parse_schema,
)
from dreamfleet.transport.errors import CodecError, MessageError


def round_trip(value: Any) -> Any:
    encoded = encode(value)
    return decode(encoded.schema, encoded.plain, encoded.blob, encoded.frames)


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, (np.ndarray, np.generic)):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert left.tobytes() == right.tobytes()
    elif isinstance(left, float):
        assert np.float64(left).tobytes() == np.float64(right).tobytes()
    else:
        assert left == right


@pytest.mark.parametrize(
    "value",
    [
        {"a": np.ones(3), "b": {"x": np.zeros(2, bool)}},
        {"a": {"x": np.ones(3), "y": np.ones(2)}, "b": {}},
        {"a": np.ones(3), "b": np.zeros(2, np.uint8)},
        {"a": np.ones(3), "b": 5},
        {"a": np.ones(3), "b": b"text"},
        {"a": np.ones(3), "b": np.float32(2)},
        {"a": np.ones(3), "b": np.ones((0, 2))},
        {"a": np.ones(3), "b": np.ones(SMALL)},
        {},
        [{"a": np.ones(3)}],
        np.ones(3),
        7,
    ],
    ids=range(12),
)
def test_dicts_of_arrays_and_what_looks_like_them(value: Any) -> None:
    assert_same(round_trip(value), value)


native = st.sampled_from([dtype for dtype in DTYPES if dtype != ml_dtypes.bfloat16])
arrays = native.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=5, min_side=0))
)
bfloats = hnp.arrays(np.uint16, hnp.array_shapes(min_dims=0, min_side=0)).map(
    lambda bits: bits.view(ml_dtypes.bfloat16)
)
scalars = native.flatmap(lambda dtype: hnp.arrays(dtype, ())).map(lambda array: array[()])
plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary()
)
values = st.recursive(
    arrays | bfloats | scalars | plain,
    lambda child: (
        st.lists(child, max_size=5)
        | st.lists(child, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=8), child, max_size=5)
    ),
    max_leaves=20,
)


@given(values)
@settings(max_examples=300, deadline=None)
def test_every_value_survives(value: Any) -> None:
    assert_same(round_trip(value), value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (40, 40, 3)])
def test_every_dtype_survives_small_large_and_empty(
    dtype: np.dtype[Any], shape: tuple[int, ...]
) -> None:
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    assert_same(round_trip(array), array)


@pytest.mark.parametrize("size", [SMALL - 1, SMALL, SMALL + 1, 100_000])
def test_text_and_bytes_of_any_size(size: int) -> None:
    assert round_trip("é" * size) == "é" * size
    assert round_trip(b"x" * size) == b"x" * size
    assert round_trip(bytearray(b"x" * size)) == b"x" * size


@pytest.mark.parametrize("size", [3, SMALL + 1])
def test_text_and_bytes_of_numpy_arrive_as_those_of_python(size: int) -> None:
    text, data = round_trip([np.str_("é" * size), np.bytes_(b"x" * size)])
    assert (type(text), text) == (str, "é" * size)
    assert (type(data), data) == (bytes, b"x" * size)
    (key,) = round_trip({np.str_("key"): 1})
    assert (type(key), key) == (str, "key")


@pytest.mark.parametrize(
    "array",
    [
        np.arange(10_000).reshape(100, 100).T,
        np.arange(10_000)[::-3],
        np.arange(10_000, dtype=">i4"),
        np.asfortranarray(np.arange(10_000.0).reshape(10, 1000)),
        np.broadcast_to(np.float32(1), (100, 100)),
    ],
    ids=["transposed", "strided", "big-endian", "fortran", "broadcast"],
)
def test_arrays_of_any_layout_arrive_contiguous_and_native(array: np.ndarray) -> None:
    back = round_trip(array)
    np.testing.assert_array_equal(back, array)
    assert back.flags.c_contiguous
    assert back.dtype.isnative


def test_received_arrays_are_views_that_cannot_be_written() -> None:
    encoded = encode(np.zeros(10_000))
    frame = bytes(encoded.frames[0])
    back = decode(encoded.schema, encoded.plain, encoded.blob, [frame])
    assert np.shares_memory(back, np.frombuffer(frame))
    assert not back.flags.writeable
    assert not round_trip(np.zeros(3)).flags.writeable


def test_a_writable_frame_still_makes_a_read_only_array() -> None:
    encoded = encode(np.zeros(10_000))
    frames = [memoryview(bytearray(encoded.frames[0]))]
    assert not decode(encoded.schema, encoded.plain, encoded.blob, frames).flags.writeable


# --- what cannot be sent -------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 1


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [0, {"b": object()}]}, "a/1/b: values of type object are not supported"),
        (np.array([object()]), "arrays of dtype object are not supported"),
        (np.array(["text"]), "arrays of dtype <U4 are not supported"),
        (np.zeros(2, [("a", int)]), "are not supported"),
        (np.zeros(2, np.complex64), "complex64 are not supported"),
        ({1: 2}, "keys of a dict are strings, not 1"),
        (2**64, "does not fit into 64 bits"),
        (-(2**63) - 1, "does not fit into 64 bits"),
        (nested(MAX_DEPTH + 1), "nested more than"),
        ([0] * (MAX_NODES + 1), "at most"),
        ({1, 2}, "type set"),
        (lambda: None, "type function"),
        ({"a": Colour.RED}, "a: <Colour.RED: 1> is an enum; send its `value`"),
        (Level.HIGH, "is an enum"),
        (np.ma.masked_array([1, 2], [0, 1]), r"its mask would be lost; send `filled\(\)`"),
        (np.ma.masked, "its mask would be lost"),
        ({"a": "\ud800"}, r"a: '\\ud800' has lone surrogates"),
        ("\ud800" * 10_000, "has lone surrogates"),
        (np.str_("\udfff"), "has lone surrogates"),
        ({"\ud800": 1}, r"key: '\\ud800' has lone surrogates"),
        ({"\ud800": object()}, r"\\ud800: values of type object"),
    ],
)
def test_what_cannot_be_sent_is_named(value: Any, words: str) -> None:
    with pytest.raises(CodecError, match=words):
        encode(value)


def test_the_deepest_allowed_value_survives() -> None:
    assert round_trip(nested(MAX_DEPTH)) == nested(MAX_DEPTH)


# --- malformed data ------------------------------------------------------------------------------

PLAIN, DICT, LIST, TUPLE, ARRAY, SCALAR, BYTES, STR = range(8)


def deep_schema(depth: int) -> Any:
    schema: Any = PLAIN
    for _ in range(depth):
        schema = [LIST, [schema]]
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        1,
        True,
        False,
        None,
        "text",
        [],
        {},
        [99],
        [PLAIN],
        [DICT, ["a"], []],
        [DICT, [1], [PLAIN]],
        [DICT, ["a", "a"], [PLAIN, PLAIN]],
        [LIST, PLAIN],
        [ARRAY],
        [ARRAY, 99, 1],
        [ARRAY, -1, 1],
        [ARRAY, "float32", 1],
        [ARRAY, 5, -1],
        [ARRAY, 5, 1.5],
        [ARRAY, 5, True],
        [ARRAY, 5, 2**62],
        [ARRAY, 5, 2**62, 0],
        [ARRAY, 5, *[2] * 64],
        [ARRAY, 5, *[1] * 64],
        [SCALAR, 5, 1],
        [BYTES, -1],
        [BYTES, 2**62],
        [STR, 5],
        [STR],
        deep_schema(MAX_DEPTH + 2),
        [LIST, [PLAIN] * (MAX_NODES + 1)],
    ],
    ids=lambda schema: repr(schema)[:40],
)
def test_a_schema_that_encode_does_not_make_is_refused(schema: Any) -> None:
    with pytest.raises(MessageError):
        parse_schema(msgspec.msgpack.encode(schema))


@pytest.mark.parametrize("depth", [500, 10_000, 200_000])
def test_a_bottomless_schema_is_refused(depth: int) -> None:
    with pytest.raises(MessageError):
        parse_schema(b"\x91" * depth + b"\x00")
    with pytest.raises(MessageError):
        parse_schema(b"\x92\x02\x91" * depth + b"\x00")


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_refused_or_are_a_schema(data: bytes) -> None:
    try:
        schema = parse_schema(data)
    except MessageError:
        return
    assert schema.blob_size >= 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda e: (e.schema, e.plain[:-1], e.blob, e.frames),
        lambda e: (e.schema, [*e.plain, 1], e.blob, e.frames),
        lambda e: (e.schema, e.plain, e.blob[:-1], e.frames),
        lambda e: (e.schema, e.plain, e.blob + b"x", e.frames),
        lambda e: (e.schema, e.plain, e.blob, []),
        lambda e: (e.schema, e.plain, e.blob, [*e.frames, b"x"]),
        lambda e: (e.schema, e.plain, e.blob, [bytes(e.frames[0])[:-1]]),
    ],
)
def test_data_of_another_size_than_announced_is_refused(spoil: Any) -> None:
    encoded = encode({"plain": 1, "small": np.zeros(3), "large": np.zeros(10_000)})
    with pytest.raises(MessageError, match="does not have the size"):
        decode(*spoil(encoded))


def test_text_that_is_not_utf8_is_refused() -> None:
    encoded = encode("x" * (SMALL + 1))
    with pytest.raises(MessageError, match="UTF-8"):
        decode(encoded.schema, encoded.plain, encoded.blob, [b"\xff" * (SMALL + 1)])


def test_the_memory_for_known_schemas_is_bounded() -> None:
    for number in range(3 * MAX_SCHEMAS):
        round_trip({f"key{number}": 1})
        assert _known_schema.cache_info().currsize <= MAX_SCHEMAS
