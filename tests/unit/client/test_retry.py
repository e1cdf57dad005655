from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
from tenacity import RetryCallState

from rollout_service.client._http import MAX_RETRY_AFTER_S, Repeat, error_of, may_retry, retry_after_s, retrying
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


@pytest.mark.parametrize(("retries", "least_s", "most_s"), [(5, 3.8, 7.8), (8, 15.8, 31.8), (12, 31.8, 63.8)])
def test_the_number_of_retries_sets_the_outage_that_is_survived(retries, least_s, most_s, monkeypatch):
    def waits(share: float, outcome: httpx.Response | None = None) -> float:
        monkeypatch.setattr("random.uniform", lambda low, high: low + share * (high - low))
        strategy = retrying(Repeat.IDEMPOTENT, retries)
        state = RetryCallState(strategy, None, (), {})
        if outcome is None:
            state.set_exception((httpx.ConnectError, httpx.ConnectError(""), None))
        else:
            state.set_result(outcome)
        total = 0.0
        for attempt in range(1, 1 + retries):
            state.attempt_number = attempt
            total += strategy.wait(state)
        return total

    assert waits(0.0) == pytest.approx(least_s, abs=0.2) and waits(1.0) == pytest.approx(most_s, abs=0.2)
    assert waits(0.0, bare(503, "7")) == pytest.approx(least_s + 7 * retries, abs=0.2)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("2", 2.0), ("1.5", 1.5), ("-3", 0.0), ("nan", 0.0), ("inf", MAX_RETRY_AFTER_S), ("900", MAX_RETRY_AFTER_S)],
)
def test_retry_after_is_read_and_bounded(header, seconds):
    assert retry_after_s(bare(503, header)) == seconds


def test_retry_after_may_be_a_date():
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert 0 < retry_after_s(bare(503, later)) <= 30
    assert retry_after_s(bare(503, "Wed, 21 Oct 2015 07:28:00 -0000")) == 0
    assert retry_after_s(bare(503, "soon")) == retry_after_s(bare(503)) == retry_after_s(httpx.ReadError("")) == 0


ALWAYS = {Repeat.IF_NOT_ACCEPTED, Repeat.IF_LOST, Repeat.IDEMPOTENT}
ONCE = Repeat.IDEMPOTENT_ONCE_CONNECTED
IDEMPOTENT = {Repeat.IDEMPOTENT, ONCE}
MAY_BE_REPEATED: list[tuple[set[Repeat], list[httpx.Response | BaseException]]] = [
    (ALWAYS, [httpx.ConnectError(""), httpx.ConnectTimeout(""), httpx.PoolTimeout("")]),
    (
        IDEMPOTENT | {Repeat.IF_LOST},
        [httpx.ReadError(""), httpx.WriteError(""), httpx.CloseError(""), httpx.RemoteProtocolError("")],
    ),
    (IDEMPOTENT, [httpx.ReadTimeout(""), httpx.WriteTimeout("")]),
    ({Repeat.IF_LOST}, [bare(500)]),
    (IDEMPOTENT | {Repeat.IF_LOST}, [bare(502), bare(503), bare(504), bare(503, "1")]),
    (IDEMPOTENT, [bare(429), reply(Overloaded("full")), reply(NotReady("starting"))]),
    (ALWAYS | {ONCE}, [reply(Overloaded("full"), "1"), reply(NotReady("starting"), "1")]),
    (set(), [reply(kind("x"), "1") for kind in (CommitTimeout, TooEarly, VersionConflict, EngineFailed)]),
    (set(), [bare(404), httpx.Response(200), httpx.UnsupportedProtocol(""), httpx.LocalProtocolError("")]),
    (set(), [ValueError(), KeyboardInterrupt()]),
]


@pytest.mark.parametrize(("repeats", "outcomes"), MAY_BE_REPEATED)
def test_what_may_be_sent_again(repeats, outcomes):
    for outcome in outcomes:
        assert {repeat for repeat in Repeat if may_retry(outcome, repeat)} == repeats, outcome


@pytest.mark.parametrize("kind", error_classes().values(), ids=lambda kind: kind.__name__)
def test_every_error_arrives_as_the_class_that_was_raised(kind):
    error = error_of(reply(kind("what, why, what instead", {"names": ["a"]})))
    assert type(error) is kind
    assert (error.message, error.detail) == ("what, why, what instead", {"names": ["a"]})


def test_a_reply_that_is_not_the_services_own_is_quoted():
    error = error_of(bare(502))
    assert type(error) is RolloutServiceError
    assert "HTTP 502: from a proxy" in error.message
