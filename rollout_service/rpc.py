"""Questions to the ingest, from replicas."""

from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from rollout_service.errors import NotReady, RolloutServiceError

RAY_FAILURES = (RayError, RayServeException)
"""The ingest is away, or answered with an error."""


async def ask(ingest: Any, method: str, *args: object) -> Any:
    """The answer of the ingest, whose handle is ``ingest``. Raises its errors, and NotReady if it is away."""
    try:
        return await getattr(ingest, method).remote(*args)
    except RayTaskError as error:
        if isinstance(error.cause, RolloutServiceError):
            raise error.cause from None
        raise unreachable(error) from error
    except RAY_FAILURES as error:
        raise unreachable(error) from error


def unreachable(error: Exception) -> NotReady:
    """What is said of an ingest that does not answer."""
    return NotReady(f"the ingest, which has the log, does not answer: {error}")
