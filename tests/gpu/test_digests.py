"""The digests that the GPU makes are those of xxhash, and a flipped byte in the log fails by name."""

import numpy as np
import pytest
import torch
import xxhash

from rollout_service.errors import LogCorrupt
from rollout_service.quant.digests import DIGEST_BYTES, Hashing, Run
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import CHUNK_BYTES, read_manifest
from tests.support.models import random_weights
from tests.support.one_engine import running

DEVICE = torch.device("cuda", 0)
SETTINGS = {"linear_backend": "cutlass", "gpu_memory_utilization": 0.1, "enforce_eager": True, "staging": "device"}


def compare(memory: torch.Tensor, places: list[tuple[int, int]]) -> None:
    there = memory.to(DEVICE)
    hashing = Hashing([[Run(there.data_ptr() + start, nbytes) for start, nbytes in places]], DEVICE)
    hashing.queue(0)
    held = [memory.numpy()[start : start + nbytes].data for start, nbytes in places]
    found = hashing.read(held.__getitem__)
    for number, data in enumerate(held):
        expected = xxhash.xxh3_128_hexdigest(data)
        assert found[number * DIGEST_BYTES :][:DIGEST_BYTES].hex() == expected, places[number]


def test_of_every_length_and_alignment():
    memory = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 3 << 20, np.uint8))
    compare(memory, [(start, nbytes) for start in range(8) for nbytes in [*range(700), *range(1020, 1100)]])
    around = [(start, n + off) for n in (2048, 8192, 65536, CHUNK_BYTES) for off in range(-70, 71) for start in (0, 5)]
    compare(memory, around)
    draw = np.random.default_rng(2)
    starts = draw.integers(0, 1 << 20, 4000).tolist()
    compare(memory, list(zip(starts, draw.integers(0, CHUNK_BYTES + 1, 4000).tolist(), strict=True)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_another_gpu_than_the_threads():
    other = torch.device("cuda", 1)
    there = torch.randint(0, 256, (CHUNK_BYTES,), dtype=torch.uint8, device=other)
    with torch.cuda.device(0):
        hashing = Hashing([[Run(there.data_ptr(), there.nbytes)]], other)
        hashing.queue(0)
        found = hashing.read(lambda number: memoryview(b""))
    assert found == xxhash.xxh3_128_digest(there.cpu().numpy().data)


async def test_one_flipped_byte_in_the_mapped_file_fails_the_version_by_name(in_memory, monkeypatch):
    async with running("qwen3", in_memory, monkeypatch, **SETTINGS) as one:
        for version in (1, 2):
            await one.update(version, random_weights(one.config.model.path, seed=version))
        assert (await one.load_report())["way"] == "plan"
        # ends reading ahead, which may copy and check the bytes of version 3 before one of them is flipped
        await one.engine.stage(WeightLog(one.config.weights.root).folder(2), None)
        served = await one.digests()
        folder = await one.commit(3, random_weights(one.config.model.path, seed=3))
        tensor = max(read_manifest(folder).tensors, key=lambda tensor: tensor.nbytes)
        with (folder / tensor.file).open("r+b") as file:
            file.seek(tensor.offset + tensor.nbytes - 1)
            last = file.read(1)[0]
            file.seek(tensor.offset + tensor.nbytes - 1)
            file.write(bytes([last ^ 1]))
        with pytest.raises(LogCorrupt, match=tensor.name.replace(".", r"\.")):
            await one.engine.stage(folder, None)
        assert await one.digests() == served  # it was found before anything was loaded
