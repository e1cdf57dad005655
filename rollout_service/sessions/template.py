"""Find the text that a chat template writes after a reply. The next prompt then reuses the reply's sampled tokens.

A template that renders a reply again rarely reproduces the sampled text. Qwen3's drops earlier reasoning, and most
reformat tool calls. This module therefore renders the conversation with a marker in place of the reply. The text after
the marker is appended to the sampled tokens. If messages around the replies have changed, the turn begins a new branch.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Literal

from rollout_service.protocol.sessions import Message

Branch = Literal[
    "other_history",
    "rewritten_history",
    "hidden_reply",
    "unknown_end",
    "other_tokens",
    "refused_by_template",
    "partial_reply",
    "truncated_prompt",
    "harmony",
]
"""The reason why a turn continues no earlier turn. ``other_history`` comes from the agent; all others come from the
chat template or the request."""
REASONS: dict[Branch, str] = {
    "other_history": "the messages before the new ones are not those of an earlier turn",
    "rewritten_history": "the chat template now writes messages before the last reply in another way",
    "hidden_reply": "the chat template does not write the last reply in exactly one place",
    "unknown_end": "it cannot be told where the chat template ends the last reply",
    "other_tokens": "the new messages alone do not become the tokens that they become in the whole conversation",
    "refused_by_template": "the chat template refuses the conversation with another text in place of its replies",
    "partial_reply": "the request has the model continue a message of the assistant's",
    "truncated_prompt": "the request truncates its prompt",
    "harmony": "vLLM writes this model's conversations with Harmony, not with a chat template",
}

# The nonce is random, so that no conversation contains it. It has only letters and digits, because templates trim,
# escape and quote text.
_NONCE = os.urandom(16).hex()
_MARK = re.compile(rf"(?:reply|input)\d+x{_NONCE}")


class BeginsBranch(Exception):
    """Raised when a turn cannot continue an earlier turn."""

    def __init__(self, why: Branch) -> None:
        super().__init__(REASONS[why])
        self.why: Branch = why


@dataclass(frozen=True)
class Rendering:
    """A conversation that the chat template must render."""

    messages: list[Message]
    with_generation_prompt: bool = True
    """True to add the generation prompt if the request wants it. False never adds it."""


@dataclass(frozen=True)
class Reply:
    """The reply that the conversation continues."""

    start: int
    """Index of its first message. OpenAI's Responses API returns one reply as several messages."""
    stop: int
    """Index after its last message."""
    end: str | None
    """Text of the token that ended the reply. None: the reply was cut off, or a stop string ended it."""

    @classmethod
    def of(cls, messages: Sequence[Message], stop: int, end: str | None) -> "Reply":
        """Return the reply whose last message precedes index ``stop``."""
        start = stop - 1
        while start > 0 and messages[start - 1].get("role") == "assistant":
            start -= 1
        return cls(start, stop, end)


def text_after(
    messages: Sequence[Message], reply: Reply, ends: Collection[str]
) -> Generator[Rendering, str | None, str]:
    """Return the text that the template writes after the end of ``reply``, up to the end of the prompt.

    The generator yields conversations. The caller sends back each one as rendered text, or None if the template refuses
    it. Raises BeginsBranch if the template now renders the prompt of the reply differently.

    Args:
        ends: texts of the tokens that end this model's replies.
    """
    marked, has_calls = _mark("reply", reply.stop - 1), bool(messages[reply.stop - 1].get("tool_calls"))
    history = _with_marks(messages[: reply.stop], in_call=has_calls)
    whole = yield Rendering([*history, *messages[reply.stop :]])
    if has_calls and (whole or "").count(marked) != 1:  # a template without tool support renders the text only
        history = _with_marks(messages[: reply.stop], in_call=False)
        whole = yield Rendering([*history, *messages[reply.stop :]])
    whole = _require_text(whole)
    if whole.count(marked) != 1:
        raise BeginsBranch("hidden_reply")
    earlier = _require_text((yield Rendering(history[: reply.start])))
    of_reply = {_mark("reply", index) for index in range(reply.start, reply.stop)}
    place = next(found.start() for found in _MARK.finditer(whole) if found.group() in of_reply)
    yield from _require_unchanged(earlier, whole[:place], history[: reply.start])
    after = whole[whole.index(marked) + len(marked) :]
    if reply.end is None and not has_calls:
        return after
    if reply.end is not None and after.startswith(reply.end):
        return after[len(reply.end) :]
    alone = yield Rendering(history, with_generation_prompt=False)
    _, found, own = (alone or "").partition(marked)
    return _without_end(after, own if found else None, reply.end, ends, has_calls)


def render_after(
    render: Callable[[Rendering], str | None], messages: Sequence[Message], reply: Reply, ends: Collection[str]
) -> str:
    """Return ``text_after`` for a template that ``render`` applies. Raises BeginsBranch."""
    steps = text_after(messages, reply, ends)
    text: str | None = None
    try:
        while True:
            text = render(steps.send(text))
    except StopIteration as end:
        return str(end.value)


def _without_end(after: str, own: str | None, end: str | None, ends: Collection[str], has_calls: bool) -> str:
    """Return ``after`` without the text that the reply's own tokens already contain.

    Args:
        after: the text that the template writes after the marker in the reply.
        own: the same text when the reply is the last message. None if the template does not render that conversation.
        end: see ``Reply``.
        has_calls: True if the marker is not at the end of the reply.
    """
    first, place = min(
        ((found, after.find(found)) for found in {*ends, *([] if end is None else [end])} if found in after),
        key=lambda each: (each[1], -len(each[0])),
        default=("", -1),
    )
    behind = place + len(first)
    # the token closes this reply, whatever follows
    closes = place >= 0 and own is not None and own[:behind] == after[:behind]
    # the token also opens the next message, as GLM's <|user|> does
    begins_next = place >= 0 and first == end and own in (None, after[:place])
    if end is not None and (closes or begins_next):
        return after[behind:]
    if not has_calls:
        return after
    if closes:
        return after[place:]
    if own is not None and after.startswith(own):
        return after[len(own) :]
    raise BeginsBranch("unknown_end")


def _with_marks(history: Sequence[Message], in_call: bool) -> list[Message]:
    """Return the messages with markers in place of replies and of the last message before each reply.

    Args:
        in_call: True to put the marker of the last message into an argument of its last tool call.
    """
    marked: list[Message] = []
    for index, message in enumerate(history):
        is_last = index + 1 == len(history)
        if message.get("role") != "assistant":
            is_before_reply = not is_last and history[index + 1].get("role") == "assistant"
            marked.append({**message, "content": _mark("input", index)} if is_before_reply else message)
            continue
        mark, calls = _mark("reply", index), list(message.get("tool_calls") or ())
        kept: Message = {name: message[name] for name in ("role", "name") if name in message}
        if calls and (in_call or not is_last):
            function = {**calls[-1]["function"], "arguments": json.dumps({"text": mark})}
            marked.append({**kept, "content": "", "tool_calls": [*calls[:-1], {**calls[-1], "function": function}]})
        else:
            marked.append({**kept, "content": mark, **({"tool_calls": calls} if calls else {})})
    return marked


def _require_unchanged(earlier: str, now: str, history: list[Message]) -> Generator[Rendering, str | None, None]:
    """Raise BeginsBranch if the template renders the messages before a reply differently than in the reply's prompt.

    The text between a reply's header and its content may differ, for example the opening of a reasoning block.

    Args:
        earlier: the rendered conversation before the reply, with the generation prompt.
        now: the text that the template writes before the reply in the current conversation.
        history: the messages of ``earlier``.
    """
    if _MARK.findall(earlier) != _MARK.findall(now):
        raise BeginsBranch("rewritten_history")
    marks = [*_MARK.findall(now), "reply"]
    pieces = list(zip(marks, _MARK.split(earlier), _MARK.split(now), strict=True))
    changed = [(mark, then, text) for mark, then, text in pieces if then != text]
    if not changed or (len(changed) == 1 and changed[0] == pieces[-1] and changed[0][2].startswith(changed[0][1])):
        return
    if any(not mark.startswith("reply") for mark, _, _ in changed):
        raise BeginsBranch("rewritten_history")
    without_reply = _require_text((yield Rendering(history, with_generation_prompt=False)))
    closing = _MARK.split(without_reply)[-1]
    header = _header(earlier[len(without_reply) :], pieces[-1][2][len(closing) :])
    if not earlier.startswith(without_reply) or not pieces[-1][2].startswith(closing) or not header:
        raise BeginsBranch("rewritten_history")
    if any(header not in _shared_start(then, text) for _, then, text in changed):
        raise BeginsBranch("rewritten_history")


def _header(generation_prompt: str, before_reply: str) -> str:
    """Return the common prefix of both texts, cut before a special token that they do not share completely."""
    shared = _shared_start(generation_prompt, before_reply)
    opened, closed = shared.rfind("<"), shared.rfind(">")
    return shared[:opened] if opened > closed else shared


def _shared_start(one: str, other: str) -> str:
    """Return the common prefix. Binary search: a loop over the characters of a long text would block the event loop."""
    shared, longest = 0, min(len(one), len(other))
    while shared < longest:
        middle = (shared + longest + 1) // 2
        if one.startswith(other[:middle]):
            shared = middle
        else:
            longest = middle - 1
    return one[:shared]


def _mark(kind: Literal["reply", "input"], index: int) -> str:
    return f"{kind}{index}x{_NONCE}"


def _require_text(text: str | None) -> str:
    if text is None:
        raise BeginsBranch("refused_by_template")
    return text
