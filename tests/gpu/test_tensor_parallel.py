"""Engines of two GPUs: ``python -m benchmarks.gpu_tests --name tests_gpu_tp2 tests/gpu/test_tensor_parallel.py``.

What an engine of two ranks loads and computes is held against one rank and the fp32 reference; how long it was closed
is reported beside one rank's, and not asserted.
"""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.common.gpu_service import Mode, serving, settings_of, write_weights
from benchmarks.common.shapes import Shape, write_config
from rollout_service.client import RolloutClient
from rollout_service.config import ServiceConfig
from rollout_service.errors import LogCorrupt
from tests.engine.test_kv_measure import AGREE, CALIBRATED_MEAN, difference_with_scales_of_two_ranks
from tests.support.models import make_model, random_weights
from tests.support.one_engine import OneEngine, engine_of, mean_difference, running
from tests.unit.client.real_ingest import RealIngest, real_ingest
from tests.unit.store.versions import flip_a_byte

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one host")

TRANSPORTS = ("path", "parts", "trainer")
FP8_MEAN = 0.06
"""As for the CPU engine, tests/engine/test_round_trip.py."""
BETWEEN_RANKS_MEAN = 0.03
"""As for the CPU engine, tests/engine/test_tensor_parallel.py."""
SMALL = {"cuda_graph_sizes": (1, 8, 16), "gpu_memory_utilization": 0.1}
TOKENS = [tuple((5 * i + 7 * j) % 120 + 3 for j in range(40)) for i in range(8)]


async def push(
    client: RolloutClient, transport: str, version: int, weights: dict[str, torch.Tensor], folder: Path
) -> None:
    if transport == "path":
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")
        await client.push_path(version, folder, wait="none")
    else:
        quantize: Any = "trainer" if transport == "trainer" else "service"
        await client.push_weights(version, weights, quantize=quantize, wait="none")


async def loaded(one: OneEngine, ingest: RealIngest, version: int) -> float:
    """Load a version as a replica does; returns for how many milliseconds the engine was closed."""
    folder = ingest.log.folder(version)
    await one.engine.stage(folder, ingest.log.manifest(version).digest)
    closed = time.perf_counter()
    await one.engine.pause("keep")
    await one.engine.load(folder, version)
    await one.engine.resume()
    return 1e3 * (time.perf_counter() - closed)


def config_of(model: Path, root: Path, **engine: Any) -> ServiceConfig:
    common = {"max_model_len": 256, "linear_backend": "cutlass", **SMALL}
    sections: dict[str, Any] = {"model": {"path": model}, "engine": {**common, **engine}, "weights": {"root": root}}
    return ServiceConfig.model_validate({**sections, "kv_cache": {"dtype": "bfloat16"}})


@pytest.mark.parametrize(
    ("family", "staging"), [("qwen3_tp", "device"), ("qwen3_moe_tp", "device"), ("qwen3_moe_tp", "host")]
)
async def test_two_ranks_follow_every_upload_path_and_match_one_rank(
    family, staging, tmp_path, monkeypatch, record_property
):
    model, root = make_model(tmp_path / "model", family), tmp_path / "log"
    sections: dict[str, Any] = {
        "engine": {"tensor_parallel_size": 2},
        "weights": {"source_roots": [tmp_path], "part_bytes": 4 << 20, "keep_versions": 8},
    }
    async with real_ingest(model, root, **sections) as ingest, RolloutClient(ingest.url) as client:
        config = config_of(model, root, tensor_parallel_size=2, staging=staging)
        async with engine_of(config, monkeypatch) as engine:
            two = OneEngine(config, engine, ingest.ingest)
            closed_ms = [await loaded(two, ingest, 0)]
            first = await two.load_reports()
            # a rank's area is as large as its shard: the whole version is not staged before it is known what ranks read
            assert all(rank["way"] == "layerwise" and "unstaged" in rank for rank in first), first
            of_two = {}
            for version, transport in enumerate(TRANSPORTS, start=1):
                await push(
                    client, transport, version, random_weights(model, seed=version), tmp_path / f"trainer-{version}"
                )
                closed_ms.append(await loaded(two, ingest, version))
                reports = await two.load_reports()
                assert [rank["way"] for rank in reports] == ["plan", "plan"], reports
                whole_bytes = ingest.log.manifest(version).total_bytes
                assert all(rank["staged_bytes"] < 0.75 * whole_bytes for rank in reports), reports
                assert await mean_difference(two, ingest.log.folder(version), fp8=True) < FP8_MEAN
                of_two[version] = await two.logprobs(TOKENS)

            await push(client, "parts", 4, random_weights(model, seed=4), tmp_path)
            flip_a_byte(ingest.log, 4, "model.layers.1.self_attn.o_proj.weight")
            with pytest.raises(LogCorrupt, match=r"layers\.1\.self_attn\.o_proj\.weight"):
                await two.engine.stage(ingest.log.folder(4), ingest.log.manifest(4).digest)
            assert torch.equal(await two.logprobs(TOKENS), of_two[3])

        config = config_of(model, root, staging=staging)
        async with engine_of(config, monkeypatch) as engine:
            one = OneEngine(config, engine, ingest.ingest)
            alone_ms = [await loaded(one, ingest, 0)]
            for version, expected in of_two.items():
                alone_ms.append(await loaded(one, ingest, version))
                assert (await one.load_report())["way"] == "plan"
                assert (await one.logprobs(TOKENS) - expected).abs().mean() < BETWEEN_RANKS_MEAN
            assert (await one.logprobs(TOKENS) - of_two[1]).abs().mean() > 5 * BETWEEN_RANKS_MEAN
    record_property("closed_ms_two_ranks", [round(ms, 1) for ms in closed_ms])
    record_property("closed_ms_one_rank", [round(ms, 1) for ms in alone_ms])


async def test_ranks_measure_their_own_heads_and_hold_the_same_scales(tmp_path, monkeypatch):
    parallel: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3", "tensor_parallel_size": 2, **SMALL}
    async with running("llama_tp", tmp_path, monkeypatch, **parallel) as one:
        assert await difference_with_scales_of_two_ranks(one, 4 * AGREE, fp8=True) < 2 * CALIBRATED_MEAN


@pytest.mark.parametrize(("shape", "layers"), [(Shape.QWEN3_8B, 8), (Shape.QWEN3_30B_A3B, 4)])
async def test_the_service_starts_with_default_staging_and_updates(shape, layers, tmp_path, record_property):
    """Layers of published shapes, whose first version is twice as large as a rank's staging area."""
    model = write_config(shape, tmp_path / shape, layers)
    write_weights(model)
    engine = {"tensor_parallel_size": 2, "linear_backend": "cutlass", "cuda_graph_sizes": [1, 8, 16]}
    engine |= {"max_model_len": 192, "max_num_seqs": 256, "gpu_memory_utilization": 0.5}
    settings = settings_of(Mode.FP8KV, model, tmp_path, engine)
    settings["scaling"] = {"num_gpus": 2, "min_replicas": 1, "max_replicas": 1}
    settings["weights"]["ingest_num_gpus"] = 0
    started = time.perf_counter()
    with serving(settings, tmp_path, verbose=True) as service:
        record_property("start_s", round(time.perf_counter() - started, 1))
        async with RolloutClient(service.url) as client:
            closed_ms, stage_s = [], []
            for version in (1, 2, 3):
                status = await client.push_path(version, model)
                assert status.state == "live", status
                [replica] = (await client.fleet()).replicas
                assert replica.update is not None and replica.version == version
                closed_ms.append(round(1e3 * replica.update.closed_s, 1))
                stage_s.append(round(replica.update.stage_s, 2))
                rollout = await client.generate(list(range(10, 40)), n=4, max_tokens=16, ignore_eos=True)
                assert {span.version for c in rollout.completions for span in c.spans} == {version}
            record_property("closed_ms", closed_ms)
            record_property("stage_s", stage_s)
