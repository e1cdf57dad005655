"""Error replies of SGLang's routes: 400 instead of 422, and ``success`` and ``message`` on control routes."""

from collections.abc import Callable, Coroutine
from typing import ClassVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel

from rollout_service.errors import Forbidden, InvalidRequest, MalformedRequest, RolloutServiceError, Unauthorized
from rollout_service.gateway.routes import GuardedRoute, OpenRoute, PromptsRoute
from rollout_service.gateway.update_weights import is_worth_repeating
from rollout_service.web.errors import error_response, validation_error


class _SglangRoute(OpenRoute):
    """A route that answers its own errors."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[object, None, Response]]:
        """Return the function that answers requests. FastAPI calls this."""
        handle = super().get_route_handler()

        async def handle_errors(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                return self.refusal(validation_error(f"{request.method} {request.url.path}", error.errors()))
            except RolloutServiceError as error:
                return self.refusal(error)

        return handle_errors

    def refusal(self, error: RolloutServiceError) -> Response:
        """Return the reply to a request that failed."""
        raise NotImplementedError


class DataRoute(_SglangRoute, PromptsRoute):
    """An open route that answers 400 for invalid requests, as SGLang does."""

    errors = (*PromptsRoute.errors, MalformedRequest)

    def refusal(self, error: RolloutServiceError) -> Response:
        """Return the error with status 400 for 422."""
        reply = error_response(error)
        if isinstance(error, InvalidRequest):
            reply.status_code = 400
        return reply


class ControlRoute(_SglangRoute, GuardedRoute):
    """A guarded route whose errors have ``success: false`` and ``message``, in addition to this service's format."""

    errors = (*GuardedRoute.errors, MalformedRequest)
    waits_s: ClassVar[float] = 600.0
    """Maximum seconds to wait until the fleet has obeyed."""

    def refusal(self, error: RolloutServiceError) -> Response:
        """Return the error in both formats."""
        kept = isinstance(error, Unauthorized | Forbidden) or is_worth_repeating(error)
        reply = error_response(error, success=False, message=error.message)
        if not kept:
            reply.status_code = 400
        return reply


class Done(BaseModel):
    """The reply of SGLang's control routes."""

    status: str = "ok"
    message: str


class Success(BaseModel):
    """The reply of SGLang's weight-update routes."""

    success: bool = True
    message: str
