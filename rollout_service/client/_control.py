"""Calls that read and control weight versions and the fleet. They transfer neither tensors nor tokens."""

import asyncio
from typing import overload

import httpx
from pydantic import BaseModel

from rollout_service.client._http import Http, Repeat, http_timeout
from rollout_service.errors import CommitTimeout, NotFound, RolloutServiceError
from rollout_service.protocol.fleet import Fleet, PauseMode
from rollout_service.protocol.upload import TrainerRecipe
from rollout_service.protocol.weights import WeightStatus

CONTROL_CONNECTIONS = 64
CONTROL_READ_S = 120.0
HEALTH_READ_S = 10.0
PAUSE_READ_S = 660.0
"""Read timeout of pause and sleep, in seconds. The service itself gives up after 600 s."""
FIRST_POLL_S, LAST_POLL_S = 0.1, 2.0


class ControlCalls:
    """The methods of RolloutClient that use only the control connections."""

    def __init__(self, control: Http) -> None:
        self._control = control

    async def discard(self, version: int) -> None:
        """Delete a version that is staged and not committed. Raises NotFound, VersionConflict."""
        await self._control.send("DELETE", f"/v1/weights/{version}", repeat=Repeat.IF_NOT_ACCEPTED)

    async def wait_live(self, version: int, timeout_s: float = 600.0) -> WeightStatus:
        """Wait until every live replica serves ``version`` or newer.

        Raises CommitTimeout with the states of the replicas after ``timeout_s``, or NotFound if the version does not
        exist.
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
        """Return the service's storage format of each tensor, for ``rollout_service.quant.fake_quant``."""
        return await self._control.read(TrainerRecipe, "/v1/weights/recipe")

    @overload
    async def weights(self, version: int) -> WeightStatus: ...

    @overload
    async def weights(self, version: None = None) -> list[WeightStatus]: ...

    async def weights(self, version: int | None = None) -> WeightStatus | list[WeightStatus]:
        """Return the state of one weight version, or of all versions that the service keeps. Raises NotFound."""
        if version is None:
            return (await self._control.read(_Versions, "/v1/weights")).versions
        return await self._control.read(WeightStatus, f"/v1/weights/{version}")

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling on every replica. ``wait`` lets running rollouts finish first, ``abort`` ends them.

        A pause replaces an earlier pause with another mode. Raises Overtaken if another pause or a resume arrives
        before every replica has paused. Raises ControlTimeout after ten minutes.
        """
        await self._switch("/pause", mode=mode)

    async def resume(self) -> None:
        """Resume sampling, even if a pause still waits for running rollouts. Raises the errors of ``pause``."""
        await self._switch("/resume")

    async def is_paused(self) -> bool:
        """Return True if the fleet is paused."""
        return (await self._control.read(_Paused, "/is_paused")).is_paused

    async def sleep(self, mode: PauseMode = "abort") -> None:
        """Release the GPU memory of every engine. ``mode`` decides the fate of running rollouts, as for ``pause``.

        Requests wait until ``wake_up``; versions may be pushed meanwhile. Raises InvalidRequest if
        ``engine.enable_sleep_mode`` is not set, and the errors of ``pause``.
        """
        await self._switch("/sleep", level="2", mode=mode)

    async def wake_up(self) -> None:
        """Reallocate the GPU memory of every engine, and return when all serve the newest version. Raises as
        ``sleep``."""
        await self._switch("/wake_up")

    async def is_sleeping(self) -> bool:
        """Return True if every engine is asleep."""
        return (await self._control.read(_Sleeping, "/is_sleeping")).is_sleeping

    async def fleet(self) -> Fleet:
        """Return the live replicas, with the version and the load of each."""
        return await self._control.read(Fleet, "/v1/fleet")

    async def models(self) -> list[str]:
        """Return the names of the served models."""
        return [model.id for model in (await self._control.read(_Models, "/v1/models")).data]

    async def health(self) -> bool:
        """Return True if the service is ready. Makes one attempt; returns False if nothing answers."""
        try:
            await self._control.send("GET", "/health", repeat=Repeat.NEVER, timeout=http_timeout(HEALTH_READ_S))
        except (httpx.TransportError, NotFound):
            return False
        except RolloutServiceError as error:
            if error.http_status < 500:
                raise
            return False
        return True

    async def _switch(self, route: str, **params: str) -> None:
        """Change the state of all engines. Not repeated after a lost reply, because a later change may have come."""
        await self._control.send(
            "POST", route, params=params, repeat=Repeat.IF_NOT_ACCEPTED, timeout=http_timeout(PAUSE_READ_S)
        )


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
