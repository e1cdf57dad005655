"""Sessions: the conversation of an agent with the model, as the tokens that the model read and sampled."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field, field_validator

from rollout_service.protocol.base import Frozen, refuse_bool
from rollout_service.protocol.rollout import FinishReason, Span

SESSION_NAME = r"^\.*[A-Za-z0-9_:-][A-Za-z0-9._:-]*$"
"""Not ``..`` alone, which a URL would drop."""
_OVERHEAD = 768
"""Size in bytes of the objects that hold a turn, without their contents."""
Message = dict[str, Any]
"""A message of OpenAI's chat API: ``role``, ``content``, ``tool_calls`` …"""


class OpenSession(Frozen):
    """A trainer's request for a session, before an agent uses it."""

    session_id: str | None = Field(default=None, max_length=256, pattern=SESSION_NAME)
    """The session's name in its URL; None: the service generates one."""
    ttl_s: float = Field(default=3600.0, gt=0, le=7 * 24 * 3600)
    """Lifetime in seconds after the last turn."""

    _no_booleans = field_validator("ttl_s", mode="before")(refuse_bool)


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

    def branches(self) -> list[tuple[Turn, ...]]:
        """Return the turns of each path."""
        return [tuple(self.turns[index] for index in path) for path in self.paths]


@dataclass(frozen=True, slots=True)
class CompactTurn:
    """A turn as the session store keeps it. The part of its prompt that another turn keeps is not stored again."""

    parent: int | None
    """See ``Turn``."""
    prefix: int | None
    """Index of the turn whose prompt and reply begin this prompt. None: ``prompt`` is complete."""
    prompt: "array[int]"
    token_ids: "array[int]"
    logprobs: "array[float]"
    others: bytes
    """All other fields of the turn, as JSON."""
    stop_reason: int | str | None
    nbytes: int

    @classmethod
    def of(cls, turn: Turn, prefix: int | None, prompt: "array[int]", new_tokens: int) -> "CompactTurn":
        """Return a turn in compact form. ``new_tokens``: the number of prompt tokens that no other turn stores."""
        return cls(
            parent=turn.parent,
            prefix=prefix,
            prompt=prompt,
            token_ids=array("i", turn.token_ids),
            logprobs=array("d", turn.logprobs),
            others=turn.without_tokens(),
            stop_reason=turn.stop_reason,
            nbytes=turn.nbytes - (len(turn.prompt_token_ids) - new_tokens) * prompt.itemsize,
        )


@dataclass(frozen=True, slots=True)
class SessionSnapshot:
    """The turns of a session at one moment. Later turns, or the session's end, do not change it."""

    turns: tuple[CompactTurn, ...]

    def turn(self, index: int) -> Turn:
        """Return a turn in its original form, with its whole prompt."""
        compact = self.turns[index]
        tokens = {
            "index": index,
            "prompt_token_ids": tuple(tokens_before(self.turns, index)),
            "token_ids": tuple(compact.token_ids),
            "logprobs": tuple(compact.logprobs),
        }
        return Turn.model_validate_json(compact.others).model_copy(update=tokens)

    def paths(self) -> Iterator[tuple[int, ...]]:
        """Yield each path; see ``Session``."""
        continued = {turn.parent for turn in self.turns}
        for leaf in range(len(self.turns)):
            if leaf not in continued:
                path = [leaf]
                while (parent := self.turns[path[-1]].parent) is not None:
                    path.append(parent)
                yield tuple(reversed(path))


def tokens_before(turns: Sequence[CompactTurn], index: int) -> "array[int]":
    """Return the whole prompt of a turn, as token ids."""
    parts = [turns[index].prompt]
    while (prefix := turns[index].prefix) is not None:
        index = prefix
        parts += [turns[index].token_ids, turns[index].prompt]
    tokens = array("i")
    for part in reversed(parts):
        tokens.extend(part)
    return tokens


class Prefix(Frozen):
    """The tokens of a conversation's beginning, as the model read and sampled them."""

    turn: int
    messages: int
    """Number of the conversation's messages that these tokens cover; the last of them is the model's own."""
    token_ids: tuple[int, ...]
    stop_reason: int | str | None = None
    """See ``Turn``."""
