"""Sessions with chat templates of the kinds that models have, through vLLM's own renderer."""

import json
import logging
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_service.gateway.dependencies import Services
from rollout_service.gateway.openai import exchange, serving
from rollout_service.gateway.openai.serving import LazyServing
from rollout_service.model.tiny import character_tokenizer
from rollout_service.sessions.template import REASONS
from tests.unit.gateway.chats import HELLO, TOOL, ScriptedEngine, config_of
from tests.unit.gateway.fakes import http_to, with_engine
from tests.unit.sessions.test_template import CHATML, GLM, GLM_ENDS

MORE: dict[str, Any] = {"role": "user", "content": "more"}
Open = Callable[..., Any]


class Agent:
    """Chats in a session, and sends back what it was told."""

    def __init__(self, http: httpx.AsyncClient, session: str, scripted: ScriptedEngine, tokenizer: Any) -> None:
        self.http, self.scripted, self.tokenizer = http, scripted, tokenizer
        self.path = f"/v1/sessions/{session}"
        self.messages: list[Any] = [*HELLO]

    async def say(self, text: str, *then: dict[str, Any], **options: Any) -> httpx.Response:
        """Have the engine say ``text``; ``then`` is what the agent adds to the reply."""
        self.scripted.tokens = self.ids(text)
        body = {"model": "tiny", "messages": self.messages, **options}
        reply = await self.http.post(f"{self.path}/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        told = reply.json()["choices"][0]["message"]
        calls = told.get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "2"} for call in calls]
        self.messages = [*self.messages, told, *results, *then]
        return reply

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def prompts(self) -> list[str]:
        return [self.tokenizer.decode(call.prompt_token_ids) for call in self.scripted.calls]

    async def session(self) -> dict[str, Any]:
        return dict((await self.http.get(self.path)).json())


@pytest.fixture
def speaking(services: Services, model: Path, scripted: ScriptedEngine, tmp_path: Path) -> Open:
    @asynccontextmanager
    async def start(template: str, ends: tuple[str, ...], **chat: object) -> AsyncIterator[Agent]:
        """An agent of a model with that chat template, whose generation config has those ends."""
        folder = tmp_path / "model"
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        tokenizer = character_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": [*ends, "<|im_start|>", "<|assistant|>"]})
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        for name, change in (
            ("config.json", {"vocab_size": 160}),
            ("generation_config.json", {"eos_token_id": tokenizer.convert_tokens_to_ids(list(ends))}),
        ):
            (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
        chatting = replace(
            with_engine(services, scripted),
            vocab_size=160,
            max_model_len=512,
            tokenizer=tokenizer,
            chats=LazyServing(config_of(folder, **chat)),
        )
        async with http_to(chatting) as http:
            session = (await http.post("/v1/sessions")).json()["session_id"]
            yield Agent(http, session, scripted, tokenizer)

    return start


CALL = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'  # other spaces than the template's


async def test_a_template_that_drops_reasoning_continues(speaking):
    async with speaking(CHATML, ("<|im_end|>", "<|endoftext|>"), reasoning_parser="qwen3") as agent:
        end = "<|im_end|>"
        texts = [
            f"add</think>{CALL}{end}",
            f"so</think>two{end}",
            "cut in",
            f"hm</think>{CALL}<|endoftext|>",
            f"x{end}",
        ]
        for text in texts:
            reply = await agent.say(text, *([] if "tool_call" in text else [MORE]), tools=[TOOL])
            assert exchange.BRANCH_HEADER not in reply.headers
        kept = await agent.session()
        assert kept["paths"] == [[0, 1, 2, 3, 4]] and {turn["branch"] for turn in kept["turns"]} == {None}
        before: tuple[int, ...] = ()
        for call, text in zip(agent.scripted.calls, texts, strict=True):
            assert call.prompt_token_ids[: len(before)] == before
            before = (*call.prompt_token_ids, *agent.ids(text))
        user = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n<think>\n"
        tool = "\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n<think>\n"
        later = agent.prompts()[1:]
        new = [prompt.rpartition(text)[2] for prompt, text in zip(later, texts, strict=False)]
        assert new == [tool, user, end + user, tool]


@pytest.mark.parametrize(("end", "closed"), [("<|user|>", ""), ("", "<|user|>"), ("<|endoftext|>", "<|user|>")])
async def test_a_reply_that_the_next_role_ends_stands_once(speaking, end, closed):
    async with speaking(GLM, GLM_ENDS) as agent:
        for _ in range(3):
            await agent.say("hello" + end, MORE)
        hi, more = "<|user|>\nhi<|assistant|>\n", f"hello{end}{closed}\nmore<|assistant|>\n"
        assert agent.prompts() == [hi, hi + more, hi + more + more]
        assert (await agent.session())["paths"] == [[0, 1, 2]]


async def test_a_stop_token_of_the_request_ends_a_reply(speaking):
    async with speaking(CHATML.replace("<|im_end|>", "<|assistant|>"), ("<|im_end|>",)) as agent:
        [agent.scripted.stop_reason] = stop = agent.ids("<|assistant|>")
        await agent.say("hello<|assistant|>", MORE, stop_token_ids=stop)
        await agent.say("hello<|assistant|>")
        assert "hello<|assistant|>\n<|im_start|>user\nmore<|assistant|>" in agent.prompts()[1]


TOOLS_LAST = (
    "{% for m in messages %}{% if loop.revindex == 1 %}TOOLS {% endif %}{{ m.role }}: {{ m.content }}{% if m.role == "
    "'assistant' %}<|im_end|>{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


async def test_the_start_says_what_sessions_do(speaking, caplog):
    with caplog.at_level(logging.INFO, serving.__name__):
        async with speaking(TOOLS_LAST, ("<|im_end|>",)) as agent:
            await agent.say("hello<|im_end|>")
    [logged] = [record for record in caplog.records if record.name == serving.__name__]
    assert logged.levelno == logging.WARNING
    assert (
        "a branch begins after a reply" in logged.getMessage() and REASONS["rewritten_history"] in logged.getMessage()
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_branch_is_told_everywhere(speaking, stream, caplog, monkeypatch):
    counted: list[dict[str, str]] = []
    monkeypatch.setattr(exchange, "_SAID", set())
    monkeypatch.setattr(exchange, "record", lambda metric, value, **labels: counted.append(labels))
    async with speaking(TOOLS_LAST, ("<|im_end|>",)) as agent:
        with caplog.at_level(logging.WARNING, exchange.__name__):
            for _ in range(3):
                await agent.say("hello<|im_end|>", MORE)
        agent.messages = [*HELLO]
        reply = await agent.http.post(
            f"{agent.path}/v1/chat/completions",
            json={"model": "tiny", "messages": [*HELLO, *HELLO], "stream": stream},
        )
        assert reply.headers[exchange.BRANCH_HEADER] == "other_history"
        kept = await agent.session()
    whys = [None, "rewritten_history", "rewritten_history", "other_history"]
    assert [turn["branch"] for turn in kept["turns"]] == whys and kept["paths"] == [[0], [1], [2], [3]]
    assert [labels["start"] for labels in counted] == ["first", *whys[1:]]
    logged = [record.getMessage() for record in caplog.records if record.name == exchange.__name__]
    assert [line.partition("turn before: ")[2].partition(".")[0] for line in logged] == [
        f"{REASONS['rewritten_history']} (rewritten_history)",
        f"{REASONS['other_history']} (other_history)",
    ]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"continue_final_message": True, "add_generation_prompt": False}, "other_history"),
        ({"truncate_prompt_tokens": 9}, "truncated_prompt"),
    ],
)
async def test_a_prompt_that_is_no_whole_begins_a_branch(speaking, options, why):
    async with speaking(CHATML, ("<|im_end|>",)) as agent:
        await agent.say("hello<|im_end|>", MORE, {"role": "assistant", "content": "so"})
        reply = await agent.say("hello<|im_end|>", **options)
        assert reply.headers[exchange.BRANCH_HEADER] == why


@pytest.mark.parametrize("argument", [{"enable_thinking": False}, {"thinking_budget": 0}])
async def test_false_and_zero_are_template_arguments(speaking, argument):
    async with speaking("{{ enable_thinking }}{{ thinking_budget }}" + CHATML, ("<|im_end|>",)) as agent:
        await agent.say("hello<|im_end|>", MORE)
        reply = await agent.say("hello<|im_end|>", MORE, chat_template_kwargs=argument)
        assert reply.headers[exchange.BRANCH_HEADER] == "other_history"
        reply = await agent.say("hello<|im_end|>", chat_template_kwargs=argument)
        assert exchange.BRANCH_HEADER not in reply.headers
    [_, prompt, _] = agent.prompts()
    assert prompt.startswith(*map(str, argument.values()))


async def test_replies_without_an_end_token_continue(speaking):
    async with speaking("{% for m in messages %}{{ m.content }}|{% endfor %}", ("<|im_end|>",)) as agent:
        await agent.say("hello", MORE)
        await agent.say("hello")
        assert agent.prompts()[1] == "hi|hello|more|"
