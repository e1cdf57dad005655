"""Every error the service raises, and the HTTP status each becomes (a table in docs/http.md).

Between processes errors are pickled; HTTP has ``{"error": {"type", "message", "detail"}}``, from which ``from_wire``
creates the same class on the client.
"""

from collections.abc import Mapping
from typing import ClassVar

LONGEST_REASON = 2000
"""Maximum length of a reason in characters; a list of a thousand tensors is truncated."""
LONGEST_MESSAGE = 1 << 14
"""Maximum length of an error's message in characters."""


class RolloutServiceError(Exception):
    """Base of the tree. ``message`` has the error, the reason and a remedy; ``detail`` has names and numbers."""

    http_status: ClassVar[int] = 500
    retry_after_s: ClassVar[float | None] = None

    def __init__(self, message: str, detail: Mapping[str, object] | None = None) -> None:
        message = shorten(message, LONGEST_MESSAGE)  # it may quote a request, and is also logged
        super().__init__(message, detail)
        self.message = message
        self.detail = dict(detail or {})

    def __str__(self) -> str:
        return self.message

    def to_wire(self) -> dict[str, object]:
        """Return the JSON body of the HTTP reply."""
        return {"error": {"type": type(self).__name__, "message": self.message, "detail": self.detail}}


class InvalidRequest(RolloutServiceError):
    """The request is well-formed, but the service cannot do it."""

    http_status = 422


class InvalidManifest(InvalidRequest):
    """Names, shapes, dtypes or layout of a version differ from the served model's."""


class QuantizationError(InvalidRequest):
    """A tensor that cannot be quantized."""


class DigestMismatch(InvalidRequest):
    """Bytes do not hash to the digest sent with them."""


class InvalidDelta(InvalidRequest):
    """The changes of a tensor cannot be decoded, or result in another tensor than announced."""


class BadRequest(InvalidRequest):
    """The service cannot do it; on a route that OpenAI or Anthropic define."""

    http_status = 400


class ContextTooLong(BadRequest):
    """A prompt and its completion do not fit the model's context.

    Status and the words "maximum context length" are those of OpenAI's API and of vLLM, by which clients recognize the
    end of a conversation.
    """


class MalformedRequest(RolloutServiceError):
    """The body is not JSON, or is cut off."""

    http_status = 400


class Unauthorized(RolloutServiceError):
    """The bearer token is missing or wrong."""

    http_status = 401


class Forbidden(RolloutServiceError):
    """A caller or a path that is not allowed here."""

    http_status = 403


class NotFound(RolloutServiceError):
    """No such version, part or route."""

    http_status = 404


class VersionConflict(RolloutServiceError):
    """Other bytes under the same version, or a version that is not newer than the newest."""

    http_status = 409


class DeltaBaseGone(RolloutServiceError):
    """The base version of a delta is not in the log, or differs: push a whole version."""

    http_status = 409


class UploadIncomplete(RolloutServiceError):
    """A commit before every part arrived."""

    http_status = 409


class NotShared(RolloutServiceError):
    """The ingest cannot open a trainer's memory: send the bytes instead. The trainer is on another machine, or in
    another container, or another user."""

    http_status = 409


class Overtaken(RolloutServiceError):
    """Another pause, resume, sleep or wake-up was requested before every replica had completed this one."""

    http_status = 409


class MemoryTaken(RolloutServiceError):
    """An engine should wake, but the memory that it released is in use: names the process and the size."""

    http_status = 503


class Asleep(RolloutServiceError):
    """The engines have released their memory, and must first be woken."""

    http_status = 409


class WeightTransferFailed(RolloutServiceError):
    """A trainer's broadcast cannot be received or committed. Never 5xx, which trainers send again."""

    http_status = 409


class PayloadTooLarge(RolloutServiceError):
    """A part larger than its declared size."""

    http_status = 413


class SampleGone(RolloutServiceError):
    """A sample of Tinker's SDK that this gateway does not have: the SDK sends it again."""

    http_status = 410


class TooManySamples(RolloutServiceError):
    """This gateway keeps no more samples of Tinker's SDK: the SDK sends it again."""

    http_status = 429
    retry_after_s = 1.0


class TooEarly(RolloutServiceError):
    """No replica serves the requested version yet."""

    http_status = 425
    retry_after_s = 1.0


class VersionNotServed(TooEarly):
    """No replica serves the version in ``weight_version``: ``detail.live`` has the version of each replica."""

    http_status = 409


class Overloaded(RolloutServiceError):
    """A memory limit is reached: retry later. From a replica: it is full, and the gateway keeps the call in its
    queue."""

    http_status = 503
    retry_after_s = 1.0


class KVCacheFull(Overloaded):
    """Older sessions need the memory of a replica's KV cache: the gateway keeps the turn in its queue."""


class NotReady(RolloutServiceError):
    """The service is still starting, or no replica is live."""

    http_status = 503
    retry_after_s: ClassVar[float | None] = 2.0


class ControlTimeout(NotReady):
    """Not every replica has obeyed a pause, resume, sleep or wake-up in time."""

    retry_after_s = None  # clients would repeat the call, which may undo a later one


class DeploymentFailed(NotReady):
    """A process of the service failed with an unexpected error: a bug, or a broken machine."""

    http_status = 500


class LogUnreadable(NotReady):
    """The file system could not read the weight log just now, and may be able to in a moment."""


class LogLocked(RolloutServiceError):
    """Another process writes this weight log."""

    http_status = 503


class InsufficientStorage(RolloutServiceError):
    """The disk has no room for the upload; staged parts stay."""

    http_status = 507


class CommitTimeout(RolloutServiceError):
    """The version is committed, but was not live on every replica in time."""

    http_status = 504


class LogCorrupt(RolloutServiceError):
    """The weight log on disk does not match its manifest."""


class NonFiniteLogprob(RolloutServiceError):
    """The engine sampled a token whose logprob is not finite."""


class KVCacheUnfit(RolloutServiceError):
    """FP8 is not accurate enough for the model's keys or values, with any scale."""


class EngineFailed(RolloutServiceError):
    """vLLM died or an update left it unusable."""


def error_classes() -> dict[str, type[RolloutServiceError]]:
    """Return every class of the tree by name."""
    found: dict[str, type[RolloutServiceError]] = {}
    pending: list[type[RolloutServiceError]] = [RolloutServiceError]
    while pending:
        cls = pending.pop()
        found[cls.__name__] = cls
        # Ray creates subclasses of its own when it passes errors between processes
        pending.extend(sub for sub in cls.__subclasses__() if sub.__module__ == __name__)
    return found


def from_wire(status: int, body: object) -> RolloutServiceError:
    """Convert an HTTP reply to an error.

    A reply of another origin (a proxy's HTML page, for example) becomes a ``RolloutServiceError`` that quotes it.
    """
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or "message" not in error:
        return RolloutServiceError(f"HTTP {status}: {str(body)[:500]}", {"status": status})
    cls = error_classes().get(str(error.get("type")), RolloutServiceError)
    detail = error.get("detail")
    return cls(str(error["message"]), detail if isinstance(detail, dict) else {})


def shorten(reason: str, limit: int = LONGEST_REASON) -> str:
    """Truncate a reason to at most ``limit`` characters: its beginning and its end."""
    half = limit // 2 - 2
    return reason if len(reason) <= limit else f"{reason[:half]} … {reason[-half:]}"
