"""PUT requests with bodies of many megabytes, by threads, over the standard library's HTTP client.

The body goes to the socket without copies. Errors and replies are httpx's, so that the rules of ``_retry`` apply to all
requests of a client.
"""

import http.client
import select
import socket
import ssl
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

import httpx

from rollout_service.client._http import CONNECT_S, WRITE_S

_LARGEST_REPLY_BYTES = 1 << 20


class PlainConnections:
    """A pool of connections to one address. One thread at a time uses a connection, which stays open until
    ``close``."""

    def __init__(self, url: str, tls: ssl.SSLContext, read_s: float) -> None:
        """Create the pool. ``tls``: the trust settings for an https ``url``. ``read_s``: maximum wait for a reply in
        seconds."""
        self._url, self._tls, self._read_s = httpx.URL(url), tls, read_s
        self._lock = threading.Lock()
        self._all: set[http.client.HTTPConnection] = set()
        self._idle: list[http.client.HTTPConnection] = []
        self._closed = False

    def put(self, route: str, body: Sequence[memoryview], headers: Mapping[str, str]) -> httpx.Response:
        """Send a body, piece by piece, and return the reply with any status.

        Raises ``httpx.TransportError``.
        """
        connection = self._taken()
        request = httpx.Request("PUT", str(self._url) + route)
        try:
            response = self._exchange(connection, request, body, headers)
        except BaseException:
            self._drop(connection)
            raise
        with self._lock:
            if connection.sock is not None and not self._closed:
                self._idle.append(connection)
                return response
        self._drop(connection)
        return response

    def close(self) -> None:
        """Abort all running requests, which then raise ``httpx.TransportError``. Thread-safe."""
        with self._lock:
            self._closed = True
            for connection in self._all:
                _shut(connection)
            idle, self._idle = self._idle, []
        for connection in idle:
            self._drop(connection)

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        request: httpx.Request,
        body: Sequence[memoryview],
        headers: Mapping[str, str],
    ) -> httpx.Response:
        if connection.sock is None:
            self._connect(connection, request)
        try:
            path = request.url.raw_path.decode("ascii")
            length = str(sum(piece.nbytes for piece in body))
            try:
                connection.request("PUT", path, body, {**headers, "Content-Length": length})
            except (BrokenPipeError, ConnectionResetError) as error:
                sent: Exception | None = error  # the server may have replied before it closed the connection
            else:
                sent = None
            try:
                reply = connection.getresponse()
                content = reply.read(_LARGEST_REPLY_BYTES)
                if reply.length:  # ``read`` with a size does not raise for a truncated body
                    raise http.client.IncompleteRead(content, reply.length)
            except (OSError, http.client.HTTPException):
                if sent is not None:
                    raise sent from None
                raise
        except (TimeoutError, BlockingIOError) as error:
            raise httpx.ReadTimeout(f"no answer for {self._read_s:g} s", request=request) from error
        except (OSError, http.client.HTTPException) as error:
            raise httpx.ReadError(f"the connection broke: {error!r}", request=request) from error
        return httpx.Response(reply.status, headers=reply.getheaders(), content=content, request=request)

    def _connect(self, connection: http.client.HTTPConnection, request: httpx.Request) -> None:
        try:
            connection.connect()
        except TimeoutError as error:
            raise httpx.ConnectTimeout(str(error), request=request) from error
        except OSError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        if isinstance(connection, http.client.HTTPSConnection):
            connection.sock.settimeout(self._read_s)
        else:
            # kernel timeouts instead of Python's: with those, sending a body takes the GIL once for each piece of free
            # buffer space
            connection.sock.settimeout(None)
            for option, seconds in ((socket.SO_SNDTIMEO, WRITE_S), (socket.SO_RCVTIMEO, self._read_s)):
                connection.sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))
        with self._lock:
            if self._closed:
                raise httpx.ConnectError("the push has ended", request=request)

    def _taken(self) -> http.client.HTTPConnection:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else self._new()
            if connection.sock is None or not _has_ended(connection.sock):
                return connection
            self._drop(connection)

    def _new(self) -> http.client.HTTPConnection:
        host, port = self._url.host, self._url.port
        connection: http.client.HTTPConnection
        if self._url.scheme == "https":
            connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_S, context=self._tls)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=CONNECT_S)
        self._all.add(connection)
        return connection

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._all.discard(connection)
        connection.close()


def _has_ended(sock: socket.socket) -> bool:
    """Return True if the peer has closed an idle connection."""
    poll = select.poll()  # not MSG_DONTWAIT: Python itself waits first on a socket with a timeout
    poll.register(sock, select.POLLIN)
    if not poll.poll(0):
        return False
    try:
        came = socket.socket.recv(sock, 1, socket.MSG_PEEK)  # an SSL socket's own ``recv`` accepts no flags
    except OSError:
        return True
    return not came or not isinstance(sock, ssl.SSLSocket)  # a TLS server sends session tickets unasked


def _shut(connection: http.client.HTTPConnection) -> None:
    with suppress(OSError, AttributeError):  # the socket is closed, or still being created
        socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)
