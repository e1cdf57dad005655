"""One connection pool to the service: bearer token, repetition of failed attempts, and the service's error classes."""

import asyncio
import enum
import logging
import ssl
from collections.abc import AsyncIterable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    before_sleep_log,
    stop_after_attempt,
    wait_exponential,
    wait_random_exponential,
)

from rollout_service.errors import CommitTimeout, InvalidRequest, NotReady, Overloaded, RolloutServiceError, from_wire
from rollout_service.protocol.base import is_token, wrong_fields
from rollout_service.runtime.connections import ManyConnections, too_many_open_files
from rollout_service.runtime.tls import certificate_error

logger = logging.getLogger("rollout_service.client")

CONNECT_S = 10.0
WRITE_S = 60.0
RETRY_STATUS = frozenset({429, 502, 503, 504})
COMMIT_GRACE_S = 120.0
"""Extra seconds for a commit, which converts and syncs the rest before it starts to wait for replicas."""
MAX_RETRY_AFTER_S = 60.0
"""Maximum wait in seconds, even if the service asks for a longer one."""

_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError)
_MAYBE_RECEIVED = (*_BROKEN, httpx.TimeoutException)

_backoff = wait_exponential(multiplier=0.125, max=4) + wait_random_exponential(multiplier=0.125, max=4)
"""Exponential backoff with jitter. Half of the wait is fixed, so that the number of retries guarantees a minimum total.

The minimum is 16 s for 8 retries and 32 s for 12. With jitter alone, 12 retries waited 32 s on average, but less than
25 s in one of 7 requests. Serve checks for a dead HTTP proxy every 10 s by default, and then starts a new one.
"""

Model = TypeVar("Model")
Body = TypeVar("Body", bound=BaseModel)


class Repeat(enum.Enum):
    """The condition under which a request may be sent again."""

    NEVER = enum.auto()
    IF_NOT_ACCEPTED = enum.auto()
    """Only if the service certainly did not accept the request: no connection, or a refusal with ``Retry-After``."""
    IF_LOST = enum.auto()
    """Also if the answer is certainly lost: a broken connection, or a proxy that lost the gateway. Used for rollouts,
    because the service cancels a rollout without a client. Not after a timeout: the rollout may still be running."""
    IDEMPOTENT = enum.auto()
    """After any connection error and after the statuses of ``RETRY_STATUS``."""
    IDEMPOTENT_ONCE_CONNECTED = enum.auto()
    """Like ``IDEMPOTENT``, but never after a failed connection attempt."""


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
        content: AsyncIterable[bytes] | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        stream: bool = False,
    ) -> httpx.Response:
        """Send a request and return its 2xx reply, or the 404 of a repeated DELETE.

        Args:
            url: relative to the service's address, or absolute.
            timeout: None: the timeout of the pool.
            content: iterated again by each attempt.
            stream: True to return the reply before its body is read. The caller must close it.
        """
        self._bind_to_running_loop()

        async def attempt() -> httpx.Response:
            request = self._client.build_request(
                method,
                url,
                params=params,
                json=json,
                content=content,
                headers=headers,
                timeout=timeout or httpx.USE_CLIENT_DEFAULT,
            )
            response = await self._client.send(request, stream=stream)
            if not response.is_success:
                try:
                    await response.aread()
                finally:  # httpx keeps the connection of a streamed reply that breaks off
                    await response.aclose()
            return response

        attempts = retrying(repeat, self.retries)
        try:
            response: httpx.Response = await attempts(attempt)
        except httpx.TransportError as error:
            error.args = (_explain(error, method, url, self.url, repeat),)
            raise
        # a process that died, or a gateway that ended, may have done what it answered with 503
        is_deleted = method == "DELETE" and response.status_code == 404 and attempts.statistics["attempt_number"] > 1
        if not response.is_success and not is_deleted:
            raise error_of(response)
        return response

    async def read(self, kind: type[Model], url: str, params: Mapping[str, str] | None = None) -> Model:
        """Return the reply to a GET as ``kind``. Raises RolloutServiceError if the reply does not match."""
        return parse(kind, await self.send("GET", url, params=params, repeat=Repeat.IDEMPOTENT))

    async def commit(
        self, kind: type[Model], route: str, body: Mapping[str, object], *, timeout_s: float, what: str, instead: str
    ) -> Model:
        """Post a request that the service answers once replicas have loaded a version. Return the reply as ``kind``.

        Raises CommitTimeout if no attempt is answered within ``timeout_s`` and ``COMMIT_GRACE_S``.

        Args:
            timeout_s: the maximum wait of the service itself, in seconds.
            what: the request, for the error.
            instead: the advice of the error.
        """
        limit_s = timeout_s + COMMIT_GRACE_S
        try:
            async with asyncio.timeout(limit_s):
                reply = await self.send("POST", route, json=body, repeat=Repeat.IDEMPOTENT, timeout=http_timeout(None))
        except TimeoutError:
            raise CommitTimeout(f"the service has not answered {what} within {limit_s:g} s: {instead}") from None
        return parse(kind, reply)

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


def request_body(kind: type[Body], **fields: object) -> Body:
    """Return a request's body. Raises InvalidRequest, as the service would."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequest(f"{kind.__name__} is refused: {wrong_fields(error)}") from error


def parse(kind: type[Model], response: httpx.Response) -> Model:
    """Parse a reply's JSON as ``kind``, without fields of a newer service. Raises RolloutServiceError otherwise."""
    try:
        return TypeAdapter(kind).validate_json(response.content, extra="ignore")
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
    is_port = parsed.port is None or 0 < parsed.port <= 65535
    if parsed.scheme not in ("http", "https") or not parsed.host or not is_port:
        raise ValueError(f"url={url!r} is not the address of a service: write it like http://127.0.0.1:8000")
    return url.rstrip("/")


def _explain(error: httpx.TransportError, method: str, url: str, service: str, repeat: Repeat) -> str:
    where = f"{method} {url}" if url.startswith("http") else f"{method} {url} at {service}"
    if (why := certificate_error(error)) is not None:
        return f"{where}: {why.verify_message}. If its certificate is not signed for this machine, give ca_file."
    if (limit := too_many_open_files(error)) is not None:
        return f"{where}: {limit}."
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"{where}: no connection ({_named(error)}). Is the service running there, and is the address right?"
    if isinstance(error, httpx.ReadTimeout) and repeat is Repeat.IF_LOST:
        return f"{where}: no answer in time. It was not repeated, as the rollout may be running still: raise timeout_s."
    if not may_retry(error, repeat):
        lost = "the service may have accepted the request before the connection failed"
        return f"{where}: {lost} ({_named(error)}): it was not repeated."
    return f"{where}: the connection kept failing ({_named(error)})."


def _named(error: Exception) -> str:
    """Return the message of an error; timeouts have none."""
    return str(error) or type(error).__name__


def may_retry(outcome: httpx.Response | BaseException, repeat: Repeat) -> bool:
    """Return True if another attempt is safe and may succeed."""
    if repeat is Repeat.NEVER:
        return False
    if isinstance(outcome, _NEVER_SENT):
        if certificate_error(outcome) is not None:  # the certificate will not be trusted next time either
            return False
        return repeat is not Repeat.IDEMPOTENT_ONCE_CONNECTED
    idempotent = repeat in (Repeat.IDEMPOTENT, Repeat.IDEMPOTENT_ONCE_CONNECTED)
    if not isinstance(outcome, httpx.Response):
        broken = _BROKEN if repeat is Repeat.IF_LOST else _MAYBE_RECEIVED
        return (idempotent or repeat is Repeat.IF_LOST) and isinstance(outcome, broken)
    if outcome.is_success:
        return False
    error = error_of(outcome)
    # this class itself stands for any reply that is no error of ours
    if repeat is Repeat.IF_LOST and outcome.is_server_error and type(error) is RolloutServiceError:
        return True
    if outcome.status_code not in RETRY_STATUS:
        return False
    if idempotent:
        return not isinstance(error, CommitTimeout)  # the service has waited already
    return isinstance(error, Overloaded | NotReady) and "Retry-After" in outcome.headers


def error_of(response: httpx.Response) -> RolloutServiceError:
    """Return the error of a reply other than 2xx. A reply that did not come from the service is quoted."""
    try:
        body = response.json()
    except ValueError:
        body = response.text
    return from_wire(response.status_code, body)


def retry_after_s(outcome: httpx.Response | BaseException) -> float:
    """Return the seconds in ``Retry-After`` (a number or a date), or 0 without that header."""
    header = outcome.headers.get("Retry-After") if isinstance(outcome, httpx.Response) else None
    if header is None:
        return 0.0
    try:
        asked_s = float(header)
    except ValueError:
        try:
            date = parsedate_to_datetime(header)
        except ValueError:
            return 0.0
        asked_s = (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(max(0.0, asked_s), MAX_RETRY_AFTER_S)


def retrying(repeat: Repeat, retries: int) -> AsyncRetrying:
    """Return a runner that makes at most ``1 + retries`` attempts and ends with the outcome of the last."""
    return AsyncRetrying(
        stop=stop_after_attempt(1 + retries),
        retry=lambda state: may_retry(_outcome(state), repeat),
        wait=lambda state: retry_after_s(_outcome(state)) + _backoff(state),
        before_sleep=before_sleep_log(logger, logging.INFO),
        retry_error_callback=lambda state: state.outcome and state.outcome.result(),
    )


def _outcome(state: RetryCallState) -> httpx.Response | BaseException:
    assert state.outcome is not None, "asked before the first attempt ended"
    error = state.outcome.exception()
    return error if error is not None else state.outcome.result()
