"""Certificates made on the spot, as somebody without a public name makes them."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_NOW = datetime.datetime.now(datetime.UTC)


@dataclass(frozen=True)
class Certificate:
    """With its key, in files, and in memory for signing others."""

    certfile: Path
    keyfile: Path
    made: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def files(self) -> dict[str, Path]:
        """As uvicorn takes them."""
        return {"ssl_certfile": self.certfile, "ssl_keyfile": self.keyfile}

    @property
    def pem(self) -> str:
        """What a listener shows."""
        return self.certfile.read_text()


def make_certificate(
    folder: Path, name: str, *, signer: Certificate | None = None, authority: bool = False
) -> Certificate:
    """``name``: a host's name or address. ``signer``: None: it signs itself. ``authority``: it may sign others."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if signer is None else signer.made.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOW - datetime.timedelta(days=1))
        .not_valid_after(_NOW + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName([_general(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key((signer.key if signer else key).public_key()),
            critical=False,
        )
        .sign(key if signer is None else signer.key, hashes.SHA256())
    )
    folder.mkdir(parents=True, exist_ok=True)
    certfile, keyfile = folder / "tls.crt", folder / "tls.key"
    certfile.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    keyfile.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return Certificate(certfile, keyfile, made, key)


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
