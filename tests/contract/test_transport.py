"""What every transport promises: local, local without shared memory, tcp, and tcp with keys."""

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dreamfleet.transport import (
    AddressError,
    BatchServer,
    Client,
    Closed,
    CodecError,
    Disconnected,
    Keys,
    RemoteError,
    Server,
    Timeout,
    TransportError,
    local,
)
from dreamfleet.transport.address import parse

Transport = tuple[str, Keys | None]
KEYS = Keys.generate()
TRANSPORTS: dict[str, Transport] = {
    "local": ("ipc://{auto}", None),
    "tcp with keys": ("127.0.0.1:{auto}", KEYS),
    "local without shared memory": ("ipc://{auto}", None),
    "tcp": ("tcp://127.0.0.1:{auto}", None),
}
EVERY = pytest.mark.parametrize("transport", TRANSPORTS, indirect=True)
"""For what depends on the kind of connection. Everything else runs on the first two."""


@pytest.fixture(params=list(TRANSPORTS)[:2])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Transport:
    monkeypatch.setattr(local, "SHARING", request.param != "local without shared memory")
    return TRANSPORTS[request.param]


def absent(transport: Transport) -> Transport:
    """An address at which no server listens yet."""
    address, keys = transport
    probe = Server(address, keys=keys)
    probe.close()
    return probe.address, keys


def in_threads(function: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=function, args=(1000 * index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Gate:
    """A method that blocks until the test opens it, and tells that it was entered."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()

    def __call__(self, *args: object) -> object:
        self.entered.release()
        assert self.open.wait(60)
        return args

    def await_calls(self, count: int) -> None:
        for _ in range(count):
            assert self.entered.acquire(timeout=60)


class Bench:
    """A server and its clients."""

    server: Server | BatchServer

    def __init__(self, keys: Keys | None) -> None:
        self.keys = keys
        self.clients: list[Client] = []

    def client(self, **options: Any) -> Client:
        client = Client(self.server.address, keys=self.keys, **options)
        self.clients.append(client)
        client.connect(20)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.close()


class Plain(Bench):
    """A server with the methods the tests call."""

    def __init__(self, address: str, keys: Keys | None) -> None:
        super().__init__(keys)
        self.gate = Gate()
        self.added: list[int] = []
        self.start(address)

    def start(self, address: str) -> None:
        self.server = server = Server(address, "Plain", keys=self.keys)
        server.bind("echo", lambda *args: args)
        server.bind("fail", self.fail)
        server.bind("add", self.add, repeatable=True)
        server.bind("gate", self.gate, workers=1)
        server.bind("safe_gate", self.gate, workers=1, repeatable=True)
        server.bind("odd", lambda: object())
        server.bind("leave", lambda: sys.exit(3))
        server.start(block=False)

    def fail(self, text: str = "no luck") -> None:
        raise ValueError(text)

    def add(self, number: int) -> int:
        self.added.append(number)
        return len(self.added)

    def restart(self) -> None:
        """The server is closed, and another one is started at the same address."""
        self.gate.open.set()
        self.server.close()
        self.gate.open.clear()
        self.start(self.server.address)

    def close(self) -> None:
        self.gate.open.set()
        super().close()


@pytest.fixture
def plain(transport: Transport) -> Iterator[Plain]:
    bench = Plain(*transport)
    yield bench
    bench.close()


# --- values and calls ----------------------------------------------------------------------------


@EVERY
def test_values_come_back_as_they_were_sent(plain: Plain) -> None:
    value = {
        "image": np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3),
        "nested": [1, 2.5, None, True, ("text", b"bytes", np.float32(3))],
        "empty": {},
    }
    client = plain.client()
    (back,) = client.echo(value).result(20)
    np.testing.assert_array_equal(back["image"], value["image"])
    assert back["nested"] == value["nested"]
    assert isinstance(back["nested"][4], tuple)
    assert back["empty"] == {}
    large = np.random.default_rng(0).random((3, 1000, 1000))
    (back,) = client.echo(large).result(20)
    np.testing.assert_array_equal(back, large)
    with pytest.raises(ValueError, match="read-only"):
        back[0] = 1


@EVERY
def test_a_buffer_may_be_reused_right_after_the_call(plain: Plain) -> None:
    client = plain.client()
    buffer = np.zeros(100_000)
    futures = []
    for number in range(10):
        buffer[:] = number
        futures.append(client.echo(buffer))
    for number, future in enumerate(futures):
        assert set(future.result(20)[0].tolist()) == {float(number)}


def test_calls_run_in_order_and_answers_are_taken_in_any(plain: Plain) -> None:
    client = plain.client()
    futures = [client.call("add", number) for number in range(100)]
    assert [future.result(20) for future in reversed(futures)] == list(range(100, 0, -1))
    assert futures[3].result() == 4
    assert plain.added == list(range(100))


@EVERY
@pytest.mark.parametrize("size", [10, 100_000], ids=["small", "large"])
def test_call_made_before_the_server_is_there_waits_for_it(transport: Transport, size: int) -> None:
    address, keys = absent(transport)
    buffer = np.zeros(size)
    with Client(address, keys=keys) as client:
        future = client.echo(buffer)
        buffer[:] = 1  # the call was made with zeros
        assert not future.done()
        server = Server(address, keys=keys)
        server.bind("echo", lambda value: value)
        with server:
            assert future.result(20).tolist() == [0] * size


@EVERY
def test_many_threads_may_share_a_client(plain: Plain) -> None:
    """With arrays that fit into a packet, and with such that need shared memory or parts."""
    client = plain.client(maxinflight=4)
    wrong = []

    def work(base: int) -> None:
        for number in range(base, base + 50):
            array = np.full(100_000 if number % 3 else 10, number % 251, np.uint8)
            answer = client.echo(number, array).result(30)
            if answer[0] != number or answer[1].tobytes() != array.tobytes():
                wrong.append((number, answer))

    in_threads(work, 8)
    assert wrong == []
    assert client.stats()["replies"] == 400


def test_one_thread_sends_while_another_waits(plain: Plain) -> None:
    client = plain.client()
    blocked = client.gate("first")
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(blocked.result(30)))
    waiter.start()
    plain.gate.await_calls(1)
    assert client.echo("second").result(20) == ("second",)
    plain.gate.open.set()
    waiter.join(20)
    assert answers == [("first",)]


def test_sixty_four_clients_at_once(plain: Plain) -> None:
    clients = [plain.client() for _ in range(64)]
    futures = [(number, client.echo(number)) for number in range(0, 1280, 64) for client in clients]
    assert all(future.result(30) == (number,) for number, future in futures)
    assert plain.server.stats()["inflight"] == 0


# --- calls that no thread waits for --------------------------------------------------------------


class Noted:
    """A server whose method notes what it was called with."""

    def __init__(self, address: str, keys: Keys | None) -> None:
        self.values: list[Any] = []
        self._changed = threading.Condition()
        self.server = Server(address, "Noted", keys=keys)
        self.server.bind("note", self.note)

    def note(self, value: object) -> None:
        with self._changed:
            self.values.append(value)
            self._changed.notify_all()

    def await_values(self, count: int) -> list[Any]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.values) >= count, 120)
            return self.values


@EVERY
def test_calls_are_sent_though_no_thread_waits_for_them(transport: Transport) -> None:
    """Also to a server that comes later."""
    address, keys = absent(transport)
    with Client(address, keys=keys) as client:
        futures = [client.note(0)]
        noted = Noted(address, keys)
        with noted.server:
            assert noted.await_values(1) == [0]
            futures += [client.note(number) for number in (1, 2)]
            assert noted.await_values(3) == [0, 1, 2]
            assert [future.result(20) for future in futures] == [None] * 3


def test_eight_clients_that_no_thread_waits_for_make_a_batch_of_eight(transport: Transport) -> None:
    batches: list[int] = []
    done = threading.Event()

    def act(who: np.ndarray) -> tuple[np.ndarray, None]:
        batches.append(len(who))
        done.set()
        return who, None

    with batching_server(transport, act, batch=8, wait=600) as (server, _):
        clients = [Client(server.address, keys=transport[1]) for _ in range(8)]
        futures = [client.call_block("act", np.array([who])) for who, client in enumerate(clients)]
        assert done.wait(120)
        assert [future.result(20) for future in futures] == list(range(8))
        for client in clients:
            client.close()
    assert batches == [8]


def test_a_repeatable_call_is_sent_again_though_no_thread_waits_for_it(plain: Plain) -> None:
    client = plain.client()
    future = client.safe_gate()
    plain.gate.await_calls(1)
    # The server ends while the method runs, so there is no answer.
    closing = threading.Thread(target=plain.server._stop, args=(0.0,))
    closing.start()
    closing.join()
    plain.start(plain.server.address)
    deadline = time.monotonic() + 120
    while client.stats()["resent"] == 0:
        assert time.monotonic() < deadline
        assert not future.done()
    plain.gate.await_calls(1)
    plain.gate.open.set()
    assert future.result(20) == ()


@EVERY
def test_a_client_that_is_closed_has_delivered_its_calls(transport: Transport) -> None:
    noted = Noted(*transport)
    with noted.server:
        for number, connect in enumerate((False, True)):
            client = Client(noted.server.address, keys=transport[1])
            if connect:
                client.connect(60)
            client.note(np.full(200_000, number))
            client.close(flush=60)
            assert noted.server.stats()["requests"] == number + 1
        assert [int(value[0]) for value in noted.await_values(2)] == [0, 1]


def test_calls_that_cannot_be_delivered_are_named_when_the_client_is_closed(
    transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    address, keys = absent(transport)
    for flush, words in ((0.01, ["2 of 'note', 1 of 'echo'"]), (0.0, [])):
        caplog.clear()
        client = Client(address, "Lonely", keys=keys)
        futures = [client.note(1), client.note(2), client.echo(3)]
        client.close(flush)
        logged = [record.getMessage() for record in caplog.records]
        assert [text.split(": ")[-1].rstrip(".") for text in logged] == words
        for future in futures:
            with pytest.raises(Closed, match="Lonely was closed before"):
                future.result()
    # One that is left by an error does not wait.
    client = Client(address, keys=keys)
    client._flush = lambda deadline: pytest.fail("it waits")

    def fail() -> None:
        with client:
            client.note(1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not caplog.records


# --- errors --------------------------------------------------------------------------------------


def test_an_error_reaches_the_caller_with_its_traceback_and_the_server_stays_up(
    plain: Plain, caplog: pytest.LogCaptureFixture
) -> None:
    client = plain.client()
    with pytest.raises(RemoteError, match="no luck") as caught:
        client.fail().result(20)
    assert caught.value.kind == "ValueError"
    assert "in fail" in caught.value.traceback
    assert "raise ValueError(text)" in str(caught.value)
    del caught
    gc.collect()
    assert client.echo(1).result(20) == (1,)
    assert "failed" not in caplog.text, "its caller has seen it"


@pytest.mark.parametrize(
    ("method", "args", "words"),
    [
        ("nothing", (), "has no method 'nothing'; its methods are add, echo, fail"),
        ("add", (), "'add' does not take 0 arguments"),
        ("add", (1, 2), "'add' does not take 2 arguments"),
        ("odd", (), "type object are not supported"),
        ("leave", (), "SystemExit: 3"),
    ],
)
def test_a_wrong_call_costs_an_error(
    plain: Plain, method: str, args: tuple[int, ...], words: str
) -> None:
    client = plain.client()
    with pytest.raises(RemoteError, match=words):
        client.call(method, *args).result(20)
    assert client.echo(1).result(20) == (1,)


def test_a_value_that_cannot_be_sent_is_refused_on_the_spot(plain: Plain) -> None:
    client = plain.client()
    with pytest.raises(CodecError, match="0/key/1: values of type object"):
        client.echo({"key": [1, object()]})
    assert client.stats()["requests"] == 0
    assert client.echo(1).result(20) == (1,)


@pytest.mark.parametrize("close", [False, True], ids=["goes on", "closed"])
def test_every_error_that_no_caller_looks_at_is_logged_once_and_fails_no_other_call(
    plain: Plain, close: bool, caplog: pytest.LogCaptureFixture
) -> None:
    client = plain.client(maxinflight=200)
    for number in range(150):
        client.fail(f"unseen {number}")
    assert client._progress(lambda: not client._pending, time.monotonic() + 20)
    if close:
        client.close()
    else:
        assert client.add(2).result(20) == 1
    assert caplog.text.count("'fail' failed") == 150
    assert "unseen 149" in caplog.text


# --- waiting -------------------------------------------------------------------------------------


def test_no_more_than_maxinflight_calls_are_under_way(plain: Plain) -> None:
    client = plain.client(maxinflight=3, timeout=0.2)
    futures = [client.gate(number) for number in range(3)]
    words = r"3 calls of Client are unanswered by .* so 'gate' was not sent"
    with pytest.raises(Timeout, match=words):
        client.gate(3)
    assert client.stats()["requests"] == 3
    plain.gate.open.set()
    assert [future.result(20) for future in futures] == [(0,), (1,), (2,)]
    assert client.gate(3).result(20) == (3,)


def test_a_caller_at_the_limit_continues_when_an_answer_comes(plain: Plain) -> None:
    client = plain.client(maxinflight=1)
    first = client.gate("first")
    plain.gate.await_calls(1)
    second = []
    caller = threading.Thread(target=lambda: second.append(client.echo("second").result(20)))
    caller.start()
    assert client.stats()["requests"] == 1
    plain.gate.open.set()
    caller.join(20)
    assert second == [("second",)]
    assert first.result(20) == ("first",)


def test_a_wait_ends_with_its_timeout_and_may_be_repeated(plain: Plain) -> None:
    client = plain.client(timeout=0.05)
    future = client.gate("late")
    assert not future.done()
    assert not future.wait(0.05)
    for seconds in (0.05, None):  # its own, or that of the client
        with pytest.raises(TimeoutError, match="did not answer 'gate'"):
            future.result(seconds)
    plain.gate.open.set()
    assert future.wait(20)
    assert future.done()
    assert future.result() == ("late",)


def test_a_timeout_passes_to_the_next_thread_what_it_was_doing(plain: Plain) -> None:
    """The thread that waits at the socket leaves, and the other one must take its place."""
    client = plain.client()
    impatient, patient = client.gate("a"), client.gate("b")
    plain.gate.await_calls(1)
    started = threading.Event()
    answers = []

    def wait_long() -> None:
        started.set()
        answers.append(patient.result(30))

    thread = threading.Thread(target=wait_long)
    leaving = threading.Thread(target=lambda: impatient.wait(0.3))
    leaving.start()
    thread.start()
    assert started.wait(20)
    leaving.join(20)
    plain.gate.open.set()
    thread.join(20)
    assert answers == [("b",)]


@EVERY
def test_a_server_that_is_not_there_is_named(transport: Transport) -> None:
    address, keys = absent(transport)
    with Client(address, "Learner", keys=keys, patience=0.2) as client:
        with pytest.raises(Disconnected, match=r"Learner found no server at .*no server listens"):
            client.connect(0.1)
        with pytest.raises(Disconnected, match=r"for 0\.2 s"):
            client.echo(1).result(20)


# --- loss and return -----------------------------------------------------------------------------


@EVERY
def test_a_server_that_comes_back_is_found_and_what_it_had_answered_counts(plain: Plain) -> None:
    client, probe = plain.client(), plain.client()
    future = client.echo("answered")
    while plain.server.stats()["requests"] < 1:
        probe.connect(1)
    plain.restart()
    assert future.result(20) == ("answered",)
    assert client.add(1).result(20) == 1
    assert client.stats()["connects"] == 2


@EVERY
@pytest.mark.parametrize("published", ["same", "early", "late", "unknown meanwhile"])
def test_calls_in_flight_fail_unless_they_may_be_repeated(
    transport: Transport, published: str
) -> None:
    """Their server comes back at the same address, or at another one that is published before the
    old server is lost, or long after it."""
    address, keys = transport
    bench = Plain(address, keys)
    old, place, asked = bench.server, [bench.server.address], threading.Semaphore(0)

    def where() -> str:
        asked.release()
        return place[0]

    client = Client(place[0] if published == "same" else where, keys=keys)
    bench.clients.append(client)
    client.connect(20)
    once, again = client.gate("once"), client.safe_gate("again")
    bench.gate.await_calls(2)
    if published != "same":
        bench.start(address)
        assert old.address != bench.server.address
    if published == "early":
        place[0] = bench.server.address
    elif published == "unknown meanwhile":
        place[0] = ""
    try:
        # The methods are still running when the address is given up: their answers are lost.
        old._stop(timeout=0)
        bench.gate.open.set()
        if published == "same":
            bench.start(old.address)
        with pytest.raises(Disconnected, match="the call may have been executed"):
            once.result(20)
        waiting = client.echo("sent while it moves")
        if published in ("late", "unknown meanwhile"):
            while asked.acquire(blocking=False):
                pass
            assert not again.wait(0.0)
            waiter = threading.Thread(target=again.wait, args=(20,))
            waiter.start()
            for _ in range(3):
                assert asked.acquire(timeout=20)
            place[0] = bench.server.address
            waiter.join(20)
        assert again.result(20) == ("again",)
        assert waiting.result(20) == ("sent while it moves",)
        assert client.address == bench.server.address
        assert client.stats()["resent"] == 1
        assert client.stats()["connects"] == 2
    finally:
        bench.close()


def _broken() -> str:
    raise OSError("no such directory")


@pytest.mark.parametrize(
    ("unknown", "words"),
    [
        (lambda: "", "its address is not published yet"),
        (_broken, "its address cannot be found: OSError"),
        (lambda: "nonsense", "its address cannot be found: AddressError"),
    ],
    ids=["empty", "an error", "no address"],
)
def test_an_address_that_is_unknown_is_waited_for(
    plain: Plain, unknown: Callable[[], str], words: str
) -> None:
    with Client(unknown, "Learner", keys=plain.keys, patience=0.2) as client:
        assert client.address == ""
        with pytest.raises(Disconnected, match=rf"Learner found no server for 0\.1 s \({words}"):
            client.connect(0.1)
        with pytest.raises(Disconnected, match=words):
            client.echo(1).result(20)
    known, asked = threading.Event(), threading.Semaphore(0)

    def where() -> str:
        asked.release()
        return plain.server.address if known.is_set() else unknown()

    with Client(where, keys=plain.keys) as client:
        futures = [client.echo(1)]
        waiter = threading.Thread(target=futures[0].wait, args=(20,))
        waiter.start()
        for _ in range(3):  # it asks again by itself
            assert asked.acquire(timeout=20)
        known.set()
        waiter.join(20)
        futures.append(client.echo(2))
        assert [future.result(20) for future in futures] == [(1,), (2,)]


def test_a_connected_client_does_not_ask_for_the_address(
    plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_FIRST_PAUSE_SECONDS", "_MAX_PAUSE_SECONDS"):
        monkeypatch.setattr(f"dreamfleet.transport.connection.{name}", 0.001)
    asked: list[str] = []

    def where() -> str:
        asked.append(plain.server.address)
        return asked[-1]

    with Client(where, keys=plain.keys) as client:
        client.connect(20)
        before = len(asked)
        for number in range(50):
            client.echo(number).result(20)
        assert not client.gate().wait(0.05)
        assert len(asked) == before


def test_a_closed_client_says_so(plain: Plain) -> None:
    client, waiting = plain.client(), plain.client()
    future, other = client.gate(), waiting.gate()
    errors = []

    def wait() -> None:
        try:
            other.result(30)
        except TransportError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.close()
    thread.join(20)
    assert isinstance(errors[0], Closed)
    client.close()
    client.close()
    with pytest.raises(Closed):
        future.result()
    with pytest.raises(Closed):
        client.echo(1)


# --- servers -------------------------------------------------------------------------------------


def test_methods_with_workers_of_their_own_do_not_block_the_others(plain: Plain) -> None:
    client = plain.client()
    blocked = [client.gate(), client.gate()]
    plain.gate.await_calls(1)
    assert client.echo(1).result(20) == (1,)
    assert client.stats()["inflight"] == 2
    plain.gate.open.set()
    assert all(future.result(20) == () for future in blocked)


def test_workers_run_side_by_side(transport: Transport) -> None:
    address, keys = transport
    together = threading.Barrier(3)
    server = Server(address, keys=keys, workers=3)
    server.bind("meet", lambda: together.wait(20) >= 0)
    with server, Client(server.address, keys=keys) as client:
        assert all(f.result(20) for f in [client.meet(), client.meet(), client.meet()])


@EVERY
def test_a_second_server_at_the_same_address_is_refused(plain: Plain) -> None:
    with pytest.raises(AddressError):
        Server(plain.server.address, keys=plain.keys)
    assert plain.client().echo(1).result(20) == (1,)


@EVERY
def test_stats_count_what_happened(plain: Plain) -> None:
    client = plain.client()
    client.echo(np.zeros(10_000)).result(20)
    with pytest.raises(RemoteError):
        client.fail().result(20)
    stats = plain.server.stats()
    assert (stats["requests"], stats["errors"], stats["inflight"]) == (2, 1, 0)
    assert stats["bytes_in"] > 80_000
    assert stats["bytes_out"] > 80_000
    assert client.stats()["bytes_in"] > 80_000


@EVERY
def test_nothing_is_left_behind(transport: Transport) -> None:
    address, keys = transport
    before = set(threading.enumerate())
    server = Server(address, keys=keys, workers=3)
    server.bind("echo", lambda value: value)
    path = parse(server.address).path
    with server:
        assert path == Path() or path.is_socket()
        with Client(server.address, keys=keys) as client:
            client.echo(1).result(20)
    assert set(threading.enumerate()) <= before
    assert path == Path() or not path.exists()
    assert path == Path() or not path.parent.exists()


@pytest.mark.parametrize("before", [0, 5], ids=["at once", "after quick calls"])
def test_a_server_may_be_closed_by_its_own_method(
    transport: Transport, before: int, caplog: pytest.LogCaptureFixture
) -> None:
    address, keys = transport
    server = Server(address, keys=keys)
    server.bind("echo", lambda value: value)
    server.bind("stop", server.close)
    path, left = parse(server.address).path, []

    def serve() -> None:
        server.start()
        left.append(path != Path() and (path.exists() or path.parent.exists()))

    starter = threading.Thread(target=serve)
    starter.start()
    with Client(server.address, keys=keys) as client:
        for number in range(before):
            client.echo(number).result(20)
        client.stop()
        client.connect(20)
        client._progress(lambda: False, 0.0)
        starter.join(20)
    assert left == [False], "it has ended, and its files are gone by then"
    with pytest.raises(Closed):
        server.start()
    # It did not wait for itself.
    assert not [r for r in caplog.records if r.name == "dreamfleet.transport.server"]


# --- batches -------------------------------------------------------------------------------------


@contextmanager
def batching_server(
    transport: Transport, work: Any, post: Any = None, **options: Any
) -> Iterator[tuple[BatchServer, Client]]:
    """A server with the method `act`, and a client."""
    address, keys = transport
    server = BatchServer(address, keys=keys)
    server.bind("act", work, post, **options)
    with server, Client(server.address, keys=keys, maxinflight=64) as client:
        yield server, client


class Batching(Bench):
    """A batching server that doubles `x`, and remembers what it was given."""

    def __init__(self, address: str, keys: Keys | None, **options: object) -> None:
        super().__init__(keys)
        self.sizes: list[int] = []
        self.posted: list[int] = []
        self.all_posted = threading.Condition()
        self.server = BatchServer(address, "Batching", keys=keys)
        self.server.bind("act", self.act, self.post, **{"batch": 4, "wait": 30.0, **options})
        self.server.start(block=False)

    def act(self, obs: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], int]:
        self.sizes.append(len(obs["x"]))
        if np.any(obs["x"] < 0):
            raise ValueError("below zero")
        return {"y": obs["x"] * 2, "who": obs["who"]}, len(self.sizes)

    def post(self, infos: list[int]) -> None:
        with self.all_posted:
            self.posted += infos
            self.all_posted.notify_all()

    def await_posts(self, count: int) -> list[int]:
        with self.all_posted:
            assert self.all_posted.wait_for(lambda: len(self.posted) >= count, 20)
        return self.posted

    def ask(self, *who: int) -> list[Any]:
        """Calls of as many clients, of an item each."""
        clients = [self.client() for _ in who]
        return [client.call_block("act", item(n)) for n, client in zip(who, clients, strict=True)]


@pytest.fixture
def batching(transport: Transport) -> Iterator[Batching]:
    bench = Batching(*transport)
    yield bench
    bench.close()


def item(who: int, size: int = 3) -> dict[str, object]:
    return {"x": np.full((1, size), who, np.float32), "who": np.array([who])}


def block(*who: int) -> dict[str, np.ndarray]:
    numbers = np.array(who)
    return {"x": np.repeat(numbers[:, None], 3, 1).astype(np.float32), "who": numbers}


def answers(futures: list[Any]) -> list[Any]:
    return [future.result(20)["who"] for future in futures]


def test_a_full_batch_is_answered_with_one_call(batching: Batching) -> None:
    for who, future in enumerate(batching.ask(*range(8))):
        answer = future.result(20)
        assert answer["who"] == who
        assert answer["y"].tolist() == [[2 * who] * 3]
    assert batching.sizes == [4, 4]
    assert batching.await_posts(2) == [1, 2]


def test_a_batch_that_does_not_fill_is_closed_when_its_oldest_has_waited(
    transport: Transport,
) -> None:
    bench = Batching(*transport, wait=0.02)
    try:
        assert answers(bench.ask(5, 6)) == [5, 6]
        assert sum(bench.sizes) == 2
        assert bench.server.stats()["act/wait"] >= 0.02
    finally:
        bench.close()


def test_a_block_of_items_is_one_message_and_one_answer(batching: Batching) -> None:
    client = batching.client()
    answer = client.call_block("act", block(1, 2, 3, 4)).result(20)
    assert answer["y"][:, 0].tolist() == [2, 4, 6, 8]
    assert answer["who"].tolist() == [1, 2, 3, 4]
    assert client.stats()["requests"] == 1


def test_blocks_and_items_share_batches_and_no_block_is_split(batching: Batching) -> None:
    one, two, three = (batching.client() for _ in range(3))
    futures = [one.call_block("act", item(1)), two.call_block("act", block(2, 3))]
    while batching.server.stats()["requests"] < 2:
        one.connect(1)
    futures.append(three.call_block("act", item(4)))
    assert [who.tolist() for who in answers(futures)] == [[1], [2, 3], [4]]
    assert batching.sizes == [4]
    # A block that does not fit any more starts the next batch.
    futures = [one.call_block("act", item(1))]
    while batching.server.stats()["requests"] < 4:  # or else the block may be there first
        one.connect(1)
    futures.append(two.call_block("act", block(2, 3, 4, 5, 6)))
    assert [who.tolist() for who in answers(futures)] == [[1], [2, 3, 4, 5, 6]]
    assert sorted(batching.sizes[1:]) == [1, 5]


@pytest.mark.parametrize(
    "odd",
    [
        item(7, size=4),
        {**item(7), "x": np.full((1, 3), 7.0)},
        {**item(7), "more": np.zeros(1)},
        {"x": np.zeros((1, 3), np.float32)},
    ],
    ids=["shape", "dtype", "more", "less"],
)
def test_a_request_that_looks_different_has_a_batch_of_its_own(
    batching: Batching, odd: dict[str, object]
) -> None:
    client = batching.client()
    different = client.call_block("act", odd)
    while batching.server.stats()["requests"] < 1:
        client.connect(1)
    assert answers(batching.ask(0, 1, 2, 3)) == [0, 1, 2, 3]
    if "who" in odd:
        assert answers([different]) == [7]
    else:
        with pytest.raises(RemoteError, match="who"):
            different.result(20)
    assert 1 in batching.sizes


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({**item(0), "who": "me"}, "who is not an array and cannot be batched"),
        ({**item(0), "who": 0}, "who is not an array and cannot be batched"),
        ({**item(0), "more": b"raw" * 3000}, "more is text or bytes"),
        ({**block(1, 2, 3, 4), "who": np.zeros(5, np.int64)}, r"not a block of 4"),
    ],
)
def test_a_request_that_has_no_place_in_any_batch_is_refused_at_once(
    batching: Batching, odd: dict[str, object], words: str
) -> None:
    client = batching.client()
    with pytest.raises(RemoteError, match=words):
        client.call_block("act", odd).result(20)
    with pytest.raises(RemoteError, match="'act' takes blocks of items: use `call_block`"):
        client.act(item(0)).result(20)
    with pytest.raises(TransportError, match="share a leading axis"):
        client.call_block("act", {"x": 3})
    assert answers(batching.ask(0, 1, 2, 3)) == [0, 1, 2, 3]


def test_an_error_in_the_work_reaches_everyone_in_the_batch(batching: Batching) -> None:
    for future in batching.ask(0, 1, -1, 3):
        with pytest.raises(RemoteError, match="below zero"):
            future.result(20)
    assert answers(batching.ask(0, 1, 2, 3)) == [0, 1, 2, 3]
    assert batching.await_posts(1) == [2]


def test_a_result_without_a_row_per_item_is_named(transport: Transport) -> None:
    for work, words in (
        (lambda x: ({"a": x[:1]}, None), r"returned a with shape \(1, 3\) for a batch of 2"),
        (lambda x: x, "returns two things"),
    ):
        with (
            batching_server(transport, work, batch=2, wait=30) as (_, client),
            pytest.raises(RemoteError, match=words),
        ):
            client.call_block("act", np.zeros((2, 3))).result(20)


def test_a_client_that_goes_away_does_not_hold_up_the_others(batching: Batching) -> None:
    gone = batching.client()
    gone.call_block("act", item(9))
    while batching.server.stats()["requests"] < 1:
        gone.connect(1)
    gone.close()
    assert answers(batching.ask(0, 1, 2)) == [0, 1, 2]


# --- what follows a batch: how calls share it is in tests/unit/transport/test_posting.py ---------


def act(client: Client, *numbers: int) -> None:
    """Have the numbers answered, each in a call of its own."""
    for number in numbers:
        assert client.call_block("act", np.array([number])).result(20) == number


def test_what_follows_comes_after_answers_in_the_order_of_the_batches(transport: Transport) -> None:
    """Two workers, and the first batch is held back until the second has been answered."""
    hold, finished = threading.Event(), threading.Semaphore(0)
    posted: list[int] = []

    def work(number: np.ndarray) -> tuple[np.ndarray, int]:
        if number[0] == 0:
            assert hold.wait(60)
        return number, int(number[0])

    def post(infos: list[int]) -> None:
        posted.extend(infos)
        finished.release(len(infos))

    with batching_server(transport, work, post, batch=1, workers=2) as (_, client):
        first = client.call_block("act", np.array([0]))
        act(client, 1)
        assert posted == []
        assert not first.done()
        hold.set()
        assert first.result(20) == 0
        assert finished.acquire(timeout=20)
        assert finished.acquire(timeout=20)
    assert posted == [0, 1]


@pytest.mark.parametrize("close", [False, True], ids=["all", "closed meanwhile"])
def test_whatever_was_answered_is_passed_on_in_order(transport: Transport, close: bool) -> None:
    """Each client waits for its answer before it sends the next number, so its numbers are made
    into batches in order; the order in which four workers end is any. Or the server is closed
    while they are busy and clients keep calling."""
    posted: list[int] = []
    answered: dict[int, list[int]] = {}
    clients: dict[int, Client] = {}

    def call(base: int) -> None:
        for number in range(base, base + (1000 if close else 50)):
            try:
                clients[base].call_block("act", np.array([number])).result(30)
            except Disconnected:
                return
            answered.setdefault(base, []).append(number)

    with batching_server(
        transport,
        lambda x: (x, x.tolist()),
        lambda infos: posted.extend(number for info in infos for number in info),
        batch=2,
        wait=0.001,
        workers=4,
        gather=1000.0 if close else 0.001,
        post_rows=16 if close else 4,
    ) as (server, probe):
        clients = {
            1000 * n: Client(server.address, keys=transport[1], patience=0.1) for n in range(6)
        }
        for client in clients.values():
            client.connect(20)
        calling = threading.Thread(target=in_threads, args=(call, 6))
        calling.start()
        while close and server.stats()["replies"] < 100:
            probe.connect(20)
        if close:
            server.close()
        calling.join()
        for client in clients.values():
            client.close()
    for base, numbers in answered.items():
        found = [number for number in posted if base <= number < base + 1000]
        assert found == sorted(found)
        assert set(numbers) <= set(found)
    assert close or (len(posted) == 300 and len(answered) == 6)


def test_no_work_is_started_whose_result_could_not_be_passed_on(transport: Transport) -> None:
    """The answer does not wait for what follows, until the backlog is full. Work that failed holds
    no place in it."""
    hold, entered = threading.Event(), threading.Semaphore(0)
    worked: list[int] = []

    def work(numbers: np.ndarray) -> tuple[np.ndarray, int]:
        if numbers[0] < 0:
            raise ValueError("below zero")
        worked.append(int(numbers[0]))
        return numbers, worked[-1]

    def post(infos: list[int]) -> None:
        entered.release()
        assert hold.wait(60)

    options = {"batch": 1, "gather": 0.0, "post_rows": 1}
    with batching_server(transport, work, post, **options) as (server, client):
        for _ in range(3):
            with pytest.raises(RemoteError, match="below zero"):
                client.call_block("act", np.array([-1])).result(20)
        act(client, 1)
        assert entered.acquire(timeout=20)
        act(client, 2)
        assert server.stats()["act/posting"] == 2
        third, fourth = (client.call_block("act", np.array([number])) for number in (3, 4))
        while server.stats()["act/waiting"] < 2:
            assert not third.wait(0.01)
        assert worked == [1, 2]
        hold.set()
        assert third.result(20) == 3
        assert fourth.result(20) == 4
    assert worked == [1, 2, 3, 4]
    assert server.stats()["act/posting"] == 0


def test_closing_gives_up_when_what_follows_makes_no_progress(transport: Transport) -> None:
    hold, entered = threading.Event(), threading.Event()

    def post(infos: list[None]) -> None:
        entered.set()
        assert hold.wait(60)

    options = {"batch": 1, "gather": 0.0, "post_rows": 1}
    with batching_server(transport, lambda x: (x, None), post, **options) as (server, client):
        act(client, 0, 1)
        assert entered.wait(20)
        with pytest.raises(Timeout, match=r"act-post has passed nothing on for 0\.05 s; 2 rows"):
            server.close(flush=0.05)
        with pytest.raises(Closed):
            server.start()
        hold.set()


def test_an_error_in_what_follows_is_logged_counted_and_reported(
    transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[BaseException] = []
    good: list[int] = []

    def post(infos: list[int]) -> None:
        if infos == [1]:
            raise ValueError("afterwards")
        if infos == [2]:
            raise SystemExit
        good.extend(infos)

    def report(error: BaseException) -> None:
        errors.append(error)
        raise ValueError("also the report")

    options = {"batch": 1, "post_rows": 1, "on_post_error": report}
    with batching_server(transport, lambda x: (x, int(x[0])), post, **options) as (server, client):
        act(client, *range(1, 10))
    assert server.stats()["act/post_errors"] == 2
    assert [str(error) for error in errors] == ["afterwards", ""]
    assert good == list(range(3, 10))
    assert "ValueError: afterwards" in caplog.text


def test_what_follows_may_close_its_own_server(transport: Transport) -> None:
    address, keys = transport
    server = BatchServer(address, keys=keys)
    server.bind("act", lambda x: (x, None), lambda _: server.close(), batch=1, gather=0)
    starter = threading.Thread(target=server.start)
    starter.start()
    with Client(server.address, keys=keys) as client:
        act(client, 1)
        starter.join(20)
    assert not starter.is_alive()


def test_a_batched_method_may_be_repeatable(transport: Transport) -> None:
    address, keys = transport
    gate = Gate()

    def serve(address: str) -> BatchServer:
        server = BatchServer(address, keys=keys)
        server.bind("once", lambda x: (gate(x)[0], None), batch=1)
        server.bind("again", lambda x: (gate(x)[0], None), batch=1, repeatable=True)
        server.start(block=False)
        return server

    server = serve(address)
    with Client(server.address, keys=keys) as client:
        client.connect(20)
        once, again = (client.call_block(name, np.array([2])) for name in ("once", "again"))
        gate.await_calls(2)
        server._stop(timeout=0)
        gate.open.set()
        successor = serve(server.address)
        with pytest.raises(Disconnected):
            once.result(20)
        assert again.result(20) == 2
        successor.close()
    server.close()


def test_settings_that_cannot_work_are_refused(transport: Transport) -> None:
    address, keys = transport
    server = BatchServer(address, keys=keys)

    def work(x: Any) -> Any:
        return x, None

    for name, arguments, options, words in (
        ("act", (), {"batch": 0}, "at least 1"),
        ("act", (print,), {"post_rows": 0}, "post_rows of at least 1, got"),
        ("act", (print,), {"gather": -1}, "a gather of at least 0"),
        ("bound", (), {}, ""),
        ("bound", (), {}, "bound already"),
    ):
        if not words:
            server.bind(name, work, *arguments, **options)
            continue
        with pytest.raises(TransportError, match=words):
            server.bind(name, work, *arguments, **options)
    with server, pytest.raises(TransportError, match="before the server is started"):
        server.bind("late", work)
    with pytest.raises(TransportError, match="at least one worker"):
        Server(address, keys=keys, workers=0)
    with pytest.raises(TransportError, match="maxinflight is from 1 to"):
        Client(server.address, maxinflight=0)
