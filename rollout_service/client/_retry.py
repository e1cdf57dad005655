"""Rules for repeating failed attempts, and the wait between attempts."""

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
from rollout_service.runtime.tls import certificate_error

logger = logging.getLogger("rollout_service.client")

RETRY_STATUS = frozenset({429, 502, 503, 504})
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

Outcome = httpx.Response | BaseException
"""The response or the error of one attempt."""


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


def may_retry(outcome: Outcome, repeat: Repeat) -> bool:
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
    if repeat is Repeat.IF_LOST and outcome.is_server_error and not _is_the_services_own(outcome):
        return True
    if outcome.status_code not in RETRY_STATUS:
        return False
    error = error_of(outcome)
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


def _is_the_services_own(response: httpx.Response) -> bool:
    # this class stands for any reply that is no error of ours
    return type(error_of(response)) is not RolloutServiceError


def retry_after_s(outcome: Outcome) -> float:
    """Return the seconds in ``Retry-After`` (a number or a date), or 0 without that header."""
    header = outcome.headers.get("Retry-After") if isinstance(outcome, httpx.Response) else None
    if header is None:
        return 0.0
    try:
        asked_s = float(header)
    except ValueError:
        asked_s = _seconds_until(header)
    return min(max(0.0, asked_s), MAX_RETRY_AFTER_S)


def retrying(repeat: Repeat, retries: int) -> AsyncRetrying:
    """Return a runner that makes at most ``1 + retries`` attempts and ends with the outcome of the last."""
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
