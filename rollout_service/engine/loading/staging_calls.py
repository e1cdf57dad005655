"""How a replica has the workers of its engine stage a version: over a socket of each worker.

Not by vLLM's RPC, because an engine answers that between two of its steps, and a step that computes prompts takes a
tenth of a second: three of them passed before a version was known to be staged. A line of JSON each way.
"""

import asyncio
import logging
import os
import socket
import socketserver
import struct
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout_service.protocol.base import Frozen

logger = logging.getLogger(__name__)

_PEER = struct.Struct("3i")
"""What Linux tells of who has connected: its process, user and group (unix(7), SO_PEERCRED)."""


class StageCall(Frozen):
    """Which version to read and check."""

    folder: str
    digest: str | None
    """Of the manifest that is meant; None: whichever is there."""


class StageAnswer(Frozen):
    """What became of it."""

    refused: str | None = None
    """Why the version is not in the staging area."""
    corrupt: tuple[str, dict[str, Any]] | None = None
    """Message and detail of a LogCorrupt."""
    failed: str | None = None
    """What else ended it."""


class StagingServer:
    """A worker's: answers in threads of its own, until the process ends or ``close``."""

    def __init__(self, stage: Callable[[Path, str | None], StageAnswer]) -> None:
        """``stage``: reads and checks a version; called from several threads, by one replica."""
        # an abstract name (unix(7)): nothing of it is left when the process is killed
        self.address = f"\0rollout-staging-{uuid.uuid4().hex}"
        self._server = _Server(self.address, _Handler)
        self._server.stage = stage
        threading.Thread(target=self._server.serve_forever, name="staging-calls", daemon=True).start()

    def close(self) -> None:
        """Answer nothing more."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False  # a thread may be waiting for a version to be read
    stage: Callable[[Path, str | None], StageAnswer]

    def verify_request(self, request: object, client_address: object) -> bool:
        """Whether who has connected is this user: everyone may connect to an abstract name."""
        assert isinstance(request, socket.socket)
        _, user, _ = _PEER.unpack(request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        return bool(user == os.geteuid())


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        if not (line := self.rfile.readline()):
            return
        try:
            call = StageCall.model_validate_json(line)
            answer = self.server.stage(Path(call.folder), call.digest)
        except Exception as error:  # the replica is told, and raises it
            logger.exception("a version could not be staged")
            answer = StageAnswer(failed=f"{type(error).__name__}: {error}")
        try:
            self.wfile.write(answer.model_dump_json().encode() + b"\n")
        except OSError as error:
            logger.info("nobody waits any more for what was staged: %s", error)


async def staged_by(address: str, call: StageCall) -> StageAnswer:
    """Have the worker at that address read and check a version. Raises OSError if it ends meanwhile, or has ended.

    Whoever is cancelled leaves the worker to it: the same call afterwards does not have it read again.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # uvloop, on which Ray Serve runs replicas, connects to no abstract name
        await asyncio.get_running_loop().sock_connect(connection, address)
        reader, writer = await asyncio.open_unix_connection(sock=connection)
    except BaseException:
        connection.close()
        raise
    try:
        writer.write(call.model_dump_json().encode() + b"\n")
        await writer.drain()
        line = await reader.read()  # to the end: a message may be longer than what asyncio takes for a line
    finally:
        writer.close()
    if not line.endswith(b"\n"):
        raise ConnectionResetError("the worker ended while it staged a version")
    return StageAnswer.model_validate_json(line)
