"""Which failed attempts may be repeated, and after how long."""

import enum
import logging
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    before_sleep_log,
    stop_after_attempt,
    wait_exponential,
    wait_random_exponential,
)

from rollout_service.errors import CommitTimeout, NotReady, Overloaded, RolloutServiceError, from_wire
from rollout_service.tls import untrusted

logger = logging.getLogger("rollout_service.client")

RETRY_STATUS = frozenset({429, 502, 503, 504})
MAX_RETRY_AFTER_S = 60.0
"""A service that asks for more patience than this is asked again after this long all the same."""

_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError)
_MAYBE_RECEIVED = (*_BROKEN, httpx.TimeoutException)

_backoff = wait_exponential(multiplier=0.125, max=4) + wait_random_exponential(multiplier=0.125, max=4)
"""Half of it is certain, so that a number of retries is an outage that is surely outlived.

With all of it random, 12 retries waited 32 s on average, and less than 25 s in one of 7 requests. They now wait 32 s
at least, and 8 wait 16 s. Serve looks for a dead HTTP proxy every 10 s unless it is told otherwise, and then starts a
new one.
"""

Outcome = httpx.Response | BaseException
"""How one attempt ended."""


class Repeat(enum.Enum):
    """When a request may be sent again."""

    NEVER = enum.auto()
    IF_NOT_ACCEPTED = enum.auto()
    """Only if the service surely did not accept it: no connection, or a refusal that says when to come back."""
    IF_LOST = enum.auto()
    """Likewise, and if its answer is surely lost: a connection that broke, a proxy that lost the gateway. For rollouts:
    the service cancels those that nobody waits for. Not after a timeout: they may still be at work."""
    IDEMPOTENT = enum.auto()
    """After connection trouble of any kind and the statuses of ``RETRY_STATUS``."""
    IDEMPOTENT_ONCE_CONNECTED = enum.auto()
    """Likewise, but an address that takes no connection is given up at once."""


def may_retry(outcome: Outcome, repeat: Repeat) -> bool:
    """Whether another attempt can do no harm and may succeed."""
    if repeat is Repeat.NEVER:
        return False
    if isinstance(outcome, _NEVER_SENT):
        if untrusted(outcome) is not None:  # it will not be trusted next time either
            return False
        return repeat is not Repeat.IDEMPOTENT_ONCE_CONNECTED
    idempotent = repeat in (Repeat.IDEMPOTENT, Repeat.IDEMPOTENT_ONCE_CONNECTED)
    if not isinstance(outcome, httpx.Response):
        broken = _BROKEN if repeat is Repeat.IF_LOST else _MAYBE_RECEIVED
        return (idempotent or repeat is Repeat.IF_LOST) and isinstance(outcome, broken)
    if repeat is Repeat.IF_LOST and outcome.is_server_error and not _is_the_services_own(outcome):
        return True
    if outcome.status_code not in RETRY_STATUS:
        return False
    error = error_of(outcome)
    if idempotent:
        return not isinstance(error, CommitTimeout)  # the service has waited already
    return isinstance(error, Overloaded | NotReady) and "Retry-After" in outcome.headers


def error_of(response: httpx.Response) -> RolloutServiceError:
    """The error that a reply other than 2xx stands for; quotes a reply that is not the service's own."""
    try:
        body = response.json()
    except ValueError:
        body = response.text
    return from_wire(response.status_code, body)


def _is_the_services_own(response: httpx.Response) -> bool:
    # the class that stands for what no error of ours is
    return type(error_of(response)) is not RolloutServiceError


def retry_after_s(outcome: Outcome) -> float:
    """Seconds that the service asked to wait (``Retry-After``, a number or a date), 0 if it did not ask."""
    header = outcome.headers.get("Retry-After") if isinstance(outcome, httpx.Response) else None
    if header is None:
        return 0.0
    try:
        asked_s = float(header)
    except ValueError:
        asked_s = _seconds_until(header)
    return min(max(0.0, asked_s), MAX_RETRY_AFTER_S)


def retrying(repeat: Repeat, retries: int) -> AsyncRetrying:
    """Runs an attempt that returns a response, at most ``1 + retries`` times; ends with the last attempt's outcome."""
    return AsyncRetrying(
        stop=stop_after_attempt(1 + retries),
        retry=lambda state: may_retry(_outcome(state), repeat),
        wait=lambda state: retry_after_s(_outcome(state)) + _backoff(state),
        before_sleep=before_sleep_log(logger, logging.INFO),
        retry_error_callback=_last,
    )


def _outcome(state: RetryCallState) -> Outcome:
    assert state.outcome is not None, "asked before the first attempt ended"
    error = state.outcome.exception()
    return error if error is not None else state.outcome.result()


def _last(state: RetryCallState) -> httpx.Response:
    assert state.outcome is not None, "given up before the first attempt ended"
    response: httpx.Response = state.outcome.result()
    return response


def _seconds_until(http_date: str) -> float:
    try:
        date = parsedate_to_datetime(http_date)
    except ValueError:
        return 0.0
    return (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
