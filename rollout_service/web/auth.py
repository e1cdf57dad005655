"""Authorization of the weight and control routes."""

import secrets
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from starlette.requests import HTTPConnection

from rollout_service.errors import Forbidden, Unauthorized

_PROXY_HEADERS = frozenset({"forwarded", "via", "x-real-ip", "x-client-ip"})
"""Headers that proxies add. Headers that begin with ``x-forwarded-`` count too."""
_INSTEAD = "configure auth.token_file and send its token"


class Authorizer:
    """Accepts callers that send the token, and programs in the trusted networks.

    Without a configured token, it accepts programs on this machine that use a loopback name.

    Browsers and proxies without a token are refused. A browser calls from this machine's address on behalf of any open
    page, and a proxy calls on behalf of anyone. A proxy that adds no header looks like a program. Configure a token if
    such a proxy runs on this machine or in a trusted network.
    """

    def __init__(self, token: str | None, trusted_networks: Sequence[IPv4Network | IPv6Network] = ()) -> None:
        self._token, self._trusted = token, tuple(trusted_networks)

    def check(self, request: HTTPConnection) -> None:
        """Raise Unauthorized or Forbidden if the caller is not allowed."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        bearer = given.strip() if scheme.lower() == "bearer" else ""
        if self._token is not None and secrets.compare_digest(bearer.encode(), self._token.encode()):
            return
        address = _address(request.client.host) if request.client else None
        if address is not None and any(address in network for network in self._trusted):
            _require_program(request, address.is_loopback)
        elif self._token is not None:
            problem = "is wrong" if bearer else "is missing"
            raise Unauthorized(f"the bearer token {problem}: send Authorization: Bearer <token of auth.token_file>")
        elif address is not None and address.is_loopback:
            _require_program(request, from_here=True)
        else:
            raise Forbidden(self._only_from(request.client.host if request.client else ""))

    def _only_from(self, address: str) -> str:
        where = "on the service's own machine"
        if self._trusted:
            where += f" and in auth.trusted_networks ({', '.join(map(str, self._trusted))})"
        return (
            f"weight and control routes answer callers {where} only, and {address or 'you'} called from elsewhere: "
            f"{_INSTEAD}"
        )


def _require_program(request: HTTPConnection, from_here: bool) -> None:
    """Raise Forbidden for a proxy or a web page.

    Args:
        from_here: True if the caller has a loopback address.
    """
    # uvicorn may take the caller's address from such a header: it trusts proxies on its own machine
    proxied = sorted(name for name in request.headers if name in _PROXY_HEADERS or name.startswith("x-forwarded-"))
    if proxied:
        raise Forbidden(
            f"without a token weight and control routes do not answer proxies, and this request has the header "
            f"{proxied[0]}: {_INSTEAD}",
            {"headers": proxied},
        )
    # DNS rebinding: a page of any site can resolve its own name to this machine, but it cannot choose this header
    host = request.headers.get("host", "")
    if from_here and not _names_loopback(host):
        raise Forbidden(
            f"without a token weight and control routes answer at localhost, 127.0.0.1 and [::1] only, and this "
            f"request is for the host {host!r}: use one of those, or {_INSTEAD}",
            {"host": host},
        )
    _require_no_page(request, host)


def _require_no_page(request: HTTPConnection, host: str) -> None:
    """Raise Forbidden for a browser's request on behalf of a page, except for the service's own pages.

    The host identifies the service's own pages. It must be an address: anyone can make a name resolve to this machine.
    Programs send neither ``Origin`` nor ``Sec-Fetch-Site``, and may use any name. Browsers send ``Origin`` with every
    request except a GET to the page's own host.
    """
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "none")
    of_another = origin is not None and origin.partition("://")[2].lower() != host.lower()
    if of_another or site not in ("same-origin", "none"):
        raise Forbidden(
            f"without a token weight and control routes do not answer pages of other origins, and a browser sent this "
            f"for {origin or 'a page elsewhere'}: {_INSTEAD}",
            {"origin": origin, "sec_fetch_site": site},
        )
    if (origin is not None or site != "none") and not _names_loopback(host) and _address(_name(host)) is None:
        raise Forbidden(
            f"without a token weight and control routes do not answer a page at the name {host!r}, which anyone may "
            f"have made to resolve here: open it by the service's address, or {_INSTEAD}",
            {"host": host, "origin": origin, "sec_fetch_site": site},
        )


def _names_loopback(host_header: str) -> bool:
    """Return True if a Host header names loopback without asking a name server."""
    name = _name(host_header)
    address = _address(name)
    return name.lower() == "localhost" or (address is not None and address.is_loopback)


def _name(host_header: str) -> str:
    """Return the host of a Host header, without the port and without the brackets of an IPv6 address."""
    name, bracket, _ = host_header.removeprefix("[").partition("]")
    return name if bracket else host_header.partition(":")[0]


def _address(host: str) -> IPv4Address | IPv6Address | None:
    """Return ``host`` as an IP address, or None if it is a name."""
    try:
        address = ip_address(host)
    except ValueError:
        return None
    # a listener on both families sees 127.0.0.1 as ::ffff:127.0.0.1
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address
