"""vLLM's chat server classes, extended to continue and record session turns token by token.

A continued turn keeps the sampled tokens. Tokenizing sampled text again rarely gives the same tokens, and a trainer
would learn from tokens that the model never read. Imports vLLM's server, see ``compat/vllm_serving.py``.
"""

import json
import logging
import uuid
from collections.abc import AsyncGenerator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from openai.types.responses import ResponseOutputItemAddedEvent, ResponseOutputItemDoneEvent, ResponseOutputMessage
from openai.types.responses.response import IncompleteDetails
from vllm.inputs import TextPrompt, tokens_input

from rollout_service.compat.vllm_serving import (
    AnthropicServingMessages,
    ChatCompletionResponse,
    ChatParams,
    DeltaMessage,
    HfRenderer,
    OnlineRenderer,
    OpenAIServingChat,
    OpenAIServingResponses,
    Parser,
    ResponsesResponse,
    TokenizeParams,
    construct_chat_messages_with_tool_call,
    is_mistral_tokenizer,
)
from rollout_service.errors import RolloutServiceError
from rollout_service.gateway.openai.exchange import Exchange, chunk_of, current
from rollout_service.protocol.sessions import Message, Prefix
from rollout_service.sessions.conversation import as_one_message
from rollout_service.sessions.template import BeginsBranch, Rendering, Reply, text_after

logger = logging.getLogger(__name__)


class ContinuingRenderer(OnlineRenderer):
    """Renders a conversation as the continuation of a session turn, if it continues one."""

    async def render_chat(self, request: Any, **options: Any) -> Any:
        """Call vLLM's method. A model that uses Harmony begins a branch at each turn."""
        if self.use_harmony and (turn := current.get().session) is not None:
            await turn.find([dict(message) for message in request.messages], None)
            turn.begin_branch("harmony")
        return await super().render_chat(request, **options)

    async def render_responses(self, request: Any, **options: Any) -> Any:
        """Call vLLM's method, see ``render_chat``."""
        if self.use_harmony and (turn := current.get().session) is not None:
            await turn.find([], None)
            turn.begin_branch("harmony")
        return await super().render_responses(request, **options)

    async def preprocess_chat(
        self, request: Any, messages: list[Any], *arguments: Any, **options: Any
    ) -> tuple[Any, list[Any]]:
        """Call vLLM's method. If the conversation continues a turn, replace the prompt's tokens."""
        turn = current.get().session
        if turn is None:
            return await super().preprocess_chat(request, messages, *arguments, **options)
        sent = [_copy(message) for message in messages]
        conversation, inputs = await super().preprocess_chat(request, messages, *arguments, **options)
        params = self._chat_params(request, *arguments, **options)
        prefix = await turn.find(sent, self._context(params))
        if prefix is None:
            return conversation, inputs
        [whole] = inputs
        try:
            tokens = await self._continue_prefix(request, params, sent, prefix, whole["prompt_token_ids"])
        except BeginsBranch as branch:
            turn.begin_branch(branch.why)
            return conversation, inputs
        return conversation, [tokens_input(tokens, cache_salt=whole.get("cache_salt"))]

    async def _continue_prefix(
        self, request: Any, params: ChatParams, messages: list[Message], prefix: Prefix, whole: list[int]
    ) -> list[int]:
        """Return the tokens of ``prefix`` and of the text that the template writes after them. Raises BeginsBranch."""
        if params.chat_template_kwargs.get("continue_final_message"):
            raise BeginsBranch("partial_reply")
        if request.build_tok_params(self.model_config).truncate_prompt_tokens is not None:
            raise BeginsBranch("truncated_prompt")
        last, end = prefix.token_ids[-1], None
        if last in self._ends or (isinstance(prefix.stop_reason, int) and last == prefix.stop_reason):
            end = self._text([last])
        steps = text_after(messages, Reply.of(messages, prefix.messages, end), set(self._ends.values()))
        text: str | None = None
        try:
            while True:
                text = await self._render(params, steps.send(text))
        except StopIteration as finished:
            after: str = finished.value
        tokens = await self._tokens(after, last, end)
        if not tokens or whole[-len(tokens) :] != tokens:
            written = await self._render(params, Rendering(messages))
            if not tokens or self._text(tokens) != after or written is None or not written.endswith(after):
                raise BeginsBranch("other_tokens")
        return [*prefix.token_ids, *tokens]

    def _chat_params(
        self,
        request: Any,
        default_template: str | None,
        default_template_content_format: Any,
        default_template_kwargs: dict[str, Any] | None,
        tool_dicts: list[dict[str, Any]] | None = None,
        **_: object,
    ) -> ChatParams:
        """Return the ``ChatParams`` that vLLM's ``preprocess_chat`` builds from its arguments."""
        params: ChatParams = request.build_chat_params(default_template, default_template_content_format)
        tokenize = is_mistral_tokenizer(self.renderer.tokenizer)
        return params.with_defaults({**(default_template_kwargs or {}), "tools": tool_dicts, "tokenize": tokenize})

    def _context(self, params: ChatParams) -> dict[str, Any]:
        """Return all inputs of the prompt besides the messages: tools, documents and other template arguments."""
        given = {name: value for name, value in params.chat_template_kwargs.items() if value is not None}
        context = {"arguments": given, "template": params.chat_template}
        # these renderers, such as Kimi K3's, write both fields into the prompt
        if not isinstance(self.renderer, HfRenderer):
            context |= {"tool_choice": params.tool_choice, "response_format": params.response_format}
        return context

    async def _render(self, params: ChatParams, wanted: Rendering) -> str | None:
        """Return the conversation as rendered by the chat template, or None if the template refuses it."""
        if not wanted.with_generation_prompt:
            params = replace(
                params, chat_template_kwargs={**params.chat_template_kwargs, "add_generation_prompt": False}
            )
        try:
            _, prompt = await self.renderer.render_messages_async(wanted.messages, params)
        except ValueError:
            return None
        text = prompt.get("prompt")
        return self._text(prompt["prompt_token_ids"]) if text is None else str(text)

    async def _tokens(self, text: str, last: int, end: str | None) -> list[int]:
        """Return the tokens of ``text`` after the token ``last``, whose text is ``end``."""
        params = TokenizeParams(max_total_tokens=None, add_special_tokens=False)
        if end is not None:  # a tokenizer may add a space at the start of a text, but not after a special token
            found = await self.renderer.tokenize_prompt_async(TextPrompt(prompt=end + text), params)
            if found["prompt_token_ids"][:1] == [last]:
                return list(found["prompt_token_ids"][1:])
        found = await self.renderer.tokenize_prompt_async(TextPrompt(prompt=text), params)
        return list(found["prompt_token_ids"])

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self.renderer.get_tokenizer().decode(list(token_ids), skip_special_tokens=False))

    @cached_property
    def _ends(self) -> dict[int, str]:
        """The ids of the tokens that end a reply in vLLM, with their texts."""
        of_model = self.model_config.try_get_generation_config().get("eos_token_id")
        found = {self.renderer.get_eos_token_id(), *(of_model if isinstance(of_model, list) else [of_model])}
        return {token: self._text([token]) for token in found if token is not None}


def _copy(message: Message) -> Message:
    """Return the message with its own copy of the tool calls.

    vLLM replaces arguments that are no JSON object by ``{}``. The message would then differ from the reply that the
    agent got.
    """
    copied = dict(message)
    if copied.get("tool_calls"):
        copied["tool_calls"] = deepcopy(copied["tool_calls"])
    return copied


class _Forgiving(Parser):
    """A vLLM parser that returns plain text if parsing the model's output fails.

    Early in training, models often write tool calls that are cut off, endlessly nested, or invalid JSON. The caller
    must see these samples, because an error would bias the selection.
    """

    _has_failed = _has_calls = _has_reasoning = False
    _said = _told = ""
    """The model's text in a stream so far, and the content that the stream has told of it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._again = partial(type(self), *arguments, **options)

    def parse(self, model_output: str, *arguments: Any, **options: Any) -> Any:
        """Call vLLM's method. Return the output as plain text after an error."""
        try:
            reasoning, content, calls = super().parse(model_output, *arguments, **options)
            for call in calls or ():
                (call.name + call.arguments).encode()  # JSON can spell a lone surrogate, which a reply cannot encode
            return reasoning, content, calls
        except Exception as error:  # noqa: BLE001 - of any parser of vLLM's, on any text
            self._note(error)
            return None, model_output, []

    def parse_delta(self, delta_text: str, *arguments: Any, **options: Any) -> Any:
        """Call vLLM's method. After an error, return all further text unparsed.

        vLLM's parsers hold text back that may become a call. If none comes, the stream ends with that text.
        """
        self._said += delta_text
        if self._has_failed:
            return DeltaMessage(content=delta_text)
        try:
            message = super().parse_delta(delta_text, *arguments, **options)
        except Exception as error:  # noqa: BLE001
            self._note(error)
            is_text = not self._has_calls and not self._has_reasoning and self._said.startswith(self._told)
            return DeltaMessage(content=self._said[len(self._told) :] if is_text else delta_text)
        if message is not None:
            self._told += message.content or ""
            self._has_calls = self._has_calls or bool(message.tool_calls)
            self._has_reasoning = self._has_reasoning or bool(message.reasoning)
        if options["finished"] and not self._has_calls and self._told != self._said:
            _, content, calls = self._again().parse(self._said, options["request"], enable_auto_tools=True)
            if content and not calls and content != self._told and content.startswith(self._told):
                message = message or DeltaMessage()
                message.content = (message.content or "") + content[len(self._told) :]
        return message

    def _note(self, error: Exception) -> None:
        self._has_failed = True
        logger.warning("%s failed on what the model said, which is returned as text: %s", type(self).__name__, error)


def _make_forgiving(parser: type[Parser] | None) -> type[Parser] | None:
    return None if parser is None else type(parser.__name__, (_Forgiving, parser), {})


class RecordedChat(OpenAIServingChat):
    """OpenAI's Chat Completions API. Reports how each completion ended, and records each reply for its session as sent
    to the agent."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parser_cls = _make_forgiving(self.parser_cls)  # type: ignore[has-type]

    async def chat_completion_full_generator(self, *arguments: object, **options: object) -> object:
        """Call vLLM's method, correct the finish reasons, and note the replies."""
        reply = await super().chat_completion_full_generator(*arguments, **options)
        exchange = current.get()
        if not isinstance(reply, ChatCompletionResponse):
            return reply
        for choice, completion, text in zip(reply.choices, exchange.completions, exchange.texts, strict=True):
            if completion.finish_reason != "stop":  # vLLM says "tool_calls" even if the reply was cut off after a call
                choice.finish_reason = completion.finish_reason
            self._fit(choice, text)
            if choice.finish_reason == "tool_calls" and not choice.message.tool_calls:
                choice.finish_reason = "stop"  # vLLM says "tool_calls" of any text if a call is required
        exchange.replies = [choice.message.model_dump(mode="json", exclude_none=True) for choice in reply.choices]
        return reply

    def _fit(self, choice: Any, text: str) -> None:
        """Adapt the choice to the limits of the API's reply. ``text``: the complete output of the model."""

    async def chat_completion_stream_generator(
        self, *arguments: object, **options: object
    ) -> AsyncGenerator[str, None]:
        """Call vLLM's method. Record the turn before the agent receives the end of the stream."""
        exchange = current.get()
        told: dict[int, Message] = {}
        ended: set[int] = set()
        last: Message = {}
        async for line in super().chat_completion_stream_generator(*arguments, **options):
            chunk = chunk_of(line)
            _add(told, chunk)
            ended |= {choice["index"] for choice in chunk.get("choices", ()) if choice.get("finish_reason")}
            if not chunk.get("choices") and exchange.rollouts and exchange.error is None:
                # vLLM does not report the end of a completion without tokens
                for index, completion in enumerate(exchange.completions):
                    if index not in ended and last:
                        told.setdefault(index, {"role": "assistant", "content": ""})
                        end = {"index": index, "delta": {}, "logprobs": None, "finish_reason": completion.finish_reason}
                        yield f"data: {json.dumps({**last, 'choices': [end]})}\n\n"
                ended = set(range(len(exchange.completions)))
            if not chunk and exchange.error is None:
                exchange.replies = [told[index] for index in sorted(told)]
                try:
                    await exchange.keep_turn()
                except RolloutServiceError as error:
                    exchange.error = error
                    yield f"data: {json.dumps(error.to_wire())}\n\n"
            last = {name: value for name, value in chunk.items() if name != "usage"} or last
            yield line


def _add(told: dict[int, Message], chunk: Message) -> None:
    """Append a stream chunk to the messages in ``told``."""
    for choice in chunk.get("choices", ()):
        message, delta = told.setdefault(choice["index"], {"role": "assistant", "content": ""}), choice["delta"]
        message["content"] += delta.get("content") or ""
        if delta.get("reasoning"):
            message["reasoning"] = message.get("reasoning", "") + delta["reasoning"]
        for call in delta.get("tool_calls") or ():
            calls = message.setdefault("tool_calls", [])
            while len(calls) <= call["index"]:
                calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
            if call.get("id"):
                calls[call["index"]]["id"] = call["id"]
            function = calls[call["index"]]["function"]
            function["name"] += call["function"].get("name") or ""
            function["arguments"] += call["function"].get("arguments") or ""


class RecordedMessages(RecordedChat, AnthropicServingMessages):
    """Anthropic's Messages API, which vLLM maps to chat completions."""

    def _fit(self, choice: Any, text: str) -> None:
        """Fall back to text if the arguments of a call are no JSON object. Map the finish reason "abort", which
        Anthropic lacks."""
        if not all(_is_object(call.function.arguments) for call in choice.message.tool_calls or ()):
            choice.message.content, choice.message.tool_calls, choice.message.reasoning = text, [], None
        choice.finish_reason = _ANTHROPIC_ENDS.get(choice.finish_reason, choice.finish_reason)

    async def _probe_disabled_thinking_effort(self) -> Any:
        """Call vLLM's method outside the request's session: it renders chats of its own."""
        token = current.set(Exchange())
        try:
            return await super()._probe_disabled_thinking_effort()
        finally:
            current.reset(token)

    async def message_stream_converter(self, generator: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """Call vLLM's method with Anthropic's finish reasons."""
        async for line in super().message_stream_converter(_with_anthropics_ends(generator)):
            yield line


_ANTHROPIC_ENDS = {"abort": "length"}
"""Finish reasons for Anthropic's API. An aborted completion ends with "max_tokens", which tells agents that it is
incomplete."""


async def _with_anthropics_ends(lines: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async for line in lines:
        if '"abort"' not in line:
            yield line
            continue
        chunk = chunk_of(line)
        for choice in chunk.get("choices", ()):
            choice["finish_reason"] = _ANTHROPIC_ENDS.get(choice.get("finish_reason"), choice.get("finish_reason"))
        yield f"data: {json.dumps(chunk)}\n\n"


def _is_object(arguments: str) -> bool:
    try:
        parsed = json.loads(arguments)
        json.dumps(parsed, allow_nan=False)  # refuses NaN, which would reach the agent as null
        return isinstance(parsed, dict)
    except (ValueError, RecursionError):
        return False


class RecordedResponses(OpenAIServingResponses):
    """OpenAI's Responses API."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parser = _make_forgiving(self.parser)  # type: ignore[has-type]

    async def responses_full_generator(self, *arguments: Any, **options: Any) -> object:
        """Call vLLM's method. For a stream, its result is in the last event, so the turn is recorded before that
        event."""
        request = arguments[0] if arguments else options["request"]
        reply = await super().responses_full_generator(*arguments, **options)
        exchange = current.get()
        if not isinstance(reply, ResponsesResponse):
            return reply
        if not reply.output:  # an agent sends the items back; a reply without items would be lost
            reply.output = [
                ResponseOutputMessage(
                    id=f"msg_{uuid.uuid4().hex}", content=[], role="assistant", status="completed", type="message"
                )
            ]
        if any(completion.finish_reason != "stop" for completion in exchange.completions):
            reply.status = "incomplete"
            # OpenAI defines no other reason for an incomplete reply; ``finish_reason`` says "abort"
            reply.incomplete_details = IncompleteDetails(reason="max_output_tokens")
            if reply.output and hasattr(reply.output[-1], "status"):
                reply.output[-1].status = "incomplete"
        exchange.replies = [_as_sent_back(reply.output)]
        if request.stream:
            await exchange.keep_turn()
        return reply

    async def responses_stream_generator(self, *arguments: Any, **options: Any) -> AsyncGenerator[Any, None]:
        """Call vLLM's method. Add the events for the message of a reply without text, and tell which item was cut
        short."""
        has_items, ended = False, None
        async for event in super().responses_stream_generator(*arguments, **options):
            if ended is not None:
                is_cut = event.type == "response.completed" and event.response.status == "incomplete"
                if is_cut and hasattr(ended.item, "status"):
                    ended.item.status = "incomplete"
                yield ended
            ended = event if event.type == "response.output_item.done" else None
            if ended is not None:
                continue
            has_items = has_items or event.type == "response.output_item.added"
            if event.type == "response.completed" and not has_items:
                for index, item in enumerate(event.response.output):
                    place = {"output_index": index, "sequence_number": event.sequence_number}
                    begun = item.model_copy(update={"status": "in_progress"})
                    yield ResponseOutputItemAddedEvent(type="response.output_item.added", item=begun, **place)
                    place["sequence_number"] += 1
                    yield ResponseOutputItemDoneEvent(type="response.output_item.done", item=item, **place)
                    event.sequence_number += 2
            yield event


def _as_sent_back(output: Sequence[Any]) -> Message:
    """Return the message that vLLM builds when an agent sends the reply's items back."""
    items = [item for item in output if item.type != "message" or item.content]
    return as_one_message([dict(message) for message in construct_chat_messages_with_tool_call(items)])
