"""So many connections at once, a thread for each, and none when it has stopped."""

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rollout_service.ingest import blocking_http
from rollout_service.ingest.blocking_http import Reply, Request
from rollout_service.ingest.connection_threads import ConnectionThreads

GET = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


class Gate:
    """Answers while it is open."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Semaphore(0), threading.Event()

    def __call__(self, request: Request) -> Reply:
        self.entered.release()
        self.open.wait(30)
        return Reply(200, b"{}")


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def port(gate: Gate) -> Iterator[int]:
    """Of a listener for two at once."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads = ConnectionThreads(listener, None, gate, most=2)
    threads.start()
    yield int(listener.getsockname()[1])
    gate.open.set()
    threads.stop(30)
    assert not threads.serves
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("upload")] == []


def connected(stack: ExitStack, port: int) -> socket.socket:
    return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))


def closed(connections: list[socket.socket], number: int) -> set[int]:
    """Those that the other end has closed, once they are so many or 30 s have passed."""
    poll, ended = select.poll(), set()
    for connection in connections:
        poll.register(connection, select.POLLIN)
    while len(ended) < number and (events := poll.poll(30_000)):
        for descriptor, _ in events:
            ended.add(descriptor)
            poll.unregister(descriptor)
    return ended


def test_one_that_says_nothing_makes_room_for_one_that_does(gate: Gate, port: int) -> None:
    gate.open.set()
    with ExitStack() as stack:
        silent = [connected(stack, port) for _ in range(5)]
        asking = connected(stack, port)
        asking.sendall(GET)
        assert asking.recv(1000).startswith(b"HTTP/1.1 200 ")
        # any four of them: which ones waited for a request first is up to their threads
        assert len(closed(silent, 4)) == 4


@pytest.mark.parametrize(
    "half",
    [b"PUT / HTTP/1.1\r\nHost: here\r\n", b"PUT / HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\n"],
    ids=["half a head", "a body that was answered and does not come"],
)
def test_what_does_not_come_makes_room_for_what_does(
    gate: Gate, port: int, half: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking_http, "HEAD_S", 1000.0)
    gate.open.set()
    with ExitStack() as stack:
        for _ in range(5):
            connected(stack, port).sendall(half)
        asking = connected(stack, port)
        asking.sendall(GET)
        assert asking.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_one_too_many_waits_until_another_has_its_answer(gate: Gate, port: int) -> None:
    with ExitStack() as stack:
        callers = []
        for _ in range(3):
            callers.append(connected(stack, port))
            callers[-1].sendall(GET)
            if len(callers) < 3:
                gate.entered.acquire()
        assert not gate.entered.acquire(blocking=False)
        gate.open.set()
        for caller in callers:
            assert caller.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_a_connection_that_waits_for_a_request_does_not_hold_up_the_stop(gate: Gate, port: int) -> None:
    gate.open.set()
    caller = connected(ExitStack(), port)  # open until the fixture has stopped the listener
    caller.sendall(GET)
    assert caller.recv(1000)
