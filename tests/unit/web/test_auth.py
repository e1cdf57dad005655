"""Who may call the weight and control routes."""

import re
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


def require(reason: str | None, authorizer: Authorizer, connection: HTTPConnection) -> str:
    """Require a refusal with this reason; None: the caller may. Returns what the caller is told."""
    said = refusal(authorizer, connection)
    assert said is None if reason is None else said is not None and re.search(reason, said), said
    return said or ""


REMOTE, TRUSTED_HOST = "192.0.2.1", "10.1.0.1"
TRUSTED = [ip_network("10.1.0.0/16"), ip_network("fd00:1::/32")]
MISSING, WRONG = "is missing", "is wrong: send Authorization: Bearer"
HOST_NAME = r"answer at localhost, 127\.0\.0\.1 and \[::1\] only.*auth\.token_file"
OTHER_PAGE = "do not answer pages of other origins"
OTHER_SITES = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:3000"},
    {"origin": "http://localhost:8000.evil.example"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"origin": "http://localhost:8000", "sec-fetch-site": "cross-site"},
]
PROXY_HEADERS = ["x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "forwarded", "via"]


class TestWithAToken:
    @pytest.mark.parametrize(
        ("header", "reason"),
        [
            *[(header, None) for header in ("Bearer s3cret", "bearer s3cret", "BEARER s3cret", "Bearer   s3cret ")],
            *[(f"Bearer {token}", WRONG) for token in ("other", "s3cre", "s3cret2", "S3CRET", "s3cr\xe9t")],
            *[(header, "") for header in ("Basic s3cret", "Token s3cret")],
            *[(header, MISSING) for header in (None, "", "Bearer", "Bearer ", "s3cret")],
        ],
    )
    def test_only_the_token_opens_whatever_the_case_of_bearer(self, header, reason):
        require(reason, Authorizer("s3cret"), request(header))

    @pytest.mark.parametrize("host", [REMOTE, "2001:db8::1", None])
    def test_the_token_opens_from_anywhere(self, host):
        require(None, Authorizer("s3cret"), request("Bearer s3cret", host))

    def test_the_configured_token_is_not_repeated_to_the_caller(self):
        said = refusal(Authorizer("s3cret"), request("Bearer guess"))
        assert said is not None and "s3cret" not in said and "guess" not in said

    def test_with_the_token_any_name_any_page_and_any_proxy_may(self):
        headers = {"host": "rollouts.example", "origin": "https://dashboards.example", "x-forwarded-for": REMOTE}
        require(None, Authorizer("s3cret"), request("Bearer s3cret", "192.0.2.7", headers))


class TestWithoutAToken:
    @pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"])
    def test_callers_on_this_machine_may(self, host):
        require(None, Authorizer(None), request(host=host))

    @pytest.mark.parametrize(
        "host",
        [REMOTE, "10.0.0.1", "0.0.0.0", "::", "2001:db8::1", "::ffff:192.0.2.1", "localhost", "testclient", "", None],
    )
    def test_callers_from_elsewhere_are_forbidden_with_any_token(self, host):
        for header in (None, "Bearer anything"):
            said = require(r"configure auth\.token_file", Authorizer(None), request(header, host))
            assert ("elsewhere" if host is None else host) in said

    @pytest.mark.parametrize(
        ("hosts", "reason"),
        [
            (
                ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:8000", "127.1.2.3:8000", "[::1]", "[::1]:8000"],
                None,
            ),
            (["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"], HOST_NAME),
            (["0.0.0.0", REMOTE, "[2001:db8::1]", ""], HOST_NAME),
        ],
        ids=["loopback", "other names", "other addresses"],
    )
    def test_only_loopback_host_names_are_answered(self, hosts, reason):
        for host in hosts:
            require(reason, Authorizer(None), request(headers={"host": host}))

    @pytest.mark.parametrize("headers", OTHER_SITES)
    def test_pages_of_other_origins_are_forbidden(self, headers):
        require(rf"{OTHER_PAGE}.*auth\.token_file", Authorizer(None), request(headers=headers))

    @pytest.mark.parametrize(
        "headers",
        [{"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}, {}],
        ids=["the service's own page", "typed into a browser", "no browser"],
    )
    def test_callers_that_are_no_other_page_may(self, headers):
        require(None, Authorizer(None), request(headers=headers))

    @pytest.mark.parametrize("name", PROXY_HEADERS)
    @pytest.mark.parametrize("value", ["127.0.0.1", REMOTE])
    def test_any_proxied_request_is_forbidden(self, name, value):
        proxied = f"do not answer proxies, and this request has the header {name}"
        require(proxied, Authorizer(None), request(headers={name: value}))
        for token in (None, "s3cret"):
            require(proxied, Authorizer(token, TRUSTED), request(None, TRUSTED_HOST, {name: value}))


class TestTrustedNetworks:
    @pytest.mark.parametrize("token", [None, "s3cret"])
    @pytest.mark.parametrize("host", [TRUSTED_HOST, "10.1.255.255", "::ffff:10.1.0.1", "fd00:1::7"])
    @pytest.mark.parametrize("header", [None, "Bearer EMPTY", "Basic x"])
    def test_a_trusted_network_needs_no_token(self, token, host, header):
        require(None, Authorizer(token, TRUSTED), request(header, host, {"host": "rollouts.svc.cluster.local:8000"}))

    @pytest.mark.parametrize("host", ["10.2.0.1", "::ffff:10.2.0.1", "fd00:2::7", REMOTE, None])
    def test_other_networks_need_the_token_still(self, host):
        require(MISSING, Authorizer("s3cret", TRUSTED), request(None, host))
        require(None, Authorizer("s3cret", TRUSTED), request("Bearer s3cret", host))
        named = r"in auth\.trusted_networks \(10\.1\.0\.0/16, fd00:1::/32\) only"
        require(named, Authorizer(None, TRUSTED), request(None, host))

    def test_loopback_is_called_by_a_loopback_name(self):
        evil = request(headers={"host": "evil.example"})
        require(None, Authorizer(None, TRUSTED), request())
        require(MISSING, Authorizer("s3cret", TRUSTED), request())
        require("answer at localhost", Authorizer(None, TRUSTED), evil)
        loopback = Authorizer("s3cret", [ip_network("127.0.0.0/8")])
        require(None, loopback, request())
        require("answer at localhost", loopback, evil)

    @pytest.mark.parametrize("token", [None, "s3cret"])
    @pytest.mark.parametrize("page", [{"origin": "http://evil.example"}, {"origin": "null"}, OTHER_SITES[4]])
    def test_other_sites_pages_are_forbidden(self, token, page):
        for host in ("10.1.0.9:8000", "rollouts:8000"):
            require(OTHER_PAGE, Authorizer(token, TRUSTED), request(None, TRUSTED_HOST, {"host": host, **page}))

    @pytest.mark.parametrize(
        "sent",
        [{"origin": "http://evil.example:8000"}, {"sec-fetch-site": "same-origin"}],
        ids=["what is no GET", "a GET over https"],
    )
    def test_a_page_whose_name_resolves_here_is_forbidden(self, sent):
        page = request(None, TRUSTED_HOST, {"host": "evil.example:8000", **sent})
        require(r"do not answer a page at the name 'evil\.example:8000'", Authorizer(None, TRUSTED), page)

    @pytest.mark.parametrize("host", ["10.1.0.9:8000", "[fd00:1::9]:8000", "10.1.0.9"])
    def test_the_service_s_own_page_at_its_address_may(self, host):
        own = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
        require(None, Authorizer(None, TRUSTED), request(None, TRUSTED_HOST, own))
