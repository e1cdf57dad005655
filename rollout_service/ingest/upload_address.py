"""Address of the ingest's upload listener, the choice of the address for each client, and mutual authentication.

The bearer token is only sent to the gateway; the listener accepts only keys. The reply to ``begin`` names an address of
the listener and a key for that one version. The trainer first makes the listener prove that it knows the key, without
sending the key. It then sends the key with each part. Another process that listens on such an address, for example on
the trainer's own machine, gets neither token nor key nor weights.
"""

import hashlib
import hmac
import ipaddress
import secrets
import socket
from contextlib import suppress

from rollout_service.config.service import host_and_port
from rollout_service.errors import RolloutServiceError
from rollout_service.protocol.upload import Listener, listener_proof


class UploadAddress:
    """Addresses and keys of one listener, for its lifetime."""

    def __init__(
        self,
        host: str,
        port: int,
        node_ip: str | None = None,
        node_id: str | None = None,
        *,
        advertised: str | None = None,
        certificate: str | None = None,
    ) -> None:
        """
        Args:
            host: the address that it is bound to.
            node_ip, node_id: its node in the Ray cluster, if it is in one.
            advertised: ``weights.upload_advertise_address``: the host, or host:port, for trainers.
            certificate: its certificate, in PEM; None: plain HTTP.
        """
        self._host, self._port, self._node_ip, self._node_id = host, port, node_ip, node_id
        self._certificate = certificate
        self._advertised = None if advertised is None else host_and_port(advertised)
        self._secret = secrets.token_bytes(32)

    def __str__(self) -> str:
        return self._url(self._host)

    def key(self, version: int) -> str:
        """Return the key that authorizes uploads of one version."""
        return hmac.new(self._secret, str(version).encode(), hashlib.sha256).hexdigest()

    def opens(self, version: int, key: str | None) -> bool:
        """Return True if ``key`` is that version's."""
        return key is not None and hmac.compare_digest(key.encode(), self.key(version).encode())

    def proof(self, version: int, nonce: str) -> str:
        """Return the listener's proof that it knows the key."""
        return listener_proof(self.key(version), nonce)

    def announced(self, version: int, reached: str | None) -> Listener | None:
        """Return the listener's address for a trainer that called the service at the address ``reached``.

        Return None if the trainer may not be able to reach the listener: its parts then go through the gateway.
        """
        if self._advertised is not None:
            return self._listener(version, *self._advertised)
        host = self._host_for(reached)
        return None if host is None else self._listener(version, host)

    def within(self, version: int, node_id: str | None) -> Listener:
        """Return the listener's address for the gateway on a node. Raises RolloutServiceError if it cannot reach the
        listener."""
        elsewhere = node_id != self._node_id
        if elsewhere and _is_loopback(self._host):
            raise RolloutServiceError(
                f"the ingest listens for parts on {self._host} of another node than this gateway's: set "
                "weights.upload_host to 0.0.0.0, or push with a path"
            )
        host = self._host
        if _is_wildcard(host):
            host = (self._node_ip if elsewhere else None) or ("::1" if ":" in host else "127.0.0.1")
        return self._listener(version, host)

    def _listener(self, version: int, host: str, port: int | None = None) -> Listener:
        return Listener(url=self._url(host, port), key=self.key(version), certificate=self._certificate)

    def _url(self, host: str, port: int | None = None) -> str:
        scheme = "http" if self._certificate is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port or self._port}"

    def _host_for(self, reached: str | None) -> str | None:
        if _is_loopback(self._host):
            return self._host if reached is not None and _is_loopback(reached) else None
        if not _is_wildcard(self._host):
            return self._host
        if reached is not None and not _is_loopback(reached) and _is_of_this_machine(reached):
            return reached
        return self._node_ip


def _is_wildcard(host: str) -> bool:
    return host in ("0.0.0.0", "::")  # compared with, not bound to


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _is_of_this_machine(address: str) -> bool:
    """Return True if a socket can be bound to the address."""
    with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return True
    return False
