"""Sessions: an address at which an agent chats, and the trajectory that it leaves, in tokens."""

from types import TracebackType
from typing import Self

from rollout_service.client._http import Http, parse
from rollout_service.client._retry import Repeat
from rollout_service.errors import NotFound
from rollout_service.protocol.sessions import OpenSession, Session, SessionOpened


class AgentSession:
    """``async with client.session() as session:`` and give ``session.openai_base_url`` to any agent.

    At its end the service forgets it: read the trajectory before.
    """

    def __init__(self, http: Http, wanted: OpenSession) -> None:
        self._http, self._wanted = http, wanted
        self._opened: SessionOpened | None = None

    @property
    def session_id(self) -> str:
        """Its name, also for the header ``X-Session-ID``."""
        return self._open.session_id

    @property
    def openai_base_url(self) -> str:
        """``base_url`` of OpenAI's clients."""
        return self._http.url + self._open.openai_path

    @property
    def anthropic_base_url(self) -> str:
        """``base_url`` of Anthropic's clients."""
        return self._http.url + self._open.anthropic_path

    async def trajectory(self) -> Session:
        """Every turn so far: what the model read and sampled, with logprobs and weight versions. Raises NotFound."""
        return parse(Session, await self._http.send("GET", self._path, repeat=Repeat.IDEMPOTENT))

    async def open(self) -> Self:
        """What ``async with`` does. Raises VersionConflict if its name is taken, Overloaded."""
        body = self._wanted.model_dump(exclude_none=True)
        reply = await self._http.send("POST", "/v1/sessions", json=body, repeat=Repeat.IF_NOT_ACCEPTED)
        self._opened = parse(SessionOpened, reply)
        return self

    async def close(self) -> None:
        """Have the service forget it; it may have done so already."""
        try:
            await self._http.send("DELETE", self._path, repeat=Repeat.IDEMPOTENT)
        except NotFound:
            return

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _open(self) -> SessionOpened:
        if self._opened is None:
            raise RuntimeError("the session is not open: use it in a `with` block (of RolloutClient: `async with`)")
        return self._opened

    @property
    def _path(self) -> str:
        return f"/v1/sessions/{self._open.session_id}"
