"""Per-request state that bypasses vLLM's server classes, between the HTTP route and the dispatcher."""

import json
import logging
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field

from fastapi import Response

from rollout_service.errors import RolloutServiceError
from rollout_service.metrics import table
from rollout_service.metrics.process import record
from rollout_service.protocol.generate import RolloutOptions
from rollout_service.protocol.rollout import Completion, Rollout
from rollout_service.protocol.sessions import Message, Prefix, Turn
from rollout_service.runtime.rpc import SessionCalls
from rollout_service.sessions.template import REASONS, Branch

BRANCH_HEADER = "X-Session-Branch"
"""Reply header with the reason why a turn continues no earlier turn of its session."""
_log = logging.getLogger(__name__)
_SAID: set[Branch] = set()
"""Reasons that this process has already logged."""


@dataclass
class Exchange:
    """State of one request. vLLM's classes do not know weight versions, or this service's options and errors."""

    options: RolloutOptions = RolloutOptions()  # noqa: RUF009  # frozen
    rollouts: list[Rollout] = field(default_factory=list)
    """The rollouts of the request, in order."""
    begun: bool = False
    """True once a stream has its first tokens."""
    stop: tuple[str, ...] = ()
    """Stop strings of the request. They bypass vLLM's classes, whose limit on their number differs from this
    service's."""
    texts: list[str] = field(default_factory=list)
    """The complete text of each completion, before tool calls and reasoning are extracted."""
    session: "SessionTurn | None" = None
    """The session turn that the reply belongs to."""
    replies: list[Message] = field(default_factory=list)
    """The reply of each choice, as sent to the agent. ``session`` records them once the reply is complete."""
    error: RolloutServiceError | None = None
    """The error of the dispatcher. vLLM's classes turn it into text when they stream."""

    @property
    def completions(self) -> list[Completion]:
        """The completions in the order of the reply's choices."""
        return [completion for rollout in self.rollouts for completion in rollout.completions]

    async def keep_turn(self) -> None:
        """Record the reply in its session. Called when only sending the reply remains."""
        if self.session is not None and self.replies:
            await self.session.end(self.rollouts, self.replies)
            self.replies = []


@dataclass
class SessionTurn:
    """A session turn in progress."""

    session_id: str
    sessions: SessionCalls
    num_turns: int
    """Number of turns in the session when the request arrived."""
    messages: list[Message] = field(default_factory=list)
    """The messages that the agent sent."""
    context: object = None
    """See ``SessionStore.prefix``."""
    parent: int | None = None
    branch: Branch | None = None
    """The reason why the turn continues no earlier turn. None: it continues one, or is the first."""
    is_begun: bool = False
    """True from ``find`` until ``leave``."""

    @classmethod
    async def of(cls, session_id: str, sessions: SessionCalls) -> "SessionTurn":
        """Create a turn of an open session. Raises NotFound if there is no such session."""
        return cls(session_id, sessions, await sessions.num_turns(session_id))

    async def find(self, messages: list[Message], context: object) -> Prefix | None:
        """Return the turn that ``messages`` continue, or None. Remembers ``messages`` and ``context``."""
        self.messages, self.context, self.is_begun = messages, context, True
        found = await self.sessions.prefix(self.session_id, messages, context, begins_turn=True)
        self.parent = None if found is None else found.turn
        if found is None and self.num_turns:
            self.begin_branch("other_history")
        return found

    async def leave(self) -> None:
        """Let the session expire again, whether the turn was recorded or failed."""
        if self.is_begun:
            self.is_begun = False
            with suppress(RolloutServiceError):
                await self.sessions.end_turn(self.session_id)

    def begin_branch(self, why: Branch) -> None:
        """Mark the turn as the start of a branch, and log the reason once."""
        self.parent, self.branch = None, why
        if why not in _SAID:
            _SAID.add(why)
            _log.warning(
                "a turn of session %s begins a branch instead of continuing the turn before: %s (%s). This is logged "
                "once for each reason; replies have it in the header %s, sessions in turns[].branch",
                self.session_id,
                REASONS[why],
                why,
                BRANCH_HEADER,
            )

    def add_header(self, response: Response) -> Response:
        """Return the response with the branch header, if the turn begins a branch."""
        if self.branch is not None:
            response.headers[BRANCH_HEADER] = self.branch
        return response

    async def end(self, rollouts: list[Rollout], replies: list[Message]) -> None:
        """Record the replies, one turn per choice. The turns of a rollout share its prompt."""
        choices = [(rollout, completion) for rollout in rollouts for completion in rollout.completions]
        turns = [
            Turn(
                index=0,  # the store assigns the index
                parent=self.parent,
                branch=self.branch,
                request_id=rollout.request_id,
                prompt_token_ids=(),
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                spans=completion.spans,
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
                truncated_sampling=rollout.truncated_sampling,
                message=reply,
            ).model_copy(update={"prompt_token_ids": rollout.prompt_token_ids})  # validation would copy it
            for (rollout, completion), reply in zip(choices, replies, strict=True)
        ]
        await self.sessions.add(self.session_id, self.messages, self.context, turns)
        record(table.SESSION_TURNS, len(turns), start=self.branch or ("first" if self.parent is None else "continued"))


current: ContextVar[Exchange] = ContextVar("exchange")
"""The exchange of the current request."""


def chunk_of(line: str) -> Message:
    """Return the JSON object of an event of a chat's stream; empty for the last event, ``[DONE]``."""
    event = line.removeprefix("data: ").strip()
    return {} if event == "[DONE]" else dict(json.loads(event))
