"""Requests that look alike are stacked and answered column by column: with the same result as one
by one."""

import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dreamfleet.transport import BatchServer, Block, Client
from dreamfleet.transport.batching import Request, run_batch, signature_of, split
from dreamfleet.transport.codec import SMALL, check_data, decode, encode, parse_schema
from dreamfleet.transport.errors import MessageError

DTYPES = (np.bool_, np.uint8, np.int64, np.float16, np.float32, ml_dtypes.bfloat16)
SHAPES = ((), (3,), (2, 5), (0,), (SMALL + 1,))


def item(rng: np.random.Generator, rows: int) -> dict[str, Any]:
    """Every dtype in every shape, with a leading axis."""
    return {
        f"{np.dtype(dtype)}/{shape}": rng.integers(0, 2, (rows, *shape)).astype(dtype)
        for dtype in DTYPES
        for shape in SHAPES
    }


def request(value: dict[str, Any], rows: int) -> Request:
    sent = encode((value,))
    schema = parse_schema(sent.schema)
    check_data(schema, sent.plain, sent.blob, sent.frames)
    signature = signature_of(schema, rows)
    return Request(b"peer", 1, rows, schema, sent.blob, sent.frames, signature, 0.0)


def run(items: list[dict[str, Any]], rows: list[int]) -> tuple[dict[str, Any], list[Any]]:
    """What the function gets, and what each caller gets if that is returned."""
    seen: list[dict[str, Any]] = []

    def work(batch: dict[str, Any]) -> tuple[dict[str, Any], None]:
        seen.append(batch)
        return batch, None

    requests = list(map(request, items, rows))
    result, _ = run_batch(work, requests)
    shares = split(result, requests)
    return seen[0], [decode(s.schema, s.plain, s.blob, s.frames) for s in shares]


@pytest.mark.parametrize("rows", [[1, 1, 1], [2, 2], [4], [1, 3]], ids=str)
def test_a_batch_holds_every_row_and_every_caller_gets_its_own(rows: list[int]) -> None:
    rng = np.random.default_rng(0)
    items = [item(rng, count) for count in rows]
    batch, shares = run(items, rows)
    for key, column in batch.items():
        expected = np.concatenate([each[key] for each in items])
        assert (column.dtype, column.shape) == (expected.dtype, expected.shape)
        assert column.tobytes() == expected.tobytes()
        for mine, share in zip(items, shares, strict=True):
            assert (share[key].dtype, share[key].shape) == (mine[key].dtype, mine[key].shape)
            assert share[key].tobytes() == mine[key].tobytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda column: column[::-1],
        lambda column: column.astype(">i4"),
        lambda column: np.repeat(column[:, None], 2 * SMALL, 1),
        lambda column: column.tolist(),
    ],
    ids=["strides", "byte order", "large", "list"],
)
def test_whatever_a_function_returns_is_cut_into_rows(change: Callable[[Any], Any]) -> None:
    requests = [request({"x": np.array([n], np.int32)}, 1) for n in range(3)]
    column = change(np.arange(3, dtype=np.int32))
    shares = split({"x": np.asarray(column), "y": np.array([5, 6, 7])}, requests)
    for row, share in enumerate(shares):
        got = decode(share.schema, share.plain, share.blob, share.frames)
        assert got["x"].tolist() == np.asarray(column)[row : row + 1].tolist()
        assert got["y"].tolist() == [5 + row]


def test_a_block_is_sent_as_it_is_filled() -> None:
    rng = np.random.default_rng(0)
    block = Block(item(rng, 2))
    for _ in range(2):
        now = item(rng, 2)
        for key, value in now.items():
            block[key][:] = value
        sent, expected = block.encoded(), encode((now,))
        assert (sent.schema, sent.plain, sent.blob) == (
            expected.schema,
            expected.plain,
            expected.blob,
        )
        assert list(map(bytes, sent.frames)) == expected.frames
    before = block.encoded()
    for value in block.values():
        value[...] = 0
    assert before.blob == expected.blob, "what is sent is a copy"


def test_requests_of_clients_that_have_gone_are_not_in_flight() -> None:
    server = BatchServer("ipc://{auto}")
    server.bind("act", lambda x: (x, None), batch=1)
    server.hold("act")
    with server, Client(server.address, timeout=60) as other:
        with Client(server.address) as client:
            client.call_block("act", np.zeros((2, 3)))  # the end waits until it was read
        left = other.call_block("act", np.ones((1, 3)))
        other._flush(float("inf"))
        assert server.stats()["inflight"] == 2
        server.forget_gone("act")
        assert (server.stats()["inflight"], server.stats()["act/waiting"]) == (1, 1)
        server.hold("act", held=False)
        assert left.result().tolist() == [[1, 1, 1]]


def test_a_huge_schema_is_not_kept() -> None:
    sent = encode((dict.fromkeys(map(str, range(10_000)), np.zeros((1, 0))),))
    schema = parse_schema(sent.schema)
    references = sys.getrefcount(schema)
    signature_of(schema, 1)
    assert sys.getrefcount(schema) == references


@pytest.mark.parametrize("size", [1, 7, SMALL, SMALL + 1], ids=str)
@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_a_bool_is_0_or_1_wherever_it_lies(size: int, many: bool) -> None:
    more = {str(n): np.zeros(SMALL, np.uint8) for n in range(2 * many)}
    odd = np.zeros(size, np.uint8)
    sent = encode({**more, "odd": odd.view(bool), "255": np.full(3, 255, np.uint8)})
    decode(sent.schema, sent.plain, sent.blob, sent.frames)
    for place in {0, size // 2, size - 1}:
        odd[:] = 0
        odd[place] = 2
        sent = encode({**more, "odd": odd.view(bool), "255": np.full(3, 255, np.uint8)})
        with pytest.raises(MessageError, match="neither 0 nor 1"):
            decode(sent.schema, sent.plain, sent.blob, sent.frames)
