"""The routes of OpenAI's and Anthropic's chat APIs, ``/tokenize`` and ``/detokenize``, answered by vLLM's server
classes.

This service adds fields to each reply: ``weight_versions`` of each choice in vLLM's format, and ``attempts`` and
``truncated_sampling``. It adds ``weight_version`` if all tokens have one version. In a reply without choices,
``weight_versions`` is at the top level. Fields that vLLM would silently drop are refused by name.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Annotated, Any, cast

from fastapi import APIRouter, Body, Depends, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field, ValidationError

from rollout_service.compat.pydantic_internals import fail_fast_validator
from rollout_service.errors import BadRequest, ContextTooLong, InvalidRequest, NotFound, RolloutServiceError, shorten
from rollout_service.gateway.dependencies import Here, Services, SessionHeader
from rollout_service.gateway.generate import spans
from rollout_service.gateway.openai.exchange import Exchange, SessionTurn, chunk_of, current
from rollout_service.gateway.openai.serving import Serving
from rollout_service.gateway.prompts import BYTES_PER_TOKEN, DATA_ERRORS, check_ids, model_and_adapter
from rollout_service.gateway.routes import OpenRoute
from rollout_service.protocol.generate import ModelName, RolloutOptions
from rollout_service.protocol.sampling import CommonSampling, StopString, StopStrings, without_repetition
from rollout_service.web.errors import bad_request, documented

router = APIRouter(tags=["chat"], route_class=OpenRoute)
_ERRORS = DATA_ERRORS | documented(BadRequest)

OURS = ("adapter", "min_adapter_version", "min_weight_version", "on_abort", "weight_version")
"""Options of this service that a body may contain in addition to the API's fields."""
IDLE = frozenset(
    {
        *(
            "metadata",
            "nvext",
            "prompt_cache_key",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
        ),
        *("cache_control", "context_management", "inference_geo"),
        *("stream_options.include_obfuscation", "thinking.block_binding"),
    }
)
"""Fields for other servers that change no token: accounting, cache hints, NVIDIA Dynamo's hints, and message edits that
keep everything. ``_refuse_of_anthropics`` refuses other edits."""
OF_A_STORE = ("background", "previous_input_messages", "previous_response_id", "store")
"""Fields of the Responses API that need a server to store responses."""
_CHOICES_OF_TOOLS = frozenset({"function", "custom"})
_PARTS_OF_TOOL_RESULTS = frozenset({"text", "image", "tool_reference"})
"""Parts that vLLM reads; it leaves out others without a word."""
_NOT_TEXT = (
    *("image", "image_url", "image_embeds", "image_pil", "input_image", "document", "file", "input_file"),
    *("audio_url", "audio_embeds", "input_audio", "video_url", "video_embeds", "prompt_embeds"),
)
"""Types of parts of a message that are no text."""
_NOT_HERE = ("use_beam_search", "return_prompt_text", "return_token_offsets")
"""Options that vLLM's classes accept and the dispatcher's replies lack."""
TOOLS_OF_AGENTS = frozenset({"function", "custom", "namespace"})
"""Tool types of the Responses API that the caller runs. The server runs all others."""
MAX_PARTS = 16384
"""Maximum number of objects and lists in a chat's body. An agent's turn has about eight."""
MAX_VALUES = 8 * MAX_PARTS
"""Maximum number of names, strings and other values of a chat's body, without numbers."""
MAX_NUMBERS = 1 << 20
"""Maximum number of numbers of a chat's body, without ``tokens``. NeMo Gym's agents send back token ids and logprobs of
each turn, in its messages."""
_PARTS, _VALUES, _NUMBERS = "messages, parts and other objects", "names and values", "numbers"
_CHARACTERS = "characters"
MAX_NAMES = 64
"""Maximum number of names of an item of a Responses body. vLLM reads an item by 60 classes, each of which reads all of
its names on the event loop."""
_STOPS = frozenset({"stop", "stop_sequences"})
"""Names of the stop strings. They bypass vLLM's classes, which have another limit on their number."""
_MAX_REQUEST_ID = 256
Name = Annotated[str, Field(max_length=1024)]
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Names of the maximum length of a completion."""
_TEXT_OF = {"output_text": "text", "refusal": "refusal"}
"""Field with the text of a reply's part in the Responses API, by the part's type."""
JsonObject = dict[str, Any]


async def chat(request: Request, services: Services, body: JsonObject, exchange: Exchange) -> Response:
    """Answer OpenAI's chat API: messages, tools, structured outputs, ``n``, logprobs, and vLLM's
    ``return_token_ids``."""
    serving, vllm = await _serving(services)
    parsed = _parse(vllm.ChatCompletionRequest, body, request, services)
    await _begin(exchange, body, request, services, serving)
    reply = await _answer(serving.chat.create_chat_completion(parsed, request), exchange)
    if isinstance(reply, BaseModel):
        return await _told(_with_choices(reply.model_dump(mode="json"), exchange, parsed.model), exchange)
    return await _stream(_chunks(reply, exchange), exchange)


async def respond(request: Request, services: Services, body: JsonObject, exchange: Exchange) -> Response:
    """Answer OpenAI's Responses API. Nothing is stored: send the whole conversation."""
    serving, vllm = await _serving(services)
    parsed = _parse(vllm.ResponsesRequest, _without_a_store(body), request, services)
    _refuse_tools_that_nobody_runs(parsed.tools)
    _refuse_unknown_choice_of_tools(body.get("tool_choice"))
    await _begin(exchange, body, request, services, serving)
    reply = await _answer(serving.responses.create_responses(parsed, request), exchange)
    if isinstance(reply, BaseModel):
        return await _told(_with_the_only_choice(reply.model_dump(mode="json", by_alias=True), exchange), exchange)
    return await _stream(_events(reply, exchange), exchange)


async def anthropic(request: Request, services: Services, body: JsonObject, exchange: Exchange) -> Response:
    """Answer Anthropic's Messages API."""
    serving, vllm = await _serving(services)
    _refuse_of_anthropics(body)
    parsed = _parse(vllm.AnthropicMessagesRequest, body, request, services)
    await _begin(exchange, body, request, services, serving)
    reply = await _answer(serving.messages.create_messages(parsed, request), exchange)
    if isinstance(reply, BaseModel):
        return await _told(_with_the_only_choice(reply.model_dump(mode="json", exclude_none=True), exchange), exchange)
    return await _stream(_message_events(reply, exchange), exchange)


APIS = {"/v1/chat/completions": chat, "/v1/responses": respond, "/v1/messages": anthropic}
"""Answers by path. Each API is also at the URL of each session."""


def add_routes(
    router: APIRouter, begin: Callable[..., Awaitable[Exchange]], errors: dict[int | str, Any], prefix: str = ""
) -> None:
    """Add a route for each API. ``begin``: FastAPI dependency that returns the exchange of a request."""

    async def until_sent(exchange: Annotated[Exchange, Depends(begin)]) -> AsyncIterator[Exchange]:
        try:
            yield exchange
        finally:  # after the whole reply, and outside of the scope that a client's disconnect cancels
            if exchange.session is not None:
                await exchange.session.leave()

    def add(path: str, answer: Callable[[Request, Services, JsonObject, Exchange], Awaitable[Response]]) -> None:
        async def endpoint(
            request: Request,
            services: Here,
            exchange: Annotated[Exchange, Depends(until_sent)],
            body: JsonObject = Body(),
        ) -> Response:
            reply = await answer(request, services, body, exchange)
            return reply if exchange.session is None else exchange.session.add_header(reply)

        router.post(prefix + path, responses=errors, name=answer.__name__, description=answer.__doc__)(endpoint)

    for path, answer in APIS.items():
        add(path, answer)


@router.post("/v1/messages/count_tokens", responses=_ERRORS)
async def count_tokens(request: Request, services: Here, body: JsonObject = Body()) -> Response:
    """Count the tokens of Anthropic's messages."""
    serving, vllm = await _serving(services)
    _refuse_of_anthropics(body)
    parsed = _parse(vllm.AnthropicCountTokensRequest, body, request, services)
    await _adapter_as_model(body, services, serving)
    current.set(exchange := Exchange())
    reply = await _answer(serving.messages.count_tokens(parsed, request), exchange)
    return JSONResponse(reply.model_dump(mode="json", exclude_none=True))


@router.post("/tokenize", responses=_ERRORS)
async def tokenize(request: Request, services: Here, body: JsonObject = Body()) -> Response:
    """Return the token ids of a prompt, or of messages in the chat template."""
    serving, vllm = await _serving(services)
    is_chat = body.get("messages") is not None
    model = vllm.TokenizeChatRequest if is_chat else vllm.TokenizeCompletionRequest
    current.set(exchange := Exchange())
    parsed = _parse(model, body, request, services)
    await _adapter_as_model(body, services, serving)
    reply = await _answer(serving.tokenization.create_tokenize(parsed, request), exchange)
    return JSONResponse(reply.model_dump(mode="json"))


@router.post("/detokenize", responses=_ERRORS)
async def detokenize(request: Request, services: Here, body: JsonObject = Body()) -> Response:
    """Return the text of token ids."""
    serving, vllm = await _serving(services)
    parsed = _parse(vllm.DetokenizeRequest, body, request, services)
    try:
        check_ids(parsed.tokens, services)
    except InvalidRequest as error:
        raise BadRequest(f"{request.method} {request.url.path}: {error.message}", error.detail) from error
    await _adapter_as_model(body, services, serving)
    reply = await _answer(serving.tokenization.create_detokenize(parsed, request), Exchange())
    return JSONResponse(reply.model_dump(mode="json"))


async def _serving(services: Services) -> tuple[Serving, Any]:
    """Return vLLM's server objects, and the module with its request models."""
    assert services.chats is not None
    serving: Serving = await services.chats.get(services)
    from rollout_service.compat import vllm_serving

    return serving, vllm_serving


def _parse(model: type[BaseModel], body: JsonObject, request: Request, services: Services) -> Any:
    """Parse the body. Raises BadRequest and names fields that the API does not define or that are not implemented."""
    route = f"{request.method} {request.url.path}"
    _refuse_images(route, body)
    _require_bounded(route, body, services)
    _require_object(route, body, "structured_outputs")
    try:
        body = cast(JsonObject, without_repetition(body))
        # OpenAI's null is the default; vLLM refuses it for its own fields, and cannot write some replies with it
        given = {name: value for name, value in body.items() if name not in _STOPS and value is not None}
        parsed = fail_fast_validator(model).validate_python(given)
    except ValidationError as error:
        raise bad_request(route, error) from error
    except Exception as error:  # vLLM's validators raise their own errors
        raise _as_ours(error) from error
    for name in _NOT_HERE:
        if getattr(parsed, name, False):
            raise BadRequest(f"{route}: {name} is not implemented: leave it out")
    if getattr(parsed, "length_penalty", None) not in (None, 1.0):
        raise BadRequest(f"{route}: length_penalty is of beam search, which is not implemented: leave it out")
    for name in _LENGTHS:
        if (asked := vars(parsed).get(name)) is not None:  # not getattr, which warns that the older name is deprecated
            if asked < 1:
                raise BadRequest(
                    f"{route}: {name}={asked}: a completion has at least 1 token: raise it, or leave it out"
                )
            # vLLM limits a length to the rest of the context, but refuses one above the whole context
            parsed = parsed.model_copy(update={name: min(asked, services.max_model_len)})
    unknown = sorted({*_unknown_names(body, parsed)} - IDLE - set(OURS) - _STOPS)
    if unknown:
        raise BadRequest(
            f"{route}: {', '.join(name[:64] for name in unknown[:8])}: not a field here, or not implemented: leave it "
            "out",
            {"not_implemented": [name[:64] for name in unknown[:64]]},
        )
    return parsed


def _require_object(route: str, body: JsonObject, name: str) -> None:
    """Raise BadRequest for another value of a field that vLLM reads before it checks the type."""
    if not isinstance(body.get(name), dict | None):
        raise BadRequest(f"{route}: {name} is not an object: send one, or leave it out")


def _unknown_names(given: JsonObject, parsed: BaseModel, inside: str = "") -> Iterator[str]:
    """Yield the names of the request, and of option objects in it, that vLLM's classes do not define.

    Lists are not searched: agents send back what other servers added to messages and tools.
    """
    fields = {name: field for field, of in type(parsed).model_fields.items() for name in (field, of.alias)}
    for name, value in given.items():
        if name not in fields:
            if value is not None:
                yield inside + name
        elif isinstance(value, dict) and isinstance(option := vars(parsed).get(fields[name]), BaseModel):
            yield from _unknown_names(value, option, f"{inside}{name}.")


def _without_a_store(body: JsonObject) -> JsonObject:
    """Return a Responses body that vLLM accepts. Raises BadRequest if it needs stored responses."""
    asked = [name for name in OF_A_STORE if body.get(name)]
    if asked:
        raise BadRequest(
            f"{', '.join(asked)}: responses are not kept here: send the whole conversation in input. A session "
            "(POST /v1/sessions) keeps its tokens",
            {"not_implemented": asked},
        )
    taken = {**body, "store": False}
    if isinstance(given := body.get("input"), list):
        taken["input"] = [_reply_as_text(item) for item in given]
    return taken


def _reply_as_text(item: object) -> object:
    """Return a reply item in OpenAI's short form. Of the long form, vLLM 0.32 reads the first part alone, if it is
    text."""
    if not isinstance(item, dict) or item.get("role") != "assistant":
        return item
    content = item.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        said = [part.get(_TEXT_OF.get(str(part.get("type")), "")) for part in content]
        if all(isinstance(text, str) for text in said):
            content = "".join(map(str, said))
    return {"role": "assistant", "content": content} if isinstance(content, str) else item


def _refuse_tools_that_nobody_runs(tools: Sequence[Any]) -> None:
    """Raise BadRequest for tools that vLLM would silently leave out of the prompt."""
    unknown = sorted({tool.type for tool in tools} - TOOLS_OF_AGENTS)
    if unknown:
        raise BadRequest(
            f"tools: {', '.join(unknown)}: this service runs no tools: give functions, and run them yourself",
            {"not_implemented": unknown},
        )


def _refuse_unknown_choice_of_tools(choice: object) -> None:
    """Raise BadRequest for a choice that vLLM would read as ``auto``."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind is not None and kind not in _CHOICES_OF_TOOLS:
        raise BadRequest(
            f"tool_choice: type={str(kind)[:64]} is not implemented: name one function, or send auto, required or none",
            {"not_implemented": ["tool_choice"]},
        )


def _refuse_images(route: str, body: JsonObject) -> None:
    """Raise BadRequest for parts that are no text. ``_require_bounded`` would count their data as text."""
    messages = body.get("messages") or body.get("input")
    unread: list[object] = [*messages] if isinstance(messages, list) else []
    while unread:
        for part in _blocks_of(unread.pop()):
            if (kind := part.get("type")) in _NOT_TEXT:
                raise BadRequest(
                    f"{route}: {kind}: images, audio and files are not implemented; send text",
                    {"not_implemented": [kind]},
                )
            if kind == "tool_result":
                unread.append(part)


def _require_bounded(route: str, body: JsonObject, services: Services) -> None:
    """Raise ContextTooLong for a body larger than any context, and BadRequest for an item of too many names.

    vLLM would read them on the event loop for seconds.
    """
    max_characters = BYTES_PER_TOKEN * services.max_model_len
    counted = _counted(body)
    for what, limit in ((_PARTS, MAX_PARTS), (_VALUES, MAX_VALUES), (_NUMBERS, MAX_NUMBERS)):
        if counted[what] > limit:
            raise ContextTooLong(
                f"{route}: the request has {counted[what]} {what} or more, and at most {limit} are taken: send a "
                "shorter conversation",
                {"parts": counted[what], "limit": limit},
            )
    if (characters := counted[_CHARACTERS]) > max_characters:
        raise ContextTooLong(
            f"{route}: the request has {characters} characters, and this model's maximum context length of "
            f"{services.max_model_len} tokens holds at most {max_characters}: send a shorter conversation",
            {"characters": characters, "limit": max_characters, "max_model_len": services.max_model_len},
        )
    items = body.get("input")
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict) and len(item) > MAX_NAMES:
            raise BadRequest(
                f"input[{index}]: the item has {len(item)} names: leave out those that are not in OpenAI's API, so "
                f"that it has at most {MAX_NAMES}"
            )
    tokens = body.get("tokens")
    if isinstance(tokens, list) and len(tokens) > services.max_model_len:
        raise ContextTooLong(
            f"{route}: tokens has {len(tokens)} ids, more than this model's maximum context length of "
            f"{services.max_model_len}: send them in several requests",
            {"tokens": len(tokens), "max_model_len": services.max_model_len},
        )


def _counted(body: JsonObject) -> dict[str, int]:
    """Return how much of each kind a body holds, without ``tokens``. Stops above a limit."""
    values = numbers = parts = characters = 0
    unread: list[object] = [{name: value for name, value in body.items() if name != "tokens"}]
    while unread and values <= MAX_VALUES and numbers <= MAX_NUMBERS:
        value = unread.pop()
        if isinstance(value, (int, float)):  # in half the time of a union
            numbers += 1
            continue
        values += 1
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, dict | list):
            parts += 1
            unread += value
            unread += value.values() if isinstance(value, dict) else ()
    return {_PARTS: parts, _VALUES: values, _NUMBERS: numbers, _CHARACTERS: characters}


class _Bounded(RolloutOptions, CommonSampling):
    """Fields that vLLM would change silently or leave unbounded. They have the limits of the other data routes."""

    max_tokens: Any = None
    logprobs: Any = None
    stop: StopStrings | StopString | None = None
    stop_sequences: StopStrings | None = None
    """Anthropic's name of ``stop``."""
    model: ModelName | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, under either name."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        return (*stop, *(self.stop_sequences or ()))


async def _named_in_header(services: Here, x_session_id: SessionHeader = None) -> Exchange:
    """Return an exchange for the session in the header. An open session records the turn; any name selects a
    replica."""
    exchange = Exchange(RolloutOptions(session_id=x_session_id or None))
    if x_session_id:
        with suppress(NotFound):
            exchange.session = await SessionTurn.of(x_session_id, services.sessions)
    return exchange


add_routes(router, _named_in_header, _ERRORS)


async def _begin(exchange: Exchange, body: JsonObject, request: Request, services: Services, serving: Serving) -> None:
    """Store the options that bypass vLLM's classes in ``exchange``. Raises BadRequest for an invalid value, and
    InvalidRequest for another session than the header's or the URL's."""
    route = f"{request.method} {request.url.path}"
    if len(request.headers.get("X-Request-Id", "")) > _MAX_REQUEST_ID:
        raise BadRequest(f"{route}: X-Request-Id has more than {_MAX_REQUEST_ID} characters: shorten it")
    try:
        asked = {name: body[name] for name in _Bounded.model_fields if name in body}
        given: _Bounded = fail_fast_validator(_Bounded).validate_python(asked)
    except ValidationError as error:
        raise bad_request(route, error) from error
    if given.routed_experts_prompt_start is not None and services.returns_experts:
        raise BadRequest(f"{route}: routed_experts_prompt_start: replies of chats have no routed experts; leave it out")
    exchange.stop = given.stops
    exchange.options = given.options(exchange.options.session_id)
    if (adapter := await _adapter_as_model(body, services, serving, given.adapter)) is not None:
        exchange.options = exchange.options.model_copy(update={"adapter": adapter})
    current.set(exchange)


async def _adapter_as_model(
    body: JsonObject, services: Services, serving: Serving, adapter: str | None = None
) -> str | None:
    """Return the adapter that the body names as its model, and let vLLM's classes accept the name; else None.

    Raises NotFound for an unknown name, and InvalidRequest for another adapter than ``adapter``.
    """
    model = body.get("model")
    if not isinstance(model, str) or model in (services.name, *services.aliases):
        return None
    _, adapter = await model_and_adapter(model, adapter, services)
    serving.accept(model)
    return adapter


def _refuse_of_anthropics(body: JsonObject) -> None:
    """Raise BadRequest for fields that vLLM would drop, or refuse under another name."""
    thinking, management = body.get("thinking"), body.get("context_management")
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        raise BadRequest(
            'thinking.budget_tokens: a bound on the tokens of reasoning is not implemented: send {"type": "adaptive"} '
            "or leave thinking out",
            {"not_implemented": ["thinking.budget_tokens"]},
        )
    edits = management.get("edits") if isinstance(management, dict) else None
    kept = isinstance(edits, list) and all(isinstance(edit, dict) and edit.get("keep") == "all" for edit in edits)
    if edits and not kept:
        raise BadRequest(
            "context_management.edits: messages are not edited here: send the conversation that the model is to read",
            {"not_implemented": ["context_management.edits"]},
        )
    messages = body.get("messages")
    for block in chain.from_iterable(map(_blocks_of, messages if isinstance(messages, list) else ())):
        if block.get("type") == "tool_result":
            kinds = {str(part.get("type"))[:64] for part in _blocks_of(block)}
            if unread := sorted(kinds - _PARTS_OF_TOOL_RESULTS):
                raise BadRequest(
                    f"a tool_result with {', '.join(unread[:8])}: not implemented: send its text",
                    {"not_implemented": unread[:64]},
                )


def _blocks_of(message: object) -> list[JsonObject]:
    """Return the content blocks of a message, or of a tool's result."""
    content = message.get("content", message.get("output")) if isinstance(message, dict) else None
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


async def _answer(reply: Awaitable[Any], exchange: Exchange) -> Any:
    """Return vLLM's reply. Its refusals become errors of the service; the service's own errors are raised unchanged."""
    try:
        found = await reply
    except RolloutServiceError:
        raise
    except Exception as error:
        if exchange.error is not None:
            raise exchange.error from error
        if exchange.rollouts:  # not the caller's fault, so the caller may retry
            raise RolloutServiceError(f"the completion does not fit into this API's reply: {error}") from error
        raise _as_ours(error) from error
    if exchange.error is not None:
        raise exchange.error
    if hasattr(found, "error") and hasattr(found.error, "code"):
        raise _refusal(found.error.code, found.error.message)
    return found


def _as_ours(error: Exception) -> Exception:
    """Map errors as vLLM's server does. Errors that are not the caller's fault stay unchanged."""
    from vllm.exceptions import VLLMClientError, VLLMNotFoundError

    if isinstance(error, VLLMNotFoundError):
        return NotFound(shorten(str(error)))
    if isinstance(error, ValidationError):  # of a list, whose items are validated when they are read
        return bad_request("a list in the request", error)
    # _parse has refused other invalid values, so the prompt left no room
    if getattr(error, "parameter", None) == "max_tokens":
        return ContextTooLong(
            "the conversation fills this model's maximum context length, and no room is left for a reply: shorten it"
        )
    client_errors = (VLLMClientError, ValueError, TypeError, OverflowError, NotImplementedError, RecursionError)
    of_a_template = any(cls.__name__ == "TemplateError" for cls in type(error).__mro__)
    message = shorten(str(error))
    if message.startswith("min_tokens must be less"):  # vLLM does not say what to do
        message = f"{message.rstrip('.')}: lower min_tokens, or raise max_tokens"
    return BadRequest(message) if isinstance(error, client_errors) or of_a_template else error


def _refusal(status: int, message: str) -> RolloutServiceError:
    message = shorten(message)
    if status == 404:
        return NotFound(message)
    if "max_model_len" in message:  # from the Responses API
        return ContextTooLong(f"no room is left for a reply in this model's maximum context length: {message}")
    return BadRequest(message) if status < 500 else RolloutServiceError(message)


async def _told(body: JsonObject, exchange: Exchange) -> Response:
    """Build the reply, then record its turn, so that the session has no turn that the agent never gets."""
    response = JSONResponse(body)
    await exchange.keep_turn()
    return response


def _with_choices(reply: JsonObject, exchange: Exchange, model: str | None) -> JsonObject:
    for choice, versions in zip(reply["choices"], _versions(exchange), strict=True):
        choice["weight_versions"] = versions
    return _with_versions(reply, exchange) | ({} if model is None else {"model": model})


def _with_the_only_choice(reply: JsonObject, exchange: Exchange) -> JsonObject:
    """Add the fields of the first choice to a reply without a list of choices."""
    [reply["weight_versions"]] = _versions(exchange)
    reply["finish_reason"] = exchange.completions[0].finish_reason
    return _with_versions(reply, exchange)


def _with_versions(reply: JsonObject, exchange: Exchange) -> JsonObject:
    """Add the fields of the whole reply."""
    found = {span["version"] for versions in _versions(exchange) for span in versions}
    if len(found) == 1:
        reply["weight_version"] = int(found.pop())
    reply["attempts"] = max((rollout.attempts for rollout in exchange.rollouts), default=1)
    reply["truncated_sampling"] = any(rollout.truncated_sampling for rollout in exchange.rollouts)
    return reply


def _versions(exchange: Exchange) -> list[list[JsonObject]]:
    return [spans(completion) for completion in exchange.completions]


async def _stream(lines: AsyncIterator[str], exchange: Exchange) -> Response:
    """Return server-sent events after the first tokens have arrived. Earlier errors become HTTP errors."""
    before: list[str] = []
    async for line in lines:
        before.append(line)
        if exchange.error is not None:
            raise exchange.error
        if exchange.begun:
            break

    async def all_of_them() -> AsyncIterator[str]:
        for line in before:
            yield line
        async for line in lines:
            yield line

    return StreamingResponse(all_of_them(), media_type="text/event-stream")


async def _chunks(lines: AsyncIterator[str], exchange: Exchange) -> AsyncIterator[str]:
    """Yield the chunks of a chat, with weight versions in the last chunk of each choice."""
    versions, of_the_reply = list[list[JsonObject]](), JsonObject()
    async for line in lines:
        chunk = chunk_of(line)
        ended = [choice for choice in chunk.get("choices", ()) if choice.get("finish_reason")]
        if not ended:
            yield line
            continue
        if not versions:  # once, because all choices end together, and there may be thousands
            versions, of_the_reply = _versions(exchange), _with_versions({}, exchange)
        for choice in ended:
            choice["weight_versions"] = versions[choice["index"]]
        yield f"data: {json.dumps(chunk | of_the_reply)}\n\n"


async def _events(events: AsyncIterator[Any], exchange: Exchange) -> AsyncIterator[str]:
    """Yield the events of OpenAI's Responses API, with weight versions in the last event."""
    try:
        async for event in events:
            data = event.model_dump(mode="json", by_alias=True)
            if event.type == "response.completed":
                _with_the_only_choice(data["response"], exchange)
            yield f"event: {event.type}\ndata: {json.dumps(data)}\n\n"
    except RolloutServiceError as error:  # vLLM's other streams tell it themselves
        yield _error_event(error)


async def _message_events(lines: AsyncIterator[str], exchange: Exchange) -> AsyncIterator[str]:
    """Yield the events of Anthropic's API, with weight versions in the event with the stop reason."""
    ends = "event: message_delta\ndata: "
    async for line in lines:
        if line.startswith(ends):
            data = _with_the_only_choice(json.loads(line.removeprefix(ends)), exchange)
            yield f"{ends}{json.dumps(data)}\n\n"
        elif (
            line.startswith("event: error\n") and exchange.error is not None
        ):  # vLLM says that it cannot parse the error
            yield _error_event(exchange.error)
        else:
            yield line


def _error_event(error: RolloutServiceError) -> str:
    return f"event: error\ndata: {json.dumps({'type': 'error', 'message': error.message, **error.to_wire()})}\n\n"
