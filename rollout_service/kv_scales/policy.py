"""The KV scales of a version: whether those that came with it fit the served model, and what it gets without any."""

import struct
from collections.abc import Mapping

from rollout_service.config import ServiceConfig
from rollout_service.errors import InvalidManifest
from rollout_service.kv_scales.result import KVScaleResult
from rollout_service.kv_scales.scales import TENSORS
from rollout_service.model.served_model import ServedModel
from rollout_service.store.manifest import Manifest

_SMALLEST_NORMAL = 2.0**-126
_LARGEST = (2 - 2**-7) * 2.0**127 / 448
"""The largest code stands for the largest BF16 number: with a larger scale it would overflow."""


class KVScalesRule:
    """Applies ``kv_cache.scales_policy``; knows the scales of the newest version that has some."""

    def __init__(self, config: ServiceConfig, model: ServedModel) -> None:
        """Raises ValueError for the policy ``calibrate`` where nothing could use scales."""
        self._policy, self._model = config.kv_cache.scales_policy, model
        self._no_use = _no_use(config, model)
        if self._policy == "calibrate" and self._no_use:
            raise ValueError(f"kv_cache.scales_policy is calibrate, but {self._no_use}")
        self._awaits = True
        self._known = -1
        self.fp8 = True
        """Whether replicas have an FP8 cache; nothing is measured for any other."""
        self.newest: dict[str, float] | None = None
        """Of the newest version whose scales are known; None: 1 everywhere."""
        self.largest: dict[str, tuple[float, float, float]] = {}
        """What they were made from, if the service has measured."""
        self.drift: float | None = None
        """The largest factor, less 1, between one of them and the one of the version before."""

    def check(self, scales: Mapping[str, float] | None) -> None:
        """Raise InvalidManifest, with every name, unless there are scales for q, k and v of exactly the model's layers.

        A scale is a positive, normal number of fp32, and 448 times as much is finite in BF16. None: nothing came,
        which is right.
        """
        if scales is None:
            return
        if self._no_use:
            raise InvalidManifest(f"the version brings {len(scales)} KV scales, but {self._no_use}")
        expected = {f"{layer}.{x}_scale" for layer in self._model.attention for x in TENSORS}
        wrong = {
            "missing": sorted(expected - scales.keys()),
            "unknown": sorted(scales.keys() - expected),
            "unusable": [f"{name} is {value:g}" for name, value in scales.items() if not _is_scale(value)],
        }
        wrong = {what: names for what, names in wrong.items() if names}
        if wrong:
            summary = "; ".join(f"{len(names)} {what}: {', '.join(names[:4])}" for what, names in wrong.items())
            raise InvalidManifest(
                f"the KV scales do not fit the served model {self._model.path.name}, where q, k and v of "
                f"{len(self._model.attention)} attention layers have a positive fp32 number each: {summary}",
                wrong,
            )

    def added_to(self, manifest: Manifest, scales: dict[str, float] | None) -> Manifest:
        """The manifest with the scales that came with the version, or with what the policy says."""
        if scales is not None:
            return manifest.model_copy(update={"kv_scales": scales, "kv_scales_from": "trainer"})
        if self.fp8 and self._policy == "calibrate":
            return manifest.model_copy(update={"kv_scales_from": "calibrate"})
        if self._policy != "unit" and self.newest is not None and not self._no_use:
            return manifest.model_copy(update={"kv_scales": self.newest, "kv_scales_from": "reuse"})
        return manifest

    def remember(self, newest: Manifest) -> None:
        """The newest committed version."""
        self._awaits = newest.awaits_kv_scales
        if not self._awaits:
            self._known = newest.version
            self._replace(newest.kv_scales)

    def measured_before(self, last: KVScaleResult) -> None:
        """What was settled last in a log that goes on, of its newest version or of one before."""
        self.largest = last.largest
        if self._awaits:
            self.newest = last.scales

    def settled(self, settled: KVScaleResult) -> None:
        """The scales of a version that awaited them; newer ones may have been committed, and settled, meanwhile."""
        self.largest = settled.largest or self.largest
        if settled.version < self._known:
            return
        self._known = settled.version
        self._replace(settled.scales)

    def _replace(self, scales: dict[str, float] | None) -> None:
        before, self.newest = self.newest, scales
        self.drift = drift(before, scales)


def drift(before: Mapping[str, float] | None, now: Mapping[str, float] | None) -> float | None:
    """The largest factor, less 1, between a scale and the one of the same name before; None: there was none."""
    if before is None or now is None:
        return None
    return max((max(now[name] / before[name], before[name] / now[name]) - 1 for name in now), default=None)


def _no_use(config: ServiceConfig, model: ServedModel) -> str | None:
    """Why this service can do nothing with KV scales; None: it can."""
    if config.kv_cache.dtype == "bfloat16":
        return "kv_cache.dtype is bfloat16, and a BF16 cache has none: leave kv_scales out"
    if not model.attention:
        return f"{model.path.name} has no attention layers that take them: leave kv_scales out"
    if config.quant.weights == "none" and config.scaling.num_gpus > 0:
        return "vLLM on a GPU loads them beside FP8 weights only, and quant.weights is none: leave kv_scales out"
    return None


def _is_scale(value: float) -> bool:
    try:
        (as_stored,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:  # finite, and too large for fp32
        return False
    return bool(_SMALLEST_NORMAL <= as_stored <= _LARGEST)
