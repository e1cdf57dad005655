"""What one HTTP request to vLLM's server classes brings along to the dispatcher, and what that leaves for its reply."""

from contextvars import ContextVar
from dataclasses import dataclass, field

from rollout_service.errors import RolloutServiceError
from rollout_service.protocol.generate import RolloutOptions
from rollout_service.protocol.rollout import Completion, Rollout
from rollout_service.protocol.sessions import Message, Prefix, Turn
from rollout_service.rpc import SessionCalls


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
    messages: list[Message] = field(default_factory=list)
    """What the agent sent."""
    tools: object = None
    parent: int | None = None

    async def prefix(self, messages: list[Message], tools: object) -> Prefix | None:
        """See ``SessionStore.prefix``; remembers what was sent, and the turn that is continued."""
        self.messages, self.tools = messages, tools
        found = await self.sessions.prefix(self.session_id, messages, tools)
        self.parent = None if found is None else found.turn
        return found

    async def end(self, rollouts: list[Rollout], replies: list[Message]) -> None:
        """Add what the model said, one turn for each choice."""
        choices = [(rollout, completion) for rollout in rollouts for completion in rollout.completions]
        turns = [
            Turn(
                index=0,  # the store numbers them
                parent=self.parent,
                request_id=rollout.request_id,
                prompt_token_ids=rollout.prompt_token_ids,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                spans=completion.spans,
                finish_reason=completion.finish_reason,
                truncated_sampling=rollout.truncated_sampling,
                message=reply,
            )
            for (rollout, completion), reply in zip(choices, replies, strict=True)
        ]
        await self.sessions.add(self.session_id, self.messages, self.tools, turns)


current: ContextVar[Exchange] = ContextVar("exchange")
"""Of the request that is being answered."""
