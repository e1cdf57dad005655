"""Calls from a replica to its engine's workers to stage a version, over one socket per worker.

They do not use vLLM's RPC, which an engine answers only between two steps. A step with prompts takes 0.1 s, and staging
would wait for three of them. Each message is one line of JSON.
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
"""The peer's process, user and group as reported by Linux (unix(7), SO_PEERCRED)."""


class StageCall(Frozen):
    """The version to read and check."""

    folder: str
    digest: str | None
    """Digest of the expected manifest. None: any."""


class StageAnswer(Frozen):
    """The result of a StageCall."""

    refused: str | None = None
    """The reason why the version is not in the staging buffer."""
    corrupt: tuple[str, dict[str, Any]] | None = None
    """Message and detail of a LogCorrupt."""
    failed: str | None = None
    """Any other error."""


class StagingServer(socketserver.ThreadingUnixStreamServer):
    """A worker's server. It answers in threads until the process ends or ``close`` is called."""

    daemon_threads = True
    block_on_close = False  # a thread may be waiting until a version is read

    def __init__(self, stage: Callable[[Path, str | None], StageAnswer]) -> None:
        """Start the server. ``stage`` reads and checks a version; several threads may call it for one replica."""
        self.stage = stage
        # an abstract name (unix(7)) leaves no file when the process is killed
        self.address = f"\0rollout-staging-{uuid.uuid4().hex}"
        super().__init__(self.address, _Handler)
        threading.Thread(target=self.serve_forever, name="staging-calls", daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self.shutdown()
        self.server_close()

    def verify_request(self, request: object, client_address: object) -> bool:
        """Return True if the peer is this user. Any user may connect to an abstract name."""
        assert isinstance(request, socket.socket)
        _, user, _ = _PEER.unpack(request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        return bool(user == os.geteuid())


class _Handler(socketserver.StreamRequestHandler):
    server: StagingServer

    def handle(self) -> None:
        if not (line := self.rfile.readline()):
            return
        try:
            call = StageCall.model_validate_json(line)
            answer = self.server.stage(Path(call.folder), call.digest)
        except Exception as error:  # sent to the replica, which raises it
            logger.exception("a version could not be staged")
            answer = StageAnswer(failed=f"{type(error).__name__}: {error}")
        try:
            self.wfile.write(answer.model_dump_json().encode() + b"\n")
        except OSError as error:
            logger.info("nobody waits any more for what was staged: %s", error)


async def stage_at(address: str, call: StageCall) -> StageAnswer:
    """Let the worker at ``address`` read and check a version. Raises OSError if the worker ends or has ended.

    After a cancellation the worker continues. The same call later does not read the version again.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # uvloop, which Ray Serve uses, cannot connect to an abstract name
        await asyncio.get_running_loop().sock_connect(connection, address)
        reader, writer = await asyncio.open_unix_connection(sock=connection)
    except BaseException:
        connection.close()
        raise
    try:
        writer.write(call.model_dump_json().encode() + b"\n")
        await writer.drain()
        line = await reader.read()  # up to the end, because a message may exceed asyncio's limit for a line
    finally:
        writer.close()
    if not line.endswith(b"\n"):
        raise ConnectionResetError("the worker ended while it staged a version")
    return StageAnswer.model_validate_json(line)
