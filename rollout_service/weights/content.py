"""What the ingest keeps in memory of each committed version."""

from typing import NamedTuple

from rollout_service.types import KVScalesFrom
from rollout_service.weights.manifest import Manifest


class Content(NamedTuple):
    """What statuses and metrics tell of a manifest, without its tensors, which may be 40 000."""

    digest: str
    total_bytes: int
    kv_scales_from: KVScalesFrom
    kv_scales: dict[str, float] | None
    """As in the manifest, or as they were settled since."""

    @classmethod
    def of(cls, manifest: Manifest, digest: str) -> "Content":
        """``digest``: the manifest's, which takes a while to compute."""
        return cls(digest, manifest.total_bytes, manifest.kv_scales_from, manifest.kv_scales)
