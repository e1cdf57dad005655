"""rLLM's model gateway in front of the service, in a process of its own.

python -m tests.clients.rllm_gateway REPLIES URL
"""

import asyncio
import socket
import sys
from typing import Any

import uvicorn
from rllm_model_gateway import AsyncGatewayClient, GatewayConfig, WorkerConfig, create_app

from tests.clients.lines import answer


class Gateway:
    """Its server, on any port that is free, and its own client."""

    def __init__(self, worker: str) -> None:
        config = GatewayConfig(workers=[WorkerConfig(url=worker)], store_worker="memory", strip_vllm_fields=False)
        self._server = uvicorn.Server(uvicorn.Config(create_app(config), log_level="warning"))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Its address."""
        self._serving = asyncio.create_task(self._server.serve([self._listener]))
        return self._url

    async def traces(self, session_id: str) -> list[dict[str, Any]]:
        """Of a session, once all are kept."""
        async with AsyncGatewayClient(self._url) as client:
            await client.flush()
            return [trace.model_dump() for trace in await client.get_session_traces(session_id)]


if __name__ == "__main__":
    answer(sys.argv[1], {"gateway": Gateway(sys.argv[2])})
