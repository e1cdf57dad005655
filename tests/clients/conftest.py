"""Trainers' released packages, which ``make clients`` installs, against one running service."""

import asyncio
import os
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from rollout_service.client import RolloutClient
from tests.clients.lines import ClientProcess, client_process
from tests.support.models import random_weights
from tests.support.own_service import own_service

PROJECT = Path(__file__).parents[2]
Push = Callable[[], Awaitable[int]]
Start = Callable[..., Awaitable[ClientProcess]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The served model's folder; the service makes it, and knows it by this name, as a trainer asks for it."""
    return tmp_path_factory.mktemp("clients") / "tiny-qwen3"


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder below which weights may be named by path."""
    return tmp_path_factory.mktemp("sources")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def service_url(model: Path, sources: Path) -> AsyncIterator[str]:
    """The shipped CPU deployment with two replicas, for chats too."""
    overrides = {
        "model": {"path": str(model), "aliases": [str(model)]},
        "scaling": {"min_replicas": 2, "max_replicas": 2},
        "weights": {"root": str(model.with_name("weights")), "poll_s": 1.0, "source_roots": [str(sources)]},
        "engine": {"max_model_len": 4096},  # an agent's second turn reads its tools' schemas, a token a character
        "chat": {"tool_parser": "hermes"},
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


@pytest.fixture
async def push(model: Path, client: RolloutClient) -> Push:
    """Serves random weights that no version before had; returns the version, which every replica serves."""

    async def push() -> int:
        version = (await client.fleet()).latest_version + 1
        await client.push_weights(version, random_weights(model, seed=version))
        return version

    return push


class Trl(NamedTuple):
    """TRL's modules."""

    sync_client: Any
    async_client: Any
    async_transfer: Any


@pytest.fixture(scope="session")
def trl() -> Trl:
    """As they were released."""
    sys.path.append(str(folder_of("trl")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is experimental, and that it knows vLLM up to 0.31
        from accelerate import PartialState
        from trl.experimental.async_grpo import vllm_client as async_client
        from trl.experimental.async_grpo import weight_transfer as async_transfer
        from trl.generation import vllm_client as sync_client
    PartialState(cpu=True)  # as any trainer has; its logger asks for it
    return Trl(sync_client, async_client, async_transfer)


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts a module of this folder with the packages of a client: see ``client_process``."""
    async with AsyncExitStack() as started:

        async def start(name: str, module: str, *arguments: object) -> ClientProcess:
            process = client_process(f"tests.clients.{module}", *map(str, arguments), path=[folder_of(name)])
            return await started.enter_async_context(process)

        yield start


@pytest.fixture
async def skyrl(start: Start, service_url: str, model: Path) -> ClientProcess:
    """SkyRL's two clients."""
    return await start("skyrl", "skyrl_client", service_url, model)


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
