"""TLS by file: what a listener shows, and whom a caller trusts.

A caller of the upload listener trusts no authority: it trusts the certificate that the gateway told it, and only that
one, whatever names it is for. So parts may go to an address, and a certificate that nobody signed is enough.
"""

import ssl
from pathlib import Path

import httpx


def require_certificate(certfile: Path, keyfile: Path, settings: str) -> str:
    """The certificates in ``certfile``, as PEM, once it is sure that a listener can show them.

    ``settings``: what the two are called. Raises ValueError if a file cannot be read, is not PEM, or if they are no
    pair.
    """
    try:
        # a password is asked for on the terminal otherwise, and there is none
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certfile, keyfile, password="")
        return certfile.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:  # ssl.SSLError is an OSError
        raise ValueError(
            f"{settings}: {certfile} and {keyfile} are no certificate with its unencrypted key, in PEM: {error}"
        ) from error


def trusting(ca_file: Path | str | None) -> ssl.SSLContext:
    """Trusts who is signed by an authority of ``ca_file``, a file of certificates in PEM; None: of this machine's.

    Raises ValueError if there is no such file, or no certificate in it.
    """
    if ca_file is None:
        return httpx.create_ssl_context()
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except OSError as error:
        raise ValueError(f"ca_file={str(ca_file)!r} is no file of certificates in PEM: {error}") from error


def untrusted(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """Why a connection was not made, if that is because its listener was not trusted."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error


class PinnedCertificates:
    """Trusts those who show a certificate that was added, whatever names it is for, and nobody else."""

    def __init__(self) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        """For the connections."""
        self.context.check_hostname = False
        self.context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # whoever signed it
        self._added: set[str] = set()

    def add(self, certificate: str) -> None:
        """Trust the first of some certificates in PEM, which is the listener's own, the others being its signers'.

        Raises ValueError if there is none.
        """
        first, end, _ = certificate.partition("-----END CERTIFICATE-----")
        if first in self._added:
            return
        try:
            self.context.load_verify_locations(cadata=first + end + "\n")
        except ssl.SSLError as error:
            raise ValueError(f"this is no certificate in PEM: {error}") from error
        self._added.add(first)
