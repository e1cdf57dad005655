"""Check how a chat template renders an agent's conversation, before any session uses it."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from rollout_service.protocol.sessions import Message
from rollout_service.sessions.template import REASONS, BeginsBranch, Branch, Rendering, Reply, render_after

Outcome = Literal["continues", "takes none"] | Branch
"""The result for one conversation. ``takes none``: the template raises an error for such a conversation."""
Render = Callable[[list[Message], bool, list[dict[str, Any]] | None], str]
"""Renders messages with a template. Arguments: the messages, whether to add the generation prompt, and the tools."""

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
_ASKED: Message = {"role": "user", "content": "question"}
_SAID: Message = {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nanswer", "reasoning": "why"}
_CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call12345", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
}
_RESULT: Message = {"role": "tool", "tool_call_id": "call12345", "name": "add", "content": "2"}
CONVERSATIONS: dict[str, list[Message]] = {
    "a reply": [_ASKED, _SAID, _ASKED, _SAID, _ASKED],
    "a tool call": [_ASKED, _CALLED, _RESULT],
    "two tool calls": [_ASKED, _CALLED, _RESULT, _CALLED, _RESULT],
    "a reply behind a tool call": [_ASKED, _CALLED, _RESULT, _SAID, _ASKED],
}
"""Example conversations. In each, the last assistant message is the reply that the session continues."""


def outcomes(write: Render, ends: Collection[str]) -> dict[str, Outcome]:
    """Return the outcome for each conversation in ``CONVERSATIONS``."""
    return {name: _outcome(write, messages, ends) for name, messages in CONVERSATIONS.items()}


def outcomes_of(tokenizer: PreTrainedTokenizerBase, template: str | None) -> dict[str, Outcome]:
    """Return the ``outcomes`` of ``template``, or of the tokenizer's own template if None."""

    def write(messages: list[Message], with_generation_prompt: bool, tools: list[dict[str, Any]] | None) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=template,
                add_generation_prompt=with_generation_prompt,
                tokenize=False,
            )
        )

    return outcomes(write, [str(tokenizer.eos_token)])


def summary(found: Mapping[str, Outcome]) -> str:
    """Return the outcomes in one line."""
    said = {"continues": "a session continues after", "takes none": "the template takes no"}
    reasons: dict[str, str] = {name: f": {reason}" for name, reason in REASONS.items()}
    by_outcome = {outcome: [name for name in found if found[name] == outcome] for outcome in found.values()}
    return "; ".join(
        f"{said.get(outcome, 'a branch begins after')} {', '.join(names)}{reasons.get(outcome, '')}"
        for outcome, names in by_outcome.items()
    )


def begins_branches(found: Mapping[str, Outcome]) -> bool:
    """Return True if a session with this template begins a branch after some reply."""
    return any(outcome not in ("continues", "takes none") for outcome in found.values())


def _outcome(write: Render, messages: Sequence[Message], ends: Collection[str]) -> Outcome:
    """Return the outcome with contents as text or, where the template wants these, as parts."""
    as_text = _outcome_of(write, messages, ends, in_parts=False)
    if as_text not in ("takes none", "hidden_reply"):
        return as_text
    as_parts = _outcome_of(write, messages, ends, in_parts=True)
    return as_text if as_parts in ("takes none", "hidden_reply") else as_parts


def _outcome_of(write: Render, messages: Sequence[Message], ends: Collection[str], *, in_parts: bool) -> Outcome:
    tools = _TOOLS if any(message["role"] == "tool" for message in messages) else None

    def render(wanted: Rendering) -> str | None:
        conversation = [_as_vllm_gives_it(message, in_parts) for message in wanted.messages]
        try:
            return write(conversation, wanted.with_generation_prompt, tools)
        except Exception:  # noqa: BLE001 - of any template: vLLM refuses the request then
            return None

    if render(Rendering(list(messages))) is None:
        return "takes none"
    stop = 1 + max(index for index, message in enumerate(messages) if message["role"] == "assistant")
    try:
        render_after(render, messages, Reply.of(messages, stop, None), ends)
    except BeginsBranch as branch:
        return branch.why
    return "continues"


def _as_vllm_gives_it(message: Message, in_parts: bool) -> Message:
    """Return the message with parsed arguments, and with content in parts for templates that want them."""
    given = dict(message)
    if calls := message.get("tool_calls"):
        given["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in calls
        ]
    if in_parts:
        given["content"] = [{"type": "text", "text": message["content"]}]
    return given
