"""One push of tensors: the options of ``RolloutClient.push_weights``, and the announcement of its version."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict, get_args

from pydantic import ValidationError

from rollout_service.client._tensors import Progress, TensorSource, TensorThread
from rollout_service.errors import InvalidRequest, QuantizationError
from rollout_service.protocol.base import NewVersion, wrong_fields
from rollout_service.protocol.fleet import PauseMode
from rollout_service.protocol.upload import Announcement, CommitUpload, UploadTensor, WaitFor

if TYPE_CHECKING:
    from rollout_service.kv_scales import KVScales

Quantize = Literal["service", "trainer"]
Transport = Literal["auto", "http", "shared_memory", "cuda_ipc", "delta"]


class PushOptions(TypedDict, total=False):
    """The optional arguments of ``push_weights``."""

    label: str | None
    """The trainer's name for the version, such as ``run-7/step-300``: letters, digits and ``._:/@+=-``, at most 128, at
    least one letter. Replies include it, and ``min_weight_version`` accepts it; the newest version with a label counts.

    A failed push of ``"next"`` can be repeated under its label, even after the trainer restarts. It gets the same
    number and resumes; parts whose bytes have changed are replaced.
    """
    tensor_table: Sequence[UploadTensor] | None
    """Names, dtypes and shapes of the tensors that the generator will yield, in order."""
    quantize: Quantize | None
    """``service``: send tensors as they are. ``trainer``: quantize them here on their device, and send codes and
    scales. The version is the same byte for byte, at half the size. Up to 256 MiB of tensors are quantized at once;
    those of a generator are copied for it. None: ``trainer`` for a ``delta``, else ``service``."""
    transport: Transport
    """The way to the ingest:

    - ``shared_memory``: host memory shared with the ingest. Both must run on one machine, as one user, and not in
      separate containers. It takes 1 GiB, or 512 MiB and the largest tensor if that is more, and is kept for the next
      push. Such pushes of one client send one after the other, also through ``cuda_ipc``.
    - ``cuda_ipc``: memory of this process's current GPU, shared with the ingest. It takes 1.5 GiB, or 768 MiB and the
      largest tensor if that is more. The ingest needs a GPU (``weights.ingest_num_gpus``) that can reach this one. For
      tensors on a GPU it is faster than ``shared_memory``.
    - ``http``: parts over HTTP. Uploaded parts survive a crash of the ingest.
    - ``delta``: quantize here, and send the changes since this client's last ``delta`` push. The version is the same
      byte for byte; one RL step takes less than 1% of its bytes. The client keeps the last version in host memory; for
      GPU tensors this memory is pinned and up to a third larger. Comparing takes up to 512 MiB more, on the host or the
      GPU. Delta pushes of one client run one after the other. The first push sends everything. So does a push whose
      base the service no longer has, or that changes more than an eighth of the bytes.
    - ``auto``: for 256 MiB and more, ``cuda_ipc`` if the tensors are on a GPU with enough room, else ``shared_memory``.
      The first push finds out whether these work. If not, a client with ``quantize="trainer"`` sends deltas from its
      third push on. It keeps the second push for that, if it fits in half of the free host memory. After a push that
      changes more than an eighth of the bytes, the client keeps nothing and always sends everything. All other pushes
      use ``http``.
    """
    kv_scales: KVScales | None
    """Scales of an FP8 KV cache for these weights, from ``rollout_service.kv_scales``. They become part of the version.
    None: the service's ``kv_cache.scales_policy`` decides."""
    mode: PauseMode
    """The fate of running rollouts during the update, see ``CommitUpload.mode``."""
    wait: WaitFor
    """``all``: return once every live replica serves this version. ``none``: return after the commit."""
    timeout_s: float
    """Maximum seconds for ``wait``."""
    parallel_parts: int
    """Number of concurrent uploads, each with its own thread and connection."""
    progress: Progress | None
    """Called with (bytes on the service, total bytes) after each part. For a ``delta``, called with (bytes of the
    compared tensors, total bytes)."""


def require_push_options(quantize: Quantize | None, transport: Transport, parallel_parts: int) -> None:
    """Raise ValueError for a value that does not exist, or options that contradict each other."""
    if parallel_parts < 1:
        raise ValueError(f"parallel_parts={parallel_parts}: at least one upload at a time is needed")
    if quantize is not None and quantize not in get_args(Quantize):
        raise ValueError(f"quantize={quantize!r}: choose one of {', '.join(get_args(Quantize))}")
    if transport not in get_args(Transport):
        raise ValueError(f"transport={transport!r}: choose one of {', '.join(get_args(Transport))}")
    if transport == "delta" and quantize == "service":
        raise ValueError(
            "quantize='service' with transport='delta': a delta holds changes of quantized tensors, so the trainer "
            "quantizes; leave quantize out"
        )


@dataclass(frozen=True, slots=True)
class Push:
    """One push that sends. ``PushOptions`` describes its options."""

    version: NewVersion
    source: TensorSource
    thread: TensorThread
    label: str | None
    quantize: Quantize | None
    transport: Transport
    kv_scales: dict[str, float] | None
    commit: CommitUpload
    parallel_parts: int
    progress: Progress | None

    def announce(self, **what: object) -> Announcement:
        """Return the announcement of ``what``, see ``announcement``."""
        return announcement(self.version, label=self.label, kv_scales=self.kv_scales, **what)

    def commit_of(self, upload_digest: str) -> CommitUpload:
        """Return the commit of an upload by its digest."""
        return self.commit.model_copy(update={"upload_digest": upload_digest})


def announcement(version: NewVersion, **what: object) -> Announcement:
    """Return an announcement with a new uploader id. Raises InvalidRequest for an invalid version or label."""
    try:
        return Announcement.model_validate({"version": version, "uploader": uuid.uuid4().hex, **what})
    except ValidationError as error:
        raise InvalidRequest(f"version={version!r}, label={what.get('label')!r}: {wrong_fields(error)}") from error


def staged_still(version: int, error: QuantizationError) -> QuantizationError:
    """Return the error of a version that stays staged in part, with its remedies."""
    return QuantizationError(
        f"{error.message}. Version {version} stays staged with the parts that were sent, and is not committed: "
        f"mend the weights and push it again, or discard({version})",
        error.detail,
    )
