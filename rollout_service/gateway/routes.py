"""Route classes: open routes, and guarded routes that need authorization.

Both limit the size of a request's body, parse its JSON and validate it before FastAPI does, so that errors are few and
name the field. A guarded route authorizes the caller before it reads the body.
"""

import json
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from rollout_service.compat.pydantic_internals import fail_fast_validator
from rollout_service.errors import (
    Forbidden,
    InvalidRequest,
    MalformedRequest,
    NotReady,
    PayloadTooLarge,
    RolloutServiceError,
    Unauthorized,
)
from rollout_service.web.errors import FieldProblem, documented, validation_error

_JSON = re.compile(r"application/(?:[\w.-]+\+)?json\s*(?:;|$)", re.IGNORECASE)
# ``json.loads`` has already joined surrogate pairs, so any that remain are lone
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


OCTETS: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
"""The ``openapi_extra`` of a route whose body is bytes."""


class OpenRoute(APIRoute):
    """A route without authorization."""

    body_bytes: ClassVar[int] = 8 << 20
    """Maximum size of a JSON body in bytes. Parsing it blocks the gateway's other requests for at most a second."""
    max_lists: ClassVar[int] = 1 << 20
    """Maximum number of lists and objects in a body. Brackets in strings count, too."""
    errors: ClassVar[tuple[type[RolloutServiceError], ...]] = (RolloutServiceError, NotReady)
    """Error replies of every such route, in addition to those of each route."""

    def __init__(self, path: str, endpoint: Callable[..., object], **options: Any) -> None:
        """Create the route, and add ``errors`` to its documentation."""
        errors = self.errors
        if {"POST", "PUT"}.intersection(options.get("methods") or ()):
            errors = (*errors, MalformedRequest, PayloadTooLarge)
        options["responses"] = {**documented(*errors), **(options.get("responses") or {})}
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[object, None, Response]]:
        """Return the function that answers requests. FastAPI calls this."""
        handle = super().get_route_handler()

        async def handle_checked(request: Request) -> Response:
            self.admit(request)
            if self.body_field is not None:
                body = await read_body(request, self.body_bytes)
                self.check_body(request, body)
                value = _parse(request, body) if body else None
                if isinstance(value, dict):
                    value = _validate(request, self.body_field.field_info.annotation, value)
                request = _ReadRequest(request, body, value)
            return await handle(request)

        return handle_checked

    def admit(self, request: Request) -> None:
        """Raise an error if the caller may not call this route."""

    def check_body(self, request: Request, body: bytes) -> None:
        """Raise PayloadTooLarge for too many lists: 8 MiB of ``[],`` take seconds to parse, and 200 MB of memory."""
        _bound(request, "lists and objects", body.count(b"[") + body.count(b"{"), self.max_lists)


class PromptsRoute(OpenRoute):
    """An open route whose body may hold the prompts of a whole training step."""

    body_bytes = 64 << 20
    """Maximum size of a body in bytes: 1024 prompts of 8000 token ids of up to 8 bytes each."""
    max_strings: ClassVar[int] = 2 << 20
    """Maximum number of strings in a body larger than ``OpenRoute.body_bytes``."""

    def check_body(self, request: Request, body: bytes) -> None:
        """Raise PayloadTooLarge for a body that would take too much memory when parsed."""
        super().check_body(request, body)
        if len(body) > OpenRoute.body_bytes:
            _bound(request, "strings", body.count(b'"') // 2, self.max_strings)


class GuardedRoute(OpenRoute):
    """A weight, control or mismatch route. ``Authorizer`` decides about access."""

    body_bytes = 64 << 20
    """Maximum size of a body in bytes. The table of 200 000 tensors takes half of it."""
    max_lists = 8 << 20
    errors = (*OpenRoute.errors, Unauthorized, Forbidden)

    def admit(self, request: Request) -> None:
        """Raise Unauthorized or Forbidden, or InvalidRequest for a body that browsers send without a CORS preflight."""
        request.app.state.services.authorizer.check(request)
        has_body = "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0"
        if request.method == "POST" and has_body:
            _require_json(request)


class _ReadRequest(Request):
    """A request whose body has been read. FastAPI takes an instance of the route's model as it is."""

    def __init__(self, request: Request, body: bytes, value: object) -> None:
        super().__init__(request.scope, request.receive)
        self._read, self._value = body, value

    async def body(self) -> bytes:
        return self._read

    async def json(self) -> object:
        return self._value


async def read_body(request: Request, limit: int) -> bytes:
    """Return the whole body. Raises PayloadTooLarge above ``limit`` bytes, MalformedRequest if it is cut off."""
    body = bytearray()
    with refuse_cut_off_body(request):
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise PayloadTooLarge(
                    f"{_name(request)}: a body has at most {limit} bytes: send what is in it in several requests",
                    {"limit_bytes": limit},
                )
    return bytes(body)


@contextmanager
def refuse_cut_off_body(request: Request) -> Iterator[None]:
    """Raise MalformedRequest if the client disconnects while its body is read."""
    try:
        yield
    except ClientDisconnect as error:
        raise MalformedRequest(f"{_name(request)}: the body was cut off: send it again") from error


def _bound(request: Request, what: str, number: int, limit: int) -> None:
    if number > limit:
        raise PayloadTooLarge(
            f"{_name(request)}: a body has at most {limit} {what}, and this one has {number}: send what is in it in "
            "several requests",
            {"limit": limit},
        )


def body_of(model: type[BaseModel]) -> dict[str, object]:
    """Return the ``openapi_extra`` of a route that forwards its JSON body without parsing."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _inline_references(model)}}}}


def _inline_references(model: type[BaseModel]) -> object:
    """Return the model's JSON schema without references, which would be resolved against the whole OpenAPI document."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inline(part: object) -> object:
        if isinstance(part, list):
            return [inline(item) for item in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return inline(definitions[part["$ref"].rpartition("/")[2]])
        return {name: inline(item) for name, item in part.items()}

    return inline(schema)


def _parse(request: Request, body: bytes) -> object:
    _require_json(request)
    try:
        text = body.decode()
        value = json.loads(text)
        if "\\ud" in text or "\\uD" in text:
            _require_unicode(request, value)
    except json.JSONDecodeError as error:
        problem: FieldProblem = {"type": "json_invalid", "loc": ("body", error.pos), "msg": error.msg}
        raise validation_error(_name(request), [problem]) from error
    except UnicodeDecodeError as error:
        _refuse_body(request, f"is not UTF-8, at byte {error.start}", error)
    except RecursionError as error:
        _refuse_body(request, "is nested too deeply", error)
    except ValueError as error:  # Python limits the digits of an integer
        _refuse_body(request, f"has a number that is too long ({error})", error)
    return value


def _validate(request: Request, model: Any, value: dict[str, object]) -> object:
    try:
        return fail_fast_validator(model).validate_python(value)
    except ValidationError as error:
        raise validation_error(_name(request), error.errors(include_url=False)) from error


def _refuse_body(request: Request, problem: str, error: Exception) -> NoReturn:
    raise MalformedRequest(f"{_name(request)}: the body {problem}") from error


def _require_json(request: Request) -> None:
    given = request.headers.get("content-type")
    if given is None or not _JSON.match(given):
        raise InvalidRequest(
            f"{_name(request)}: the body must be a JSON object sent with Content-Type: application/json, not {given}",
            {"content_type": given},
        )


def _require_unicode(request: Request, value: object) -> None:
    field = next(_lone_surrogates(value, ()), None)
    if field is not None:
        message = "has half a surrogate pair, which is no character: send Unicode text"
        raise validation_error(_name(request), [{"type": "string_unicode", "loc": field, "msg": message}])


def _lone_surrogates(value: object, field: tuple[int | str, ...]) -> Iterator[tuple[int | str, ...]]:
    if isinstance(value, str):
        if _LONE_SURROGATE.search(value):
            yield field
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _lone_surrogates(name, (*field, ascii(name)))
            yield from _lone_surrogates(item, (*field, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _lone_surrogates(item, (*field, index))


def _name(request: Request) -> str:
    return f"{request.method} {request.url.path}"
