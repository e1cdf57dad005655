"""SGLang's ``/weights_checker``, by digests: slime and miles compare weights before and after an update with it."""

from typing import Literal

from fastapi import APIRouter

from rollout_service.errors import InvalidRequest, MalformedRequest, WeightTransferFailed
from rollout_service.gateway.dependencies import Here
from rollout_service.gateway.sglang.replies import ControlRoute, Success
from rollout_service.gateway.vllm_weights import different, loaded_digests
from rollout_service.protocol.base import Frozen
from rollout_service.web.errors import documented

router = APIRouter(tags=["sglang"], route_class=ControlRoute)
_NAMED = 8


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
            f"{', '.join(wrong[:_NAMED])}",
            {"version": found.version, "snapshot": kept.version},
        )
    return Success(message=f"version {found.version} equals the snapshot of version {kept.version}")
