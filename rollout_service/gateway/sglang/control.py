"""SGLang's routes for pauses, aborts and cache flushes."""

from typing import Any, Literal, Self

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from pydantic import model_validator

from rollout_service.errors import Asleep, InvalidRequest, MalformedRequest, Overtaken
from rollout_service.fleet.coordinator import SLEEP_TAGS
from rollout_service.gateway import control
from rollout_service.gateway.dependencies import Here
from rollout_service.gateway.sglang.replies import ControlRoute, Done
from rollout_service.protocol.base import Frozen
from rollout_service.protocol.fleet import SleepTag
from rollout_service.web.errors import documented

router = APIRouter(tags=["sglang"], route_class=ControlRoute)
_FLUSHED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {}}, "description": "Nothing of the KV cache is used again."},
    **documented(MalformedRequest),
}
_MEMORY = documented(MalformedRequest, Overtaken, Asleep)
_DONE = {200: {"model": Done}, **_MEMORY}


class PauseGeneration(Frozen):
    """``abort`` returns running completions with their tokens so far. ``retract`` and ``in_place`` hold them until the
    pause ends, and recompute their KV cache."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueGeneration(Frozen):
    """``torch_empty_cache`` may only be false: a pause leaves no memory to free."""

    torch_empty_cache: Literal[False] | None = None


class Memory(Frozen):
    """``tags`` names parts of the engines' memory. None: all."""

    tags: frozenset[SleepTag | Literal["cuda_graph"]] | None = None


class AbortRequest(Frozen):
    """Aborts all requests. Aborting one request by its id is not implemented."""

    rid: str | None = None
    abort_all: bool = False

    @model_validator(mode="after")
    def _all(self) -> Self:
        if self.rid or not self.abort_all:
            raise ValueError(
                "aborting one request by rid is not implemented: close its connection, which ends it, or send abort_all"
            )
        return self


@router.post("/pause_generation", responses=_DONE)
async def pause_generation(services: Here, body: PauseGeneration | None = None) -> Done:
    """Pause every replica until ``/continue_generation``. New requests wait."""
    mode = (body or PauseGeneration()).mode
    if mode == "abort":
        await services.ingest.set_paused(True, "abort", ControlRoute.waits_s, "return")
    else:
        await services.ingest.set_paused(True, "keep", ControlRoute.waits_s)
    return Done(message=f"generation is paused ({mode})")


@router.post("/continue_generation", responses=_DONE)
async def continue_generation(services: Here, body: ContinueGeneration | None = None) -> Done:
    """End the pause."""
    await services.ingest.set_paused(False, "keep", ControlRoute.waits_s)
    return Done(message="generation goes on")


@router.post("/release_memory_occupation", responses=_MEMORY)
async def release_memory_occupation(services: Here, body: Memory | None = None) -> None:
    """Free the memory of every engine, as ``/sleep`` does."""
    named = (body or Memory()).tags
    if named is not None and not named.issuperset(SLEEP_TAGS):
        raise InvalidRequest(
            f"release_memory_occupation: engines free {' and '.join(SLEEP_TAGS)} together: leave out tags"
        )
    await control.sleep(services, timeout_s=ControlRoute.waits_s)


@router.post("/resume_memory_occupation", responses=_MEMORY)
async def resume_memory_occupation(services: Here, body: Memory | None = None) -> None:
    """Reallocate the memory of every engine, as ``/wake_up`` does. CUDA graphs are never freed."""
    named = (body or Memory()).tags
    wanted = [tag for tag in SLEEP_TAGS if named is None or tag in named]
    if wanted:
        await control.wake_up(services, wanted, timeout_s=ControlRoute.waits_s)


@router.post("/abort_request", response_class=Response, responses=documented(MalformedRequest))
async def abort_request(services: Here, body: AbortRequest) -> Response:
    """Return every running completion on all replicas with its tokens so far. Does not start or end a pause."""
    await services.ingest.abort_running(ControlRoute.waits_s)
    return Response()


@router.get("/flush_cache", response_model=None, responses=_FLUSHED)
@router.post("/flush_cache", response_model=None, responses=_FLUSHED)
async def flush_cache(services: Here) -> Response:
    """Drop the KV cache of every replica, during a pause or not. Running requests recompute theirs."""
    await services.ingest.drop_kv_cache(ControlRoute.waits_s)
    return PlainTextResponse("The KV cache of every replica is dropped.\n")
