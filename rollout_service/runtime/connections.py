"""Many HTTP connections to one service, at low cost."""

import asyncio
import errno
import functools
import logging
import os
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx

logger = logging.getLogger(__name__)

KEEPALIVE_S = 10.0
"""Time in seconds after which idle connections close: earlier than the server's side (Serve: 90 s), so that none breaks
while a request is sent."""

OTHER_FILES = 256
"""Number of open files left for the rest of a process."""
SERVED_FILES = 65536
"""Number of open files of a process that answers HTTP: one for each connection. Ray raises a driver's limit to it, but
processes of ``ray start`` have the shell's."""
_OPEN_FILES = Path("/proc/self/fd")


def affordable_connections(wanted: int) -> int:
    """Return the number of connections that this process can open, ``wanted`` at most.

    Raises the process's soft limit of open files towards its hard limit if necessary.
    """
    others = OTHER_FILES + (len(os.listdir(_OPEN_FILES)) if _OPEN_FILES.exists() else 0)
    needed = others + wanted
    soft = raise_open_files(needed)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    affordable = max(1, soft - others)
    logger.warning(
        "%d connections are opened at most instead of %d, and other requests wait for one of them: this process may "
        "have %d open files; raise the hard limit (ulimit -Hn) for more",
        affordable,
        wanted,
        soft,
    )
    return affordable


def raise_open_files(wanted: int) -> int:
    """Raise this process's soft limit of open files to ``wanted``, or as far as the hard limit allows. Return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def too_many_open_files(error: BaseException | None) -> str | None:
    """Return advice if ``error`` was caused by the limit of open files, else None."""
    causes = [error]
    while causes:
        cause = causes.pop()
        if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return (
                f"{os.strerror(cause.errno)}: this process may have {soft}; raise ulimit -n, or lower max_connections"
            )
        if cause is not None:
            causes += [cause.__cause__ or cause.__context__]
            causes += cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()
    return None


class ManyConnections(httpx.AsyncBaseTransport):
    """A transport with at most ``max_connections`` at once, the last used one first; further requests wait their turn.

    Each connection has its own httpx transport. A shared transport would search all its connections for every request,
    and again for every idle one. At a thousand connections, that would cost the client more than a generation does.
    """

    def __init__(self, max_connections: int, tls: ssl.SSLContext | None = None) -> None:
        """``tls``: trusted certificates; None: those of this machine's authorities."""
        if max_connections < 1:
            raise ValueError(f"max_connections={max_connections}: at least one connection is needed")
        self._given_tls = tls
        self._free = asyncio.Semaphore(max_connections)
        self._all: list[httpx.AsyncHTTPTransport] = []
        self._idle: list[httpx.AsyncHTTPTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send over an idle connection or a new one. It becomes idle when the reply was read to its end and closed.

        If the process may open no more files, waits for one of the connections that there are.
        """
        while True:
            await self._free.acquire()
            transport = self._idle.pop() if self._idle else self._open()
            try:
                response = await transport.handle_async_request(request)
                break
            except BaseException as error:
                cannot_open = isinstance(error, httpx.ConnectError) and too_many_open_files(error) is not None
                if cannot_open and len(self._all) > 1:
                    self._all.remove(transport)  # its place in ``_free`` is gone for good, too
                    await transport.aclose()
                    continue
                await self._give_back(transport, False)
                raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Stream(response.stream, functools.partial(self._give_back, transport))
        return response

    async def aclose(self) -> None:
        """Close all connections."""
        for transport in list(self._all):  # requests that fail because of this remove their own transport meanwhile
            await transport.aclose()

    def _open(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEEPALIVE_S)
        tls = self._given_tls or _tls()
        transport = httpx.AsyncHTTPTransport(verify=tls, limits=limits, socket_options=_tcp_keepalive())
        self._all.append(transport)
        return transport

    async def _give_back(self, transport: httpx.AsyncHTTPTransport, ended_well: bool) -> None:
        self._free.release()
        if ended_well:
            self._idle.append(transport)
            return
        # httpcore 1.0.9 may consider a connection busy forever if its request was cancelled at the wrong moment (its
        # issue 1093). The next request on it would wait forever, so no connection is reused after a failed request.
        self._all.remove(transport)
        await transport.aclose()


class _Stream(httpx.AsyncByteStream):
    """A reply's bytes. When it is closed, calls ``give_back`` once, with True if all bytes were read."""

    def __init__(self, stream: httpx.AsyncByteStream, give_back: Callable[[bool], Awaitable[None]]) -> None:
        self._stream, self._give_back = stream, give_back
        self._read = self._closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            yield chunk
        self._read = True

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        ended_well = False
        try:
            await self._stream.aclose()
            ended_well = self._read
        finally:
            await self._give_back(ended_well)


@functools.cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()


@functools.cache
def _tcp_keepalive() -> tuple[tuple[int, int, int], ...]:
    # a generation may take hours without a byte on the wire: only probes distinguish it from a dead host
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # macOS lacks some of them
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return tuple(options)
