"""TLS from files: certificates of listeners, and trust of clients.

A client of the upload listener trusts no authority, only the certificate that the gateway told it, for any host name.
Parts may therefore go to a bare address, and a self-signed certificate is enough.
"""

import ssl
from pathlib import Path


def require_certificate(certfile: Path, keyfile: Path, settings: str) -> str:
    """Return the certificates in ``certfile``, as PEM, after checking that a listener can use them.

    ``settings``: names of both settings. Raises ValueError if a file cannot be read, is not PEM, or if they are not a
    pair.
    """
    try:
        # without a password, OpenSSL would ask for one on the terminal, and there is none
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certfile, keyfile, password="")
        return certfile.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:  # ssl.SSLError is an OSError
        raise ValueError(
            f"{settings}: {certfile} and {keyfile} are no certificate with its unencrypted key, in PEM: {error}"
        ) from error


def tls_context(ca_file: Path | str) -> ssl.SSLContext:
    """Return a context that trusts the authorities in ``ca_file``, in PEM.

    Raises ValueError if there is no such file, or no certificate in it.
    """
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except OSError as error:
        raise ValueError(f"ca_file={str(ca_file)!r} is no file of certificates in PEM: {error}") from error


def certificate_error(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """Return the certificate error because of which a connection was not made, if that was the reason."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error


class PinnedCertificates:
    """Trusts certificates that were added, for any host name, and no others."""

    def __init__(self) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        """Context for connections."""
        self.context.check_hostname = False
        self.context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust it without its signer
        self._added: set[str] = set()

    def add(self, certificate: str) -> None:
        """Trust the first of some certificates in PEM: the listener's own, before those of its signers.

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
