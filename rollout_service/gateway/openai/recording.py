"""vLLM's server classes for chats, whose turns of a session go on from tokens and are kept.

A turn that continues another is not tokenized anew: text that a model sampled rarely becomes the same tokens again, and
a trainer would then learn from tokens that the model never read. Imports vLLM's server: see ``vllm_serving.py``.
"""

import json
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from openai.types.responses.response import IncompleteDetails
from vllm.inputs import tokens_input

from rollout_service.gateway.openai.exchange import current
from rollout_service.protocol.sessions import Message
from rollout_service.sessions.conversation import as_one_message, continued
from rollout_service.vllm_serving import (
    AnthropicServingMessages,
    ChatCompletionResponse,
    DeltaMessage,
    OnlineRenderer,
    OpenAIServingChat,
    OpenAIServingResponses,
    Parser,
    ResponsesResponse,
    construct_chat_messages_with_tool_call,
)

logger = logging.getLogger(__name__)


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


class _Forgiving(Parser):
    """A parser of vLLM's that gives the plain text where it fails on what the model said.

    At the beginning of a run models often write calls that are cut, nested without end, or no JSON. The caller has to
    see these samples: an error would select the others.
    """

    _has_failed = False

    def parse(self, model_output: str, *arguments: Any, **options: Any) -> Any:
        """vLLM's."""
        try:
            return super().parse(model_output, *arguments, **options)
        except Exception as error:  # noqa: BLE001 - of any parser of vLLM's, on any text
            self._note(error)
            return None, model_output, []

    def parse_delta(self, delta_text: str, *arguments: Any, **options: Any) -> Any:
        """vLLM's; after an error all text that comes."""
        if self._has_failed:
            return DeltaMessage(content=delta_text)
        try:
            return super().parse_delta(delta_text, *arguments, **options)
        except Exception as error:  # noqa: BLE001
            self._note(error)
            return DeltaMessage(content=delta_text)

    def _note(self, error: Exception) -> None:
        self._has_failed = True
        logger.warning("%s failed on what the model said, which is returned as text: %s", type(self).__name__, error)


def _forgiving(parser: type[Parser] | None) -> type[Parser] | None:
    return None if parser is None else type(parser.__name__, (_Forgiving, parser), {})


class _KeepsTurns(OpenAIServingChat):
    """Says of each choice how its completion ended, and notes each reply for its session, as the agent is told it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parser_cls = _forgiving(self.parser_cls)  # type: ignore[has-type]

    async def chat_completion_full_generator(self, *arguments: object, **options: object) -> object:
        """vLLM's."""
        reply = await super().chat_completion_full_generator(*arguments, **options)
        exchange = current.get()
        if not isinstance(reply, ChatCompletionResponse):
            return reply
        for choice, completion, text in zip(reply.choices, exchange.completions, exchange.texts, strict=True):
            if completion.finish_reason != "stop":  # vLLM says "tool_calls" of a reply that was cut after a call, too
                choice.finish_reason = completion.finish_reason
            self._fit(choice, text)
        exchange.replies = [choice.message.model_dump(mode="json", exclude_none=True) for choice in reply.choices]
        return reply

    def _fit(self, choice: Any, text: str) -> None:
        """Change what the API's reply has no form for. ``text``: all that the model said."""

    async def chat_completion_stream_generator(
        self, *arguments: object, **options: object
    ) -> AsyncGenerator[str, None]:
        """vLLM's. The turn is kept before the agent hears that it is over."""
        exchange = current.get()
        told: dict[int, Message] = {}
        ended: set[int] = set()
        last: Message = {}
        async for line in super().chat_completion_stream_generator(*arguments, **options):
            event = line.removeprefix("data: ").strip()
            chunk = {} if event == "[DONE]" else json.loads(event)
            _add(told, chunk)
            ended |= {choice["index"] for choice in chunk.get("choices", ()) if choice.get("finish_reason")}
            if not chunk.get("choices") and exchange.rollouts and exchange.error is None:
                # vLLM does not say how a completion without a token ended
                for index, completion in enumerate(exchange.completions):
                    if index not in ended and last:
                        told.setdefault(index, {"role": "assistant", "content": ""})
                        end = {"index": index, "delta": {}, "logprobs": None, "finish_reason": completion.finish_reason}
                        yield f"data: {json.dumps({**last, 'choices': [end]})}\n\n"
                ended = set(range(len(exchange.completions)))
            if event == "[DONE]" and exchange.error is None:
                exchange.replies = [told[index] for index in sorted(told)]
                await exchange.keep_turn()
            last = {name: value for name, value in chunk.items() if name != "usage"} or last
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

    def _fit(self, choice: Any, text: str) -> None:
        """Anthropic's calls have an object for arguments, and its replies no end "abort"."""
        if not all(_is_object(call.function.arguments) for call in choice.message.tool_calls or ()):
            choice.message.content, choice.message.tool_calls, choice.message.reasoning = text, [], None
            choice.finish_reason = "stop" if choice.finish_reason == "tool_calls" else choice.finish_reason
        choice.finish_reason = _ANTHROPIC_ENDS.get(choice.finish_reason, choice.finish_reason)

    async def message_stream_converter(self, generator: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """vLLM's."""
        async for line in super().message_stream_converter(_with_anthropics_ends(generator)):
            yield line


_ANTHROPIC_ENDS = {"abort": "length"}
"""A completion that was cut short ends "max_tokens" in Anthropic's API: agents know by it that the rest is missing."""


async def _with_anthropics_ends(lines: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async for line in lines:
        event = line.removeprefix("data: ").strip()
        if event == "[DONE]" or '"abort"' not in event:
            yield line
            continue
        chunk = json.loads(event)
        for choice in chunk.get("choices", ()):
            choice["finish_reason"] = _ANTHROPIC_ENDS.get(choice.get("finish_reason"), choice.get("finish_reason"))
        yield f"data: {json.dumps(chunk)}\n\n"


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


class RecordedResponses(OpenAIServingResponses):
    """OpenAI's responses."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parser = _forgiving(self.parser)  # type: ignore[has-type]

    async def responses_full_generator(self, *arguments: Any, **options: Any) -> object:
        """vLLM's, which also makes what the last event of a stream holds. The turn is kept before that is sent."""
        request = arguments[0] if arguments else options["request"]
        reply = await super().responses_full_generator(*arguments, **options)
        exchange = current.get()
        if not isinstance(reply, ResponsesResponse):
            return reply
        if any(completion.finish_reason != "stop" for completion in exchange.completions):
            reply.status = "incomplete"
            # OpenAI has no other reason for a reply whose end is missing; finish_reason beside it says "abort"
            reply.incomplete_details = IncompleteDetails(reason="max_output_tokens")
            if reply.output and hasattr(reply.output[-1], "status"):
                reply.output[-1].status = "incomplete"
        exchange.replies = [_as_sent_back(reply.output)]
        if request.stream:
            await exchange.keep_turn()
        return reply


def _as_sent_back(output: Sequence[Any]) -> Message:
    """The message that vLLM will make of a reply's items when an agent sends them back."""
    items = [item for item in output if item.type != "message" or item.content]
    return as_one_message([dict(message) for message in construct_chat_messages_with_tool_call(items)])
