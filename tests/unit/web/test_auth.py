"""Who may call the weight and control routes."""

from ipaddress import ip_network

import pytest
from starlette.requests import HTTPConnection

from rollout_service.errors import Forbidden, Unauthorized
from rollout_service.web.auth import Authorizer


def request(
    authorization: str | None = None, host: str | None = "127.0.0.1", headers: dict[str, str] | None = None
) -> HTTPConnection:
    """A request from the address ``host``, to ``localhost:8000`` unless ``headers`` say otherwise."""
    sent = {"host": "localhost:8000", **(headers or {})}
    if authorization is not None:
        sent["authorization"] = authorization
    raw = [(name.encode(), value.encode("latin-1")) for name, value in sent.items()]
    client = None if host is None else (host, 50000)
    return HTTPConnection({"type": "http", "headers": raw, "client": client})


def refusal(authorizer: Authorizer, connection: HTTPConnection) -> str | None:
    """What the caller is told; None: it may."""
    try:
        authorizer.check(connection)
    except (Forbidden, Unauthorized) as error:
        return error.message
    return None


class TestWithAToken:
    @pytest.mark.parametrize("header", ["Bearer s3cret", "bearer s3cret", "BEARER s3cret", "Bearer   s3cret "])
    def test_the_token_opens_whatever_the_case_of_bearer(self, header):
        assert refusal(Authorizer("s3cret"), request(header)) is None

    @pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", None])
    def test_the_token_opens_from_anywhere(self, host):
        assert refusal(Authorizer("s3cret"), request("Bearer s3cret", host)) is None

    @pytest.mark.parametrize(
        "header", ["Bearer other", "Bearer s3cre", "Bearer s3cret2", "Bearer S3CRET", "Bearer s3cr\xe9t"]
    )
    def test_another_token_is_wrong(self, header):
        with pytest.raises(Unauthorized, match="is wrong: send Authorization: Bearer"):
            Authorizer("s3cret").check(request(header))

    @pytest.mark.parametrize("header", ["Basic s3cret", "Token s3cret"])
    def test_the_token_under_another_scheme_does_not_open(self, header):
        with pytest.raises(Unauthorized):
            Authorizer("s3cret").check(request(header))

    @pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "s3cret"])
    def test_a_token_that_is_not_there_is_missing(self, header):
        with pytest.raises(Unauthorized, match="is missing"):
            Authorizer("s3cret").check(request(header))

    def test_the_configured_token_is_not_repeated_to_the_caller(self):
        with pytest.raises(Unauthorized) as refused:
            Authorizer("s3cret").check(request("Bearer guess"))
        assert "s3cret" not in refused.value.message and "guess" not in refused.value.message

    def test_with_the_token_any_name_any_page_and_any_proxy_may(self):
        headers = {"host": "rollouts.example", "origin": "https://dashboards.example", "x-forwarded-for": "192.0.2.1"}
        assert refusal(Authorizer("s3cret"), request("Bearer s3cret", "192.0.2.7", headers)) is None


TRUSTED = [ip_network("10.1.0.0/16"), ip_network("fd00:1::/32")]


class TestWithoutAToken:
    @pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"])
    def test_callers_on_this_machine_may(self, host):
        assert refusal(Authorizer(None), request(host=host)) is None

    @pytest.mark.parametrize(
        "host",
        ["192.0.2.1", "10.0.0.1", "0.0.0.0", "::", "2001:db8::1", "::ffff:192.0.2.1", "localhost", "testclient", ""],
    )
    def test_callers_from_elsewhere_are_forbidden(self, host):
        with pytest.raises(Forbidden, match=r"configure auth\.token_file") as refused:
            Authorizer(None).check(request(host=host))
        assert host in refused.value.message

    def test_an_unknown_client_address_is_forbidden(self):
        with pytest.raises(Forbidden, match="you called from elsewhere"):
            Authorizer(None).check(request(host=None))

    def test_one_that_is_sent_does_not_help(self):
        with pytest.raises(Forbidden):
            Authorizer(None).check(request("Bearer anything", host="192.0.2.1"))

    @pytest.mark.parametrize(
        "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:8000", "127.1.2.3:8000", "[::1]", "[::1]:8000"]
    )
    def test_loopback_host_names_are_answered(self, host):
        assert refusal(Authorizer(None), request(headers={"host": host})) is None

    @pytest.mark.parametrize(
        "host",
        [
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "evil.example:8000",
            "0.0.0.0",
            "192.0.2.1",
            "[2001:db8::1]",
            "",
        ],
    )
    def test_other_host_names_are_forbidden(self, host):
        with pytest.raises(Forbidden, match=r"answer at localhost, 127\.0\.0\.1 and \[::1\] only.*auth\.token_file"):
            Authorizer(None).check(request(headers={"host": host}))

    @pytest.mark.parametrize(
        "headers",
        [
            {"origin": "http://evil.example"},
            {"origin": "null"},
            {"origin": "http://localhost:3000"},
            {"origin": "http://localhost:8000.evil.example"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
            {"origin": "http://localhost:8000", "sec-fetch-site": "cross-site"},
        ],
    )
    def test_pages_of_other_origins_are_forbidden(self, headers):
        with pytest.raises(Forbidden, match=r"do not answer pages of other origins.*auth\.token_file"):
            Authorizer(None).check(request(headers=headers))

    @pytest.mark.parametrize(
        "headers",
        [{"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}, {}],
        ids=["the service's own page", "typed into a browser", "no browser"],
    )
    def test_callers_that_are_no_other_page_may(self, headers):
        assert refusal(Authorizer(None), request(headers=headers)) is None

    @pytest.mark.parametrize(
        "name", ["x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "forwarded", "via"]
    )
    @pytest.mark.parametrize("value", ["127.0.0.1", "192.0.2.1"])
    def test_any_proxied_request_is_forbidden(self, name, value):
        with pytest.raises(Forbidden, match=f"do not answer proxies, and this request has the header {name}"):
            Authorizer(None).check(request(headers={name: value}))


class TestTrustedNetworks:
    @pytest.mark.parametrize("token", [None, "s3cret"])
    @pytest.mark.parametrize("host", ["10.1.0.1", "10.1.255.255", "::ffff:10.1.0.1", "fd00:1::7"])
    @pytest.mark.parametrize("header", [None, "Bearer EMPTY", "Basic x"])
    def test_a_trusted_network_needs_no_token(self, token, host, header):
        assert (
            refusal(Authorizer(token, TRUSTED), request(header, host, {"host": "rollouts.svc.cluster.local:8000"}))
            is None
        )

    @pytest.mark.parametrize("host", ["10.2.0.1", "::ffff:10.2.0.1", "fd00:2::7", "192.0.2.1", None])
    def test_other_networks_need_the_token_still(self, host):
        with pytest.raises(Unauthorized, match="is missing"):
            Authorizer("s3cret", TRUSTED).check(request(None, host))
        assert refusal(Authorizer("s3cret", TRUSTED), request("Bearer s3cret", host)) is None
        with pytest.raises(Forbidden, match=r"in auth\.trusted_networks \(10\.1\.0\.0/16, fd00:1::/32\) only"):
            Authorizer(None, TRUSTED).check(request(None, host))

    def test_trusted_networks_change_nothing_for_loopback(self):
        assert refusal(Authorizer(None, TRUSTED), request()) is None
        with pytest.raises(Unauthorized):
            Authorizer("s3cret", TRUSTED).check(request())
        with pytest.raises(Forbidden, match="answer at localhost"):
            Authorizer(None, TRUSTED).check(request(headers={"host": "evil.example"}))

    def test_trusted_loopback_is_called_by_a_loopback_name(self):
        authorizer = Authorizer("s3cret", [ip_network("127.0.0.0/8")])
        assert refusal(authorizer, request()) is None
        with pytest.raises(Forbidden, match="answer at localhost"):
            authorizer.check(request(headers={"host": "evil.example"}))

    @pytest.mark.parametrize("token", [None, "s3cret"])
    @pytest.mark.parametrize("name", ["x-forwarded-for", "x-real-ip", "forwarded", "via"])
    def test_a_proxy_in_a_trusted_network_is_forbidden(self, token, name):
        with pytest.raises(Forbidden, match=f"do not answer proxies, and this request has the header {name}"):
            Authorizer(token, TRUSTED).check(request(None, "10.1.0.1", {name: "10.1.0.2"}))

    @pytest.mark.parametrize("token", [None, "s3cret"])
    @pytest.mark.parametrize(
        "headers",
        [
            {"host": "10.1.0.9:8000", "origin": "http://evil.example"},
            {"host": "10.1.0.9:8000", "origin": "null"},
            {"host": "10.1.0.9:8000", "sec-fetch-site": "cross-site"},
            {"host": "rollouts:8000", "origin": "http://evil.example"},
        ],
    )
    def test_other_sites_pages_in_trusted_networks_are_forbidden(self, token, headers):
        with pytest.raises(Forbidden, match="do not answer pages of other origins"):
            Authorizer(token, TRUSTED).check(request(None, "10.1.0.1", headers))

    @pytest.mark.parametrize(
        "sent",
        [{"origin": "http://evil.example:8000"}, {"sec-fetch-site": "same-origin"}],
        ids=["what is no GET", "a GET over https"],
    )
    def test_a_page_whose_name_resolves_here_is_forbidden(self, sent):
        with pytest.raises(Forbidden, match=r"do not answer a page at the name 'evil\.example:8000'"):
            Authorizer(None, TRUSTED).check(request(None, "10.1.0.1", {"host": "evil.example:8000", **sent}))

    @pytest.mark.parametrize("host", ["10.1.0.9:8000", "[fd00:1::9]:8000", "10.1.0.9"])
    def test_the_service_s_own_page_at_its_address_may(self, host):
        own = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
        assert refusal(Authorizer(None, TRUSTED), request(None, "10.1.0.1", own)) is None
