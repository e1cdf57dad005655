"""What one HTTP request to vLLM's server classes brings along to the dispatcher, and what that leaves for its reply."""

import logging
from contextvars import ContextVar
from dataclasses import dataclass, field

from fastapi import Response

from rollout_service.errors import RolloutServiceError
from rollout_service.metrics import table
from rollout_service.metrics.process import record
from rollout_service.protocol.generate import RolloutOptions
from rollout_service.protocol.rollout import Completion, Rollout
from rollout_service.protocol.sessions import Message, Prefix, Turn
from rollout_service.rpc import SessionCalls
from rollout_service.sessions.template import REASONS, Branch

BRANCH_HEADER = "X-Session-Branch"
"""Header of a reply whose turn continues no earlier turn of its session: the reason."""
_log = logging.getLogger(__name__)
_SAID: set[Branch] = set()
"""Reasons that this process has logged."""


@dataclass
class Exchange:
    """vLLM's classes know neither weight versions nor this service's options and errors: they pass beside them."""

    options: RolloutOptions = RolloutOptions()  # noqa: RUF009  # frozen
    rollouts: list[Rollout] = field(default_factory=list)
    """Those that answered the request, in order."""
    begun: bool = False
    """Whether a stream has its first tokens."""
    stop: tuple[str, ...] = ()
    """Stop strings of the request. vLLM's own bound on their number is another one than this service's."""
    texts: list[str] = field(default_factory=list)
    """The whole text of each completion, before tool calls and reasoning are taken out of it."""
    session: "SessionTurn | None" = None
    """The session that the reply is a turn of."""
    replies: list[Message] = field(default_factory=list)
    """What the agent is told, one message for each choice: the turns of ``session``, once the reply is made."""
    error: RolloutServiceError | None = None
    """What the dispatcher raised. vLLM's classes make a text of it when they stream."""

    @property
    def completions(self) -> list[Completion]:
        """The completions in the order of the reply's choices."""
        return [completion for rollout in self.rollouts for completion in rollout.completions]

    async def keep_turn(self) -> None:
        """Add the reply to its session. Called when nothing can go wrong any more before the agent is told."""
        if self.session is not None and self.replies:
            await self.session.end(self.rollouts, self.replies)
            self.replies = []


@dataclass
class SessionTurn:
    """A turn of a session while it is made."""

    session_id: str
    sessions: SessionCalls
    num_turns: int
    """Turns that the session had when the request came."""
    messages: list[Message] = field(default_factory=list)
    """What the agent sent."""
    context: object = None
    """See ``SessionStore.prefix``."""
    parent: int | None = None
    branch: Branch | None = None
    """Why it continues no earlier turn; None: it does, or is the first."""

    @classmethod
    async def of(cls, session_id: str, sessions: SessionCalls) -> "SessionTurn":
        """Raises NotFound if there is no such session."""
        return cls(session_id, sessions, await sessions.num_turns(session_id))

    async def find(self, messages: list[Message], context: object) -> Prefix | None:
        """Return the turn that is continued, if there is one, and remember what was sent."""
        self.messages, self.context = messages, context
        found = await self.sessions.prefix(self.session_id, messages, context)
        self.parent = None if found is None else found.turn
        if found is None and self.num_turns:
            self.begin_branch("other_history")
        return found

    def begin_branch(self, why: Branch) -> None:
        """Continue no turn, and say so."""
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
        """Return the response, which says why the turn continues no other."""
        if self.branch is not None:
            response.headers[BRANCH_HEADER] = self.branch
        return response

    async def end(self, rollouts: list[Rollout], replies: list[Message]) -> None:
        """Add what the model said, one turn for each choice."""
        choices = [(rollout, completion) for rollout in rollouts for completion in rollout.completions]
        turns = [
            Turn(
                index=0,  # the store numbers them
                parent=self.parent,
                branch=self.branch,
                request_id=rollout.request_id,
                prompt_token_ids=rollout.prompt_token_ids,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                spans=completion.spans,
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
                truncated_sampling=rollout.truncated_sampling,
                message=reply,
            )
            for (rollout, completion), reply in zip(choices, replies, strict=True)
        ]
        await self.sessions.add(self.session_id, self.messages, self.context, turns)
        record(table.SESSION_TURNS, len(turns), start=self.branch or ("first" if self.parent is None else "continued"))


current: ContextVar[Exchange] = ContextVar("exchange")
"""Of the request that is being answered."""
