"""All sides ask for the same tokens, in turns."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from benchmarks.rollout.chat import Case, Conversation, Sample, Sides, take_turns
from benchmarks.rollout.reply_json import ReadyEngine, services
from rollout_service.config.engine import EngineConfig
from rollout_service.fleet.dispatch import Dispatcher
from rollout_service.gateway.deployment import create_app
from rollout_service.gateway.openai.serving import LazyServing
from rollout_service.model.tiny import character_tokenizer
from rollout_service.protocol.sessions import OpenSession
from tests.unit.gateway.chats import HELLO, URL, ScriptedEngine, config_of

OUT = 6  # what the engine says


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def sides(tiny_model: Path, engine: ScriptedEngine) -> AsyncIterator[tuple[Sides, Conversation]]:
    gateway = replace(
        services(ReadyEngine(1, 1)),
        name="tiny-qwen3",
        tokenizer=character_tokenizer(),
        dispatcher=Dispatcher(engine, ingest=None, limits=EngineConfig()),
        chats=LazyServing(config_of(tiny_model)),
    )
    transport = httpx.ASGITransport(app=create_app(gateway))
    async with httpx.AsyncClient(transport=transport, base_url=URL) as http:
        session_id = await gateway.sessions.open(OpenSession())
        sides = Sides(http, OUT)
        yield sides, Conversation(HELLO, await sides.prompt_of(HELLO), session_id)
        assert len((await gateway.sessions.get(session_id)).turns) == 1


async def test_all_sides_sample_from_the_same_tokens(sides: tuple[Sides, Conversation], engine: ScriptedEngine) -> None:
    asking, conversation = sides
    engine.calls.clear()
    assert [await ask(conversation, f"{number}") for number, ask in enumerate(asking.all().values())] == [OUT] * 3
    assert [list(call.prompt_token_ids) for call in engine.calls] == [conversation.token_ids] * 3
    assert {(call.sampling.max_tokens, call.sampling.ignore_eos) for call in engine.calls} == {(OUT, True)}
    assert [call.cache_salt for call in engine.calls] == ["0", "1", "2"]
    with pytest.raises(RuntimeError, match="/v1/chat/completions: 6 tokens, not 7"):
        await Sides(asking._http, OUT + 1).chat(conversation, "x")


async def test_sides_take_turns_and_another_begins_each_round() -> None:
    asked: list[str] = []

    def side(name: str, tokens: int):  # type: ignore[no-untyped-def]
        async def ask(_: Conversation, salt: str) -> int:
            asked.append(name)
            assert salt.startswith(name)
            await asyncio.sleep(0)
            return tokens

        return ask

    conversations = [Conversation([], [], f"{number}") for number in range(2)]
    native, chat = await take_turns(conversations, 3, 2, {"native": side("native", 8), "chat": side("chat", 4)})
    rounds = [["chat", "native"], ["native", "chat"], ["chat", "native"]]
    assert asked == [name for names in rounds for name in names for _ in range(3)]
    assert (len(native.samples), len(chat.samples)) == (2, 2)
    assert all(sample.tokens_per_s == pytest.approx(8 * sample.requests_per_s) for sample in native.samples)


def test_ratios_are_those_of_a_round() -> None:
    native = Case("native", [Sample(10, 100, {"gateway": 1.0}), Sample(100, 1000, {"gateway": 3.0})])
    chat = Case("chat", [Sample(5, 50, {"gateway": 4.0}), Sample(80, 800, {"gateway": 6.0, "engine": 2.0})])
    found = chat.as_json(native)
    assert found["requests_to_native"] == found["tokens_to_native"] == pytest.approx((0.5 + 0.8) / 2)
    assert found["cpu_ms"] == {"engine": 1.0, "gateway": 5.0} and len(found["samples"]) == 2
