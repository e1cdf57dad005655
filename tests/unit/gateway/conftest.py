"""What the gateway's functions stand on, with an engine in this process."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from rollout_service.config import MonitorConfig
from rollout_service.config.engine import EngineConfig
from rollout_service.fleet.dispatch import Dispatcher
from rollout_service.gateway.dependencies import Services
from rollout_service.gateway.deployment import create_app
from rollout_service.gateway.openai.serving import LazyServing
from rollout_service.model.tiny import character_tokenizer, make_tiny_qwen3
from rollout_service.monitor.monitor import Monitor
from rollout_service.web.auth import Authorizer
from tests.unit.gateway.chats import URL, ScriptedEngine, config_of
from tests.unit.gateway.fakes import EchoEngine


@pytest.fixture
def engine() -> EchoEngine:
    return EchoEngine()


@pytest.fixture
def monitor() -> Monitor:
    return Monitor(MonitorConfig(min_tokens=4))


@pytest.fixture
def services(engine: EchoEngine, monitor: Monitor) -> Services:
    tokenizer = character_tokenizer()
    return Services(
        name="tiny",
        vocab_size=len(tokenizer),
        max_model_len=64,
        tokenizer=tokenizer,
        dispatcher=Dispatcher(engine, ingest=None, limits=EngineConfig()),
        ingest=None,
        authorizer=Authorizer(None),
        http=httpx.AsyncClient(),
        monitor=monitor,
    )


@pytest.fixture
def no_tokenizer(services: Services) -> Services:
    return replace(services, tokenizer=None)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_qwen3(path)
    return path


@pytest.fixture
def scripted() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def chatting(services: Services, model: Path, scripted: ScriptedEngine) -> Services:
    return replace(
        services,
        max_model_len=512,
        aliases=("org/tiny",),
        dispatcher=Dispatcher(scripted, ingest=None, limits=EngineConfig()),
        chats=LazyServing(config_of(model)),
    )


@pytest.fixture
async def chat_http(chatting: Services) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=create_app(chatting))
    async with httpx.AsyncClient(transport=transport, base_url=URL) as http:
        yield http
