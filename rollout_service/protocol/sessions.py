"""Sessions: the conversation of an agent with the model, as the tokens that the model read and sampled."""

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from rollout_service.protocol.base import Frozen, Received
from rollout_service.protocol.rollout import FinishReason, Span

SESSION_NAME = r"^[A-Za-z0-9._:-]+$"
_OVERHEAD = 768
"""Size in bytes of the objects that hold a turn, without their contents."""
Message = dict[str, Any]
"""A message of OpenAI's chat API: ``role``, ``content``, ``tool_calls`` …"""


class OpenSession(Received):
    """A trainer's request for a session, before an agent uses it."""

    session_id: str | None = Field(default=None, max_length=256, pattern=SESSION_NAME)
    """The session's name in its URL; None: the service generates one."""
    ttl_s: float = Field(default=3600.0, gt=0, le=7 * 24 * 3600)
    """Lifetime in seconds after the last turn."""


class SessionOpened(Frozen):
    """URLs of a new session, relative to the service's address."""

    session_id: str
    openai_path: str
    """The service's address plus this path is the ``base_url`` for an OpenAI client."""
    anthropic_path: str
    """The same for an Anthropic client, which adds ``/v1`` itself."""


class Turn(Frozen):
    """One reply of the model, and everything that it read.

    Usable as training data: ``prompt_token_ids`` followed by ``token_ids``, of which only the latter count in the loss.
    If a turn continues another one, its prompt begins with that turn's prompt and reply, token by token.
    """

    index: int
    """Index in the order in which the session's turns ended."""
    parent: int | None
    """The turn that this one continues. None: it began from text, as a first turn does."""
    branch: str | None = None
    """Reason why it continues no earlier turn of the session; see docs/agents.md. None: it continues one, or is the
    first."""
    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural logs of each of ``token_ids``."""
    spans: tuple[Span, ...]
    """The weight versions and replicas that sampled its tokens."""
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it, as in vLLM; None for the model's own end of sequence."""
    truncated_sampling: bool
    message: Message
    """The message returned to the agent."""

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
    """A session as trainers read it: a tree of turns."""

    session_id: str
    turns: tuple[Turn, ...]
    paths: tuple[tuple[int, ...], ...]
    """The branches as indices of turns: from a first turn to each turn that no other continues."""

    @classmethod
    def of(cls, session_id: str, turns: Sequence[Turn]) -> "Session":
        """Build a session and its paths."""
        continued = {turn.parent for turn in turns}
        leaves = (turn for turn in turns if turn.index not in continued)
        return cls(session_id=session_id, turns=tuple(turns), paths=tuple(_path(turns, leaf) for leaf in leaves))

    def branches(self) -> list[tuple[Turn, ...]]:
        """Return the turns of each path."""
        return [tuple(self.turns[index] for index in path) for path in self.paths]


def _path(turns: Sequence[Turn], leaf: Turn) -> tuple[int, ...]:
    path = [leaf.index]
    while (parent := turns[path[-1]].parent) is not None:
        path.append(parent)
    return tuple(reversed(path))


class Prefix(Frozen):
    """The tokens of a conversation's beginning, as the model read and sampled them."""

    turn: int
    messages: int
    """Number of the conversation's messages that these tokens cover; the last of them is the model's own."""
    token_ids: tuple[int, ...]
    stop_reason: int | str | None = None
    """See ``Turn``."""
