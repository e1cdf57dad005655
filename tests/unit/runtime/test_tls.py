"""Certificates from files, and whom a caller trusts."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from cryptography.hazmat.primitives import serialization

from rollout_service.runtime.tls import PinnedCertificates, require_certificate, tls_context
from tests.support.certificates import Certificate, make_certificate

SETTINGS = "weights.upload_ssl_certfile and weights.upload_ssl_keyfile"


@asynccontextmanager
async def listening(certificate: Certificate) -> AsyncIterator[int]:
    """A listener on a port of loopback that shows ``certificate`` and closes what connects."""

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.certfile, certificate.keyfile)
    async with await asyncio.start_server(close, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]


async def connect(port: int, trusts: ssl.SSLContext) -> None:
    """Raises what keeps a caller from connecting."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusts, server_hostname="127.0.0.1")
    writer.close()


class TestFiles:
    def test_a_certificate_with_its_key_is_what_is_shown(self, tmp_path):
        made = make_certificate(tmp_path, "rollouts.example")
        assert require_certificate(made.certfile, made.keyfile, SETTINGS) == made.pem

    def test_an_encrypted_key_is_refused_and_no_password_asked_for(self, tmp_path):
        made = make_certificate(tmp_path, "a")
        made.keyfile.write_bytes(
            made.key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(b"secret"),
            )
        )
        with pytest.raises(ValueError, match="unencrypted key"):
            require_certificate(made.certfile, made.keyfile, SETTINGS)

    @pytest.mark.parametrize("content", [None, "no PEM", "\xff"])
    def test_what_is_no_certificate_is_refused(self, tmp_path, content):
        made = make_certificate(tmp_path, "a")
        made.certfile.unlink()
        if content is not None:
            made.certfile.write_text(content, encoding="latin-1")
        with pytest.raises(ValueError, match=r"tls\.crt"):
            require_certificate(made.certfile, made.keyfile, SETTINGS)
        with pytest.raises(ValueError, match=r"tls\.crt' is no file of certificates in PEM"):
            tls_context(made.certfile)


class TestPinned:
    async def test_one_that_an_authority_signed_is_and_its_others_are_not(self, tmp_path):
        authority = make_certificate(tmp_path / "authority", "authority", authority=True)
        mine = make_certificate(tmp_path / "mine", "a", signer=authority)
        other = make_certificate(tmp_path / "other", "a", signer=authority)
        pinned = PinnedCertificates()
        pinned.add(mine.pem + authority.pem)  # as a file of a certificate and its signers has them
        async with listening(mine) as port:
            await connect(port, pinned.context)
        async with listening(other) as port:
            with pytest.raises(ssl.SSLCertVerificationError):
                await connect(port, pinned.context)

    @pytest.mark.parametrize("text", ["", "no PEM", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
    def test_what_is_no_certificate_is_refused(self, text):
        with pytest.raises(ValueError, match="this is no certificate in PEM"):
            PinnedCertificates().add(text)


class TestAuthorities:
    async def test_a_file_s_are_trusted_for_their_names_only(self, tmp_path):
        authority = make_certificate(tmp_path / "authority", "authority", authority=True)
        for name, is_fine in (("127.0.0.1", True), ("another.example", False)):
            async with listening(make_certificate(tmp_path / name, name, signer=authority)) as port:
                if is_fine:
                    await connect(port, tls_context(authority.certfile))
                else:
                    with pytest.raises(ssl.SSLCertVerificationError):
                        await connect(port, tls_context(authority.certfile))
