"""Keys that identify a conversation, so that a later turn finds the turn it continues."""

import json
from collections.abc import Iterable, Iterator, Sequence
from copy import copy

import xxhash

from rollout_service.protocol.sessions import Message

_TEXTS = frozenset({"text", "input_text", "output_text"})
"""Types of content parts that hold text, in chat completions and in OpenAI's Responses API."""
_MAX_DEPTH = 256
"""Maximum number of brackets in tool-call arguments that are compared as JSON. Longer arguments are compared as
text."""


def keys_with(messages: Sequence[Message], replies: Iterable[Message], context: object) -> Iterator[str]:
    """Yield the key of ``messages`` followed by each of ``replies``; see ``keys_of``. Reads ``messages`` once.

    Conversations that say the same in the same context have the same key.
    """
    keys = _Keys(context)
    for message in messages:
        keys.add(message)
    for reply in replies:
        whole = keys.copy()
        whole.add(reply)
        yield whole.key()


def keys_of(messages: Sequence[Message], context: object) -> Iterator[tuple[int, str]]:
    """Yield the number of messages and the key of each prefix that ends with an assistant message, in linear time.

    Consecutive assistant messages count as one message. OpenAI's Responses and Anthropic's Messages APIs split a reply
    into several items, and agents send them back as one message or as several.

    Args:
        context: everything else that the prompt depends on, as JSON: tools, documents, template arguments.
    """
    keys = _Keys(context)
    for count, message in enumerate(messages, 1):
        keys.add(message)
        if message.get("role") == "assistant":
            yield count, keys.key()


class _Keys:
    """The running key of a conversation that grows message by message."""

    def __init__(self, context: object) -> None:
        self._before = xxhash.xxh3_128(_json(context))
        self._text, self._calls = xxhash.xxh3_128(), xxhash.xxh3_128()
        self._in_reply = False
        """True if the last message was assistant text. ``_text`` and ``_calls`` then describe that reply."""

    def add(self, message: Message) -> None:
        said = _key_fields(message)
        if message.get("role") == "assistant" and isinstance(said["content"], str):
            self._in_reply = True
            self._text.update(said["content"].encode("utf-8", "surrogatepass"))
            for call in said.get("tool_calls", ()):
                self._calls.update(xxhash.xxh3_128_digest(_json(call)))
            return
        self._before, self._in_reply = self._with_reply(), False
        self._text.reset()
        self._calls.reset()
        self._before.update(b"message" + xxhash.xxh3_128_digest(_json(said)))

    def key(self) -> str:
        return self._with_reply().hexdigest()

    def copy(self) -> "_Keys":
        made = copy(self)
        made._before, made._text, made._calls = self._before.copy(), self._text.copy(), self._calls.copy()
        return made

    def _with_reply(self) -> xxhash.xxh3_128:
        whole = self._before.copy()
        if self._in_reply:
            whole.update(b"reply" + self._text.digest() + self._calls.digest())
        return whole


def as_one_message(parts: Sequence[Message]) -> Message:
    """Return one assistant message with the joined text and reasoning and all tool calls of ``parts``."""
    reply: Message = {"role": "assistant", "content": ""}
    for part in parts:
        reply["content"] += _text(part.get("content"))
        if part.get("reasoning"):
            reply["reasoning"] = reply.get("reasoning", "") + part["reasoning"]
        if part.get("tool_calls"):
            reply["tool_calls"] = [*reply.get("tool_calls", ()), *part["tool_calls"]]
    return reply


def _key_fields(message: Message) -> Message:
    """Return the fields of a message that enter the key.

    An assistant message contributes its text and its tool calls. Agents return a reply without its reasoning, with a
    name, with empty content as null, or with text as a list of parts. Any other message contributes every field that is
    set.
    """
    if message.get("role") != "assistant":
        texts = _texts(message.get("content"))
        # vLLM or the template writes something between several texts
        content = texts if len(texts) > 1 else _text(message.get("content"))
        said = {name: value for name, value in message.items() if value is not None} | {"content": content}
        if said.get("type") == "message":  # the Responses API's, which it does not require
            del said["type"]
        return said
    calls = [_call_fields(call) for call in message.get("tool_calls") or ()]
    return {"role": "assistant", "content": _text(message.get("content")), "tool_calls": calls}


def _call_fields(call: Message) -> Message:
    """Return the fields of a tool call that enter the key: all but its id."""
    function = call.get("function")
    if not isinstance(function, dict):  # OpenAI's custom tools, which vLLM refuses where its model has none
        return {name: value for name, value in call.items() if name != "id"}
    return {"name": function["name"], "arguments": _arguments(function.get("arguments"))}


def _text(content: object) -> object:
    """Return the joined text of content parts, or ``content`` if it has other parts or none."""
    texts = _texts(content)
    return "".join(texts) if texts else content or ""


def _texts(content: object) -> list[str]:
    """Return the text of each content part; nothing if ``content`` has other parts or none."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") in _TEXTS for part in content):
        return [str(part.get("text", "")) for part in content]
    return []


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, default=str).encode()


def _arguments(arguments: object) -> object:
    """Return tool-call arguments as parsed JSON, so that JSON text and the equal object have one key."""
    text = arguments if isinstance(arguments, str) else _json(arguments).decode()
    if text.count("[") + text.count("{") > _MAX_DEPTH:
        # nesting this deep raises RecursionError in ``json.loads``, or when the value is serialized again
        return arguments
    try:
        return json.loads(text, parse_float=_number)
    except ValueError:
        return arguments


def _number(text: str) -> int | float:
    """Return a number with a fraction or an exponent; agents in JavaScript send 2.0 back as 2."""
    number = float(text)
    return int(number) if number.is_integer() else number
