"""Which replica gets a call: one with the version it asks for and room, its session's, else one that had a prompt with
the same beginning, else the least loaded.

What replicas publish is seconds old, so the router only prefers: the replica itself checks the version and refuses
what it cannot do, and the gateway sends the call on. The router never waits either: Serve routes with a few tasks, and
a call that waited in one for its version would hold up all others. What has to wait does so in the gateway
(``fleet/queue.py``), which hears from the router when there are other replicas, or when there is room.

Serve ships this module to the gateway by value: as it is loaded, it imports nothing but the standard library and Ray.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

if TYPE_CHECKING:
    from rollout_service.protocol.sampling import GenerateCall

STATS_PERIOD_S = 1.0
"""How often Serve asks replicas for their routing stats."""
MOST_SESSIONS = 100_000
"""Sessions that a gateway remembers; the one that was silent longest goes first."""
PREFIX_TOKENS = 512
"""Prompts that begin alike for so many tokens, or a multiple, are kept together: their replica has computed that part,
and has it in memory once."""
MOST_PREFIX_TOKENS = 64 * PREFIX_TOKENS
"""Of one prompt, that are looked at."""
MOST_PREFIXES = 100_000
"""Beginnings of prompts that a gateway remembers; the one that was silent longest goes first."""
UNEVEN_SHARE = 4
"""A beginning's replica is left once it has more than the least loaded one by a capacity's part: a quarter."""
NEVER_SENT_S = 60.0
"""A call that was cancelled between choice and sending is never reported as done; after this it counts no more."""

_Key = TypeVar("_Key")
_LAST_RESORT = {"stale": 1, "asleep": 2, "draining": 2, "starting": 2, "failed": 3}
"""States that are worse than ``ready`` and ``syncing``, by how much."""


@dataclass(frozen=True)
class Candidate:
    """What is known of one replica."""

    replica_id: str
    version: int | None = None
    """None: it has published nothing yet, and a replica starts at the newest version."""
    state: str = "ready"
    load: int = 0
    """Sequences in flight."""
    turn: int = 0
    """When it was last chosen, counted in choices."""
    capacity: int = 0
    """Sequences that it decodes at once; 0: not known."""
    is_full: bool = False
    """It would refuse a call: it holds as many sequences as it may."""


def ranked(
    candidates: Collection[Candidate],
    *,
    min_version: int | None = None,
    session_replica: str | None = None,
    prefix_replica: str | None = None,
    sequences: int = 1,
    avoid: Collection[str] = (),
) -> list[str]:
    """Ids of all candidates, the best first; ``sequences``: of the call.

    A sound one before a failing one, one that the call has not failed on yet, one with the version, one that is not
    full, the session's, the one that had the prompt's beginning if it decodes it at once, the one with the fewest
    sequences, the one that was chosen longest ago: sessions that begin on an idle fleet spread.
    """
    least = min((candidate.load for candidate in candidates), default=0)

    def begins_alike(candidate: Candidate) -> bool:
        has_room = candidate.load + sequences <= candidate.capacity
        is_even = candidate.load <= least + candidate.capacity // UNEVEN_SHARE
        return candidate.replica_id == prefix_replica and has_room and is_even

    def cost(candidate: Candidate) -> tuple[bool, bool, bool, int, bool, bool, bool, int, int, str]:
        behind = min_version is not None and candidate.version is not None and candidate.version < min_version
        return (
            candidate.state == "failed",
            candidate.replica_id in avoid,
            behind,
            _LAST_RESORT.get(candidate.state, 0),
            candidate.is_full,
            candidate.replica_id != session_replica,
            not begins_alike(candidate),
            candidate.load,
            candidate.turn,
            candidate.replica_id,
        )

    return [candidate.replica_id for candidate in sorted(candidates, key=cost)]


def prefixes(prompt: Sequence[int], salt: str | None = None) -> tuple[int, ...]:
    """Numbers for the prompt's beginnings of ``PREFIX_TOKENS`` and its multiples, the longest first.

    The same in one process for the same tokens and ``salt``, what the prefix cache keeps apart; a shorter prompt has
    none.
    """
    found, number = list[int](), hash(salt)
    for end in range(PREFIX_TOKENS, min(len(prompt), MOST_PREFIX_TOKENS) + 1, PREFIX_TOKENS):
        number = hash((number, *prompt[end - PREFIX_TOKENS : end]))
        found.append(number)
    return tuple(reversed(found))


@dataclass
class _Sent:
    replica_id: str
    sequences: int
    chosen_at: float
    prefixes: tuple[int, ...] = ()
    arrived: bool = False


class Ledger:
    """What this router has in flight where, what others have there, and where sessions and prompts went last.

    Serve tells of the end of calls on threads of Ray, hence the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._sent: dict[str, _Sent] = {}
        self._own: dict[str, int] = {}
        self._reports: dict[str, Mapping[str, int]] = {}
        """Replica → its sequences by the gateway that sent them."""
        self.origin = ""
        """The gateway that this router is in: what it has in flight is counted here, and not seconds later."""
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._prefixes: OrderedDict[int, str] = OrderedDict()
        self._turns: dict[str, int] = {}
        self._choices = 0

    def choose(
        self,
        call_id: str,
        replica_id: str,
        sequences: int,
        session: str | None,
        now: float,
        begins: tuple[int, ...] = (),
    ) -> None:
        """Count a call as in flight from the moment of choice: the next choice may come before it is sent.

        ``begins``: the ``prefixes`` of its prompt.
        """
        with self._lock:
            self.complete(call_id)
            self._sent[call_id] = _Sent(replica_id, sequences, now, begins)
            self._own[replica_id] = self._own.get(replica_id, 0) + sequences
            self._choices += 1
            self._turns[replica_id] = self._choices
            if session is not None:
                _remember(self._sessions, session, replica_id, MOST_SESSIONS)
            for prefix in begins:
                _remember(self._prefixes, prefix, replica_id, MOST_PREFIXES)

    def arrive(self, call_id: str, replica_id: str, session: str | None) -> None:
        """Note which replica took the call."""
        with self._lock:
            sent = self._sent.get(call_id)
            if sent is None:  # it is done already
                return
            if sent.replica_id != replica_id:
                self.choose(call_id, replica_id, sent.sequences, session, sent.chosen_at, sent.prefixes)
            self._sent[call_id].arrived = True

    def complete(self, call_id: str) -> None:
        """A call is over, whatever way."""
        with self._lock:
            sent = self._sent.pop(call_id, None)
            if sent is not None and sent.replica_id in self._own:
                self._own[sent.replica_id] -= sent.sequences

    def report(self, replica_id: str, running: Mapping[str, int]) -> None:
        """Take in a replica's count of all its sequences, by gateway."""
        with self._lock:
            self._reports[replica_id] = running

    def keep_only(self, replica_ids: Collection[str], now: float) -> None:
        """Forget what was in flight on replicas that are gone, and calls that never left."""
        with self._lock:
            for call_id, sent in list(self._sent.items()):
                if sent.replica_id not in replica_ids or (not sent.arrived and now - sent.chosen_at > NEVER_SENT_S):
                    self.complete(call_id)
            for replica_id in {*self._own, *self._reports}.difference(replica_ids):
                self._own.pop(replica_id, None)
                self._reports.pop(replica_id, None)
                self._turns.pop(replica_id, None)

    def load(self, replica_id: str) -> int:
        """Sequences in flight on a replica, as far as is known."""
        return self.own(replica_id) + self.others(replica_id)

    def own(self, replica_id: str) -> int:
        """Sequences of this gateway in flight on a replica."""
        return self._own.get(replica_id, 0)

    def others(self, replica_id: str) -> int:
        """Sequences of other gateways on a replica, as it reported them last."""
        reported = self._reports.get(replica_id, {})
        return sum(n for origin, n in reported.items() if origin != self.origin)

    def turn(self, replica_id: str) -> int:
        """When the replica was last chosen, counted in choices; 0: never."""
        return self._turns.get(replica_id, 0)

    def replica_of(self, session: str | None) -> str | None:
        """Where the session's last call went; that replica may be gone."""
        return None if session is None else self._sessions.get(session)

    def replica_with(self, begins: Iterable[int]) -> str | None:
        """Where the last prompt went that began alike for longest; that replica may be gone."""
        with self._lock:
            return next((self._prefixes[prefix] for prefix in begins if prefix in self._prefixes), None)


def _remember(held: OrderedDict[_Key, str], key: _Key, replica_id: str, most: int) -> None:
    held[key] = replica_id
    held.move_to_end(key)
    if len(held) > most:
        held.popitem(last=False)


class RolloutRouter(RequestRouter):
    """Serve's request router for the engine deployment; calls other than ``generate`` go to the least loaded."""

    # of Serve: how long a replica may take to answer a probe; by default 0.1 s, and a busy machine lost sessions by it
    queue_len_response_deadline_s = 1.0

    def initialize_state(self, limit: int, share: int) -> None:
        """Serve's hook after construction, with ``request_router_kwargs``.

        Args:
            limit: Sequences that a replica holds before it refuses.
            share: The part of them that each gateway has, whatever the other gateways hold.
        """
        self._ledger, self._limit, self._share = Ledger(), limit, share

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica a rank: within a rank Serve would count requests, not sequences."""
        call = _call(pending_request)
        session = getattr(call, "session_id", None)
        self._ledger.origin = getattr(call, "origin", self._ledger.origin)
        begins = () if call is None else prefixes(call.prompt_token_ids, call.cache_salt)
        order = ranked(
            [self._candidate(replica) for replica in candidate_replicas],
            min_version=getattr(call, "min_weight_version", None),
            session_replica=self._ledger.replica_of(session),
            prefix_replica=self._ledger.replica_with(begins),
            sequences=1 if call is None else call.sampling.n,
            avoid=getattr(call, "avoid", ()),
        )
        if call is not None and pending_request is not None and order:
            call_id = pending_request.metadata.internal_request_id
            self._ledger.choose(call_id, order[0], call.sampling.n, session, time.monotonic(), begins)
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if (meant := _meant(pending_request)) in by_id:
            order = [meant]
        return [[by_id[replica_id]] for replica_id in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """Serve's hook: a replica took the call."""
        call = _call(pending_request)
        session = getattr(call, "session_id", None)
        if call is not None and call.number:
            # by name, and not as this module is loaded: the gateway's own, which what is shipped by value cannot hold
            from rollout_service.fleet.placements import PLACEMENTS

            PLACEMENTS.note(call.origin, call.number, replica_id.unique_id)
        self._ledger.arrive(pending_request.metadata.internal_request_id, replica_id.unique_id, session)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Serve's hook: the call is over."""
        self._ledger.complete(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's hook: replicas came, went, or published other stats."""
        for replica in replicas:
            stats = replica.routing_stats
            if stats:
                self._ledger.report(replica.replica_id.unique_id, stats["running"])
        self._ledger.keep_only({replica.replica_id.unique_id for replica in replicas}, time.monotonic())
        super().update_replicas(replicas)
        # by name, as in on_request_routed
        from rollout_service.fleet.placements import ROUTED_FLEET, RoutedReplica

        candidates = [self._candidate(replica) for replica in replicas]
        ROUTED_FLEET.update(
            {
                each.replica_id: RoutedReplica(each.state, each.version, self._ledger.others(each.replica_id))
                for each in candidates
            }
        )

    def _candidate(self, replica: RunningReplica) -> Candidate:
        replica_id, stats = replica.replica_id.unique_id, replica.routing_stats
        state, version = stats.get("state", "ready"), stats.get("version")
        load, turn = self._ledger.load(replica_id), self._ledger.turn(replica_id)
        capacity = stats.get("capacity", 0)
        is_full = load >= self._limit and self._ledger.own(replica_id) >= self._share
        return Candidate(replica_id, version, state, load, turn, capacity, is_full)


def _meant(pending_request: PendingRequest | None) -> str:
    """The replica that a ``ProgressAsk`` is for; else an empty string. One that is gone has nothing to tell."""
    argument = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return str(getattr(argument, "replica_id", ""))


def _call(pending_request: PendingRequest | None) -> "GenerateCall | None":
    """The ``GenerateCall`` of a pending request; None for calls of other methods."""
    argument = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return argument if hasattr(argument, "sampling") else None
