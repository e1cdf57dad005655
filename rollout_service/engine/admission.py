"""Admission of requests: a limit on the sequences that a replica holds, and on sessions by the KV cache's memory.

Serve's ``max_ongoing_requests`` cannot limit the sequences. It queues calls instead of refusing them, so a replica full
of paused rollouts would block the calls that resume it.

vLLM keeps the keys and values of a finished turn only until other requests need their blocks. If more sessions run than
fit into the cache, every turn computes its whole conversation again. A replica therefore admits a turn only if it fits
into the cache beside all sessions that began before its own:

- Sessions have the order of their first calls. The oldest one is always admitted, so none waits forever.
- A running turn is never interrupted. Sessions wait between turns, the youngest first, and continue before new ones.
- A session holds its memory while its tool runs, but no longer than the engine needs to compute the whole cache. Until
  then, holding costs less than computing its conversation again (the ski-rental rule). It then gives its memory away,
  and continues before younger sessions.
- No session waits if a turn and a tool together usually take longer than that: computing every conversation again would
  then make more turns per second than the few sessions that fit.
- Calls without a session are never refused here, but the memory of those that arrived earlier counts. Neither are
  sessions refused while none has had a second turn: there is nothing to keep.

The expected tokens may be wrong, so the part of the cache that sessions may fill shrinks when vLLM preempts requests,
and grows while it does not (additive increase, multiplicative decrease).
"""

import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rollout_service.engine.load_statistics import SchedulerLog
from rollout_service.errors import KVCacheFull, Overloaded
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import GenerateCall
from rollout_service.runtime.recent import remember

MAX_SESSIONS = 100_000
"""Maximum number of sessions that are remembered; the least recently used one is dropped, and begins anew."""
WAITING_S = 2.0
"""Time in seconds for which a refused session keeps its place. The gateway sends it again several times a second."""
DECREASE, MIN_SHARE = 0.8, 0.25
"""Factor of the window at a preemption, and its minimum as a share of the cache."""
DECREASE_PERIOD_S = 5.0
"""Minimum time in seconds between two decreases, in which the sessions of the first one leave."""
INCREASE_PER_S = 0.01
"""Growth of the window as a share of the cache per second."""


class AdmissionLimit:
    """Counts the sequences in flight."""

    def __init__(self, limit: int, share: int = 0) -> None:
        """Create the limit. ``share``: the number of sequences guaranteed to each gateway."""
        self._limit, self._share = limit, share
        self.running = 0
        """Number of admitted sequences without an answer."""
        self._by_origin: Counter[str] = Counter()

    def by_origin(self) -> dict[str, int]:
        """Return ``running`` by gateway."""
        return dict(self._by_origin)

    @contextmanager
    def admit(self, sequences: int, origin: str = "") -> Iterator[None]:
        """Count ``sequences`` of the gateway ``origin`` as running. Raises Overloaded at the limit.

        One free place admits a request of any size. A large request that needed all its places at once would starve
        behind small ones.
        """
        if self.running >= self._limit and self._by_origin.get(origin, 0) >= self._share:
            raise Overloaded(
                f"this replica holds {self.running} of {self._limit} sequences and {sequences} more were asked for: "
                "the gateway's queue sends them again when others have ended",
                {"running": self.running, "limit": self._limit, "asked": sequences},
            )
        self.running += sequences
        self._by_origin[origin] += sequences
        try:
            yield
        finally:
            self.running -= sequences
            self._by_origin[origin] -= sequences
            if not self._by_origin[origin]:
                del self._by_origin[origin]


class _Mean:
    """A mean of the last values. ``weight``: minimum weight of the newest one, as in TCP's round-trip time (RFC
    6298)."""

    def __init__(self, weight: float = 1 / 8) -> None:
        self._weight, self._count, self.value = weight, 0, 0.0

    def __bool__(self) -> bool:
        return self._count > 0

    def add(self, value: float) -> None:
        self._count += 1
        self.value += max(self._weight, 1 / self._count) * (value - self.value)


class _ToolTimes:
    """Times in seconds between the turns of sessions."""

    def __init__(self) -> None:
        self._mean, self._deviation = _Mean(), _Mean(1 / 4)

    def add(self, seconds: float) -> None:
        self._deviation.add(abs(seconds - self._mean.value) if self._mean else seconds / 2)
        self._mean.add(seconds)

    def hold_s(self, turn_s: float, limit_s: float) -> float:
        """Return the time for which a session should hold its memory: nearly all return within TCP's timeout.

        Returns 0 if turns with their tools take longer than the limit, and before the first session has returned.

        Args:
            turn_s: time that a turn takes.
            limit_s: time after which computing a session again costs less.
        """
        mean = self._mean.value
        return 0.0 if mean + turn_s > limit_s else min(mean + 4 * self._deviation.value, limit_s)


class SessionTurn:
    """A running call."""

    def __init__(self) -> None:
        self.cached_tokens = 0
        """Number of the prompt's tokens that the prefix cache had."""
        self.completion_tokens = 0
        """Number of tokens of all completions; 0: the call failed, or goes on elsewhere."""

    def note_cached(self, tokens: int) -> None:
        """Set ``cached_tokens``."""
        self.cached_tokens = tokens

    def end(self, completions: Sequence[Completion]) -> None:
        """Set ``completion_tokens``."""
        if all(completion.finish_reason != "abort" for completion in completions):
            self.completion_tokens = sum(len(completion.token_ids) for completion in completions)


class _Holder:
    """A session, or one call without a session, and the KV-cache tokens that it needs beside others."""

    def __init__(self, arrival: int) -> None:
        self.arrival = arrival
        self.calls, self.turns = 0, 0
        """Number of its running and of its finished calls."""
        self.shared = 0
        """Tokens of its prompts that are other sessions', such as a system prompt."""
        self.completion = _Mean()
        """Tokens of a completion."""
        self._running = self._held = self._asked = 0.0
        self._idle_since = self._asked_at = -float("inf")
        self._returned_at: float | None = None
        """Time of the first refusal since its last turn."""

    def begin(self, tokens: float, now: float) -> float | None:
        """Begin a call. Return the time in seconds since the last one, without waiting; None: another one runs."""
        gap = (now if self._returned_at is None else self._returned_at) - self._idle_since
        is_first_or_parallel = self.calls > 0 or self.turns == 0
        self._asked_at, self._returned_at = -float("inf"), None
        self.calls += 1
        self._running += tokens
        return None if is_first_or_parallel else gap

    def wait(self, tokens: float, now: float) -> None:
        self._asked, self._asked_at = tokens, now
        if self._returned_at is None:
            self._returned_at = now

    def end(self, tokens: float, held: float | None, now: float) -> None:
        self.calls -= 1
        self._running -= tokens
        self._idle_since = now
        if held is not None:
            self._held = held

    def tokens(self, now: float, hold_s: float) -> float:
        """Return the tokens that younger sessions leave to it; 0 once it has given its memory away."""
        if self.calls:
            return self._running
        if now - self._asked_at <= WAITING_S:
            return self._asked
        # a session of one turn may be a rollout that a trainer has named
        return self._held if self.turns > 1 and now - self._idle_since <= hold_s else 0.0


class SessionAdmission:
    """Counts the KV-cache tokens of sessions, and refuses turns that do not fit."""

    def __init__(self, capacity: int, statistics: SchedulerLog, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            capacity: size of the KV cache in tokens.
            statistics: of the engine.
            clock: in seconds.
        """
        self._capacity, self._statistics, self._clock = capacity, statistics, clock
        self._arrivals = itertools.count()
        self._sessions: OrderedDict[str, _Holder] = OrderedDict()
        self._counted: dict[int, _Holder] = {}
        """Holders that may need tokens, by arrival."""
        self._tool_times, self._completion, self._shared = _ToolTimes(), _Mean(), _Mean()
        self._share, self._updated_at, self._decreased_at = 1.0, clock(), -float("inf")
        self._seen_preemptions = 0

    @contextmanager
    def admit(self, call: GenerateCall) -> Iterator[SessionTurn]:
        """Count the call's tokens until the block ends. Raises KVCacheFull if its session must wait."""
        now, holder = self._clock(), self._holder(call.session_id)
        tokens = self._expected_tokens(call, holder)
        if call.session_id is not None and self._hold_s():
            self._require_room(holder, tokens, now)
        self._counted[holder.arrival] = holder
        gap = holder.begin(tokens, now)
        if gap is not None and not call.partial_tokens:  # else the rest of a completion, which no tool came before
            self._tool_times.add(gap)
        turn = SessionTurn()
        try:
            yield turn
        finally:
            self._end(call, holder, tokens, turn)

    def window(self) -> float:
        """Return the number of tokens that sessions may fill."""
        now, capacity, preemptions = self._clock(), self._capacity, self._statistics.preemptions
        if preemptions > self._seen_preemptions:
            if now - self._decreased_at >= DECREASE_PERIOD_S:
                # less than what is there now, even if that was below the window
                there = self._sum(now, before=None) / capacity
                self._share = max(MIN_SHARE, DECREASE * min(self._share, there))
                self._decreased_at = now
        else:
            self._share = min(1.0, self._share + INCREASE_PER_S * (now - self._updated_at))
        self._seen_preemptions, self._updated_at = preemptions, now
        return self._share * capacity

    def _require_room(self, holder: _Holder, tokens: float, now: float) -> None:
        older, window = self._sum(now, before=holder.arrival), self.window()
        if not older or older + tokens <= window:
            return
        holder.wait(tokens, now)
        self._counted[holder.arrival] = holder
        raise KVCacheFull(
            f"the KV cache has {window:.0f} tokens for sessions; older ones have {older:.0f}, and this turn needs "
            f"{tokens:.0f}: the gateway's queue sends it again when they have ended",
            {"window": round(window), "older": round(older), "asked": round(tokens)},
        )

    def _sum(self, now: float, before: int | None) -> float:
        """Return the tokens of all holders, or of those that arrived before ``before``."""
        total, hold_s = 0.0, self._hold_s()
        for arrival, holder in list(self._counted.items()):
            tokens = holder.tokens(now, hold_s)
            if before is None or arrival < before:
                total += tokens
            if not tokens and not holder.calls:
                del self._counted[arrival]
        return total

    def _hold_s(self) -> float:
        speed, turn_s = self._statistics.prefill_tokens_per_s, self._completion.value * self._statistics.decode_step_s
        return self._tool_times.hold_s(turn_s, self._capacity / speed if speed else float("inf"))

    def _holder(self, session: str | None) -> _Holder:
        if session is None:
            return _Holder(next(self._arrivals))
        holder = self._sessions.get(session) or _Holder(next(self._arrivals))
        remember(self._sessions, session, holder, MAX_SESSIONS)
        return holder

    def _expected_tokens(self, call: GenerateCall, holder: _Holder) -> float:
        """Return the mean number of tokens of the call while it runs: its own prompt, and half of its completions."""
        prompt = len(call.prompt_token_ids)
        own = prompt - holder.shared if holder.turns else prompt * (1 - self._shared.value)
        known = holder.completion if holder.turns else self._completion
        completion = min(known.value, call.sampling.max_tokens or float("inf"))
        return max(own, 0.0) + call.sampling.n * completion / 2

    def _end(self, call: GenerateCall, holder: _Holder, tokens: float, turn: SessionTurn) -> None:
        now, prompt, held = self._clock(), len(call.prompt_token_ids), None
        if turn.completion_tokens:
            if holder.turns == 0:
                holder.shared = turn.cached_tokens
                self._shared.add(turn.cached_tokens / prompt)
            holder.turns += 1
            for mean in (holder.completion, self._completion):
                mean.add(turn.completion_tokens / call.sampling.n)
            held = max(prompt - holder.shared, 0) + turn.completion_tokens
        holder.end(tokens, held, now)
        if not holder.calls and not holder.tokens(now, self._hold_s()):
            self._counted.pop(holder.arrival, None)
