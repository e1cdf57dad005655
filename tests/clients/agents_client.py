"""Run agent programs over the newest SDKs in a process of their own, since their packages hide the service's.

python -m tests.clients.agents_client REPLIES MODEL
"""

import os
import sys
from operator import attrgetter
from typing import Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # noqa: TID251 - LiteLLM downloads its price list otherwise

import agents
import anthropic
import litellm
import openai
import pydantic_ai
from pydantic import BaseModel
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles.anthropic import AnthropicModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.lines import answer

Api = Literal["chat", "responses", "messages"]
KEY = "EMPTY"
MAX_TOKENS = 2000
"""A random model puts much white space into its JSON, and ends its texts late."""


class Weather(BaseModel):
    """Return the weather in a unit."""

    unit: Literal["c", "f"]


class LiteLLM:
    """LiteLLM's functions by their names, with JSON on both sides. ``hosted_vllm`` is its provider for vLLM servers."""

    async def call(self, method: str, model: str, base_url: str, **asked: Any) -> dict[str, Any]:
        """Return the reply of ``method``, such as ``acompletion``."""
        reply = await attrgetter(method)(litellm)(model=model, api_base=base_url, api_key=KEY, **asked)
        return dict(reply) if isinstance(reply, dict) else dict(reply.model_dump(mode="json"))

    async def stream(self, method: str, model: str, base_url: str, **asked: Any) -> list[dict[str, Any]]:
        """Return all chunks of a streamed reply."""
        chunks = await attrgetter(method)(litellm)(model=model, api_base=base_url, api_key=KEY, stream=True, **asked)
        return [chunk.model_dump(mode="json") async for chunk in chunks]


class OpenAIAgents:
    """An agent of openai-agents with one tool, which its model must call first."""

    def __init__(self, model: str) -> None:
        self._model = model

    async def run(self, base_url: str, api: Api, stream: bool) -> dict[str, Any]:
        """Run the agent. Return its last text, the units that its tool was called with, and the kinds of its items."""
        units: list[str] = []

        @agents.function_tool
        def weather(unit: Literal["c", "f"]) -> str:
            """Return the weather."""
            units.append(unit)
            return "12"

        async with openai.AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0) as sdk:
            kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
            agent = agents.Agent(
                name="forecaster",
                instructions="brief",
                model=kind(self._model, sdk),
                tools=[weather],
                model_settings=agents.ModelSettings(max_tokens=MAX_TOKENS, tool_choice="weather"),
            )
            if stream:
                result: Any = agents.Runner.run_streamed(agent, "1+1", max_turns=3)
                async for _ in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(agent, "1+1", max_turns=3)
        return {"output": result.final_output, "units": units, "items": [item.type for item in result.new_items]}


class PydanticAI:
    """An agent of pydantic-ai whose answers are ``Weather``, which its model gives by a tool."""

    def __init__(self, model: str) -> None:
        self._model = model

    async def run(self, base_url: str, api: Api, stream: bool) -> list[str]:
        """Ask twice in one conversation. Return the units of both answers."""
        agent = pydantic_ai.Agent(
            self._model_of(base_url, api),
            output_type=pydantic_ai.ToolOutput(Weather, strict=True),
            instructions="brief",
            # A random model calls again and again, and pydantic-ai rewrites a call that max_tokens cuts: a branch.
            model_settings={"max_tokens": MAX_TOKENS, "parallel_tool_calls": False},
        )
        history: list[Any] = []
        units: list[str] = []
        for prompt in ("1+1", "2+2"):
            if stream:
                async with agent.run_stream(prompt, message_history=history) as streamed:
                    weather = await streamed.get_output()
                    history = streamed.all_messages()
            else:
                result = await agent.run(prompt, message_history=history)
                weather, history = result.output, result.all_messages()
            units.append(weather.unit)
        return units

    def _model_of(self, base_url: str, api: Api) -> Any:
        if api == "messages":
            sdk = anthropic.AsyncAnthropic(base_url=base_url, api_key=KEY, max_retries=0)
            strict = AnthropicModelProfile(supports_json_schema_output=True)  # else "strict" is left out
            return AnthropicModel(self._model, provider=AnthropicProvider(anthropic_client=sdk), profile=strict)
        provider = OpenAIProvider(openai_client=openai.AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0))
        kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
        return kind(self._model, provider=provider)


def main(replies: str, model: str) -> None:
    """Answer the test's lines until there are none."""
    agents.set_tracing_disabled(True)
    clients = {
        "litellm": LiteLLM(),
        "openai_agents": OpenAIAgents(model),
        "pydantic_ai": PydanticAI(model),
    }
    answer(replies, clients)


if __name__ == "__main__":
    main(*sys.argv[1:])
