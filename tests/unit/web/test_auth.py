"""Who may call the weight and control routes."""

import pytest
from starlette.requests import HTTPConnection

from rollout_service.errors import Forbidden, Unauthorized
from rollout_service.web.auth import Authorizer


def request(authorization: str | None = None, host: str | None = "127.0.0.1") -> HTTPConnection:
    headers = [] if authorization is None else [(b"authorization", authorization.encode("latin-1"))]
    client = None if host is None else (host, 50000)
    return HTTPConnection({"type": "http", "headers": headers, "client": client})


@pytest.mark.parametrize("header", ["Bearer s3cret", "bearer s3cret", "BEARER s3cret", "Bearer   s3cret "])
def test_the_token_opens_whatever_the_case_of_bearer(header: str) -> None:
    Authorizer("s3cret").check(request(header))


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", None])
def test_the_token_opens_from_anywhere(host: str | None) -> None:
    Authorizer("s3cret").check(request("Bearer s3cret", host))


@pytest.mark.parametrize(
    "header", ["Bearer other", "Bearer s3cre", "Bearer s3cret2", "Bearer S3CRET", "Bearer s3cr\xe9t"]
)
def test_another_token_is_wrong(header: str) -> None:
    with pytest.raises(Unauthorized, match="is wrong: send Authorization: Bearer"):
        Authorizer("s3cret").check(request(header))


@pytest.mark.parametrize("header", ["Basic s3cret", "Token s3cret"])
def test_the_token_under_another_scheme_does_not_open(header: str) -> None:
    with pytest.raises(Unauthorized):
        Authorizer("s3cret").check(request(header))


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "s3cret"])
def test_a_token_that_is_not_there_is_missing(header: str | None) -> None:
    with pytest.raises(Unauthorized, match="is missing"):
        Authorizer("s3cret").check(request(header))


def test_with_a_token_configured_loopback_needs_it_too() -> None:
    with pytest.raises(Unauthorized):
        Authorizer("s3cret").check(request(host="127.0.0.1"))


def test_the_configured_token_is_not_repeated_to_the_caller() -> None:
    with pytest.raises(Unauthorized) as refused:
        Authorizer("s3cret").check(request("Bearer guess"))
    assert "s3cret" not in refused.value.message and "guess" not in refused.value.message


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"])
def test_without_a_token_callers_on_this_machine_may(host: str) -> None:
    Authorizer(None).check(request(host=host))


@pytest.mark.parametrize(
    "host", ["192.0.2.1", "10.0.0.1", "0.0.0.0", "::", "2001:db8::1", "::ffff:192.0.2.1", "localhost", "testclient", ""]
)
def test_without_a_token_callers_from_elsewhere_are_forbidden(host: str) -> None:
    with pytest.raises(Forbidden, match=r"configure auth\.token_file") as refused:
        Authorizer(None).check(request(host=host))
    assert host in refused.value.message


def test_without_a_token_a_caller_of_unknown_address_is_forbidden() -> None:
    with pytest.raises(Forbidden, match="you called from elsewhere"):
        Authorizer(None).check(request(host=None))


def test_without_a_token_one_that_is_sent_does_not_help() -> None:
    with pytest.raises(Forbidden):
        Authorizer(None).check(request("Bearer anything", host="192.0.2.1"))
