"""Push the weights of a trainer in the service's own Ray cluster by object reference.

    ingest = serve.get_deployment_handle("ingest", app_name="rollout")
    refs = [ray.put(dict_of_tensors) for dict_of_tensors in buckets]
    await push_refs(ingest, step, refs)

Importing this module needs neither ray nor torch; calling it needs both. The ingest trusts every holder of the handle,
because Ray, unlike HTTP, transfers Python objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout_service.client._upload import named_scales
from rollout_service.protocol.fleet import PauseMode
from rollout_service.protocol.upload import CommitUpload, WaitFor
from rollout_service.protocol.weights import WeightStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ray import ObjectRef
    from ray.serve.handle import DeploymentHandle

    from rollout_service.kv_scales import KVScales
    from rollout_service.protocol.base import NewVersion


async def push_refs(
    ingest: DeploymentHandle,
    version: NewVersion,
    refs: Mapping[str, ObjectRef] | Iterable[ObjectRef] | ObjectRef,
    *,
    label: str | None = None,
    kv_scales: KVScales | None = None,
    mode: PauseMode = "keep",
    wait: WaitFor = "all",
    timeout_s: float = 600.0,
) -> WeightStatus:
    """Push a whole version. The same weights give the same result, whatever their order or their buckets.

    The ingest holds one bucket in memory at a time. The process that put the objects must live until the call returns.

    Args:
        ingest: the handle of the ingest's deployment.
        version, label, kv_scales, mode, wait, timeout_s: see ``RolloutClient.push_weights``.
        refs: ``{name: ray.ObjectRef of a tensor}``, one ``ObjectRef`` of a dict of tensors, or several of such dicts.
            Each object is a bucket. Names and tensors are those of ``RolloutClient.push_weights``.

    Raises:
        ValueError: ``refs`` are not references.
        NotFound: An object is lost; the message names its bucket.
        InvalidManifest, QuantizationError, VersionConflict, InsufficientStorage, CommitTimeout: See
            ``RolloutClient.push_weights``.
        NotReady: The ingest died meanwhile; push again.
    """
    from rollout_service.ingest.sources.ray_objects import buckets_of, push

    request = CommitUpload(mode=mode, wait=wait, timeout_s=timeout_s)
    return await push(ingest, version, buckets_of(refs), request, named_scales(kv_scales), label)
