"""One connection pool to the service, with bearer token, retries and the service's error classes."""

import asyncio
import functools
import ssl
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from typing import TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from rollout_service.client._retry import Repeat, error_of, retrying
from rollout_service.errors import RolloutServiceError
from rollout_service.protocol.base import is_token
from rollout_service.runtime.connections import ManyConnections, too_many_open_files
from rollout_service.runtime.tls import certificate_error

CONNECT_S = 10.0
WRITE_S = 60.0

Model = TypeVar("Model")


class Http:
    """Sends requests to one service. Bound to the event loop of its first use.

    Raises the RolloutServiceError of a reply other than 2xx, or ``httpx.TransportError`` for a failed connection.
    Cancelling a request closes its connection, which tells the service.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        retries: int,
        max_connections: int,
        read_timeout_s: float | None,
        transport: httpx.AsyncBaseTransport | None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Create the pool. ``tls``: the trusted certificates. None: the CAs of this machine."""
        self.url = _checked_url(url)
        if token and not is_token(token):
            raise ValueError("the token is not one word of printable ASCII, as HTTP headers need: send the token alone")
        self.retries = retries
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=http_timeout(read_timeout_s),
            transport=transport or ManyConnections(max_connections, tls),
        )

    async def send(
        self,
        method: str,
        url: str,
        *,
        repeat: Repeat,
        timeout: httpx.Timeout | None = None,
        params: Mapping[str, str] | None = None,
        json: object = None,
        content: AsyncIterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """Send a request and return its 2xx reply.

        Args:
            url: relative to the service's address, or absolute.
            timeout: None: the timeout of the pool.
            content: iterated again by each attempt.
        """
        self._bind_to_running_loop()
        attempt = functools.partial(
            self._client.request,
            method,
            url,
            params=params,
            json=json,
            content=content,
            headers=headers,
            timeout=timeout or httpx.USE_CLIENT_DEFAULT,
        )
        return await self._answer(attempt, method, url, repeat)

    async def open_stream(self, method: str, url: str, *, repeat: Repeat, json: object) -> httpx.Response:
        """Send a request and return a 2xx reply whose body is unread. The caller must close it."""
        self._bind_to_running_loop()

        async def attempt() -> httpx.Response:
            response = await self._client.send(self._client.build_request(method, url, json=json), stream=True)
            if not response.is_success:
                await response.aread()
            return response

        return await self._answer(attempt, method, url, repeat)

    async def _answer(
        self, attempt: Callable[[], Awaitable[httpx.Response]], method: str, url: str, repeat: Repeat
    ) -> httpx.Response:
        """Attempt the request as often as ``repeat`` allows, and return the 2xx reply."""
        try:
            response: httpx.Response = await retrying(repeat, self.retries)(attempt)
        except httpx.TransportError as error:
            error.add_note(_explain(error, method, url, self.url, repeat))
            raise
        if not response.is_success:
            raise error_of(response)
        return response

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    def _bind_to_running_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise RuntimeError(
                "this client was used in another event loop before, and its connections belong to that one: make a "
                "RolloutClient inside each asyncio.run(), or use SyncRolloutClient"
            )


def http_timeout(read_s: float | None) -> httpx.Timeout:
    """Return timeouts for a request; ``read_s`` is the maximum silence of the service in seconds (None: no limit)."""
    return httpx.Timeout(connect=CONNECT_S, read=read_s, write=WRITE_S, pool=None)


def parse(kind: type[Model], response: httpx.Response) -> Model:
    """Parse a reply's JSON as ``kind``. Raises RolloutServiceError if it does not match."""
    try:
        return TypeAdapter(kind).validate_json(response.content)
    except ValidationError as error:
        raise RolloutServiceError(
            f"{response.request.method} {response.request.url} answered {response.status_code} with a body that "
            f"this client cannot read: {error}; install the client of the service's release",
            {"status": response.status_code},
        ) from error


def _checked_url(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"url={url!r} is not the address of a service: write it like http://127.0.0.1:8000")
    return url.rstrip("/")


def _explain(error: httpx.TransportError, method: str, url: str, service: str, repeat: Repeat) -> str:
    where = f"{method} {url} at {service}"
    if (why := certificate_error(error)) is not None:
        return f"{where}: {why.verify_message}. If its certificate is not signed for this machine, give ca_file."
    if (limit := too_many_open_files(error)) is not None:
        return f"{where}: {limit}."
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"{where}: no connection. Is the service running there, and is the address right?"
    if repeat is Repeat.IF_NOT_ACCEPTED:
        return f"{where}: the service may have accepted the request before the connection failed: it was not repeated."
    return f"{where}: the connection kept failing."
