"""Every error keeps its class, message and detail on its way through processes and HTTP."""

import pickle

import pytest

from rollout_service.errors import LONGEST_MESSAGE, Overloaded, RolloutServiceError, error_classes, from_wire

CLASSES = sorted(error_classes().values(), key=lambda cls: cls.__name__)
MESSAGE = "part 3 of version 7 is missing: upload it"
DETAIL = {"version": 7, "missing_parts": [3], "why": {"stage": "upload"}}


def test_every_error_survives_pickling_and_has_a_status_of_http():
    for cls in CLASSES:
        error = pickle.loads(pickle.dumps(cls(MESSAGE, DETAIL)))
        assert type(error) is cls and 400 <= cls.http_status < 600
        assert (str(error), error.message, error.detail) == (MESSAGE, MESSAGE, DETAIL)
        assert cls("no").detail == {}


def test_a_message_that_quotes_a_request_has_a_bound():
    error = pickle.loads(pickle.dumps(RolloutServiceError(f"{'a' * 1_000_000}: send it again")))
    assert len(error.message) < LONGEST_MESSAGE and error.message.endswith(": send it again")
    assert pickle.loads(pickle.dumps(error)).message == str(error) == error.message


def test_what_can_be_retried_says_when():
    assert {cls.__name__ for cls in CLASSES if cls.retry_after_s} == {
        "TooEarly", "VersionNotServed", "Overloaded", "KVCacheFull", "NotReady", "DeploymentFailed", "LogUnreadable",
            "TooManySamples",
    }  # fmt: skip
    assert Overloaded.retry_after_s is not None and Overloaded.retry_after_s > 0


@pytest.mark.parametrize(
    "body", ["<html>Bad Gateway</html>", None, [], {}, {"error": "no"}, {"error": {"type": "NotFound"}}]
)
def test_a_reply_that_is_not_ours_is_quoted(body):
    error = from_wire(502, body)
    assert type(error) is RolloutServiceError
    assert "HTTP 502" in error.message and str(body) in error.message
    assert error.detail == {"status": 502} and len(from_wire(502, "x" * 100_000).message) < 1000


def test_unknown_errors_become_the_base_class_with_their_message():
    error = from_wire(418, {"error": {"type": "FromTheFuture", "message": MESSAGE, "detail": DETAIL}})
    assert type(error) is RolloutServiceError
    assert (error.message, error.detail) == (MESSAGE, DETAIL)
