"""Parts over plain connections: kept for a push, broken by its end, and judged by the same rules as all else."""

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import BinaryIO

import httpx
import pytest
import torch

from rollout_service.client import RolloutClient, _part_sender
from rollout_service.client._part_sender import PlainConnections
from rollout_service.errors import Overloaded
from rollout_service.protocol.upload import UPLOAD_KEY_HEADER, UploadTensor, listener_proof
from rollout_service.runtime.tls import PinnedCertificates
from tests.unit.client.conftest import cancelled, stream_of

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
LAST = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Last: 1\r\n\r\n{}"
"""After which the listener closes the connection, and does not say so."""
PIECES = [memoryview(bytes(range(256)) * 600), memoryview(b""), memoryview(bytes(range(256)) * 400)]
BODY = b"".join(PIECES)


def head_of(stream: BinaryIO) -> list[bytes] | None:
    """The lines of a head; None at the end of the connection."""
    lines = []
    while (line := stream.readline()) != b"\r\n":
        if not line:
            return None
        lines.append(line)
    return lines


class Listener:
    """Answers each request of each connection as ``answers`` say, in turn; nothing: it closes the connection."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = iter(answers)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.bodies: list[list[bytes]] = []
        """Of each connection."""
        self.closed, self.closing = threading.Event(), False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            if self.closing:
                return connection.close()
            with connection, suppress(ConnectionError):
                self._serve(connection)
            self.closed.set()

    def _serve(self, connection: socket.socket) -> None:
        self.bodies.append([])
        with connection.makefile("rb") as stream:
            while (head := head_of(stream)) is not None:
                length = next(int(line.split(b":")[1]) for line in head if line.lower().startswith(b"content-length"))
                self.bodies[-1].append(stream.read(length))
                answer = next(self._answers, b"")
                connection.sendall(answer)
                if answer in (b"", LAST, LAST[:-1]):
                    return

    def close(self) -> None:
        self.closing = True
        socket.create_connection(self._socket.getsockname()).close()
        self._thread.join()
        self._socket.close()


@contextmanager
def listening(*answers: bytes) -> Iterator[tuple[Listener, Callable[[], httpx.Response]]]:
    """A listener, and what sends ``BODY`` to it."""
    listener = Listener(*answers)
    connections = PlainConnections(listener.url, PinnedCertificates().context, read_s=30.0)
    try:
        yield listener, partial(connections.put, "/parts/0", PIECES, {"X": "y"})
    finally:
        connections.close()
        listener.close()


def test_one_connection_serves_many_requests():
    with listening(OK, b"HTTP/1.1 409 No\r\nContent-Length: 4\r\nA: b\r\n\r\nnope", OK) as (listener, put):
        replies = [put() for _ in range(3)]
        assert [reply.status_code for reply in replies] == [200, 409, 200]
        assert replies[1].text == "nope" and replies[1].headers["A"] == "b"
        assert listener.bodies == [[BODY] * 3]


def test_a_connection_that_was_closed_meanwhile_is_not_used_again():
    said = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
    for last in (LAST, said):
        with listening(last, OK) as (listener, put):
            assert put().status_code == 200
            if last is LAST:
                listener.closed.wait(30)
            assert put().status_code == 200
            assert listener.bodies == [[BODY], [BODY]]


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0\r\n\r\n", LAST[:-1]], ids=["nothing", "no HTTP", "half"])
def test_a_broken_answer_is_a_transport_error_that_may_be_repeated(answer):
    with listening(answer, b"") as (_, put), pytest.raises(httpx.NetworkError):
        put()


def test_no_connection_is_a_connect_error():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(httpx.ConnectError):
        PlainConnections(url, PinnedCertificates().context, 1.0).put("/", PIECES, {})


def test_a_listener_that_reads_nothing_is_a_write_timeout(monkeypatch):
    monkeypatch.setattr(_part_sender, "WRITE_S", 1.0)  # the kernel's timeout; 0 would be none
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        connections = PlainConnections(url, PinnedCertificates().context, 30.0)
        with pytest.raises(httpx.WriteTimeout, match="nothing was accepted for 1 s"):
            connections.put("/parts/0", [memoryview(bytes(64 << 20))], {})
        connections.close()


def push_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("push-parts")]


def test_a_connection_that_is_still_made_ends_with_the_others(monkeypatch):
    connecting, closed = threading.Event(), threading.Event()

    def connect(_: http.client.HTTPConnection) -> None:
        connecting.set()
        closed.wait(30)
        raise ConnectionAbortedError

    monkeypatch.setattr(http.client.HTTPConnection, "connect", connect)
    connections = PlainConnections("http://127.0.0.1:1", PinnedCertificates().context, 30.0)
    with ThreadPoolExecutor(1) as thread:
        putting = thread.submit(connections.put, "/", PIECES, {})
        connecting.wait(30)
        try:
            connections.close()
        finally:
            closed.set()
    assert isinstance(putting.exception(), httpx.ConnectError)


async def test_the_connections_of_a_push_are_as_many_as_its_parts_at_once(service, direct, client, tensors):
    await client.push_weights(5, tensors, parallel_parts=2)
    ports = {port for port, (_, path) in zip(direct.client_ports, direct.log, strict=True) if "/parts/" in path}
    assert len(direct.parts_sent()) == 10 and 1 <= len(ports) <= 2
    assert service.uploads[5].stream == stream_of(tensors) and push_threads() == []


async def test_a_part_that_the_listener_refuses_for_now_is_sent_there_again(service, direct, client, tensors):
    direct.answers["PUT", "/v1/weights/5/parts/3"].append(Overloaded("busy"))
    await client.push_weights(5, tensors)
    assert direct.parts_sent().count(3) == 2 and service.parts_sent() == []


async def test_cancelling_a_push_breaks_what_is_being_sent_and_leaves_no_thread(service):
    """The listener takes no byte of the body, so that its sender waits for room."""
    table = [UploadTensor(name="w", dtype="float32", shape=(16 << 20,))]
    service.part_bytes = 64 << 20
    stuck = asyncio.Event()

    async def take_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            nonce = head.split(b"nonce=")[1].split(b" ")[0].decode()
            body = json.dumps({"proof": listener_proof("key", nonce)}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            return
        assert UPLOAD_KEY_HEADER.lower().encode() in head.lower()
        writer.transport.pause_reading()
        stuck.set()

    listener = await asyncio.start_server(take_nothing, "127.0.0.1", 0)
    service.upload_url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with RolloutClient(service.url) as client:
        tensors = iter([("w", torch.zeros(16 << 20))])
        push = asyncio.create_task(client.push_weights(5, tensors, tensor_table=table))
        await stuck.wait()
        assert push_threads()
        await cancelled(push)
        assert push_threads() == []
    assert service.parts_sent() == [] and service.calls("POST", "/v1/weights/5/commit") == 0
    listener.close()
