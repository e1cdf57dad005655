"""One HTTP/1.1 connection over a blocking socket: h11 parses heads, and bodies go directly into the caller's memory.

A body with a Content-Length does not pass through h11 or a Python object: ``recv_into`` writes it into its target and
releases the GIL. A chunked body goes through h11 and is copied.
"""

import json
import socket
import ssl
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import h11
from starlette.requests import HTTPConnection

from rollout_service.errors import MalformedRequest, RolloutServiceError
from rollout_service.web.errors import error_response

IDLE_S = 30.0
"""Maximum time in seconds that a connection may wait for its next request. The gateway closes its own earlier
(``connections.KEEPALIVE_S``)."""
HEAD_S = 10.0
"""Maximum time in seconds for a head from its first byte, for a TLS handshake, and for the rest of a refused body."""
READ_S = 60.0
"""Maximum time in seconds without data within a body."""
MAX_HEAD_BYTES = 16 << 10
_CHUNK_BYTES = 64 << 10
MOST_DISCARDED_BYTES = 256 << 20

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


class Request:
    """A request whose head was read, and its body, which was not."""

    def __init__(self, head: h11.Request, peer: tuple[str, int], body: "Body") -> None:
        self.method, self.target = head.method.decode("ascii"), head.target.decode("ascii")
        self.caller = HTTPConnection({"type": "http", "headers": list(head.headers), "client": peer})
        """The caller's address and headers."""
        self.body = body


class Body:
    """The body of a request. Sends 100 Continue at the first read, if the client expects it."""

    def __init__(self, connection: h11.Connection, head: h11.Request, sock: socket.socket) -> None:
        self._h11, self._socket = connection, sock
        length = next((value for name, value in head.headers if name == b"content-length"), None)
        chunked = any(name == b"transfer-encoding" for name, _ in head.headers)
        self.announced: int | None = None if chunked else int(length or b"0")
        """Content-Length of the body; None: it is chunked."""
        self._left = self.announced
        self._waits = connection.they_are_waiting_for_100_continue
        self._ahead = bytearray() if chunked else bytearray(connection.trailing_data[0])
        """Bytes that arrived with the head or in a chunk and are not read yet."""
        self._ended = self._left == 0

    @property
    def ended(self) -> bool:
        """Return True if the whole body was read."""
        return self._ended

    @property
    def next_request(self) -> bytes:
        """Return the bytes received after the body, once it has ended."""
        return bytes(self._ahead) if self._left is not None else self._h11.trailing_data[0]

    def read_into(self, room: memoryview) -> int:
        """Fill ``room`` unless the body ends before. Return the number of bytes. Raises CutOff."""
        if self._waits and not self._ahead:
            self._socket.sendall(self._h11.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        self._waits = False
        try:
            return self._read_chunks(room) if self._left is None else self._read_sized(room, self._left)
        except h11.RemoteProtocolError as error:
            raise CutOff(f"its chunks are none: {error}") from error
        except (TimeoutError, BlockingIOError) as error:
            raise CutOff(f"nothing came for {READ_S:g} s") from error
        except OSError as error:
            raise CutOff(str(error)) from error

    def _read_sized(self, room: memoryview, left: int) -> int:
        room = room[: min(room.nbytes, left)]
        done = min(len(self._ahead), room.nbytes)
        room[:done] = self._ahead[:done]
        del self._ahead[:done]
        while done < room.nbytes:
            count = receive_into(self._socket, room[done:])
            if not count:
                raise CutOff(f"{left - done} bytes did not come")
            done += count
        self._left = left - done
        self._ended = self._left == 0
        return done

    def _read_chunks(self, room: memoryview) -> int:
        done = 0
        while True:
            taken = min(len(self._ahead), room.nbytes - done)
            room[done : done + taken] = self._ahead[:taken]
            del self._ahead[:taken]
            done += taken
            if self._ended or done == room.nbytes:
                return done
            event = self._h11.next_event()
            if event is h11.NEED_DATA:
                self._h11.receive_data(self._socket.recv(_CHUNK_BYTES))
            elif isinstance(event, h11.Data):
                self._ahead += event.data
            else:
                self._ended = True

    def discard(self) -> None:
        """Read and drop the rest of the body, up to a limit: a client that is still sending does not read a reply.
        Raises CutOff."""
        if self._waits:
            return  # the client waits for 100 Continue, so no body is coming
        memory, read, deadline = memoryview(bytearray(1 << 20)), 0, time.monotonic() + HEAD_S
        while not self._ended and read < MOST_DISCARDED_BYTES and time.monotonic() < deadline:
            read += self.read_into(memory)


class Connection:
    """Answers the requests of one connection, one after the other."""

    def __init__(self, sock: socket.socket, peer: tuple[str, int], *, idle: Callable[[bool], None]) -> None:
        """``idle``: called with True when the connection begins to wait for a request, and with False when a whole head
        has come."""
        self._socket, self._peer, self._idle = sock, peer, idle
        self._ahead = b""
        if not isinstance(sock, ssl.SSLSocket):
            # Set the kernel's time-out instead of Python's. With Python's, recv returns as soon as any bytes are there.
            # With MSG_WAITALL, one call waits for all bytes and takes the GIL once instead of ten times.
            seconds, fraction = int(READ_S), int(READ_S % 1 * 1e6)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, fraction))

    def serve(self, handle: Handle, ends: Callable[[], bool]) -> None:
        """Answer requests until the caller disconnects or sends nothing, or ``ends`` returns True. ``handle`` may only
        raise CutOff."""
        try:
            while not ends() and self._answer_one(handle, ends):
                pass
        except (CutOff, OSError):
            return  # the client is gone

    def _answer_one(self, handle: Handle, ends: Callable[[], bool]) -> bool:
        """Return True if another request may follow."""
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        try:
            head = self._head(http)
        except h11.RemoteProtocolError as error:
            self._refuse(http, MalformedRequest(f"this is no HTTP request: {error}"), error.error_status_hint)
            return False
        if head is None:
            return False
        body = Body(http, head, self._socket)
        self._socket.settimeout(READ_S if isinstance(self._socket, ssl.SSLSocket) else None)
        reply = handle(Request(head, self._peer, body))
        if head.method == b"HEAD":
            reply = replace(reply, body=b"")
        goes_on = body.ended and not ends()
        self._send(http, reply, close=not goes_on)
        if not goes_on or http.our_state is h11.MUST_CLOSE:
            self._end(body)
            return False
        self._ahead = body.next_request
        return True

    def _head(self, http: h11.Connection) -> h11.Request | None:
        """Return the next head; None if the client disconnects or sends nothing."""
        self._idle(True)
        received, deadline = self._ahead, time.monotonic() + IDLE_S
        begun = False
        while True:
            if received:
                if not begun:
                    begun, deadline = True, time.monotonic() + HEAD_S
                http.receive_data(received)
                event = http.next_event()
                if isinstance(event, h11.Request):
                    self._idle(False)
                    return event
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            received = self._socket.recv(MAX_HEAD_BYTES)
            if not received:
                return None

    def _send(self, http: h11.Connection, reply: Reply, *, close: bool) -> None:
        headers = list(reply.headers)
        if reply.status != 204:  # 204 must not have a body or a Content-Length
            headers += [("Content-Length", str(len(reply.body))), ("Content-Type", "application/json")]
        if close:
            headers.append(("Connection", "close"))
        message = http.send(h11.Response(status_code=reply.status, headers=headers)) or b""
        message += http.send(h11.Data(data=reply.body)) or b""
        message += http.send(h11.EndOfMessage()) or b""
        self._socket.settimeout(READ_S)
        self._socket.sendall(message)

    def _refuse(self, http: h11.Connection, error: RolloutServiceError, status: int) -> None:
        self._send(http, Reply.of_error(error, status), close=True)

    def _end(self, body: Body) -> None:
        """Close such that the client can read the reply: data that arrives at a closed socket makes the kernel drop the
        reply."""
        self._socket.settimeout(HEAD_S)
        self._idle(True)
        if not isinstance(self._socket, ssl.SSLSocket):
            self._socket.shutdown(socket.SHUT_WR)
        body.discard()


def receive_into(sock: socket.socket, room: memoryview) -> int:
    """Receive into ``room`` until it is full. Return fewer bytes if the sender ends or times out."""
    if isinstance(sock, ssl.SSLSocket):
        return sock.recv_into(room)
    return sock.recv_into(room, 0, socket.MSG_WAITALL)
