"""What every transport promises: local, local without shared memory, tcp, and tcp with keys."""

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Self

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

KEYS = Keys.generate()
TRANSPORTS = {
    "local": ("ipc://{auto}", None),
    "local without shared memory": ("ipc://{auto}", None),
    "tcp": ("tcp://127.0.0.1:{auto}", None),
    "tcp with keys": ("127.0.0.1:{auto}", KEYS),
}


@pytest.fixture(params=TRANSPORTS)
def transport(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Keys | None]:
    monkeypatch.setattr(local, "SHARING", request.param != "local without shared memory")
    return TRANSPORTS[request.param]


class Gate:
    """A method that blocks until the test opens it, and tells that it was entered."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()

    def __call__(self, *args: object) -> object:
        self.entered.release()
        assert self.open.wait(60)
        return args


class Plain:
    """A server with the methods the tests call, and its clients."""

    def __init__(self, address: str, keys: Keys | None) -> None:
        self.keys = keys
        self.clients: list[Client] = []
        self.gate = Gate()
        self.added: list[int] = []
        self.server = self.make(address)
        self.server.start(block=False)

    def make(self, address: str) -> Server:
        server = Server(address, "Plain", keys=self.keys)
        server.bind("echo", lambda *args: args)
        server.bind("fail", self.fail)
        server.bind("add", self.add, repeatable=True)
        server.bind("gate", self.gate, workers=1)
        server.bind("safe_gate", self.gate, workers=1, repeatable=True)
        server.bind("odd", lambda: object())
        server.bind("leave", lambda: sys.exit(3))
        return server

    def fail(self, text: str = "no luck") -> None:
        raise ValueError(text)

    def add(self, number: int) -> int:
        self.added.append(number)
        return len(self.added)

    def client(self, **options: object) -> Client:
        client = Client(self.server.address, keys=self.keys, **options)
        self.clients.append(client)
        client.connect(20)
        return client

    def restart(self) -> None:
        """The server is closed, and another one is started at the same address."""
        address = self.server.address
        self.gate.open.set()
        self.server.close()
        self.gate.open.clear()
        self.server = self.make(address)
        self.server.start(block=False)

    def close(self) -> None:
        self.gate.open.set()
        for client in self.clients:
            client.close()
        self.server.close()


@pytest.fixture
def plain(transport: tuple[str, Keys | None]) -> Iterator[Plain]:
    bench = Plain(*transport)
    yield bench
    bench.close()


# --- values and calls ----------------------------------------------------------------------------


def test_values_come_back_as_they_were_sent(plain: Plain) -> None:
    value = {
        "image": np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3),
        "nested": [1, 2.5, None, True, ("text", b"bytes", np.float32(3))],
        "empty": {},
    }
    (back,) = plain.client().echo(value).result(20)
    np.testing.assert_array_equal(back["image"], value["image"])
    assert back["nested"] == value["nested"]
    assert isinstance(back["nested"][4], tuple)
    assert back["empty"] == {}


def test_large_arrays_arrive_whole_and_read_only(plain: Plain) -> None:
    array = np.random.default_rng(0).random((3, 1000, 1000))
    (back,) = plain.client().echo(array).result(20)
    np.testing.assert_array_equal(back, array)
    with pytest.raises(ValueError, match="read-only"):
        back[0] = 1


def test_a_buffer_may_be_reused_right_after_the_call(plain: Plain) -> None:
    client = plain.client()
    buffer = np.zeros(100_000)
    futures = []
    for number in range(10):
        buffer[:] = number
        futures.append(client.echo(buffer))
    for number, future in enumerate(futures):
        assert set(future.result(20)[0].tolist()) == {float(number)}


def test_calls_of_a_client_run_in_order(plain: Plain) -> None:
    client = plain.client()
    futures = [client.call("add", number) for number in range(100)]
    assert [future.result(20) for future in futures] == list(range(1, 101))
    assert plain.added == list(range(100))


def test_answers_may_be_taken_in_any_order(plain: Plain) -> None:
    client = plain.client()
    futures = [client.echo(number) for number in range(10)]
    assert [f.result(20)[0] for f in reversed(futures)] == list(reversed(range(10)))
    assert futures[3].result() == (3,)


@pytest.mark.parametrize("size", [10, 100_000], ids=["small", "large"])
def test_a_call_made_before_the_server_is_there_waits_for_it(
    transport: tuple[str, Keys | None], size: int
) -> None:
    address, keys = transport
    probe = Server(address, keys=keys)
    probe.close()
    buffer = np.zeros(size)
    with Client(probe.address, keys=keys) as client:
        future = client.echo(buffer)
        buffer[:] = 1  # the call was made with zeros
        assert not future.done()
        server = Server(probe.address, keys=keys)
        server.bind("echo", lambda value: value)
        with server:
            assert future.result(20).tolist() == [0] * size


# --- calls that no thread waits for --------------------------------------------------------------


class Noted:
    """A server whose method notes what it was called with."""

    def __init__(self, address: str, keys: Keys | None) -> None:
        self.values: list[object] = []
        self._changed = threading.Condition()
        self.server = Server(address, "Noted", keys=keys)
        self.server.bind("note", self.note)

    def note(self, value: object) -> None:
        with self._changed:
            self.values.append(value)
            self._changed.notify_all()

    def await_values(self, count: int) -> list[object]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.values) >= count, 120)
            return self.values


def test_a_call_is_sent_though_no_thread_waits_for_its_answer(
    transport: tuple[str, Keys | None],
) -> None:
    address, keys = transport
    noted = Noted(address, keys)
    with noted.server, Client(noted.server.address, keys=keys) as client:
        futures = [client.note(number) for number in range(3)]
        assert noted.await_values(3) == [0, 1, 2]
        assert [future.result(20) for future in futures] == [None] * 3


def test_a_call_waits_for_its_server_though_no_thread_waits_for_it(
    transport: tuple[str, Keys | None],
) -> None:
    address, keys = transport
    probe = Server(address, keys=keys)
    probe.close()
    with Client(probe.address, keys=keys) as client:
        future = client.note(1)
        noted = Noted(probe.address, keys)
        with noted.server:
            assert noted.await_values(1) == [1]
            assert future.result(20) is None


def test_eight_clients_that_no_thread_waits_for_make_a_batch_of_eight(
    transport: tuple[str, Keys | None],
) -> None:
    address, keys = transport
    batches: list[int] = []
    done = threading.Event()

    def act(who: np.ndarray) -> tuple[np.ndarray, None]:
        batches.append(len(who))
        done.set()
        return who, None

    server = BatchServer(address, keys=keys)
    server.bind("act", act, batch=8, wait=600)
    with server:
        clients = [Client(server.address, keys=keys) for _ in range(8)]
        futures = [client.call_block("act", np.array([who])) for who, client in enumerate(clients)]
        assert done.wait(120)
        assert [future.result(20) for future in futures] == list(range(8))
        for client in clients:
            client.close()
    assert batches == [8]


def test_a_repeatable_call_is_sent_again_though_no_thread_waits_for_it(plain: Plain) -> None:
    client = plain.client()
    future = client.safe_gate()
    assert plain.gate.entered.acquire(timeout=20)
    # The server ends while the method runs, so there is no answer.
    closing = threading.Thread(target=plain.server._loop.close, args=(0.0,))
    closing.start()
    closing.join()
    plain.server = plain.make(plain.server.address)
    plain.server.start(block=False)
    deadline = time.monotonic() + 120
    while client.stats()["resent"] == 0:
        assert time.monotonic() < deadline
        assert not future.done()
    assert plain.gate.entered.acquire(timeout=120)
    plain.gate.open.set()
    assert future.result(20) == ()


def test_a_client_that_is_closed_has_delivered_its_calls(
    transport: tuple[str, Keys | None],
) -> None:
    address, keys = transport
    noted = Noted(address, keys)
    with noted.server:
        for number, connect in enumerate((False, True)):
            client = Client(noted.server.address, keys=keys)
            if connect:
                client.connect(60)
            client.note(np.full(200_000, number))
            client.close(flush=60)
            assert noted.server.stats()["requests"] == number + 1
        assert [int(value[0]) for value in noted.await_values(2)] == [0, 1]


def test_calls_that_cannot_be_delivered_are_named_when_the_client_is_closed(
    transport: tuple[str, Keys | None], caplog: pytest.LogCaptureFixture
) -> None:
    address, keys = transport
    probe = Server(address, keys=keys)
    probe.close()
    for flush, words in ((0.01, ["2 of 'note', 1 of 'echo'"]), (0.0, [])):
        caplog.clear()
        client = Client(probe.address, "Lonely", keys=keys)
        futures = [client.note(1), client.note(2), client.echo(3)]
        client.close(flush)
        assert [
            record.getMessage().split(": ")[-1].rstrip(".") for record in caplog.records
        ] == words
        for future in futures:
            with pytest.raises(Closed, match="Lonely was closed before"):
                future.result()


def test_a_client_that_is_left_by_an_error_does_not_wait(
    transport: tuple[str, Keys | None], caplog: pytest.LogCaptureFixture
) -> None:
    address, keys = transport
    probe = Server(address, keys=keys)
    probe.close()
    client = Client(probe.address, keys=keys)
    client._flush = lambda deadline: pytest.fail("it waits")

    def fail() -> None:
        with client:
            client.note(1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not caplog.records


def test_many_threads_may_share_a_client(plain: Plain) -> None:
    client = plain.client(maxinflight=4)
    wrong = []

    def work(base: int) -> None:
        for number in range(base, base + 50):
            answer = client.echo(number, np.full(1000, number)).result(30)
            if answer[0] != number or answer[1][0] != number:
                wrong.append((number, answer))

    threads = [threading.Thread(target=work, args=(1000 * index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert client.stats()["replies"] == 400


def test_one_thread_sends_while_another_waits(plain: Plain) -> None:
    client = plain.client()
    blocked = client.gate("first")
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(blocked.result(30)))
    waiter.start()
    assert plain.gate.entered.acquire(timeout=20)
    assert client.echo("second").result(20) == ("second",)
    plain.gate.open.set()
    waiter.join(20)
    assert answers == [("first",)]


def test_sixty_four_clients_at_once(plain: Plain) -> None:
    clients = [plain.client() for _ in range(64)]
    futures = [(number, client.echo(number)) for number in range(0, 1280, 64) for client in clients]
    assert all(future.result(30) == (number,) for number, future in futures)
    assert plain.server.stats()["inflight"] == 0


def await_answers(client: Client) -> None:
    """Let the client learn all its answers without looking at any."""
    assert client._progress(lambda: not client._pending, time.monotonic() + 20)


# --- errors --------------------------------------------------------------------------------------


def test_an_error_reaches_the_caller_with_its_traceback_and_the_server_stays_up(
    plain: Plain,
) -> None:
    client = plain.client()
    with pytest.raises(RemoteError, match="no luck") as caught:
        client.fail().result(20)
    assert caught.value.kind == "ValueError"
    assert "in fail" in caught.value.traceback
    assert "raise ValueError(text)" in str(caught.value)
    assert client.echo(1).result(20) == (1,)


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


def test_an_error_that_no_caller_looks_at_is_logged_and_fails_no_other_call(
    plain: Plain, caplog: pytest.LogCaptureFixture
) -> None:
    client = plain.client()
    client.fail("unseen")
    await_answers(client)
    assert client.add(2).result(20) == 1
    assert "'fail' failed" in caplog.text
    assert "unseen" in caplog.text


def test_an_error_that_no_caller_looks_at_before_the_end_is_logged(
    plain: Plain, caplog: pytest.LogCaptureFixture
) -> None:
    client = plain.client()
    client.fail("unseen")
    await_answers(client)
    client.close()
    assert "unseen" in caplog.text


def test_an_error_that_a_caller_has_seen_is_not_logged(
    plain: Plain, caplog: pytest.LogCaptureFixture
) -> None:
    client = plain.client()
    future = client.fail()
    with pytest.raises(RemoteError):
        future.result(20)
    del future
    gc.collect()
    assert client.echo(1).result(20) == (1,)
    assert "failed" not in caplog.text


# --- waiting -------------------------------------------------------------------------------------


def test_no_more_than_maxinflight_calls_are_under_way(plain: Plain) -> None:
    client = plain.client(maxinflight=3, timeout=0.2)
    futures = [client.gate(number) for number in range(3)]
    with pytest.raises(
        Timeout, match=r"3 calls of Client are unanswered by .* so 'gate' was not sent"
    ):
        client.gate(3)
    assert client.stats()["requests"] == 3
    plain.gate.open.set()
    assert [future.result(20) for future in futures] == [(0,), (1,), (2,)]
    assert client.gate(3).result(20) == (3,)


def test_a_caller_at_the_limit_continues_when_an_answer_comes(plain: Plain) -> None:
    client = plain.client(maxinflight=1)
    first = client.gate("first")
    assert plain.gate.entered.acquire(timeout=20)
    second = []
    caller = threading.Thread(target=lambda: second.append(client.echo("second").result(20)))
    caller.start()
    assert client.stats()["requests"] == 1
    plain.gate.open.set()
    caller.join(20)
    assert second == [("second",)]
    assert first.result(20) == ("first",)


def test_a_wait_ends_with_its_timeout_and_may_be_repeated(plain: Plain) -> None:
    client = plain.client()
    future = client.gate("late")
    assert not future.done()
    assert not future.wait(0.05)
    with pytest.raises(Timeout, match="did not answer 'gate'"):
        future.result(0.05)
    plain.gate.open.set()
    assert future.wait(20)
    assert future.done()
    assert future.result() == ("late",)


def test_the_clients_timeout_bounds_every_wait(plain: Plain) -> None:
    client = plain.client(timeout=0.05)
    with pytest.raises(Timeout):
        client.gate().result()
    assert isinstance(Timeout("x"), TimeoutError)


def test_a_timeout_passes_to_the_next_thread_what_it_was_doing(plain: Plain) -> None:
    """The thread that waits at the socket leaves, and the other one must take its place."""
    client = plain.client()
    impatient, patient = client.gate("a"), client.gate("b")
    assert plain.gate.entered.acquire(timeout=20)
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


def test_a_server_that_is_not_there_is_named(transport: tuple[str, Keys | None]) -> None:
    address, keys = transport
    gone = Server(address, keys=keys)
    gone.close()
    with Client(gone.address, "Learner", keys=keys, patience=0.2) as client:
        with pytest.raises(Disconnected, match=r"Learner found no server at .*no server listens"):
            client.connect(0.1)
        with pytest.raises(Disconnected, match=r"for 0\.2 s"):
            client.echo(1).result(20)


# --- loss and return -----------------------------------------------------------------------------


def test_a_server_that_comes_back_is_found_again(plain: Plain) -> None:
    client = plain.client()
    assert client.add(1).result(20) == 1
    plain.restart()
    assert client.add(2).result(20) == 2
    assert client.stats()["connects"] == 2


def test_calls_in_flight_fail_unless_they_may_be_repeated(plain: Plain) -> None:
    client = plain.client()
    once, again = client.gate("once"), client.safe_gate("again")
    assert plain.gate.entered.acquire(timeout=20)
    assert plain.gate.entered.acquire(timeout=20)
    address = plain.server.address
    # The methods are still running when the address is given up: their answers are lost.
    plain.server._loop.close(timeout=0)
    plain.gate.open.set()
    plain.server = plain.make(address)
    plain.server.start(block=False)
    with pytest.raises(Disconnected, match="the call may have been executed"):
        once.result(20)
    assert again.result(20) == ("again",)
    assert client.stats()["resent"] == 1
    assert client.echo(1).result(20) == (1,)


def test_an_answer_sent_before_the_server_went_still_counts(plain: Plain) -> None:
    client = plain.client()
    future = client.echo("answered")
    probe = plain.client()
    while plain.server.stats()["requests"] < 1:
        probe.connect(1)
    plain.restart()
    assert future.result(20) == ("answered",)


@pytest.mark.parametrize("published", ["early", "late", "unknown meanwhile"])
def test_a_server_that_moves_is_found_at_its_new_address(
    transport: tuple[str, Keys | None], published: str
) -> None:
    """The address is published before the old server is lost, or long after it."""
    address, keys = transport
    bench = Plain(address, keys)
    place = [bench.server.address]
    asked = threading.Semaphore(0)

    def where() -> str:
        asked.release()
        return place[0]

    client = Client(where, keys=keys)
    bench.clients.append(client)
    client.connect(20)
    once, again = client.gate("once"), client.safe_gate("again")
    assert bench.gate.entered.acquire(timeout=20)
    assert bench.gate.entered.acquire(timeout=20)
    old, bench.server = bench.server, bench.make(address)
    assert old.address != bench.server.address
    try:
        bench.server.start(block=False)
        if published == "early":
            place[0] = bench.server.address
        elif published == "unknown meanwhile":
            place[0] = ""
        # The methods are still running when the address is given up: their answers are lost.
        old._loop.close(timeout=0)
        bench.gate.open.set()
        with pytest.raises(Disconnected, match="the call may have been executed"):
            once.result(20)
        waiting = client.echo("sent while it moves")
        if published != "early":
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
    known = threading.Event()
    asked = threading.Semaphore(0)

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
    monkeypatch.setattr("dreamfleet.transport.connection._FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr("dreamfleet.transport.connection._MAX_PAUSE_SECONDS", 0.001)
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


def test_an_unknown_address_is_not_asked_for_all_the_time() -> None:
    """A pause is a tenth of the time since the server was lost, and half a second at most; a busy
    machine only makes it longer."""
    asked: list[float] = []

    def where() -> str:
        asked.append(time.monotonic())
        return ""

    with Client(where) as client:
        begin = time.monotonic()
        future = client.echo(1)
        while asked[-1:] < [begin + 7]:
            assert not future.wait(0.1)
    # The client is a little older than the call, so its pauses are a little longer.
    for before, after in pairwise(asked):
        assert after - before >= min(max(0.02, (before - begin) / 10), 0.5)
    assert len(asked) < 70


def test_a_closed_client_says_so(plain: Plain) -> None:
    client = plain.client()
    future = client.gate()
    waiting = plain.client()
    other = waiting.gate()
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
    assert plain.gate.entered.acquire(timeout=20)
    assert client.echo(1).result(20) == (1,)
    assert client.stats()["inflight"] == 2
    plain.gate.open.set()
    assert all(future.result(20) == () for future in blocked)


def test_workers_run_side_by_side(transport: tuple[str, Keys | None]) -> None:
    address, keys = transport
    together = threading.Barrier(3)
    server = Server(address, keys=keys, workers=3)
    server.bind("meet", lambda: together.wait(20) >= 0)
    with server, Client(server.address, keys=keys) as client:
        assert all(f.result(20) for f in [client.meet(), client.meet(), client.meet()])


def test_a_second_server_at_the_same_address_is_refused(plain: Plain) -> None:
    with pytest.raises(AddressError):
        Server(plain.server.address, keys=plain.keys)
    assert plain.client().echo(1).result(20) == (1,)


def test_stats_count_what_happened(plain: Plain) -> None:
    client = plain.client()
    client.echo(np.zeros(10_000)).result(20)
    with pytest.raises(RemoteError):
        client.fail().result(20)
    stats = plain.server.stats()
    assert stats["requests"] == 2
    assert stats["errors"] == 1
    assert stats["inflight"] == 0
    assert stats["bytes_in"] > 80_000
    assert stats["bytes_out"] > 80_000
    assert client.stats()["bytes_in"] > 80_000


def test_nothing_is_left_behind(transport: tuple[str, Keys | None]) -> None:
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
    transport: tuple[str, Keys | None], before: int, caplog: pytest.LogCaptureFixture
) -> None:
    address, keys = transport
    server = Server(address, keys=keys)
    server.bind("echo", lambda value: value)
    server.bind("stop", server.close)
    starter = threading.Thread(target=server.start)
    starter.start()
    with Client(server.address, keys=keys) as client:
        for number in range(before):
            client.echo(number).result(20)
        client.stop()
        client.connect(20)
        client._progress(lambda: False, 0.0)
        starter.join(20)
    assert not starter.is_alive()
    # It did not wait for itself.
    assert not [r for r in caplog.records if r.name == "dreamfleet.transport.server"]


# --- batches -------------------------------------------------------------------------------------


class Batching:
    """A batching server that doubles `x`, and remembers what it was given."""

    def __init__(self, address: str, keys: Keys | None, **options: object) -> None:
        self.keys = keys
        self.clients: list[Client] = []
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

    def client(self) -> Client:
        client = Client(self.server.address, keys=self.keys)
        self.clients.append(client)
        client.connect(20)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.close()


@pytest.fixture
def batching(transport: tuple[str, Keys | None]) -> Iterator[Batching]:
    bench = Batching(*transport)
    yield bench
    bench.close()


def item(who: int, size: int = 3) -> dict[str, object]:
    return {"x": np.full((1, size), who, np.float32), "who": np.array([who])}


def block(*who: int) -> dict[str, np.ndarray]:
    numbers = np.array(who)
    return {"x": np.repeat(numbers[:, None], 3, 1).astype(np.float32), "who": numbers}


def test_a_full_batch_is_answered_with_one_call(batching: Batching) -> None:
    clients = [batching.client() for _ in range(8)]
    futures = [client.call_block("act", item(who)) for who, client in enumerate(clients)]
    for who, future in enumerate(futures):
        answer = future.result(20)
        assert answer["who"] == who
        assert answer["y"].tolist() == [[2 * who] * 3]
    assert batching.sizes == [4, 4]
    assert batching.await_posts(2) == [1, 2]


def test_a_batch_that_does_not_fill_is_closed_when_its_oldest_has_waited(
    transport: tuple[str, Keys | None],
) -> None:
    bench = Batching(*transport, wait=0.02)
    try:
        futures = [bench.client().call_block("act", item(who)) for who in (5, 6)]
        assert [f.result(20)["who"] for f in futures] == [5, 6]
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
    answers = [future.result(20)["who"] for future in futures]
    assert [a.tolist() for a in answers] == [[1], [2, 3], [4]]
    assert batching.sizes == [4]
    # A block that does not fit any more starts the next batch.
    futures = [one.call_block("act", item(1))]
    while batching.server.stats()["requests"] < 4:  # or else the block may be there first
        one.connect(1)
    futures.append(two.call_block("act", block(2, 3, 4, 5, 6)))
    assert futures[1].result(20)["who"].tolist() == [2, 3, 4, 5, 6]
    assert futures[0].result(20)["who"] == 1
    assert sorted(batching.sizes[1:]) == [1, 5]


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (item(0, size=4), r"x has dtype float32 and shape \(4,"),
        ({**item(0), "x": np.zeros((1, 3))}, "x has dtype float64"),
        ({"x": np.zeros((1, 3), np.float32)}, "who is missing"),
        ({**item(0), "more": np.zeros(1)}, "more is in this request but not"),
    ],
)
def test_an_odd_request_gets_an_error_and_the_others_an_answer(
    batching: Batching, odd: dict[str, object], words: str
) -> None:
    wrong = batching.client().call_block("act", odd)
    futures = [batching.client().call_block("act", item(who)) for who in range(3)]
    with pytest.raises(RemoteError, match=words):
        wrong.result(20)
    assert [f.result(20)["who"] for f in futures] == [0, 1, 2]
    assert batching.sizes == [3]


def test_an_odd_request_may_be_the_first_without_making_the_others_odd(batching: Batching) -> None:
    """Once there has been a good batch, its structure is the right one."""
    clients = [batching.client() for _ in range(4)]
    for future in [client.call_block("act", item(who)) for who, client in enumerate(clients)]:
        future.result(20)
    odd = [client.call_block("act", item(0, size=7)) for client in clients[:3]]
    good = clients[3].call_block("act", item(1))
    assert good.result(20)["who"] == 1
    for future in odd:
        with pytest.raises(RemoteError, match=r"x has dtype float32 and shape \(7,"):
            future.result(20)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({**item(0), "who": "me"}, "who is not an array and cannot be batched"),
        ({**item(0), "who": 0}, "who is not an array and cannot be batched"),
        ({**item(0), "more": b"raw" * 3000}, "more is text or bytes"),
    ],
)
def test_a_request_that_has_no_place_in_any_batch_is_refused_at_once(
    batching: Batching, odd: dict[str, object], words: str
) -> None:
    with pytest.raises(RemoteError, match=words):
        batching.client().call_block("act", odd).result(20)
    futures = [batching.client().call_block("act", item(who)) for who in range(4)]
    assert [f.result(20)["who"] for f in futures] == [0, 1, 2, 3]


def test_a_single_item_is_refused(batching: Batching) -> None:
    with pytest.raises(RemoteError, match="'act' takes blocks of items: use `call_block`"):
        batching.client().act(item(0)).result(20)


def test_a_block_with_unequal_leading_axes_is_refused(batching: Batching) -> None:
    client = batching.client()
    wrong = {"x": np.zeros((4, 3), np.float32), "who": np.zeros(5, np.int64)}
    with pytest.raises(RemoteError, match=r"who has shape \(5,\), which is not a block of 4"):
        client.call_block("act", wrong).result(20)
    with pytest.raises(TransportError, match="share a leading axis"):
        client.call_block("act", {"x": 3})
    answer = client.call_block("act", block(1, 2, 3, 4)).result(20)
    assert answer["who"].tolist() == [1, 2, 3, 4]


def test_an_error_in_the_work_reaches_everyone_in_the_batch(batching: Batching) -> None:
    clients = [batching.client() for _ in range(4)]
    futures = [
        client.call_block("act", item(-1 if who == 2 else who))
        for who, client in enumerate(clients)
    ]
    for future in futures:
        with pytest.raises(RemoteError, match="below zero"):
            future.result(20)
    futures = [client.call_block("act", item(who)) for who, client in enumerate(clients)]
    assert [f.result(20)["who"] for f in futures] == [0, 1, 2, 3]
    assert batching.await_posts(1) == [2]


def test_a_result_without_a_row_per_item_is_named(transport: tuple[str, Keys | None]) -> None:
    address, keys = transport
    server = BatchServer(address, keys=keys)
    server.bind("short", lambda x: ({"a": x[:1]}, None), batch=2, wait=30)
    server.bind("single", lambda x: x, batch=2, wait=30)
    with server, Client(server.address, keys=keys) as client:
        with pytest.raises(RemoteError, match=r"returned a with shape \(1, 3\) for a batch of 2"):
            client.call_block("short", np.zeros((2, 3))).result(20)
        with pytest.raises(RemoteError, match="returns two things"):
            client.call_block("single", np.zeros((2, 3))).result(20)


# --- what follows a batch ------------------------------------------------------------------------


class Posting:
    """A batching server with one item a batch, whose `postfn` a test may hold up.

    It answers with what it got, and the info is the same number. Work on a number below 0 fails.
    """

    def __init__(self, transport: tuple[str, Keys | None], **options: object) -> None:
        address, self.keys = transport
        self.lists: list[list[int]] = []  # what `postfn` was given
        self.entered = threading.Semaphore(0)  # calls of `postfn` that began
        self.ended = threading.Semaphore(0)
        self.hold = threading.Event()  # calls of `postfn` wait for it
        self.worked: list[int] = []
        self.errors: list[BaseException] = []
        self.server = BatchServer(address, "Posting", keys=self.keys)
        self.server.bind(
            "act",
            self.work,
            self.post,
            **{"batch": 1, "gather": 0.0, "on_post_error": self.errors.append, **options},
        )
        self.server.start(block=False)
        self.client = Client(self.server.address, keys=self.keys, maxinflight=64)
        self.client.connect(20)

    def work(self, numbers: np.ndarray) -> tuple[np.ndarray, list[int]]:
        self.worked += numbers.tolist()
        if numbers[0] < 0:
            raise ValueError("below zero")
        return numbers, numbers.tolist()

    def post(self, infos: list[list[int]]) -> None:
        self.lists.append([number for info in infos for number in info])
        self.entered.release()
        assert self.hold.wait(60)
        self.ended.release()

    def act(self, *numbers: int) -> None:
        """Have the numbers answered, each in a batch of its own."""
        for number in numbers:
            assert self.client.call_block("act", np.array([number])).result(20) == number

    def await_calls(self, count: int) -> None:
        for _ in range(count):
            assert self.entered.acquire(timeout=20)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.hold.set()
        self.client.close()
        self.server.close()


def test_what_follows_comes_after_the_answers_in_the_order_of_the_batches(
    transport: tuple[str, Keys | None],
) -> None:
    """Two workers, and the first batch is held back until the second has been answered."""
    address, keys = transport
    hold = threading.Event()
    finished = threading.Semaphore(0)
    posted: list[int] = []

    def work(number: np.ndarray) -> tuple[np.ndarray, int]:
        if number[0] == 0:
            assert hold.wait(60)
        return number, int(number[0])

    def post(infos: list[int]) -> None:
        posted.extend(infos)
        finished.release(len(infos))

    server = BatchServer(address, keys=keys)
    server.bind("act", work, post, batch=1, workers=2)
    with server, Client(server.address, keys=keys) as client:
        first = client.call_block("act", np.array([0]))
        assert client.call_block("act", np.array([1])).result(20) == 1
        assert posted == []
        assert not first.done()
        hold.set()
        assert first.result(20) == 0
        assert finished.acquire(timeout=20)
        assert finished.acquire(timeout=20)
    assert posted == [0, 1]


def test_what_follows_keeps_its_order_with_many_workers_and_clients(
    transport: tuple[str, Keys | None],
) -> None:
    """Each client waits for its answer before it sends the next number, so its numbers are made
    into batches in order; the order in which four workers end is any."""
    address, keys = transport
    posted: list[int] = []
    server = BatchServer(address, keys=keys)
    server.bind(
        "act",
        lambda x: (x, x.tolist()),
        lambda infos: posted.extend(number for info in infos for number in info),
        batch=2,
        wait=0.001,
        workers=4,
        gather=0.001,
        post_rows=4,
    )
    with server:

        def call(base: int) -> None:
            with Client(server.address, keys=keys, timeout=30) as client:
                for number in range(base, base + 50):
                    client.call_block("act", np.array([number])).result()

        threads = [threading.Thread(target=call, args=(1000 * index,)) for index in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(posted) == 300
    for base in range(0, 6000, 1000):
        assert [n for n in posted if base <= n < base + 1000] == list(range(base, base + 50))


def test_whatever_was_answered_before_the_end_is_passed_on(
    transport: tuple[str, Keys | None],
) -> None:
    """The server is closed while three workers are busy and clients keep calling."""
    address, keys = transport
    posted: list[int] = []
    answered: list[list[int]] = [[] for _ in range(4)]
    server = BatchServer(address, keys=keys)
    server.bind(
        "act",
        lambda x: (x, x.tolist()),
        lambda infos: posted.extend(number for info in infos for number in info),
        batch=2,
        wait=0.001,
        workers=3,
        gather=1000.0,
        post_rows=16,
    )

    def call(index: int, client: Client) -> None:
        for number in range(1000 * index, 1000 * (index + 1)):
            try:
                client.call_block("act", np.array([number])).result(30)
            except Disconnected:
                return
            answered[index].append(number)

    server.start(block=False)
    clients = [Client(server.address, keys=keys, patience=0.1) for _ in answered]
    for client in clients:
        client.connect(20)
    threads = [threading.Thread(target=call, args=pair) for pair in enumerate(clients)]
    for thread in threads:
        thread.start()
    while server.stats()["replies"] < 100:
        clients[0].connect(20)
    server.close()
    for thread, client in zip(threads, clients, strict=True):
        thread.join()
        client.close()
    for index, numbers in enumerate(answered):
        of_client = [number for number in posted if number // 1000 == index]
        assert of_client == sorted(of_client)
        assert set(numbers) <= set(of_client)


def test_what_follows_quickly_is_passed_on_together(transport: tuple[str, Keys | None]) -> None:
    """The time is not over for long, so only the number of rows can end the gathering."""
    with Posting(transport, gather=1000.0, post_rows=3) as bench:
        bench.hold.set()
        bench.act(1, 2)
        assert bench.lists == []
        bench.act(3, 4, 5, 6, 7)
        bench.await_calls(2)
        assert bench.lists == [[1, 2, 3], [4, 5, 6]]
        bench.server.close()
    assert bench.lists == [[1, 2, 3], [4, 5, 6], [7]]


def test_what_follows_alone_is_passed_on_when_the_time_is_over(
    transport: tuple[str, Keys | None],
) -> None:
    with Posting(transport, gather=0.01, post_rows=100) as bench:
        bench.hold.set()
        bench.act(1)
        bench.await_calls(1)
        bench.act(2)
        bench.await_calls(1)
        assert bench.lists == [[1], [2]]


def test_what_came_while_another_call_ran_is_passed_on_together(
    transport: tuple[str, Keys | None],
) -> None:
    with Posting(transport) as bench:
        bench.act(0)
        bench.await_calls(1)
        bench.act(1, 2, 3)
        assert bench.lists == [[0]]
        bench.hold.set()
        bench.await_calls(1)
        assert bench.lists == [[0], [1, 2, 3]]


def test_only_a_single_batch_may_have_more_rows_than_a_list(
    transport: tuple[str, Keys | None],
) -> None:
    with Posting(transport, batch=4, post_rows=5, backlog=100, wait=0.0) as bench:
        bench.act(0)
        bench.await_calls(1)
        for size in (4, 1, 2, 7, 1):
            bench.client.call_block("act", np.full(size, size)).result(20)
        bench.hold.set()
        bench.await_calls(4)
        assert [len(numbers) for numbers in bench.lists] == [1, 5, 2, 7, 1]


def test_the_answer_does_not_wait_for_what_follows_until_the_backlog_is_full(
    transport: tuple[str, Keys | None],
) -> None:
    with Posting(transport, post_rows=1, backlog=2) as bench:
        bench.act(1)
        bench.await_calls(1)
        bench.act(2)
        assert bench.server.stats()["act/posting"] == 2
        third, fourth = (bench.client.call_block("act", np.array([number])) for number in (3, 4))
        while bench.server.stats()["act/waiting"] < 2:
            assert not third.wait(0.01)
        assert bench.worked == [1, 2]  # no work is started whose result could not be passed on
        bench.hold.set()
        assert third.result(20) == 3
        assert fourth.result(20) == 4
    assert bench.lists == [[1], [2], [3], [4]]


def test_work_that_failed_holds_no_place_in_the_backlog(
    transport: tuple[str, Keys | None],
) -> None:
    with Posting(transport, post_rows=1, backlog=1) as bench:
        for _ in range(3):
            with pytest.raises(RemoteError, match="below zero"):
                bench.client.call_block("act", np.array([-1])).result(20)
        bench.hold.set()
        bench.act(1)
    assert bench.lists == [[1]]
    assert bench.server.stats()["act/posting"] == 0


def test_closing_passes_on_what_is_left_as_long_as_there_is_progress(
    transport: tuple[str, Keys | None],
) -> None:
    with Posting(transport, post_rows=1, backlog=100) as bench:
        bench.act(0, 1, 2, 3)
        bench.await_calls(1)
        closer = threading.Thread(target=bench.server.close, args=(60.0,))
        closer.start()
        assert bench.lists == [[0]]
        bench.hold.set()
        closer.join(20)
        assert not closer.is_alive()
        assert bench.lists == [[0], [1], [2], [3]]


def test_closing_gives_up_when_there_is_no_progress(transport: tuple[str, Keys | None]) -> None:
    with Posting(transport, post_rows=1, backlog=100) as bench:
        bench.act(0, 1)
        bench.await_calls(1)
        with pytest.raises(Timeout, match=r"act-post has passed nothing on for 0\.05 s; 2 rows"):
            bench.server.close(flush=0.05)
        with pytest.raises(Closed):
            bench.server.start()
        bench.hold.set()
        assert bench.ended.acquire(timeout=20)
    assert bench.lists == [[0]]


def test_closing_may_drop_what_waits(transport: tuple[str, Keys | None]) -> None:
    with Posting(transport, post_rows=1, backlog=100) as bench:
        bench.act(0, 1, 2)
        bench.await_calls(1)
        bench.server.close(flush=0)
        bench.hold.set()
        assert bench.ended.acquire(timeout=20)
        bench.server._methods["act"].posts.thread.join(20)
        assert bench.lists == [[0]]


def test_a_call_that_fails_after_everything_was_dropped_is_not_reported(
    transport: tuple[str, Keys | None], caplog: pytest.LogCaptureFixture
) -> None:
    """Its client may have been closed meanwhile, because no thread waits for it."""
    hold = threading.Event()
    entered = threading.Event()
    errors: list[BaseException] = []

    def post(infos: list[None]) -> None:
        entered.set()
        assert hold.wait(60)
        raise ValueError("afterwards")

    address, keys = transport
    server = BatchServer(address, keys=keys)
    server.bind("act", lambda x: (x, None), post, batch=1, gather=0, on_post_error=errors.append)
    server.start(block=False)
    with Client(server.address, keys=keys) as client:
        assert client.call_block("act", np.array([1])).result(20) == 1
        assert entered.wait(20)
        server.close(flush=0)
    hold.set()
    server._methods["act"].posts.thread.join(20)
    assert errors == []
    assert "afterwards" not in caplog.text


def test_an_error_in_what_follows_is_logged_counted_and_reported(
    transport: tuple[str, Keys | None], caplog: pytest.LogCaptureFixture
) -> None:
    address, keys = transport
    errors: list[BaseException] = []
    good: list[int] = []

    def post(infos: list[int]) -> None:
        if infos == [1]:
            raise ValueError("afterwards")
        good.extend(infos)

    def report(error: BaseException) -> None:
        errors.append(error)
        raise ValueError("also the report")

    server = BatchServer(address, keys=keys)
    server.bind("act", lambda x: (x, int(x[0])), post, batch=1, post_rows=1, on_post_error=report)
    with server, Client(server.address, keys=keys) as client:
        assert client.call_block("act", np.array([1])).result(20) == 1
        assert client.call_block("act", np.array([2])).result(20) == 2
    assert server.stats()["act/post_errors"] == 1
    assert [str(error) for error in errors] == ["afterwards"]
    assert good == [2]
    assert "ValueError: afterwards" in caplog.text


def test_what_follows_may_close_its_own_server(transport: tuple[str, Keys | None]) -> None:
    address, keys = transport
    server = BatchServer(address, keys=keys)
    server.bind("act", lambda x: (x, None), lambda _: server.close(), batch=1, gather=0)
    starter = threading.Thread(target=server.start)
    starter.start()
    with Client(server.address, keys=keys) as client:
        assert client.call_block("act", np.array([1])).result(20) == 1
        starter.join(20)
    assert not starter.is_alive()


def test_a_batched_method_may_be_repeatable(transport: tuple[str, Keys | None]) -> None:
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
        once, again = (
            client.call_block("once", np.array([1])),
            client.call_block("again", np.array([2])),
        )
        assert gate.entered.acquire(timeout=20)
        assert gate.entered.acquire(timeout=20)
        server._loop.close(timeout=0)
        gate.open.set()
        successor = serve(server.address)
        with pytest.raises(Disconnected):
            once.result(20)
        assert again.result(20) == 2
        successor.close()
    server.close()


def test_a_client_that_goes_away_does_not_hold_up_the_others(batching: Batching) -> None:
    gone = batching.client()
    gone.call_block("act", item(9))
    while batching.server.stats()["requests"] < 1:
        gone.connect(1)
    gone.close()
    clients = [batching.client() for _ in range(3)]
    futures = [client.call_block("act", item(who)) for who, client in enumerate(clients)]
    assert [f.result(20)["who"] for f in futures] == [0, 1, 2]


def test_settings_that_cannot_work_are_refused(transport: tuple[str, Keys | None]) -> None:
    address, keys = transport
    server = BatchServer(address, keys=keys)
    with pytest.raises(TransportError, match="at least 1"):
        server.bind("act", lambda x: (x, None), batch=0)
    with pytest.raises(TransportError, match="a backlog of at least post_rows, got"):
        server.bind("act", lambda x: (x, None), print, post_rows=8, backlog=4)
    with pytest.raises(TransportError, match="a gather of at least 0"):
        server.bind("act", lambda x: (x, None), print, gather=-1)
    server.bind("act", lambda x: (x, None))
    with pytest.raises(TransportError, match="bound already"):
        server.bind("act", lambda x: (x, None))
    with server, pytest.raises(TransportError, match="before the server is started"):
        server.bind("late", lambda x: (x, None))
    with pytest.raises(TransportError, match="at least one worker"):
        Server(address, keys=keys, workers=0)
    with pytest.raises(TransportError, match="maxinflight is from 1 to"):
        Client(server.address, maxinflight=0)
