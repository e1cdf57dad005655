"""Who may call the weight and control routes."""

import ipaddress
import secrets

from starlette.requests import HTTPConnection

from rollout_service.errors import Forbidden, Unauthorized

_PROXY_HEADERS = frozenset({"forwarded", "via", "x-real-ip", "x-client-ip"})
"""A proxy adds one of them, or one that begins with ``x-forwarded-``."""
_INSTEAD = "configure auth.token_file and send its token"


class Authorizer:
    """With a token: callers that send it. Without: programs on this machine that call the service by a loopback name.

    A browser on this machine calls from loopback too, on behalf of any page that is open in it, and so does a proxy, on
    behalf of anyone. Neither may without a token. A proxy that adds no header of its own cannot be told from a local
    program: who runs one on this machine needs a token.
    """

    def __init__(self, token: str | None) -> None:
        self._token = token

    def check(self, request: HTTPConnection) -> None:
        """Raise Unauthorized or Forbidden for a caller that may not."""
        if self._token is None:
            _require_local_program(request)
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), self._token.encode()):
            problem = "is missing" if not given else "is wrong"
            raise Unauthorized(f"the bearer token {problem}: send Authorization: Bearer <token of auth.token_file>")


def _require_local_program(request: HTTPConnection) -> None:
    address = request.client.host if request.client else ""
    if not _is_loopback(address):
        raise Forbidden(
            f"weight and control routes answer callers on the service's own machine only, and {address or 'you'} "
            f"called from elsewhere: {_INSTEAD}"
        )
    # the address above may be what such a header says: uvicorn believes proxies on its own machine
    proxied = sorted(name for name in request.headers if name in _PROXY_HEADERS or name.startswith("x-forwarded-"))
    if proxied:
        raise Forbidden(
            f"without a token weight and control routes do not answer proxies, and this request has the header "
            f"{proxied[0]}: {_INSTEAD}",
            {"headers": proxied},
        )
    # a page of any site can have its own name resolve to 127.0.0.1 (DNS rebinding); it cannot choose this header
    host = request.headers.get("host", "")
    if not _names_loopback(host):
        raise Forbidden(
            f"without a token weight and control routes answer at localhost, 127.0.0.1 and [::1] only, and this "
            f"request is for the host {host!r}: use one of those, or {_INSTEAD}",
            {"host": host},
        )
    _require_no_other_page(request, host)


def _require_no_other_page(request: HTTPConnection, host: str) -> None:
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "none")
    of_another = origin is not None and origin.partition("://")[2].lower() != host.lower()
    if of_another or site not in ("same-origin", "none"):
        raise Forbidden(
            f"without a token weight and control routes do not answer pages of other origins, and a browser sent this "
            f"for {origin or 'a page elsewhere'}: {_INSTEAD}",
            {"origin": origin, "sec_fetch_site": site},
        )


def _names_loopback(host_header: str) -> bool:
    """Whether a Host header, with or without a port, names this machine's loopback whatever a name server says."""
    name, bracket, _ = host_header.removeprefix("[").partition("]")
    if not bracket:
        name = host_header.partition(":")[0]
    return name.lower() == "localhost" or _is_loopback(name)


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # a listener on both families sees 127.0.0.1 as ::ffff:127.0.0.1
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
