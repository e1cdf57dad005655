"""The control routes: pause, resume, sleep and fleet. All need authorization. Other routes ask here for the fleet.

Paths, parameters and replies of sleep follow vLLM 0.32: ``entrypoints/serve/dev/sleep/api_router.py``.
``engine/sleeping.py`` describes what an engine does.
"""

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from rollout_service.errors import Asleep, InvalidRequest, NotReady, Overtaken
from rollout_service.fleet.coordinator import SLEEP_TAGS
from rollout_service.gateway.dependencies import Here, Services, answer_of_ingest
from rollout_service.gateway.routes import GuardedRoute
from rollout_service.protocol.base import Frozen
from rollout_service.protocol.fleet import FailedStarts, Fleet, PauseMode, SleepTag
from rollout_service.web.errors import documented

router = APIRouter(tags=["control"], route_class=GuardedRoute)
TimeoutS = Annotated[float, Query(gt=0, allow_inf_nan=False)]


@router.post("/pause", responses=documented(InvalidRequest, Overtaken))
async def pause(
    services: Here, mode: PauseMode = "keep", timeout_s: TimeoutS = 600.0, clear_cache: bool = True
) -> dict[str, str]:
    """Pause all current and future replicas until ``/resume``. Requests are queued meanwhile.

    A pause replaces an earlier pause with another mode. Answers 409 if another command arrives before every replica has
    paused.

    ``clear_cache``: drop the KV cache, so that paused rollouts recompute theirs. A new version drops or keeps it by
    ``weights.kv_cache_on_update``, whatever the pause has done.
    """
    await services.ingest.set_paused(True, mode, timeout_s, clear_cache=clear_cache)
    return {"status": "paused"}


@router.post("/resume", responses=documented(InvalidRequest, Overtaken, Asleep))
async def resume(services: Here, timeout_s: TimeoutS = 600.0) -> dict[str, str]:
    """Resume all replicas, even if a pause still waits for running rollouts. Answers 409 as ``/pause`` does."""
    await services.ingest.set_paused(False, "keep", timeout_s)
    return {"status": "resumed"}


@router.get("/is_paused")
async def is_paused(services: Here) -> dict[str, bool]:
    """Return true if a pause was requested and every live replica is paused."""
    return {"is_paused": await services.ingest.is_paused()}


@router.get("/v1/fleet")
async def fleet(services: Here) -> Fleet:
    """Return the live replicas and the newest committed version. Answers 503 with the reason if the ingest does not
    reply."""
    return await known_fleet(services)


class FellAsleep(Frozen):
    """Reply of ``POST /sleep``."""

    status: Literal["sleeping"] = "sleeping"
    level: int


class WokeUp(Frozen):
    """Reply of ``POST /wake_up``."""

    status: Literal["awake", "sleeping"]
    tags: tuple[SleepTag, ...] | None
    """The tags of the request. None: all."""


class IsSleeping(Frozen):
    """Reply of ``GET /is_sleeping``."""

    is_sleeping: bool


@router.post("/sleep", responses=documented(InvalidRequest, Overtaken))
async def sleep(
    services: Here, level: Annotated[int, Query(ge=0, le=2)] = 1, mode: PauseMode = "abort", timeout_s: TimeoutS = 600.0
) -> FellAsleep:
    """Free the weights, the staging buffer and the KV cache of every engine; answers when all are freed.

    ``level`` 1 and 2 are the same, because weights are reloaded from the version log. ``mode`` decides the fate of
    running rollouts, as for ``/pause``. Requests are queued until ``/wake_up``; versions may be pushed meanwhile.
    Answers 409 if another command arrives before every replica has obeyed.
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
    """Reallocate the memory of every engine, load the newest version and resume; answers when all serve it.

    ``tags``: wake up only a part. Engines stay asleep until all tags were requested. Weights pushed before that go into
    the log, which needs no awake engine.
    """
    _require_sleep_mode(services)
    awake = await services.ingest.wake_up(tuple(tags or SLEEP_TAGS), timeout_s)
    return WokeUp(status="awake" if awake else "sleeping", tags=None if tags is None else tuple(tags))


@router.get("/is_sleeping")
async def is_sleeping(services: Here) -> IsSleeping:
    """Return true if sleep was requested and every live engine is asleep."""
    return IsSleeping(is_sleeping=await services.ingest.is_sleeping())


def _require_sleep_mode(services: Services) -> None:
    if not services.may_sleep:
        raise InvalidRequest(
            "the engines of this service cannot sleep: set engine.enable_sleep_mode: true in its configuration and "
            "start it anew"
        )


async def known_fleet(services: Services) -> Fleet:
    """Return the fleet as the ingest knows it. Raises NotReady with Serve's messages if the ingest does not answer."""
    try:
        return await answer_of_ingest(services.ingest.fleet())
    except NotReady as error:
        raise await _not_ready(error.message, services) from error


async def failed_starts(services: Services) -> FailedStarts | None:
    """Return the failed starts if a replica is ready, or None if no start failed.

    Raises NotReady, with the reason, if no replica is ready.
    """
    fleet = await known_fleet(services)
    serving = any(r.version is not None and r.error is None and r.state != "draining" for r in fleet.unpinned)
    # asleep: requested by the trainer, so the service is ready
    if serving or any(replica.state == "asleep" and replica.error is None for replica in fleet.unpinned):
        return fleet.failed_starts
    why, failed = "no engine replica is live", fleet.failed_starts
    if failed is None or failed.over:
        raise await _not_ready(why, services)
    starts = "the start of a replica has failed" if failed.tries == 1 else f"{failed.tries} starts have failed"
    message = f"{why}: {starts}, the first ({failed.first.replica_id}) with: {failed.first.reason}"
    raise NotReady(message, {"failed_starts": failed.model_dump(mode="json")})


async def _not_ready(why: str, services: Services) -> NotReady:
    """Return the error with Serve's messages about the deployments that are not running."""
    said = await services.serve_messages.read()
    if not said:
        return NotReady(why)
    lines = [f"{name or 'the application'}: {message}" for name, message in sorted(said.items())]
    return NotReady(f"{why}; Serve says of {'; '.join(lines)}", {"not_running": said})
