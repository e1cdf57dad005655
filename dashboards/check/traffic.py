"""What happens to the service while Prometheus looks: rollouts, updates, reports, and what goes wrong on other days."""

import asyncio
import random
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file

from dashboards.check.prometheus import Say
from rollout_service.client import RolloutClient
from rollout_service.errors import QuantizationError, RolloutServiceError, TooEarly
from rollout_service.protocol.rollout import Rollout

NOISE_NATS = 0.03
"""Standard deviation of the trainer's logprobs around the engines', as FP8 would have it."""
BROKEN_NATS = 0.6
"""What the trainer is off at the last version, so that it is suspect."""
PREFIX = 280
"""Tokens that the prompts of a batch share: two blocks of a CPU engine's prefix cache, and some more."""
BURST = 400
"""Completions asked for at once, more than the replicas admit."""

MOVED = "model.layers.0.mlp.up_proj.weight"


class Traffic:
    """A trainer with its rollout workers."""

    def __init__(self, client: RolloutClient, model: Path, say: Say) -> None:
        self._client, self._say = client, say
        self._weights: dict[str, torch.Tensor] = {}
        for file in sorted(model.glob("*.safetensors")):
            self._weights.update(load_file(file))
        self._random = random.Random(0)
        self._version = 0

    async def run(self, updates: int, step_s: float) -> None:
        """``updates`` steps of a trainer with rollouts beside them, each followed by ``step_s`` seconds."""
        async with asyncio.TaskGroup() as tasks:
            rollouts = tasks.create_task(self._roll_out())
            await asyncio.sleep(step_s)
            for update in range(updates):
                await self._step(abort=update % 2 == 1, broken=update == updates - 1)
                await asyncio.sleep(step_s)
                if update == 0:
                    await self._bad_day()
            rollouts.cancel()

    async def _roll_out(self) -> None:
        while True:
            # an engine that does not admit more says so, which is to be seen here
            with suppress(RolloutServiceError):
                await self._client.generate_batch(self._prompts(8), n=4, max_tokens=64, ignore_eos=True)

    async def _step(self, abort: bool, broken: bool) -> None:
        self._version += 1
        self._say(f"version {self._version}: update, rollouts and a report{' of a broken trainer' if broken else ''}")
        await self._client.push_weights(
            self._version,
            self._moved(),
            mode="abort" if abort else "keep",
            transport="auto" if self._version == 1 else "delta",
        )
        rollouts = await self._client.generate_batch(
            self._prompts(24), n=2, max_tokens=32, ignore_eos=True, min_weight_version=self._version
        )
        off = BROKEN_NATS if broken else 0.0
        await self._client.report_mismatch(rollouts, [self._scored(row, off) for row in _logprobs(rollouts)])

    async def _bad_day(self) -> None:
        self._say("truncated rollouts, too many, a version that does not come, one that is NaN, and a pause")
        truncated = await self._client.generate_batch(self._prompts(4), max_tokens=16, ignore_eos=True, top_p=0.9)
        await self._client.report_mismatch(truncated, _logprobs(truncated))
        with suppress(RolloutServiceError):
            await self._client.generate_batch(self._prompts(BURST // 4), n=4, max_tokens=16, ignore_eos=True)
        with suppress(TooEarly):
            await self._client.generate([5, 6], max_tokens=1, min_weight_version=self._version + 100)
        broken = self._moved()
        broken[MOVED].fill_(torch.nan)
        with suppress(QuantizationError):
            await self._client.push_weights(self._version + 1, broken)
        await asyncio.sleep(5)
        await self._client.discard(self._version + 1)
        await self._client.pause()
        await asyncio.sleep(3)
        await self._client.resume()

    def _moved(self) -> dict[str, torch.Tensor]:
        """The weights a small step away, so small that a delta is worth it."""
        generator = torch.Generator().manual_seed(self._version)
        return self._weights | {MOVED: _moved(self._weights[MOVED], generator)}

    def _prompts(self, count: int) -> list[list[int]]:
        prefix = [self._random.randrange(8, 40) for _ in range(PREFIX)]
        return [[*prefix, self._random.randrange(8, 40)] for _ in range(count)]

    def _scored(self, logprobs: Iterable[float], off: float) -> list[float]:
        return [min(0.0, logprob - off + self._random.gauss(0.0, NOISE_NATS)) for logprob in logprobs]


def _moved(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
    return (tensor.float() + 1e-3 * noise).to(tensor.dtype)


def _logprobs(rollouts: Iterable[Rollout]) -> list[tuple[float, ...]]:
    return [completion.logprobs for rollout in rollouts for completion in rollout.completions]
