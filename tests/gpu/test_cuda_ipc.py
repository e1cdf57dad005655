"""Versions from a trainer's GPU to the ingest of another process, by CUDA's handles: byte for byte those of parts."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from rollout_service.client import RolloutClient
from rollout_service.errors import NotShared
from rollout_service.ingest.sources.shared_memory import TrainerMemory
from tests.support.models import make_model, random_weights
from tests.unit.client.real_ingest import RealIngest, real_ingest

TRAINER = """
import os, sys, time
from pathlib import Path
import torch
from rollout_service.client import SyncRolloutClient, _shared_memory
from tests.support.models import random_weights

url, model, how, version, seed, batch_bytes, *broken = sys.argv[1:]
_shared_memory.GPU_BATCH_BYTES = int(batch_bytes)
weights = {name: tensor.cuda() for name, tensor in random_weights(Path(model), seed=int(seed)).items()}
for name in broken:
    weights[name].view(-1)[-1] = float("nan")
stops = how == "stops"
def tell(done, total):
    if stops:
        print("began", flush=True)
        time.sleep(3600)
with SyncRolloutClient(url) as client:
    for number in range(int(version), int(version) + 2):
        how_sent = {"transport": "cuda_ipc", "quantize": "trainer" if how == "trainer" else "service"}
        status = client.push_weights(number, weights, wait="none", progress=tell, **how_sent)
        print(status.digest, flush=True)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", "qwen3")


@pytest.fixture
async def service(model: Path, in_memory: Path) -> AsyncIterator[RealIngest]:
    async with real_ingest(model, in_memory / "log", weights={"ingest_num_gpus": 1}) as running:
        yield running


def arguments(service: RealIngest, model: Path, how: str, version: int, seed: int = 7) -> list[str]:
    return [sys.executable, "-c", TRAINER, service.url, str(model), how, str(version), str(seed), "100000"]


async def digests(*command: str, **environment: str) -> list[str]:
    """Of two pushes by another process."""
    settings = [f"{name}={value}" for name, value in environment.items()]
    trainer = await asyncio.create_subprocess_exec("env", *settings, *command, stdout=subprocess.PIPE)
    out, _ = await trainer.communicate()
    assert trainer.returncode == 0
    return out.decode().split()


@pytest.mark.parametrize("quantize", ["service", "trainer"])
async def test_the_version_is_the_one_that_parts_make(service, model, quantize):
    async with RolloutClient(service.url) as client:
        weights = random_weights(model, seed=7)
        in_parts = await client.push_weights(1, weights, transport="http", wait="none")
        found = await digests(*arguments(service, model, quantize, 2))
        assert found == [in_parts.digest] * 2
    record = await service.ingest.committed(3)
    assert record is not None and record.begin.transport == "cuda_ipc"
    service.log.verify(service.log.manifest(3))


async def test_a_trainer_that_is_killed_in_the_middle_leaves_a_sound_ingest(service, model):
    with subprocess.Popen(arguments(service, model, "stops", 1), stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        await asyncio.to_thread(trainer.stdout.readline)
        os.kill(trainer.pid, signal.SIGKILL)
    async with RolloutClient(service.url) as client:
        expected = await client.push_weights("next", random_weights(model, seed=8), transport="http", wait="none")
    found = await digests(*arguments(service, model, "service", expected.version + 1, seed=8))
    assert found == [expected.digest] * 2
    memories: TrainerMemory = service.ingest._uploads._trainer_memory
    memories.prune()
    assert memories._opened == {}


@pytest.mark.parametrize("quantize", ["service", "trainer"])
async def test_a_number_that_is_none_is_refused_by_name(service, model, quantize):
    for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight"):  # kept, and quantized
        trainer = await asyncio.create_subprocess_exec(
            *arguments(service, model, quantize, 1), name, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        _, error = await trainer.communicate()
        assert trainer.returncode and "QuantizationError" in error.decode() and name in error.decode()
    assert len(await digests(*arguments(service, model, quantize, 1))) == 2


async def test_the_allocators_settings_do_not_matter(service, model):
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert len(await digests(*arguments(service, model, "service", 1), **settings)) == 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
async def test_a_gpu_that_the_ingest_does_not_use(service, model):
    assert len(await digests(*arguments(service, model, "service", 1), CUDA_VISIBLE_DEVICES="1")) == 2


async def test_this_process_cannot_open_its_own(service, model):
    weights = {name: tensor.cuda() for name, tensor in random_weights(model, seed=1).items()}
    async with RolloutClient(service.url) as client:
        with pytest.raises(NotShared, match="cudaIpcOpenMemHandle"):
            await client.push_weights(1, weights, transport="cuda_ipc", wait="none")
        status = await client.push_weights(1, weights, transport="shared_memory", wait="none")
        assert status.state == "committed"
