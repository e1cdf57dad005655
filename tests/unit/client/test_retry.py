import random
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
from tenacity import RetryCallState

from rollout_service.client._retry import MAX_RETRY_AFTER_S, Repeat, error_of, may_retry, retry_after_s, retrying
from rollout_service.errors import (
    CommitTimeout,
    EngineFailed,
    NotReady,
    Overloaded,
    RolloutServiceError,
    TooEarly,
    VersionConflict,
    error_classes,
)


def reply(error: RolloutServiceError, retry_after: str | None = None) -> httpx.Response:
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    return httpx.Response(error.http_status, json=error.to_wire(), headers=headers)


def bare(status: int, retry_after: str | None = None) -> httpx.Response:
    return httpx.Response(status, text="from a proxy", headers={"Retry-After": retry_after} if retry_after else {})


NOT_CONNECTED = [httpx.ConnectError(""), httpx.ConnectTimeout(""), httpx.PoolTimeout("")]
BROKEN_LATER = [
    httpx.ReadError(""),
    httpx.WriteError(""),
    httpx.CloseError(""),
    httpx.ReadTimeout(""),
    httpx.WriteTimeout(""),
    httpx.RemoteProtocolError(""),
]
OUR_OWN_FAULT = [httpx.UnsupportedProtocol(""), httpx.LocalProtocolError(""), ValueError(), KeyboardInterrupt()]


@pytest.mark.parametrize("error", NOT_CONNECTED, ids=repr)
def test_what_was_never_sent_may_be_sent_again(error: Exception) -> None:
    assert may_retry(error, Repeat.IDEMPOTENT)
    assert may_retry(error, Repeat.IF_NOT_ACCEPTED)


@pytest.mark.parametrize("error", BROKEN_LATER, ids=repr)
def test_a_connection_that_breaks_later_is_tried_again_only_for_idempotent_requests(error: Exception) -> None:
    assert may_retry(error, Repeat.IDEMPOTENT)
    assert not may_retry(error, Repeat.IF_NOT_ACCEPTED)


@pytest.mark.parametrize("error", BROKEN_LATER, ids=repr)
def test_a_rollout_is_asked_for_again_after_a_broken_connection_but_not_while_it_may_be_at_work(
    error: Exception,
) -> None:
    assert may_retry(error, Repeat.IF_LOST) == (not isinstance(error, httpx.TimeoutException))


@pytest.mark.parametrize("status", [500, 502, 503])
def test_a_rollout_is_asked_for_again_when_a_proxy_has_lost_the_gateway(status: int) -> None:
    assert may_retry(bare(status), Repeat.IF_LOST)
    assert not may_retry(reply(EngineFailed("x")), Repeat.IF_LOST)
    assert not may_retry(bare(404), Repeat.IF_LOST)


@pytest.mark.parametrize("error", OUR_OWN_FAULT, ids=repr)
def test_what_cannot_get_better_is_not_tried_again(error: BaseException) -> None:
    assert not any(may_retry(error, repeat) for repeat in Repeat)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_refusal_of_a_proxy_is_tried_again_only_for_idempotent_requests(status: int) -> None:
    assert may_retry(bare(status), Repeat.IDEMPOTENT)
    assert not may_retry(bare(status, "1"), Repeat.IF_NOT_ACCEPTED)


@pytest.mark.parametrize("error", [Overloaded("full"), NotReady("starting")], ids=repr)
def test_a_refusal_that_says_when_to_come_back_is_always_tried_again(error: RolloutServiceError) -> None:
    assert may_retry(reply(error, "1"), Repeat.IF_NOT_ACCEPTED)
    assert may_retry(reply(error), Repeat.IDEMPOTENT)
    assert not may_retry(reply(error), Repeat.IF_NOT_ACCEPTED)


@pytest.mark.parametrize(
    "error", [CommitTimeout("x"), TooEarly("x"), VersionConflict("x"), EngineFailed("x")], ids=repr
)
def test_an_answer_that_is_final_is_not_tried_again(error: RolloutServiceError) -> None:
    assert not any(may_retry(reply(error, "1"), repeat) for repeat in Repeat)


def test_an_address_to_be_given_up_is_given_up_only_while_it_takes_no_connection() -> None:
    assert not may_retry(httpx.ConnectError(""), Repeat.IDEMPOTENT_ONCE_CONNECTED)
    assert may_retry(httpx.ReadError(""), Repeat.IDEMPOTENT_ONCE_CONNECTED)
    assert may_retry(bare(503), Repeat.IDEMPOTENT_ONCE_CONNECTED)


def test_a_success_is_not_tried_again() -> None:
    assert not any(may_retry(httpx.Response(200), repeat) for repeat in Repeat)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("2", 2.0), ("1.5", 1.5), ("-3", 0.0), ("nan", 0.0), ("inf", MAX_RETRY_AFTER_S), ("900", MAX_RETRY_AFTER_S)],
)
def test_retry_after_is_read_and_bounded(header: str, seconds: float) -> None:
    assert retry_after_s(bare(503, header)) == seconds


def test_retry_after_may_be_a_date() -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert 0 < retry_after_s(bare(503, later)) <= 30
    assert retry_after_s(bare(503, "Wed, 21 Oct 2015 07:28:00 -0000")) == 0
    assert retry_after_s(bare(503, "soon")) == 0


@pytest.mark.parametrize("attempt", [1, 3, 20])
def test_the_wait_is_what_the_service_asks_for_and_a_bounded_random_time(attempt: int) -> None:
    policy = retrying(Repeat.IDEMPOTENT, 5)
    state = RetryCallState(policy, None, (), {})
    state.attempt_number = attempt
    state.set_result(bare(503, "7"))
    waits_s = {policy.wait(state) for _ in range(20)}
    assert all(7 <= wait_s <= 7 + 8 for wait_s in waits_s)
    assert len(waits_s) > 1


@pytest.mark.parametrize(("retries", "outlasted_s"), [(5, 10.0), (12, 35.0)])
def test_retries_outlast_the_restart_of_a_proxy_however_the_dice_fall(
    retries: int, outlasted_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: low)
    policy, waited_s = retrying(Repeat.IF_NOT_ACCEPTED, retries), 0.0
    state = RetryCallState(policy, None, (), {})
    state.set_exception((httpx.ConnectError, httpx.ConnectError("refused"), None))
    for state.attempt_number in range(1, 1 + retries):
        assert policy.retry(state) and not policy.stop(state)
        waited_s += policy.wait(state)
    assert waited_s > outlasted_s


def test_without_retry_after_there_is_no_wait_asked_for() -> None:
    assert retry_after_s(bare(503)) == 0
    assert retry_after_s(httpx.ReadError("")) == 0


@pytest.mark.parametrize("kind", error_classes().values(), ids=lambda kind: kind.__name__)
def test_every_error_arrives_as_the_class_that_was_raised(kind: type[RolloutServiceError]) -> None:
    error = error_of(reply(kind("what, why, what instead", {"names": ["a"]})))
    assert type(error) is kind
    assert (error.message, error.detail) == ("what, why, what instead", {"names": ["a"]})


def test_a_reply_that_is_not_the_services_own_is_quoted() -> None:
    error = error_of(bare(502))
    assert type(error) is RolloutServiceError
    assert "HTTP 502: from a proxy" in error.message
