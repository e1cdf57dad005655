"""vLLM's server classes for chats, whose turns of a session go on from tokens and are kept.

A turn that continues another is not tokenized anew: text that a model sampled rarely becomes the same tokens again, and
a trainer would then learn from tokens that the model never read. Imports vLLM's server: see ``vllm_serving.py``.
"""

import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from vllm.inputs import tokens_input

from rollout_service.gateway.openai.exchange import current
from rollout_service.protocol.sessions import Message
from rollout_service.sessions.conversation import as_one_message, continued
from rollout_service.vllm_serving import (
    AnthropicServingMessages,
    ChatCompletionResponse,
    OnlineRenderer,
    OpenAIServingChat,
    OpenAIServingResponses,
    ResponsesResponse,
    construct_chat_messages_with_tool_call,
)


class _HistoryOnly:
    """A request of OpenAI's, either API, whose messages are written without the beginning of the next reply."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def build_chat_params(self, *defaults: Any) -> Any:
        """The request's own."""
        params = self._request.build_chat_params(*defaults)
        without_reply = {"add_generation_prompt": False, "continue_final_message": False}
        return replace(params, chat_template_kwargs={**params.chat_template_kwargs, **without_reply})


class ContinuingRenderer(OnlineRenderer):
    """Renders a conversation as the continuation of a turn of its session, where it is one."""

    async def preprocess_chat(
        self, request: Any, messages: list[Any], *arguments: object, **options: object
    ) -> tuple[Any, list[Any]]:
        """vLLM's; the prompt's tokens may be others."""
        conversation, inputs = await super().preprocess_chat(request, messages, *arguments, **options)
        turn = current.get().session
        if turn is None:
            return conversation, inputs
        prefix = await turn.prefix([dict(message) for message in messages], options.get("tool_dicts"))
        if prefix is None:
            return conversation, inputs
        [whole] = inputs
        _, [history] = await super().preprocess_chat(
            _HistoryOnly(request), messages[: prefix.messages], *arguments, **{**options, "parser": None}
        )
        tokens = continued(
            prefix.token_ids, history["prompt_token_ids"], whole["prompt_token_ids"], self._ends_of_replies()
        )
        if tokens is None:
            turn.parent = None
            return conversation, inputs
        return conversation, [tokens_input(list(tokens), cache_salt=whole.get("cache_salt"))]

    def _ends_of_replies(self) -> set[int]:
        of_model = getattr(self.model_config.hf_config, "eos_token_id", None)
        found = {self.renderer.get_tokenizer().eos_token_id, *(of_model if isinstance(of_model, list) else [of_model])}
        return {token for token in found if token is not None}


class _KeepsTurns(OpenAIServingChat):
    """Adds each reply to its session, as the agent is told it."""

    async def chat_completion_full_generator(self, *arguments: object, **options: object) -> object:
        """vLLM's."""
        reply = await super().chat_completion_full_generator(*arguments, **options)
        exchange = current.get()
        if exchange.session is not None and isinstance(reply, ChatCompletionResponse):
            told = [choice.message.model_dump(mode="json", exclude_none=True) for choice in reply.choices]
            await exchange.session.end(exchange.rollouts, told)
        return reply

    async def chat_completion_stream_generator(
        self, *arguments: object, **options: object
    ) -> AsyncGenerator[str, None]:
        """vLLM's. The turn is kept before the agent hears that it is over."""
        exchange = current.get()
        told: dict[int, Message] = {}
        async for line in super().chat_completion_stream_generator(*arguments, **options):
            event = line.removeprefix("data: ").strip()
            if event != "[DONE]":
                _add(told, json.loads(event))
            elif exchange.session is not None and exchange.error is None:
                await exchange.session.end(exchange.rollouts, [told[index] for index in sorted(told)])
            yield line


def _add(told: dict[int, Message], chunk: Message) -> None:
    """Add a chunk of a stream to the messages that it is a part of."""
    for choice in chunk.get("choices", ()):
        message, delta = told.setdefault(choice["index"], {"role": "assistant", "content": ""}), choice["delta"]
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            calls = message.setdefault("tool_calls", [])
            while len(calls) <= call["index"]:
                calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
            if call.get("id"):
                calls[call["index"]]["id"] = call["id"]
            function = calls[call["index"]]["function"]
            function["name"] += call["function"].get("name") or ""
            function["arguments"] += call["function"].get("arguments") or ""


class RecordedChat(_KeepsTurns):
    """OpenAI's chat."""


class RecordedMessages(_KeepsTurns, AnthropicServingMessages):
    """Anthropic's, which vLLM makes a chat of."""


class RecordedResponses(OpenAIServingResponses):
    """OpenAI's responses."""

    async def responses_full_generator(self, *arguments: object, **options: object) -> object:
        """vLLM's, which also makes what the last event of a stream holds. The turn is kept before that is sent."""
        reply = await super().responses_full_generator(*arguments, **options)
        exchange = current.get()
        if exchange.session is not None and isinstance(reply, ResponsesResponse):
            await exchange.session.end(exchange.rollouts, [_as_sent_back(reply.output)])
        return reply


def _as_sent_back(output: Sequence[Any]) -> Message:
    """The message that vLLM will make of a reply's items when an agent sends them back."""
    items = [item for item in output if item.type != "message" or item.content]
    return as_one_message([dict(message) for message in construct_chat_messages_with_tool_call(items)])
