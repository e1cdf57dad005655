"""Weights that a trainer in the same Ray cluster has put into the object store, passed by reference.

A bucket is one object: a single tensor, or a dict of tensors. Buckets are read one at a time, and released before the
next, in two passes. The first collects names, shapes, dtypes and digests, which identify the version and are checked;
the second converts. Ray does not restrict access to objects, but callers with the ingest's handle are inside the
cluster already.
"""

import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TypeAlias

import numpy as np
import ray
import torch
import xxhash
from pydantic import ValidationError
from ray.exceptions import ObjectLostError, RayError, RayTaskError
from ray.serve.handle import DeploymentHandle

from rollout_service.errors import (
    InvalidManifest,
    InvalidRequest,
    NotFound,
    VersionConflict,
)
from rollout_service.model.convert import tensor_bytes
from rollout_service.protocol.base import MAX_VERSION, NewVersion
from rollout_service.protocol.ignored import NOTHING_IGNORED, IgnoredTensors
from rollout_service.protocol.upload import (
    DTYPE_BYTES,
    Announcement,
    CommitUpload,
    ObjectSource,
    SourceDtype,
    UploadTensor,
    with_kv_scales,
)
from rollout_service.protocol.weights import WeightStatus
from rollout_service.runtime.rpc import Bucket, ingest_client

logger = logging.getLogger(__name__)
Refs: TypeAlias = Mapping[str, ray.ObjectRef] | Iterable[ray.ObjectRef] | ray.ObjectRef

_DTYPES: dict[torch.dtype, SourceDtype] = {getattr(torch, name): name for name in DTYPE_BYTES}


class RefSource:
    """Buckets in Ray's object store. All are read at construction, for their table and digests.

    Raises NotFound for a lost object, InvalidManifest for one that does not hold weights.
    """

    def __init__(self, buckets: Iterable[Bucket], ignored: IgnoredTensors = NOTHING_IGNORED) -> None:
        """``ignored``: tensors that are left out."""
        self._buckets, self._ignored = tuple(buckets), ignored
        self._left_out: list[str] = []
        self._bucket_of: dict[str, int] = {}
        self._digests: dict[str, str] = {}
        self.table = tuple(self._survey())
        if left_out := ignored.summary(self._left_out):
            logger.info("%d buckets of a trainer: %s", len(self._buckets), left_out)
        """Names, dtypes and shapes of all tensors, bucket by bucket."""

    @property
    def stamp(self) -> str:
        """Return xxh3-128 of names, dtypes, shapes and bytes, independent of order and buckets."""
        lines = sorted(f"{t.name}\0{t.dtype}\0{list(t.shape)}\0{self._digests[t.name]}" for t in self.table)
        return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())

    def announced(
        self,
        version: NewVersion,
        kv_scales: dict[str, float] | None = None,
        label: str | None = None,
        uploader: str = "",
    ) -> tuple[Announcement, str]:
        """Return the announcement of a version with these weights and KV scales, and the digest for its commit. Raises
        InvalidRequest."""
        if isinstance(version, int) and not 0 <= version <= MAX_VERSION:
            raise InvalidRequest(
                f"version is {version}: versions are 0 to {MAX_VERSION}, which is what a double holds exactly"
            )
        try:
            announcement = Announcement(
                version=version,
                source=ObjectSource(digest=self.stamp),
                kv_scales=kv_scales,
                label=label,
                uploader=uploader,
            )
        except ValidationError as error:
            raise InvalidRequest(f"version={version!r}, label={label!r}: {error.errors()[0]['msg']}") from error
        return announcement, with_kv_scales(self.stamp, kv_scales)

    def batches(self, batch_bytes: int) -> Iterator[list[str]]:
        """Yield the names in each bucket; the trainer has chosen the size of buckets."""
        for _, names in groupby(self._bucket_of, key=self._bucket_of.__getitem__):
            yield list(names)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each of these tensors. Raises NotFound if its object was lost, VersionConflict if its content has
        changed."""
        for index, of_bucket in groupby(names, key=self._bucket_of.__getitem__):
            bucket = self._tensors(index)
            for name in of_bucket:
                if name not in bucket or _digest(bucket[name]) != self._digests[name]:
                    raise VersionConflict(f"{self._spell(index)}: {name} has changed while it was read: push it again")
                yield name, bucket[name]
            del bucket  # free it before the next one is fetched

    def _survey(self) -> Iterator[UploadTensor]:
        for index in range(len(self._buckets)):
            for name, tensor in self._tensors(index, self._left_out).items():
                if name in self._bucket_of:
                    raise InvalidManifest(f"{name} comes twice: in {self._spell(self._bucket_of[name])} and again in "
                                          f"{self._spell(index)}: put it once")  # fmt: skip
                self._bucket_of[name], self._digests[name] = index, _digest(tensor)
                yield UploadTensor(name=name, dtype=_DTYPES[tensor.dtype], shape=tuple(tensor.shape))

    def _tensors(self, index: int, left_out: list[str] | None = None) -> dict[str, torch.Tensor]:
        bucket = self._buckets[index]
        try:
            found = ray.get(bucket.refs[0])
        except RayTaskError as error:
            raise InvalidManifest(f"{self._spell(index)} was to be made by a task, which failed: {error}") from error
        except ObjectLostError as error:  # includes the death of the object's owner
            raise NotFound(
                f"{self._spell(index)} is lost: put the weights again, from a process that lives until the push has "
                f"been answered ({error})"
            ) from error
        except RayError as error:
            raise NotFound(f"{self._spell(index)} cannot be had: {error}") from error
        named = found if bucket.name is None else {bucket.name: found}
        if not isinstance(named, Mapping) or not named:
            raise InvalidManifest(f"{self._spell(index)} is {_kind(found)}, not a dict of tensors by their names")
        wanted = {}
        for key, value in named.items():
            name = self._name(index, key)
            if name not in self._ignored:
                wanted[name] = self._tensor(index, name, value)
            elif left_out is not None:
                left_out.append(name)
        return wanted

    def _name(self, index: int, name: object) -> str:
        if not isinstance(name, str) or not name:
            raise InvalidManifest(f"{self._spell(index)} has a key {name!r}: keys are Hugging Face's names of tensors")
        return name

    def _tensor(self, index: int, name: str, value: object) -> torch.Tensor:
        if isinstance(value, np.ndarray) and value.dtype in (np.float32, np.float16):
            value = torch.tensor(value)  # an array in the object store is read-only, which torch does not support
        if not isinstance(value, torch.Tensor):
            raise InvalidManifest(f"{self._spell(index)}: {name} is {_kind(value)}, not a tensor of weights")
        if value.dtype not in _DTYPES:
            raise InvalidManifest(
                f"{self._spell(index)}: {name} is {value.dtype}, but weights come as {', '.join(DTYPE_BYTES)}: cast it"
            )
        return value.detach().cpu()

    def _spell(self, index: int) -> str:
        bucket = self._buckets[index]
        return f"bucket {index} of {len(self._buckets)}" if bucket.name is None else f"the object of {bucket.name}"


def _digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor_bytes(tensor))


def _kind(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}"
    return f"a {type(value).__name__}"


def buckets_of(refs: Refs) -> tuple[Bucket, ...]:
    """Return the buckets of a dict of references, of one reference, or of several. Raises ValueError for anything
    else."""
    if isinstance(refs, Mapping):
        return tuple(Bucket((_ref(ref, f"refs[{name!r}]"),), name) for name, ref in refs.items())
    listed = [refs] if isinstance(refs, ray.ObjectRef) else list(refs)
    return tuple(Bucket((_ref(ref, f"refs[{index}]"),)) for index, ref in enumerate(listed))


async def push(
    ingest: DeploymentHandle,
    version: NewVersion,
    buckets: tuple[Bucket, ...],
    request: CommitUpload,
    kv_scales: dict[str, float] | None = None,
    label: str | None = None,
) -> WeightStatus:
    """Call ``Ingest.push_refs`` through its handle; the service's errors are raised here unchanged."""
    if not buckets:
        raise ValueError("refs is empty: give the weights of the whole model")
    return await ingest_client(ingest).push_refs(version, buckets, request, kv_scales, label, uuid.uuid4().hex)


def _ref(value: object, where: str) -> ray.ObjectRef:
    if not isinstance(value, ray.ObjectRef):
        raise ValueError(f"{where} is {_kind(value)}, not a ray.ObjectRef: ray.put() the tensors first")
    return value
