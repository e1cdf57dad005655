"""One real engine and the ingest before it, without Ray: what commits and loads versions, and samples."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollout_service.config import ServiceConfig
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.engine.args import engine_args, not_converted
from rollout_service.engine.environment import engine_environment
from rollout_service.engine.plugin import register
from rollout_service.engine.processes import collected_errors
from rollout_service.ingest.ingest import Ingest
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.kv_scales import KVMeasurement
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import Sampling
from rollout_service.protocol.upload import BeginUpload, CommitUpload, PathSource
from rollout_service.store.log import WeightLog
from tests.support.models import make_model
from tests.support.reference import reference_logprobs, reference_model

KV_CACHE_BYTES = 1 << 30
SAMPLING = Sampling(n=2, max_tokens=16, temperature=1.0, ignore_eos=True)
PROMPTS = [tuple(range(3 + i, 15 + 2 * i)) for i in range(8)]


class OneEngine:
    """An engine, and the ingest whose versions it loads."""

    def __init__(self, config: ServiceConfig, engine: EngineAdapter, ingest: Ingest) -> None:
        self.config, self.engine, self.ingest = config, engine, ingest
        self.newest = 0
        """The version that was committed last."""

    async def update(
        self, version: int, weights: dict[str, torch.Tensor], kv_scales: dict[str, float] | None = None
    ) -> Path:
        """Commit a version of these weights and scales and load it; returns its folder."""
        stored = await self.commit(version, weights, kv_scales)
        await self.load(stored, version)
        return stored

    async def commit(
        self, version: int, weights: dict[str, torch.Tensor], kv_scales: dict[str, float] | None = None
    ) -> Path:
        """Commit a version, which the engine does not load yet; returns its folder."""
        await self.begin(version, weights, kv_scales)
        return await self.commit_begun(version)

    async def begin(
        self, version: int, weights: dict[str, torch.Tensor], kv_scales: dict[str, float] | None = None
    ) -> None:
        """Have a version converted, which is not committed yet."""
        folder = self.config.model.path.parent / f"trainer-{version}"
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")
        source = PathSource(path=folder)
        await self.ingest.begin(BeginUpload(version=version, source=source, kv_scales=kv_scales))

    async def commit_begun(self, version: int) -> Path:
        """Commit a version that was begun; returns its folder."""
        await self.ingest.commit(version, CommitUpload())
        self.newest = version
        return WeightLog(self.config.weights.root).folder(version)

    async def load(self, folder: Path, version: int) -> None:
        await self.engine.stage(folder)
        await self.engine.pause("keep")
        await self.engine.load(folder, version)
        await self.engine.resume()

    async def sleep_and_wake(self, folder: Path, version: int) -> int:
        """Give memory back, take it again, and load a version; returns how many bytes were given back."""
        await self.engine.pause("abort")
        [dropped] = await self.engine.sleep()
        await self.engine.wake_up()
        await self.load(folder, version)
        return dropped

    async def measured(
        self, batch: list[list[int]], scales: dict[str, float] | None = None
    ) -> tuple[KVMeasurement, ...]:
        """See ``EngineAdapter.measure_kv``; the engine is paused for it."""
        await self.engine.pause("keep")
        ranks = await self.engine.measure_kv(batch, scales)
        await self.engine.resume()
        return ranks

    async def digests(self) -> dict[str, str]:
        """See ``Probe.weight_digests``."""
        [digests] = await self.engine.ask_workers("weight_digests")
        return dict(digests)

    async def kv_scales(self) -> dict[str, list[float]]:
        """See ``Probe.kv_scales``."""
        [scales] = await self.kv_scales_of_ranks()
        return scales

    async def kv_scales_of_ranks(self) -> list[dict[str, list[float]]]:
        """The same of each rank of a tensor-parallel engine."""
        return [dict(scales) for scales in await self.engine.ask_workers("kv_scales")]

    async def load_report(self) -> dict[str, Any]:
        """How the last version was loaded; see ``LogWeightTransferEngine.report``."""
        [report] = await self.load_reports()
        return report

    async def load_reports(self) -> list[dict[str, Any]]:
        """The same of each rank of a tensor-parallel engine."""
        return [dict(report) for report in await self.engine.ask_workers("load_report")]

    async def logprobs(self, tokens: list[tuple[int, ...]]) -> torch.Tensor:
        """Of each token of each sequence but the first, given those before it, one after the other."""
        scored = [await prompt_logprobs(self.engine, f"score-{i}", sequence) for i, sequence in enumerate(tokens)]
        return torch.tensor([logprob for logprobs in scored for logprob in logprobs])

    async def sample(self) -> list[tuple[tuple[int, ...], Completion]]:
        """Prompt and completion, 16 pairs."""
        rollouts = await asyncio.gather(*(self.engine.generate(f"r{i}", p, SAMPLING) for i, p in enumerate(PROMPTS)))
        return [(prompt, c) for prompt, completions in zip(PROMPTS, rollouts, strict=True) for c in completions]


async def prompt_logprobs(engine: EngineAdapter, request_id: str, tokens: tuple[int, ...]) -> list[float]:
    """Of each token but the first, given those before it."""
    [sampled] = await engine.generate(request_id, tokens, Sampling(max_tokens=1, ignore_eos=True, prompt_logprobs=0))
    assert sampled.prompt_logprobs is not None
    return [token[0].logprob for token in sampled.prompt_logprobs if token is not None]


@asynccontextmanager
async def running(
    family: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quant: str = "fp8_block",
    skip: tuple[str, ...] = (),
    kv_cache_dtype: str = "bfloat16",
    make: Callable[[Path, str], Path] = make_model,
    indivisible: str = "error",
    weights: dict[str, Any] | None = None,
    **engine: Any,
) -> AsyncIterator[OneEngine]:
    """An engine of a small model of the family, with nothing but dummy weights.

    ``make``: saves that model in a folder. ``weights``, ``engine``: more of its settings.
    """
    config = ServiceConfig.model_validate(
        {
            "model": {"path": make(tmp_path / "model", family)},
            "quant": {"weights": quant, "skip": skip, "indivisible": indivisible},
            "engine": {"max_model_len": 256, **engine},
            "kv_cache": {"dtype": kv_cache_dtype},
            "weights": {"root": tmp_path / "log", "source_roots": [tmp_path], **(weights or {})},
        }
    )
    ingest = Ingest(config)
    await ingest.start()
    try:
        async with engine_of(config, monkeypatch) as engine:
            yield OneEngine(config, engine, ingest)
    finally:
        await ingest.stop()


@asynccontextmanager
async def engine_of(config: ServiceConfig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineAdapter]:
    """An engine with the service's arguments and nothing but dummy weights, whose workers can be looked into."""
    for name, value in engine_environment(config).items():
        monkeypatch.setenv(name, value)
    register()
    model = ServedModel.load(config.model.path)
    plan = model.plan(config.quant, config.engine.tensor_parallel_size, config.engine.expert_parallel)
    args = engine_args(config, not_converted(model, plan), model.has_tokenizer)
    args.worker_extension_cls = "tests.support.probe.Probe"
    if torch.cuda.is_available():
        # else vLLM measures what is free, and gives up when an engine of before, or of a test beside, frees memory then
        args.kv_cache_memory_bytes = KV_CACHE_BYTES
        # as in a replica: a process that has looked for GPUs, as this one has, cannot be forked into one that uses them
        monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with collected_errors() as errors:
        try:
            adapter = EngineAdapter(args)
        except RuntimeError as error:
            error.add_note(str(errors()))
            raise
    try:
        await adapter.connect()
        yield adapter
    finally:
        adapter.shutdown()


async def mean_difference(one: OneEngine, folder: Path, fp8: bool) -> float:
    """Mean |Δ| of the engine's logprobs from those of the fp32 reference with the version in ``folder``."""
    reference = reference_model(one.config.model.path, folder, fp8_activations=fp8, fp8_kv=False)
    pairs = await one.sample()
    differences = [reference_logprobs(reference, p, c.token_ids, 1.0) - torch.tensor(c.logprobs) for p, c in pairs]
    return float(torch.cat(differences).abs().mean())
