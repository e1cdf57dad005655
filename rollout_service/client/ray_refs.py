"""Weights of a trainer in the service's own Ray cluster, pushed by reference.

    ingest = serve.get_deployment_handle("ingest", app_name="rollout")
    refs = [ray.put(dict_of_tensors) for dict_of_tensors in buckets]
    await push_refs(ingest, step, refs)

Importing this needs neither ray nor torch; calling it does. Whoever has the handle is trusted: unlike HTTP, Ray moves
Python objects.
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
    """Push a whole version; the same weights again get the same answer, whatever their order or their buckets.

    ``ingest``: handle of the ingest's deployment. ``refs``: ``{name: ray.ObjectRef of a tensor}``, or one
    ``ObjectRef`` of a dict of tensors, or several of such dicts, each a bucket. Names are Hugging Face's, tensors are
    those of ``RolloutClient.push_weights``. The ingest holds one bucket in memory at a time; the process that put the
    objects must live until the answer. ``version``, ``label``, ``kv_scales``, ``mode``, ``wait`` and ``timeout_s`` as
    for ``push_weights``.

    Raises ValueError if ``refs`` are not references; NotFound for a lost object, by the name of its bucket;
    InvalidManifest, QuantizationError, VersionConflict, InsufficientStorage, CommitTimeout; NotReady if the ingest died
    meanwhile: push again.
    """
    from rollout_service.ingest.sources.ray_objects import buckets_of, push

    request = CommitUpload(mode=mode, wait=wait, timeout_s=timeout_s)
    return await push(ingest, version, buckets_of(refs), request, named_scales(kv_scales), label)
