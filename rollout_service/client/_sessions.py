"""Sessions: a base URL for an agent's chat, and the recorded trajectory in tokens."""

from typing import Self

from rollout_service.client._http import Http, Repeat, parse
from rollout_service.errors import NotFound
from rollout_service.protocol.sessions import OpenSession, Session, SessionOpened


class AgentSession:
    """A recorded conversation: ``async with client.session() as session:``, then give ``session.openai_base_url`` to an
    agent.

    The service deletes the session when the block ends. Read the trajectory before.
    """

    def __init__(self, http: Http, wanted: OpenSession) -> None:
        self._http, self._wanted = http, wanted
        self._opened: SessionOpened | None = None

    @property
    def session_id(self) -> str:
        """The session's id, also for the header ``X-Session-ID``."""
        return self._open.session_id

    @property
    def openai_base_url(self) -> str:
        """The ``base_url`` for OpenAI's clients."""
        return self._http.url + self._open.openai_path

    @property
    def anthropic_base_url(self) -> str:
        """The ``base_url`` for Anthropic's clients."""
        return self._http.url + self._open.anthropic_path

    async def trajectory(self) -> Session:
        """Return every turn so far: prompt and sampled tokens, logprobs and weight versions. Raises NotFound."""
        return await self._http.read(Session, self._path)

    async def open(self) -> Self:
        """Open the session, as ``async with`` does. Raises VersionConflict if the id is in use, Overloaded."""
        body = self._wanted.model_dump(exclude_none=True)
        reply = await self._http.send("POST", "/v1/sessions", json=body, repeat=Repeat.IF_NOT_ACCEPTED)
        self._opened = parse(SessionOpened, reply)
        return self

    async def close(self) -> None:
        """Delete the session on the service, if it still exists."""
        try:
            await self._http.send("DELETE", self._path, repeat=Repeat.IDEMPOTENT)
        except NotFound:
            return

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def _open(self) -> SessionOpened:
        if self._opened is None:
            raise RuntimeError("the session is not open: use it in a `with` block (of RolloutClient: `async with`)")
        return self._opened

    @property
    def _path(self) -> str:
        return f"/v1/sessions/{self._open.session_id}"
