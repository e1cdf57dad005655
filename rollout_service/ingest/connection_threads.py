"""A listening socket with one thread for each connection, up to a maximum number."""

import errno
import logging
import select
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress

from rollout_service.ingest.blocking_http import HEAD_S, Connection, Handle

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 64
"""Maximum number of connections. For a further one, the connection that has been idle longest is closed. If all are
busy, the new one waits until one ends."""
_NO_MEANS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_RETRY_S = 1.0
_LOOK_AGAIN_S = 0.1


class ConnectionThreads:
    """Serves connections until it is stopped. Its methods are not thread-safe."""

    def __init__(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
        handle: Handle,
        most: int = MOST_CONNECTIONS,
    ) -> None:
        """``listener``: a bound socket, closed by ``stop``. ``handle``: answers one request; called in the threads."""
        self._listener, self._tls, self._handle, self._most = listener, tls, handle, most
        self._open: dict[socket.socket, threading.Thread] = {}
        self._idle: dict[socket.socket, None] = {}
        """Connections that wait for their clients, the longest first: for a handshake, a whole head, or the rest of a
        refused body."""
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name="upload-accept", daemon=True)
        self.failure: OSError | None = None
        """The error that ended it, unless it was stopped."""

    def start(self) -> None:
        """Start to accept connections."""
        self._listener.listen(128)
        self._acceptor.start()

    @property
    def serves(self) -> bool:
        """Return True while it accepts connections."""
        return self._acceptor.is_alive() and not self._stopping.is_set()

    def stop(self, grace_s: float) -> None:
        """Stop accepting connections, give running requests ``grace_s`` seconds, and end every thread. Blocks."""
        self._stopping.set()
        if self._acceptor.is_alive():
            _shut(self._listener)
            with self._changed:
                self._changed.notify_all()
            self._acceptor.join()
        self._listener.close()
        with self._changed:
            for idle in self._idle:
                _shut(idle)
            self._changed.wait_for(lambda: not self._open, timeout=grace_s)
            for connection in self._open:
                _shut(connection)
            threads = list(self._open.values())
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if error.errno in _NO_MEANS:
                    logger.error("no connection can be taken now: %s", error)
                    self._stopping.wait(_RETRY_S)
                elif error.errno != errno.ECONNABORTED and not self._stopping.is_set():
                    self.failure = error
                    return
                continue
            self._begin(connection, (str(peer[0]), int(peer[1])))

    def _begin(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        with self._changed:
            ending: socket.socket | None = None
            while len(self._open) >= self._most and not self._stopping.is_set():
                if ending not in self._open:  # or each wake-up would close one more before the first one is gone
                    ending = next((idle for idle in self._idle if not _has_come(idle)), None)
                    if ending is not None:
                        del self._idle[ending]
                        _shut(ending)
                # the received bytes may be an incomplete head; then nothing signals that the connection has become
                # idle, so poll
                self._changed.wait(None if ending in self._open else _LOOK_AGAIN_S)
            if self._stopping.is_set():
                connection.close()
                return
            thread = threading.Thread(target=self._serve, args=(connection, peer), name="upload", daemon=True)
            self._open[connection] = thread
            thread.start()

    def _serve(self, plain: socket.socket, peer: tuple[str, int]) -> None:
        connection = plain
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                plain.settimeout(HEAD_S)
                connection = encrypted = self._tls.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
                self._replace(plain, encrypted)
                self._idle_of(encrypted)(True)
                encrypted.do_handshake()
            Connection(connection, peer, idle=self._idle_of(connection)).serve(self._handle, self._stopping.is_set)
        except OSError as error:  # the handshake failed
            logger.info("a connection from %s was given up: %s", peer[0], error)
        finally:
            connection.close()
            with self._changed:
                self._open.pop(connection, None)
                self._idle.pop(connection, None)
                self._changed.notify_all()

    def _replace(self, plain: socket.socket, encrypted: ssl.SSLSocket) -> None:
        with self._changed:
            self._open[encrypted] = self._open.pop(plain)

    def _idle_of(self, connection: socket.socket) -> Callable[[bool], None]:
        def note(idle: bool) -> None:
            with self._changed:
                if not idle:
                    self._idle.pop(connection, None)
                elif self._stopping.is_set():
                    _shut(connection)
                else:
                    self._idle[connection] = None
                    self._changed.notify_all()  # ``_begin`` may wait for a connection that can be closed

        return note


def _has_come(connection: socket.socket) -> bool:
    """Return True if there is data to read."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _shut(connection: socket.socket) -> None:
    """Wake the thread that waits for this connection; that thread closes it."""
    with suppress(OSError):  # the peer has disconnected already
        # not the method of SSLSocket, which would continue in plain text
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
