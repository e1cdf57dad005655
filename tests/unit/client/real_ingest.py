"""The real ingest with its real upload routes and the real gateway, over HTTP, without Ray and without an engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from rollout_service.gateway.deployment import create_app
from rollout_service.ingest.ingest import Ingest
from rollout_service.ingest.upload_address import UploadAddress
from rollout_service.ingest.upload_server import UploadServer
from rollout_service.runtime.tls import PinnedCertificates
from rollout_service.store.log import WeightLog
from rollout_service.web.auth import Authorizer
from tests.support.certificates import Certificate
from tests.support.serving import App, serving
from tests.support.without_ray import services_of
from tests.unit.ingest.trainer import config_of


@dataclass
class RealIngest:
    """Its address, and what it has written."""

    url: str
    ingest: Ingest
    log: WeightLog


@asynccontextmanager
async def real_ingest(
    model: Path,
    root: Path,
    *,
    token: str | None = None,
    certificate: Certificate | None = None,
    **sections: dict[str, object],
) -> AsyncIterator[RealIngest]:
    """Version 0 is made from ``model``; there are no replicas, so pushes are to ``wait="none"``.

    ``certificate``: of the gateway and of the listener; None: plain HTTP.
    """
    config = config_of(model, root, **sections)
    ingest = Ingest(config)
    await ingest.start()
    authorizer, pinned = Authorizer(token), PinnedCertificates()
    http = httpx.AsyncClient(verify=pinned.context, timeout=None)
    files = certificate and (certificate.certfile, certificate.keyfile)
    uploads = UploadServer(ingest, "127.0.0.1", certificate=files)
    uploads.start()
    ingest.upload_address = UploadAddress(uploads.host, uploads.port, certificate=uploads.certificate)
    try:
        async with http:
            services = replace(services_of(ingest, config, authorizer, http), pinned=pinned)
            async with serving(App(create_app(services)), certificate) as gateway:
                yield RealIngest(gateway.url, ingest, WeightLog(root))
    finally:
        await uploads.stop()
        await ingest.stop()
