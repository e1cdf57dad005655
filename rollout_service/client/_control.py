"""Weight versions and the fleet: the calls that do not move tensors or tokens."""

import asyncio
from typing import overload

import httpx
from pydantic import BaseModel

from rollout_service.client._http import Http, http_timeout, parse
from rollout_service.client._retry import Repeat
from rollout_service.errors import CommitTimeout, NotFound, RolloutServiceError
from rollout_service.protocol.fleet import Fleet, PauseMode
from rollout_service.protocol.upload import TrainerRecipe
from rollout_service.protocol.weights import WeightStatus

CONTROL_CONNECTIONS = 64
CONTROL_READ_S = 120.0
HEALTH_READ_S = 10.0
PAUSE_READ_S = 660.0
"""The service itself gives up after 600 s."""
FIRST_POLL_S, LAST_POLL_S = 0.1, 2.0


class ControlCalls:
    """The part of RolloutClient that only needs the control connections."""

    def __init__(self, control: Http) -> None:
        self._control = control

    async def discard(self, version: int) -> None:
        """Drop a version that is staged and not committed. Raises NotFound, VersionConflict."""
        await self._control.send("DELETE", f"/v1/weights/{version}", repeat=Repeat.IF_NOT_ACCEPTED)

    async def wait_live(self, version: int, timeout_s: float = 600.0) -> WeightStatus:
        """Wait until every live replica serves ``version`` or newer.

        Raises CommitTimeout with the table of replicas after ``timeout_s``, NotFound if there is no such version.
        """
        status: WeightStatus | None = None
        poll_s = FIRST_POLL_S
        try:
            async with asyncio.timeout(timeout_s):
                while (status := await self.weights(version)).state != "live":
                    await asyncio.sleep(poll_s)
                    poll_s = min(2 * poll_s, LAST_POLL_S)
        except TimeoutError:
            raise _not_live(version, timeout_s, status) from None
        return status

    async def recipe(self) -> TrainerRecipe:
        """What the service makes of each tensor, for ``rollout_service.quant.fake_quant``."""
        return parse(TrainerRecipe, await self._control.send("GET", "/v1/weights/recipe", repeat=Repeat.IDEMPOTENT))

    @overload
    async def weights(self, version: int) -> WeightStatus: ...

    @overload
    async def weights(self, version: None = None) -> list[WeightStatus]: ...

    async def weights(self, version: int | None = None) -> WeightStatus | list[WeightStatus]:
        """State of one weight version, or of all that the service keeps. Raises NotFound."""
        if version is None:
            reply = await self._control.send("GET", "/v1/weights", repeat=Repeat.IDEMPOTENT)
            return parse(_Versions, reply).versions
        return parse(WeightStatus, await self._control.send("GET", f"/v1/weights/{version}", repeat=Repeat.IDEMPOTENT))

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling on every replica; ``wait`` lets running rollouts finish first, ``abort`` ends them.

        Takes over from a pause with another mode. Raises Overtaken if another mode or a resume is asked for before
        every replica has obeyed, NotReady if that takes more than ten minutes.
        """
        patience = http_timeout(PAUSE_READ_S)
        await self._control.send(
            "POST", "/pause", params={"mode": mode}, repeat=Repeat.IF_NOT_ACCEPTED, timeout=patience
        )

    async def resume(self) -> None:
        """Go on sampling, also if a pause still waits for running rollouts. Raises as ``pause``."""
        patience = http_timeout(PAUSE_READ_S)
        await self._control.send("POST", "/resume", repeat=Repeat.IF_NOT_ACCEPTED, timeout=patience)

    async def is_paused(self) -> bool:
        """Whether the fleet is paused."""
        return parse(_Paused, await self._control.send("GET", "/is_paused", repeat=Repeat.IDEMPOTENT)).is_paused

    async def sleep(self, mode: PauseMode = "abort") -> None:
        """Have every engine give its GPU memory back; ``mode`` says what becomes of what runs, as for ``pause``.

        Requests wait until ``wake_up``, and versions may be pushed meanwhile. Raises InvalidRequest if
        ``engine.enable_sleep_mode`` is not set, and as ``pause``.
        """
        await self._control.send(
            "POST",
            "/sleep",
            params={"level": "2", "mode": mode},
            repeat=Repeat.IF_NOT_ACCEPTED,
            timeout=http_timeout(PAUSE_READ_S),
        )

    async def wake_up(self) -> None:
        """Have every engine take its memory again; returns when all serve the newest version. Raises as ``sleep``."""
        await self._control.send("POST", "/wake_up", repeat=Repeat.IF_NOT_ACCEPTED, timeout=http_timeout(PAUSE_READ_S))

    async def is_sleeping(self) -> bool:
        """Whether every engine sleeps."""
        reply = await self._control.send("GET", "/is_sleeping", repeat=Repeat.IDEMPOTENT)
        return parse(_Sleeping, reply).is_sleeping

    async def fleet(self) -> Fleet:
        """The live replicas: what each serves, and how busy it is."""
        return parse(Fleet, await self._control.send("GET", "/v1/fleet", repeat=Repeat.IDEMPOTENT))

    async def models(self) -> list[str]:
        """Names of the served models."""
        reply = await self._control.send("GET", "/v1/models", repeat=Repeat.IDEMPOTENT)
        return [model.id for model in parse(_Models, reply).data]

    async def health(self) -> bool:
        """Whether the service answers and can serve. One attempt; False too if nothing is there (yet)."""
        try:
            await self._control.send("GET", "/health", repeat=Repeat.NEVER, timeout=http_timeout(HEALTH_READ_S))
        except (httpx.TransportError, NotFound):
            return False
        except RolloutServiceError as error:
            if error.http_status < 500:
                raise
            return False
        return True


class _Versions(BaseModel):
    versions: list[WeightStatus]


class _Paused(BaseModel):
    is_paused: bool


class _Sleeping(BaseModel):
    is_sleeping: bool


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model]


def _not_live(version: int, timeout_s: float, status: WeightStatus | None) -> CommitTimeout:
    if status is None:
        return CommitTimeout(f"the service said nothing about version {version} within {timeout_s:g} s")
    rows = [
        f"{replica.replica_id}: {replica.state} at version {replica.version}"
        + (f", loading {replica.target}" if replica.target is not None else "")
        + (f", {replica.error}" if replica.error else "")
        for replica in status.replicas
    ]
    return CommitTimeout(
        f"version {version} is {status.state}, not live, after {timeout_s:g} s. Replicas: {'; '.join(rows) or 'none'}",
        status.model_dump(mode="json"),
    )
