"""What the gateway's functions stand on, with an engine in this process."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest

from rollout_service.client import RolloutClient
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
from tests.unit.gateway.fakes import EchoEngine, client_of, http_to, with_engine


@pytest.fixture
def engine() -> EchoEngine:
    return EchoEngine()


@pytest.fixture
def monitor() -> Monitor:
    return Monitor(MonitorConfig(min_tokens=4))


@pytest.fixture
def ingest() -> Any:
    """Return what a test's file has instead of an ingest; here there is none."""
    return None


@pytest.fixture
def services(engine: EchoEngine, monitor: Monitor, ingest: Any) -> Services:
    tokenizer = character_tokenizer()
    return Services(
        name="tiny",
        vocab_size=len(tokenizer),
        max_model_len=64,
        tokenizer=tokenizer,
        dispatcher=Dispatcher(engine, ingest=None, limits=EngineConfig()),
        ingest=ingest,
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
    services = with_engine(services, scripted)
    return replace(services, max_model_len=512, aliases=("org/tiny",), chats=LazyServing(config_of(model)))


@pytest.fixture
async def http(services: Services) -> AsyncIterator[httpx.AsyncClient]:
    async with http_to(services) as http:
        yield http


@pytest.fixture
async def client(services: Services) -> AsyncIterator[RolloutClient]:
    async with client_of(services) as client:
        yield client


@pytest.fixture
async def chat_http(chatting: Services) -> AsyncIterator[httpx.AsyncClient]:
    async with http_to(chatting) as http:
        yield http


@pytest.fixture
def sdk(chat_http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="EMPTY", http_client=chat_http, max_retries=0)


@pytest.fixture
def anthropics(chatting: Services) -> anthropic.AsyncAnthropic:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=create_app(chatting)))
    return anthropic.AsyncAnthropic(base_url=URL, api_key="EMPTY", http_client=http, max_retries=0)
