"""When two messages are the same."""

import json
from collections.abc import Iterator, Sequence

import xxhash

from rollout_service.protocol.sessions import Message

_TEXTS = frozenset({"text", "input_text", "output_text"})
"""Kinds of parts of a message that are text: a chat's, and those of OpenAI's responses."""


def key_of(messages: Sequence[Message], tools: object) -> str:
    """The same for conversations that say the same, with the same tools at hand.

    Messages of the assistant that follow each other count as one: a reply of OpenAI's responses or Anthropic's messages
    has several items, which come back as one message or as several.
    """
    said = [_said(message) for message in messages]
    text = json.dumps([list(_replies_joined(said)), tools], sort_keys=True, ensure_ascii=True, default=str)
    return xxhash.xxh3_128_hexdigest(text.encode())


def as_one_message(parts: Sequence[Message]) -> Message:
    """A reply in one message: its text and its reasoning joined, all of its tool calls. Of no parts: an empty one."""
    reply: Message = {"role": "assistant", "content": ""}
    for part in parts:
        reply["content"] += _text(part.get("content"))
        if part.get("reasoning"):
            reply["reasoning"] = reply.get("reasoning", "") + part["reasoning"]
        if part.get("tool_calls"):
            reply["tool_calls"] = [*reply.get("tool_calls", ()), *part["tool_calls"]]
    return reply


def _replies_joined(said: Sequence[dict[str, object]]) -> Iterator[dict[str, object]]:
    reply: list[dict[str, object]] = []
    for message in said:
        if message["role"] == "assistant" and isinstance(message["content"], str):
            reply.append(message)
            continue
        if reply:
            yield as_one_message(reply)
        reply = []
        yield message
    if reply:
        yield as_one_message(reply)


def _said(message: Message) -> dict[str, object]:
    """What counts of a message.

    Agents send a reply back without what was only told them (its reasoning, say), an empty content as null or left out,
    and text as a list of parts.
    """
    said: dict[str, object] = {"role": message.get("role"), "content": _text(message.get("content"))}
    calls = message.get("tool_calls")
    if calls:
        said["tool_calls"] = [
            {"name": call["function"]["name"], "arguments": _arguments(call["function"].get("arguments"))}
            for call in calls
        ]
    if message.get("tool_call_id") is not None:
        said["tool_call_id"] = message["tool_call_id"]
    return said


def _text(content: object) -> object:
    if not content:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") in _TEXTS for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    return content


def _arguments(arguments: object) -> object:
    """JSON text and what it means are the same."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
