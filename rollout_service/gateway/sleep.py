"""vLLM's sleep routes, for trainers that share GPUs with the engines. All need authorization.

Paths, parameters and replies are vLLM 0.32's: ``entrypoints/serve/dev/sleep/api_router.py``. What sleeping means here:
``engine/sleeping.py``.
"""

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from rollout_service.errors import Asleep, InvalidRequest, Overtaken
from rollout_service.fleet.coordinator import SLEEP_TAGS
from rollout_service.gateway.control import TimeoutS
from rollout_service.gateway.dependencies import Here, Services
from rollout_service.gateway.routes import GuardedRoute
from rollout_service.protocol.base import Frozen
from rollout_service.protocol.fleet import PauseMode, SleepTag
from rollout_service.web.errors import documented

router = APIRouter(tags=["control"], route_class=GuardedRoute)


class FellAsleep(Frozen):
    """Reply of ``POST /sleep``."""

    status: Literal["sleeping"] = "sleeping"
    level: int


class WokeUp(Frozen):
    """Reply of ``POST /wake_up``."""

    status: Literal["awake", "sleeping"]
    tags: tuple[SleepTag, ...] | None
    """Those of the request; None: all."""


class IsSleeping(Frozen):
    """Reply of ``GET /is_sleeping``."""

    is_sleeping: bool


@router.post("/sleep", responses=documented(InvalidRequest, Overtaken))
async def sleep(
    services: Here, level: Annotated[int, Query(ge=0, le=2)] = 1, mode: PauseMode = "abort", timeout_s: TimeoutS = 600.0
) -> FellAsleep:
    """Have every engine give back the memory of its weights, staging area and KV cache; answers when all have.

    ``level`` 1 and 2 are the same: weights come back from the log of versions. ``mode``: what becomes of what runs, as
    for ``/pause``. Requests queue until ``/wake_up``, and versions may be pushed meanwhile. 409 if something else is
    asked for before every replica has obeyed.
    """
    _require_sleep_mode(services)
    if level == 0:
        raise InvalidRequest("POST /sleep?level=0 frees no memory: POST /pause stops the engines, /resume goes on")
    await services.ingest.sleep(mode, timeout_s)
    return FellAsleep(level=level)


@router.post("/wake_up", responses=documented(InvalidRequest, Overtaken, Asleep))
async def wake_up(
    services: Here,
    tags: Annotated[list[SleepTag] | None, Query(max_length=len(SLEEP_TAGS))] = None,
    timeout_s: TimeoutS = 600.0,
) -> WokeUp:
    """Have every engine take its memory again, load the newest version and go on; answers when all serve it.

    ``tags``: ask for a part only. Engines sleep until they were asked for all: weights that a trainer sends between the
    two go into the log, for which no engine has to be awake.
    """
    _require_sleep_mode(services)
    awake = await services.ingest.wake_up(tuple(tags or SLEEP_TAGS), timeout_s)
    return WokeUp(status="awake" if awake else "sleeping", tags=None if tags is None else tuple(tags))


@router.get("/is_sleeping")
async def is_sleeping(services: Here) -> IsSleeping:
    """True when the engines were put to sleep and every live one is."""
    return IsSleeping(is_sleeping=await services.ingest.is_sleeping())


def _require_sleep_mode(services: Services) -> None:
    if not services.may_sleep:
        raise InvalidRequest(
            "the engines of this service cannot sleep: set engine.enable_sleep_mode: true in its configuration and "
            "start it anew"
        )
