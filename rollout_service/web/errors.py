"""Error replies: every error has the JSON form ``{"error": {"type", "message", "detail"}}``."""

import json
from collections.abc import Sequence
from typing import Any, TypedDict

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from rollout_service.errors import (
    BadRequest,
    Forbidden,
    InvalidRequest,
    MalformedRequest,
    NotFound,
    RolloutServiceError,
    Unauthorized,
    shorten,
)
from rollout_service.protocol.base import field_name

_BY_STATUS = {400: MalformedRequest, 401: Unauthorized, 403: Forbidden, 404: NotFound, 422: InvalidRequest}
PROBLEMS_LISTED = 8
"""Maximum number of field problems in the error message, and in its ``detail``."""
_LONGEST_FIELD = 64
_NOT_IMPLEMENTED = "is not a field here, or not implemented: leave it out"


def install_error_handlers(app: FastAPI) -> None:
    """Make ``app`` answer every error in the service's form."""
    app.add_exception_handler(RolloutServiceError, _service_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)


class ErrorBody(BaseModel):
    """Description of one error."""

    type: str
    """Name of a class in ``rollout_service.errors``."""
    message: str
    """The problem, its cause, and the remedy."""
    detail: dict[str, Any]
    """Names and values, for programs."""


class ErrorReply(BaseModel):
    """The JSON body of every reply that reports an error."""

    error: ErrorBody


def documented(*kinds: type[RolloutServiceError]) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI ``responses`` of a route that may raise these errors."""
    replies: dict[int | str, dict[str, Any]] = {}
    for kind in kinds:
        meaning = f"{kind.__name__}: {(kind.__doc__ or '').strip()}"
        before = replies.get(kind.http_status)
        description = meaning if before is None else f"{before['description']} {meaning}"
        replies[kind.http_status] = {"model": ErrorReply, "description": description}
    return replies


class ErrorResponse(JSONResponse):
    """JSON in ASCII. An error may quote text from the request that UTF-8 cannot encode."""

    def render(self, content: object) -> bytes:
        """Return the content as ASCII JSON. Starlette calls this."""
        return json.dumps(content).encode("ascii")


def error_response(error: RolloutServiceError, **fields: object) -> ErrorResponse:
    """Return the HTTP reply for an error. ``fields``: further ones of the body."""
    headers = {} if error.retry_after_s is None else {"Retry-After": f"{error.retry_after_s:g}"}
    return ErrorResponse({**fields, **error.to_wire()}, status_code=error.http_status, headers=headers)


async def _service_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RolloutServiceError)
    return error_response(error)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return error_response(validation_error(f"{request.method} {request.url.path}", error.errors()))


class FieldProblem(TypedDict):
    """One field problem in pydantic's form. FastAPI and this service report problems in the same form."""

    type: str
    loc: tuple[int | str, ...]
    msg: str


def validation_error(route: str, problems_found: Sequence[FieldProblem]) -> RolloutServiceError:
    """Return the error for a request body that pydantic refused."""
    # each class of a union has its problems; those of a class with another ``type`` than the given one come last
    literals = [item["loc"] for item in problems_found if item["type"] == "literal_error"]
    others = {location[:-1] for location in literals if location[-1:] == ("type",)}
    found = sorted(problems_found, key=lambda item: any(item["loc"][: len(other)] == other for other in others))
    problems = [_problem(item["loc"], item["type"], item["msg"]) for item in found[:PROBLEMS_LISTED]]
    parts = [f"{field} {problem}" for field, problem in problems]
    if len(problems_found) > len(parts):
        parts.append(f"and {len(problems_found) - len(parts)} more")
    malformed = any(item["type"] == "json_invalid" for item in problems_found)
    cls = MalformedRequest if malformed else InvalidRequest
    fields = [{"field": field, "problem": problem} for field, problem in problems]
    return cls(f"{route}: {'; '.join(parts)}", {"fields": fields, "problems": len(problems_found)})


def bad_request(route: str, error: ValidationError) -> BadRequest:
    """Return the same problems as a 400, for routes that OpenAI or Anthropic define."""
    said = validation_error(route, error.errors())
    return BadRequest(said.message, said.detail)


def _problem(location: tuple[int | str, ...], kind: str, message: str) -> tuple[str, str]:
    if kind == "json_invalid":
        at = f", at character {location[-1]}" if location else ""
        return "the body", f"is not JSON ({message}{at})"
    if kind in ("model_attributes_type", "missing") and location == ("body",):
        return "the body", "must be a JSON object sent with Content-Type: application/json"
    field = field_name(tuple(str(part)[:_LONGEST_FIELD] for part in location if part != "body")) or "the body"
    return field, _NOT_IMPLEMENTED if kind == "extra_forbidden" else shorten(message)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    cls = _BY_STATUS.get(error.status_code, RolloutServiceError)
    body = cls(message, {"status": error.status_code}).to_wire()
    return ErrorResponse(body, status_code=error.status_code, headers=error.headers)


async def _unexpected_error(request: Request, error: Exception) -> JSONResponse:
    # starlette raises the error again after this reply is sent, so that it is logged
    message = f"{request.method} {request.url.path} failed with {type(error).__name__}: the service's log says more"
    return error_response(RolloutServiceError(message))
