"""Every error keeps its class, message and detail on its way through processes and HTTP."""

import pickle
import re

import pytest

from rollout_service import errors
from rollout_service.errors import InvalidRequest, Overloaded, RolloutServiceError, error_classes, from_wire

CLASSES = sorted(error_classes().values(), key=lambda cls: cls.__name__)
MESSAGE = "part 3 of version 7 is missing: upload it"
DETAIL = {"version": 7, "missing_parts": [3], "why": {"stage": "upload"}}

every_class = pytest.mark.parametrize("cls", CLASSES)


def documented_statuses() -> dict[str, int]:
    """Class → status, as the tree in the module's docstring says."""
    tree = re.findall(r"^[ │]*[├└]── (\w+) +(\d{3}) ", errors.__doc__ or "", flags=re.MULTILINE)
    return {name: int(status) for name, status in tree}


@every_class
def test_an_error_survives_pickling(cls):
    error = pickle.loads(pickle.dumps(cls(MESSAGE, DETAIL)))
    assert type(error) is cls
    assert (str(error), error.message, error.detail) == (MESSAGE, MESSAGE, DETAIL)


def test_every_class_has_the_status_that_the_tree_documents():
    assert {cls.__name__: cls.http_status for cls in CLASSES if cls is not RolloutServiceError} == documented_statuses()


def test_every_status_is_an_error_of_http():
    assert all(400 <= cls.http_status < 600 for cls in CLASSES)


def test_an_error_without_detail_has_an_empty_one():
    assert InvalidRequest("no").to_wire() == {"error": {"type": "InvalidRequest", "message": "no", "detail": {}}}


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
    assert error.detail == {"status": 502}


def test_a_reply_that_is_not_ours_is_quoted_in_part_only():
    assert len(from_wire(502, "x" * 100_000).message) < 1000


def test_unknown_errors_become_the_base_class_with_their_message():
    error = from_wire(418, {"error": {"type": "FromTheFuture", "message": MESSAGE, "detail": DETAIL}})
    assert type(error) is RolloutServiceError
    assert (error.message, error.detail) == (MESSAGE, DETAIL)
