"""The HTTP listener: bodies, bounds on connections and heads, and its end."""

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

import pytest

from rollout_service.ingest import http_listener
from rollout_service.ingest.http_listener import CutOff, HTTPListener, Reply, Request
from tests.support.certificates import make_certificate

GET = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
PUT = b"PUT /parts/1 HTTP/1.1\r\nHost: here\r\n"
Handle = Callable[[Request], Reply]
Result = TypeVar("Result")


def echo(request: Request) -> Reply:
    """Reply with the request's content."""
    memory, pieces = memoryview(bytearray(5)), []
    while request.body.left:
        pieces.append(bytes(memory[: request.body.read_into(memory)]))
    said = {"method": request.method, "target": request.target, "body": b"".join(pieces).decode("latin-1")}
    return Reply.of_json({**said, "nbytes": request.body.nbytes, "host": request.headers.get("host")})


def refuse(request: Request) -> Reply:
    """Reply without reading the body."""
    return Reply(413, b"{}")


@contextmanager
def listening(handle: Handle = echo, max_connections: int = 2, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Yield the port of a listener. It has ended, with its threads, when the block ends."""
    listener = HTTPListener("127.0.0.1", 0, tls, max_connections)
    listener.start(handle)
    try:
        yield int(listener.server_address[1])
    finally:
        listener.stop(30)
    assert not listener.is_serving
    for thread in threading.enumerate():
        if thread.name.startswith("upload"):
            thread.join(30)  # it has closed its connection, and ends
            assert not thread.is_alive()


@contextmanager
def connected(handle: Handle = echo) -> Iterator[socket.socket]:
    with listening(handle) as port, socket.create_connection(("127.0.0.1", port), timeout=30) as caller:
        yield caller


def replies_to(request: bytes, handle: Handle = echo) -> bytes:
    """Return all replies to a caller that sends this and no more."""
    with connected(handle) as caller:
        caller.sendall(request)
        caller.shutdown(socket.SHUT_WR)
        return all_of(caller)


def all_of(caller: socket.socket) -> bytes:
    return b"".join(iter(lambda: caller.recv(1 << 16), b""))


def reply_or_nothing(caller: "socket.socket | TLSCaller") -> bytes:
    """Return what came first, or nothing if the connection was closed before."""
    with suppress(ConnectionError):
        return caller.recv(1000)
    return b""


class TLSCaller:
    """Sends a request together with the end of its handshake, so that the head has come when the handshake ends."""

    def __init__(self, caller: socket.socket, request: bytes, trusted: ssl.SSLContext) -> None:
        self._caller, self._received, self._sent = caller, ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = trusted.wrap_bio(self._received, self._sent, server_hostname="127.0.0.1")
        self._until_done(self._tls.do_handshake)
        self._tls.write(request)
        caller.sendall(self._sent.read())

    def recv(self, most: int) -> bytes:
        return self._until_done(lambda: self._tls.read(most))

    def _until_done(self, step: Callable[[], Result]) -> Result:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                self._caller.sendall(self._sent.read())
                if not (received := self._caller.recv(1 << 16)):
                    raise ConnectionResetError("closed before a reply") from None
                self._received.write(received)


def bodies_of(replies: bytes) -> list[dict[str, object]]:
    return [json.loads(line) for line in replies.replace(b"HTTP/1.1", b"\n").splitlines() if line.startswith(b"{")]


class TestBody:
    def test_a_body_is_read_however_it_is_cut(self):
        whole = PUT + b"Content-Length: 12\r\n\r\nHello, world"
        for cut in (10, len(whole) - 12, len(whole) - 9, len(whole) - 1):
            with connected() as caller:
                caller.sendall(whole[:cut])
                caller.sendall(whole[cut:])
                caller.shutdown(socket.SHUT_WR)
                [said] = bodies_of(all_of(caller))
            assert said["body"] == "Hello, world" and said["nbytes"] == 12

    def test_requests_follow_one_another_on_one_connection(self):
        put = PUT + b"Content-Length: 3\r\n\r\none"
        replies = replies_to(GET.replace(b" / ", b" /x?y ") + GET.replace(b"GET", b"HEAD") + put + put)
        assert replies.count(b"HTTP/1.1 200 ") == 4 and b"onnection: close" not in replies
        first, *puts = bodies_of(replies)  # that of HEAD is not sent
        assert first == {"method": "GET", "target": "/x?y", "body": "", "nbytes": 0, "host": "here"}
        assert [said["body"] for said in puts] == ["one"] * 2

    def test_a_truncated_body_raises_cut_off(self):
        raised: list[CutOff] = []

        def note(request: Request) -> Reply:
            try:
                return echo(request)
            except CutOff as error:
                raised.append(error)
                return Reply(400, b"{}")

        assert replies_to(PUT + b"Content-Length: 12\r\n\r\nHello", note).startswith(b"HTTP/1.1 400 ")
        assert len(raised) == 1

    def test_a_silent_sender_is_disconnected(self, monkeypatch):
        monkeypatch.setattr(http_listener, "READ_S", 0.05)
        with connected() as caller:
            caller.sendall(PUT + b"Content-Length: 12\r\n\r\nHello")
            assert all_of(caller) == b""

    @pytest.mark.parametrize(
        ("header", "status"),
        [
            (b"Transfer-Encoding: chunked", 411),
            (b"Content-Length: -1", 400),
            (b"Content-Length: " + b"9" * 5000, 400),
            (b"Content-Length: 1\r\nContent-Length: 2", 400),
            (b"Content-Length : 1", 400),
            (b"no header\r\nContent-Length: 1", 400),
        ],
    )
    def test_a_body_without_a_valid_length_is_refused(self, header, status):
        [said] = bodies_of(reply := replies_to(PUT + header + b"\r\n\r\n3\r\ntwo\r\n0\r\n\r\n"))
        assert reply.startswith(b"HTTP/1.1 %d " % status) and b"Connection: close" in reply
        assert isinstance(said["error"], dict) and said["error"]["type"] == "MalformedRequest"

    def test_a_caller_that_expects_100_continue_gets_it(self):
        with connected() as caller:
            caller.sendall(PUT + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n")
            assert caller.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
            caller.sendall(b"one")
            caller.shutdown(socket.SHUT_WR)
            assert bodies_of(all_of(caller))[0]["body"] == "one"

    def test_a_refusal_reaches_a_caller_that_still_sends(self):
        with connected(refuse) as caller:
            caller.sendall(PUT + b"Content-Length: 20000000\r\n\r\n")
            caller.sendall(bytes(20_000_000))
            reply = all_of(caller)
        assert reply.startswith(b"HTTP/1.1 413 ") and b"Connection: close" in reply


class TestHead:
    @pytest.mark.parametrize("noise", [b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"PUT\r\n\r\n", b"GET / HTTP/9.1\r\n\r\n"])
    def test_noise_is_refused_in_the_services_form(self, noise):
        [said] = bodies_of(reply := replies_to(noise))
        assert reply.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 505 "))
        assert isinstance(said["error"], dict) and said["error"]["type"] == "MalformedRequest"

    def test_a_target_has_a_bound(self):
        [said] = bodies_of(reply := replies_to(b"GET /" + b"x" * (64 << 10) + b" HTTP/1.1\r\n\r\n"))
        assert reply.startswith(b"HTTP/1.1 414 ") and "Too Long" in str(said["error"])

    @pytest.mark.parametrize("header", [b"X: " + b"x" * (64 << 10), b"X: x\r\n" * 101], ids=["long", "many"])
    def test_a_head_has_a_bound(self, header):
        assert replies_to(PUT + header + b"\r\n\r\n").startswith(b"HTTP/1.1 431 ")

    @pytest.mark.parametrize("sent", [b"", PUT])
    def test_a_silent_caller_is_disconnected(self, monkeypatch, sent):
        monkeypatch.setattr(http_listener, "IDLE_S", 0.05)
        with connected() as caller:
            caller.sendall(sent)
            assert all_of(caller) == b""

    @pytest.mark.parametrize("request_line", [b"GET / HTTP/1.0\r\n", b"GET / HTTP/1.1\r\nConnection: close\r\n"])
    def test_connection_close_is_honoured(self, request_line):
        with connected() as caller:
            caller.sendall(request_line + b"Host: here\r\n\r\n")
            assert all_of(caller).startswith(b"HTTP/1.1 200 ")


class Gate:
    """Replies while it is open."""

    def __init__(self, reply: Reply = Reply(200, b"{}")) -> None:  # noqa: B008  # frozen
        self.entered, self.open, self._reply = threading.Semaphore(0), threading.Event(), reply

    def __call__(self, request: Request) -> Reply:
        self.entered.release()
        self.open.wait(30)
        return self._reply


class TestConnections:
    def connect(self, stack: ExitStack, port: int, sent: bytes = b"") -> socket.socket:
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        connection.sendall(sent)
        return connection

    @pytest.mark.parametrize(
        "half", [b"", PUT, PUT + b"Content-Length: 1000\r\n\r\n"], ids=["nothing", "head", "refused body"]
    )
    def test_half_requests_make_room_for_a_whole_one(self, half):
        with ExitStack() as stack:
            port = stack.enter_context(listening(refuse))
            for _ in range(5):
                self.connect(stack, port, half)
            assert self.connect(stack, port, GET).recv(1000).startswith(b"HTTP/1.1 413 ")

    def test_callers_that_read_no_reply_make_room_for_another(self, monkeypatch):
        monkeypatch.setattr(http_listener, "READ_S", 600.0)
        large = bytes(64 << 20)  # more than sockets buffer
        with ExitStack() as stack:
            gate = Gate(Reply(200, large))
            gate.open.set()
            port = stack.enter_context(listening(gate))
            last = GET[:-2] + b"Connection: close\r\n\r\n"
            silent = [self.connect(stack, port, last) for _ in range(2)]
            for _ in silent:
                gate.entered.acquire()
            self.connect(stack, port, last)
            assert gate.entered.acquire(timeout=30)
            assert min(len(all_of(caller)) for caller in silent) < len(large)

    def test_one_too_many_waits_until_another_is_answered(self):
        gate = Gate()
        with ExitStack() as stack:
            port = stack.enter_context(listening(gate))
            callers = [self.connect(stack, port, GET)]
            gate.entered.acquire()
            callers.append(self.connect(stack, port, GET))
            gate.entered.acquire()
            callers.append(self.connect(stack, port, GET))
            assert not gate.entered.acquire(blocking=False)
            gate.open.set()
            for caller in callers:
                assert caller.recv(1000).startswith(b"HTTP/1.1 200 ")

    def test_connections_for_which_no_thread_starts_take_no_place(self, monkeypatch):
        start, left = threading.Thread.start, 3

        def start_later(thread: threading.Thread) -> None:
            nonlocal left
            if thread.name == "upload" and left:
                left -= 1
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_later)
        with ExitStack() as stack:
            port = stack.enter_context(listening())
            callers = [self.connect(stack, port, GET) for _ in range(4)]
            replies = [reply_or_nothing(caller) for caller in callers]
        assert replies[:3] == [b""] * 3 and replies[3].startswith(b"HTTP/1.1 200 ")

    def test_every_request_that_is_handled_is_answered(self):
        for _ in range(20):
            gate = Gate()
            gate.open.set()
            with ExitStack() as stack:
                port = stack.enter_context(listening(gate))
                callers = [self.connect(stack, port, GET) for _ in range(10)]
                answered = sum(reply_or_nothing(caller).startswith(b"HTTP/1.1 200 ") for caller in callers)
            handled = 0
            while gate.entered.acquire(blocking=False):
                handled += 1
            assert answered == handled

    def test_a_stop_answers_a_request_that_came_with_its_handshake(self, tmp_path):
        certificate, gate = make_certificate(tmp_path, "127.0.0.1"), Gate()
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificate.certfile, certificate.keyfile)
        trusted = ssl.create_default_context(cadata=certificate.pem)
        with ExitStack() as stack:
            with listening(gate, tls=tls) as port:
                gate.open.set()
                idle = TLSCaller(self.connect(stack, port), GET, trusted)
                assert reply_or_nothing(idle).startswith(b"HTTP/1.1 200 ")
                gate.open.clear()
                caller = TLSCaller(self.connect(stack, port), GET, trusted)
                for _ in range(2):
                    gate.entered.acquire()
                after_stop = threading.Thread(target=lambda: (reply_or_nothing(idle), gate.open.set()))
                after_stop.start()
            after_stop.join()
            assert reply_or_nothing(caller).startswith(b"HTTP/1.1 200 ")

    def test_a_stop_answers_a_request_that_came_before_the_last_reply_was_read(self):
        large, gate = Reply(200, bytes(64 << 20)), Gate()

        def answer(request: Request) -> Reply:
            return large if request.method == "PUT" else gate(request)

        with ExitStack() as stack:
            with listening(answer) as port:
                gate.open.set()
                idle = self.connect(stack, port, GET)
                assert idle.recv(1000).startswith(b"HTTP/1.1 200 ")
                gate.open.clear()
                caller = self.connect(stack, port, PUT + b"Content-Length: 0\r\n\r\n" + GET)
                reply = caller.makefile("rb")
                while reply.readline() != b"\r\n":
                    pass
                assert len(reply.read(len(large.body))) == len(large.body)
                for _ in range(2):
                    gate.entered.acquire()
                after_stop = threading.Thread(target=lambda: (reply_or_nothing(idle), gate.open.set()))
                after_stop.start()
            after_stop.join()
            assert reply.readline().startswith(b"HTTP/1.1 200 ")
