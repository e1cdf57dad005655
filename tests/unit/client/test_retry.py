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


class TestWait:
    @pytest.mark.parametrize(("retries", "least_s", "most_s"), [(5, 3.8, 7.8), (8, 15.8, 31.8), (12, 31.8, 63.8)])
    def test_the_number_of_retries_sets_the_outage_that_is_survived(self, retries, least_s, most_s, monkeypatch):
        def waits(share: float) -> float:
            monkeypatch.setattr("random.uniform", lambda low, high: low + share * (high - low))
            strategy = retrying(Repeat.IDEMPOTENT, retries)
            state = RetryCallState(strategy, None, (), {})
            state.set_exception((httpx.ConnectError, httpx.ConnectError(""), None))
            total = 0.0
            for attempt in range(1, 1 + retries):
                state.attempt_number = attempt
                total += strategy.wait(state)
            return total

        assert waits(0.0) == pytest.approx(least_s, abs=0.2) and waits(1.0) == pytest.approx(most_s, abs=0.2)

    @pytest.mark.parametrize(
        ("header", "seconds"),
        [("2", 2.0), ("1.5", 1.5), ("-3", 0.0), ("nan", 0.0), ("inf", MAX_RETRY_AFTER_S), ("900", MAX_RETRY_AFTER_S)],
    )
    def test_retry_after_is_read_and_bounded(self, header, seconds):
        assert retry_after_s(bare(503, header)) == seconds

    def test_retry_after_may_be_a_date(self):
        later = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
        assert 0 < retry_after_s(bare(503, later)) <= 30
        assert retry_after_s(bare(503, "Wed, 21 Oct 2015 07:28:00 -0000")) == 0
        assert retry_after_s(bare(503, "soon")) == 0

    @pytest.mark.parametrize("attempt", [1, 3, 20])
    def test_the_wait_is_retry_after_plus_a_bounded_random_time(self, attempt):
        policy = retrying(Repeat.IDEMPOTENT, 5)
        state = RetryCallState(policy, None, (), {})
        state.attempt_number = attempt
        state.set_result(bare(503, "7"))
        waits_s = {policy.wait(state) for _ in range(20)}
        assert all(7 <= wait_s <= 7 + 8 for wait_s in waits_s)
        assert len(waits_s) > 1

    def test_without_retry_after_there_is_no_wait_asked_for(self):
        assert retry_after_s(bare(503)) == 0
        assert retry_after_s(httpx.ReadError("")) == 0


class TestMayRetry:
    @pytest.mark.parametrize("error", NOT_CONNECTED, ids=repr)
    def test_what_was_never_sent_may_be_sent_again(self, error):
        assert may_retry(error, Repeat.IDEMPOTENT)
        assert may_retry(error, Repeat.IF_NOT_ACCEPTED)

    @pytest.mark.parametrize("error", BROKEN_LATER, ids=repr)
    def test_only_idempotent_requests_retry_a_broken_connection(self, error):
        assert may_retry(error, Repeat.IDEMPOTENT)
        assert not may_retry(error, Repeat.IF_NOT_ACCEPTED)

    @pytest.mark.parametrize("error", BROKEN_LATER, ids=repr)
    def test_a_rollout_is_retried_after_a_disconnect_not_a_timeout(self, error):
        assert may_retry(error, Repeat.IF_LOST) == (not isinstance(error, httpx.TimeoutException))

    @pytest.mark.parametrize("status", [500, 502, 503])
    def test_a_rollout_is_retried_when_a_proxy_lost_the_gateway(self, status):
        assert may_retry(bare(status), Repeat.IF_LOST)
        assert not may_retry(reply(EngineFailed("x")), Repeat.IF_LOST)
        assert not may_retry(bare(404), Repeat.IF_LOST)

    @pytest.mark.parametrize("error", OUR_OWN_FAULT, ids=repr)
    def test_what_cannot_get_better_is_not_tried_again(self, error):
        assert not any(may_retry(error, repeat) for repeat in Repeat)

    @pytest.mark.parametrize("status", [429, 502, 503, 504])
    def test_only_idempotent_requests_retry_a_refusal_of_a_proxy(self, status):
        assert may_retry(bare(status), Repeat.IDEMPOTENT)
        assert not may_retry(bare(status, "1"), Repeat.IF_NOT_ACCEPTED)

    @pytest.mark.parametrize("error", [Overloaded("full"), NotReady("starting")], ids=repr)
    def test_a_refusal_with_retry_after_is_always_retried(self, error):
        assert may_retry(reply(error, "1"), Repeat.IF_NOT_ACCEPTED)
        assert may_retry(reply(error), Repeat.IDEMPOTENT)
        assert not may_retry(reply(error), Repeat.IF_NOT_ACCEPTED)

    @pytest.mark.parametrize(
        "error", [CommitTimeout("x"), TooEarly("x"), VersionConflict("x"), EngineFailed("x")], ids=repr
    )
    def test_an_answer_that_is_final_is_not_tried_again(self, error):
        assert not any(may_retry(reply(error, "1"), repeat) for repeat in Repeat)

    def test_an_optional_address_is_given_up_only_if_unreachable(self):
        assert not may_retry(httpx.ConnectError(""), Repeat.IDEMPOTENT_ONCE_CONNECTED)
        assert may_retry(httpx.ReadError(""), Repeat.IDEMPOTENT_ONCE_CONNECTED)
        assert may_retry(bare(503), Repeat.IDEMPOTENT_ONCE_CONNECTED)

    def test_a_success_is_not_tried_again(self):
        assert not any(may_retry(httpx.Response(200), repeat) for repeat in Repeat)


class TestError:
    @pytest.mark.parametrize("kind", error_classes().values(), ids=lambda kind: kind.__name__)
    def test_every_error_arrives_as_the_class_that_was_raised(self, kind):
        error = error_of(reply(kind("what, why, what instead", {"names": ["a"]})))
        assert type(error) is kind
        assert (error.message, error.detail) == ("what, why, what instead", {"names": ["a"]})

    def test_a_reply_that_is_not_the_services_own_is_quoted(self):
        error = error_of(bare(502))
        assert type(error) is RolloutServiceError
        assert "HTTP 502: from a proxy" in error.message
