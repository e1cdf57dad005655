"""Session routes: an agent chats at its own URL, and a trainer reads the tokens that the model read and sampled."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Body, Path, Request, Response
from fastapi.responses import StreamingResponse

from rollout_service.errors import BadRequest, InvalidRequest, NotFound, Overloaded, VersionConflict
from rollout_service.gateway import models
from rollout_service.gateway.dependencies import Here
from rollout_service.gateway.openai import routes
from rollout_service.gateway.openai.exchange import Exchange, SessionTurn
from rollout_service.gateway.prompts import DATA_ERRORS
from rollout_service.gateway.routes import OpenRoute
from rollout_service.protocol.generate import RolloutOptions
from rollout_service.protocol.sessions import SESSION_NAME, OpenSession, Session, SessionOpened
from rollout_service.web.errors import documented

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], route_class=OpenRoute)
_ERRORS = documented(InvalidRequest, NotFound)
SessionName = Annotated[str, Path(pattern=SESSION_NAME, max_length=256)]
_CHAT_ERRORS = DATA_ERRORS | documented(BadRequest, NotFound)


@router.post("", responses=documented(InvalidRequest, VersionConflict, Overloaded))
async def open_session(services: Here, body: OpenSession | None = None) -> SessionOpened:
    """Open a session."""
    name = await services.sessions.open(body or OpenSession())
    return SessionOpened(
        session_id=name, openai_path=f"{router.prefix}/{name}/v1", anthropic_path=f"{router.prefix}/{name}"
    )


@router.get("/{session_id}", response_model=None, responses={200: {"model": Session}, **_ERRORS})
async def read_session(session_id: SessionName, services: Here) -> Response:
    """Return the turns so far, with exact prompt and completion ids, logprobs and versions."""
    session = await services.sessions.get(session_id)

    async def parts() -> AsyncIterator[str]:
        # one at a time: each turn has its whole prompt, and each path the one before almost whole
        yield f'{{"session_id":{json.dumps(session_id)},"paths":['
        for number, path in enumerate(session.paths()):
            yield f"{',' if number else ''}{json.dumps(path, separators=(',', ':'))}"
            await asyncio.sleep(0)
        yield '],"turns":['
        for index in range(len(session.turns)):
            yield f"{',' if index else ''}{session.turn(index).model_dump_json()}"
            await asyncio.sleep(0)
        yield "]}"

    return StreamingResponse(parts(), media_type="application/json")


@router.delete("/{session_id}", status_code=204, responses=_ERRORS)
async def close_session(session_id: SessionName, services: Here) -> None:
    """Delete the session."""
    await services.sessions.close(session_id)


@router.post("/{session_id}/v1/messages/count_tokens", responses=_CHAT_ERRORS)
async def count_tokens(
    session_id: SessionName, request: Request, services: Here, body: dict[str, object] = Body()
) -> Response:
    """Answer ``/v1/messages/count_tokens`` at the session's URL, where agents expect it. Records no turn."""
    await services.sessions.num_turns(session_id)
    return await routes.count_tokens(request, services, body)


@router.get("/{session_id}/v1/models", responses=_ERRORS)
async def list_models(session_id: SessionName, services: Here) -> dict[str, object]:
    """Answer ``/v1/models`` at the session's URL, where agents expect it."""
    await services.sessions.num_turns(session_id)
    return await models.models(services)


async def _begin_turn(session_id: SessionName, services: Here) -> Exchange:
    """Return an exchange that records the reply as a turn of the session."""
    turn = await SessionTurn.of(session_id, services.sessions)
    return Exchange(RolloutOptions(session_id=session_id), session=turn)


routes.add_routes(router, _begin_turn, _CHAT_ERRORS, prefix="/{session_id}")
