"""One case under load, and what came of it."""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from benchmarks.common.results import Json
from benchmarks.faults.ground import Case, Ground, Load, load

STEADY_S = 1.5  # load before the fault
EASE_S = 3.0  # full load goes on so long after the fault
RECOVERY_S = 180.0  # after which a case counts as not survived


@dataclass
class Outcome:
    """One line of the matrix."""

    name: str
    survived: bool = False
    recover_s: float | None = None
    stale_tokens: int = 0
    lost_requests: int = 0
    lost_versions: int = 0
    rollouts: int = 0
    kept_tokens: int = 0
    """Tokens that read keys and values of older versions than their own; 0 if every version drops the KV cache."""
    outage_s: float | None = None  # how long nobody was served, where the case measures it
    engine_start_s: float | None = None
    notes: list[str] = field(default_factory=list)  # what proves the moment of the fault, and what went wrong
    skipped: str = ""  # why this machine cannot run it; nothing was shown then

    async def count(self, place: Ground, rollouts: Load) -> None:
        """Fill in what came of the rollouts, what the case noted, and whether the newest version is lost."""
        self.rollouts, self.kept_tokens = rollouts.rollouts, rollouts.kept_tokens
        self.stale_tokens, self.lost_requests = len(rollouts.stale), len(rollouts.lost)
        self.notes += [*place.notes, *rollouts.stale[:3], *rollouts.lost[:3]]
        fleet = await place.fleet()
        self.lost_versions = int(fleet is None or fleet.latest_version < place.committed)


def is_clean(case: Json) -> bool:
    """Return True if the service survived the case, and nothing was stale or lost."""
    return case["survived"] and not any(case[name] for name in ("stale_tokens", "lost_requests", "lost_versions"))


async def run_case(place: Ground, case: Case) -> Outcome:
    """Load, fault, recovery, and the count."""
    outcome, rollouts = Outcome(case.name), Load()
    place.begin()
    async with AsyncExitStack() as stack:
        if case.concurrency:
            rollouts = await stack.enter_async_context(load(place.service.url, case.concurrency, place.kv_max_age))
            await asyncio.sleep(STEADY_S)
        started = time.perf_counter()
        try:
            await case.fault(place)
        except Exception as error:  # noqa: BLE001 - it stands in the table, and fails the run
            outcome.notes.append(f"{type(error).__name__}: {error}")
        asyncio.get_running_loop().call_later(EASE_S, rollouts.ease)
        outcome.recover_s = await place.recovered(started, RECOVERY_S)
        outcome.survived = outcome.recover_s is not None and not outcome.notes
    outcome.outage_s, outcome.engine_start_s = place.outage_s, place.engine_start_s
    await outcome.count(place, rollouts)
    return outcome
