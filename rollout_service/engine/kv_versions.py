"""Weight versions of the keys and values that an engine's requests read, with ``weights.kv_cache_on_update: keep``.

A request begins with the version that the engine serves. Requests of one session begin with the session's version, so
that each turn reuses the keys and values of earlier turns. All state belongs to one engine, because KV caches do: a
completion that another replica continues begins there with that replica's version.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollout_service.compat.vllm_scheduler import is_too_old, salted
from rollout_service.protocol.rollout import Completion, Span
from rollout_service.runtime.recent import remember

MAX_SESSIONS = 100_000
"""Maximum number of sessions that are remembered; the least recently used one is dropped, and begins anew."""


@dataclass
class _Request:
    """A running request."""

    session: str | None
    begun: int
    """The version in its ``cache_salt``."""
    kv_from: dict[int, int] = field(default_factory=dict)
    """Weight version → a bound for the tokens that it samples: they read no keys and values of older versions."""


class KVVersions:
    """The versions with which an engine's running requests and sessions began."""

    def __init__(self, max_age: int | None) -> None:
        """``max_age``: see ``KVVersions.max_age``."""
        self.max_age = max_age
        """Maximum age of keys and values, in versions, from the next load on. None: unbounded."""
        self._version = 0
        self._emptied_at = 0
        """The version that was the first to write into the cache after the cache was last dropped."""
        self._requests: dict[str, _Request] = {}
        self._sessions: OrderedDict[str, int] = OrderedDict()

    @contextmanager
    def follow(self, name: str, session: str | None, salt: str | None) -> Iterator[str]:
        """Track a request until its end. Yields its ``cache_salt`` for vLLM.

        Args:
            name: the request's unique name.
            session: the session to which it belongs.
            salt: the client's own salt.
        """
        begun = self._version if session is None else self._session_version(session)
        request = self._requests[name] = _Request(session, begun)
        self._note_bound(request)
        try:
            yield salted(begun, salt)
        finally:
            del self._requests[name]

    def load(self, version: int, is_empty: bool) -> None:
        """Record that the engine loads ``version``. Call before the load, together with ``begin_version``.

        ``is_empty``: True if the KV cache was dropped, so that all running requests compute theirs again.
        """
        self._version = version
        if is_empty:
            self._emptied_at = version
        for request in self._requests.values():
            if is_too_old(request.begun, version, self.max_age):  # the scheduler decides by the salt, too
                request.begun = version
                if request.session is not None:
                    remember(self._sessions, request.session, version, MAX_SESSIONS)
            self._note_bound(request)

    def emptied(self) -> None:
        """Record that the KV cache was dropped, and that the served version writes into it next."""
        self._emptied_at = self._version

    def on(self, name: str, completions: Iterable[Completion]) -> tuple[Completion, ...]:
        """Return completions of a running request, with ``kv_from`` in the spans whose keys and values are older."""
        request = self._requests.get(name)
        if request is None:
            return tuple(completions)
        return tuple(
            each.model_copy(update={"spans": tuple(_with_kv_from(span, request.kv_from) for span in each.spans)})
            for each in completions
        )

    def _note_bound(self, request: _Request) -> None:
        """Record the bound for the tokens that the served version samples from now on."""
        bound = max(request.begun, self._emptied_at)
        request.kv_from[self._version] = min(bound, request.kv_from.get(self._version, bound))

    def _session_version(self, session: str) -> int:
        begun = self._sessions.get(session, self._version)
        if is_too_old(begun, self._version, self.max_age):
            begun = self._version
        remember(self._sessions, session, begun, MAX_SESSIONS)
        return begun


def _with_kv_from(span: Span, kv_from: dict[int, int]) -> Span:
    oldest = kv_from.get(span.version, min(kv_from.values()))
    return span.model_copy(update={"kv_from": oldest}) if oldest < span.version else span
