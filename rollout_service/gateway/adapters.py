"""LoRA adapters: upload, commit, list and remove; and the routes by which vLLM's and prime-rl's clients load folders.

All need authorization.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import PlainTextResponse

from rollout_service.errors import (
    BadRequest,
    CommitTimeout,
    DigestMismatch,
    Forbidden,
    InsufficientStorage,
    InvalidManifest,
    InvalidRequest,
    NotFound,
    UploadIncomplete,
    VersionConflict,
)
from rollout_service.gateway.dependencies import Here
from rollout_service.gateway.routes import OCTETS, GuardedRoute, read_body
from rollout_service.gateway.update_weights import FolderPath
from rollout_service.protocol.adapters import (
    ADAPTER_PART_BYTES,
    AdapterName,
    Adapters,
    AdapterStatus,
    AdapterUpload,
    BeginAdapter,
    CommitAdapter,
    VersionedName,
    read_adapter_name,
)
from rollout_service.protocol.base import NEXT, Frozen
from rollout_service.web.errors import documented

router = APIRouter(tags=["adapters"], route_class=GuardedRoute)
Name = Annotated[AdapterName, Path()]

# no response_class: with it, FastAPI documents errors as text, too
_SAID: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
_COMMIT_ERRORS = (InvalidManifest, InvalidRequest, NotFound, VersionConflict, CommitTimeout, InsufficientStorage)


@router.get("/v1/adapters")
async def adapters(services: Here) -> Adapters:
    """List all adapter versions, and the replicas that hold them."""
    return Adapters(adapters=tuple(await services.ingest.adapters()))


@router.post("/v1/adapters/{name}", responses=documented(InvalidManifest, InvalidRequest, InsufficientStorage))
async def begin(name: Name, body: BeginAdapter, services: Here) -> AdapterUpload:
    """Start or resume the upload of an adapter."""
    return await services.ingest.begin_adapter(name, body)


@router.put(
    "/v1/adapters/{name}/uploads/{digest}/parts/{part}",
    status_code=204,
    responses=documented(InvalidRequest, NotFound),
    openapi_extra=OCTETS,
)
async def put_part(name: Name, digest: str, part: int, request: Request, services: Here) -> Response:
    """Store one part of ``adapter_model.safetensors``. The commit compares the digest of the whole file."""
    content = await read_body(request, ADAPTER_PART_BYTES)
    await services.ingest.adapter_part(name, digest, part, content)
    return Response(status_code=204)


@router.post(
    "/v1/adapters/{name}/commit", responses=documented(*_COMMIT_ERRORS, UploadIncomplete, DigestMismatch, Forbidden)
)
async def commit(name: Name, body: CommitAdapter, services: Here) -> AdapterStatus:
    """Make an upload, a folder in PEFT's format, or an older version the newest version of an adapter."""
    return await services.ingest.commit_adapter(name, body)


@router.delete("/v1/adapters/{name}", status_code=204, responses=documented(NotFound))
async def remove(name: Name, services: Here) -> None:
    """Remove all versions of an adapter. Running rollouts finish."""
    await services.ingest.remove_adapter(name)


class LoadAdapter(Frozen):
    """vLLM's request to load an adapter from a folder."""

    lora_name: VersionedName
    """``run-a``, which gets its next version, or ``run-a@3``: OpenPipe's ART 0.5.23 names each step so."""
    lora_path: FolderPath
    """A folder in PEFT's format below ``weights.source_roots``, as the ingest sees it."""
    load_inplace: bool = False
    """Not used: every load is a new version, which new rollouts take."""
    base_model_name: str | None = None
    is_3d_lora_weight: bool = False


class UnloadAdapter(Frozen):
    """vLLM's request to unload an adapter."""

    lora_name: VersionedName
    """``run-a``, or ``run-a@3``. A version that is not the newest stays until its place is needed."""
    lora_int_id: int | None = None


def _parsed(lora_name: str) -> tuple[str, int | None]:
    """Return the name and the version in a ``VersionedName``."""
    named = read_adapter_name(lora_name)
    assert named is not None, "the pattern of VersionedName is narrower"
    return named


async def load_adapter(body: LoadAdapter, services: Here) -> PlainTextResponse:
    """Load a folder as the newest version of an adapter. Answers when every live replica holds it."""
    if body.is_3d_lora_weight:
        raise BadRequest("is_3d_lora_weight: adapters of routed experts are not served: leave them out")
    name, version = _parsed(body.lora_name)
    how = CommitAdapter(path=body.lora_path, wait="all", version=NEXT if version is None else version)
    await services.ingest.commit_adapter(name, how)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


# vLLM's, TRL's and AReaL's; prime-rl's and SGLang's; SkyRL's
for _path in ("/v1/load_lora_adapter", "/load_lora_adapter", "/skyrl/v1/load_lora_adapter"):
    router.post(_path, responses=_SAID | documented(*_COMMIT_ERRORS, Forbidden))(load_adapter)


@router.post("/v1/unload_lora_adapter", responses=_SAID | documented(NotFound))
@router.post("/unload_lora_adapter", responses=_SAID | documented(NotFound))
async def unload_adapter(body: UnloadAdapter, services: Here) -> PlainTextResponse:
    """Remove all versions of an adapter, if the newest or none is named. Running rollouts finish."""
    name, version = _parsed(body.lora_name)
    versions = [each.version for each in await services.ingest.adapters() if each.name == name]
    if version is not None and version not in versions:
        raise NotFound(f"adapter {name} has no version {version}: GET /v1/adapters lists all")
    if version in (None, max(versions, default=None)):
        await services.ingest.remove_adapter(name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
