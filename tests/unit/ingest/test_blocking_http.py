"""What one connection of the upload listener makes of what comes over it."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rollout_service.ingest import blocking_http
from rollout_service.ingest.blocking_http import Connection, CutOff, Reply, Request


def echo(request: Request) -> Reply:
    """Says what came."""
    memory, pieces = memoryview(bytearray(5)), []
    while not request.body.ended:
        pieces.append(bytes(memory[: request.body.read_into(memory)]))
    said = {"method": request.method, "target": request.target, "body": b"".join(pieces).decode("latin-1")}
    return Reply.of_json({**said, "announced": request.body.announced, "host": request.caller.headers["host"]})


def refuse(request: Request) -> Reply:
    """Answers without reading the body."""
    return Reply(413, b"{}")


@contextmanager
def served(handle: blocking_http.Handle = echo) -> Iterator[socket.socket]:
    """The caller's end of a connection; when the block ends, so has the thread at the other one."""
    caller, listener = socket.socketpair()
    caller.settimeout(30)
    connection = Connection(listener, ("127.0.0.1", 1), idle=lambda _: None)

    def run() -> None:
        with listener:
            connection.serve(handle, lambda: False)

    thread = threading.Thread(target=run)
    thread.start()
    with caller:
        yield caller
    thread.join(30)
    assert not thread.is_alive()


def said_to(request: bytes, handle: blocking_http.Handle = echo) -> bytes:
    """Everything that is answered to a caller who sends this and no more."""
    with served(handle) as caller:
        caller.sendall(request)
        caller.shutdown(socket.SHUT_WR)
        return all_of(caller)


def all_of(caller: socket.socket) -> bytes:
    return b"".join(iter(lambda: caller.recv(1 << 16), b""))


def bodies_of(replies: bytes) -> list[dict[str, object]]:
    return [json.loads(line) for line in replies.replace(b"HTTP/1.1", b"\n").splitlines() if line.startswith(b"{")]


HEAD = b"PUT /parts/1 HTTP/1.1\r\nHost: here\r\n"


class TestBody:
    def test_a_body_of_known_length_is_read_however_it_comes(self) -> None:
        whole = HEAD + b"Content-Length: 12\r\n\r\nHello, world"
        for cut in (10, len(whole) - 12, len(whole) - 9, len(whole) - 1):
            with served() as caller:
                caller.sendall(whole[:cut])
                caller.sendall(whole[cut:])
                caller.shutdown(socket.SHUT_WR)
                [said] = bodies_of(all_of(caller))
            assert said["body"] == "Hello, world" and said["announced"] == 12

    def test_a_chunked_body_is_read_too(self) -> None:
        [said] = bodies_of(
            said_to(HEAD + b"Transfer-Encoding: chunked\r\n\r\n7\r\nHello, \r\n5;x=y\r\nworld\r\n0\r\nA: b\r\n\r\n")
        )
        assert said["body"] == "Hello, world" and said["announced"] is None

    def test_no_body_is_an_empty_one(self) -> None:
        [said] = bodies_of(said_to(b"GET /x?y HTTP/1.1\r\nHost: here\r\n\r\n"))
        assert said == {"method": "GET", "target": "/x?y", "body": "", "announced": 0, "host": "here"}

    def test_a_head_request_is_answered_without_a_body(self) -> None:
        get = b" /x HTTP/1.1\r\nHost: here\r\n\r\n"
        replies = said_to(b"HEAD" + get + b"GET" + get)
        assert replies.count(b"HTTP/1.1 200 ") == 2 and len(bodies_of(replies)) == 1

    def test_requests_follow_one_another_on_one_connection(self) -> None:
        sized = HEAD + b"Content-Length: 3\r\n\r\none"
        chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\ntwo\r\n0\r\n\r\n"
        replies = said_to(sized + chunked + sized + sized)
        assert [said["body"] for said in bodies_of(replies)] == ["one", "two", "one", "one"]
        assert b"onnection: close" not in replies

    @pytest.mark.parametrize(
        "rest", [b"Content-Length: 12\r\n\r\nHello", b"Transfer-Encoding: chunked\r\n\r\n7\r\nHel"], ids=str
    )
    def test_a_body_that_is_cut_off_is_said_to_be(self, rest: bytes) -> None:
        raised: list[CutOff] = []

        def note(request: Request) -> Reply:
            try:
                return echo(request)
            except CutOff as error:
                raised.append(error)
                return Reply(400, b"{}")

        assert said_to(HEAD + rest, note).startswith(b"HTTP/1.1 400 ")
        assert len(raised) == 1

    def test_a_chunk_that_is_none_ends_the_connection(self) -> None:
        assert said_to(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzzz\r\n") == b""

    def test_a_sender_that_falls_silent_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(blocking_http, "READ_S", 0.05)
        for rest in (b"Content-Length: 12\r\n\r\nHello", b"Transfer-Encoding: chunked\r\n\r\n7\r\nHel"):
            with served() as caller:
                caller.sendall(HEAD + rest)
                assert all_of(caller) == b""

    def test_a_caller_that_asks_whether_to_go_on_is_told_so_when_its_body_is_read(self) -> None:
        with served() as caller:
            caller.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n")
            assert caller.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
            caller.sendall(b"one")
            caller.shutdown(socket.SHUT_WR)
            assert bodies_of(all_of(caller))[0]["body"] == "one"

    def test_a_caller_whose_body_is_not_wanted_is_not_told_to_go_on(self) -> None:
        with served(refuse) as caller:
            caller.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n")
            assert all_of(caller).startswith(b"HTTP/1.1 413 ")

    def test_a_refusal_reaches_a_caller_that_sends_all_of_its_body_first(self) -> None:
        with served(refuse) as caller:
            caller.sendall(HEAD + b"Content-Length: 20000000\r\n\r\n")
            caller.sendall(bytes(20_000_000))
            reply = all_of(caller)
        assert reply.startswith(b"HTTP/1.1 413 ") and b"Connection: close" in reply


class TestHead:
    @pytest.mark.parametrize("noise", [b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"PUT\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])
    def test_what_is_no_request_is_told_so_in_the_services_form(self, noise: bytes) -> None:
        reply = said_to(noise)
        assert reply.startswith(b"HTTP/1.1 400 ")
        [said] = bodies_of(reply)
        assert isinstance(said["error"], dict) and said["error"]["type"] == "MalformedRequest"

    def test_a_head_has_a_bound(self) -> None:
        reply = said_to(HEAD + b"X: " + b"x" * blocking_http.MAX_HEAD_BYTES)
        assert reply.startswith(b"HTTP/1.1 431 ")

    def test_a_head_that_does_not_end_in_time_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(blocking_http, "HEAD_S", 0.05)
        with served() as caller:
            caller.sendall(HEAD)
            assert all_of(caller) == b""

    def test_a_caller_that_says_nothing_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(blocking_http, "IDLE_S", 0.05)
        with served() as caller:
            assert all_of(caller) == b""

    @pytest.mark.parametrize("request_line", [b"GET / HTTP/1.0\r\n", b"GET / HTTP/1.1\r\nConnection: close\r\n"])
    def test_a_connection_that_is_to_be_closed_is(self, request_line: bytes) -> None:
        with served() as caller:
            caller.sendall(request_line + b"Host: here\r\n\r\n")
            assert b"onnection: close" in all_of(caller)
