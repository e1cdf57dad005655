"""One pool of connections to the service: bearer token, retries, errors of the service's own classes."""

import asyncio
import functools
import ssl
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from typing import TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from rollout_service.client._retry import Repeat, error_of, retrying
from rollout_service.connections import ManyConnections, too_many_open_files
from rollout_service.errors import RolloutServiceError
from rollout_service.tls import untrusted

CONNECT_S = 10.0
WRITE_S = 60.0

Model = TypeVar("Model")


class Http:
    """Sends requests to one service; bound to the event loop that it is first used in.

    A reply other than 2xx is raised as the RolloutServiceError that it stands for, a failed connection as
    ``httpx.TransportError``. Cancelling a request closes its connection, by which the service knows.
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
        """``tls``: whom to trust; None: who is signed by an authority of this machine."""
        self.url = _checked_url(url)
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
        """Send and return a 2xx reply.

        ``url`` is relative to the service's unless it is absolute. ``timeout`` is the pool's unless it is given.
        ``content`` is iterated anew by each attempt.
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
        """Send, and return a 2xx reply whose body is still to be read. It is the caller's to close."""
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
        """The 2xx reply of an attempt, of as many as ``repeat`` allows."""
        try:
            response: httpx.Response = await retrying(repeat, self.retries)(attempt)
        except httpx.TransportError as error:
            error.add_note(_explain(error, method, url, self.url, repeat))
            raise
        if not response.is_success:
            raise error_of(response)
        return response

    async def aclose(self) -> None:
        """Close every connection."""
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
    """At most ``read_s`` seconds of silence from the service (None: any), while a request waits for its reply."""
    return httpx.Timeout(connect=CONNECT_S, read=read_s, write=WRITE_S, pool=None)


def parse(kind: type[Model], response: httpx.Response) -> Model:
    """Read a reply's JSON as ``kind``. Raises RolloutServiceError if it is something else."""
    try:
        return TypeAdapter(kind).validate_json(response.content)
    except ValidationError as error:
        raise RolloutServiceError(
            f"{response.request.method} {response.request.url} answered {response.status_code} with something this "
            f"client does not understand (another version of the service?): {error}",
            {"status": response.status_code},
        ) from error


def _checked_url(url: str) -> str:
    parsed = httpx.URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"url={url!r} is not the address of a service: write it like http://127.0.0.1:8000")
    return url.rstrip("/")


def _explain(error: httpx.TransportError, method: str, url: str, service: str, repeat: Repeat) -> str:
    where = f"{method} {url} at {service}"
    if (why := untrusted(error)) is not None:
        return f"{where}: {why.verify_message}. If its certificate is not signed for this machine, give ca_file."
    if (limit := too_many_open_files(error)) is not None:
        return f"{where}: {limit}."
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"{where}: no connection. Is the service running there, and is the address right?"
    if repeat is Repeat.IF_NOT_ACCEPTED:
        return f"{where}: the service may have accepted the request before the connection failed: it was not repeated."
    return f"{where}: the connection kept failing."
