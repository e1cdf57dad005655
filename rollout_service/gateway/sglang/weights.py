"""SGLang's routes for weight updates from a folder, slime's ``/pull_weights`` (624b824), and ``/weights_checker``.

SGLang's NCCL and in-memory routes are refused by name. slime and miles compare weights before and after an update with
the checker, which goes by digests."""

from typing import Literal, TypedDict

from fastapi import APIRouter

from rollout_service.errors import CommitTimeout, InvalidRequest, MalformedRequest, WeightTransferFailed
from rollout_service.gateway.dependencies import Here
from rollout_service.gateway.sglang.replies import ControlRoute, Success
from rollout_service.gateway.update_weights import FolderPath, update_from_folder
from rollout_service.gateway.vllm_weights import different, loaded_digests
from rollout_service.protocol.base import FEW, MAX_VERSION, Frozen, is_label
from rollout_service.protocol.upload import PullWeights
from rollout_service.web.errors import documented

router = APIRouter(tags=["sglang"], route_class=ControlRoute)


class UpdateWeightsFromDisk(Frozen):
    """The implemented part of SGLang's ``UpdateWeightFromDiskReqInput``."""

    model_path: FolderPath
    """A Hugging Face folder of safetensors below ``weights.source_roots``."""
    weight_version: str | None = None
    """A decimal number or a label. A number becomes the version's number if it is newer than the newest. None: the
    number or label in the folder's name, if any."""
    load_format: Literal["auto", "safetensors"] | None = None
    abort_all_requests: bool = False
    """True to return running completions with their tokens so far. False: they continue with the new weights."""
    flush_cache: bool = True
    """Ignored: ``weights.kv_cache_on_update`` decides."""
    keep_pause: Literal[True] | None = None
    """Ignored: a pause always lasts until ``/continue_generation``."""


class UpdatedFromDisk(Success):
    """The reply, sent once every live replica serves the version."""

    num_paused_requests: int
    """Number of sequences that a pause holds."""
    version: int


@router.post(
    "/update_weights_from_disk",
    responses={200: {"model": UpdatedFromDisk}, **documented(MalformedRequest, CommitTimeout)},
)
async def update_weights_from_disk(body: UpdateWeightsFromDisk, services: Here) -> UpdatedFromDisk:
    """Serve the weights in a folder. Answers when every live replica serves them; the folder may then be deleted.

    Answers 400 if the weights are unusable; the previous version stays. A repeated call gets the same answer.
    """
    status = await update_from_folder(
        services,
        body.model_path,
        **_parse_version(body.weight_version),
        mode="abort" if body.abort_all_requests else "keep",
    )
    return UpdatedFromDisk(
        message=f"every replica serves version {status.version}",
        num_paused_requests=sum(replica.running for replica in status.replicas if replica.paused),
        version=status.version,
    )


class _Named(TypedDict, total=False):
    number: int
    label: str


def _parse_version(weight_version: str | None) -> _Named:
    if weight_version is None:
        return {}
    if weight_version.isdecimal() and weight_version.isascii() and len(weight_version) <= len(str(MAX_VERSION)):
        return {"number": int(weight_version)}
    if is_label(weight_version):
        return {"label": weight_version}
    raise InvalidRequest(
        f"weight_version {weight_version[:64]!r} is neither a decimal number nor a label: letters, digits and "
        "._:/@+=-, of them at least one letter, and at most 128"
    )


class Pulled(Success):
    """The reply of ``/pull_weights``."""

    version: int


@router.post("/pull_weights", responses={200: {"model": Pulled}, **documented(MalformedRequest, CommitTimeout)})
async def pull_weights(body: PullWeights, services: Here) -> Pulled:
    """Serve a version that a trainer publishes in a folder, whole or as changes to an earlier one.

    With ``local_checkpoint_dir``, as slime and miles send, the version is converted and verified, and served by
    ``/update_weights_from_disk`` with that path. Answers 400 if the version is unusable; the previous version stays.
    """
    status = await services.ingest.pull_weights(body)
    done = "is served" if body.local_checkpoint_dir is None else "is verified: POST /update_weights_from_disk serves it"
    return Pulled(message=f"version {status.version} {done}", version=status.version)


async def refuse(body: dict[str, object] | None = None) -> Success:
    """Refuse the request with 400: not implemented."""
    raise InvalidRequest(
        "weights over NCCL, from tensors or by IPC are not implemented under SGLang's routes: write a folder and send "
        "/update_weights_from_disk (slime: --update-weight-transport disk), or push to /v1/weights"
    )


for _route in (
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/update_weights_from_ipc",
):
    router.post(_route, responses=documented(MalformedRequest))(refuse)


class CheckWeights(Frozen):
    """The implemented part of SGLang's ``CheckWeightsReqInput``. ``reset_tensors`` is refused by name."""

    action: Literal["snapshot", "compare", "reset_tensors"]
    allow_quant_error: Literal[False] | None = None
    """Only false: digests are equal or not."""
    selector: Literal["all"] | None = None
    skip_tensor_list: tuple[str, ...] = ()
    """Names, as a checkpoint has them, that ``compare`` leaves out."""


@router.post("/weights_checker", responses={200: {"model": Success}, **documented(MalformedRequest)})
async def weights_checker(body: CheckWeights, services: Here) -> Success:
    """Keep the digests of the loaded weights, or compare the loaded weights with them.

    The ingest keeps one snapshot, until it restarts. Answers 400 if tensors differ.
    """
    if body.action == "reset_tensors":
        raise InvalidRequest(
            "weights_checker: reset_tensors is not implemented: weights change by a new version alone, and each "
            "replica compares what it has loaded with the version's digests; call snapshot and compare"
        )
    found = await loaded_digests(services)
    if body.action == "snapshot":
        await services.ingest.snapshot(found)
        return Success(message=f"the digests of version {found.version} are kept")
    kept = await services.ingest.snapshot()
    if kept is None:
        raise InvalidRequest("weights_checker: there is no snapshot to compare with: call snapshot first")
    if wrong := [name for name in different(found.digests, kept.digests) if name not in body.skip_tensor_list]:
        raise WeightTransferFailed(
            f"version {found.version} differs from the snapshot of version {kept.version} in {len(wrong)} tensors: "
            f"{', '.join(wrong[:FEW])}",
            {"version": found.version, "snapshot": kept.version},
        )
    return Success(message=f"version {found.version} equals the snapshot of version {kept.version}")
