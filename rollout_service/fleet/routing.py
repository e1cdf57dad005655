"""Routing of calls to replicas: by version and room, then session, then shared prefix, then load.

The state that replicas publish is seconds old, so the router only states preferences: the replica itself checks the
version and refuses what it cannot do, and the gateway sends the call to another one. The router never waits: Serve
routes with a few tasks, and a call that waited in one for its version would block all others. Calls wait in the gateway
(``fleet/queue.py``) instead, which the router notifies of other replicas or free room.

Serve ships this module to the gateway by value, so its top level imports nothing but the standard library and Ray.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

if TYPE_CHECKING:
    from rollout_service.protocol.adapters import WantedAdapter
    from rollout_service.protocol.sampling import GenerateCall

STATS_PERIOD_S = 1.0
"""Interval in seconds at which Serve requests routing stats of replicas."""
PREFIX_TOKENS = 512
"""Prompts that share a prefix of this many tokens, or a multiple, are routed to one replica, which has that prefix in
its prefix cache."""
MAX_PREFIX_TOKENS = 64 * PREFIX_TOKENS
"""Maximum number of tokens of a prompt that are considered."""
UNEVEN_SHARE = 4
"""A prefix's replica is not used if its load exceeds the lowest load by more than a quarter of its capacity."""
_LAST_RESORT = {"stale": 1, "asleep": 2, "draining": 2, "starting": 2, "failed": 3}
"""Order of states that are worse than ``ready`` and ``syncing``."""


@dataclass(frozen=True)
class Candidate:
    """The known state of one replica."""

    replica_id: str
    version: int | None = None
    """None: nothing is published yet, and the replica starts at the newest version."""
    state: str = "ready"
    load: int = 0
    """Number of sequences in flight."""
    turn: int = 0
    """Number of the choice in which it was last chosen."""
    capacity: int = 0
    """Maximum number of sequences that it decodes at once; 0: unknown."""
    has_adapter: bool = True
    """False if it lacks the call's adapter."""
    is_full: bool = False
    """True if it would refuse a call, since it holds its maximum number of sequences."""


def rank_replicas(
    candidates: Collection[Candidate],
    *,
    min_version: int | None = None,
    exact_version: int | None = None,
    session_replica: str | None = None,
    prefix_replica: str | None = None,
    sequences: int = 1,
    avoid: Collection[str] = (),
) -> list[str]:
    """Return the ids of all candidates, the best first. ``sequences``: number of the call's sequences.

    Criteria, in order: a healthy replica, one that the call has not failed on, one with the version, one with the
    adapter, one that is not full, the session's, the one that had the prompt's prefix (if it has room to decode the
    call at once), the lowest load, the one chosen longest ago. The last criterion spreads sessions that begin on an
    idle fleet.
    """
    lowest_load = min((candidate.load for candidate in candidates), default=0)

    def has_prefix(candidate: Candidate) -> bool:
        has_room = candidate.load + sequences <= candidate.capacity
        is_even = candidate.load <= lowest_load + candidate.capacity // UNEVEN_SHARE
        return candidate.replica_id == prefix_replica and has_room and is_even

    def cost(candidate: Candidate) -> tuple[bool, bool, bool, bool, int, bool, bool, bool, int, int, str]:
        version = candidate.version
        behind = min_version is not None and version is not None and version < min_version
        differs = exact_version is not None and version is not None and version != exact_version
        return (
            candidate.state == "failed",
            candidate.replica_id in avoid,
            behind or differs,
            not candidate.has_adapter,
            _LAST_RESORT.get(candidate.state, 0),
            candidate.is_full,
            candidate.replica_id != session_replica,
            not has_prefix(candidate),
            candidate.load,
            candidate.turn,
            candidate.replica_id,
        )

    return [candidate.replica_id for candidate in sorted(candidates, key=cost)]


def prefixes(prompt: Sequence[int], salt: str | None = None) -> tuple[int, ...]:
    """Return hashes of the prompt's prefixes of ``PREFIX_TOKENS`` and its multiples, the longest first.

    Equal within one process for the same tokens and ``salt``, which separates the prefix cache. A shorter prompt has
    none.
    """
    found, number = list[int](), hash(salt)
    for end in range(PREFIX_TOKENS, min(len(prompt), MAX_PREFIX_TOKENS) + 1, PREFIX_TOKENS):
        number = hash((number, *prompt[end - PREFIX_TOKENS : end]))
        found.append(number)
    return tuple(reversed(found))


class RolloutRouter(RequestRouter):
    """Serve's request router for the engine deployment; calls other than ``generate`` go to the least loaded
    replica."""

    # Serve's timeout for a replica's answer to a probe. With the default of 0.1 s, a busy machine lost sessions.
    queue_len_response_deadline_s = 1.0

    def initialize_state(self, limit: int, share: int, group: str | None = None) -> None:
        """Serve's hook after construction, with ``request_router_kwargs``.

        Args:
            limit: Number of sequences that a replica holds before it refuses.
            share: The part of the limit that is reserved for each gateway.
            group: The replicas' group in ``scaling.groups``; None: they belong to none.
        """
        # imported here, not at the top: an object of the gateway's process cannot be part of a module that is shipped
        # by value
        from rollout_service.runtime.placements import PLACEMENTS, Ledger

        self._ledger, self._limit, self._share, self._group = Ledger(), limit, share, group
        PLACEMENTS.add_ledger(self._ledger)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return one replica in each rank: within a rank Serve would count requests, not sequences."""
        argument = pending_request.args[0] if pending_request is not None and pending_request.args else None
        call: GenerateCall | None = argument if hasattr(argument, "sampling") else None  # None: another method's
        session = getattr(call, "session_id", None)
        self._ledger.origin = getattr(call, "origin", self._ledger.origin)
        adapter = None if call is None else call.adapter
        salt = None if call is None else f"{adapter} {call.cache_salt}" if adapter else call.cache_salt
        hashes = () if call is None else prefixes(call.prompt_token_ids, salt)
        order = rank_replicas(
            [self._candidate(replica, adapter) for replica in candidate_replicas],
            min_version=getattr(call, "min_weight_version", None),
            exact_version=getattr(call, "exact_weight_version", None),
            session_replica=self._ledger.replica_of(session),
            prefix_replica=self._ledger.replica_with(hashes),
            sequences=1 if call is None else call.sampling.n,
            avoid=getattr(call, "avoid", ()),
        )
        if call is not None and order:
            call_id = call.origin, call.number
            self._ledger.choose(call_id, order[0], call.sampling.n, session, time.monotonic(), hashes)
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        # a ``ProgressAsk`` names its replica; if that one has left, any may answer
        if (named := str(getattr(argument, "replica_id", ""))) in by_id:
            order = [named]
        return [[by_id[replica_id]] for replica_id in order]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's hook: replicas came, left, or published new stats."""
        for replica in replicas:
            stats = replica.routing_stats
            if stats:
                self._ledger.report(replica.replica_id.unique_id, stats["running"])
        self._ledger.keep_only({replica.replica_id.unique_id for replica in replicas}, time.monotonic())
        super().update_replicas(replicas)
        # imported here, as in initialize_state
        from rollout_service.runtime.placements import RoutedReplica, routed_fleet

        candidates = [self._candidate(replica) for replica in replicas]
        routed_fleet(self._group).update(
            {
                each.replica_id: RoutedReplica(each.state, each.version, self._ledger.others(each.replica_id))
                for each in candidates
            }
        )

    def _candidate(self, replica: RunningReplica, adapter: "WantedAdapter | None" = None) -> Candidate:
        replica_id, stats = replica.replica_id.unique_id, replica.routing_stats
        load = self._ledger.load(replica_id)
        held = stats.get("adapters")  # None: nothing is published yet, and it starts with all
        return Candidate(
            replica_id,
            version=stats.get("version"),
            state=stats.get("state", "ready"),
            load=load,
            turn=self._ledger.turn(replica_id),
            capacity=stats.get("capacity", 0),
            has_adapter=adapter is None or held is None or adapter.accepts(held.get(adapter.name, -1)),
            is_full=load >= self._limit and self._ledger.own(replica_id) >= self._share,
        )
