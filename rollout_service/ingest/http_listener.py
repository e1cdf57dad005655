"""HTTP/1.1 listener with one thread per connection. Bodies go from the socket directly into the caller's memory."""

import io
import json
import logging
import re
import socket
import socketserver
import ssl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from email.errors import MissingHeaderBodySeparatorDefect
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TypeAlias

from rollout_service.errors import MalformedRequest, RolloutServiceError
from rollout_service.web.errors import error_response

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""Maximum number of connections. For a further one, the connection that has waited longest for its client is closed. If
all are busy, the new one waits until one ends."""
IDLE_S = 30.0
"""Maximum time in seconds without data before a whole head has come. The gateway closes its own connections earlier
(``connections.KEEPALIVE_S``)."""
HANDSHAKE_S = 10.0
"""Maximum time in seconds for a TLS handshake, and for the rest of a refused body."""
READ_S = 60.0
"""Maximum time in seconds without data within a body."""
MAX_DISCARDED_BYTES = 256 << 20
_LENGTH = re.compile("[0-9]{1,18}")
"""A valid Content-Length. ``int`` raises ValueError for thousands of digits."""
_RETRY_S = 1.0

Handle: TypeAlias = Callable[["Request"], "Reply"]


class CutOff(Exception):
    """Raised if the sender disconnects or sends nothing within a body."""


@dataclass(frozen=True)
class Reply:
    """A reply to a request."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of_error(cls, error: RolloutServiceError, status: int | None = None) -> "Reply":
        """Return an error reply in the form of the service's other routes. ``status``: None: the error's own."""
        response = error_response(error)
        headers = tuple((k, v) for k, v in response.headers.items() if k.lower() == "retry-after")
        return cls(status or response.status_code, bytes(response.body), headers)

    @classmethod
    def of_json(cls, content: object) -> "Reply":
        """Return a success reply."""
        return cls(200, json.dumps(content).encode("ascii"))


@dataclass(frozen=True)
class Request:
    """A request whose head was read, and its body, which was not."""

    method: str
    target: str
    headers: Message
    body: "Body"


class Body:
    """The body of a request."""

    def __init__(self, handler: "_Connection", nbytes: int) -> None:
        self._handler, self.nbytes, self.left = handler, nbytes, nbytes
        self._may_be_buffered = True

    def read_into(self, room: memoryview) -> int:
        """Fill ``room`` unless the body ends before. Return the number of bytes. Raises CutOff."""
        room, done = room[: min(room.nbytes, self.left)], 0
        try:
            if self._may_be_buffered and room.nbytes:  # the reader of the head has read ahead
                ahead = self._handler.rfile.read1(room.nbytes)
                room[: len(ahead)] = ahead
                done = len(ahead)
                self._may_be_buffered = done == room.nbytes
                if not done:
                    raise CutOff(f"{self.left} bytes did not come")
            while done < room.nbytes:
                count = _receive_into(self._handler.connection, room[done:])
                if not count:
                    raise CutOff(f"{self.left - done} bytes did not come")
                done += count
        except (TimeoutError, BlockingIOError) as error:
            raise CutOff(f"nothing came for {READ_S:g} s") from error
        except OSError as error:
            raise CutOff(str(error)) from error
        self.left -= done
        return done

    def abort(self) -> None:
        """End the connection, so that a waiting ``read_into`` raises CutOff. Thread-safe."""
        _shut(self._handler.connection)


def _receive_into(sock: socket.socket, room: memoryview) -> int:
    if isinstance(sock, ssl.SSLSocket):
        return sock.recv_into(room)
    return sock.recv_into(room, 0, socket.MSG_WAITALL)


class _Connection(BaseHTTPRequestHandler):
    """Answers the requests of one connection, one after the other."""

    server: "HTTPListener"
    rfile: io.BufferedReader
    protocol_version = default_request_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle_one_request(self) -> None:
        """Wait for a request and answer it."""
        self.connection.settimeout(0)
        head = b""
        with suppress(ssl.SSLWantReadError):
            head = self.rfile.peek()
        self._waits = b"\r\n\r\n" not in head
        if self._waits:
            self.server.note_waiting(self.connection)
        self.connection.settimeout(IDLE_S)
        super().handle_one_request()

    def _answer(self) -> None:
        if self._waits:
            self.server.note_busy(self.connection)
        length = self.headers.get("Content-Length", "0")
        # the lines after a malformed one, such as "Content-Length : 5", would be read as the next request
        if any(isinstance(defect, MissingHeaderBodySeparatorDefect) for defect in self.headers.defects):
            self.send_error(400, "a header line is malformed")
            return
        if "Transfer-Encoding" in self.headers:
            self.send_error(411, "chunked bodies are not taken; send Content-Length")
            return
        if len(self.headers.get_all("Content-Length", [])) > 1 or _LENGTH.fullmatch(length) is None:
            self.send_error(400, f"Content-Length is {length!r}")
            return
        self._set_body_timeout()
        body = Body(self, int(length))
        reply = self.server.handle(Request(self.command, self.path, self.headers, body))
        self._send(reply, close=self.close_connection or body.left > 0 or self.server.is_stopping)
        if body.left:
            self._discard(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = do_OPTIONS = _answer

    def _set_body_timeout(self) -> None:
        if isinstance(self.connection, ssl.SSLSocket):
            self.connection.settimeout(READ_S)
            return
        # The kernel's timeout instead of Python's. With Python's, recv returns as soon as any bytes are there. With
        # MSG_WAITALL, one call waits for all bytes and takes the GIL once instead of ten times.
        self.connection.settimeout(None)
        timeout = struct.pack("ll", int(READ_S), int(READ_S % 1 * 1e6))
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request in the form of the service's other routes, and end the connection."""
        why = message or explain or HTTPStatus(code).phrase
        self._send(Reply.of_error(MalformedRequest(f"invalid HTTP request: {why}"), code), close=True)
        self._discard(Body(self, MAX_DISCARDED_BYTES))

    def _send(self, reply: Reply, *, close: bool) -> None:
        self.close_connection = self.close_connection or close
        headers = [*reply.headers]
        if reply.status != 204:  # 204 must not have a body or a Content-Length
            headers += [("Content-Length", str(len(reply.body))), ("Content-Type", "application/json")]
        if close:
            headers.append(("Connection", "close"))
        head = [f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}", *(f"{k}: {v}" for k, v in headers)]
        unsent = memoryview("\r\n".join([*head, "", ""]).encode("latin-1") + reply.body * (self.command != "HEAD"))
        # Only a client that does not read its reply may lose it to another connection: the socket is full then.
        self.connection.settimeout(0)
        with suppress(BlockingIOError, ssl.SSLWantWriteError):
            unsent = unsent[self.connection.send(unsent) :]
        if unsent:
            may_lose = not self.server.is_stopping  # a stop would close the connection at once
            if may_lose:
                self.server.note_waiting(self.connection)
            self.connection.settimeout(READ_S)
            self.connection.sendall(unsent)
            if may_lose:
                self.server.note_busy(self.connection)

    def _discard(self, body: Body) -> None:
        """Read and drop the rest of a refused body, up to a limit.

        Data that arrives at a closed socket makes the kernel drop the reply, which a sending client has not read.
        """
        self.server.note_waiting(self.connection)
        self.connection.settimeout(HANDSHAKE_S)
        if not isinstance(self.connection, ssl.SSLSocket):
            self.connection.shutdown(socket.SHUT_WR)
        memory, read, deadline = memoryview(bytearray(1 << 20)), 0, time.monotonic() + HANDSHAKE_S
        with suppress(CutOff):
            while body.left and read < MAX_DISCARDED_BYTES and time.monotonic() < deadline:
                read += body.read_into(memory)

    def log_message(self, format: str, *args: object) -> None:
        """Log what the standard library would print."""
        logger.debug(format, *args)


class HTTPListener(socketserver.TCPServer):
    """Serves connections until it is stopped. The port is bound when it is made."""

    allow_reuse_address = True  # connections of the previous listener linger
    request_queue_size = 128

    def __init__(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        """``port``: 0: any free port. Raises OSError."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Connection)
        self._tls, self._max = tls, max_connections
        self._open: dict[threading.Thread, socket.socket] = {}
        self._threads: list[threading.Thread] = []
        """The threads of ``_open``, and threads that have given their place back and are about to end."""
        self._waiting: dict[socket.socket, None] = {}
        """Connections that wait for their clients, the longest first: for a handshake, a whole head, the receipt of a
        reply, or the rest of a refused body."""
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._acceptor = threading.Thread(target=self.serve_forever, name="upload-accept", daemon=True)

    def start(self, handle: Handle) -> None:
        """Start to answer connections. ``handle``: answers one request; called in the threads; raises only CutOff."""
        self.handle = handle
        self._acceptor.start()

    @property
    def is_stopping(self) -> bool:
        """Return True once ``stop`` was called."""
        return self._stopping.is_set()

    @property
    def is_serving(self) -> bool:
        """Return True while it accepts connections."""
        return self._acceptor.is_alive() and not self.is_stopping

    def stop(self, grace_s: float) -> None:
        """Stop accepting connections, give running requests ``grace_s`` seconds, and end every thread. Blocks."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        if self._acceptor.is_alive():
            _shut(self.socket)  # wakes the acceptor
            self.shutdown()
            self._acceptor.join()
        self.server_close()
        with self._changed:
            while self._waiting:
                _shut(self._waiting.popitem()[0])
            self._changed.wait_for(lambda: not self._open, timeout=grace_s)
            for connection in self._open.values():
                _shut(connection)
        for thread in self._threads:
            thread.join()

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        """Accept a connection."""
        try:
            return super().get_request()
        except OSError as error:
            if not self.is_stopping:
                logger.error("no connection can be accepted now: %s", error)
                self._stopping.wait(_RETRY_S)  # such as too many open files: do not spin
            raise

    def process_request(self, request: socket.socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        """Serve a connection in its own thread. If there are too many, wait for one that ends."""
        with self._changed:
            ending: socket.socket | None = None
            while len(self._open) >= self._max and not self.is_stopping:
                # one at a time, or each wake-up would close one more before the first one is gone
                if ending not in self._open.values() and self._waiting:
                    ending = next(iter(self._waiting))
                    del self._waiting[ending]
                    _shut(ending)
                self._changed.wait()
            if self.is_stopping:
                request.close()
                return
            thread = threading.Thread(target=self._serve, args=(request, client_address), name="upload", daemon=True)
            thread.start()  # an error, such as for too many threads, must leave no place taken
            self._open[thread] = request
            self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]

    def _serve(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        try:
            if self._tls is not None:
                connection = self._encrypted(self._tls, connection)
            _Connection(connection, peer, self)
        except (CutOff, OSError) as error:  # the client is gone
            logger.info("a connection from %s has ended: %s", peer[0], error)
        except Exception:  # the thread must give its place back; the log has the traceback
            logger.exception("a connection from %s failed", peer[0])
        finally:
            with self._changed:
                connection = self._open.pop(threading.current_thread())
                self._waiting.pop(connection, None)
                self._changed.notify_all()
            connection.close()

    def _encrypted(self, tls: ssl.SSLContext, plain: socket.socket) -> ssl.SSLSocket:
        """Make the TLS handshake, in the connection's thread so that a slow client delays no other."""
        plain.settimeout(HANDSHAKE_S)
        encrypted = tls.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        with self._changed:
            self._open[threading.current_thread()] = encrypted
        self.note_waiting(encrypted)
        encrypted.do_handshake()
        self.note_busy(encrypted)
        return encrypted

    def note_waiting(self, connection: socket.socket) -> None:
        """Note that a connection waits for its client, and may be closed for another one."""
        with self._changed:
            if self.is_stopping:
                _shut(connection)
            else:
                self._waiting[connection] = None
                self._changed.notify_all()

    def note_busy(self, connection: socket.socket) -> None:
        """Note that a waiting connection has a request to answer. Raises CutOff if it was closed while it waited."""
        with self._changed:
            if connection not in self._waiting:
                raise CutOff("it was closed for another connection, or because the listener stops")
            del self._waiting[connection]


def _shut(connection: socket.socket) -> None:
    """Wake the thread that waits for this connection; that thread closes it."""
    with suppress(OSError):  # the peer has disconnected already
        # not the method of SSLSocket, which would continue in plain text
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
