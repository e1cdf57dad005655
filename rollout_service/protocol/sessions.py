"""Sessions: what an agent and the model said, in the tokens that the model read and sampled."""

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from rollout_service.protocol.base import Frozen
from rollout_service.protocol.rollout import FinishReason, Span

SESSION_NAME = r"^[A-Za-z0-9._:-]+$"
_OVERHEAD = 768
"""Bytes of the objects that hold a turn, beside their contents."""
Message = dict[str, Any]
"""As OpenAI's chat has it: ``role``, ``content``, ``tool_calls`` …"""


class OpenSession(Frozen):
    """What a trainer asks for before it lets an agent talk."""

    session_id: str | None = Field(default=None, max_length=256, pattern=SESSION_NAME)
    """Its name in the address; None: the service makes one."""
    ttl_s: float = Field(default=3600.0, gt=0, le=7 * 24 * 3600)
    """It is forgotten so long after its last turn."""


class SessionOpened(Frozen):
    """Where the agent finds it, below the service's address."""

    session_id: str
    openai_path: str
    """``base_url`` of an OpenAI client is the service's address and this."""
    anthropic_path: str
    """The same for an Anthropic client, which adds ``/v1`` itself."""


class Turn(Frozen):
    """One reply of the model, and everything that it read.

    Training data as it stands: ``prompt_token_ids`` and then ``token_ids``, of which the loss counts the latter. Where
    a turn continues another, its prompt begins with the other's prompt and reply, token by token.
    """

    index: int
    """In the order in which the session's turns ended."""
    parent: int | None
    """The turn that this one continues. None: it began from text, as a first turn does."""
    branch: str | None = None
    """Why it continues no earlier turn of the session; see docs/agents.md. None: it does, or is the first."""
    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural logs, of each of ``token_ids``."""
    spans: tuple[Span, ...]
    """Which weights on which replica made them."""
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it, as vLLM has it: None if the model's own end of sequence did."""
    truncated_sampling: bool
    message: Message
    """What the agent was told."""

    def without_tokens(self) -> bytes:
        """Return all other fields as JSON, without the index."""
        empty = {"index": 0, "prompt_token_ids": (), "token_ids": (), "logprobs": ()}
        return self.model_copy(update=empty).model_dump_json().encode()

    @property
    def nbytes(self) -> int:
        """Bytes that a session holds for it, if it shares no tokens with its parent."""
        tokens = 4 * (len(self.prompt_token_ids) + len(self.token_ids)) + 8 * len(self.logprobs)
        return tokens + len(self.without_tokens()) + _OVERHEAD


class Session(Frozen):
    """A session as a trainer reads it: a tree of turns, each a leaf or continued by others."""

    session_id: str
    turns: tuple[Turn, ...]
    paths: tuple[tuple[int, ...], ...]
    """The branches as indices of turns: from a first turn to each that none continues."""

    @classmethod
    def of(cls, session_id: str, turns: Sequence[Turn]) -> "Session":
        """With its branches."""
        continued = {turn.parent for turn in turns}
        leaves = (turn for turn in turns if turn.index not in continued)
        return cls(session_id=session_id, turns=tuple(turns), paths=tuple(_path(turns, leaf) for leaf in leaves))

    def branches(self) -> list[tuple[Turn, ...]]:
        """The turns of each path."""
        return [tuple(self.turns[index] for index in path) for path in self.paths]


def _path(turns: Sequence[Turn], leaf: Turn) -> tuple[int, ...]:
    path = [leaf.index]
    while (parent := turns[path[-1]].parent) is not None:
        path.append(parent)
    return tuple(reversed(path))


class Prefix(Frozen):
    """The tokens that a conversation begins with, as the model read and sampled them."""

    turn: int
    messages: int
    """How many of the conversation's messages they are: the last of these is the model's own."""
    token_ids: tuple[int, ...]
    stop_reason: int | str | None = None
    """See ``Turn``."""
