"""The weight routes: recipe, begin, parts, commit, status. All need authorization; see ``weights/upload.py``."""

import httpx
from fastapi import APIRouter, Request, Response

from rollout_service.errors import (
    CommitTimeout,
    DigestMismatch,
    InsufficientStorage,
    InvalidManifest,
    InvalidRequest,
    NotFound,
    NotReady,
    QuantizationError,
    UploadIncomplete,
    VersionConflict,
)
from rollout_service.gateway.mismatch import with_suspicions
from rollout_service.gateway.routes import GuardedRoute
from rollout_service.gateway.services import Here, call
from rollout_service.types import Frozen, WeightStatus, WeightVersion
from rollout_service.web.errors import documented
from rollout_service.weights.upload import (
    PART_DIGEST_HEADER,
    UPLOADER_HEADER,
    BeginUpload,
    CommitUpload,
    PartReceipt,
    TrainerRecipe,
    UploadPlan,
)

router = APIRouter(prefix="/v1/weights", tags=["weights"], route_class=GuardedRoute)
_FORWARDED = (PART_DIGEST_HEADER, UPLOADER_HEADER, "content-length", "content-type", "authorization")

_PART = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    },
    "parameters": [
        {
            "name": PART_DIGEST_HEADER,
            "in": "header",
            "required": True,
            "schema": {"type": "string"},
            "description": "xxh3-128 of the part, in hex",
        }
    ],
}


class Versions(Frozen):
    """Every version on disk or staged, oldest first."""

    versions: tuple[WeightStatus, ...]


@router.get("/recipe")  # before /{version}, which would take it for a number
async def recipe(services: Here) -> TrainerRecipe:
    """What becomes of each tensor, for a trainer that quantizes itself."""
    return await call(services.ingest.recipe.remote())


@router.post("", responses=documented(InvalidManifest, VersionConflict, InsufficientStorage, NotFound))
async def begin(body: BeginUpload, services: Here) -> UploadPlan:
    """Start or resume the upload of a version."""
    return await call(services.ingest.begin.remote(body))


@router.put(
    "/{version}/parts/{part}",
    responses={
        200: {"model": PartReceipt},
        **documented(InvalidRequest, DigestMismatch, NotFound, VersionConflict, InsufficientStorage),
    },
    openapi_extra=_PART,
)
async def put_part(version: WeightVersion, part: int, request: Request, services: Here) -> Response:
    """Take one part and pass it on to the ingest's own address, which callers may use directly."""
    upload_url = await call(services.ingest.upload_address.remote())
    try:
        reply = await services.http.put(
            f"{upload_url}/v1/weights/{version}/parts/{part}",
            content=request.stream(),
            headers={name: request.headers[name] for name in _FORWARDED if name in request.headers},
        )
    except httpx.TransportError as error:
        raise NotReady(f"the ingest at {upload_url} did not take part {part}: send it again ({error!r})") from error
    return Response(reply.content, reply.status_code, media_type="application/json")


@router.post(
    "/{version}/commit",
    responses=documented(
        InvalidRequest,
        QuantizationError,
        NotFound,
        VersionConflict,
        UploadIncomplete,
        CommitTimeout,
        InsufficientStorage,
    ),
)
async def commit(version: WeightVersion, services: Here, body: CommitUpload | None = None) -> WeightStatus:
    """Make a complete upload the newest version."""
    return await call(services.ingest.commit.remote(version, body or CommitUpload()))


@router.get("")
async def versions(services: Here) -> Versions:
    """All versions."""
    return Versions(versions=await with_suspicions(await call(services.ingest.versions.remote()), services))


@router.get("/{version}", responses=documented(InvalidRequest, NotFound))
async def status(version: WeightVersion, services: Here) -> WeightStatus:
    """Where one version stands, and which replicas serve it."""
    (found,) = await with_suspicions([await call(services.ingest.status.remote(version))], services)
    return found


@router.delete("/{version}", status_code=204, responses=documented(InvalidRequest, NotFound, VersionConflict))
async def discard(version: WeightVersion, services: Here) -> None:
    """Drop a staged version."""
    await call(services.ingest.discard.remote(version))
