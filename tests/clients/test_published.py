"""Versions that other programs publish: ModelExpress's writer into a folder, and an object store behind s3fs."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rollout_service.config import ServiceConfig
from rollout_service.ingest.ingest import Ingest
from rollout_service.local import free_port
from rollout_service.model.served_model import ServedModel
from rollout_service.model.tiny import make_tiny_qwen3
from rollout_service.protocol.upload import Announcement, CommitUpload, PathSource, PullWeights
from tests.clients.conftest import PROJECT, folder_of, run_with
from tests.support.checkpoints import save_checkpoint
from tests.support.delta_writer import Weights, publish, stepped
from tests.unit.ingest import expected


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The served model's folder."""
    path = tmp_path_factory.mktemp("published") / "tiny-qwen3"
    make_tiny_qwen3(path)
    return path


@pytest.fixture
def weights(base: Path) -> Weights:
    return load_file(base / "model.safetensors")


def ingest_of(base: Path, root: Path, **weights: Any) -> Ingest:
    """An ingest that has not started."""
    settings = {"model": {"path": base}, "weights": {"root": root, **weights}}
    return Ingest(ServiceConfig.model_validate(settings).resolved())


async def require(ingest: Ingest, version: int, weights: Weights, base: Path) -> None:
    """Compare a version with the same weights, sent whole."""
    assert (await ingest.status(version)).digest == expected.digest(weights, ServedModel.load(base).fingerprint)


@pytest.mark.client("ModelExpress's writer")
async def test_modelexpress_s_versions_equal_whole_pushes(tmp_path, base, weights):
    store = tmp_path / "store"
    await run_with("modelexpress", "-m", "tests.clients.modelexpress_writer", str(store), str(base))
    ingest = ingest_of(base, tmp_path / "log", source_roots=[store])
    await ingest.start()
    try:
        for number, name in enumerate(("v-a", "v-b", "v-whole", "v-d"), 1):
            weights = stepped(weights, number)
            plan = await ingest.begin(Announcement(version=number, source=PathSource(path=store / name), label=name))
            await ingest.commit(plan.version, CommitUpload())
            await require(ingest, number, weights, base)
    finally:
        await ingest.stop()


@pytest.fixture
async def bucket(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """s3fs with the bucket ``run`` on moto's server; its address and keys are in the environment."""
    port, folder = free_port(), folder_of("stores")
    monkeypatch.syspath_prepend(folder)
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}.items():
        monkeypatch.setenv(name, value)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "moto.server", "-p", str(port)),
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(folder)},  # noqa: TID251
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        while b"Running on" not in await process.stderr.readline():
            assert process.returncode is None, "the server has ended"
        import s3fs

        files = s3fs.S3FileSystem()
        await asyncio.to_thread(files.mkdir, "run")
        yield files
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.client("S3, by s3fs")
async def test_an_s3_store_is_pulled_and_followed(tmp_path, base, weights, bucket):
    url, local = "s3://run/updates", tmp_path / "local"
    local.mkdir()
    told = ingest_of(base, tmp_path / "log", source_urls=["s3://run"], publish="s3://run/served", poll_s=0.1)
    second = ingest_of(base, tmp_path / "second", source_urls=["s3://run"], watch="s3://run/served", poll_s=0.1)
    follower = ingest_of(base, tmp_path / "follower", source_urls=["s3://run"], watch=url, poll_s=0.1)
    services = told, follower, second
    for service in services:
        await service.start()
    try:
        for number in range(1, 5):
            old, weights = weights, stepped(weights, number)
            if number == 3:
                folder = save_checkpoint(local / "weight_v000003", weights)
            else:
                folder = publish(local, number, old, weights)
            await asyncio.to_thread(bucket.put, str(folder), f"run/updates/{folder.name}", recursive=True)
            status = await told.pull_weights(PullWeights(uri=url, target_version=number, wait="none"))
            assert status.version == number
            for service in services:
                while (await service.fleet()).latest_version < number:
                    await asyncio.sleep(0.05)
                await require(service, number, weights, base)
    finally:
        for service in services:
            await service.stop()
