"""Who may call the weight and control routes."""

from ipaddress import ip_network

import pytest
from starlette.requests import HTTPConnection

from rollout_service.errors import Forbidden, Unauthorized
from rollout_service.web.auth import Authorizer

TOKEN = "s3cret"
TRUSTED = [ip_network("10.1.0.0/16"), ip_network("fd00:1::/32")]
LOOPBACK_ONLY = r"answer at localhost, 127\.0\.0\.1 and \[::1\] only.*auth\.token_file"
OTHER_PAGE = r"do not answer pages of other origins.*auth\.token_file"


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


class TestWithAToken:
    @pytest.mark.parametrize(
        ("header", "host"),
        [("Bearer s3cret", "192.0.2.1"), ("bearer s3cret", "2001:db8::1"), ("BEARER   s3cret ", None)],
    )
    def test_the_token_opens_from_anywhere_to_any_name_page_and_proxy(self, header, host):
        headers = {"host": "rollouts.example", "origin": "https://dashboards.example", "x-forwarded-for": "192.0.2.1"}
        Authorizer(TOKEN).check(request(header, host, headers))

    @pytest.mark.parametrize(
        ("header", "problem"),
        [
            *((f"Bearer {other}", "wrong") for other in ("other", "s3cre", "s3cret2", "S3CRET", "s3cr\xe9t")),
            *((header, "missing") for header in (None, "", "Bearer", "Bearer ", "s3cret", "Basic s3cret")),
        ],
    )
    def test_any_other_header_is_refused_and_no_token_repeated(self, header, problem):
        with pytest.raises(Unauthorized, match=f"is {problem}: send Authorization: Bearer") as refused:
            Authorizer(TOKEN).check(request(header))
        assert TOKEN not in refused.value.message and "other" not in refused.value.message


class TestWithoutAToken:
    @pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"])
    def test_callers_on_this_machine_may(self, host):
        Authorizer(None).check(request(host=host))

    @pytest.mark.parametrize(
        "host",
        ["192.0.2.1", "10.0.0.1", "0.0.0.0", "::", "2001:db8::1", "::ffff:192.0.2.1", "localhost", "", None],
    )
    def test_callers_from_elsewhere_are_forbidden_with_any_token(self, host):
        with pytest.raises(Forbidden, match=f"{host or 'you'} called from elsewhere: configure auth.token_file"):
            Authorizer(None).check(request("Bearer anything", host))

    @pytest.mark.parametrize(
        "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.1.2.3:8000", "[::1]", "[::1]:8000"]
    )
    def test_loopback_host_names_are_answered(self, host):
        Authorizer(None).check(request(headers={"host": host}))

    @pytest.mark.parametrize(
        "host",
        ["evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "0.0.0.0", "[2001:db8::1]", ""],
    )
    def test_other_host_names_are_forbidden(self, host):
        with pytest.raises(Forbidden, match=LOOPBACK_ONLY):
            Authorizer(None).check(request(headers={"host": host}))

    @pytest.mark.parametrize(
        "headers",
        [
            {"origin": "null"},
            {"origin": "http://localhost:3000"},
            {"origin": "http://localhost:8000.evil.example"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
            {"origin": "http://localhost:8000", "sec-fetch-site": "cross-site"},
        ],
    )
    def test_pages_of_other_origins_are_forbidden(self, headers):
        with pytest.raises(Forbidden, match=OTHER_PAGE):
            Authorizer(None).check(request(headers=headers))

    def test_its_own_page_and_what_is_typed_into_a_browser_may(self):
        for headers in (
            {"origin": "http://LOCALHOST:8000", "sec-fetch-site": "same-origin"},
            {"sec-fetch-site": "none"},
        ):
            Authorizer(None).check(request(headers=headers))


class TestTrustedNetworks:
    @pytest.mark.parametrize("host", ["10.1.0.1", "10.1.255.255", "::ffff:10.1.0.1", "fd00:1::7"])
    def test_a_trusted_network_needs_no_token(self, host):
        for token, header in ((None, None), (TOKEN, None), (TOKEN, "Bearer EMPTY")):
            Authorizer(token, TRUSTED).check(request(header, host, {"host": "rollouts.svc.cluster.local:8000"}))

    @pytest.mark.parametrize("host", ["10.2.0.1", "::ffff:10.2.0.1", "fd00:2::7", None])
    def test_other_networks_need_the_token_still(self, host):
        with pytest.raises(Unauthorized, match="is missing"):
            Authorizer(TOKEN, TRUSTED).check(request(None, host))
        Authorizer(TOKEN, TRUSTED).check(request(f"Bearer {TOKEN}", host))
        with pytest.raises(Forbidden, match=r"in auth\.trusted_networks \(10\.1\.0\.0/16, fd00:1::/32\) only"):
            Authorizer(None, TRUSTED).check(request(None, host))

    def test_loopback_is_called_by_a_loopback_name_trusted_or_not(self):
        with pytest.raises(Unauthorized):
            Authorizer(TOKEN, TRUSTED).check(request())
        for authorizer in (Authorizer(None, TRUSTED), Authorizer(TOKEN, [ip_network("127.0.0.0/8")])):
            authorizer.check(request())
            with pytest.raises(Forbidden, match=LOOPBACK_ONLY):
                authorizer.check(request(headers={"host": "evil.example"}))

    @pytest.mark.parametrize(
        "name",
        ["x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "x-client-ip", "forwarded", "via"],
    )
    def test_proxies_need_the_token(self, name):
        callers = ((None, "127.0.0.1", "192.0.2.1"), (None, "10.1.0.1", "10.1.0.2"), (TOKEN, "10.1.0.1", "127.0.0.1"))
        for token, host, value in callers:
            with pytest.raises(Forbidden, match=f"do not answer proxies, and this request has the header {name}"):
                Authorizer(token, TRUSTED).check(request(None, host, {name: value}))

    @pytest.mark.parametrize(
        "headers",
        [
            {"host": "10.1.0.9:8000", "origin": "http://evil.example"},
            {"host": "10.1.0.9:8000", "sec-fetch-site": "cross-site"},
            {"host": "rollouts:8000", "origin": "null"},
        ],
    )
    def test_other_sites_pages_in_trusted_networks_are_forbidden(self, headers):
        for token in (None, TOKEN):
            with pytest.raises(Forbidden, match=OTHER_PAGE):
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
        Authorizer(None, TRUSTED).check(request(None, "10.1.0.1", own))
