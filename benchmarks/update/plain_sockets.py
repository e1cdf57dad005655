"""The limit of a push: its bytes through plain sockets, neither hashed nor kept."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

PIECE_BYTES = 16 << 20
"""What one connection sends, and receives, at once: the size of a part."""


def receive_for_ever(listener: socket.socket) -> None:
    """Take connections, each in a thread of its own: all of its bytes into the same memory, then one byte back."""
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_receive, args=(connection,), daemon=True).start()


def _receive(connection: socket.socket) -> None:
    memory = bytearray(PIECE_BYTES)
    with connection:
        while connection.recv_into(memory, 0, socket.MSG_WAITALL):
            pass
        connection.sendall(b".")


def send(address: tuple[str, int], stream: memoryview, connections: int) -> None:
    """Send a stream in pieces over so many connections; returns when the receiver has all of them. Raises OSError."""
    pieces = _Shared(stream[start : start + PIECE_BYTES] for start in range(0, stream.nbytes, PIECE_BYTES))

    def run() -> None:
        with socket.create_connection(address) as connection:
            connection.settimeout(None)
            for piece in pieces:
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
            if not connection.recv(1):
                raise ConnectionError("the receiver has gone")

    with ThreadPoolExecutor(connections) as pool:
        for done in [pool.submit(run) for _ in range(connections)]:
            done.result()


class _Shared:
    """An iterator that threads take from in turns."""

    def __init__(self, items: Iterator[memoryview]) -> None:
        self._items, self._lock = items, threading.Lock()

    def __iter__(self) -> "_Shared":
        return self

    def __next__(self) -> memoryview:
        with self._lock:
            return next(self._items)
