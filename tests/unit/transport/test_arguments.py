"""Typed signatures: what a method takes follows from its annotations."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
import pytest
from msgspec import Meta
from numpy.typing import NDArray

from dreamfleet.transport import ArgumentError, Client, Occupied, RemoteError, Server
from dreamfleet.transport.arguments import Parameters

Count = Annotated[int, Meta(ge=0, le=100)]


class Report(TypedDict):
    name: str
    steps: Count


def method(
    ids: NDArray[np.int64],
    arrays: dict[str, NDArray[Any]],
    report: Report,
    mode: Literal["train", "eval"],
    count: Count | None = None,
) -> str:
    return f"{ids} {arrays} {report} {mode} {count}"


GOOD: dict[str, Any] = {
    "ids": np.zeros(2, np.int64),
    "arrays": {"a": np.zeros(2)},
    "report": {"name": "x", "steps": 5},
    "mode": "train",
    "count": 7,
}


def test_good_arguments_are_passed_on() -> None:
    parameters = Parameters("method", method)
    args = tuple(GOOD.values())
    assert parameters.take(args) == args
    assert parameters.take(args[:4]) == (*args[:4], None)
    assert Parameters("method", partial(method, args[0])).take(args[1:]) == args[1:]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ids", [0, 1], "this 'ids': Expected `numpy.ndarray`, got `list`"),
        ("ids", np.zeros(2), "this 'ids': Expected dtype int64, got float64"),
        ("arrays", {"a": 5}, "Expected `numpy.ndarray`, got `int`"),
        ("arrays", np.zeros(2), "'method' does not take these arguments: .*ndarray"),
        ("report", {"name": "x"}, "missing required field `steps`"),
        ("report", {"name": "x", "steps": -1}, r"this 'report.steps': Expected `int` >= 0"),
        ("mode", "other", "Invalid enum value 'other'"),
        ("count", 101, "Expected `int` <= 100"),
        ("count", True, "got `bool`"),
        ("count", 1.5, "got `float`"),
        ("count", np.int64(5), "got `numpy.int64`"),
    ],
)
def test_a_wrong_argument_gets_one_sentence(name: str, value: object, words: str) -> None:
    with pytest.raises(ArgumentError, match=words) as refused:
        Parameters("method", method).take(tuple({**GOOD, name: value}.values()))
    assert str(refused.value).startswith("'method' does not take th")
    assert "\n" not in str(refused.value)


def test_without_annotations_only_arguments_are_counted() -> None:
    assert Parameters("plain", lambda a, b=1: (a, b)).take(("x",)) == ("x",)
    with pytest.raises(ArgumentError, match="'plain' does not take 3 arguments"):
        Parameters("plain", lambda a, b=1: (a, b)).take((1, 2, 3))
    assert Parameters("any", lambda *args: args).take((1, 2, 3)) == (1, 2, 3)
    assert Parameters("builtin", max).take((1, 2)) == (1, 2)


def test_a_refused_call_does_not_reach_the_method() -> None:
    calls: list[Any] = []

    def note(count: Count) -> None:
        calls.append(count)

    server = Server("ipc://{auto}")
    server.bind("note", note)
    with server, Client(server.address) as client:
        with pytest.raises(RemoteError, match="'note' does not take this 'count'") as refused:
            client.note("one").result(60)
        assert refused.value.kind == "ArgumentError"
        assert not refused.value.traceback
        client.note(1).result(60)
    assert calls == [1]


@pytest.mark.parametrize("kind", [ArgumentError, Occupied])
def test_a_refusal_with_a_name_that_is_not_utf8_is_answered(kind: type[Exception]) -> None:
    def refuse() -> None:
        raise kind("no file \udcff")

    server = Server("ipc://{auto}")
    server.bind("refuse", refuse)
    with server, Client(server.address) as client:
        with pytest.raises(RemoteError, match=r"no file \\udcff"):
            client.refuse().result(10)
        assert server.stats()["inflight"] == 0


def test_a_check_that_fails_itself_is_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    server = Server("ipc://{auto}")
    server.bind("note", lambda: None)
    monkeypatch.setattr(Parameters, "take", fail)
    with server, Client(server.address) as client, pytest.raises(RemoteError, match="a bug"):
        client.note().result(60)
    assert "could not be handled" in caplog.text
