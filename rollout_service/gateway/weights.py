"""The weight routes: recipe, begin, parts, commit, status. All need authorization; see ``protocol/upload.py``."""

import httpx
from fastapi import APIRouter, Request, Response

from rollout_service.errors import (
    CommitTimeout,
    DigestMismatch,
    InsufficientStorage,
    InvalidManifest,
    InvalidRequest,
    LogCorrupt,
    NotFound,
    NotReady,
    NotShared,
    PayloadTooLarge,
    QuantizationError,
    UploadIncomplete,
    VersionConflict,
)
from rollout_service.gateway.dependencies import Here
from rollout_service.gateway.mismatch import with_suspicions
from rollout_service.gateway.routes import OCTETS, GuardedRoute, refuse_cut_off_body
from rollout_service.protocol.base import Frozen, WeightVersion
from rollout_service.protocol.upload import (
    LARGEST_PART_BYTES,
    PART_DIGEST_HEADER,
    UPLOAD_KEY_HEADER,
    UPLOADER_HEADER,
    Announcement,
    CommitUpload,
    PartReceipt,
    RollBack,
    SharedTensors,
    TrainerRecipe,
    UploadPlan,
)
from rollout_service.protocol.weights import WeightStatus
from rollout_service.web.errors import documented

router = APIRouter(prefix="/v1/weights", tags=["weights"], route_class=GuardedRoute)
_FORWARDED = (PART_DIGEST_HEADER, UPLOADER_HEADER, "content-length", "content-type")

_PART = OCTETS | {
    "parameters": [
        {
            "name": PART_DIGEST_HEADER,
            "in": "header",
            "required": True,
            "schema": {"type": "string"},
            "description": "xxh3-128 of the part, in hex",
        }
    ]
}


class Versions(Frozen):
    """Every version on disk or staged, oldest first."""

    versions: tuple[WeightStatus, ...]


@router.get("/recipe")  # before /{version}, which would match "recipe"
async def recipe(services: Here) -> TrainerRecipe:
    """Return the conversion of each tensor, for a trainer that quantizes."""
    return await services.ingest.recipe()


@router.post("", responses=documented(InvalidManifest, VersionConflict, InsufficientStorage, NotFound, NotShared))
async def begin(body: Announcement, request: Request, services: Here) -> UploadPlan:
    """Start or resume the upload of a version."""
    reached = request.scope.get("server")  # the address at which the proxy accepted the connection
    return await services.ingest.begin(body, reached and reached[0])


@router.put(
    "/{version}/parts/{part}",
    responses={
        200: {"model": PartReceipt},
        **documented(InvalidRequest, DigestMismatch, NotFound, PayloadTooLarge, VersionConflict, InsufficientStorage),
    },
    openapi_extra=_PART,
)
async def put_part(version: WeightVersion, part: int, request: Request, services: Here) -> Response:
    """Forward one part to the ingest's own address, which some clients use directly.

    Serve's proxy buffers bytes that the ingest has not read yet, up to one part per call.
    """
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced) > LARGEST_PART_BYTES:
        raise PayloadTooLarge(
            f"no part has more than {LARGEST_PART_BYTES} bytes, and {announced} were announced: cut the stream as "
            "UploadPlan says",
            {"limit_bytes": LARGEST_PART_BYTES},
        )
    listener = await services.ingest.listener(version, services.node_id)
    if listener.certificate is not None:
        services.pinned.add(listener.certificate)
    headers = {name: request.headers[name] for name in _FORWARDED if name in request.headers}
    try:
        with refuse_cut_off_body(request):
            reply = await services.http.put(
                f"{listener.url}/v1/weights/{version}/parts/{part}",
                content=request.stream(),
                headers=headers | {UPLOAD_KEY_HEADER: listener.key},
            )
    except httpx.TransportError as error:
        raise NotReady(f"the ingest at {listener.url} did not take part {part}: send it again ({error!r})") from error
    return Response(reply.content, reply.status_code, media_type="application/json")


@router.post(
    "/{version}/shared",
    status_code=204,
    responses=documented(InvalidRequest, QuantizationError, NotFound, NotShared, VersionConflict),
)
async def take_shared(version: WeightVersion, body: SharedTensors, services: Here) -> None:
    """Read tensors from memory that the trainer shares. Answers when the memory may be overwritten."""
    await services.ingest.take_shared(version, body)


@router.post(
    "/{version}/commit",
    responses=documented(
        *(InvalidRequest, QuantizationError, NotFound, VersionConflict, UploadIncomplete, CommitTimeout),
        InsufficientStorage,
    ),
)
async def commit(version: WeightVersion, services: Here, body: CommitUpload | None = None) -> WeightStatus:
    """Make a complete upload the newest version."""
    return await services.ingest.commit(version, body or CommitUpload())


@router.post(
    "/rollback", responses=documented(InvalidRequest, NotFound, VersionConflict, CommitTimeout, InsufficientStorage)
)
async def roll_back(body: RollBack, services: Here) -> WeightStatus:
    """Make a kept version the newest again, under a new number. A repeated call changes nothing."""
    return await services.ingest.roll_back(body)


@router.get("")
async def versions(services: Here) -> Versions:
    """List all versions."""
    return Versions(versions=await with_suspicions(await services.ingest.versions(), services))


@router.get("/{version}", responses=documented(InvalidRequest, NotFound, LogCorrupt))
async def status(version: WeightVersion, services: Here) -> WeightStatus:
    """Return the state of one version, and the replicas that serve it."""
    (found,) = await with_suspicions([await services.ingest.status(version)], services)
    return found


@router.delete("/{version}", status_code=204, responses=documented(InvalidRequest, NotFound, VersionConflict))
async def discard(version: WeightVersion, services: Here) -> None:
    """Delete a staged version."""
    await services.ingest.discard(version)
