"""An engine with keys and values to measure, and an ingest that stores scales: what a KVCalibrator calls."""

import asyncio
from typing import Any

import torch

from rollout_service.errors import EngineFailed
from rollout_service.kv_scales.fp8_error import ErrorSums, masked_amax
from rollout_service.kv_scales.scales import LayerScales
from rollout_service.protocol.fleet import KVCacheChoice
from rollout_service.protocol.kv_scales import KVMeasurement, KVScaleResult

LAYERS = ("model.layers.0.self_attn", "model.layers.1.self_attn")
UNIT = LayerScales(q=1, k=1, v=1)


def all_scales(q: float, k: float, v: float) -> dict[str, float]:
    """The same of both layers."""
    by_tensor = {"q": float(q), "k": float(k), "v": float(v)}
    return {f"{layer}.{x}_scale": scale for layer in LAYERS for x, scale in by_tensor.items()}


def ordinary() -> torch.Tensor:
    """Keys or values that FP8 is accurate enough for, with the largest at 4: [1, 1, 32, 8], 1 to 4 in size."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (1, 1, 32, 8), generator=generator) * 2 - 1
    x = (1 + 3 * torch.rand(1, 1, 32, 8, generator=generator)) * signs
    x[0, 0, 0, 0] = 4.0
    return x


def loud() -> torch.Tensor:
    """Keys that saturate with scales of 1, and that FP8 is accurate enough for with others; the largest at 4096."""
    return ordinary() * 1024


def uneven() -> torch.Tensor:
    """A huge channel beside tiny ones, which no scale saves."""
    x = ordinary() * 1e-4
    x[..., 0] *= 1e7
    return x


class FakeMeasuringEngine:
    """Keeps the order of what is done to it; measures the keys that it is given, in earnest."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.batches: list[list[list[int]]] = []
        self.keys: dict[str, list[torch.Tensor]] = {layer: [ordinary()] for layer in LAYERS}
        """Layer → each rank's."""
        self.scales: dict[str, float] | None = None
        """Loaded."""
        self.fail: str | None = None

    async def measure_kv(
        self, sequences: list[list[int]], scales: dict[str, float] | None = None
    ) -> tuple[KVMeasurement, ...]:
        self.calls.append("measure" if scales is None else "judge")
        self.batches.append(sequences)
        if self.fail is not None:
            raise EngineFailed(self.fail)
        ranks = range(len(self.keys[LAYERS[0]]))
        return tuple(self._seen(rank, scales or self.scales, sum(map(len, sequences))) for rank in ranks)

    async def set_kv_scales(self, scales: dict[str, float] | None) -> None:
        self.calls.append("set")
        if self.fail is not None:
            raise EngineFailed(self.fail)
        self.scales = scales

    def _seen(self, rank: int, scales: dict[str, float] | None, tokens: int) -> KVMeasurement:
        amax, errors = {}, {}
        for layer, of_ranks in self.keys.items():
            k, other = of_ranks[rank], ordinary()
            against = LayerScales(**{x: scales[f"{layer}.{x}_scale"] for x in "qkv"}) if scales else UNIT
            counts, sums = torch.ones(1, 32, dtype=torch.bool), ErrorSums(against)
            sums.add(other * 1e-5, k, other, counts, counts, 0.25)
            q, k_largest, v = (float(masked_amax(x, counts)) for x in (other, k, other))
            amax[layer], errors[layer] = ((q, k_largest, v),), sums.result()
        return KVMeasurement(amax=amax, errors=errors, tokens=tokens)


class _Method:
    """Answers as it is told to."""

    def __init__(self, coordinator: "FakeCoordinator", name: str) -> None:
        self._coordinator, self._name = coordinator, name

    async def __call__(self, *args: Any) -> Any:
        self._coordinator.asked.append((self._name, *args))
        await asyncio.sleep(0)
        answers = self._coordinator.answers.get(self._name, [])
        answer = answers.pop(0) if answers else self._coordinator.default(self._name, args)
        if isinstance(answer, Exception):
            raise answer
        return answer


class FakeCoordinator:
    """An ingest that answers as it is told, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.answers: dict[str, list[Any]] = {}
        """Method → what it answers next; an exception is raised."""
        self.measured_kv_scales = _Method(self, "measured_kv_scales")
        self.publish_kv_scales = _Method(self, "publish_kv_scales")
        self.choose_kv_cache = _Method(self, "choose_kv_cache")

    def has_published(self, version: int, scales: dict[str, float] | None) -> None:
        """Another replica has measured the version before."""
        result = KVScaleResult(version=version, scales=scales, replica_id="r2", tokens=1)
        self.answers.setdefault("measured_kv_scales", []).append(result)

    def publishes(self, version: int, scales: dict[str, float] | None) -> None:
        """What becomes of the next measurement, unless something is to go wrong before."""
        result = KVScaleResult(version=version, scales=scales, replica_id="r1", tokens=1)
        self.answers.setdefault("publish_kv_scales", []).append(result)

    def asked_for(self, method: str) -> list[tuple[Any, ...]]:
        """Each call of one method: its name and what it was given."""
        return [asked for asked in self.asked if asked[0] == method]

    def names(self) -> list[str]:
        """Methods that were asked, in order."""
        return [name for name, *_ in self.asked]

    def default(self, name: str, args: tuple[Any, ...]) -> KVCacheChoice | None:
        """No version is measured, and the first choice holds; nothing else is answered without being told."""
        if name == "measured_kv_scales":
            return None
        assert name == "choose_kv_cache", f"{name} was not expected"
        choice: KVCacheChoice = args[0]
        return choice
