"""Checks against what the log already holds: of its model and quantization, of numbers, and of announcements."""

from collections.abc import Collection, Iterable

import msgspec
import xxhash

from rollout_service.config import QuantConfig, ServiceConfig
from rollout_service.errors import LogCorrupt, VersionConflict
from rollout_service.model.quant_plan import QuantPlan
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.base import MAX_VERSION, NEXT
from rollout_service.protocol.upload import BeginUpload, with_kv_scales
from rollout_service.protocol.weight_log import Head
from rollout_service.store.labels import VersionLabels
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest, Recipe
from rollout_service.store.upload_record import UploadRecord


def recipe_of(quant: QuantConfig, plan: QuantPlan) -> Recipe:
    """Return the quantization recipe of versions."""
    recipe = Recipe(weights=quant.weights, scales=quant.scales, not_converted=plan.not_converted)
    return recipe if plan.form.in_blocks else msgspec.structs.replace(recipe, block=None)


def own_newest(
    log: WeightLog, model: ServedModel, recipe: Recipe, config: ServiceConfig
) -> tuple[Head, Manifest] | None:
    """Return the newest version; None for an empty log. Raises LogCorrupt for a damaged log, or one of another
    service."""
    head = log.head()
    if head is None:
        return None
    manifest = log.manifest(head.version)
    if (begun_with := model.other_revision(manifest.fingerprint)) is not None:
        raise LogCorrupt(f"the log at {log.root} was begun with {begun_with}, or name another weights.root")
    if manifest.fingerprint != model.fingerprint or manifest.recipe != recipe:
        raise LogCorrupt(
            f"the log at {log.root} holds version {head.version} of another model or quantization than "
            f"{config.model.path} with quant={config.quant.model_dump()}: name another weights.root"
        )
    return head, manifest


class VersionNumbers:
    """The numbers of one log's versions."""

    def __init__(self, log: WeightLog, labels: VersionLabels) -> None:
        """``labels``: the log's labels, for messages."""
        self._log, self._labels = log, labels

    @property
    def newest(self) -> int:
        """Return the largest number of a committed version; -1: there is none."""
        head = self._log.head()
        return -1 if head is None else head.version

    def after(self, taken: Iterable[int]) -> int:
        """Return the first number above all committed versions and ``taken``. Raises VersionConflict."""
        return _within_bounds(max([self.newest, *taken]) + 1)

    def first_free(self, taken: Collection[int]) -> int:
        """Return the first number above the newest version that is not in ``taken``. Raises VersionConflict."""
        number = self.newest + 1
        while number in taken:
            number += 1
        return _within_bounds(number)

    def require_newer(self, version: int) -> None:
        """Raise VersionConflict for a version that is not newer than the newest committed one."""
        head = self._log.head()
        if head is not None and version <= head.version:
            kept = self._log.versions()
            raise VersionConflict(
                f"version {version} is not newer than the newest committed version {head.version} "
                f"(digest {head.digest}), and versions only grow. A trainer that has gone back pushes the version "
                f"{NEXT!r}, with a label of its own such as 'run/step-{version}'; client.rollback(to=…), POST "
                "/v1/weights/rollback or `rollout-service log rollback` make a kept version the newest again, of "
                f"{self._labels.spelled(kept)}",
                {
                    "version": version,
                    "latest_version": head.version,
                    "latest_digest": head.digest,
                    "kept_versions": kept,
                },
            )


def _within_bounds(number: int) -> int:
    if number > MAX_VERSION:
        raise VersionConflict(
            f"version {MAX_VERSION} is the last that there can be: name another weights.root, which begins anew",
            {"version": number},
        )
    return number


def require_same_upload(known: UploadRecord, begin: BeginUpload, stamp: str | None, head: Head | None) -> None:
    """Raise VersionConflict if ``begin`` differs from the committed announcement.

    Args:
        stamp: present stamp of the announced path; None: of another source, or of another path.
        head: the newest version.
    """
    if begin.label is not None and begin.label != known.begin.label:
        raise VersionConflict(
            f"version {begin.version} is committed with {_spelled(known.begin.label)}, and {_spelled(begin.label)} "
            f"now: leave the label out, or push version {NEXT!r}",
            {"version": begin.version, "labels": [known.begin.label, begin.label]},
        )
    mine, theirs = _announced_digest(known.begin), _announced_digest(begin)
    if stamp is not None:
        mine, theirs = known.source_stamp, stamp
    if mine == theirs:
        return
    raise VersionConflict(
        f"version {begin.version} is committed with {_difference(known.begin, begin)} ({mine}, and {theirs} now): push "
        f"a newer version, such as {NEXT!r}, or go back to a kept one by POST /v1/weights/rollback",
        {
            "version": begin.version,
            "digests": [mine, theirs],
            "latest_version": head and head.version,
            "latest_digest": head and head.digest,
        },
    )


def _announced_digest(begin: BeginUpload) -> str:
    text = begin.model_dump_json(include={"tensors", "source", "delta"})
    return with_kv_scales(xxhash.xxh3_128_hexdigest(text.encode()), begin.kv_scales)


def _spelled(label: str | None) -> str:
    return "no label" if label is None else f"the label {label!r}"


def _difference(known: BeginUpload, begin: BeginUpload) -> str:
    """Describe the difference between two announcements of one version, or between two readings of the same path."""
    if known.describes_what(begin):
        return "another content under that path"
    if known.describes_what(begin.model_copy(update={"kv_scales": known.kv_scales})):
        return "other KV scales"
    if begin.source is None and known.tensors == begin.tensors:
        return "a delta of another base" if known.delta and begin.delta else "tensors where one has a delta"
    return "another tensor table" if known.source == begin.source else "another source"
