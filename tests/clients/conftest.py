"""Trainers' released packages, which ``make clients`` installs, against one running service."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from rollout_service.client import RolloutClient
from tests.support.own_service import own_service

PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The served model's folder; the service makes it, and knows it by this name, as a trainer asks for it."""
    return tmp_path_factory.mktemp("clients") / "tiny-qwen3"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def service_url(model: Path) -> AsyncIterator[str]:
    """The shipped CPU deployment with two replicas."""
    overrides = {
        "model": {"path": str(model), "aliases": [str(model)]},
        "scaling": {"min_replicas": 2, "max_replicas": 2},
        "weights": {"root": str(model.with_name("weights")), "poll_s": 1.0},
    }
    async with own_service(overrides) as (url, _):
        yield url


@pytest.fixture
async def client(service_url: str) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(service_url) as client:
        yield client


@pytest.fixture
async def next_version(client: RolloutClient) -> int:
    """A version that is newer than the newest."""
    return (await client.fleet()).latest_version + 1


def folder_of(name: str) -> Path:
    """Where ``make clients`` has installed a client; skips the test if it has not, or not what is pinned now."""
    folder, pins = PROJECT / ".clients" / name, PROJECT / f"requirements/clients/{name}.txt"
    if not (folder / "pins.txt").is_file():
        pytest.skip(f"{name} is not installed: make clients")
    if (folder / "pins.txt").read_text() != pins.read_text():
        pytest.skip(f"{folder} has other versions than {pins}: make clients")
    return folder


async def run_with(name: str, *arguments: str, path: Sequence[Path] = ()) -> str:
    """What ``python ARGUMENTS`` prints where the client ``name`` is on its path. Raises AssertionError if it fails."""
    search = os.pathsep.join(map(str, [PROJECT, folder_of(name), *path]))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments),
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": search},  # noqa: TID251
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()[-6000:]
    return output.decode()
