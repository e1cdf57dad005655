"""Who may call the weight and control routes."""

import ipaddress
import secrets

from starlette.requests import HTTPConnection

from rollout_service.errors import Forbidden, Unauthorized


class Authorizer:
    """With a token: callers that send it. Without: callers on this machine."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def check(self, request: HTTPConnection) -> None:
        """Raise Unauthorized or Forbidden for a caller that may not."""
        if self._token is None:
            host = request.client.host if request.client else ""
            if not _is_loopback(host):
                raise Forbidden(
                    f"weight and control routes answer callers on the service's own machine only, and {host or 'you'} "
                    "called from elsewhere: configure auth.token_file and send its token"
                )
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), self._token.encode()):
            problem = "is missing" if not given else "is wrong"
            raise Unauthorized(f"the bearer token {problem}: send Authorization: Bearer <token of auth.token_file>")


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # a listener on both families sees 127.0.0.1 as ::ffff:127.0.0.1
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
