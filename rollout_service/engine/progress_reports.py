"""Progress of each gateway's calls, read from the engine when the gateway asks.

Engine steps do no extra work, and nothing is buffered. A call's tokens are in vLLM's own request state; this module
keeps only how many the gateway has. A call that ends before the gateway asks costs one dictionary entry.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollout_service.protocol.progress import Piece, ProgressAsk, ProgressReply
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import GenerateCall

PERIOD_S = 0.4
"""Seconds between two answers to a gateway. About this much work is lost when a replica dies."""
LIVE_PERIOD_S = 0.1
"""Seconds between two answers for calls that a client streams."""
_LIVE_PERIODS = round(PERIOD_S / LIVE_PERIOD_S)
QUIET_PERIODS = 5
"""Maximum number of periods before an empty answer. A paused engine produces nothing for a while."""
MAX_TOKENS = 1 << 16
"""Approximate maximum of tokens per answer; the rest follows in the next answer."""

ReadTokens = Callable[[str, Sequence[int], int], list[Completion]]
"""The signature of ``EngineAdapter.tokens_since``."""


@dataclass
class _Call:
    """A running call."""

    engine_id: str
    candidates: int
    live: bool
    sent: list[int]
    """Number of tokens of each completion sent in answers."""
    acknowledged: list[int]
    """Number of tokens of each completion in acknowledged answers."""
    ends_sent: set[int] = field(default_factory=set)
    """Completions whose end was sent in an answer."""
    ends_acknowledged: set[int] = field(default_factory=set)

    def settle(self, arrived: bool) -> None:
        """Mark the last answer as arrived, or reset to the acknowledged state so that it is sent again."""
        if arrived:
            self.acknowledged, self.ends_acknowledged = list(self.sent), set(self.ends_sent)
        else:
            self.sent, self.ends_sent = list(self.acknowledged), set(self.ends_acknowledged)


@dataclass
class _Gateway:
    """A gateway with calls on this replica."""

    calls: dict[int, _Call] = field(default_factory=dict)
    answer: int = 0
    """Number of the last answer."""
    periods: int = 0
    """Periods of ``LIVE_PERIOD_S`` since calls without a streaming client were last read."""


class ProgressReports:
    """The progress of all calls of one replica."""

    def __init__(self, read: ReadTokens, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Create the tracker. ``sleep``: waits for the given seconds."""
        self._read, self._sleep = read, sleep
        self._gateways: dict[str, _Gateway] = {}
        self._engine_ids: set[str] = set()
        self._copies, self._answers = itertools.count(2), itertools.count(1)

    @contextmanager
    def follow(self, call: GenerateCall) -> Iterator[str]:
        """Track a running call. Yields its unique name in the engine."""
        name = call.request_id
        while name in self._engine_ids:  # callers choose the names, so they may repeat
            name = f"{call.request_id}-again-{next(self._copies)}"
        self._engine_ids.add(name)
        gateway = self._gateways.setdefault(call.origin, _Gateway()) if call.number else None
        if gateway is not None:
            sampling = call.sampling
            gateway.calls[call.number] = _Call(
                name, sampling.logprobs or 0, call.live, [0] * sampling.n, [0] * sampling.n
            )
        try:
            yield name
        finally:
            self._engine_ids.discard(name)
            if gateway is not None:
                del gateway.calls[call.number]
                if not gateway.calls:
                    self._gateways.pop(call.origin, None)

    async def report(self, ask: ProgressAsk) -> ProgressReply:
        """Return the new tokens for a gateway. Waits up to ``QUIET_PERIODS`` periods for the first."""
        pieces: list[Piece] = []
        for _ in range(QUIET_PERIODS):
            gateway = self._gateways.get(ask.origin, _Gateway())
            live = any(call.live for call in gateway.calls.values())
            await self._sleep(LIVE_PERIOD_S if live else PERIOD_S)
            gateway = self._gateways.get(ask.origin, _Gateway())
            for call in gateway.calls.values():
                call.settle(arrived=ask.acknowledged == gateway.answer)
            gateway.periods += 1 if live else _LIVE_PERIODS
            is_everybodys_turn = gateway.periods >= _LIVE_PERIODS
            if is_everybodys_turn:
                gateway.periods = 0
            pieces = self._pieces(gateway, is_everybodys_turn)
            if pieces or not gateway.calls:
                break
        gateway.answer = next(self._answers)
        return ProgressReply(number=gateway.answer, pieces=tuple(pieces))

    def _pieces(self, gateway: _Gateway, is_everybodys_turn: bool) -> list[Piece]:
        pieces, tokens = list[Piece](), 0
        for number, call in list(gateway.calls.items()):
            if tokens >= MAX_TOKENS:
                break
            if not (call.live or is_everybodys_turn):
                continue
            for made in self._read(call.engine_id, call.sent, call.candidates):
                ended = made.finish_reason != "abort"
                if not made.token_ids and (not ended or made.index in call.ends_sent):
                    continue
                pieces.append(Piece(call=number, start=call.sent[made.index], made=made))
                call.sent[made.index] += len(made.token_ids)
                tokens += len(made.token_ids)
                if ended:
                    call.ends_sent.add(made.index)
        return pieces
