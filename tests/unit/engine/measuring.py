"""An engine with keys and values to measure, and an ingest that stores a choice: what a CacheChooser calls."""

import asyncio

import torch

from rollout_service.kv_scales.fp8_error import ErrorSums, masked_amax
from rollout_service.kv_scales.scales import LayerScales
from rollout_service.protocol.fleet import KVCacheChoice
from rollout_service.protocol.kv_scales import KVMeasurement

LAYERS = ("model.layers.0.self_attn", "model.layers.1.self_attn")
UNIT = LayerScales(q=1, k=1, v=1)


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
        self.fail: Exception | None = None

    async def measure_kv(
        self, sequences: list[list[int]], scales: dict[str, float] | None = None
    ) -> tuple[KVMeasurement, ...]:
        self.calls.append("measure" if scales is None else "judge")
        self.batches.append(sequences)
        if self.fail is not None:
            raise self.fail
        ranks = range(len(self.keys[LAYERS[0]]))
        return tuple(self._seen(rank, scales, sum(map(len, sequences))) for rank in ranks)

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


class FakeCoordinator:
    """An ingest that keeps the choices that it is sent. The first one holds, unless it is told to answer otherwise."""

    def __init__(self) -> None:
        self.asked: list[KVCacheChoice] = []
        self.answers: list[KVCacheChoice | Exception] = []
        """The next answers; an exception is raised."""

    async def choose_kv_cache(self, choice: KVCacheChoice) -> KVCacheChoice:
        self.asked.append(choice)
        await asyncio.sleep(0)
        answer = self.answers.pop(0) if self.answers else choice
        if isinstance(answer, Exception):
            raise answer
        return answer
