"""One real cluster for all of these tests: Ray, Serve, and two vLLM CPU engines in FP8."""

import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.faults.update_marker import marked_updates
from rollout_service.client import RolloutClient, SyncRolloutClient
from rollout_service.config import ServiceConfig
from rollout_service.config.deployment_file import CPU, args_of, read_document
from rollout_service.local import LocalService, load_config, local_ray, metrics_targets
from tests.support.serve_run import ServeRun, serve_run
from tests.support.telltale import canary_weights

TOKEN = "a-token-for-the-tests"


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder below which weights may be named by path."""
    return tmp_path_factory.mktemp("sources")


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory, sources: Path) -> ServiceConfig:
    """The shipped CPU deployment with a token, two replicas, and small parts so that uploads have many."""
    folder = tmp_path_factory.mktemp("service")
    token = folder / "token"
    token.write_text(TOKEN)
    overrides = {
        "model": {"path": folder / "tiny-qwen3"},
        # a context in which no completion comes to its end before a test has seen it running and ended it
        "engine": {"admission_limit": 64, "version_wait_s": 4.0, "enable_sleep_mode": True, "max_model_len": 2048},
        "scaling": {"min_replicas": 2, "max_replicas": 2},
        "weights": {
            "root": folder / "weights",
            "part_bytes": 256 << 10,
            "source_roots": [sources],
            "poll_s": 1.0,
            "dead_after_s": 5.0,
            "keep_versions": 4,
        },
        "monitor": {"min_tokens": 50},
        "auth": {"token_file": token},
        "chat": {"tool_parser": "hermes"},
    }
    return load_config(CPU, overrides)


@pytest.fixture(scope="package")
def served(config: ServiceConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeRun]:
    """``serve run`` of it. Ctrl-C ends it when all tests have run, after all that they did to it."""
    document = read_document(CPU)
    args_of(document).update(json.loads(config.model_dump_json(exclude_unset=True)))
    with marked_updates(), local_ray() as address:
        with serve_run(document, tmp_path_factory.mktemp("serve-run"), address=address) as run:
            yield run
        assert run.process.returncode == 0, run.said


@pytest.fixture(scope="package")
def service(config: ServiceConfig, served: ServeRun) -> LocalService:
    """The running service, once both replicas are ready: it answers when the first one is."""
    with SyncRolloutClient(served.url, token=TOKEN) as client:
        while [each.state for each in client.fleet().replicas] != ["ready"] * 2:
            assert served.process.poll() is None, served.said
            time.sleep(0.2)
    return LocalService(url=served.url, config=config.resolved(), metrics_targets=metrics_targets(served.url))


@pytest.fixture
async def client(service: LocalService) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(service.url, token=TOKEN) as client:
        yield client


@pytest.fixture
async def http(service: LocalService) -> AsyncIterator[httpx.AsyncClient]:
    """Plain HTTP with the token, as curl would send it."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=service.url, headers=headers, timeout=60) as http:
        yield http


@pytest.fixture
async def next_version(client: RolloutClient) -> int:
    """A version that is newer than the newest."""
    return (await client.fleet()).latest_version + 1


@pytest.fixture
async def telltale(service: LocalService, client: RolloutClient, next_version: int) -> int:
    """Push weights whose every token tells their version; returns the version, which every replica serves."""
    await client.push_weights(next_version, canary_weights(service.config.model.path, next_version))
    return next_version
