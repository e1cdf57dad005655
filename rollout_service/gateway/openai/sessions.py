"""Sessions: an agent chats at an address of its own, and a trainer reads what the model read and said, in tokens."""

from typing import Annotated

from fastapi import APIRouter, Body, Path, Request, Response

from rollout_service.errors import BadRequest, InvalidRequest, NotFound, Overloaded, VersionConflict
from rollout_service.gateway import models
from rollout_service.gateway.dependencies import Here, Services
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


@router.get("/{session_id}", responses=_ERRORS)
async def read_session(session_id: SessionName, services: Here) -> Session:
    """Its turns so far: exact prompt and completion ids, logprobs, versions."""
    return await services.sessions.get(session_id)


@router.delete("/{session_id}", status_code=204, responses=_ERRORS)
async def close_session(session_id: SessionName, services: Here) -> None:
    """Forget it."""
    await services.sessions.close(session_id)


@router.post("/{session_id}/v1/chat/completions", responses=_CHAT_ERRORS)
async def chat_completions(
    session_id: SessionName, request: Request, services: Here, body: dict[str, object] = Body()
) -> Response:
    """``/v1/chat/completions`` whose replies are turns of the session."""
    exchange = await _turn(session_id, services)
    return routes.with_branch(await routes.chat(request, services, body, exchange), exchange)


@router.post("/{session_id}/v1/responses", responses=_CHAT_ERRORS)
async def responses(
    session_id: SessionName, request: Request, services: Here, body: dict[str, object] = Body()
) -> Response:
    """``/v1/responses`` whose replies are turns of the session."""
    exchange = await _turn(session_id, services)
    return routes.with_branch(await routes.respond(request, services, body, exchange), exchange)


@router.post("/{session_id}/v1/messages", responses=_CHAT_ERRORS)
async def messages(
    session_id: SessionName, request: Request, services: Here, body: dict[str, object] = Body()
) -> Response:
    """``/v1/messages`` whose replies are turns of the session."""
    exchange = await _turn(session_id, services)
    return routes.with_branch(await routes.anthropic(request, services, body, exchange), exchange)


@router.post("/{session_id}/v1/messages/count_tokens", responses=_CHAT_ERRORS)
async def count_tokens(
    session_id: SessionName, request: Request, services: Here, body: dict[str, object] = Body()
) -> Response:
    """``/v1/messages/count_tokens``: agents ask it where they send their messages. No turn."""
    await _turn(session_id, services)
    return await routes.count_tokens(request, services, body)


@router.get("/{session_id}/v1/models", responses=_ERRORS)
async def list_models(session_id: SessionName, services: Here) -> dict[str, object]:
    """``/v1/models``, for the same reason."""
    await _turn(session_id, services)
    return await models.models(services)


async def _turn(session_id: str, services: Services) -> Exchange:
    turn = await SessionTurn.of(session_id, services.sessions)
    return Exchange(RolloutOptions(session_id=session_id), session=turn)
